"""``amp.find_culprit``: which operator of a bad training step made the first number that is not finite."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.monitor.finiteness_probes import floats, nonfinite, reads
from amp_transpiler.monitor.rerun import Rerun
from amp_transpiler.monitor.step_snapshot import load_step
from amp_transpiler.monitor.suggested_fixes import Cure, forward_of, tried
from amp_transpiler.passes.lowering.lowered import needed
from amp_transpiler.passes.view.names import label
from amp_transpiler.passes.view.training_step import TrainingStep, training_step
from amp_transpiler.program import Program
from amp_transpiler.runtime.executor import Executor
from amp_transpiler.runtime.scope import Scope, check_scope


@dataclass(frozen=True)
class Range:
    """The values of one tensor. ``min``, ``max`` and ``absmax`` are over its finite numbers, None without any."""

    variable: str
    dtype: str
    shape: tuple[int, ...]
    min: float | None
    max: float | None
    absmax: float | None
    nan: int
    inf: int

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        bad = [f"{count} {what}" for count, what in ((self.nan, "NaN"), (self.inf, "infinite")) if count]
        extent = "no finite number"
        if self.absmax is not None:
            extent = f"{self.min:.4g} … {self.max:.4g}, absmax {self.absmax:.4g}"
        return f"'{self.variable}' {self.dtype}[{shape}]: {extent}{''.join(f', {b}' for b in bad)}"


@dataclass(frozen=True)
class Culprit:
    """Where the first number that is not finite came from.

    ``kind``: "operator"; or "feed", "parameter", "state", "constant" where ``variable`` was not finite to begin with.
    ``operator``, ``type``, ``role`` ("forward", "backward", "loss_scaling"), ``scope``, ``precision`` and ``reason``
    are those of the operator ("" for another kind). ``inputs`` and ``output`` are ranges of its floating-point
    tensors. ``others`` names operators that went wrong on their own account later in the step. ``loss_finite``: whether
    the loss itself is (None: not known). ``loss_scaling``: the scale of the step, None without one.
    """

    kind: str
    variable: str
    operator: str = ""
    type: str = ""
    role: str = ""
    scope: str = ""
    precision: str = ""
    reason: str = ""
    inputs: tuple[Range, ...] = ()
    output: Range | None = None
    others: tuple[str, ...] = ()
    loss_finite: bool | None = None
    loss_scaling: float | None = None
    cures: tuple[Cure, ...] = ()

    def __str__(self) -> str:
        lines = [self._headline()]
        lines += [f"  reads {r}" for r in self.inputs]
        if self.output is not None:
            lines.append(f"  {'makes' if self.kind == 'operator' else 'holds'} {self.output}")
        if self.loss_finite is not None:
            scale = "" if self.loss_scaling is None else f"; loss scale {self.loss_scaling:.10g}"
            lines.append(f"  the loss itself is {'finite' if self.loss_finite else 'not finite'}{scale}")
        lines += [f"  {cure}" for cure in self.cures]
        if self.others:
            some = ", ".join(f"'{name}'" for name in self.others[:3])
            lines.append(f"  on their own account, later: {some}{' …' if len(self.others) > 3 else ''}")
        return "\n".join(lines)

    def _headline(self) -> str:
        if self.kind != "operator":
            return f"{self.kind} '{self.variable}' is not finite before the step begins"
        where = f", scope {self.scope}" if self.scope else ""
        why = f", {self.precision or 'its own precision'} ({self.reason})" if self.reason else ""
        return f"{self.role} operator '{self.operator}' ({self.type}{where}{why}) makes '{self.variable}' not finite"


def find_culprit(
    program: Program | str | os.PathLike[str],
    feed: Mapping[Any, Any] | None = None,
    scope: Scope | None = None,
    *,
    executor: Executor | None = None,
    before: Mapping[str, Any] | None = None,
    cures: bool = True,
) -> Culprit | None:
    """Run a step again with every float variable watched, and name where its first number that is not finite came from.

    That is, in the order of execution, the first operator, forward or backward, that reads finite numbers, makes one
    that is not, and from which such numbers reach a gradient (or the loss, or an output, where the program has none).
    A mask of -infinity that a softmax takes away again is no culprit. A feed or a persistable variable that holds NaN
    or infinity to begin with is named as such. An operator of this package (``LayerNormalizationGrad``) and one with
    nested graphs are one operator here.

    Args:
        program: a training program, or any other; or the path of a step that :func:`save_step` wrote, which brings
            feed and scope.
        feed: as it was given to ``Executor.run``.
        scope: its state (default: ``global_scope()``), which stays as it is.
        executor: on whose place, and with whose settings, to run; one on ``CPUPlace()`` by default.
        before: values by name that the bad step found, where they are others than those that ``scope`` holds now. A
            bad step changes the loss scale, its counters and the randomness counter: take ``amp.step_state(program,
            scope)`` before the step, or use ``amp.watch``, which does. Without it the step that would come next is run.
        cures: also try changes, each by running the step again with it: a smaller loss scale, and entries of
            ``AutoMixedPrecisionLists`` that let operators run in fp32.

    Returns:
        the Culprit, None where the step is good.

    Raises:
        FeedError, ScopeError: as ``Executor.run``. ArgumentError: ``before`` names no variable of the scope.
        ArgumentTypeError: no program, scope or executor; a feed or scope beside a path. ModelFileError: the path is
        that of no saved step.
    """
    if isinstance(program, (str, os.PathLike)):
        if feed is not None or scope is not None:
            raise ArgumentTypeError("find_culprit: a saved step has its feed and scope; give it neither")
        program, feed, scope = load_step(program)
    with check_scope(scope).reading():  # a step of another thread would change what the step is run on
        return _culprit(program, Rerun(feed, scope, executor, before), cures)


def _culprit(program: Program, rerun: Rerun, cures: bool) -> Culprit | None:
    parts = training_step(program)
    if not parts.tested:
        raise ArgumentError(f"find_culprit: program '{program.name}' has neither gradients nor outputs to look at")
    order = needed(program, parts.tested)
    bad = nonfinite(program, order, rerun)
    search = _Search(program, parts, order, bad, rerun)
    found = search.culprit()
    if found is None or not cures or found.kind != "operator":
        return found
    assert search.at is not None
    return replace(found, cures=tried(search.at, found.loss_scaling, parts, rerun))


class _Search:
    """The culprit among the operators from which numbers that are not finite reach a found_inf."""

    def __init__(
        self, program: Program, parts: TrainingStep, order: Sequence[Operator], bad: set[str], rerun: Rerun
    ) -> None:
        self.program, self.parts, self.bad, self.rerun = program, parts, bad, rerun
        self.chain, self.sources = self._chain(order)
        #: The culprit, once it is found to be an operator.
        self.at: Operator | None = None

    def _chain(self, order: Sequence[Operator]) -> tuple[list[Operator], list[Variable]]:
        """Backwards from found_inf through bad variables: operators in order, and variables without a producer."""
        ends = self._ends()
        reached = {v.name for v in ends}
        chain: list[Operator] = []
        sources = {v.name: v for v in ends if v.producer is None}
        for op in reversed(order):
            if any(v is not None and v.name in reached for v in op.outputs):
                chain.append(op)
                for v in reads(op):
                    if v.name in self.bad:
                        reached.add(v.name)
                        if v.producer is None:
                            sources[v.name] = v
        return chain[::-1], list(sources.values())

    def _ends(self) -> list[Variable]:
        bad = [v for v in floats(self.parts.tested) if v.name in self.bad]
        if bad or len(self.parts.checks) != 1:
            return bad
        found_inf = self.parts.checks[0].found_inf  # finite gradients whose sum is not
        assert found_inf is not None
        return [found_inf] if self.rerun.run(self.program, [found_inf.name])[0].any() else []

    def culprit(self) -> Culprit | None:
        broken = [v for v in self.sources if not self._is_mask(v)]
        if broken:
            return self._source(broken[0])
        alone = [op for op in self.chain if not any(v.name in self.bad for v in reads(op))]
        if not alone:
            alone = [op for op in self.chain if self._makes_nan(op)]
        if alone:
            return self._operator(alone[0], [called(op) for op in alone[1:]])
        return self._source(self.sources[0]) if self.sources else None

    def _is_mask(self, variable: Variable) -> bool:
        """Whether a source may well hold infinity: a constant, or a feed of -infinity without NaN."""
        if variable.persistable:
            return False
        value = np.asarray(self.rerun.source(variable)).astype(np.float64)
        return not np.isnan(value).any() and (variable.is_constant or not np.isposinf(value).any())

    def _makes_nan(self, op: Operator) -> bool:
        """Whether an operator that reads infinite masks makes NaN, or +infinity, of numbers without either."""
        read = [v.name for v in reads(op)]
        made = [v.name for v in floats(op.outputs)]
        values = self.rerun.run(self.program, [*read, *made])
        return not any(map(_is_wrong, values[: len(read)])) and any(map(_is_wrong, values[len(read) :]))

    # -- reports -------------------------------------------------------------------------------------
    def _common(self) -> dict[str, Any]:
        losses, scale = {v.name for v in self.parts.losses}, self.parts.scale
        return {
            "loss_finite": losses.isdisjoint(self.bad) if losses else None,
            "loss_scaling": None if scale is None else float(self.rerun.run(self.program, [scale.name])[0].reshape(())),
        }

    def _source(self, variable: Variable) -> Culprit:
        kind = "feed" if variable.is_input and not variable.persistable else "constant"
        if variable.persistable:
            kind = "parameter" if variable.is_parameter else "state"
        return Culprit(kind, variable.name, output=_range(variable, self.rerun.source(variable)), **self._common())

    def _operator(self, op: Operator, others: list[str]) -> Culprit:
        self.at = op
        read, made = reads(op), floats(op.outputs)
        wrong = next((v for v in made if v.name in self.bad), None)
        shown = [*read, *([wrong] if wrong is not None else [])]
        values = self.rerun.run(self.program, [v.name for v in shown])
        ranges = [_range(v, value) for v, value in zip(shown, values, strict=True)]
        output = ranges.pop() if wrong is not None else None
        reason, forward = op.reason, forward_of(op)
        if forward is not None and forward.reason:
            reason = f"{reason}, {forward.reason}"
        if any(check.operator is op for check in self.parts.checks):
            reason = "the unscaled gradients, or their sum, leave fp32"
        name = wrong.name if wrong is not None else next(v.name for v in op.outputs if v is not None)
        return Culprit(
            "operator",
            name,
            called(op),
            op.full_type,
            op.role,
            op.scope,
            op.precision,
            reason,
            tuple(ranges),
            output,
            tuple(others),
            **self._common(),
        )


def called(op: Operator) -> str:
    """An operator's label in a report."""
    return op.label if op.inserted else label(op)


def _is_wrong(value: Any) -> bool:
    array = np.asarray(value).astype(np.float64)
    return bool(np.isnan(array).any() or np.isposinf(array).any())


def _range(variable: Variable, value: Any) -> Range:
    array = np.asarray(value).astype(np.float64)
    finite = array[np.isfinite(array)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (None, None)
    return Range(
        variable.name,
        variable.dtype or "",
        tuple(array.shape),
        low,
        high,
        None if low is None or high is None else max(abs(low), abs(high)),
        int(np.isnan(array).sum()),
        int(np.isinf(array).sum()),
    )
