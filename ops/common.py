"""What the gradient rules share."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from amp_transpiler.errors import GradientError
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import gradient, traits_of
from amp_transpiler.ir.types import HALF

_Item = TypeVar("_Item")

#: Longer constants are made at run time.
LONG = 1 << 16
#: So many products at once: a grid of CUDA has no more blocks along its third axis.
MOST_PRODUCTS = 2**16 - 1
#: What a gradient rule returns: one value per forward input, None where there is no gradient.
Grads = Sequence[Value | None]
#: An input that may be left out of what a decomposition writes.
Maybe = Variable | None


def summed(e: Emitter, value: Value, source: Value, index: int) -> Value:
    """``value``, of the shape of ``source``, summed to the shape of forward input ``index``."""
    return summed_to(e, value, shape_of(e, index), size_of(source))


def summed_to(e: Emitter, value: Value, shape: Sequence[int], source: Sequence[int]) -> Value:
    """Undo broadcasting: ``value`` of shape ``source`` summed to ``shape``, in its type; kernels add up in fp32.

    Where leading axes go and ``value`` is a multiple, or of 16 bit on a GPU, by a product with ones: 4,096 rows of 768
    numbers take 6.5 us on an H200, and ReduceSum 22.
    """
    kept = list(itertools.dropwhile(lambda size: size == 1, shape))
    rows = math.prod(source[: len(source) - len(kept)])
    base, factor = multiple(e, value)
    if kept == list(source[len(source) - len(kept) :]) and kept and 1 < rows <= LONG:
        if factor != 1 or (e.at.fused and base.dtype in HALF):
            width = math.prod(kept)
            ones = e.const(np.ones((1, rows)), base.dtype)
            alpha = None if factor == 1 else factor
            return e.reshape(e.Gemm(ones, e.reshape(base, (rows, width)), alpha=alpha, shape=(1, width)), shape)
    if tuple(shape) == tuple(source):
        return value
    lead = len(source) - len(shape)
    axes = [i for i in range(len(source)) if i < lead or (shape[i - lead] == 1 and source[i] != 1)]
    return e.reshape(e.op("ReduceSum", value, e.ints(*axes), keepdims=1) if axes else value, shape)


def shape_of(e: Emitter, index: int) -> tuple[int, ...]:
    """The shape of forward input ``index``, whose gradient is wanted."""
    shape = e.output_shapes[index]
    assert shape is not None
    return shape


def along_last_axis(softmax: Operator, rank: int | None) -> bool:
    """Whether a Softmax of tensors of this rank is along their last axis; its axis had another default before 13."""
    axis = int(softmax.attrs.get("axis", -1 if softmax.program.opset() >= 13 else 1))
    return axis == -1 or (rank is not None and axis == rank - 1)


def once(e: Emitter, key: str, make: Callable[[], Value]) -> Value:
    """What ``make`` writes, written once in a model."""
    if key not in e.shared:
        e.shared[key] = (make(),)
    return e.shared[key][0]


def pointwise(reads: str, **rules: Callable[[Emitter, Value, Value], Value]) -> None:
    """Register gradients of operators of one operand, by their types: each of the one tensor that it reads, and dy."""

    def register(type_: str, rule: Callable[[Emitter, Value, Value], Value]) -> None:
        gradient(type_, reads, native=True)(lambda e, op, read, dy: [rule(e, read, dy)])

    for type_, rule in rules.items():
        register(type_, rule)


def size_of(value: Value) -> tuple[int, ...]:
    """The shape of a rule's input."""
    assert value.shape is not None
    return value.shape


def makes_multiples(e: Emitter) -> bool:
    """Whether :func:`times` makes multiples. On CPU nothing is gained in fp32."""
    return e.at.fused or e.emulates


def exchanges_matrices(perm: Sequence[int]) -> bool:
    """Whether an order of axes exchanges the last two and leaves the others."""
    return len(perm) > 1 and list(perm) == _exchange(len(perm))


def exchanged(e: Emitter, value: Value) -> Value:
    """The last two axes exchanged."""
    return e.transpose(value, _exchange(len(size_of(value))))


def _exchange(rank: int) -> list[int]:
    return [*range(rank - 2), rank - 1, rank - 2]


def scaled_by(e: Emitter, value: Value, factor: float) -> Value:
    """``value * factor``; itself where that is 1."""
    return value if factor == 1 else e.Mul(value, e.like(factor, value))


def given_attributes(op: Operator, *names: str) -> dict[str, Any]:
    """Those of these attributes that an operator has."""
    return {name: op.attrs[name] for name in names if name in op.attrs}


def times(e: Emitter, base: Value, factor: float) -> Value:
    """``base * factor``; who takes :func:`multiple` of it may leave the multiplication to a later operator."""
    new = e.op("Mul", base, e.like(factor, base), shape=base.shape)
    if makes_multiples(e):
        e.shared[_multiple(new)] = (base, e.const(factor, "float64"))
    return new


def multiple(e: Emitter, value: Value) -> tuple[Value, float]:
    """The tensor of which ``value`` is a multiple, and the number; the value itself and 1 where it is none."""
    found = e.shared.get(_multiple(value))
    if found is None:
        return value, 1.0
    base, factor = found
    return base, number_of(e, factor)


def number_of(e: Emitter, constant: Value) -> float:
    """The number that a scalar constant is."""
    return float(e.content(constant))


def _multiple(value: Value) -> str:
    return f"a multiple: {value.name}"


def reshaped(e: Emitter, value: Value, shape: Sequence[int]) -> Value:
    """The value in another shape; a multiple is one there too."""
    new = e.reshape(value, shape)
    found = e.shared.get(_multiple(value))
    if found is not None:
        e.shared[_multiple(new)] = (e.reshape(found[0], shape), found[1])
    return new


def unviewed(e: Emitter, value: Value) -> Value:
    """The tensor that a value is, perhaps in another shape."""
    maker = e.makers.get(value.name)
    while maker is not None and traits_of(maker.type).view and maker.inputs[0] is not None:
        value = maker.inputs[0]
        maker = e.makers.get(value.name)
    return value


def unwidened(e: Emitter, value: Value) -> Value:
    """The 16-bit tensor that an fp32 one was cast from; else the value."""
    maker = e.makers.get(value.name)
    source = None if maker is None or maker.type != "Cast" or value.dtype != "float32" else maker.inputs[0]
    return value if source is None or source.dtype not in HALF else source


def comparable(e: Emitter, value: Value) -> Value:
    """``value`` in a type that CUDA compares: it has no kernels of comparisons for bfloat16."""
    return e.f32(value) if value.dtype == "bfloat16" else value


def sliced(e: Emitter, value: Value, axis: int, start: int, stop: int) -> Value:
    """The part of ``value`` from ``start`` to ``stop`` along an axis."""
    shape = list(size_of(value))
    if start == 0 and stop == shape[axis]:
        return value
    shape[axis] = stop - start
    return e.Slice(value, e.ints(start), e.ints(stop), e.ints(axis), shape=shape)


def row_lookup(e: Emitter, table: Value, indices: Value, shape: Sequence[int] | None) -> Value:
    """Rows of a table that may be large. Of rows that lie in no cache onnxruntime's GatherND on CPU reads several at a
    time, its Gather one after the other: twice as long (measured)."""
    if not e.at.host:
        return e.op("Gather", table, indices, dtype=table.dtype, axis=0, shape=shape)
    at = e.Unsqueeze(e.cast(indices, "int64"), e.ints(-1), shape=None if shape is None else (*shape[:-1], 1))
    return e.op("GatherND", table, at, dtype=table.dtype, shape=shape)


def padded(e: Emitter, value: Value, before: Sequence[int], after: Sequence[int]) -> Value:
    """Zeros around ``value``; CUDA pads no bfloat16."""
    if not any(before) and not any(after):
        return value
    value = e.f32(value) if value.dtype == "bfloat16" else value
    shape = [p + d + q for p, d, q in zip(before, size_of(value), after, strict=True)]
    return e.Pad(value, e.ints(*before, *after), shape=shape)


def padded_axis(e: Emitter, value: Value, axis: int, before: int, after: int) -> Value:
    """Zeros before and after ``value`` along an axis."""
    rank = len(size_of(value))
    at = [int(i == axis) for i in range(rank)]
    return padded(e, value, [before * i for i in at], [after * i for i in at])


def grouped(items: Sequence[_Item], most: int) -> list[Sequence[_Item]]:
    """Neighbours in groups of ``most`` or fewer, or in ``most`` groups, of numbers that differ by one at most."""
    count = min(-(-len(items) // most), most)
    ends = [len(items) * number // count for number in range(count + 1)] if count else [0]
    return [items[begin:end] for begin, end in itertools.pairwise(ends)]


def pieces(e: Emitter, value: Value, axis: int, lengths: Sequence[int]) -> list[Value]:
    """A value in pieces of these lengths along an axis: by a Split, or by a tree of them where one would make more than
    its kernel takes."""
    if len(lengths) == 1:
        return [value]
    most = 0 if e.at.by_address else e.at.most_pieces  # there the lowering sees to it
    groups = grouped(lengths, most or len(lengths))
    made = [sum(group) for group in groups] if len(groups) > 1 else lengths
    parts: Sequence[Value] = e.op("Split", value, e.ints(*made), outputs=len(made), dtype=value.dtype, axis=axis)
    if len(groups) == 1:
        return list(parts)
    return [piece for part, group in zip(parts, groups, strict=True) for piece in pieces(e, part, axis, group)]


def integers(e: Emitter, op: Operator, slot: int, what: str) -> list[int] | None:
    """The integers in input ``slot`` of a gradient operator, as :func:`numbers`."""
    known = numbers(e, op, slot, what)
    return None if known is None else [int(number) for number in known]


def numbers(
    e: Emitter, op: Operator, slot: int, what: str, way: str = "take the operator off the training path"
) -> np.ndarray | None:
    """The numbers in input ``slot`` of a gradient operator, None where it is left out.

    GradientError where they are not known before the run: ``way`` is what there is to do other than fix them.
    """
    variable = op.input(slot)
    if variable is None:
        return None
    known = e.known(variable)
    if known is None:
        raise GradientError(
            f"'{op.label}' needs the {what} ('{variable.name}') before the run, but they are computed in it. "
            f"Make them constant, or {way}"
        )
    return known.reshape(-1)
