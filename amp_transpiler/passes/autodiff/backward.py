"""Append gradient operators to a program, in one reverse sweep."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from amp_transpiler.errors import ArgumentTypeError, GradientError, GraphError
from amp_transpiler.ir import context
from amp_transpiler.ir.decompose import decompose_operator, has_decomposition
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.infer import declare_outputs, one_element
from amp_transpiler.ir.nodes import BACKWARD, OWN, Operator, Variable
from amp_transpiler.ir.opdef import Gradient, entry, gradient_type, lookup, lowering_rule_of, own, traits_of
from amp_transpiler.ir.parameter_names import names_of_parameter
from amp_transpiler.ir.patterns import is_pattern, matching_names
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.ir.rollback import unchanged_on_error
from amp_transpiler.ir.types import FLOATS, numpy_dtype
from amp_transpiler.lists.paddle import paddle_arguments
from amp_transpiler.ops.fake_quantize import TYPE as FAKE_QUANTIZE, limits, quantizer, stored_quantised
from amp_transpiler.ops.training.seeds import rng_state
from amp_transpiler.passes.autodiff.dependents import check_no_gradient_behind, check_reads, dependents, float_slots
from amp_transpiler.passes.autodiff.if_gradient import append_if_gradient, captured_floats
from amp_transpiler.passes.autodiff.segments import recompute_activations
from amp_transpiler.passes.autodiff.sparse_gradient import alike, append_rows, is_sparse_lookup
from amp_transpiler.passes.canonicalize.control_flow import expand_control_flow, why_not_known
from amp_transpiler.passes.canonicalize.standard_form import standardize

_NO_LAYERS = "Build the loss from layers with trainable parameters, or pass parameter_list"


@paddle_arguments("append_backward")
def append_backward(
    loss: Variable,
    parameter_list: Sequence[Variable | str] | None = None,
    no_grad_set: Collection[Variable | str] | None = None,
) -> list[tuple[Variable, Variable]]:
    """Append the gradient of ``loss`` with respect to parameters to the loss's program.

    ``loss`` is a float scalar (shape [] or all ones). ``parameter_list`` (variables, names, or patterns such as
    ``"encoder/*"``, which stand for trainable parameters) defaults to every trainable parameter; ``no_grad_set``
    names variables that gradients must not pass.
    Gradients have the element type and shape of their variable and are named ``<variable>@GRAD``;
    where several readers contribute, one ``GradSum`` adds them (in fp32) and rounds once.

    Returns [(parameter, gradient)] in the order of the parameters; parameters that the loss does not
    depend on are left out. GradientError: a loss that is no float scalar, one that depends on no
    parameter, a listed parameter without a path to it, an operator on the path without a gradient rule. Where
    anything raises, the program is as before.
    """
    program = check_loss(loss)
    wanted = wanted_gradients(program, parameter_list, no_grad_set)
    with unchanged_on_error(program):
        standardize(program)
        return append_gradients(loss, wanted, [loss])


@dataclass(frozen=True)
class Wanted:
    """What gradients are for, by the names of the program as it was written.

    Attributes:
        parameters: to differentiate for.
        named: names of those that were asked for one by one, so that the loss has to depend on them.
        blocked: keys of variables that gradients must not pass.
    """

    parameters: list[Variable]
    named: frozenset[str]
    blocked: frozenset[int]


def wanted_gradients(
    program: Graph, parameter_list: Iterable[Variable | str] | None, no_grad_set: Collection[Variable | str] | None
) -> Wanted:
    """What the arguments of ``append_backward`` ask for; errors as of :func:`listed_parameters`."""
    listed = None if parameter_list is None else listed_parameters(program, parameter_list, "parameter_list")
    return Wanted(
        parameters=program.parameters if listed is None else listed,
        named=frozenset(item.name if isinstance(item, Variable) else item for item in parameter_list or ()),
        blocked=frozenset(v.key for v in _variables(program, no_grad_set or (), "no_grad_set")),
    )


def check_loss(loss: Variable) -> Graph:
    """The loss's program. ArgumentTypeError: it is no variable. GradientError: it is no float scalar."""
    if not isinstance(loss, Variable):
        raise ArgumentTypeError(f"loss must be a Variable, not {type(loss).__name__}")
    if loss.dtype not in FLOATS:
        raise GradientError(f"loss '{loss.name}' has element type {loss.dtype}; a loss is a float")
    if not one_element(loss.shape):
        shape = "unknown" if loss.shape is None else list(loss.shape)
        raise GradientError(
            f"loss '{loss.name}' has shape {shape}; a loss is a scalar. Reduce it first, for example with "
            "amp.nn.functional.mean"
        )
    return loss.program


def reaches_parameters(losses: Sequence[Variable], wanted: Wanted) -> bool:
    """Whether a loss depends on a parameter."""
    needs = dependents(losses[0].program.operators, wanted.parameters, wanted.blocked)
    return any(loss.key in needs for loss in losses)


def append_gradients(loss: Variable, wanted: Wanted, parts: Sequence[Variable]) -> list[tuple[Variable, Variable]]:
    """``append_backward`` of a program in canonical form (:func:`standardize`), in a transaction of the caller's.

    ``loss`` is computed from ``parts``, the losses that the caller was given: each has to depend on a parameter.
    """
    program = loss.program
    expand_control_flow(program)
    if any(op.type == "Dropout" and lowering_rule_of(op) is not None for op in program.operators):
        rng_state(program)  # an imported dropout brings no randomness with it
    order = program.operators
    needs = dependents(order, wanted.parameters, wanted.blocked)
    for part in parts:
        if part.key not in needs:
            check_no_gradient_behind(part)
            names = ", ".join(v.name for v in wanted.parameters[:5]) or "none"
            raise GradientError(
                f"loss '{part.name}' of program '{program.name}' does not depend on any parameter (parameters: "
                f"{names}). {stored_quantised(program) or _NO_LAYERS}"
            )
    with context.operator_role(BACKWARD):
        sweep = _Sweep(order, [(loss, _seed(loss))], needs)
        pairs = []
        for parameter in wanted.parameters:
            if sweep.reaches(parameter):
                pairs.append((parameter, sweep.total(parameter)))
            elif parameter.name in wanted.named:
                raise GradientError(
                    f"loss '{loss.name}' does not depend on parameter '{parameter.name}' of parameter_list"
                )
        if program.recompute is not None:
            recompute_activations(program, loss, sweep.made, [gradient for _, gradient in pairs])
    return pairs


def listed_parameters(program: Graph, items: Iterable[Variable | str], what: str) -> list[Variable]:
    """The parameters that variables, names and patterns stand for, each once; a pattern stands for trainable ones.

    ``what`` names the list in errors: ArgumentTypeError for what is no list, or holds anything else, GraphError for
    an unknown name, ArgumentError for a pattern that fits none.
    """
    if isinstance(items, (str, Variable)) or not isinstance(items, Iterable):
        raise ArgumentTypeError(f"{what} must be a list of variables, names or patterns, not {items!r}")
    found: dict[int, Variable] = {}
    for item in items:
        if isinstance(item, str) and is_pattern(item) and not program.has_var(item):
            kind = f"trainable parameter of program '{program.name}'"
            fitting = list(matching_names(program.parameters, [item], what, names_of_parameter, kind))
        else:
            fitting = _variables(program, [item], what)
        found |= {variable.key: variable for variable in fitting}
    return list(found.values())


def _variables(program: Graph, items: Iterable[Variable | str], what: str) -> list[Variable]:
    if isinstance(items, (str, Variable)) or not isinstance(items, Iterable):
        raise ArgumentTypeError(f"{what} must be a list of variables or names, not {items!r}")
    found = []
    for item in items:
        if not isinstance(item, (str, Variable)):
            raise ArgumentTypeError(f"{what} holds {item!r}; expected variables or names")
        variable = program.var(item) if isinstance(item, str) else item
        program.must_own(variable)
        found.append(variable)
    return found


Plan = list[tuple[Operator, Gradient | None, list[int]]]


def _plan(order: list[Operator], ends: Iterable[Variable], needs: set[int]) -> tuple[Plan, dict[int, int]]:
    """Operators to differentiate in reverse order with their wanted input slots, and uses per variable.

    An If on the way has no rule: its gradient is an If (see :mod:`.if_gradient`).
    """
    reached = {v.key for v in ends}
    plan: Plan = []
    contributions: dict[int, int] = defaultdict(int)
    for op in reversed(order):
        outs = [v for v in op.outputs if v is not None and v.key in reached]
        if not outs:
            continue
        source = quantizer(op) or op
        found = lookup(op) if source is op else entry(own(FAKE_QUANTIZE))
        rule = found.gradient if found else None
        if rule is not None and rule.zero:
            continue
        check_reads(source, needs, _way_out(op))
        slots = float_slots(source, needs)
        captured = captured_floats(op, needs)
        if not slots and not captured:
            continue
        if op.full_type != "If":
            _check_rule(op, rule, slots, captured)
            _check_outputs(op, rule, outs)
        plan.append((op, rule, slots))
        for variable in (*(source.inputs[slot] for slot in slots), *captured):
            assert variable is not None
            reached.add(variable.key)
            contributions[variable.key] += 1
    return plan, contributions


def _check_outputs(op: Operator, rule: Gradient | None, outs: list[Variable]) -> None:
    assert rule is not None
    unread = [v for v in outs if f"dy{v.producer_slot}" not in rule.reads and "dy*" not in rule.reads]
    if unread:
        raise GradientError(
            f"the gradient of '{op.label}' ({op.full_type}) cannot pass through its output '{unread[0].name}'. "
            f"Add '{unread[0].name}' to no_grad_set, or register a rule with "
            f"@amp.register_gradient('{op.full_type}', ...)"
        )


def _way_out(op: Operator) -> str:
    rule = f", or register a rule with @amp.register_gradient('{op.full_type}', ...)" if quantizer(op) is None else ""
    return f"Freeze what lies before it (trainable = False, or no_grad_set){rule}"


def _check_rule(op: Operator, rule: Gradient | None, slots: list[int], captured: list[Variable]) -> None:
    way_out = _way_out(op)
    if op.attrs.programs:
        source = op.inputs[slots[0]] if slots else captured[0]
        name = "" if source is None else source.name
        raise GradientError(
            f"the loss depends on '{name}' through '{op.label}' ({op.full_type}), which has "
            f"no gradient: {why_not_known(op)}"
        )
    if rule is None and has_decomposition(op):
        try:
            decompose_operator(op)
        except GraphError as error:
            rule_of_yours = f"register a rule with @amp.register_gradient('{op.full_type}', ...)"
            raise GradientError(f"{error}, freeze what lies before it, or {rule_of_yours}") from None
    if rule is None:
        source = op.inputs[slots[0]]
        by_ranks = "Gradients are averaged over the ranks without it: leave it out, or call it behind minimize. "
        raise GradientError(
            f"operator '{op.label}' ({op.full_type}) lies on the path of the loss through its input "
            f"'{'' if source is None else source.name}' and has no gradient rule. "
            f"{by_ranks if traits_of(op).meets else ''}{way_out}"
        )
    reason = rule.refuse(op) if rule.refuse is not None else ""
    if reason:
        raise GradientError(
            f"operator '{op.label}' ({op.full_type}) lies on the path of the loss, and {reason}. {way_out}"
        )
    for slot in slots:
        if rule.inputs is not None and slot not in rule.inputs:
            source = op.inputs[slot]
            raise GradientError(
                f"operator '{op.label}' ({op.full_type}) has no gradient for its input {slot} "
                f"('{'' if source is None else source.name}'). {way_out}"
            )


def _seed(loss: Variable) -> Variable:
    """d loss / d loss = 1."""
    program = loss.program
    assert loss.dtype is not None and loss.shape is not None
    ones = np.ones([1] * len(loss.shape), numpy_dtype(loss.dtype))
    seed = program.fresh_variable(f"{loss.name}@GRAD", loss.dtype, loss.shape, data=ones)
    seed.grad_of = loss
    return seed


def new_gradient(variable: Variable, name: str) -> Variable:
    """A variable for a gradient of ``variable``, like it."""
    new = variable.program.fresh_variable(name, variable.dtype, variable.shape)
    new.grad_of = variable
    return new


def _place_beside(op: Operator, forward: Operator | None) -> None:
    if forward is not None:
        op.scope, op.guard = forward.scope, forward.guard


class _Sweep:
    """One reverse sweep over ``order``: appends gradient operators from ``seeds``, [(variable, its gradient)], back
    to whatever of ``needs`` (keys of variables) they reach."""

    def __init__(self, order: list[Operator], seeds: list[tuple[Variable, Variable]], needs: set[int]) -> None:
        self.needs = needs
        self._pending: dict[int, list[Variable]] = defaultdict(list)
        self._done: dict[int, Variable] = {}
        #: (gradient operator, the operator that it differentiates), as appended.
        self.made: list[tuple[Operator, Operator]] = []
        for variable, gradient in seeds:
            self._pending[variable.key].append(gradient)
        plan, self._contributions = _plan(order, [v for v, _ in seeds], needs)
        for op, rule, slots in plan:
            if rule is None:
                append_if_gradient(op, self)
            else:
                self._append(op, rule, slots)

    def nested(
        self, order: list[Operator], seeds: list[tuple[Variable, Variable]], wanted: Iterable[Variable]
    ) -> _Sweep:
        """A sweep over the operators of a nested program."""
        return _Sweep(order, seeds, dependents(order, wanted, ()))

    def reaches(self, variable: Variable) -> bool:
        """Whether the variable has a gradient."""
        return variable.key in self._pending or variable.key in self._done

    def total(self, variable: Variable) -> Variable:
        """The gradient of a variable whose readers have all contributed."""
        if variable.key in self._done:
            return self._done[variable.key]
        name = f"{variable.name}@GRAD"
        parts = alike(variable, self._pending.pop(variable.key), name)
        if len(parts) == 1:
            total = parts[0]
        else:
            total = new_gradient(variable, name)
            op = variable.program.add_operator("GradSum", parts, [total], domain=OWN)
            _place_beside(op, variable.producer)
        self._done[variable.key] = total
        return total

    def contribution(self, variable: Variable) -> Variable:
        """A new variable for one reader's part of the gradient of ``variable``."""
        name = f"{variable.name}@GRAD"
        if self._contributions[variable.key] > 1:
            name += f"@{len(self._pending[variable.key])}"
        new = new_gradient(variable, name)
        self._pending[variable.key].append(new)
        return new

    def _append_rows(self, op: Operator) -> None:
        """The gradient of a table that is marked sparse, by one of its readers."""
        table, made = op.inputs[0], op.outputs[0]
        assert table is not None and made is not None
        pending = self._pending[table.key]
        pending.append(append_rows(op, self.total(made), f"{table.name}@GRAD@{len(pending)}"))
        self._appended(pending[-1].producer, op)

    def _append(self, op: Operator, rule: Gradient, slots: list[int]) -> None:
        if is_sparse_lookup(op):
            self._append_rows(op)
            return
        inputs: list[Variable | None] = []
        before = quantizer(op)
        reader = before or op
        for read in rule.reads:
            kind, which = (read[:2], read[2:]) if read.startswith("dy") else (read[:1], read[1:])
            if which == "*":
                source = list(reader.inputs if kind == "x" else op.outputs)
            elif kind == "x":
                source = [reader.input(int(which))]
            else:
                source = [op.output(int(which))]
                if kind == "y" and source[0] is None:
                    source = [_add_output(op, int(which))]
            if kind == "dy":
                source = [self.total(v) if v is not None and self.reaches(v) else None for v in source]
            inputs.extend(source)
        outputs: list[Variable | None] = [None] * len(reader.inputs)
        for slot in slots:
            variable = reader.inputs[slot]
            assert variable is not None
            outputs[slot] = self.contribution(variable)
        attrs = op.attrs.copy()
        if "x*" in rule.reads:
            attrs["n_inputs"] = len(op.inputs)
        attrs.update({} if before is None else limits(op))
        type_ = gradient_type(op.domain, op.type if before is None else FAKE_QUANTIZE)
        grad = op.program.add_operator(type_, inputs, outputs, attrs=attrs, domain=OWN)
        self._appended(grad, op)

    def _appended(self, grad: Operator | None, op: Operator) -> None:
        assert grad is not None
        grad.metadata.update(op.metadata)
        _place_beside(grad, op)
        grad.precision, grad.why = op.precision, Reason(Kind.GRADIENT, op.label)
        self.made.append((grad, op))


def _add_output(op: Operator, slot: int) -> Variable:
    """Ask a forward operator for an optional output that its gradient reads (a dropout mask, indices)."""
    first = next(v for v in op.outputs if v is not None)
    added = op.program.fresh_variable(f"{first.name}.y{slot}")
    op.set_output(slot, added)
    declare_outputs(op)
    return added
