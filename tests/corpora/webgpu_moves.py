"""Cases of the operators that move elements: views, slices, gathers, scatters, windows of an image."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from tests.helpers.operator_cases import DTYPES, Array, Case, Cases, edges, plain, positive


def _ints(*values: Any) -> Array:
    return np.array(values, np.int64)


def concat(op_type: str, element: str) -> Iterator[Case]:
    yield Case(op_type, element, "last axis", (plain(element, (2, 3)), plain(element, (2, 4))), {"axis": -1})
    pieces = (plain(element, (2, 3)), np.zeros((2, 0), DTYPES[element]), plain(element, (2, 1)))
    yield Case(op_type, element, "an empty piece", pieces, {"axis": 1})
    for n in (1, 8, 9, 10, 17, 33, 65):
        many = tuple(plain(element, (1 + i % 3, 3), str(i)) for i in range(n))
        yield Case(op_type, element, f"{n} pieces", many, {"axis": 0})


def split(op_type: str, element: str) -> Iterator[Case]:
    made = partial(Case, op_type, element, constants=frozenset({1}))
    yield made("uneven", (plain(element, (2, 9)), _ints(2, 3, 4)), {"axis": 1}, (0, 1, 2))
    yield made("an empty piece", (plain(element, (2, 5)), _ints(2, 0, 3)), {"axis": -1}, (0, 1, 2))
    yield made("by number", (plain(element, (7, 3)),), {"axis": 0, "num_outputs": 3}, (0, 1, 2))
    for n in (8, 9, 10, 17, 33):
        yield made(f"{n} pieces", (plain(element, (2 * n, 3)), _ints(*[2] * n)), {"axis": 0}, tuple(range(n)))


def expand(op_type: str, element: str) -> Iterator[Case]:
    made = partial(Case, op_type, element, constants=frozenset({1}))
    yield made("row", (plain(element, (1, 7)), _ints(3, 7)))
    yield made("column", (plain(element, (5, 1)), _ints(2, 5, 8)))
    yield made("rank 0", (plain(element, ()), _ints(4)))
    yield made("to nothing", (plain(element, (1, 3)), _ints(0, 3)))


def gather(op_type: str, element: str) -> Iterator[Case]:
    table = plain(element, (7, 5))
    yield Case(op_type, element, "rows", (table, _ints(0, 6, 3, 3)))
    yield Case(op_type, element, "negative", (table, _ints(-1, -7, 2)))
    yield Case(op_type, element, "columns, int32", (table, np.array([[4, 0], [1, 1]], np.int32)), {"axis": 1})
    yield Case(op_type, element, "rank 0", (table, np.array(2, np.int64)))
    yield Case(op_type, element, "nothing", (table, np.zeros((0,), np.int64)))
    yield Case(op_type, element, "out of range", (table, _ints(7, -8, 100)))


def gather_elements(op_type: str, element: str) -> Iterator[Case]:
    table = plain(element, (4, 5))
    yield Case(op_type, element, "columns", (table, _ints([0, 4, -1], [2, 2, -5])), {"axis": 1})
    yield Case(op_type, element, "rows, int32", (table, np.array([[3, 0, 1, -1, 2]], np.int32)), {"axis": 0})


def gather_nd(op_type: str, element: str) -> Iterator[Case]:
    table = plain(element, (3, 4, 5))
    yield Case(op_type, element, "rows", (table, _ints([0, 1], [2, -1])))
    yield Case(op_type, element, "elements", (table, _ints([0, 1, 2], [-1, -1, -1])))
    yield Case(op_type, element, "batches", (table, _ints([1], [0], [-1])), {"batch_dims": 1})


_REDUCED = ("none", "add", "mul", "max", "min")


def scatter_elements(op_type: str, element: str) -> Iterator[Case]:
    data, updates = plain(element, (4, 5)), plain(element, (2, 5))
    at = _ints([0, 3, -1, 1, 2], [1, 1, 2, 0, -4])
    for how in _REDUCED:
        once = how == "none"
        where = at if once else _ints([0, 3, -1, 1, 2], [0, 3, -1, 0, -4])
        yield Case(
            op_type, element, f"{how}{'' if once else ', duplicates'}", (data, where, updates), {"reduction": how}
        )
    yield Case(
        op_type,
        element,
        "columns, int32",
        (data, at.astype(np.int32).T[:4].copy() % 5, plain(element, (4, 2))),
        {"axis": 1},
    )
    ones = np.ones(512, DTYPES[element])
    zeros = np.zeros(4, DTYPES[element])
    yield Case(op_type, element, "add, 512 to 4", (zeros, np.arange(512) % 4, ones), {"reduction": "add"})


def scatter_nd(op_type: str, element: str) -> Iterator[Case]:
    data, updates = plain(element, (6, 5)), plain(element, (3, 5))
    for how in _REDUCED:
        where = _ints([0], [5], [-2]) if how == "none" else _ints([0], [3], [0])
        what = how if how == "none" else f"{how}, duplicates"
        yield Case(op_type, element, what, (data, where, updates), {"reduction": how})
    yield Case(op_type, element, "elements", (data, _ints([0, 1], [2, -1]), plain(element, (2,))))
    many = (np.zeros((4, 8), DTYPES[element]), (np.arange(512) % 4)[:, None], np.ones((512, 8), DTYPES[element]))
    yield Case(op_type, element, "add, 512 rows to 4", many, {"reduction": "add"})


def slices(op_type: str, element: str) -> Iterator[Case]:
    made = partial(Case, op_type, element, constants=frozenset({1, 2, 3, 4}))
    x = plain(element, (5, 7, 4))
    yield made("steps", (x, _ints(1, 0), _ints(5, 7), _ints(0, 1), _ints(2, 3)))
    yield made("backward", (x, _ints(-1), _ints(-100), _ints(1), _ints(-1)))
    yield made("beyond the end", (x, _ints(2), _ints(100), _ints(-1), None))
    yield made("nothing", (x, _ints(3), _ints(3), _ints(0), None))
    yield Case(op_type, element, "starts fed", (x, _ints(1), _ints(3), _ints(0), _ints(1)))


def pad(op_type: str, element: str) -> Iterator[Case]:
    x = plain(element, (3, 5))
    made = partial(Case, op_type, element, constants=frozenset({1, 3}))
    value = np.array(7, DTYPES[element])
    yield made("constant", (x, _ints(1, 2, 0, 3), value))
    yield made("zeros", (x, _ints(1, 2, 0, 3)))
    for mode in ("reflect", "edge", "wrap"):
        yield made(mode, (x, _ints(1, 2, 2, 3)), {"mode": mode})
    yield made("cut", (x, _ints(0, -1, 0, -2)))
    yield made("one axis", (x, _ints(2, 1), value, _ints(-1)))


def view(op_type: str, element: str) -> Iterator[Case]:
    x = plain(element, (2, 1, 6))
    made = partial(Case, op_type, element, constants=frozenset({1}))
    match op_type:
        case "Reshape":
            yield made("whole", (x, _ints(0, -1)))
            yield made("rank 0", (plain(element, (1,)), np.zeros(0, np.int64)))
            yield Case(op_type, element, "shape fed", (x, _ints(3, 4)))
        case "Flatten":
            yield made("plain", (x,), {"axis": 1})
            yield made("axis 0", (x,), {"axis": 0})
        case "Squeeze":
            yield made("axis", (x, _ints(1)))
            yield made("every one", (x,))
        case "Unsqueeze":
            yield made("axes", (x, _ints(0, -1)))
        case "Shape":
            yield made("whole", (x,))
            yield made("part", (x,), {"start": -2, "end": 2})


def transpose(op_type: str, element: str) -> Iterator[Case]:
    for perm in ([1, 0], [0, 2, 1], [2, 0, 1], [0, 2, 3, 1], [4, 1, 0, 3, 2], [0, 1]):
        yield Case(op_type, element, f"{perm}", (plain(element, (3, 5, 4, 2, 6)[: len(perm)]),), {"perm": perm})
    yield Case(op_type, element, "large", (plain(element, (70, 65)),))
    yield Case(op_type, element, "empty", (np.zeros((0, 3), DTYPES[element]),))


def tile(op_type: str, element: str) -> Iterator[Case]:
    yield Case(op_type, element, "plain", (plain(element, (2, 3)), _ints(2, 3)), constants=frozenset({1}))


def trilu(op_type: str, element: str) -> Iterator[Case]:
    made = partial(Case, op_type, element, constants=frozenset({1}))
    x = edges(element)[:20].reshape(4, 5) if DTYPES[element].kind == "f" else plain(element, (4, 5))
    for k in (0, 1, -2, 9):
        yield made(f"upper {k}", (x, np.array(k, np.int64)))
        yield made(f"lower {k}", (x, np.array(k, np.int64)), {"upper": 0})


def ranges(op_type: str, element: str) -> Iterator[Case]:
    ends = (0.5, 4.0, 0.25) if DTYPES[element].kind == "f" else (10, -4, -3)
    three = tuple(np.array(v, DTYPES[element]) for v in ends)
    yield Case(op_type, element, "fed", three)
    yield Case(op_type, element, "constants", three, constants=frozenset({0, 1, 2}))


def top_k(op_type: str, element: str) -> Iterator[Case]:
    made = partial(Case, op_type, element, constants=frozenset({1}), outputs=(0, 1))
    x = plain(element, (3, 9))
    yield made("largest", (x, _ints(4)))
    yield made("smallest, first axis", (x, _ints(2)), {"largest": 0, "axis": 0})
    yield made("ties", (np.array([[1, 3, 3, 0, 3]], DTYPES[element]), _ints(3)))
    yield made("NaN", (np.array([[1, np.nan, 2, np.inf, 0]], DTYPES[element]), _ints(3)))
    yield made("300 numbers", (plain(element, (2, 300)), _ints(10)))


def depth_to_space(op_type: str, element: str) -> Iterator[Case]:
    for mode in ("DCR", "CRD"):
        yield Case(op_type, element, mode, (plain(element, (1, 8, 2, 3)),), {"blocksize": 2, "mode": mode})


def resize(op_type: str, element: str) -> Iterator[Case]:
    x = positive(element, (1, 2, 5, 6)) if DTYPES[element].kind == "f" else plain(element, (1, 2, 5, 6))
    made = partial(Case, op_type, element, constants=frozenset({2, 3}))
    scales = np.array([1, 1, 2, 1.5], np.float32)
    for mode in ("nearest", "linear", "cubic"):
        yield made(mode, (x, None, scales), {"mode": mode})
    yield made("linear by sizes", (x, None, None, _ints(1, 2, 3, 4)), {"mode": "linear"})
    corners = {"mode": "linear", "coordinate_transformation_mode": "align_corners"}
    yield made("linear, corners aligned", (x, None, scales), corners)
    floor = {"mode": "nearest", "nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric"}
    yield made("nearest, floor, asymmetric", (x, None, scales), floor)


def grid_sample(op_type: str, element: str) -> Iterator[Case]:
    x, grid = positive(element, (1, 2, 5, 6)), plain(element, (1, 3, 4, 2)) / 2
    for mode in ("bilinear", "nearest", "bicubic"):
        yield Case(op_type, element, mode, (x, grid.astype(x.dtype)), {"mode": mode}, opset=16)
    yield Case(op_type, element, "border", (x, grid.astype(x.dtype)), {"padding_mode": "border"}, opset=16)


def dequantize(op_type: str, element: str) -> Iterator[Case]:
    x, scale, zero = plain(element, (3, 8)), np.array(0.25, np.float32), np.array(3, DTYPES[element])
    yield Case(op_type, element, "plain", (x, scale, zero))
    yield Case(op_type, element, "no zero point", (x, scale))


MOVES: dict[str, Cases] = {
    **{op: partial(view, op) for op in ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Shape")},
    "Concat": partial(concat, "Concat"),
    "DepthToSpace": partial(depth_to_space, "DepthToSpace"),
    "DequantizeLinear": partial(dequantize, "DequantizeLinear"),
    "Expand": partial(expand, "Expand"),
    "Gather": partial(gather, "Gather"),
    "GatherElements": partial(gather_elements, "GatherElements"),
    "GatherND": partial(gather_nd, "GatherND"),
    "GridSample": partial(grid_sample, "GridSample"),
    "Pad": partial(pad, "Pad"),
    "Range": partial(ranges, "Range"),
    "Resize": partial(resize, "Resize"),
    "ScatterElements": partial(scatter_elements, "ScatterElements"),
    "ScatterND": partial(scatter_nd, "ScatterND"),
    "Slice": partial(slices, "Slice"),
    "Split": partial(split, "Split"),
    "Tile": partial(tile, "Tile"),
    "TopK": partial(top_k, "TopK"),
    "Transpose": partial(transpose, "Transpose"),
    "Trilu": partial(trilu, "Trilu"),
}
"""By operator: its cases at an element type."""
