"""Operators that change nothing, and what nothing reads, go: for a program that is only run."""

from __future__ import annotations

from amp_transpiler.ir.adjacency import successors
from amp_transpiler.ir.constant_data import constant_array
from amp_transpiler.ir.decompose import Parts, write_instead
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.infer import static
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.proto_residue import hand_over, listed_inputs
from amp_transpiler.ir.types import ONNX_TYPES
from amp_transpiler.passes.canonicalize.matching import maker, number, remove
from amp_transpiler.passes.view.of_type import of_type

#: The number that changes nothing as an operand of elementwise arithmetic, and the operands that it may be.
_NEUTRAL = {"Add": (0, (1, 0)), "Sub": (0, (1,)), "Mul": (1, (1, 0)), "Div": (1, (1,)), "Pow": (1, (1,))}
#: What gives its operand another shape, or the one that it has.
_SHAPED = frozenset({"Expand", "Reshape"})
_IDENTITIES = frozenset({"Identity", "Cast", "Dropout", "Where", *_NEUTRAL, *_SHAPED})
#: From here on softplus(x) is x in float32: exp(-x) is less than half of its last digit.
_LINEAR = 20


def settle_casts(program: Graph, keep: frozenset[Operator]) -> None:
    """Put a Cast in the place of each CastLike, the type of which is known: its result may then be so too."""
    for op in of_type(program, "CastLike"):
        made, read = op.output(0), op.input(0)
        if made is not None and read is not None and made.dtype in ONNX_TYPES and op not in keep and not op.attrs:
            write_instead(op, _typed_cast)


def _typed_cast(d: Parts, op: Operator, x: Variable, _like: Variable) -> list[Variable]:
    made = op.outputs[0]
    return [x if made is None else d.cast(x, made.dtype)]


def remove_identities(program: Graph, names: frozenset[str], keep: frozenset[Operator]) -> int:
    """Take out Identity, casts to the type that is there, Dropout that is not trained, and arithmetic with a number
    that changes nothing (x + 0, x * 1, as onnxruntime does; x for softplus(x) from 20 on, as torch exports it) or the
    shape that is there, in nested graphs too; how many.

    Outputs keep their names, and so do variables among ``names``; operators of ``keep`` stay.
    """
    outputs, states, count = set(program.outputs), set(program.updates.values()), 0
    kinds = {op.type for op in program.operators} & _IDENTITIES
    for op in program.operators if kinds or program.nesting else ():
        for nested in op.attrs.programs:
            count += remove_identities(nested, names, keep)
        if op.type not in kinds:
            continue
        made, read = op.output(0), _handed_on(op)
        if read is None or made is None or op in keep or made in states:
            continue
        if read.type_proto is not None or made.dtype != read.dtype:
            continue
        if made in outputs:
            count += _give_name(op, read, outputs, names)
            continue
        if made.name in names:
            continue
        program.replace_uses(made, read)
        if read.shape is None and read not in program.inputs and read.outer is None:
            read.shape = made.shape
            hand_over(made, read)
        if op.type == "Where":
            remove(op, {read})
        else:
            _take_out(op)
        program.remove_variable(made)
        count += 1
    return count


def _give_name(op: Operator, read: Variable, outputs: set[Variable], names: frozenset[str]) -> bool:
    """Let what an output is copied from be the output itself, unless it has a name to keep; whether it is."""
    program, made = op.program, op.outputs[0]
    if made is None or read.producer is None or read in outputs or read.name in names:
        return False
    source, slot = read.producer, read.producer_slot
    if source.type == "Constant" or read.data is not None:
        return False
    _take_out(op)
    program.replace_uses(read, made)
    source.set_output(slot, made)
    if made.shape is None:
        made.shape = read.shape
    program.remove_variable(read)
    return True


def _take_out(op: Operator) -> None:
    """Remove an operator, with the mask that nobody reads."""
    program, masks = op.program, [v for v in op.outputs[1:] if v is not None]
    program.remove_operator(op)
    for mask in masks:
        program.remove_variable(mask)


def _handed_on(op: Operator) -> Variable | None:
    """What the operator hands on as it is; of a cast, what it does where the types are equal."""
    if op.domain:
        return None
    if op.type in _NEUTRAL:
        neutral, slots = _NEUTRAL[op.type]
        for slot in slots:
            given = op.input(slot)
            computed = given is not None and given.producer is not None and given.producer.type != "Constant"  # as most
            if not computed and number(given, op.input(1 - slot)) == neutral:
                return op.input(1 - slot)
        return None
    if op.type == "Where":
        return op.input(2) if _is_linear_softplus(op) else None
    if op.type in _SHAPED:
        read, made = op.input(0), op.output(0)
        shape = None if read is None or made is None else static(made.shape)
        return read if shape is not None and read is not None and static(read.shape) == shape else None
    if op.type == "Dropout":
        mask = op.output(1)
        wanted = mask is not None and (bool(mask.readers) or mask in op.program.outputs)
        if wanted or op.program.opset() < 7:
            return None
        training = op.input(2)
        known = constant_array(training)
        if training is not None and (known is None or known.any()):
            return None
    return op.input(0)


def _is_linear_softplus(op: Operator) -> bool:
    """Whether it selects x for softplus(x) from 20 on, where float32 has no number between the two."""
    greater, softplus, x = maker(op.input(0), "Greater"), maker(op.input(2), "Softplus"), op.input(1)
    if greater is None or softplus is None or x is None or not softplus.input(0) is greater.input(0) is x:
        return False
    return (number(greater.input(1), x) or 0) >= _LINEAR


def remove_dead(program: Graph, names: frozenset[str], keep: frozenset[Operator]) -> None:
    """Take out operators and constants whose results nothing reads, in nested graphs too; inputs and outputs stay."""
    outputs = {*program.outputs, *program.updates, *program.updates.values()}
    read = successors(program.graph)
    for op in reversed(program.operators):
        made = [v for v in op.outputs if v is not None]
        if made and read[made[0].key] and not op.attrs.programs:
            continue  # as most
        if any([read[v.key] or v in outputs for v in made]) or op in keep or any(v.name in names for v in made):
            for nested in op.attrs.programs:
                remove_dead(nested, names, keep)
                release(op, nested)
            continue
        program.remove_operator(op)
        for variable in made:
            program.remove_variable(variable)
    used = outputs | set(program.inputs) | listed_inputs(program)
    for variable in list(program.variables):
        unread = variable.producer is None and not read[variable.key] and variable not in used
        if unread and not variable.is_input and variable.outer is None and variable.name not in names:
            program.remove_variable(variable)


def release(op: Operator, nested: Graph) -> None:
    """Let a nested graph no longer hold what it captures and does not read."""
    read, outputs = successors(nested.graph), set(nested.outputs)
    for variable in list(nested.variables):
        outer = variable.outer
        if outer is None or read[variable.key] or variable in outputs:
            continue
        nested.remove_variable(variable)
        if not any(other.outer is outer for graph in op.attrs.programs for other in graph.variables):
            op.remove_capture(outer)
