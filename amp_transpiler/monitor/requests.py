"""``amp.StepReports``: reports of training steps, asked for in the fetch list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from amp_transpiler.errors import ArgumentError, ArgumentTypeError, OrderError
from amp_transpiler.ir import context
from amp_transpiler.ir.infer import one_element
from amp_transpiler.ir.nodes import FORWARD, OWN, UPDATE, Variable
from amp_transpiler.ir.patterns import matching_names
from amp_transpiler.ops.training.monitor import INSPECT, SUMMARY
from amp_transpiler.option_checks import is_whole
from amp_transpiler.passes.view.training_step import TrainingStep, training_step
from amp_transpiler.program import Program
from amp_transpiler.runtime.report import ReportRequest


class StepReports(ReportRequest):
    """Reports of the steps of a training program: put it into ``fetch_list``, and a StepReport comes out there::

        reports = amp.StepReports(main)
        for feed in batches:
            loss_value, report = exe.run(main, feed=feed, fetch_list=[loss, reports])
            print(report)

    The program gets two operators more, which run where a report is fetched and nowhere else. A report's values stay
    on the device until they are read.

    Args:
        program: a program that an optimizer (decorated or not) has minimised; or that optimizer's loss variable.
        loss: the loss to report, a variable or name, or several; by default what ``minimize`` was called with.
        groups: parameter groups for ``found_inf_by_group``, group -> patterns of parameter names (globs, or ``re:`` and
            a regular expression; the first group that matches counts). By default the outermost name scope of a
            parameter's reader, or its layer.
        step: the number of the next report.

    Raises:
        ArgumentTypeError: no program. OrderError: it updates no parameter. ArgumentError: an unknown loss, a pattern
        that matches nothing, a step below 0.
    """

    def __init__(
        self,
        program: Program,
        loss: Variable | str | Sequence[Variable | str] | None = None,
        groups: Mapping[str, str | Sequence[str]] | None = None,
        step: int = 0,
    ) -> None:
        parts = training_step(program)
        if not parts.learning_rates:
            raise OrderError(f"StepReports: program '{program.name}' updates no parameter; minimize a loss first")
        if not is_whole(step) or step < 0:
            raise ArgumentError(f"StepReports: step is {step!r}; expected a whole number, at least 0")
        losses = parts.losses if loss is None else _losses(program, loss)
        names = [parameter.name for parameter, _ in parts.gradients]
        super().__init__(
            program=program,
            variables=_append(parts, losses),
            names=names,
            sizes=[_size(gradient) for _, gradient in parts.gradients],
            groups=[_scope_group(p) for p, _ in parts.gradients] if groups is None else _groups(groups, names),
            losses=[v.name for v in losses],
            runs=1 if program.accumulation is None else program.accumulation.steps,
            step=int(step),
        )


def _losses(program: Program, loss: Any) -> list[Variable]:
    items = [loss] if isinstance(loss, (Variable, str)) else loss
    if not isinstance(items, Sequence) or not all(isinstance(item, (Variable, str)) for item in items):
        raise ArgumentTypeError(f"StepReports: loss is {loss!r}; expected a variable or name, or a list of them")
    found = [program.var(item if isinstance(item, str) else item.name) for item in items]
    for variable in found:
        if not one_element(variable.shape):
            raise ArgumentError(f"StepReports: loss '{variable.name}' has shape {variable.shape}; expected one number")
    return found


def _groups(groups: Mapping[str, str | Sequence[str]], names: list[str]) -> list[str]:
    if not isinstance(groups, Mapping):
        raise ArgumentTypeError(f"StepReports: groups is {groups!r}; expected a dict of group -> patterns")
    chosen: dict[str, str] = {}
    for group, patterns in groups.items():
        listed = [patterns] if isinstance(patterns, str) else patterns
        for name in matching_names(names, listed, f"StepReports: group '{group}'", lambda name: [name], "parameter"):
            chosen.setdefault(name, group)
    return [chosen.get(name, "others") for name in names]


def _append(parts: TrainingStep, losses: Sequence[Variable]) -> list[Variable]:
    """Append the two operators; the variables that a report is made of."""
    program = parts.program
    scaling = parts.scale_updates[0] if parts.scale_updates else None
    counters = (None, None) if scaling is None else (scaling.good, scaling.bad)
    good, bad = (None if c is None else program.updates.get(c, c) for c in counters)
    scale = parts.scale
    after = None if scale is None else program.updates.get(scale, scale)
    micro_step = None if program.accumulation is None else program.accumulation.counter
    scalars = [parts.found_inf, scale, after, good, bad, micro_step, *losses, *parts.learning_rates]
    count = len(parts.gradients)
    summary = program.fresh_variable("step_report", "float32", (len(scalars),))
    inspected = [
        program.fresh_variable(f"step_report.{name}", dtype, (count,))
        for name, dtype in (("found_inf", "bool"), ("squares", "float32"), ("zeros", "float32"))
    ]
    with context.operator_role(UPDATE):
        program.add_operator(SUMMARY, scalars, [summary], domain=OWN)
        program.add_operator(INSPECT, [gradient for _, gradient in parts.gradients], inspected, domain=OWN)
    return [summary, *inspected]


def _size(gradient: Variable) -> int:
    size = 1
    for dimension in gradient.shape or ():
        size *= dimension if isinstance(dimension, int) else 1
    return size


def _scope_group(parameter: Variable) -> str:
    """The part of the model that a parameter belongs to: the outermost scope of the operator that reads it, else what
    its name has before the last point (``fc_0`` of ``fc_0.w_0``), as a pattern."""
    readers = [op for op, _ in parameter.readers if op.role == FORWARD and not op.inserted]
    for op, _ in parameter.readers:
        if op.inserted and op.outputs[0] is not None:
            readers += [reader for reader, _ in op.outputs[0].readers if reader.role == FORWARD]
    scope = next((op.scope for op in readers if op.scope), "")
    if scope:
        return f"{scope.split('/')[0]}/*"
    head, _, _ = parameter.name.rpartition(".")
    return f"{head}.*" if head else parameter.name
