"""Sums of 16-bit numbers that are rounded after each addition: operators, operands, and the same in numpy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from tests.helpers.rounded_sums import fours, in_turn, lanes, products

Array = np.ndarray[Any, Any]
_RANDOM = np.random.default_rng(0)


def half(*shape: int) -> Array:
    """Random numbers."""
    return _RANDOM.standard_normal(shape).astype(np.float16)


def fed(feeds: dict[str, Array]) -> dict[str, Array]:
    """Those that are no constants."""
    return {name: each for name, each in feeds.items() if each.dtype != np.int64}


def one_operator(
    operator: str, feeds: dict[str, Array], opset: int = 18, shape: Any = None, **attrs: Any
) -> onnx.ModelProto:
    """A model of one operator in float16; integers are constants. ``shape``: that of its result, where onnx cannot say."""
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, v.shape) for name, v in fed(feeds).items()]
    constants = [onnx.numpy_helper.from_array(v, name) for name, v in feeds.items() if name not in fed(feeds)]
    made = helper.make_tensor_value_info("y", TensorProto.FLOAT16, shape)
    graph = helper.make_graph([helper.make_node(operator, list(feeds), ["y"], **attrs)], "g", inputs, [made], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def _correlation(x: Array, w: Array, group: int = 1) -> Array:
    """[N, O, H, W] of windows without padding: channels of a position of the kernel first."""
    (outputs, channels, height, width), (n, _, rows, columns) = w.shape, x.shape
    total = np.zeros((n, outputs, rows - height + 1, columns - width + 1), np.float16)
    for i in range(height):
        for j in range(width):
            read = x[:, :, i : i + total.shape[2], j : j + total.shape[3]]
            for c in range(channels):
                mine = np.repeat(read[:, c::channels], outputs // group, 1)
                total = total + mine * w[None, :, c, i, j, None, None]
    return total


def _cumulative(x: Array, reverse: bool = False, exclusive: bool = False) -> Array:
    """Along the last axis; each sum from its first summand on."""
    rows, count = np.moveaxis(x, -1, 0), x.shape[-1]
    spans = [(i + exclusive, count) if reverse else (0, i + 1 - exclusive) for i in range(count)]
    zero = np.zeros_like(rows[:1])
    return np.stack([in_turn(np.moveaxis(np.concatenate([zero, rows[a:b]]), 0, -1)) for a, b in spans], -1)


def _einsum(equation: str, *arrays: Array) -> Array:
    """Labels that the result lacks in the order of letters, the last one fastest; products in turn."""
    terms, result = equation.split("->")[0].split(","), equation.split("->")[1]
    every = "".join([*sorted({*"".join(terms)} - {*result}), *result])
    sizes = {label: n for term, x in zip(terms, arrays, strict=True) for label, n in zip(term, x.shape, strict=True)}
    total = np.ones([sizes[label] for label in every], np.float16)
    for term, x in zip(terms, arrays, strict=True):
        if len({*term}) < len(term):
            x, term = np.einsum(f"{term}->{''.join(dict.fromkeys(term))}", x), "".join(dict.fromkeys(term))
        turned = x.transpose([term.index(label) for label in every if label in term])
        total = total * turned.reshape([sizes[label] if label in term else 1 for label in every])
    rows = total.reshape(-1, *(sizes[label] for label in result))
    return in_turn(np.moveaxis(rows, 0, -1))


def _stretched(x: Array, w: Array) -> Array:
    """Of a ConvTranspose with stride 2: X with zeros between, and the kernel turned around."""
    n, c, rows, columns = x.shape
    wide = np.zeros((n, c, 2 * rows + 3, 2 * columns + 3), np.float16)
    wide[:, :, 2 : 2 * rows + 2 : 2, 2 : 2 * columns + 2 : 2] = x
    return _correlation(wide, np.ascontiguousarray(w[:, :, ::-1, ::-1].transpose(1, 0, 2, 3)))


def _windows(x: Array, size: int) -> Array:
    count = x.shape[-1] - size + 1
    parts = [x[..., i : i + count, j : j + count] for i in range(size) for j in range(size)]
    return np.stack(parts, -1)


def _stored(function: Callable[[Array], Array], x: Array) -> Array:
    return function(x.astype(np.float64)).astype(np.float16)


def _power(x: Array) -> Array:
    return _stored(np.exp2, x * np.float16(np.log2(np.e)))


def _tanh(x: Array) -> Array:
    power = _power(np.float16(-2) * np.abs(x))
    return np.sign(x) * ((1 - power) / (1 + power))


def _softmax(x: Array, vector: int) -> Array:
    """Along the last axis: of vectors of four each component has a sum of its own, in 64 lanes."""
    power = _power(x - x.max(-1, keepdims=True))
    rows = np.moveaxis(power.reshape(*x.shape[:-1], -1, vector), -1, -2)
    lanes_filled = np.zeros((*rows.shape[:-1], -(-rows.shape[-1] // 64) * 64), np.float16)
    lanes_filled[..., : rows.shape[-1]] = rows
    return power / in_turn(lanes(lanes_filled))[..., None]


def _erf(x: Array) -> Array:
    """Formula 7.1.26 of Abramowitz and Stegun, its numbers cut to 16 bit."""
    size, total = np.abs(x), np.zeros_like(x)
    t = 1 / (1 + np.float16(0.32739) * size)
    for number in (1.0605, -1.4531, 1.4209, -0.28442, 0.25464):
        total = total * t + np.float16(number)
    power = _stored(np.exp2, -(size * (size * np.float16(np.log2(np.e)))))
    return np.sign(x) * (1 - total * t * power)


def _gelu(x: Array, shift: Array | None = None) -> Array:
    x = x if shift is None else x + shift
    return np.float16(0.5) * x * (1 + _erf(x * np.float16(0.70703)))


def _softplus(x: Array) -> Array:
    rest = 1 + _power(-np.abs(x))
    return np.maximum(x, 0) + _stored(np.log2, rest) * np.float16(np.log(2))


def _selu(x: Array) -> Array:
    alpha, gamma = np.float16(1.6732632423543772), np.float16(1.0507009873554805)
    return gamma * np.where(x < 0, alpha * _power(x) - alpha, x)


def _quick_gelu(x: Array, alpha: float = 1.702) -> Array:
    at = np.float16(alpha) * x
    share = 1 / (1 + _power(-np.abs(at)))
    return x * np.where(at < 0, 1 - share, share)


def _fast_gelu(x: Array, shift: Array | None = None) -> Array:
    x = x if shift is None else x + shift
    inner = np.float16(0.035677408136300125) * x * x + np.float16(0.7978845608028654)
    return x * (np.float16(0.5) + np.float16(0.5) * _tanh(x * inner))


def _hard_sigmoid(x: Array, alpha: float = 0.2, beta: float = 0.5) -> Array:
    return np.clip(np.float16(alpha) * x + np.float16(beta), np.float16(0), np.float16(1))


def _batch_norm(x: Array, scale: Array, bias: Array, mean: Array, variance: Array, epsilon: float = 1e-5) -> Array:
    scale, bias, mean, variance = (v[:, None, None] for v in (scale, bias, mean, variance))
    held = np.float16(epsilon)  # rounded towards zero, as numbers that are written in a shader
    held = np.nextafter(held, np.float16(0)) if float(held) > epsilon else held
    return (x - mean) * (1 / np.sqrt(variance + held)) * scale + bias


def _log_softmax(x: Array) -> Array:
    apart = x - x.max(-1, keepdims=True)
    return apart - (_stored(np.log2, lanes(_power(apart))) * np.float16(np.log(2)))[..., None]


def _layer_norm(x: Array, scale: Array, bias: Array) -> Array:
    """Statistics in fp32, each rounded; the rest in 16 bit."""
    wide = x.astype(np.float32)
    mean = wide.mean(-1, keepdims=True)
    inverse = 1 / np.sqrt((wide * wide).mean(-1, keepdims=True) - mean * mean + np.float32(1e-5))
    return (x - mean.astype(np.float16)) * inverse.astype(np.float16) * scale + bias


def _simplified_layer_norm(x: Array, scale: Array) -> Array:
    wide = x.astype(np.float32)
    inverse = 1 / np.sqrt((wide * wide).mean(-1, keepdims=True) + np.float32(1e-5))
    return x * inverse.astype(np.float16) * scale


def _instance_norm(x: Array, scale: Array, bias: Array) -> Array:
    """A multiple and a shift of each channel in fp32, each rounded; the rest in 16 bit."""
    wide, axes = x.astype(np.float32), tuple(range(2, x.ndim))
    mean = wide.mean(axes, keepdims=True)
    factor, shift = (v.astype(np.float32).reshape(-1, *[1] * len(axes)) for v in (scale, bias))
    factor = factor / np.sqrt((wide * wide).mean(axes, keepdims=True) - mean * mean + np.float32(1e-5))
    return x * factor.astype(np.float16) + (shift - mean * factor).astype(np.float16)


_A, _B, _C = half(8, 64), half(64, 16), half(16)
_X = half(2, 8, 9, 9)
#: Operator, feeds, attributes, and the sum in numpy.
CASES: list[tuple[str, dict[str, Array], dict[str, Any], Callable[..., Array]]] = [
    ("MatMul", {"a": half(2, 1, 5, 33), "b": half(3, 33, 7)}, {}, lambda a, b: in_turn(products(a, b))),
    ("Gemm", {"a": _A, "b": _B, "c": _C}, {}, lambda a, b, c: in_turn(products(a, b)) + c),
    ("Gemm", {"a": _A, "b": half(16, 64)}, {"transB": 1}, lambda a, b: fours(products(a, b.T))),
    ("Gemm", {"a": half(8, 63), "b": half(16, 63)}, {"transB": 1}, lambda a, b: in_turn(products(a, b.T))),
    (
        "Gemm",
        {"a": half(64, 7), "b": half(16, 64)},
        {"transA": 1, "transB": 1},
        lambda a, b: in_turn(products(a.T, b.T)),
    ),
    ("Gemm", {"a": _A, "b": _B}, {"alpha": 0.3}, lambda a, b: in_turn(products(a, b)) * np.float16(0.3)),
    ("Conv", {"x": _X, "w": half(6, 8, 3, 3)}, {}, _correlation),
    ("Conv", {"x": _X, "w": half(6, 4, 3, 3)}, {"group": 2}, lambda x, w: _correlation(x, w, 2)),
    ("Conv", {"x": _X, "w": half(8, 1, 3, 3)}, {"group": 8}, lambda x, w: _correlation(x, w, 8)),
    ("ConvTranspose", {"x": half(2, 8, 4, 4), "w": half(8, 6, 3, 3)}, {"strides": [2, 2]}, _stretched),
    ("ReduceSum", {"x": half(40, 300), "axes": np.array([1])}, {"keepdims": 0}, lanes),
    ("ReduceSum", {"x": half(300, 40), "axes": np.array([0])}, {"keepdims": 0}, lambda x: lanes(x.T)),
    ("ReduceMean", {"x": half(40, 60), "axes": np.array([1])}, {"keepdims": 0}, lambda x: lanes(x) / np.float16(60)),
    ("ReduceMean", {"x": half(40, 5, 6)}, {"opset": 13, "axes": [-1]}, lambda x: lanes(x)[..., None] / np.float16(6)),
    ("ReduceL2", {"x": half(40, 90), "axes": np.array([1])}, {"keepdims": 0}, lambda x: np.sqrt(lanes(x * x))),
    (
        "GlobalAveragePool",
        {"x": _X},
        {},
        lambda x: (in_turn(x.reshape(2, 8, 81)) / np.float16(81)).reshape(2, 8, 1, 1),
    ),
    (
        "GlobalAveragePool",
        {"x": half(2, 8, 9, 30)},
        {},
        lambda x: (lanes(x.reshape(2, 8, 270), 128) / np.float16(270)).reshape(2, 8, 1, 1),
    ),
    (
        "AveragePool",
        {"x": half(2, 8, 13, 13)},
        {"kernel_shape": [12, 12]},
        lambda x: lanes(_windows(x, 12), 128) / np.float16(144),
    ),
    ("Exp", {"x": half(300)}, {}, _power),
    ("Log", {"x": np.abs(half(300)) + np.float16(0.01)}, {}, lambda x: _stored(np.log2, x) * np.float16(np.log(2))),
    ("Sigmoid", {"x": half(300)}, {}, lambda x: 1 / (1 + _power(-x))),
    ("Tanh", {"x": half(300)}, {}, _tanh),
    ("Softmax", {"x": half(40, 63)}, {"axis": -1}, lambda x: _softmax(x, 1)),
    ("Softmax", {"x": half(40, 1000)}, {"axis": -1}, lambda x: _softmax(x, 4)),
    ("Softmax", {"x": half(4, 60, 5)}, {"axis": 1}, lambda x: np.moveaxis(_softmax(np.moveaxis(x, 1, -1), 4), -1, 1)),
    ("LayerNormalization", {"x": half(40, 64), "s": half(64), "b": half(64)}, {"axis": -1}, _layer_norm),
    (
        "SimplifiedLayerNormalization",
        {"x": half(40, 64), "s": half(64)},
        {"axis": -1, "shape": (40, 64)},
        _simplified_layer_norm,
    ),
    ("AveragePool", {"x": _X}, {"kernel_shape": [3, 3]}, lambda x: in_turn(_windows(x, 3)) / np.float16(9)),
    ("ReduceSum", {"x": half(3, 5, 300)}, {"keepdims": 0}, lambda x: lanes(x.reshape(-1), 256)),
    (
        "ReduceMean",
        {"x": half(1, 700, 1), "axes": np.array([1, 2])},
        {},
        lambda x: lanes(x.reshape(1, 1, 1, -1), 256) / np.float16(700),
    ),
    (
        "ReduceLogSum",
        {"x": np.abs(half(40, 90)), "axes": np.array([1])},
        {"keepdims": 0},
        lambda x: _stored(np.log, lanes(x)),
    ),
    (
        "ReduceLogSumExp",
        {"x": half(40, 90), "axes": np.array([1])},
        {"keepdims": 0},
        lambda x: _stored(np.log, lanes(_stored(np.exp, x))),
    ),
    ("CumSum", {"x": half(7, 90), "axis": np.array(1)}, {}, _cumulative),
    ("CumSum", {"x": half(5, 90, 2), "axis": np.array(-2)}, {}, lambda x: _cumulative(x.swapaxes(1, 2)).swapaxes(1, 2)),
    ("CumSum", {"x": half(7, 90), "axis": np.array(1)}, {"exclusive": 1}, lambda x: _cumulative(x, exclusive=True)),
    ("CumSum", {"x": half(7, 90), "axis": np.array(1)}, {"reverse": 1}, lambda x: _cumulative(x, reverse=True)),
    (
        "CumSum",
        {"x": half(7, 90), "axis": np.array(1)},
        {"reverse": 1, "exclusive": 1},
        lambda x: _cumulative(x, reverse=True, exclusive=True),
    ),
    *(
        ("Einsum", dict(zip("abc", operands, strict=False)), {"equation": equation}, partial(_einsum, equation))
        for equation, operands in (
            ("bik,bjk->bij", (half(2, 5, 33), half(2, 7, 33))),
            ("zky,kz->y", (half(5, 9, 8), half(9, 5))),
            ("abc,cd,ade->be", (half(2, 3, 8), half(8, 5), half(2, 5, 4))),
            ("ki,i->", (half(9, 20), half(20))),
            ("i,j,i->ij", (half(9), half(7), half(9))),
            ("iji,i->j", (half(19, 4, 19), half(19))),
        )
    ),
    ("InstanceNormalization", {"x": half(2, 5, 9, 9), "s": half(5), "b": half(5)}, {}, _instance_norm),
    ("InstanceNormalization", {"x": half(1, 1, 300), "s": half(1), "b": half(1)}, {}, _instance_norm),
    ("LogSoftmax", {"x": half(40, 90)}, {"axis": -1}, _log_softmax),
    ("LogSoftmax", {"x": half(4, 90, 5)}, {"axis": 1}, lambda x: _log_softmax(x.swapaxes(1, 2)).swapaxes(1, 2)),
    *(
        (operator, {"x": half(300)}, attrs, function)
        for operator, attrs, function in (
            ("Erf", {}, _erf),
            ("Gelu", {"opset": 20}, _gelu),
            ("LeakyRelu", {"alpha": 0.3}, lambda x: np.where(x < 0, np.float16(0.3) * x, x)),
            ("HardSigmoid", {}, _hard_sigmoid),
            ("HardSigmoid", {"alpha": 0.7, "beta": 0.1}, lambda x: _hard_sigmoid(x, 0.7, 0.1)),
            ("HardSwish", {}, lambda x: x * _hard_sigmoid(x, 1 / 6)),
            ("Elu", {"alpha": 1.7}, lambda x: np.where(x < 0, np.float16(1.7) * (_power(x) - 1), x)),
            ("Selu", {}, _selu),
            ("Softplus", {}, _softplus),
            ("Softsign", {}, lambda x: x / (1 + np.abs(x))),
            ("Mish", {}, lambda x: x * _tanh(_softplus(x))),
            ("QuickGelu", {"domain": "com.microsoft", "shape": (300,)}, _quick_gelu),
            ("FastGelu", {"domain": "com.microsoft", "shape": (300,)}, _fast_gelu),
        )
    ),
    ("BiasGelu", {"x": half(9, 64), "b": half(64)}, {"domain": "com.microsoft", "shape": (9, 64)}, _gelu),
    ("FastGelu", {"x": half(9, 64), "b": half(64)}, {"domain": "com.microsoft", "shape": (9, 64)}, _fast_gelu),
    (
        "BatchNormalization",
        {"x": half(2, 5, 9, 9), "s": half(5), "b": half(5), "m": half(5), "v": np.abs(half(5)) + np.float16(0.1)},
        {"epsilon": 1e-3},
        partial(_batch_norm, epsilon=1e-3),
    ),
    (
        "BatchNormalization",
        {"x": half(2, 5, 4, 4), "s": half(5), "b": half(5), "m": half(5), "v": np.abs(half(5)) * np.float16(1e-5)},
        {},
        _batch_norm,
    ),
]
