"""What an operator means: one table, filled by ``amp_transpiler.ops`` and by users.

An entry is made by decorating functions::

    @gradient("Tanh", reads="y0 dy0")
    def tanh(e, op, y, dy):
        return [e.Mul(dy, e.Sub(e.like(1, y), e.Mul(y, y)))]

``reads`` names what the gradient operator ``TanhGrad`` takes as inputs: forward inputs ``x0 x1 …`` (``x*``: all, as a
list), forward outputs ``y0 …``, output gradients ``dy0 …`` (``dy*``). A rule gets an emitter, the operator and those
values, and returns one value per output; it is written once, for every element type and place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.ir.exchange_call import Exchange
from amp_transpiler.ir.intervals import RangeRule
from amp_transpiler.ir.nodes import OWN, Operator, TensorType
from amp_transpiler.ir.slots import Slots
from amp_transpiler.ir.traits import Traits
from amp_transpiler.lists import PlaceTraits, full_name, plain_domain, split_name, written_out
from amp_transpiler.option_checks import shown

#: ``rule(e, op, *inputs) -> outputs``; None: the place computes the operator as it stands.
Rule = Callable[..., Sequence[Any] | None]
AnyRule = TypeVar("AnyRule", bound=Rule)
Infer = Callable[[Operator], Sequence[TensorType | None]]
#: Whether a place has kernels of an operator.
Kernels = Callable[[PlaceTraits], bool]
#: Fixed shapes by slot; None where a slot is left out.
SlotShapes = Sequence[tuple[int, ...] | None]
Flops = Callable[[Mapping[str, Any], SlotShapes, SlotShapes], int]


@dataclass
class Gradient:
    """How to differentiate an operator. ``inputs`` are the differentiable slots (None: every float one).

    ``stops`` are slots where the backward pass stops, as if the operator read a constant there. ``refuse`` says why the
    rule does not serve a form of the operator; "" where it does.
    """

    reads: tuple[str, ...]
    inputs: frozenset[int] | None
    zero: bool = False
    refuse: Callable[[Operator], str] | None = None
    stops: frozenset[int] = frozenset()


@dataclass
class OpDef:
    """One operator. ``lowering``: what a place runs for it; None: it is a standard operator, emitted unchanged.

    ``native``: the rule takes 16-bit values, and what its operators make is stored in 16 bit (on CPU emulated);
    otherwise it gets them widened to fp32 and its results are rounded once.
    ``traits``: None where nobody has declared them. ``slots``: of operators of the training step.
    ``range_rule``: gives the interval of what it makes; None where ``traits.bounded`` is all that is known.
    ``when``: the rule is used only where this holds of the operator (BatchNormalization in training mode).
    ``kernels``: whether a place has kernels of the type; on one without them the rule is used for all of it.
    ``for_test``: turns a cloned operator into its form for evaluation.
    ``flops``: the arithmetic of a sum of products, from attributes and the shapes of inputs and outputs.
    ``by_channel``: what a place runs for it where the first input lies in rows, one for each channel.
    ``exchange``: what ranks do at such an operator of a lowered step.
    """

    type: str
    domain: str = ""
    lowering: Rule | None = None
    when: Callable[[Operator], bool] | None = None
    kernels: Kernels | None = None
    infer: Infer | None = None
    native: bool = False
    traits: Traits | None = None
    slots: Slots | None = None
    range_rule: RangeRule | None = None
    gradient: Gradient | None = None
    for_test: Callable[[Operator], None] | None = None
    flops: Flops | None = None
    by_channel: Rule | None = None
    exchange: Exchange | None = None

    @property
    def exact(self) -> bool:
        """Whether nothing has to be rounded after it on CPU."""
        return self.traits is not None and self.traits.exact


_NO_TRAITS = Traits()
_TABLE: dict[tuple[str, str], OpDef] = {}
_READS: dict[str, tuple[str, ...]] = {}


def entry(full_type: str) -> OpDef:
    """The entry of ``Type`` or ``domain::Type``, made on first use."""
    if not isinstance(full_type, str):
        raise ArgumentTypeError(
            f"an operator is named by its type, as in 'Tanh' or 'domain::Type'; got {shown(full_type)}"
        )
    key = split_name(full_type)
    if key not in _TABLE:
        _TABLE[key] = OpDef(key[1], key[0])
    return _TABLE[key]


def lookup(op: Operator) -> OpDef | None:
    """The entry for an operator, None where the table has none."""
    return _TABLE.get((op.domain, op.type))


def lowering_rule_of(op: Operator, at: PlaceTraits | None = None) -> Rule | None:
    """The rule that lowering uses for ``op``, on a place where one is given; None where it is emitted unchanged."""
    found = lookup(op)
    if found is None or found.lowering is None:
        return None
    if found.kernels is not None and at is not None and not found.kernels(at):
        return found.lowering
    return found.lowering if (found.kernels is None if found.when is None else found.when(op)) else None


def has_lowering_rule(op: Operator, at: PlaceTraits | None = None) -> bool:
    """Whether lowering uses a rule for the operator, on a place where one is given, or for one in its nested graphs."""
    inside = (inner for nested in op.attrs.programs for inner in nested.walk())
    return any(lowering_rule_of(each, at) for each in (op, *inside))


def own(type_: str) -> str:
    """The full type of an operator of this package's domain."""
    return f"{OWN}::{type_}"


def lowering_rule(
    *full_types: str,
    native: bool = False,
    when: Callable[[Operator], bool] | None = None,
    kernels: Kernels | None = None,
    itself: bool = False,
    infer: Infer | None = None,
    slots: Slots | None = None,
) -> Callable[[AnyRule], AnyRule]:
    """Register the decorated function as the lowering rule of operators: ``f(e, op, *inputs) -> [outputs]``.

    It is for operators that ``when`` names, or for all; with ``kernels`` for all on places without them alone. With
    ``itself`` other places have that operator. With ``slots`` and without ``infer`` outputs are new values of inputs.
    """

    def register(function: AnyRule) -> AnyRule:
        for full_type in full_types:
            found = entry(full_type)
            found.lowering, found.native, found.when, found.kernels = function, native, when, kernels
            if not itself:
                written_out(full_type)
            if slots is not None:
                found.slots = slots
                found.infer = lambda op: [None if v is None else (v.dtype, v.shape) for v in slots.states(op.inputs)]
            found.infer = infer or found.infer
        return function

    return register


_READ = re.compile(r"(x|y|dy)(\d+|\*)")


def gradient(
    full_type: str,
    reads: str,
    *,
    inputs: Sequence[int] | None = None,
    native: bool = False,
    refuse: Callable[[Operator], str] | None = None,
    stops: Sequence[int] = (),
) -> Callable[[Rule], Rule]:
    """Register the decorated function as the gradient of an operator (see the module's text, and what users have).

    It returns one value per forward input, None where there is no gradient; ``e.wants(i)`` says
    whether the gradient of input ``i`` is asked for. ``inputs`` limits the differentiable slots; a
    path through any other float input is an error at ``append_backward``, and so is an operator for
    which ``refuse`` gives a reason. A path through a slot in ``stops`` ends there: nothing is learned of it.
    """
    if not isinstance(reads, str):
        raise ArgumentTypeError(f"gradient of {full_type}: reads is {shown(reads)}; expected text, as in 'x0 dy0'")
    names = tuple(reads.split())
    for name in names:
        if not _READ.fullmatch(name):
            raise ArgumentError(f"gradient of {full_type}: cannot read {name!r}; use x0, y0, dy0, x*, dy*")

    def register(function: Rule) -> Rule:
        if not callable(function):
            raise ArgumentTypeError(f"gradient of {full_type}: {shown(function)} is no function f(e, op, ...)")
        slots = None if inputs is None else frozenset(inputs)
        entry(full_type).gradient = Gradient(names, slots, refuse=refuse, stops=frozenset(stops))
        grad = entry(own(gradient_type(*split_name(full_type))))
        grad.lowering, grad.native = function, native
        _READS[grad.type] = names
        return function

    return register


def gradient_type(domain: str, type_: str) -> str:
    """The operator type, in this package's domain, of the gradient of ``domain::type_``."""
    return f"{type_}Grad" if domain in ("", OWN) else f"{domain}.{type_}Grad"


def reads_of(op: Operator) -> tuple[str, ...] | None:
    """What a gradient operator's inputs are, in order; None for any other operator."""
    return _READS.get(op.type) if op.domain == OWN else None


def group_inputs(op: Operator, inputs: Sequence[object]) -> list[object]:
    """Group the inputs of a gradient operator as its ``reads`` say: ``x*`` and ``dy*`` become lists."""
    reads = reads_of(op)
    if reads is None or not any(r.endswith("*") for r in reads):
        missing = 0 if reads is None else len(reads) - len(inputs)
        return [*inputs, *[None] * missing]
    count = int(op.attrs["n_inputs"]) if "x*" in reads else 0
    result: list[object] = []
    position = 0
    rest = len(inputs) - sum(1 for r in reads if not r.endswith("*")) - count
    for read in reads:
        size = 1 if not read.endswith("*") else (count if read == "x*" else rest)
        group = inputs[position : position + size]
        result.append(group if read.endswith("*") else group[0])
        position += size
    return result


def no_gradient(*full_types: str) -> None:
    """Operators whose gradient is zero everywhere (or that make no float): the backward pass stops there."""
    for full_type in full_types:
        entry(full_type).gradient = Gradient((), frozenset(), zero=True)


def traits(*full_types: str, **facts: Any) -> None:
    """Declare :class:`Traits` of operators, beside those that were declared before; a keyword is a field of it.

    With no keyword it says that they have none. TypeError for what is no trait.
    """
    for full_type in full_types:
        found = entry(full_type)
        found.traits = replace(found.traits or _NO_TRAITS, **facts)


def range_rule(*full_types: str) -> Callable[[RangeRule], RangeRule]:
    """Register the decorated function as the range rule of operators (see :mod:`~amp_transpiler.ir.intervals`).

    It bounds the first output, and every output of an operator that moves elements.
    """

    def register(function: RangeRule) -> RangeRule:
        for full_type in full_types:
            entry(full_type).range_rule = function
        return function

    return register


def traits_of(op: Operator | str, domain: str = "") -> Traits:
    """The traits of an operator, or of an operator type; none of them where they are not declared."""
    type_, domain = (op, domain) if isinstance(op, str) else (op.type, op.domain)
    found = _TABLE.get((plain_domain(domain), type_))
    return _NO_TRAITS if found is None or found.traits is None else found.traits


def traits_named(full_type: str) -> Traits:
    """The traits of ``Type`` or ``domain::Type``; none of them where they are not declared."""
    domain, type_ = split_name(full_type)
    return traits_of(type_, domain)


def slots_of(type_: str, domain: str = OWN) -> Slots | None:
    """The slots of an operator type of the training step; None for any other."""
    found = _TABLE.get((domain, type_))
    return None if found is None else found.slots


def exchange_of(type_: str, domain: str = OWN) -> Exchange | None:
    """What ranks do at operators of a type in a lowered step; None for any other operator."""
    found = _TABLE.get((domain, type_))
    return None if found is None else found.exchange


def moves(op: Operator, slot: int | str | None = None) -> bool:
    """Whether the outputs hold the elements of this input as they are; without ``slot``, of any input."""
    slots = traits_of(op).moves
    return slots is None or (bool(slots) if slot is None else slot in slots)


def combined(op: Operator) -> str:
    """How elements that come to one place are combined ("add"); "none" where the last one stays."""
    return str(op.attrs.get(traits_of(op).combines, "none"))


def flops(*full_types: str) -> Callable[[Flops], Flops]:
    """Register how many additions and multiplications operators take: ``f(attributes, input shapes, output shapes)``.

    For sums of products alone. What else there is computes little for each element that it moves: that takes the time.
    """

    def register(function: Flops) -> Flops:
        for full_type in full_types:
            entry(full_type).flops = function
        return function

    return register


def flops_of(type_: str, domain: str = "") -> Flops | None:
    """How many additions and multiplications an operator type takes; None where that is not worth counting."""
    found = _TABLE.get((plain_domain(domain), type_))
    return None if found is None else found.flops


def channel_rule(full_type: str) -> Callable[[Rule], Rule]:
    """Register what a place runs for an operator whose first input lies in rows (ops/channel_rows.py):
    ``f(e, op, *inputs) -> [outputs]``, an empty list where the form is not served. ``e.output_shapes`` are theirs.
    """

    def register(function: Rule) -> Rule:
        entry(full_type).by_channel = function
        return function

    return register


def differentiated(op: Operator) -> str | None:
    """The full type of the operator of which this one is the gradient; None for any other operator."""
    if reads_of(op) is None:
        return None
    domain, _, type_ = op.type.removesuffix("Grad").rpartition(".")
    return full_name(type_, domain)


def for_test(*full_types: str) -> Callable[[Callable[[Operator], None]], Callable[[Operator], None]]:
    """Register how ``Program.clone(for_test=True)`` changes operators."""

    def register(function: Callable[[Operator], None]) -> Callable[[Operator], None]:
        for full_type in full_types:
            entry(full_type).for_test = function
        return function

    return register
