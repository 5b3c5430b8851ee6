"""Cases of the operators that WebGPU computes element by element, and of Cast."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
from onnx import helper

from tests.helpers.operator_cases import DTYPES, Case, Cases, bits, edges, pairs, plain

UNARY = [
    "Abs",
    "Acos",
    "Acosh",
    "Asin",
    "Asinh",
    "Atan",
    "Atanh",
    "Ceil",
    "Cos",
    "Cosh",
    "Elu",
    "Erf",
    "Exp",
    "Floor",
    "Gelu",
    "HardSigmoid",
    "HardSwish",
    "LeakyRelu",
    "Log",
    "Neg",
    "Reciprocal",
    "Relu",
    "Sigmoid",
    "Sin",
    "Sinh",
    "Softplus",
    "Sqrt",
    "Tan",
    "Tanh",
    "ThresholdedRelu",
]
BINARY = ["Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"]


def unary(op_type: str, element: str) -> Iterator[Case]:
    yield Case(op_type, element, "all numbers", (bits(element),), pointwise=True)
    if op_type in ("Relu", "Exp"):
        yield Case(op_type, element, "rank 0", (np.array(0.5, DTYPES[element]),))
        yield Case(op_type, element, "empty", (np.zeros((0, 3), DTYPES[element]),))
        yield Case(op_type, element, "rank 3", (plain(element, (3, 5, 7)),))
    if op_type == "Gelu":
        yield Case(op_type, element, "tanh", (bits(element),), {"approximate": "tanh"}, pointwise=True)


def binary(op_type: str, element: str) -> Iterator[Case]:
    yield Case(op_type, element, "all numbers", pairs(element), pointwise=True)
    if op_type == "Equal" and DTYPES[element].kind == "f":
        same = bits(element)
        yield Case(op_type, element, "x = x", (same, same), pointwise=True)
    for what, left, right in (
        ("broadcast row", (3, 5, 7), (7,)),
        ("broadcast both", (3, 1, 8), (5, 1)),
        ("scalar", (4, 8), ()),
        ("rank 0", (), ()),
        ("empty", (0, 3), (3,)),
    ):
        if op_type in ("Add", "Max", "Equal"):
            yield Case(op_type, element, what, (plain(element, left, "l"), plain(element, right, "r")))


def logical(op_type: str, element: str) -> Iterator[Case]:
    a, b = plain(element, (4, 8), "a"), plain(element, (8,), "b")
    yield Case(op_type, element, "plain", (a,) if op_type == "Not" else (a, b))
    yield Case(op_type, element, "odd", (a[:3, :5],) if op_type == "Not" else (a[:3, :5], b[:5]))


def several(op_type: str, element: str) -> Iterator[Case]:
    yield from binary(op_type, element)
    for n in (1, 3, 8, 9, 17):
        values = tuple(plain(element, (3, 5), f"{i}") for i in range(n))
        yield Case(op_type, element, f"{n} inputs", values)


def prelu(op_type: str, element: str) -> Iterator[Case]:
    x = bits(element)[:65536]
    yield Case(op_type, element, "one slope", (x, np.full(1, 0.25, DTYPES[element])), pointwise=True)
    yield Case(op_type, element, "slope by channel", (plain(element, (2, 3, 4)), plain(element, (3, 1))))


def clip(op_type: str, element: str) -> Iterator[Case]:
    low, high = (np.array(v, DTYPES[element]) for v in (1, 5))
    yield Case(op_type, element, "all numbers", (bits(element), low, high), pointwise=True)
    yield Case(op_type, element, "no bounds", (edges(element),))
    yield Case(op_type, element, "highest alone", (edges(element), None, high))


def where(op_type: str, element: str) -> Iterator[Case]:
    some = edges(element)
    chosen = np.arange(some.size) % 2 == 0
    yield Case(op_type, element, "edges", (chosen, some, some[::-1].copy()))
    mask = plain("bool", (3, 1, 8))
    yield Case(op_type, element, "broadcast", (mask, plain(element, (5, 8)), plain(element, ())))
    yield Case(op_type, element, "odd broadcast", (mask[:, :, :1], plain(element, (5, 7)), plain(element, (7,))))


_TARGETS = ("float", "float16", "int32", "uint32", "bool", "int64", "uint8")


def cast(op_type: str, element: str) -> Iterator[Case]:
    for target in _TARGETS:
        to = {"to": helper.np_dtype_to_tensor_dtype(DTYPES[target])}
        yield Case(op_type, element, f"to {target}", (_in_range(bits(element), target),), to)
        if DTYPES[element].kind == "f" and DTYPES[target].kind != "f":
            beyond = np.array(
                [6e4 if element == "float16" else 3e9, -6e4, 300.0, -1.0, -1.5, np.inf, -np.inf, np.nan],
                DTYPES[element],
            )
            yield Case(op_type, element, f"beyond {target}", (beyond,), to)


def _in_range(x: np.ndarray, target: str) -> np.ndarray:
    """Numbers whose cast is defined."""
    to = DTYPES[target]
    if to.kind in "fb" or x.dtype.kind == "b":
        return x
    ends = np.iinfo(to)
    with np.errstate(invalid="ignore"):
        wide = x.astype(np.float64)
        return x[(wide > float(ends.min) - 1) & (wide < float(ends.max) - 1)]


def identity(op_type: str, element: str) -> Iterator[Case]:
    yield Case(op_type, element, "edges", (edges(element),))


POINTWISE: dict[str, Cases] = {
    **{op: partial(unary, op) for op in UNARY},
    **{op: partial(binary, op) for op in BINARY if op not in ("Max", "Min")},
    **{op: partial(several, op) for op in ("Max", "Min")},
    **{op: partial(logical, op) for op in ("And", "Not")},
    "PRelu": partial(prelu, "PRelu"),
    "Clip": partial(clip, "Clip"),
    "Where": partial(where, "Where"),
    "Cast": partial(cast, "Cast"),
    "Identity": partial(identity, "Identity"),
}
"""By operator: its cases at an element type."""
