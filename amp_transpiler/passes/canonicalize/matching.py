"""Small questions that rewritings ask of the operators around one, and how they write others in their place."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from amp_transpiler.ir.adjacency import successors
from amp_transpiler.ir.constant_data import given_axes
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.tensors import as_array, tensor_type
from amp_transpiler.passes.view.constants import constant_content

#: The least number of float16.
LEAST_HALF = 2.0**-24


def maker(variable: Variable | None, type_: str) -> Operator | None:
    """The operator of this type that makes the variable."""
    op = None if variable is None else variable.producer
    return op if op is not None and op.full_type == type_ else None


def sides(op: Operator | None) -> list[tuple[Variable | None, Variable | None]]:
    """The operands of a commutative operator of two, each with the other; none of no operator."""
    if op is None or len(op.inputs) != 2:
        return []
    a, b = op.inputs
    return [(a, b), (b, a)]


def factor(op: Operator, variable: Variable | None) -> Variable | None:
    """What a Mul multiplies a variable with; None of another operator."""
    if op.type != "Mul" or variable not in op.inputs:
        return None
    return op.input(1) if op.input(0) is variable else op.input(0)


def number(variable: Variable | None, beside: Variable | None = None) -> float | None:
    """The number that a constant of one element holds; None of a parameter, which may come to hold another, and of one
    that gives more dimensions to what it is joined with ``beside`` it."""
    data = constant_content(variable)
    shape = () if data is None else tensor_type(data)[1]
    adds = beside is not None and len(shape) > len(beside.shape or ())
    return None if data is None or math.prod(shape) != 1 or adds else float(as_array(data).reshape(-1)[0])


def added_number(variable: Variable | None, type_: str = "Add") -> tuple[Variable | None, float | None]:
    """What a number is added to (or joined with by another commutative operator), and the number."""
    for operand, other in sides(maker(variable, type_)):
        found = number(operand, other)
        if found is not None:
            return other, found
    return None, None


def holds(variable: Variable | None, wanted: float) -> bool:
    """Whether a constant holds this number throughout; no parameter does, which may come to hold another."""
    data = constant_content(variable)
    return data is not None and bool((as_array(data) == wanted).all())


def only_reader(variable: Variable | None) -> Operator | None:
    """The operator that alone reads what nobody outside the program sees, nor another graph where it is captured."""
    if variable is None or len(variable.readers) != 1 or variable in variable.program.outputs:
        return None
    outer, holder = variable.outer, variable.program.parent
    if outer is not None and holder is not None:
        inside = sum(v.outer is outer for each in holder.attrs.programs for v in each.variables)
        if inside != 1 or only_reader(outer) is None:
            return None
    return variable.readers[0][0]


def alone(variable: Variable | None, types: tuple[str, ...], names: frozenset[str]) -> Operator | None:
    """The operator of one of the types that makes what one operator alone reads, and no name protects."""
    op = None if variable is None else variable.producer
    if variable is None or op is None or op.domain or op.type not in types or variable.name in names:
        return None
    return op if only_reader(variable) is not None else None


def lower_bound(op: Operator) -> float | None:
    """The lower bound of a Clip that has no other."""
    if op.input(2) is not None or op.attrs.get("max", math.inf) < 3e38:
        return None
    return number(op.input(1)) if op.input(1) is not None else op.attrs.get("min")


def squares(op: Operator) -> bool:
    """Whether an operator is a Mul or Pow that squares its first operand."""
    if op.full_type == "Mul":
        return op.input(0) is op.input(1)
    base, exponent = op.input(0), op.input(1)
    whole = exponent is not None and base is not None and exponent.shape == base.shape
    return op.full_type == "Pow" and (number(exponent, base) == 2 or (whole and holds(exponent, 2)))


def squaring(variable: Variable | None) -> Operator | None:
    """The Mul or Pow that makes the variable, where it squares its first operand."""
    op = None if variable is None else variable.producer
    return op if op is not None and squares(op) else None


def reduced_axes(op: Operator) -> list[int] | None:
    """The axes that an operator reduces, counted from the first and in order; None where they are not known."""
    read = op.inputs[0]
    if read is None or read.shape is None:
        return None
    if op.type == "GlobalAveragePool":
        return list(range(2, len(read.shape)))
    axes, rank = given_axes(op), len(read.shape)
    return None if axes is None else sorted({axis % rank for axis in axes})


def added_axes(op: Operator) -> list[int] | None:
    """The axes that an Unsqueeze puts in, counted from the first of what it makes; None where they are not known."""
    read, axes = op.inputs[0], given_axes(op)
    if read is None or read.shape is None or axes is None:
        return None
    rank = len(read.shape) + len(axes)
    return [axis % rank for axis in axes]


def remove(last: Operator, needed: set[Variable]) -> None:
    """Take out an operator, and those before it, constants too, that nothing else needs then."""
    program = last.program
    kept, uses = {*program.outputs, *program.updates.values()}, successors(program.graph)
    queue = [last]
    while queue:
        op = queue.pop()
        read = [v for v in op.inputs if v is not None] + (op.captures if op.attrs.programs else [])
        program.remove_operator(op)
        if op is not last:
            for made in op.outputs:
                if made is not None:
                    program.remove_variable(made)
        for variable in dict.fromkeys(read):
            maker = variable.producer
            if maker is None and not (variable in kept or variable in needed):
                drop_unread(variable)
            if maker is not None and not any(
                [v is not None and (uses[v.key] or v in kept or v in needed) for v in maker.outputs]
            ):
                queue.append(maker)


def put(last: Operator, type_: str, inputs: Sequence[Variable], domain: str = "", **attrs: object) -> Operator:
    """Let a new operator, of the name of another one, make what that makes; it goes, and what it alone needed."""
    program, made = last.program, last.outputs[0]
    remove(last, set(inputs))
    return program.add_operator(type_, inputs, [made], attrs=attrs, domain=domain, name=last.name, like=last)


def computed(
    like: Operator, type_: str, inputs: Sequence[Variable], name: str, shape: Iterable[Any] | None, **attrs: object
) -> Variable:
    """What a new operator beside another one makes, of the element type of its first input."""
    made = like.program.fresh_variable(name, inputs[0].dtype, shape)
    like.program.add_operator(type_, inputs, [made], attrs=attrs, like=like)
    return made


def drop_unread(variable: Variable) -> None:
    """Remove a constant that nothing reads, and what stands for it in nested graphs; nothing else."""
    program, outer, op = variable.program, variable.outer, variable.producer
    if variable.readers or variable in program.outputs:
        return
    if op is not None and op.full_type == "Constant":
        program.remove_operator(op)
        program.remove_variable(variable)
    elif outer is not None and program.parent is not None:
        program.remove_variable(variable)
        if not any(v.outer is outer for each in program.parent.attrs.programs for v in each.variables):
            program.parent.remove_capture(outer)
            drop_unread(outer)
    elif op is None and variable.data is not None and not (variable.persistable or variable.is_input):
        program.remove_variable(variable)
