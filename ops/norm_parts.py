"""Parts of batch normalisation and its gradient: statistics and, on a GPU place, rows of mean 0 and variance 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Protocol, TypeVar

import numpy as np

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.types import HALF
from amp_transpiler.ops.channel_rows import by_channel
from amp_transpiler.ops.common import once, size_of
from amp_transpiler.ops.gpu_kernels import product as matrix_product
from amp_transpiler.ops.training.rows import products, state_as

_Size = TypeVar("_Size")
#: Of a norm that names none.
EPSILON = 1e-5


class _Norm(Protocol):
    @property
    def attrs(self) -> Mapping[str, Any]: ...


def epsilon_of(norm: _Norm) -> float:
    """What is added to a variance or to a mean square."""
    return float(norm.attrs.get("epsilon", EPSILON))


def mixes_types(op: Operator) -> bool:
    """Whether inputs of an operator have several element types, which a kernel may not take."""
    return len({v.dtype for v in op.inputs if v is not None}) > 1


def one_behind(shape: Sequence[_Size], axis: int) -> tuple[_Size | int, ...]:
    """The shape of numbers for all along the axes from ``axis`` on."""
    return (*shape[:axis], *(1 for _ in shape[axis:]))


def _mean(e: Emitter, value: Value, axes: Sequence[int]) -> Value:
    return e.op("ReduceMean", value, e.ints(*axes), keepdims=1)


def statistics(e: Emitter, x: Value, axes: Sequence[int]) -> tuple[Value, Value, Value]:
    """Mean, deviation from it and (biased) variance over ``axes``."""
    mean = _mean(e, x, axes)
    deviation = e.op("Sub", x, mean, shape=x.shape)
    return mean, deviation, _mean(e, e.Mul(deviation, deviation), axes)


def inverse_root(e: Emitter, op: Operator, variance: Value) -> Value:
    """1 / sqrt(variance + epsilon)."""
    return e.Reciprocal(e.Sqrt(e.Add(variance, e.like(epsilon_of(op), variance))))


def per_channel(e: Emitter, value: Value, rank: int) -> Value:
    """A vector over channels, broadcastable to [N, C, ...]."""
    return e.reshape(value, (1, size_of(value)[0], *[1] * (rank - 2)))


#: Where scales and inverse deviations lie of which nobody has asked for the product yet, in turn.
LAYERS = "scale and inverse deviation of layers"


def made_ones(e: Emitter, count: int, dtype: str) -> Value:
    """A vector of ones that is made in the run, once: a constant of its size would lie in the session."""
    one = once(e, f"one, {dtype}", lambda: e.cast(e.Add(e.scalar("zero"), e.const(1.0, "float32")), dtype))
    return once(e, f"{count} ones, {dtype}", lambda: e.Expand(one, e.ints(count), shape=(count,)))


def unit_rows(e: Emitter, rows: Value, ones: Value, epsilon: float) -> tuple[Value, Value, Value]:
    """The rows of a matrix with mean 0 and variance 1, in its type, with mean and 1 / sqrt(variance + epsilon), fp32
    [rows, 1]."""
    shape, kinds = size_of(rows), (rows.dtype, "float32", "float32")
    normal, *found = e.op("LayerNormalization", rows, ones, outputs=3, dtype=kinds, epsilon=epsilon)
    mean, r = (Value(v.name, v.dtype, (shape[0], 1)) for v in found)
    return Value(normal.name, rows.dtype, shape), mean, r


def standardised(e: Emitter, x: Value, epsilon: float) -> tuple[Value, Value, Value]:
    """[C, M] of mean 0 and variance 1 from [N, C, ...], with mean and 1 / sqrt(variance + epsilon), fp32 [C].

    The gradient finds what the forward rule made.
    """
    key = f"{x.name} standardised, {epsilon}"
    if key not in e.shared:
        rows = by_channel(e, x)
        channels, count = size_of(rows)
        normal, *found = unit_rows(e, rows, made_ones(e, count, x.dtype), epsilon)
        e.shared[key] = (normal, *(e.reshape(v, (channels,)) for v in found))
    normal, mean, r = e.shared[key]
    return normal, mean, r


def slope_of(e: Emitter, scale: Value, r: Value) -> Value:
    """scale * r. The gradient of the last layer makes those of all layers before it."""
    if _slope_key(scale, r) not in e.shared:
        known = e.shared.pop(LAYERS, ())
        pairs = sorted(zip(known[::2], known[1::2], strict=True), key=lambda pair: size_of(pair[0]))  # alike together
        pairs = pairs if (scale, r) in pairs else [(scale, r)]
        for pair, made in zip(pairs, products(e, pairs), strict=True):
            e.shared[_slope_key(*pair)] = (made,)
    return e.shared[_slope_key(scale, r)][0]


def remember_slope(e: Emitter, scale: Value, r: Value, slope: Value) -> None:
    """Say that this is scale * r."""
    e.shared[_slope_key(scale, r)] = (slope,)


def _slope_key(scale: Value, r: Value) -> str:
    return f"{scale.name} * {r.name}"


def shifted(e: Emitter, x: Value, slope: Value, bias: Value, mean: Value) -> Value:
    """slope * (x - mean) + bias, with fp32 vectors over channels, in the type of X.

    What the mean loses in this type goes into the bias; the slope's rounding is one more of the size of the result's.
    """
    low_mean = e.cast(mean, x.dtype)
    if x.dtype in HALF:
        row = (1, *size_of(mean))
        held, one = e.reshape(e.f32(low_mean), row), e.const(np.ones(size_of(slope)), "float32")
        bias = e.reshape(e.BatchNormalization(held, slope, bias, mean, one, epsilon=0.0, shape=row), row[1:])
    return affine(e, x, slope, bias, low_mean)


def affine(e: Emitter, x: Value, slope: Value, bias: Value, mean: Value) -> Value:
    """The same, with vectors in the type of X, as the kernel wants them."""
    slope, bias, mean = (state_as(e, v, x.dtype) for v in (slope, bias, mean))
    if x.dtype == "bfloat16":  # CUDA has no kernel of BatchNormalization
        slope, bias, mean = (per_channel(e, v, len(size_of(x))) for v in (slope, bias, mean))
        return e.Add(e.Mul(e.Sub(x, mean), slope), bias)
    one = e.const(np.ones(size_of(slope)), x.dtype)
    return e.BatchNormalization(x, slope, bias, mean, one, epsilon=0.0, shape=x.shape)


#: Added to the variance of dY: so that numbers of any size that 16 bit has are brought near to 1, and a row of equal
#: numbers, whose mean fp32 may miss by 1e-7 of it, stays far from overflow.
LEAST_VARIANCE = 1e-10


#: As many blocks may a row have, and from so many numbers on it has them.
_BLOCKS, _LONG_ROW = (64, 32, 16, 8), 1024


def correlation(e: Emitter, normal: Value, x_normal: Value) -> Value:
    """Minus the mean of the products of two standardised rows, [C]: between -1 and 1, so that their type holds it.

    Of long rows by the products of their blocks, of which the diagonal counts: a GPU's kernels of products compute
    tiles, and of a row by a column one number of each is wanted (26 of 328 ms of a step of ResNet-50 on an H200).
    """
    channels, count = size_of(normal)
    parts = [n for n in _BLOCKS if count > _LONG_ROW and count % (8 * n) == 0]  # 8: as tensor cores read
    blocks = parts[0] if parts and e.at.fused else 1
    left, right = (e.reshape(v, (channels, blocks, count // blocks)) for v in (normal, x_normal))
    mean, held = -blocks / count, e.hangs(count)  # no setting of a kernel, where the run knows how many there are
    found = matrix_product(e, left, right, trans_b=True, alpha=1.0 if held else mean)
    found = e.Mul(found, e.like(mean, found)) if held else found
    found = e.reshape(found, (channels, blocks * blocks))
    if blocks > 1:
        found = e.MatMul(found, e.const(np.eye(blocks).reshape(-1, 1) / blocks, found.dtype), shape=(channels, 1))
    return e.reshape(found, (channels,))


#: Rows of so many numbers, and so many in all, are normalised in parts: up to so many, of so many numbers at least.
#: Kernels of normalisation have a block of threads for a row, and leave most of a GPU idle where channels are few: 64
#: rows of 802,816 numbers took 0.94 ms on an H200, 8,192 of 6,272 take 0.21, and what is applied to them 0.65 and 0.12.
#: Tensor cores read eight at a time.
_LONG, _MANY, _MOST_ROWS, _SHORTEST, _EVEN = 1 << 15, 1 << 23, 1 << 13, 512, 8


def _parts_of(channels: int, count: int) -> int:
    """In how many parts the row of a channel is normalised. That takes some thirty kernels of small vectors more."""
    if count < _LONG or channels * count < _MANY:
        return 1
    fitting = (n for n in (1 << k for k in range(1, 14)) if count % (_EVEN * n) == 0 and channels * n <= _MOST_ROWS)
    return max((n for n in fitting if count // n >= _SHORTEST), default=1)


def parts_of_rows(e: Emitter, x: Value, epsilon: float) -> tuple[Value, Value, Value] | None:
    """[C n, M / n] of mean 0 and variance 1 from [N, C, ...], with mean and 1 / deviation of each part, fp32 [C, n];
    None where rows are whole. The gradient finds what the forward rule made."""
    channels, count = size_of(x)[1], size_of(x)[0] * prod(size_of(x)[2:])
    n, key = _parts_of(channels, count), f"{x.name} standardised in parts, {epsilon}"
    if n == 1:
        return None
    if key not in e.shared:
        rows = e.reshape(by_channel(e, x), (channels * n, count // n))
        normal, *found = unit_rows(e, rows, e.const(np.ones(count // n), x.dtype), epsilon)
        e.shared[key] = (normal, *(e.reshape(v, (channels, n)) for v in found))
    normal, means, inverses = e.shared[key]
    return normal, means, inverses


def moments_of_parts(e: Emitter, means: Value, inverses: Value) -> tuple[Value, Value, Value]:
    """Mean and 1 / deviation of channels, fp32 [C, 1], from those of their n parts, and by what each mean of these is
    off that of its channel, [C, n].

    Two numbers that have the mean and deviation of a part stand for it, and a kernel of normalisation does the rest.
    """
    key = f"{means.name} and {inverses.name} of whole rows"
    if key not in e.shared:
        channels, n = size_of(means)
        signs, pairs = e.const(np.array([[[-1.0], [1.0]]]), "float32"), (channels, 2, n)
        apart = e.Div(signs, e.reshape(inverses, (channels, 1, n)), shape=pairs)
        both = e.Add(e.reshape(means, (channels, 1, n)), apart, shape=pairs)
        rows, one = e.reshape(both, (channels, 2 * n)), e.const(np.ones(2 * n), "float32")
        _, mean, r = unit_rows(e, rows, one, 0.0)
        e.shared[key] = (mean, r, e.op("Sub", means, mean, shape=(channels, n)))
    mean, r, off = e.shared[key]
    return mean, r, off


def over_rows(e: Emitter, x: Value, slope: Value, bias: Value) -> Value:
    """slope * x + bias of a matrix, with fp32 numbers for each of its rows, in its type."""
    rows, count = size_of(x)
    slope, bias = (e.reshape(v, (rows,)) for v in (slope, bias))
    made = affine(e, e.reshape(x, (1, rows, count)), slope, bias, e.const(np.zeros(rows), x.dtype))
    return e.reshape(made, (rows, count))
