"""Rows added to rows of a tensor, of which one may be added to several times.

onnxruntime's ScatterND (1.31) does that on CPU in several threads that overwrite one another where there is enough to
do: of 4,096 rows of 64 on two threads one run in six is wrong, of 3,300 on eight threads every one (measured).
"""

from __future__ import annotations

import math

import numpy as np
import onnx

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.types import HALF
from amp_transpiler.ops.common import size_of, sliced

#: Elements that are added up to which onnxruntime takes one thread however many there are: from 210,000 on its cost
#: model (100,000 to begin with, 100,000 for each thread, one for an element) takes two.
_ONE_THREAD = 200_000
#: What a node says of which that holds.
_SAYS = "one thread: few elements are added"
#: Elements that ScatterND copies while ScatterElements adds one: it takes 6 ns for that.
_COPIES = 16


def added_rows(e: Emitter, total: Value, at: Value, rows: Value, in_place: bool = False) -> Value:
    """``total`` with ``rows`` [.., rest] added at ``at`` [.., k] (int64) of its first k dimensions, in their order.

    ``in_place``: so that the result may lie where ``total`` lies. That takes one node, whatever its size.
    """
    shape, count = size_of(total), _elements(total, at)
    if not e.at.host or count <= _ONE_THREAD or in_place:
        return _scattered(e, total, at, rows)
    *lead, k = size_of(at)
    number, rest = math.prod(lead), shape[k:]
    at, rows = e.reshape(at, (number, k)), e.reshape(rows, (number, *rest))
    step = _ONE_THREAD * number // count
    if step and total.dtype not in HALF and math.prod(shape) * -(-number // step) <= _COPIES * count:
        for start in range(0, number, step):  # a 16-bit sum would be rounded in between
            stop = min(number, start + step)
            total = _scattered(e, total, sliced(e, at, 0, start, stop), sliced(e, rows, 0, start, stop))
        return total
    return e.reshape(_by_elements(e, total, at, rows), shape)


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
    (number, k), shape = size_of(at), size_of(total)
    width, places = math.prod(shape[k:]), math.prod(shape[:k])
    if k > 1:
        sizes = np.array(shape[:k], np.int64)
        strides = np.append(np.cumprod(sizes[:0:-1])[::-1], 1)
        below = e.op("Less", at, e.const(np.int64(0)), shape=at.shape)
        at = e.Where(below, e.Add(at, e.const(sizes)), at, shape=at.shape)
        at = e.op("ReduceSum", e.Mul(at, e.const(strides)), e.ints(1), keepdims=1, shape=(number, 1))
    every = e.Expand(at, e.ints(number, width), shape=(number, width))
    total, rows = e.reshape(total, (places, width)), e.reshape(rows, (number, width))
    return e.ScatterElements(total, every, rows, axis=0, reduction="add", shape=(places, width))


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


def races(node: onnx.NodeProto) -> bool:
    """Whether onnxruntime may combine what falls on one place wrongly on CPU, in several threads."""
    if node.op_type != "ScatterND" or node.domain or node.doc_string == _SAYS:
        return False
    return any(attribute.name == "reduction" and attribute.s != b"none" for attribute in node.attribute)
