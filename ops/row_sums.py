"""Rows added to rows of a tensor, of which one may be added to several times.

onnxruntime's ScatterND (1.31) does that on CPU in several threads that overwrite one another where there is enough to
do: of 4,096 rows of 64 on two threads one run in six is wrong, of 3,300 on eight threads every one (measured).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import onnx

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.types import HALF
from amp_transpiler.ops.common import size_of, sliced, unviewed

#: Elements that are added up to which onnxruntime takes one thread however many there are: from 210,000 on its cost
#: model (100,000 to begin with, 100,000 for each thread, one for an element) takes two.
_ONE_THREAD = 200_000
#: What a node says of which that holds.
_SAYS = "one thread: few elements are added"
#: Elements that ScatterND copies while ScatterElements adds one: it takes 6 ns for that.
_COPIES = 16
#: Bytes of memory of what tells of two rows whether they meet; and of an element of a table of zeros, and of that in
#: 16 bit, which rows would be added to without that. What is moved is twice as much, or three times.
_MEETING, _TABLE = 3, 6
#: On a GPU ScatterND adds a row in one thread, ScatterElements each element in one of its own: 4,096 rows of 768 took
#: 660 us and 113 on an H200, all that goes with it included.
_WIDE = 32
#: Elements up to which more than one turn would be noticed.
_FEW = 50_000


def added_rows(e: Emitter, total: Value, at: Value, rows: Value) -> Value:
    """``total`` with ``rows`` [.., rest] added at ``at`` [.., k] (int64) of its first k dimensions, in their order."""
    shape, (*lead, k) = size_of(total), size_of(at)
    number, rest = math.prod(lead), shape[k:]
    turns = _turns(total, at, e.hangs(number)) if e.at.host else 1
    if e.at.fused and k == 1 and math.prod(rest) >= _WIDE:
        turns = 0
    if turns == 1:
        return _scattered(e, total, at, rows)
    at, rows = e.reshape(at, (number, k)), e.reshape(rows, (number, *rest))
    if not turns:
        return e.reshape(_by_elements(e, total, at, rows), shape)
    for start, stop in pairwise(number * turn // turns for turn in range(turns + 1)):
        total = _scattered(e, total, sliced(e, at, 0, start, stop), sliced(e, rows, 0, start, stop))
    return total


def _turns(total: Value, at: Value, whole: bool) -> int:
    """In how many turns to add rows, so that each takes one thread; 0 where ScatterElements takes less time than these.

    ``whole``: one turn, or none. Else a power of four where that costs little: the nodes, and so the session, are the
    same ones for most sizes of a batch.
    """
    count, number = _elements(total, at), math.prod(size_of(at)[:-1])
    if count <= _FEW:
        return 1
    most = _ONE_THREAD * number // count
    least = -(-number // most) if most else number + 1
    if total.dtype in HALF or whole:  # a 16-bit sum would be rounded in between
        return int(least == 1)
    turns = 4
    while turns < least:
        turns *= 4
    copied = math.prod(size_of(total))
    return next((n for n in (turns, least) if n <= number and (n == 1 or copied * n <= _COPIES * count)), 0)


def _elements(total: Value, at: Value) -> int:
    """How many are added."""
    *lead, k = size_of(at)
    return math.prod((*lead, *size_of(total)[k:]))


def _scattered(e: Emitter, total: Value, at: Value, rows: Value) -> Value:
    before = len(e.nodes)
    result = e.ScatterND(total, at, rows, reduction="add", shape=total.shape)
    if _elements(total, at) <= _ONE_THREAD:
        e.nodes[before].doc_string = _SAYS
    return result


def _by_elements(e: Emitter, total: Value, at: Value, rows: Value) -> Value:
    """The same for places [n, k] by ScatterElements, which adds on one thread; of shape [places, elements of a row]."""
    number, shape = size_of(at)[0], size_of(total)[: size_of(at)[1]]
    width, places = math.prod(size_of(total)[len(shape) :]), math.prod(shape)
    key = f"places {unviewed(e, at).name} in {shape}, for each of {width} elements"  # layers of a graph share its edges
    if key not in e.shared or not e.at.fused:
        at = _in_one(e, at, shape)
        at = e.cast(at, "int32") if e.at.fused and places < 2**31 else at  # half the bytes, for each element
        e.shared[key] = (e.Expand(at, e.ints(number, width), shape=(number, width)),)
    (every,) = e.shared[key]
    total, rows = e.reshape(total, (places, width)), e.reshape(rows, (number, width))
    return e.ScatterElements(total, every, rows, axis=0, reduction="add", shape=(places, width))


def _in_one(e: Emitter, at: Value, shape: Sequence[int]) -> Value:
    """Places [n, k] in k dimensions of these sizes as places [n, 1] in one."""
    if len(shape) == 1:
        return at
    sizes = np.array(shape, np.int64)
    strides = np.append(np.cumprod(sizes[:0:-1])[::-1], 1)
    below = e.op("Less", at, e.const(np.int64(0)), shape=at.shape)
    at = e.Where(below, e.Add(at, e.const(sizes)), at, shape=at.shape)
    return e.op("ReduceSum", e.Mul(at, e.const(strides)), e.ints(1), keepdims=1, shape=(size_of(at)[0], 1))


def remember_places(e: Emitter, places: Value, rows: Value) -> None:
    """Remember that ``places``, of elements, are those of whole ``rows`` [n, 1] (int64)."""
    e.shared[_rows_of(places)] = (rows,)


def places_of_rows(e: Emitter, places: Value) -> Value | None:
    """The rows whose elements' places these are; None where that is not known of them."""
    found = e.shared.get(_rows_of(places))
    return None if found is None else found[0]


def _rows_of(places: Value) -> str:
    return f"rows of {places.name}"


def remember_rows(e: Emitter, total: Value, rows: Value, values: Value) -> Value:
    """``total``, remembered as zeros to which ``values`` [n, …] were added at ``rows`` [n].

    Rows are integers; those below 0 count from the end.
    """
    e.shared[_known(total)] = (rows, values)
    return total


def rows_within(e: Emitter, total: Value) -> tuple[Value, Value] | None:
    """The rows that were added to zeros, and what was added, in that order; None where it is not known of ``total``."""
    found = e.shared.get(_known(total))
    return None if found is None else (found[0], found[1])


def _known(total: Value) -> str:
    return f"rows in {total.name}"


def with_rows(e: Emitter, share: Value, total: Value) -> Value | None:
    """``total`` and a gradient of few rows, which are added where they lie; None where it is none, or costs more so.

    In 16 bit rows that meet are summed first, in fp32 inside: each by the product with the matrix that says which do.
    """
    maker = e.makers.get(share.name)
    table = share if maker is None or maker.type != "Cast" or maker.inputs[0] is None else maker.inputs[0]
    found = rows_within(e, table)
    if found is None or total.shape is None:
        return None
    rows, values = found
    (count,), (places, width) = size_of(rows), (total.shape[0], math.prod(total.shape[1:]))
    values, at = e.reshape(values, (count, width)), e.reshape(e.cast(rows, "int64"), (count, 1))
    flat = e.reshape(total, (places, width))
    if total.dtype not in HALF:
        return e.reshape(e.ScatterND(flat, at, values, reduction="add", shape=flat.shape), total.shape)
    if _MEETING * count * count > _TABLE * places * width:
        return None
    rows = e.op("Mod", e.reshape(at, (count,)), e.const(np.int64(places)), shape=(count,))  # those from the end too
    meets = e.op("Equal", e.reshape(rows, (count, 1)), e.reshape(rows, (1, count)), shape=(count, count))
    sums = e.MatMul(e.cast(meets, total.dtype), _narrow(e, values, total.dtype))
    picked = e.Gather(flat, rows, axis=0, shape=(count, width))
    made = e.ScatterND(flat, e.reshape(rows, (count, 1)), e.Add(picked, sums), shape=flat.shape)
    return e.reshape(made, total.shape)


def _narrow(e: Emitter, values: Value, dtype: str) -> Value:
    """Values in a type; where they were widened from it, as they were."""
    source, maker = values, e.makers.get(values.name)
    while maker is not None and maker.type in ("Cast", "Reshape") and maker.inputs[0] is not None:
        source = maker.inputs[0]
        if source.dtype == dtype:
            return e.reshape(source, size_of(values))
        maker = e.makers.get(source.name)
    return e.cast(values, dtype)


def races(node: onnx.NodeProto) -> bool:
    """Whether onnxruntime may combine what falls on one place wrongly on CPU, in several threads."""
    if node.op_type != "ScatterND" or node.domain or node.doc_string == _SAYS:
        return False
    return any(attribute.name == "reduction" and attribute.s != b"none" for attribute in node.attribute)
