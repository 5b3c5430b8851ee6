"""Cases of the operators that add up: reductions, products, convolutions, pools, norms, recurrent layers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from tests.helpers.operator_cases import DTYPES, Array, Case, Cases, plain, positive

REDUCTIONS = [
    "ReduceL1",
    "ReduceL2",
    "ReduceLogSum",
    "ReduceLogSumExp",
    "ReduceMax",
    "ReduceMean",
    "ReduceMin",
    "ReduceProd",
    "ReduceSum",
    "ReduceSumSquare",
]
LONG = 4096


def _of(element: str, *values: Any) -> Array:
    return np.array(values, DTYPES[element])


def _axes(*axes: int) -> Array:
    return np.array(axes, np.int64)


def reduction(op_type: str, element: str) -> Iterator[Case]:
    if "Log" in op_type and DTYPES[element].kind != "f":
        return  # of integers there is nothing to compare with
    made = partial(Case, op_type, element, constants=frozenset({1}))
    values = positive(element, (3, 5, 7)) if DTYPES[element].kind == "f" else plain(element, (3, 5, 7))
    yield made("middle axis", (values, _axes(1)))
    yield made("last axis, rank kept", (values, _axes(-1)), {"keepdims": 1})
    yield made("two axes", (values, _axes(0, 2)), {"keepdims": 0})
    yield made("every axis", (values,), {"keepdims": 0})
    if op_type in (
        "ReduceMax",
        "ReduceMean",
        "ReduceMin",
        "ReduceProd",
        "ReduceSum",
    ):  # of the others ONNX says two things
        yield made("no axis", (values,), {"noop_with_empty_axes": 1})
    yield made("one of one", (_of(element, 5), _axes(0)))
    yield made("empty axis", (np.zeros((2, 0), DTYPES[element]), _axes(1)))
    if DTYPES[element].kind != "f":
        return
    yield made(f"{LONG} numbers", (positive(element, (2, LONG)) + DTYPES[element].type(0.1), _axes(1)))
    rows = [[1, np.nan, 2], [np.nan, 1, 0], [3, 2, np.nan], [1, np.inf, 2], [1, -np.inf, 2], [np.inf, -np.inf, 0]]
    yield made("NaN and infinities", (_of(element, *rows), _axes(1)))
    big = float(np.finfo(DTYPES[element]).max)
    yield made("large numbers", (_of(element, [big, big / 2], [big / 2, big / 4]), _axes(1)))
    yield made("large that cancel", (_of(element, [big, big, -big, -big]), _axes(1)))
    root = big**0.5
    yield made("squares overflow", (_of(element, [root * 3, root * 4]), _axes(1)))
    yield made("exponentials overflow", (_of(element, [100, 100, 99], [-200, -200, -300]), _axes(1)))


def arg(op_type: str, element: str) -> Iterator[Case]:
    yield Case(op_type, element, "last axis", (plain(element, (3, 5, 7)),), {"axis": -1})
    yield Case(op_type, element, "first axis", (plain(element, (9, 8)),), {"axis": 0, "keepdims": 0})
    ties = _of(element, [1, 3, 3, 0, 0], [2, 2, 2, 2, 2])
    yield Case(op_type, element, "ties", (ties,), {"axis": 1})
    yield Case(op_type, element, "ties, the last", (ties,), {"axis": 1, "select_last_index": 1})
    if DTYPES[element].kind == "f":
        yield Case(op_type, element, "NaN", (_of(element, [1, np.nan, 2], [np.nan, 1, 0]),), {"axis": 1})


def softmax(op_type: str, element: str) -> Iterator[Case]:
    yield Case(op_type, element, "last axis", (plain(element, (3, 5, 7)),))
    yield Case(op_type, element, "middle axis", (plain(element, (3, 5, 8)),), {"axis": 1})
    yield Case(op_type, element, f"{LONG} numbers", (plain(element, (2, LONG)),))
    yield Case(op_type, element, "-inf", (_of(element, [1, -np.inf, 2, 0], [-np.inf, -np.inf, 1, 1]),))
    yield Case(op_type, element, "-inf alone", (_of(element, [-np.inf, -np.inf]),))
    yield Case(op_type, element, "NaN and inf", (_of(element, [1, np.nan, 2], [1, np.inf, 2]),))
    big = float(np.finfo(DTYPES[element]).max)
    yield Case(op_type, element, "large numbers", (_of(element, [big, big, -big], [60000, 59968, 0]),))


def matmul(op_type: str, element: str) -> Iterator[Case]:
    one = positive
    for what, a, b in (
        ("64 products", (4, 64), (64, 8)),
        ("odd sizes", (3, 5), (5, 7)),
        ("batches", (2, 1, 3, 5), (4, 5, 6)),
        ("vector right", (4, 8), (8,)),
        ("vectors", (8,), (8,)),
        (f"{LONG} products", (8, LONG), (LONG, 8)),
        (f"{LONG} products, odd", (3, LONG + 1), (LONG + 1, 5)),
    ):
        yield Case(op_type, element, what, (one(element, a), one(element, b)))
    yield Case(op_type, element, "no products", (one(element, (2, 0)), one(element, (0, 3))))
    yield Case(op_type, element, "no rows", (one(element, (0, 4)), one(element, (4, 3))))
    big = float(np.finfo(DTYPES[element]).max) ** 0.5 * 1.4
    rows = _of(element, [big, -big], [big, 0], [np.nan, 1], [np.inf, 1])
    yield Case(op_type, element, "large that cancel, NaN, inf", (rows, _of(element, [big, 1], [big, 0])))
    small = float(np.finfo(DTYPES[element]).tiny)
    yield Case(op_type, element, "subnormal", (_of(element, [small / 4, small]), _of(element, [1, 0.25], [0, 0.25])))


def gemm(op_type: str, element: str) -> Iterator[Case]:
    a, b, c = positive(element, (5, 9)), positive(element, (9, 6)), positive(element, (6,))
    if DTYPES[element].kind != "f":
        a, b, c = (plain(element, s, str(i)) for i, s in enumerate(((5, 9), (9, 6), (6,))))
    t, u = a.T.copy(), b.T.copy()
    yield Case(op_type, element, "plain", (a, b))
    yield Case(op_type, element, "both transposed", (t, u, c), {"transA": 1, "transB": 1})
    yield Case(op_type, element, "factors", (a, b, c), {"alpha": 0.5, "beta": 2.0})
    yield Case(op_type, element, "scalar added", (a, b, c[:1].reshape(())))
    yield Case(op_type, element, "column added", (a, b, a[:, :1].copy()))
    if DTYPES[element].kind == "f":
        x, y = positive(element, (4, LONG)), positive(element, (LONG, 4))
        yield Case(op_type, element, f"{LONG} products", (x, y))
        yield Case(op_type, element, f"{LONG} products, transposed", (x.T.copy(), y), {"transA": 1})


def einsum(op_type: str, element: str) -> Iterator[Case]:
    a, b = positive(element, (2, 3, 4)), positive(element, (2, 4, 5))
    yield Case(op_type, element, "batches", (a, b), {"equation": "bij,bjk->bik"})
    yield Case(op_type, element, "sum", (a,), {"equation": "bij->j"})
    yield Case(op_type, element, "transposed", (a,), {"equation": "bij->jib"})
    yield Case(op_type, element, "diagonal", (a[0, :, :3].copy(),), {"equation": "ii->i"})


def conv(op_type: str, element: str) -> Iterator[Case]:
    made = partial(Case, op_type, element)
    image = positive(element, (2, 4, 9, 8))
    for what, weight, attributes in (
        ("1x1", (6, 4, 1, 1), {}),
        ("3x3 padded", (6, 4, 3, 3), {"pads": [1, 1, 1, 1]}),
        ("strides", (8, 4, 3, 3), {"strides": [2, 2], "pads": [0, 1, 1, 0]}),
        ("dilations", (6, 4, 3, 3), {"dilations": [2, 2]}),
        ("groups", (6, 2, 3, 3), {"group": 2}),
        ("depthwise", (4, 1, 3, 3), {"group": 4, "pads": [1, 1, 1, 1]}),
        ("same upper", (6, 4, 2, 2), {"auto_pad": "SAME_UPPER"}),
    ):
        w = positive(element, weight)
        yield made(what, (image, w, positive(element, weight[:1])), attributes)
    yield made("1-D", (positive(element, (2, 3, 11)), positive(element, (5, 3, 3))), {"pads": [1, 1]})
    yield made("3-D", (positive(element, (1, 2, 5, 5, 5)), positive(element, (3, 2, 2, 2, 2))))
    yield made("576 products", (positive(element, (1, 64, 8, 8)), positive(element, (8, 64, 3, 3))))
    yield made("4096 products", (positive(element, (1, 4096, 2, 2)), positive(element, (4, 4096, 1, 1))))


def conv_transpose(op_type: str, element: str) -> Iterator[Case]:
    made = partial(Case, op_type, element)
    image = positive(element, (2, 4, 5, 6))
    for what, weight, attributes in (
        ("plain", (4, 3, 3, 3), {}),
        ("strides", (4, 3, 3, 3), {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
        ("output padding", (4, 3, 3, 3), {"strides": [2, 2], "output_padding": [1, 1]}),
        ("dilations", (4, 3, 2, 2), {"dilations": [2, 2]}),
        ("groups", (4, 3, 3, 3), {"group": 2}),
        ("depthwise", (4, 1, 3, 3), {"group": 4}),
        ("two channels to one", (4, 1, 3, 3), {"group": 2}),
    ):
        yield made(what, (image, positive(element, weight)), attributes)
    yield made("1-D", (positive(element, (2, 3, 7)), positive(element, (3, 5, 3))))
    yield made("576 products", (positive(element, (1, 64, 6, 6)), positive(element, (64, 4, 3, 3))))


def pool(op_type: str, element: str) -> Iterator[Case]:
    made = partial(Case, op_type, element)
    image = plain(element, (2, 3, 9, 8)) if op_type == "MaxPool" else positive(element, (2, 3, 9, 8))
    two = {"kernel_shape": [2, 2]}
    yield made("2x2", (image,), two | {"strides": [2, 2]})
    yield made("padded", (image,), {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]})
    yield made("padded unevenly", (image,), {"kernel_shape": [3, 3], "pads": [0, 1, 1, 0], "strides": [2, 1]})
    yield made("ceil", (image,), {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1})
    yield made("dilations", (image,), two | {"dilations": [2, 2]})
    yield made("1-D", (image[..., 0].copy(),), {"kernel_shape": [3]})
    yield made("3-D", (positive(element, (1, 2, 4, 4, 4)),), {"kernel_shape": [2, 2, 2]})
    if op_type == "AveragePool":
        yield made("padding counts", (image,), {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "count_include_pad": 1})
        yield made("64x64", (positive(element, (1, 1, 64, 64)),), {"kernel_shape": [64, 64]})
    else:
        yield made("indices", (image,), two | {"strides": [2, 2]}, (0, 1))
        rows = _of(element, [1, np.nan, 2, -np.inf], [np.nan, 1, 0, -np.inf]).reshape(1, 1, 2, 4)
        yield made("NaN and -inf", (rows,), two)


def global_pool(op_type: str, element: str) -> Iterator[Case]:
    yield Case(op_type, element, "small", (positive(element, (2, 3, 5, 7)),))
    yield Case(op_type, element, "64x64", (positive(element, (1, 4, 64, 64)),))
    yield Case(op_type, element, "1-D", (positive(element, (2, 4, 9)),))


def batch_norm(op_type: str, element: str) -> Iterator[Case]:
    x = plain(element, (2, 4, 5, 6))
    rest = [positive(element, (4,)) + DTYPES[element].type(0.5) for _ in range(4)]
    yield Case(op_type, element, "inference", (x, *rest))
    yield Case(op_type, element, "rank 2", (x[:, :, 0, 0].copy(), *rest))
    yield Case(op_type, element, "training", (x, *rest), {"training_mode": 1}, (0, 1, 2))


def instance_norm(op_type: str, element: str) -> Iterator[Case]:
    scale, bias = positive(element, (4,)), positive(element, (4,))
    yield Case(op_type, element, "plain", (plain(element, (2, 4, 5, 6)), scale, bias))
    yield Case(op_type, element, "64x64", (plain(element, (1, 4, 64, 64)), scale, bias))
    yield Case(op_type, element, "far from zero", (plain(element, (1, 4, 64)) + DTYPES[element].type(100), scale, bias))


def layer_norm(op_type: str, element: str) -> Iterator[Case]:
    for what, shape in (("plain", (3, 5, 8)), ("odd", (3, 5, 7)), ("long", (2, LONG))):
        scale, bias = positive(element, shape[-1:]), plain(element, shape[-1:])
        yield Case(op_type, element, what, (plain(element, shape), scale, bias))
    x, scale = plain(element, (4, 64)), positive(element, (64,))
    yield Case(op_type, element, "no bias", (x, scale))
    yield Case(op_type, element, "mean and deviation too", (x, scale, scale), outputs=(0, 1, 2))
    yield Case(op_type, element, "two axes", (plain(element, (3, 5, 8)), positive(element, (5, 8))), {"axis": 1})
    yield Case(op_type, element, "far from zero", (x + DTYPES[element].type(100), scale))
    yield Case(op_type, element, "squares overflow", (x * DTYPES[element].type(2000), scale))


def rms_norm(op_type: str, element: str) -> Iterator[Case]:
    x, scale = plain(element, (4, 64)), positive(element, (64,))
    yield Case(op_type, element, "plain", (x, scale), opset=23)
    yield Case(op_type, element, "squares overflow", (x * DTYPES[element].type(2000), scale), opset=23)


def lp_norm(op_type: str, element: str) -> Iterator[Case]:
    yield Case(op_type, element, "L2", (plain(element, (3, 5, 7)),))
    yield Case(op_type, element, "L1", (plain(element, (3, 5, 7)),), {"p": 1, "axis": 1})
    yield Case(op_type, element, "zeros", (np.zeros((2, 3), DTYPES[element]),))


def cumulative(op_type: str, element: str) -> Iterator[Case]:
    x = positive(element, (3, 9)) if DTYPES[element].kind == "f" else plain(element, (3, 9))
    made = partial(Case, op_type, element, constants=frozenset({1}))
    yield made("plain", (x, np.array(1, np.int64)))
    yield made("backward, exclusive", (x, np.array(-2, np.int64)), {"reverse": 1, "exclusive": 1})
    yield made("1024 numbers", (np.ones((1, 1024), DTYPES[element]), np.array(1, np.int64)))


def recurrent(op_type: str, element: str) -> Iterator[Case]:
    gates, hidden, width = {"LSTM": 4, "GRU": 3}[op_type], 5, 4
    x = plain(element, (6, 2, width))
    w, r = plain(element, (1, gates * hidden, width)), plain(element, (1, gates * hidden, hidden))
    b = plain(element, (1, 2 * gates * hidden))
    yield Case(op_type, element, "plain", (x, w, r, b), {"hidden_size": hidden}, (0, 1))
    backward = {"hidden_size": hidden, "direction": "reverse"}
    yield Case(op_type, element, "backward", (x, w, r, b), backward, (0, 1))
    lengths = np.array([6, 3], np.int32)
    yield Case(op_type, element, "lengths", (x, w, r, b, lengths), {"hidden_size": hidden}, (0, 1))


def dft(op_type: str, element: str) -> Iterator[Case]:
    yield Case(op_type, element, "8 points", (plain(element, (1, 8, 1)),))


SUMS: dict[str, Cases] = {
    **{op: partial(reduction, op) for op in REDUCTIONS},
    **{op: partial(arg, op) for op in ("ArgMax", "ArgMin")},
    **{op: partial(pool, op) for op in ("AveragePool", "MaxPool")},
    **{op: partial(global_pool, op) for op in ("GlobalAveragePool", "GlobalMaxPool")},
    **{op: partial(recurrent, op) for op in ("GRU", "LSTM")},
    "BatchNormalization": partial(batch_norm, "BatchNormalization"),
    "Conv": partial(conv, "Conv"),
    "ConvTranspose": partial(conv_transpose, "ConvTranspose"),
    "CumSum": partial(cumulative, "CumSum"),
    "DFT": partial(dft, "DFT"),
    "Einsum": partial(einsum, "Einsum"),
    "Gemm": partial(gemm, "Gemm"),
    "InstanceNormalization": partial(instance_norm, "InstanceNormalization"),
    "LayerNormalization": partial(layer_norm, "LayerNormalization"),
    "LpNormalization": partial(lp_norm, "LpNormalization"),
    "MatMul": partial(matmul, "MatMul"),
    "RMSNormalization": partial(rms_norm, "RMSNormalization"),
    "Softmax": partial(softmax, "Softmax"),
}
"""By operator: its cases at an element type."""
