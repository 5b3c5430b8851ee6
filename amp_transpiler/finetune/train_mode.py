"""Layers that train differently from how they evaluate: BatchNormalization and Dropout, switched to training."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from amp_transpiler.errors import ArgumentTypeError
from amp_transpiler.ir.metadata import ASKED, SYNCHRONIZED
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.patterns import matching, matching_names
from amp_transpiler.ops.training.drawn import NUMBERED
from amp_transpiler.ops.training.random import MASK_ID
from amp_transpiler.ops.training.seeds import rng_state
from amp_transpiler.option_checks import choice, listed, share
from amp_transpiler.program import Program

#: In names of what TensorFlow's exporter makes of batch normalisations. Keras 2 computes other norms likewise.
_BATCH_NORM = re.compile(r"batch_?norm", re.IGNORECASE)
_OTHER_NORM = re.compile(r"(layer|group|instance)_?norm", re.IGNORECASE)
#: How batch normalisations train.
BATCH_NORM = ("train", "synchronized", "frozen")


def check_batch_norm(called: str, ways: object) -> None:
    """ArgumentError unless it is one of the :data:`BATCH_NORM` ways, or {pattern: one of them}."""
    if not isinstance(ways, Mapping):
        choice(called, ways, BATCH_NORM)
        return
    for pattern, way in ways.items():
        choice(f"{called} of {pattern!r}", way, BATCH_NORM)


def set_batch_norm(program: Program, ways: str | Mapping[str, str]) -> list[str]:
    """Let each BatchNormalization of the main graph train, or be frozen, in one of the :data:`BATCH_NORM` ways.

    ``ways``: one for all, or {pattern: way}: of those whose name or scope fits, or that of what they scale by; the
    last pattern counts, and the others train.
    """
    found = dict(_running(program))
    chosen = dict.fromkeys(found, ways if isinstance(ways, str) else "train")
    kind = f"BatchNormalization of program '{program.name}'"
    for pattern, way in ({} if isinstance(ways, str) else ways).items():
        required = pattern != "*"  # all of none is no mistake, as one way for all is none
        chosen |= dict.fromkeys(matching_names(found, [pattern], "batch_norm", _names, kind, required=required), way)
    trained = {op: states for op, states in found.items() if chosen[op] != "frozen"}
    for op in trained:
        if chosen[op] == "synchronized":
            op.metadata[SYNCHRONIZED] = ASKED
    notes = _freeze(program, [op for op in found if op not in trained])
    notes += _train(program, trained, ", over all ranks" if "synchronized" in chosen.values() else "")
    return notes if found or ways == "frozen" else _written_out(program)


def _names(op: Operator) -> list[str]:
    own = (op.scope, op.name, *(v.name for v in (*op.inputs[1:], *op.outputs) if v is not None))
    return [name for name in own if name]


def _train(program: Program, found: Mapping[Operator, Sequence[Variable]], over: str) -> list[str]:
    """Let them normalise by the batch, and update their running statistics.

    Those that were exported in training mode have no update of theirs. One that is called several times updates its
    statistics in each call, from where the call before left them.
    """
    latest: dict[Variable, Variable] = {}
    for op, states in found.items():
        op.attrs["training_mode"] = 1
        for slot, state in enumerate(states, 1):
            if state in latest:
                op.set_input(slot + 2, latest[state])
            new = op.output(slot)
            if new is None:
                new = program.fresh_variable(f"{state.name}@NEW", state.dtype, state.shape)
                op.set_output(slot, new)
            state.trainable = False
            new.stop_gradient = True  # the call behind reads it
            latest[state] = new
    for state, new in latest.items():
        program.set_update(state, new)
    count = len(found)
    return [f"{count} BatchNormalization train with the statistics of the batch{over}"] if count else []


def _written_out(program: Program) -> list[str]:
    """Say where batch normalisations were, if names tell that the exporter made products and sums of them."""
    names = [v.name for v in program.parameters if _BATCH_NORM.search(v.name) and not _OTHER_NORM.search(v.name)]
    if not names or any(op.type == "BatchNormalization" for op in program.operators):
        return []
    return [
        f"{listed(names)}: of batch normalisations that the exporter wrote out or folded. They do not train with the "
        "statistics of the batch; what is left of them trains as scale and shift"
    ]


def _freeze(program: Program, found: Collection[Operator]) -> list[str]:
    """Let those that were exported in training mode normalise by their running statistics."""
    count = 0
    for op in found:
        made = [op.output(slot) for slot in (1, 2)]
        if op.attrs.get("training_mode", 0) and not any(
            v is not None and (v.readers or v in program.outputs) for v in made
        ):
            op.attrs["training_mode"] = 0
            for slot, variable in zip((2, 1), reversed(made), strict=True):
                if variable is not None:
                    op.set_output(slot, None)
                    program.remove_variable(variable)
            count += 1
    return [f"{count} BatchNormalization leave training mode: running statistics are used"] if count else []


def _running(program: Program) -> Iterator[tuple[Operator, list[Variable]]]:
    """Each BatchNormalization whose statistics are state that nothing updates yet, and that state."""
    for op in program.operators:
        if op.full_type == "BatchNormalization":
            states = [v for v in (op.input(3), op.input(4)) if v is not None and v.persistable]
            if len(states) == 2 and not any(state in program.updates for state in states):
                yield op, states  # statistics that are computed, or folded away, are no state


def train_dropout(program: Program) -> list[str]:
    """Switch Dropout operators that stand in the program as they evaluate to training, with their own ratio."""
    found = [op for op in program.operators if op.full_type == "Dropout" and op.input(2) is None]
    for op in found:
        _switch_on(op)
    return [f"{len(found)} Dropout are switched on"] if found else []


def number_draws(program: Program) -> list[str]:
    """Let what the model draws at random follow from the program's seed and step, as masks of dropout do.

    In a nested graph that stays every turn would draw the same.
    """
    found = [op for op in program.operators if op.full_type in NUMBERED]
    for op in found:
        out = op.output(0)
        assert out is not None
        rng_state(program)
        op.metadata[MASK_ID] = str(out.key)
    kinds = ", ".join(dict.fromkeys(op.type for op in found))
    return [f"{len(found)} operators ({kinds}) draw by the program's seed"] if found else []


def insert_dropout(program: Program, rates: Mapping[str, float]) -> list[str]:
    """Put a Dropout behind each operator that a pattern matches; ``rates``: pattern -> probability of a zero."""
    if not isinstance(rates, Mapping):
        raise ArgumentTypeError(
            f"dropout is {rates!r}; expected {{pattern: rate}}, as in {{'*/attention/*Softmax': 0.1}}"
        )
    for pattern, rate in rates.items():
        share(f"dropout: the rate of {pattern!r}", rate)
    notes = []
    forward = program.operators
    for pattern, rate in rates.items():
        hits = [op for op in matching(forward, [pattern], "dropout") if _made(op) is not None]
        for op in hits:
            _insert(op, float(rate))
        notes.append(f"{len(hits)} Dropout of {rate:g} behind {pattern!r}")
    return notes


def _made(op: Operator) -> Variable | None:
    """The float that the operator makes, where something reads it."""
    out = op.output(0)
    return out if out is not None and out.dtype in ("float32", "float16", "bfloat16") and out.readers else None


def _insert(op: Operator, rate: float) -> None:
    program, value = op.program, _made(op)
    assert value is not None
    readers = [reader for reader, _ in value.readers]
    dropped = program.fresh_variable(f"{value.name}.dropout", value.dtype, value.shape)
    program.replace_uses(value, dropped)
    ratio = program.add_constant(f"{value.name}.dropout_ratio", np.array(rate, np.float32))
    new = program.add_operator("Dropout", [value, ratio], [dropped])
    new.scope, new.guard = op.scope, op.guard and any(reader.guard for reader in readers)
    _switch_on(new)


def _switch_on(op: Operator) -> None:
    program, out = op.program, op.output(0)
    assert out is not None
    rng_state(program)
    if op.input(1) is None:
        op.set_input(1, program.add_constant(f"{out.name}.ratio", np.array(0.5, np.float32)))
    op.set_input(2, program.add_constant(f"{out.name}.training", np.array(True)))
    if op.output(1) is None:
        op.set_output(1, program.fresh_variable(f"{out.name}.mask", "bool", out.shape))
    mask = op.output(1)
    assert mask is not None
    op.metadata[MASK_ID] = str(mask.key)
