"""A converted program in one session, in which any of its 16-bit operators can run in fp32 from one run to the next."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from amp_transpiler.conversion.calibration.measure import Batch, Runner, floors
from amp_transpiler.conversion.calibration.statistics import Difference
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import lookup
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.ir.types import HALF
from amp_transpiler.passes.canonicalize.opset import convert_opset
from amp_transpiler.passes.lowering.lowered import Lowered
from amp_transpiler.passes.lowering.switches import FIXED, FULL, Switches, add_switches, constant_pairs, neighbours
from amp_transpiler.passes.view import constants
from amp_transpiler.passes.view.names import source
from amp_transpiler.passes.view.typing import programs
from amp_transpiler.program import Program
from amp_transpiler.runtime import device_tensors
from amp_transpiler.runtime.binding import PlainStep, Step
from amp_transpiler.runtime.scope import Scope

#: The first opset with the operator that switches.
_SWITCHES = 9


class Trials:
    """Runs of a conversion with operators returned to fp32, and the error of its outputs.

    Args:
        before: the operators of the fp32 program, nested ones too.
        after: what became of each in ``converted``, a program of opset 7 or later. Variables of its nested graphs
            are renamed where two have the same name.
        free: positions in both of operators that run in 16 bit, and in fp32 where the caller chooses so.
        batches: feeds, as :func:`.measure.measure` takes them.
        expected: what the outputs should be on each batch.
        names: of the outputs.

    ``units``: of the positions those to choose among. The others of ``free`` only move numbers: each goes with what
    it lies between. ``runs`` counts the runs over all batches.
    """

    def __init__(
        self,
        before: Sequence[Operator],
        after: Sequence[Operator],
        free: Collection[int],
        converted: Program,
        dtype: str,
        batches: Sequence[Batch],
        expected: Sequence[Sequence[Any]],
        names: Sequence[str],
    ) -> None:
        self.batches, self.expected = batches, expected
        least = floors(converted)
        self._floors = {name: least[name] for name in names}
        _tell_apart(converted)
        chosen = set(free)
        movers = {i for i in chosen if _moves(after[i])}
        self.units = sorted(chosen - movers)
        self._movers = _Movers(converted, after, chosen, movers)
        exact = constant_pairs(zip(before, after, strict=True))
        self._runner = _Runner(converted, dtype, names, _tags(after, chosen), exact)
        self.runs = 0

    def errors(self, kept: Collection[int]) -> dict[str, float]:
        """The error of each output with ``kept`` in fp32, and all other units in 16 bit."""
        self.runs += 1
        self._runner.choose(self.closed(kept))
        found = {name: Difference(floor) for name, floor in self._floors.items()}
        for exact, batch in zip(self.expected, self.batches, strict=True):
            for difference, one, other in zip(found.values(), exact, self._runner.run(batch), strict=True):
                difference.add(one, other)
        return {name: difference.error for name, difference in found.items()}

    def closed(self, kept: Collection[int]) -> set[int]:
        """``kept`` and the operators between them that only move numbers."""
        return self._movers.between(set(kept))


class _Movers:
    """Operators that hand numbers on: they store fp32 where one before them makes, and one behind them takes it.

    An operator with nested graphs hands on what these give, and comes before them in the order of ``operators``.
    """

    def __init__(self, program: Program, operators: Sequence[Operator], free: set[int], movers: set[int]) -> None:
        number = {op: i for i, op in enumerate(operators)}
        self.order = sorted(movers)
        self.before: dict[int, list[int]] = {i: [] for i in self.order}
        self.behind: dict[int, list[int]] = {i: [] for i in self.order}
        for op, makers in neighbours(operators).items():
            here = number[op]
            for maker in makers:
                there = _place(maker, number, free)
                if here in movers:
                    self.before[here].append(there)
                if there in movers:
                    self.behind[there].append(here if here in free else _fixed(op))
        for variable in program.outputs:
            maker = source(variable).producer
            if maker is not None and number.get(maker, FIXED) in movers:
                self.behind[number[maker]].append(FULL)

    def between(self, kept: set[int]) -> set[int]:
        given, taken = _reached(kept, self.before), _reached(kept, self.behind)
        return kept | (given & taken & set(self.order))


def _reached(kept: set[int], from_: Mapping[int, list[int]]) -> set[int]:
    """``kept``, what runs in fp32 anyway, and every mover that one of them leads to by way of movers."""
    leads: dict[int, list[int]] = {}
    for mover, ends in from_.items():
        for end in ends:
            leads.setdefault(end, []).append(mover)
    found, stack = kept | {FULL}, [*kept, FULL]
    while stack:
        for mover in leads.get(stack.pop(), ()):
            if mover not in found:
                found.add(mover)
                stack.append(mover)
    return found


def _place(op: Operator | None, number: Mapping[Operator, int], free: set[int]) -> int:
    if op is None:
        return FULL
    here = number.get(op, FIXED)
    return here if here in free else _fixed(op)


def _fixed(op: Operator) -> int:
    return FIXED if any(v is not None and v.dtype in HALF for v in op.outputs) else FULL


def _moves(op: Operator) -> bool:
    found = lookup(op)
    return (found is not None and found.exact) or bool(op.attrs.programs)


def _tags(operators: Sequence[Operator], free: set[int]) -> dict[str, int]:
    """The number of each operator, or that it has none, by what it makes."""
    return {
        v.name: i if i in free else _fixed(op) for i, op in enumerate(operators) for v in op.outputs if v is not None
    }


def _tell_apart(program: Program) -> None:
    """Rename variables of nested graphs where graphs side by side use a name twice."""
    taken: set[str] = set()
    for each in programs(program):
        for variable in list(each.variables):
            if variable.outer is None and variable.name in taken:
                number = next(i for i in itertools.count() if f"{variable.name}@{i}" not in taken)
                each.rename_variable(variable, f"{variable.name}@{number}")
            if variable.outer is None:
                taken.add(variable.name)


class _Runner(Runner):
    """The program with its switches among the states, for feeds of every shape that came."""

    def __init__(
        self,
        program: Program,
        dtype: str,
        fetches: Sequence[str],
        tags: Mapping[str, int],
        exact: Mapping[str, Variable],
    ) -> None:
        if program.opset() < _SWITCHES:
            program = program.clone()
            convert_opset(program)
        super().__init__(program, fetches, embedded=0)
        self.dtype, self.tags, self.exact = dtype, tags, exact
        self.rounded = {
            v.name: v for each in programs(program) for v in each.variables if v.outer is None and v.name in exact
        }
        scope = Scope()
        scope.hold(self.scope.ort_values)
        self.scope = scope
        self.flags = {flag: device_tensors.from_array(np.asarray(flag)) for flag in (False, True)}
        self.arrays: dict[tuple[str, bool], tuple[np.ndarray, Any]] = {}
        self.found: dict[tuple[tuple[str, tuple[int, ...]], ...], tuple[Step | PlainStep, Switches]] = {}
        self.switches = Switches()
        self.kept: set[int] = set()

    def choose(self, kept: set[int]) -> None:
        """Let these operators run in fp32 from now on."""
        self.kept = kept
        self._set()

    def lowered(self, shapes: dict[str, tuple[int, ...]]) -> Lowered:
        lowered = super().lowered(shapes)
        self.switches = add_switches(lowered, self.dtype, self.tags, self.rounded)
        return lowered

    def _compiled(self, shapes: dict[str, tuple[int, ...]]) -> Step | PlainStep:
        key = tuple(sorted(shapes.items()))
        if key not in self.found:
            self.found[key] = super()._compiled(shapes), self.switches
        step, self.switches = self.found[key]
        self._set()
        return step

    def _set(self) -> None:
        self.scope.hold({tensor: self.flags[units <= self.kept] for tensor, units in self.switches.roundings.items()})
        weights = self.switches.weights.items()
        self.scope.hold({tensor: self._weight(name, reader in self.kept) for tensor, (name, reader) in weights})

    def _weight(self, name: str, exact: bool) -> Any:
        if (name, exact) not in self.arrays:
            data = constants.content(self.exact[name] if exact else self.rounded[name])
            array = np.require(as_array(data).astype(np.float32, copy=False), requirements=["C", "A"])
            self.arrays[name, exact] = array, device_tensors.alias(array, "float32")
        return self.arrays[name, exact][1]
