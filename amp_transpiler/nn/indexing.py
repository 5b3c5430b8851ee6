"""By index: gather, scatter, one-hot, and the brackets of python."""

from __future__ import annotations

from typing import Any

import numpy as np

from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.ir.infer import differ
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.ir.types import HALF, INTEGERS, ONNX_TYPES, element_type
from amp_transpiler.nn.building import (
    INTEGER,
    LARGEST,
    Builder,
    append,
    appending,
    axis_of,
    describe,
    fixed,
    variable,
    whole,
)
from amp_transpiler.nn.calls import function
from amp_transpiler.nn.creation import zeros_like
from amp_transpiler.nn.manipulation import reached
from amp_transpiler.option_checks import is_whole, switch

#: The element types of numbers that onnxruntime's Unique reads, and what holds the numbers of the others.
_SORTED = ("float32", "float64", "int64", "int8")
_HOLDS = {**dict.fromkeys(HALF, "float32"), **dict.fromkeys(INTEGERS - {*_SORTED, "uint64"}, "int64"), "bool": "int8"}
#: What onnxruntime's NonZero reads on CPU and CUDA.
_COUNTED = ("bool", "float32", "int32", "int64")


@function()
def gather(x: Variable, index: Variable, axis: int | None = 0, *, name: str | None = None) -> Variable:
    """``x`` at the places ``index`` (int64 or int32, any shape) of dimension ``axis``."""
    call = "gather"
    variable(call, "index", index, dtypes=INTEGER)
    axis = axis_of(call, 0 if axis is None else axis, x)
    return append(call, "Gather", [variable(call, "x", x), index], attrs={"axis": axis})


@function()
def index_select(x: Variable, index: Variable, axis: int = 0, *, name: str | None = None) -> Variable:
    """As :func:`gather`, ``index`` being a vector."""
    call = "index_select"
    variable(call, "index", index, dtypes=INTEGER, rank=1)
    return append(call, "Gather", [x, index], attrs={"axis": axis_of(call, axis, x)})


@function()
def gather_nd(x: Variable, index: Variable, *, name: str | None = None) -> Variable:
    """``x`` at the places ``index`` [.., k] (int64 or int32) of its first k dimensions."""
    call = "gather_nd"
    put = appending(call)
    variable(call, "x", x, min_rank=1)
    return put("GatherND", x, _int64(put, index))


@function()
def nonzero(x: Variable, as_tuple: bool = False, *, name: str | None = None) -> Variable | tuple[Variable, ...]:
    """The places where ``x`` (bool, integers or float32) is not 0, in order: int64 [n, rank of ``x``].

    Data decide n, which a program is trained for as well; no gradient flows to ``x``. ``as_tuple``: for each dimension
    an int64 [n, 1] of its own, as Paddle gives them.
    """
    call = "nonzero"
    variable(call, "x", x, dtypes=_COUNTED, min_rank=1)
    put, rank = appending(call), len(x.shape or ())
    if not switch(f"{call}: as_tuple", as_tuple):
        return _places(put, x)
    found = put("NonZero", x)
    rows = [put("Gather", found, np.array([i], np.int64)) for i in range(rank)]
    return tuple(put("Transpose", row, perm=[1, 0]) for row in rows)


@function()
def masked_select(x: Variable, mask: Variable, *, name: str | None = None) -> Variable:
    """The elements of ``x`` where ``mask`` (bool, of the same shape) is true, in order: [n]; data decide n."""
    call = "masked_select"
    variable(call, "x", x, min_rank=1)
    if variable(call, "mask", mask, dtypes=("bool",)).shape != x.shape:
        raise ArgumentError(f"{call}: {describe(mask)} has another shape than {describe(x)}")
    return _selected(call, x, mask)


@function()
def unique(
    x: Variable,
    return_index: bool = False,
    return_inverse: bool = False,
    return_counts: bool = False,
    axis: int | None = None,
    dtype: Any = "int64",
    *,
    name: str | None = None,
) -> Variable | tuple[Variable, ...]:
    """Each element of ``x`` once, ascending; with ``axis`` each slice along it. Data decide how many there are.

    Asked for beside it, of ``dtype``: the place of the first of each, the place among them of each element of ``x``
    (laid out flat without an axis), and how often each is there. A gradient goes to the first of equal elements.
    onnxruntime has a kernel on the CPU alone.
    """
    call = "unique"
    variable(call, "x", x, dtypes=(*_SORTED, *_HOLDS), min_rank=1)
    put, kind = appending(call), element_type(dtype)
    if kind not in INTEGER:
        raise ArgumentError(f"{call}: dtype is {kind}; expected int64 or int32")
    if axis is None:
        x, at, attrs = put("Reshape", x, np.array([-1], np.int64)), 0, {}
    else:
        at = axis_of(call, axis, x)
        attrs = {"axis": at}
    held = x
    if x.dtype not in _SORTED:
        held = put("Cast", x, to=ONNX_TYPES[_HOLDS[str(x.dtype)]])
    _, index, inverse, counts = put.several(4, "Unique", held, **attrs)
    values = put("Gather", x, index, axis=at)
    asked = {"return_index": (return_index, index), "return_inverse": (return_inverse, inverse)}
    asked["return_counts"] = return_counts, counts
    found = [place for name, (wanted, place) in asked.items() if switch(f"{call}: {name}", wanted)]
    if kind != "int64":
        found = [put("Cast", each, to=ONNX_TYPES[kind]) for each in found]
    return (values, *found) if found else values


def _places(put: Builder, mask: Variable) -> Variable:
    """Where a tensor is not 0: int64 [n, rank]."""
    return put("Transpose", put("NonZero", mask), perm=[1, 0])


def _selected(call: str, x: Variable, mask: Variable) -> Variable:
    """What lies where a mask of the first dimensions is true."""
    put = appending(call)
    return put("GatherND", x, _places(put, mask))


@function("nn.take_along_axis")
def take_along_axis(arr: Variable, indices: Variable, axis: int, *, name: str | None = None) -> Variable:
    """``arr`` at the places ``indices`` of dimension ``axis``, element by element.

    Both are of one rank; where one has a single element along another dimension, it is repeated as often as the other
    has elements, which are known.
    """
    call = "take_along_axis"
    at = axis_of(call, axis, variable(call, "arr", arr, min_rank=1))
    variable(call, "indices", indices, dtypes=INTEGER, rank=len(arr.shape or ()))
    put = appending(call)
    operands = [_repeated(put, x, like, at) for x, like in ((arr, indices), (indices, arr))]
    return put("GatherElements", *operands, axis=at)


def _repeated(put: Builder, x: Variable, like: Variable, at: int) -> Variable:
    """``x`` with the sizes of ``like`` where it has one element, but along the dimension ``at``."""
    pairs = enumerate(zip(x.shape or (), like.shape or (), strict=True))
    single = [i for i, (own, other) in pairs if own == 1 != other and i != at]
    if not single:
        return x
    sizes = np.ones(len(x.shape or ()), np.int64)
    sizes[single] = [fixed(put.call, like.name, like, i) for i in single]
    return put("Expand", x, sizes)


def _int64(put: Builder, index: Variable) -> Variable:
    variable(put.call, "index", index, dtypes=INTEGER, min_rank=1)
    if index.dtype == "int64":
        return index
    return put("Cast", index, to=ONNX_TYPES["int64"])


@function()
def scatter(
    x: Variable, index: Variable, updates: Variable, overwrite: bool = True, *, name: str | None = None
) -> Variable:
    """``x`` with the rows at ``index`` [n] replaced by ``updates`` [n, …].

    With ``overwrite=False`` these rows start from 0 and all updates to one row are added.
    """
    call = "scatter"
    put = appending(call)
    variable(call, "index", index, dtypes=INTEGER, rank=1)
    place = put("Unsqueeze", _int64(put, index), np.array([1], np.int64))
    variable(call, "updates", updates, dtypes=(str(variable(call, "x", x, min_rank=1).dtype),))
    if switch(f"{call}: overwrite", overwrite):
        return put("ScatterND", x, place, updates)
    cleared = put("ScatterND", x, place, zeros_like(updates))
    return put("ScatterND", cleared, place, updates, reduction="add")


@function()
def scatter_nd_add(x: Variable, index: Variable, updates: Variable, *, name: str | None = None) -> Variable:
    """``x`` with ``updates`` added at the places ``index`` [.., k] (int64 or int32) of its first k dimensions."""
    call = "scatter_nd_add"
    put = appending(call)
    variable(call, "updates", updates, dtypes=(str(variable(call, "x", x, min_rank=1).dtype),))
    inputs = [x, _int64(put, index), updates]
    return put("ScatterND", *inputs, reduction="add")


@function("nn.one_hot")
def one_hot(x: Variable, num_classes: int, *, name: str | None = None) -> Variable:
    """float32 [shape of ``x``, num_classes]: 1 at the class that ``x`` (int64 or int32) names, 0 elsewhere."""
    call = "one_hot"
    variable(call, "x", x, dtypes=INTEGER)
    depth = np.array(whole(call, "num_classes", num_classes), np.int64)
    return append(call, "OneHot", [x, depth, np.array([0, 1], np.float32)], attrs={"axis": -1})


# -- x[...] ---------------------------------------------------------------------------------------------------------
def item(x: Variable, key: Any) -> Variable:
    """``x[key]``: integers, slices (with steps), ``...``, None as numpy's, and at most one vector of integers or bools.

    The vector (a list, an array, or a variable) selects along its own dimension, which stays in its place. A bool mask
    of several dimensions stands alone: ``x[mask]`` is [n, …] of the n places where it is true, and data decide n.
    ArgumentError: more indices than dimensions, an integer outside a known dimension, a mask of another size.
    ArgumentTypeError: a key of another kind.
    """
    call = "getitem"
    variable(call, "x", x, min_rank=1)
    rank = len(x.shape or ())
    if isinstance(key, Variable) and key.dtype == "bool":
        return _where_true(call, x, key)
    keys = list(key) if isinstance(key, tuple) else [key]
    used = sum(1 for k in keys if k is not None and k is not Ellipsis)
    if used > rank:
        raise ArgumentError(f"{call}: {used} indices for the {rank} dimensions of {describe(x)}")
    if sum(1 for k in keys if k is Ellipsis) > 1:
        raise ArgumentError(f"{call}: '...' can stand in an index once")
    if Ellipsis not in [k for k in keys if k is Ellipsis]:
        keys.append(Ellipsis)
    at = next(i for i, k in enumerate(keys) if k is Ellipsis)
    keys[at : at + 1] = [slice(None)] * (rank - used)
    return _indexed(call, x, keys)


def _where_true(call: str, x: Variable, mask: Variable) -> Variable:
    """``x[mask]``."""
    sizes, whole = variable(call, "mask", mask, min_rank=1).shape or (), x.shape or ()
    if differ(sizes, whole[: len(sizes)]):
        raise ArgumentError(f"{call}: {describe(mask)} is no mask of the first dimensions of {describe(x)}")
    return _selected(call, x, mask)


def _indexed(call: str, x: Variable, keys: list[Any]) -> Variable:
    """One key for each dimension of ``x``, None between them: one Slice, one Gather, one Squeeze, one Unsqueeze."""
    put, y, axis = appending(call), x, 0
    bounds: list[tuple[int, int, int, int]] = []
    dropped: list[int] = []
    added: list[int] = []
    gathered: tuple[int, Any] | None = None
    for place, key in enumerate(keys):
        if key is None:
            added.append(place - len(dropped))
            continue
        if isinstance(key, slice):
            if key != slice(None):
                bounds.append((axis, *_bounds(call, key, (x.shape or ())[axis])))
        elif is_whole(key):
            start = _place(call, x, axis, int(key))
            bounds.append((axis, start, start + 1 if start != -1 else LARGEST, 1))
            dropped.append(axis)
        elif gathered is None:
            gathered = axis, _vector(call, x, axis, key)
        else:
            raise ArgumentError(f"{call}: one vector of integers can index {describe(x)}, not two")
        axis += 1
    if bounds:
        columns = [np.array(column, np.int64) for column in zip(*bounds, strict=True)]
        y = put("Slice", y, columns[1], columns[2], columns[0], columns[3])
    if gathered is not None:
        y = put("Gather", y, gathered[1], axis=gathered[0])
    if dropped:
        y = put("Squeeze", y, np.array(dropped, np.int64))
    if added:
        y = put("Unsqueeze", y, np.array(added, np.int64))
    return y if y is not x else put("Identity", x)


def _bounds(call: str, key: slice, size: object) -> tuple[int, int, int]:
    """Start, end and step of a slice along a dimension of this size."""
    step = 1 if key.step is None else _whole(call, key.step)
    if step == 0:
        raise ArgumentError(f"{call}: a step of 0 does not move")
    first, last = (0, LARGEST) if step > 0 else (LARGEST, -LARGEST)
    start = first if key.start is None else _whole(call, key.start)
    stop = last if key.stop is None else _whole(call, key.stop)
    return *reached(size, start, stop, step), step


def _whole(call: str, value: Any) -> int:
    if not is_whole(value):
        raise ArgumentTypeError(f"{call}: the bounds and the step of a slice are integers, not {value!r}")
    return max(-LARGEST, min(int(value), LARGEST))


def _place(call: str, x: Variable, axis: int, index: int) -> int:
    """``index`` along ``axis``, as it is; ArgumentError where it lies outside."""
    size = (x.shape or ())[axis]
    if isinstance(size, int) and not -size <= index < size:
        raise ArgumentError(f"{call}: index {index} is outside dimension {axis} of {describe(x)}")
    return index


def _vector(call: str, x: Variable, axis: int, key: Any) -> Any:
    """A vector of places along a dimension of ``x``: a variable, or a constant."""
    if isinstance(key, Variable):
        found = variable(call, "index", key, dtypes=(*INTEGER, "bool"), rank=1)
        if found.dtype != "bool":
            return found
        put = appending(call)
        return put("Squeeze", put("NonZero", key), np.array([0]))
    array = np.asarray(key) if isinstance(key, (list, np.ndarray)) else None
    if array is None or array.ndim != 1 or array.dtype.kind not in "iub":
        raise ArgumentTypeError(
            f"{call}: an index is an integer, a slice, '...', None or a vector of integers or bools, not {key!r}"
        )
    if array.dtype.kind != "b":
        return array.astype(np.int64)
    size = (x.shape or ())[axis]
    if isinstance(size, int) and size != array.size:
        raise ArgumentError(f"{call}: {array.size} bools are no mask of dimension {axis} of {describe(x)}")
    return np.flatnonzero(array)
