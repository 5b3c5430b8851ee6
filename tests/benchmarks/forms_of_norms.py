"""Forms of what batch normalisation and its neighbours compute, for tests/benchmarks/forms.py.

Sizes are those of ResNet-50 with 64 images, the last of rows those of BERT base.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import prod
from unittest import mock

import numpy as np

from amp_transpiler.ir.contrib_types import DOMAIN
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ops import norm_parts
from amp_transpiler.ops.common import size_of
from amp_transpiler.ops.gpu_kernels import along_rows
from tests.benchmarks.form import Case, Form

#: Rows, each of a channel or of a part of one, and their lengths; the last are tokens.
_ROWS = [
    *[(8192, 6272), (4096, 12544), (2048, 25088)],
    *[(8192, 3136), (4096, 6272), (2048, 12544)],
    *[(8192, 1568), (4096, 3136), (2048, 6272), (1024, 12544)],
    *[(2048, 3136), (1024, 6272), (128, 50176)],
    *[(512, 6272), (256, 12544)],
    (4096, 768),
]


def rows(tiny: bool) -> Iterator[Case]:
    """What is computed of rows of one length: normalised, scaled and shifted, their products, and mixtures of two."""
    for count, length in [(8, 1792)] if tiny else _ROWS:
        one: dict[str, Form] = {"LayerNormalization": _normalised, "BatchNormalization": _affine, "Add": _added}
        for parts in (n for n in (1, 4, 16, 64) if length % (8 * n) == 0):
            one |= {f"ReduceMean of {parts} parts": partial(_mean, parts)}
            one |= {f"product of {parts} parts with ones": partial(_product_with_ones, parts)}
        yield Case(f"rows {count} x {length}", [(count, length), (count, 1)], one)
        two: dict[str, Form] = {
            f"products of {n} blocks": partial(_in_blocks, n) for n in (1, 2, 4, 8, 16, 32, 64) if length % (8 * n) == 0
        }
        two |= {
            "HyperConnectionPostMix": lambda e, x, y, a: along_rows(e, e.f32(a), x, e.f32(a), y),
            "HyperConnectionPostMix, Add": lambda e, x, y, a: _added(e, along_rows(e, e.f32(a), x, e.f32(a), y), a),
            "BatchNormalization, GatedAdd": lambda e, x, y, a: _gated(e, _affine(e, x, a), y, a),
            "Mul, GatedAdd": lambda e, x, y, a: _gated(e, e.Mul(x, a, shape=x.shape), y, a),
        }
        yield Case(f"two of rows {count} x {length}", [(count, length), (count, length), (count, 1)], two)


def _normalised(e: Emitter, x: Value, _: Value) -> Value:
    assert x.shape is not None
    one = e.const(np.ones(x.shape[1:]), x.dtype)
    kinds = (x.dtype, "float32", "float32")
    return e.op("LayerNormalization", x, one, outputs=3, dtype=kinds, axis=-1, shape=x.shape)[0]


def _affine(e: Emitter, x: Value, a: Value) -> Value:
    assert x.shape is not None
    shape, vector = (1, *x.shape), e.reshape(a, x.shape[:1])
    zero, one = (e.const(np.full(x.shape[0], n), x.dtype) for n in (0, 1))
    return e.reshape(e.BatchNormalization(e.reshape(x, shape), vector, vector, zero, one, shape=shape), x.shape)


def _mean(parts: int, e: Emitter, x: Value, _: Value) -> Value:
    rows, length = size_of(x)
    shape = (rows * parts, length // parts)
    return e.ReduceMean(e.reshape(x, shape), e.ints(1), keepdims=1, shape=(shape[0], 1))


def _product_with_ones(parts: int, e: Emitter, x: Value, _: Value) -> Value:
    rows, length = size_of(x)
    shape = (rows * parts, length // parts)
    ones = e.const(np.ones((shape[1], 1)), x.dtype)
    return e.Gemm(e.reshape(x, shape), ones, alpha=1 / shape[1], shape=(shape[0], 1))


def _added(e: Emitter, x: Value, a: Value) -> Value:
    return e.Add(x, a, shape=x.shape)


def _gated(e: Emitter, x: Value, y: Value, a: Value) -> Value:
    return e.op("GatedAdd", x, y, a, domain=DOMAIN, shape=x.shape)


def _in_blocks(blocks: int, e: Emitter, a: Value, b: Value, _: Value) -> Value:
    with mock.patch.object(norm_parts, "_BLOCKS", (blocks,)), mock.patch.object(norm_parts, "_LONG_ROW", 0):
        return norm_parts.correlation(e, a, b)


def relu(tiny: bool) -> Iterator[Case]:
    """The gradient of a rectifier: where its result is positive."""
    shape = (8, 64) if tiny else (256, 64, 56, 56)

    def chosen(e: Emitter, mask: Value, dy: Value) -> Value:
        return e.Where(mask, dy, e.like(0, dy), shape=dy.shape)

    def greater(e: Emitter, y: Value, _: Value) -> Value:
        return e.Greater(y, e.like(0, y), dtype="bool", shape=y.shape)

    def nonzero(e: Emitter, y: Value, _: Value) -> Value:
        return e.op("Cast", y, to=9, dtype="bool", shape=y.shape)

    def one_gate(e: Emitter, y: Value, dy: Value) -> Value:
        line = (1, prod(shape))
        return e.op(
            "GatedAdd", e.reshape(y, line), e.reshape(dy, line), e.const([[1]], y.dtype), domain=DOMAIN, shape=line
        )

    yield Case(
        f"rectifier of {shape}",
        [shape, shape],
        {
            "Greater": greater,
            "Cast": nonzero,
            "Greater, Where": lambda e, y, dy: chosen(e, greater(e, y, dy), dy),
            "Cast, Where": lambda e, y, dy: chosen(e, nonzero(e, y, dy), dy),
            "Sign, Mul": lambda e, y, dy: e.Mul(e.Sign(y, shape=y.shape), dy, shape=y.shape),
            "Add": lambda e, y, dy: e.Add(y, dy, shape=y.shape),
            "GatedAdd of 1": one_gate,
        },
    )


def apart(tiny: bool) -> Iterator[Case]:
    """Zeros between the positions of images, as a convolution of one position with strides has backwards."""
    for channels, size in [(8, 4)] if tiny else [(256, 28), (512, 14), (1024, 7)]:
        images = 2 if tiny else 64
        shape, wide = (channels, images, size, size), (channels * images, 2 * size, 2 * size)

        def chosen(e: Emitter, x: Value, shape: tuple[int, ...] = shape, wide: tuple[int, ...] = wide) -> Value:
            first = np.array([1, 0, 0, 0], bool).reshape(1, 2, 1, 2)
            flat = (wide[0], shape[-1], 1, shape[-1], 1)
            y = e.Where(e.const(first), e.reshape(x, flat), e.like(0, x), shape=(*flat[:2], 2, flat[3], 2))
            return e.reshape(y, wide)

        def padded(e: Emitter, x: Value, shape: tuple[int, ...] = shape, wide: tuple[int, ...] = wide) -> Value:
            size = shape[-1]
            lines = e.reshape(x, (wide[0] * size, size, 1))
            across = e.Pad(lines, e.ints(0, 0, 0, 0, 0, 1), shape=(wide[0] * size, size, 2))
            rows = e.reshape(across, (wide[0] * size, 1, 2 * size))
            return e.reshape(e.Pad(rows, e.ints(0, 0, 0, 0, 1, 0), shape=(wide[0] * size, 2, 2 * size)), wide)

        def product(
            lines: int, e: Emitter, x: Value, shape: tuple[int, ...] = shape, wide: tuple[int, ...] = wide
        ) -> Value:
            size = shape[-1]
            places = np.zeros((lines, size, lines, 2, size, 2))
            for line in range(lines):
                places[line, range(size), line, 0, range(size), 0] = 1
            matrix = e.const(places.reshape(lines * size, 4 * lines * size), x.dtype)
            count = wide[0] * size // lines
            y = e.MatMul(e.reshape(x, (count, lines * size)), matrix, shape=(count, 4 * lines * size))
            return e.reshape(y, wide)

        forms: dict[str, Form] = {"Where": chosen, "Pad, Pad": padded}
        forms |= {
            f"product of {n} lines": partial(product, n) for n in (1, 2, 4, 8) if size * channels * images % n == 0
        }
        yield Case(f"apart {shape}", [shape], forms)


def pools(tiny: bool) -> Iterator[Case]:
    """The stem's pool, with and without the places of maxima."""
    shape = (2, 4, 8, 8) if tiny else (64, 64, 112, 112)
    half = (*shape[:2], shape[2] // 2, shape[3] // 2)
    settings = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}

    def with_places(which: int, e: Emitter, x: Value) -> Value:
        made: Value = e.op("MaxPool", x, outputs=2, dtype=(x.dtype, "int64"), shape=half, **settings)[which]
        return made

    forms: dict[str, Form] = {
        "MaxPool": lambda e, x: e.op("MaxPool", x, shape=half, **settings),
        "with places": partial(with_places, 0),
    }
    yield Case("pool", [shape], forms)
