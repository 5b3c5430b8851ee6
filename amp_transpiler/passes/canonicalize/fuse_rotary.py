"""Rotary positions that an exporter wrote out become one operator when they are trained.

Written out, ``x * cos + concat(-b, a) * sin``, where a and b are the halves of x, takes seven operators, and their
gradients seven more; ``concat(a * cos - b * sin, a * sin + b * cos)``, which the operator of ONNX stands for, as many.
RotaryEmbedding of onnxruntime reads queries or keys once and writes them once; its gradient is the turn back. What is
saved for inference has them written out again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from amp_transpiler.ir.contrib_types import DOMAIN
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.infer import constant_array
from amp_transpiler.ir.metadata import FUSED
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.tensors import as_array, tensor_type
from amp_transpiler.ir.types import FLOATS
from amp_transpiler.passes.canonicalize.matching import added_number, factor, maker, only_reader, remove
from amp_transpiler.passes.view.constants import content
from amp_transpiler.passes.view.of_type import of_type

TYPE = "RotaryEmbedding"
_STANDS_FOR = "Mul Add Concat Neg Sub"

#: What makes halves of equal halves, of one operand.
_OF_EQUAL_HALVES = frozenset({"Cast", "Cos", "Expand", "Identity", "Neg", "Reshape", "Sin", "Unsqueeze"})
#: Operators that are looked at to show that the halves of a table are equal.
_STEPS = 12


@dataclass(frozen=True)
class _Turn:
    """The operator that ends it, what is turned, and the cosines and sines beside it, for half of it or all."""

    last: Operator
    x: Variable
    cos: Variable
    sin: Variable


@dataclass(frozen=True)
class _Layout:
    """[batch, heads, places, size], or, where ``heads`` is given, [batch, places, heads, size].

    ``examples``: of the tables, 1 or the batch.
    """

    examples: int
    places: int | str
    heads: int | None
    size: int


def fuse_rotations(program: Graph) -> list[str]:
    """Put one operator in the place of each rotation of pairs, a head's halves, by angles that are not trained."""
    tables: dict[Variable, Variable] = {}
    count = 0
    for concat in of_type(program, "Concat"):
        turn = _of_both_halves(concat) or _half_by_half(concat)
        layout = None if turn is None or not _fixed(turn.cos) or not _fixed(turn.sin) else _layout(turn)
        if turn is not None and layout is not None:
            _fuse(turn, layout, tables)
            count += 1
    return [f"{count} rotations by position that were written out are one operator each"] if count else []


def _of_both_halves(concat: Operator) -> _Turn | None:
    """x * cos + concat(-b, a) * sin, whose tables hold the same for both halves."""
    negated, turned = _negated(concat.input(0)), concat.outputs[0]
    x, first, second = _halves(negated)
    if x is None or concat.inputs[1:] != [first] or negated is not second or not _along_last(concat):
        return None
    product = only_reader(turned)
    sin = None if product is None else factor(product, turned)
    total = None if product is None or sin is None else only_reader(product.outputs[0])
    if product is None or sin is None or total is None or total.full_type != "Add":
        return None
    beside = maker(total.input(1) if total.input(0) is product.outputs[0] else total.input(0), "Mul")
    cos = None if beside is None else factor(beside, x)
    if cos is None or not _repeats(cos, _STEPS) or not _repeats(sin, _STEPS):
        return None
    return _Turn(total, x, cos, sin)


def _negated(variable: Variable | None) -> Variable | None:
    """What the variable is the negative of: Paddle's exporter writes a factor of -1."""
    negative = maker(variable, "Neg")
    if negative is not None:
        return negative.input(0)
    value, number = added_number(variable, "Mul")
    return value if number == -1 else None


def _half_by_half(concat: Operator) -> _Turn | None:
    """concat(a * cos - b * sin, a * sin + b * cos)."""
    real, imaginary = (maker(concat.input(slot), type_) for slot, type_ in enumerate(("Sub", "Add")))
    if real is None or imaginary is None or len(concat.inputs) != 2 or not _along_last(concat):
        return None
    products = [maker(v, "Mul") for v in (*real.inputs, *imaginary.inputs)]
    given = [] if products[0] is None else [_halves(v) for v in products[0].inputs]
    x, first, second = next((found for found in given if found[0] is not None), (None, None, None))
    cos, sin = (None if op is None else factor(op, half) for op, half in zip(products, (first, second), strict=False))
    if x is None or cos is None or sin is None:
        return None
    for straight, crossed in (products[2:], products[:1:-1]):
        if straight is not None and crossed is not None:
            if factor(straight, first) is sin and factor(crossed, second) is cos:
                return _Turn(concat, x, cos, sin)
    return None


def _halves(variable: Variable | None) -> tuple[Variable | None, Variable | None, Variable | None]:
    """What a Split cuts into two equal parts along its last axis, and the parts, of which the variable is one."""
    split = maker(variable, "Split")
    if split is None or len(split.outputs) != 2 or not _along_last(split):
        return None, None, None
    first, second = split.outputs
    equal = first is not None and second is not None and first.shape == second.shape
    return (split.inputs[0], first, second) if equal else (None, None, None)


def _along_last(op: Operator) -> bool:
    """Whether an operator with an axis cuts, or puts together, along the last one of fp32 tensors with four."""
    x = op.inputs[0]
    if x is None or len(x.shape or ()) != 4 or x.dtype != "float32":
        return False
    return int(op.attrs.get("axis", 0)) in (-1, 3)


def _fixed(variable: Variable) -> bool:
    """Whether no parameter is behind its numbers, and nothing fed that may have a gradient."""
    pending, seen = [variable], {variable}
    while pending:
        at = pending.pop()
        if at.is_parameter or (at.is_input and not at.stop_gradient):
            return False
        read: Iterable[Variable | None] = () if at.producer is None else (*at.producer.inputs, *at.producer.captures)
        new = [v for v in read if v is not None and v not in seen and v.dtype in FLOATS]
        seen.update(new)
        pending += new
    return True


def _repeats(variable: Variable, steps: int) -> bool:
    """Whether the second half of the last axis is known to hold what the first does."""
    data, op, shape = content(variable), variable.producer, variable.shape or ()
    if data is not None:
        return bool(tensor_type(data)[1]) and _has_equal_halves(as_array(data))
    if op is None or op.domain or not steps or not shape or not isinstance(shape[-1], int):
        return False
    if op.type == "Concat":
        return int(op.attrs["axis"]) in (-1, len(shape) - 1) and len(op.inputs) == 2 and op.inputs[0] is op.inputs[1]
    if op.type == "Mul":
        return all(v is not None and (_is_one_number(v) or _repeats(v, steps - 1)) for v in op.inputs)
    source = op.input(0)
    if op.type not in _OF_EQUAL_HALVES or source is None or (source.shape or (None,))[-1] != shape[-1]:
        return False
    if op.type == "Unsqueeze":  # an axis of 1 behind the last would not have its size
        axes = None if op.input(1) is None else constant_array(op.inputs[1])  # type: ignore[arg-type]
        if axes is None or {-1, len(shape) - 1} & {int(axis) for axis in axes.reshape(-1)}:
            return False
    return _repeats(source, steps - 1)


def _has_equal_halves(array: np.ndarray) -> bool:
    half, odd = divmod(array.shape[-1], 2)
    return not odd and bool((array[..., :half] == array[..., half:]).all())


def _is_one_number(variable: Variable) -> bool:
    return variable.shape is not None and all(size == 1 for size in variable.shape)


def _layout(turn: _Turn) -> _Layout | None:
    """How queries or keys and their tables lie; None where the operator does not have them so."""
    shape, given = turn.x.shape or (), turn.cos.shape or ()
    size, table = shape[3], (1,) * (4 - len(given)) + given
    if turn.sin.shape != given or len(table) != 4 or not given:
        return None
    if not isinstance(size, int) or table[3] not in (size, size // 2):
        return None
    for axis in (2, 1):
        examples, places, heads = table[0], table[axis], shape[3 - axis]
        if places is None or places != shape[axis] or table[3 - axis] != 1 or not isinstance(examples, int):
            continue
        if examples == 1 or (examples == shape[0] and isinstance(places, int)):
            if axis == 2 or isinstance(heads, int):
                return _Layout(examples, places, heads if axis == 1 else None, size)  # type: ignore[arg-type]
    return None


def _fuse(turn: _Turn, layout: _Layout, tables: dict[Variable, Variable]) -> None:
    program, last, x, heads = turn.last.program, turn.last, turn.x, layout.heads
    cos, sin = (_as_rows(table, layout, last, tables) for table in (turn.cos, turn.sin))
    at: np.ndarray = np.zeros(1, np.int64)  # consecutive ones, from the first on
    if layout.examples != 1 and isinstance(layout.places, int):
        at = np.arange(layout.examples * layout.places).reshape(layout.examples, layout.places)
    read, out = [program.add_constant(f"{x.name}.positions", at), cos, sin], last.outputs[0]
    remove(last, {x, turn.cos, turn.sin})
    if heads is None:
        _add(program, [x, *read], out, last, {})
        return
    width, (batch, places, *_) = heads * layout.size, x.shape or ()
    rows, turned = (program.new_variable(x.name, x.dtype, (batch, places, width)) for _ in range(2))
    _reshape(x, rows, [0, 0, width], last)
    _add(program, [rows, *read], turned, last, {"num_heads": heads})
    _reshape(turned, out, [0, 0, heads, layout.size], last)


def _add(program: Graph, read: list[Variable], out: Variable | None, like: Operator, attrs: dict[str, Any]) -> None:
    op = program.add_operator(TYPE, read, [out], domain=DOMAIN, attrs=attrs, name=like.name, like=like)
    op.metadata[FUSED] = _STANDS_FOR


def _reshape(source: Variable, target: Variable | None, sizes: list[int], like: Operator) -> None:
    program = source.program
    program.add_operator(
        "Reshape", [source, program.add_constant(f"{source.name}.sizes", np.array(sizes))], [target], like=like
    )


def _as_rows(table: Variable, layout: _Layout, like: Operator, tables: dict[Variable, Variable]) -> Variable:
    """The first half of a table, or what is a half already, as a matrix with a row for each place."""
    if table not in tables:
        program, half, width, shape = table.program, table, layout.size // 2, table.shape or ()
        if shape[-1] != width:
            half = program.new_variable(table.name, table.dtype, (*shape[:-1], width))
            bounds = [program.add_constant(f"{table.name}.half", np.array([n])) for n in (0, width, -1)]
            program.add_operator("Slice", [table, *bounds], [half], like=like)
        places: int | str = layout.places
        if layout.examples != 1 and isinstance(places, int):
            places *= layout.examples
        tables[table] = program.new_variable(table.name, table.dtype, (places, width))
        _reshape(half, tables[table], [-1, width], like)
    return tables[table]
