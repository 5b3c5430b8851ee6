"""Startup programs: what of them is known, what is a copy of that, and what takes a session."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from amp_transpiler.ir.metadata import INITIALIZER
from amp_transpiler.ir.nodes import OWN, Operator, Variable
from amp_transpiler.ir.tensors import tensor_array
from amp_transpiler.lists import place_traits
from amp_transpiler.ops.training.initializers import CONSTANT, constant_content, takes_one_thread
from amp_transpiler.passes.lowering.place import Place
from amp_transpiler.program import Program
from amp_transpiler.runtime import device_tensors
from amp_transpiler.runtime.dealt import dealt_variables, hold_rows, own_rows
from amp_transpiler.runtime.session import Settings
from amp_transpiler.runtime.shards import elsewhere


def _initialised(op: Operator) -> Variable | None:
    """The variable that a startup operator sets to what is known without a session; None for another operator."""
    return op.output(0) if op.type in (INITIALIZER, CONSTANT) and op.domain == OWN else None


@dataclass(frozen=True)
class StartupParts:
    """What a startup program does: ``arrays`` are set to what is known; ``rest`` is run (None: nothing is left of it);
    then of each of the ``copies`` the first variable takes the value of the second.

    ``held``: ``rest`` makes of rows that are dealt out this rank's alone.
    """

    arrays: list[Variable]
    rest: Program | None
    copies: list[tuple[str, str]]
    held: bool

    def known(self) -> dict[str, Any]:
        """The values of what is set to what is known."""
        return {v.name: device_tensors.from_array(_content(v, self.held)) for v in self.arrays}

    def made(self, values: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
        """What the program makes, from the values that there are when ``rest`` has run, and those of before.

        It is on the host, for a step puts most of it on the device in buffers of many variables. If it lay there by
        itself already, there would be twice as much at once, and what is freed then is in pieces.
        """
        found = {n: device_tensors.on_host(v) for n, v in values.items() if v is not before.get(n)}
        for target, source in self.copies:
            found[target] = device_tensors.copy_to(found[source])
        return found


def startup_parts(program: Program, fetched: Collection[int | str] = ()) -> StartupParts:
    """A startup program in parts, without what other ranks hold and nobody reads. What is ``fetched`` is no copy.

    A session that makes thousands of masters of their parameters takes far longer to come about than the copies.
    """
    others = elsewhere(program)
    arrays = [
        v for op in program.operators if (v := _initialised(op)) is not None and (v.name not in others or v.readers)
    ]
    dealt = bool(dealt_variables(program))
    copies = [] if dealt else [names for op in program.operators if (names := _copied(op, fetched, others))]
    if not others and len(arrays) + len(copies) == len(program.operators):
        return StartupParts(arrays, None, copies, dealt)
    if not others and not arrays and not dealt and not copies:
        return StartupParts(arrays, program, [], False)
    rest, given = program.clone(), {target for target, _ in copies}
    for op in reversed(rest.operators):
        left = all(v is None or v.name in given or (v.name in others and not v.readers) for v in op.outputs)
        if left or _initialised(op) is not None:
            rest.remove_operator(op)
    held = dealt and hold_rows(rest)
    here = [(target, source) for target, source in copies if target not in others]
    return StartupParts(arrays, rest if rest.operators else None, here, held)


def startup_settings(settings: Settings, program: Program, place: Place) -> Settings:
    """How the session of a startup program is made: it draws the same numbers on any machine, and runs once."""
    one = place_traits(place.kind).host and takes_one_thread(program.operators)
    return replace(settings, cuda_graph=False, threads=1 if one else settings.threads)


def _copied(op: Operator, fetched: Collection[int | str], others: Collection[str]) -> tuple[str, str] | None:
    """The variable that a startup operator gives the value of another one that the program writes, and this one.

    None where an operator reads it.
    """
    source, target = (op.input(0), op.outputs[0]) if op.full_type == "Identity" else (None, None)
    if source is None or target is None or not (source.persistable and target.persistable):
        return None
    apart = source.producer is None or target.readers or target.name in fetched or source.name in others
    return None if apart or target.dtype is None or source.dtype != target.dtype else (target.name, source.name)


def _content(variable: Variable, held: bool) -> np.ndarray:
    """What the startup operator sets an initialised variable to; ``held``: what this rank keeps of it."""
    op = variable.producer
    content = constant_content(op) if op is not None and op.type == CONSTANT else tensor_array(variable)
    return own_rows(variable, content) if held else content
