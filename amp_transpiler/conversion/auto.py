"""Auto mode: what calibration data shows to be unsafe in 16 bit stays fp32, and the outputs keep to a tolerance.

The model runs in fp32 and, bit-faithfully, in 16 bit: that says which tensors leave the format or sink below it. Where
the outputs then miss the tolerance, one session in which every operator can be switched (:mod:`.runtime.switches`)
tells what operators add to the error, and a search on a budget of runs (:mod:`.bisection`) which return to fp32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from amp_transpiler.conversion.bisection import BUDGET, CHOOSING, RETURNING, Bisection, Found
from amp_transpiler.conversion.calibration.as_given import measurable, outputs_as_given, session_as_given
from amp_transpiler.conversion.calibration.measure import Measurement, measure, outputs_of
from amp_transpiler.conversion.calibration.own_steps import own_steps
from amp_transpiler.conversion.calibration.samples import load_calibration
from amp_transpiler.conversion.calibration.trials import Trials
from amp_transpiler.conversion.conversion_options import OPTIONS, ConversionOptions
from amp_transpiler.conversion.io_types import io_to_narrow
from amp_transpiler.conversion.report.record import RangeRecord
from amp_transpiler.conversion.steps import ASSIGNMENT, CONSTRAINTS, assigned, check_names, constraints_of, remarks
from amp_transpiler.conversion.verdict import CALIBRATION, Verdict, beyond
from amp_transpiler.errors import ArgumentTypeError
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.ir.types import LIMITS
from amp_transpiler.option_checks import counted
from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.passes.numerics.masks import Masks
from amp_transpiler.passes.numerics.saturation import saturated
from amp_transpiler.passes.partition.assign_precision import Assignment
from amp_transpiler.passes.pipeline import Context, Pass, Property, Value
from amp_transpiler.passes.view.constants import saturate
from amp_transpiler.passes.view.flow import Flow
from amp_transpiler.program import Program
from amp_transpiler.runtime.budget import calibration_budget, within

#: A tensor that comes this near to the largest number is taken to leave the format: other data may reach further.
MARGIN = 2.0
#: Relative error of storing a tensor, as a multiple of the type's epsilon (sixteen times that of one rounding), from
#: which on its numbers sink below the format.
SINKS = 8.0
#: Share of the tolerance that the search aims at: the conversion that it leads to may differ in single operators.
ROOM = 0.97
#: Conversions that are tried, each after the first for a tolerance that is tighter by this factor at least. Where a
#: model enlarges errors, single roundings decide how far off it is, and few that are different may undo a choice.
TRIES, TIGHTER = 5, 0.85
#: Samples, spread over all, that the search runs on; its result is measured on all.
SAMPLES = 8


class Stage(str):
    """A line about what is done next, with the number of this run and of all runs at most."""

    done: int
    total: int

    def __new__(cls, line: str, done: int, total: int) -> Stage:
        self = super().__new__(cls, line)
        self.done, self.total = done, total
        return self


@dataclass
class Outcome:
    """A converted program, and what was measured on the way."""

    program: Program
    constraints: Constraints | None
    assignment: Assignment
    operators: list[Operator] = field(default_factory=list)
    rounds: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    measurement: Measurement | None = None
    verdict: Verdict | None = None
    expected: Sequence[Sequence[Any]] | None = None
    batches: Sequence[dict[str, np.ndarray]] = ()

    def ranges(self) -> tuple[RangeRecord, ...]:
        """What was measured of each tensor, in program order."""
        tensors = self.measurement.tensors if self.measurement else {}
        return tuple(
            RangeRecord(name, t.largest, t.smallest, t.rounding, t.error, t.finite) for name, t in tensors.items()
        )


#: What the search found.
SEARCHED: Value[Outcome] = Value("searched", Outcome)
#: The model before any preparation, by which outputs are judged; the program itself where it is left out.
ORIGINAL: Value[Program] = Value("original", Program)


def search(
    program: Program, batches: Sequence[dict[str, np.ndarray]], options: ConversionOptions, original: Program | None
) -> Outcome:
    """The conversion of ``program``, which is left as it is: in auto mode the one that keeps to the tolerance on the
    batches, in the others, in two runs at most, the one without what does not fit the format on them.

    Its verdict is on the outputs of ``original``, the model before any preparation (None: of ``program``). Where no
    conversion keeps to the tolerance, the verdict and the last round say so.
    """
    return _Search(program, batches, options, original).run()


class _Search:
    def __init__(
        self,
        program: Program,
        batches: Sequence[dict[str, np.ndarray]],
        options: ConversionOptions,
        original: Program | None,
    ) -> None:
        self.program, self.batches, self.options, self.dtype = program, batches, options, options.dtype
        self.tolerance = math.inf if options.allowed is None else options.allowed
        self.tensors: dict[str, Reason] = {}
        self.rounds: list[str] = []
        self.notes: list[str] = []
        most = 4 + BUDGET + TRIES + (TRIES - 1) * (CHOOSING + RETURNING)
        self.runs, self.most = 0, most if options.searches else 2
        self.expected = (
            outputs_of(program, batches)
            if original is None
            else outputs_as_given(original, batches, session_as_given(original))
        )
        measurable(program, self.expected, CALIBRATION)
        self.reference = _saturated(program, options)

    def run(self) -> Outcome:
        """The conversion."""
        first = self._measured(self._converted({}))
        assert first.measurement is not None
        self.tensors = unsafe(first.measurement, self.dtype, margins(self.program, self.dtype))
        if self.tensors:
            self._note(first, f"; {len(self.tensors)} tensors do not fit {self.dtype}")
            first = self._measured(self._converted({}))
        if not _judged(first).met:
            self.notes += own_steps(self.program, self.batches, self.dtype)
        if not self.options.searches or _judged(first).met:
            self._note(first, f", within {self.tolerance:g}" if self.options.searches else "")
            return first
        self._note(first, f", above {self.tolerance:g}: operators return to float32")
        everything = {i: Reason(Kind.TOGETHER) for i, op in enumerate(first.operators) if op.precision == self.dtype}
        last = self._measured(self._converted(everything), tensors=False)
        if not _judged(last).met:
            why = _why(*_judged(last).worst)
            self._note(last, f": nothing is left to return to float32, so that {self.tolerance:g} cannot be met{why}")
            return self._measured(last, why=self.rounds[-1])
        return self._chosen(first, last)

    def _chosen(self, first: Outcome, last: Outcome) -> Outcome:
        """Between the conversion that keeps nothing and the one that keeps all that it can."""
        free = [
            i
            for i, (op, back) in enumerate(zip(first.operators, last.operators, strict=True))
            if op.precision == self.dtype != back.precision
        ]
        names = [v.name for v in self.program.outputs]
        some = slice(None, None, math.ceil(len(self.batches) / SAMPLES))
        trials = Trials(
            list(self.reference.walk()),
            first.operators,
            free,
            first.program,
            self.dtype,
            self.batches[some],
            self.expected[some],
            names,
        )
        missed = _judged(first).missed
        worst: dict[frozenset[int], str] = {}

        def error(kept: frozenset[int]) -> float:
            self._progress(f"{len(trials.units) - len(kept)} of {len(trials.units)} operators in {self.dtype}")
            found = trials.errors(kept)
            worst[kept] = max(missed, key=lambda name: beyond(found[name]))
            return found[worst[kept]]

        search, limit = Bisection(trials.units, error), ROOM * self.tolerance
        for _ in range(TRIES):
            found = search.find(limit)
            if len(found.kept) == len(trials.units):
                break
            outcome = self._measured(self._converted(self._reasons(found, trials, worst)), tensors=False)
            if _judged(outcome).met:
                self._note(outcome, f", within {self.tolerance:g} ({trials.runs} runs)")
                return self._measured(outcome)
            self._note(outcome, f", above {self.tolerance:g}: more return")
            limit *= min(self.tolerance / beyond(_judged(outcome).worst[1]), TIGHTER)
        least = min(search.groups, key=lambda group: group.error)
        adds = f"{_count(least.members)}, adds {_percent(least.error)} by itself"
        self._note(
            last,
            f", within {self.tolerance:g}; no choice that leaves more does: of {len(search.groups)} "
            f"groups the one that adds least, {adds} ({trials.runs} runs)",
        )
        return self._measured(last)

    def _reasons(self, found: Found, trials: Trials, worst: Mapping[frozenset[int], str]) -> dict[int, Reason]:
        """Why each operator that is chosen stays fp32, by its place."""
        reasons: dict[int, Reason] = {}
        for group in found.groups:
            name = worst.get(frozenset(trials.units) - set(group.members), worst[frozenset()])
            beside = f"with {_count(group.members[1:])} beside it" if len(group.members) > 1 else "by itself"
            why = Reason(Kind.ADDS, name, (_percent(group.error), beside))
            reasons.update((i, why) for i in group.members if i in found.kept)
        for i in trials.closed(found.kept) - found.kept:
            reasons[i] = Reason(Kind.HANDS_ON)
        return reasons

    # -- one conversion ----------------------------------------------------------------------------------
    def _converted(self, kept: Mapping[int, Reason]) -> Outcome:
        """The conversion with these operators, by their place, in fp32."""
        copy = self.program.clone()
        operators = list(copy.walk())
        constraints = constraints_of(copy, self.options)
        if constraints is not None:
            for name, why in self.tensors.items():
                constraints.keep_tensor(copy.var(name), why)
            for i, why in kept.items():
                constraints.keep(operators[i], why)
        made = assigned(copy, constraints, self.options)
        return Outcome(copy, constraints, made, operators, self.rounds, self.notes, expected=self.expected)

    def _measured(self, outcome: Outcome, *, tensors: bool = True, why: str = "") -> Outcome:
        self._progress(f"{_operators(outcome.program, self.dtype)} operators in {self.dtype}")
        known = outcome.measurement.outputs if outcome.measurement is not None else None
        found = measure(
            self.reference,
            outcome.program,
            self.batches,
            self.dtype,
            expected=self.expected,
            outputs=known,
            tensors=tensors,
        )
        outcome.measurement = found
        outcome.verdict = Verdict(found.outputs, CALIBRATION, self.options.allowed, why)
        return outcome

    def _note(self, outcome: Outcome, what: str) -> None:
        name, error = _judged(outcome).worst
        self.rounds.append(
            f"{_operators(outcome.program, self.dtype)} operators in {self.dtype}; worst output "
            f"'{name}': error {error:.3g}{what}"
        )

    def _progress(self, what: str) -> None:
        self.runs += 1
        line = f"run {self.runs} of at most {self.most} on {counted(len(self.batches), 'sample')}: {what}"
        self.options.tell(Stage(line, self.runs, self.most))


def _judged(outcome: Outcome) -> Verdict:
    assert outcome.verdict is not None
    return outcome.verdict


def _saturated(program: Program, options: ConversionOptions) -> Program:
    """The program with the masks that a conversion saturates: their fp32 values would count as an overflow."""
    copy = program.clone()
    constraints = constraints_of(copy, options)
    for variable, value in (constraints.replaced if constraints else {}).items():
        saturate(variable, value)
    return copy


def margins(program: Graph, dtype: str) -> dict[str, float]:
    """By how much a tensor's largest number may not come near the format's, where that is not :data:`MARGIN`.

    A mask takes what there is, with what is added to it; what ends in a tanh of 1 may be infinite.
    """
    masks = Masks(Flow(program), dtype)
    found = {variable.name: 1.0 for variable in masks.summands}
    return found | {variable.name: 0.0 for variable in saturated(masks.flow, masks.limit)}


def unsafe(found: Measurement, dtype: str, special: Mapping[str, float]) -> dict[str, Reason]:
    """Tensors that the data shows not to fit the format, with the reason; ``special``: their :func:`margins`."""
    reasons: dict[str, Reason] = {}
    limits = LIMITS[dtype]
    for name, t in found.tensors.items():
        margin = special.get(name, MARGIN)
        if t.largest * margin > limits.largest and math.isfinite(t.largest):
            detail = (f"{t.largest:.3g}", dtype, f"{limits.largest:.5g}")
            reasons[name] = Reason(Kind.REACHES, name, detail)
        elif t.rounding > SINKS * limits.epsilon:
            detail = (dtype, f"{t.rounding:.0%}", f"{t.largest:.2g}")
            reasons[name] = Reason(Kind.SINKS, name, detail)
    return reasons


def _operators(program: Program, dtype: str) -> int:
    return sum(op.precision == dtype and op.type != "Cast" for op in program.walk())


def _count(operators: Sequence[int]) -> str:
    return counted(len(operators), "operator")


def _percent(error: float) -> str:
    return f"{100 * error:.2g} %" if math.isfinite(error) else "what is not finite"


def _why(output: str, error: float) -> str:
    if not math.isfinite(error):
        return f" (the model itself gives numbers that are not finite at '{output}')"
    return " (the rest is what inputs and outputs in 16 bit, or operators that have no fp32 form, lose)"


class Search(Pass):
    """Calibration data decides: what does not fit the type on it stays fp32, and in auto mode what adds most error."""

    name = "search"
    needs = (Property.TYPED, Property.CONSTANTS, OPTIONS)
    takes = (ORIGINAL,)
    guarantees = (Property.PRECISION, SEARCHED)

    def run(self, graph: Graph, context: Context) -> None:
        if not isinstance(graph, Program):
            raise ArgumentTypeError(f"search runs an amp.Program, not the graph '{graph.name}'")
        options = context[OPTIONS]
        check_names(graph, options)
        io_to_narrow(graph, options)
        batches = load_calibration(options.calibration, graph)
        with within(calibration_budget(graph, batches, options.time_budget, options.memory_budget)):
            outcome = search(graph, batches, options, context.get(ORIGINAL))
        outcome.batches = batches
        graph.exchange(outcome.program)
        context[SEARCHED], context[CONSTRAINTS] = outcome, outcome.constraints
        context[ASSIGNMENT] = outcome.assignment
        context.notes += [*outcome.notes, *remarks(graph, options, outcome.assignment)]
