"""What depends on parameters: float tensors, and what stands for them, through which no gradient goes.

Sequences and optional values hold tensors, quantised numbers and floats of 8 bit and less stand for wider ones; what an
unknown operator makes may be any of these. Where one of them lies between a loss and a parameter, a gradient that left
it out would be wrong: that is an error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from amp_transpiler.errors import GradientError
from amp_transpiler.ir.nodes import BACKWARD, Operator, Variable
from amp_transpiler.ir.opdef import lookup, traits_of
from amp_transpiler.ir.types import FLOATS
from amp_transpiler.passes.canonicalize.control_flow import why_not_known

#: Element types of what is computed of quantised numbers; wider integers count, and choose.
_QUANTISED = frozenset({"int8", "uint8", "int16", "uint16", "int32", "int4", "uint4"})
_SMALL_FLOATS = ("float8", "float6", "float4")


def dependents(order: list[Operator], sources: Iterable[Variable], blocked: Collection[int]) -> set[int]:
    """What depends on ``sources`` and has a gradient, or stands for what has one; one forward sweep."""
    needs = {v.key for v in sources if v.key not in blocked}
    for op in order:
        read = _read(op, needs) if op.role != BACKWARD else []
        for v in op.outputs if read else ():
            if v is not None and not v.stop_gradient and v.key not in blocked and _continues(op, read, v):
                needs.add(v.key)
    return needs


def check_no_gradient_behind(loss: Variable) -> None:
    """GradientError where a loss is computed of a gradient, such as that of a gradient penalty."""
    found, seen = [loss], {loss.key}
    for variable in found:
        if variable.grad_of is not None:
            raise GradientError(
                f"loss '{loss.name}' of program '{loss.program.name}' is computed of the gradient '{variable.name}', "
                "and there are no gradients of gradients: write out what its penalty takes, or leave it out. Where "
                "none is asked of it, as for adversarial examples, fetch it from one program and feed it to another"
            )
        read = () if variable.producer is None else variable.producer.inputs
        new = [v for v in read if v is not None and v.key not in seen]
        seen.update(v.key for v in new)
        found += new


def float_slots(op: Operator, needs: set[int]) -> list[int]:
    """The float inputs among ``needs`` whose elements it reads."""
    return [slot for slot, v in _inputs(op, needs) if v.dtype in FLOATS]


def check_reads(op: Operator, needs: set[int], way_out: str) -> None:
    """GradientError where an operator reads what only stands for floats that a gradient is asked of."""
    stands = next((v for v in _read(op, needs) if v.dtype not in FLOATS), None)
    if stands is not None:
        maker = stands.producer
        made = "" if maker is None else f", which '{maker.label}' ({maker.full_type}) makes,"
        if stands.dtype is None and stands.type_proto is None:
            raise GradientError(
                f"operator '{op.label}' ({op.full_type}) lies on the path of the loss and reads '{stands.name}'{made} "
                f"and of which nothing tells the element type. Say what it is, as in program.var('{stands.name}')"
                f".dtype = 'float32' and .shape = (...){_rule_wanted(maker)}; or freeze what lies before it "
                "(trainable = False, or no_grad_set)"
            )
        kind = "a sequence or an optional value" if stands.dtype is None else f"{stands.dtype} numbers"
        if maker is not None and maker.attrs.programs:
            way_out = f"It is made in the run, since {why_not_known(maker)}"
        raise GradientError(
            f"operator '{op.label}' ({op.full_type}) lies on the path of the loss and reads '{stands.name}'{made} "
            f"{kind}, through which no gradient goes. {way_out}"
        )


def _rule_wanted(op: Operator | None) -> str:
    found = None if op is None else lookup(op)
    if op is None or (found is not None and found.gradient is not None):
        return ""
    return f", and register a rule with @amp.register_gradient('{op.full_type}', ...)"


def _read(op: Operator, needs: set[int]) -> list[Variable]:
    """What it reads of ``needs``, nested graphs too."""
    return [v for _, v in _inputs(op, needs)] + [v for v in op.captures if v.key in needs]


def _inputs(op: Operator, needs: set[int]) -> list[tuple[int, Variable]]:
    """The inputs among ``needs``, by slot, but those of which it reads the type alone, and where its gradient stops."""
    found = [(slot, v) for slot, v in enumerate(op.inputs) if v is not None and v.key in needs]
    if not found:
        return []
    rule = lookup(op)
    left_out = {*traits_of(op).type_only, *(rule.gradient.stops if rule and rule.gradient else ())}
    return [(slot, v) for slot, v in found if slot not in left_out]


def _continues(op: Operator, read: list[Variable], made: Variable) -> bool:
    """Whether what is made of something stands for it, as floats do."""
    if made.dtype is None or made.dtype in FLOATS or made.dtype.startswith(_SMALL_FLOATS):
        return True
    quantised = traits_of(op).quantises or any(v.dtype in _QUANTISED for v in read)
    return quantised and made.dtype in _QUANTISED
