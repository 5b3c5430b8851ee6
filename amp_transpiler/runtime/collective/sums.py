"""Adding what the ranks sent, in the order of ranks, rounded once: the one place of that arithmetic.

16-bit words are widened, added and rounded by onnxruntime, whose casts take a tenth of the time of numpy's and
which reads and writes the memory of the arrays. Everything goes in pieces that stay in the cache.

Partial sums of bfloat16 and wider types can leave the range of the type they are added in though the sum, or the mean,
does not. Where a result is not finite, it is therefore computed once more in float64, scaled down by a power of two;
an element's result depends on nothing but the addends of this element.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper

from amp_transpiler.ir.types import FLOATS, HALF, ONNX_TYPES
from amp_transpiler.lists import TARGET_OPSET

#: Elements of a piece: two or three times this many fp32 values fit into a second-level cache.
PIECE = 1 << 18
#: Addends of one session's run.
_ADDENDS = 8
#: The bits of a bfloat16 without its sign, from which value of them on it is infinite or NaN.
_MAGNITUDE, _INFINITE = np.uint16(0x7FFF), np.uint16(0x7F80)


class Reducer:
    """Reduces in one thread at a time: it keeps the memory for partial sums."""

    def __init__(self) -> None:
        self._partial: list[np.ndarray] = []

    def reduce(
        self, parts: Sequence[np.ndarray], out: np.ndarray, op: str, between: Callable[[], object] | None = None
    ) -> None:
        """``out`` becomes the sum, mean or max of ``parts``: flat arrays of its type and size, one for each rank.

        ``out`` may be one of them. ``between`` is called after each piece.
        """
        dtype, mean = out.dtype.name, len(parts) if op == "mean" else None
        for start in range(0, out.size, PIECE):
            piece = slice(start, start + PIECE)
            addends, result = [part[piece] for part in parts], out[piece]
            if op == "max":
                result[...] = functools.reduce(np.maximum, addends)
            elif dtype in HALF:
                self._add_words(addends, result, dtype, mean)
            else:
                _add(addends, result, mean, dtype in FLOATS)
            if between is not None:
                between()

    def _add_words(self, addends: list[np.ndarray], result: np.ndarray, dtype: str, mean: int | None) -> None:
        copies = addends if dtype == "bfloat16" else []
        copies = [a.copy() if np.shares_memory(a, result) else a for a in copies]  # a second look may be needed
        groups = [addends[i : i + _ADDENDS] for i in range(0, len(addends), _ADDENDS)]
        total: np.ndarray | None = None
        for index, group in enumerate(groups):
            last = index == len(groups) - 1
            session = _session(dtype, len(group), total is not None, last, mean if last else None)
            binding = session.io_binding()
            if total is not None:
                binding.bind_input("total", "cpu", 0, np.float32, total.shape, total.ctypes.data)
            for number, words in enumerate(group):
                binding.bind_input(f"x{number}", "cpu", 0, ONNX_TYPES[dtype], words.shape, words.ctypes.data)
            total = result if last else self._memory(index % 2)[: result.size]
            kind = ONNX_TYPES[dtype if last else "float32"]
            binding.bind_output("y", "cpu", 0, kind, total.shape, total.ctypes.data)
            session.run_with_iobinding(binding)
        if copies:
            _mend(copies, result, mean)

    def _memory(self, index: int) -> np.ndarray:
        while len(self._partial) <= index:
            self._partial.append(np.empty(PIECE, np.float32))
        return self._partial[index]


@functools.cache
def _session(dtype: str, addends: int, continued: bool, last: bool, mean: int | None) -> Any:
    """A session: total + x0 + x1 … in fp32; ``last``: divided by ``mean`` and rounded."""
    words, nodes, constants = [f"x{number}" for number in range(addends)], [], []
    total = "total" if continued else ""
    for number, name in enumerate(words):
        nodes.append(helper.make_node("Cast", [name], [f"wide{number}"], to=onnx.TensorProto.FLOAT))
        if total:
            nodes.append(helper.make_node("Add", [total, f"wide{number}"], [f"sum{number}"]))
        total = f"sum{number}" if total else f"wide{number}"
    if mean is not None:
        constants.append(helper.make_tensor("size", onnx.TensorProto.FLOAT, [], [float(mean)]))
        nodes.append(helper.make_node("Div", [total, "size"], ["mean"]))
        total = "mean"
    kind = ONNX_TYPES[dtype] if last else onnx.TensorProto.FLOAT
    nodes.append(helper.make_node("Cast", [total], ["y"], to=kind))
    inputs = [("total", onnx.TensorProto.FLOAT)] * continued + [(name, ONNX_TYPES[dtype]) for name in words]
    graph = helper.make_graph(
        nodes,
        "sum",
        [helper.make_tensor_value_info(name, each, ["n"]) for name, each in inputs],
        [helper.make_tensor_value_info("y", kind, ["n"])],
        constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", TARGET_OPSET)], ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    options.enable_mem_pattern = False
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _add(addends: Sequence[np.ndarray], result: np.ndarray, mean: int | None, floats: bool) -> None:
    """The same for types that are added as they are."""
    with np.errstate(all="ignore"):
        total = addends[0].copy()
        for each in addends[1:]:
            np.add(total, each, out=total)
        if mean is not None:
            np.divide(total, np.asarray(mean, total.dtype), out=total)
    if floats:
        _mend(addends, total, mean)
    result[...] = total


def _mend(addends: Sequence[np.ndarray], result: np.ndarray, mean: int | None) -> None:
    """Computes anew where the result is not finite: a partial sum may have been too large."""
    if result.dtype.itemsize == 2:  # bfloat16, whose words tell it at once
        words = result.view(np.uint16) & _MAGNITUDE
        if words.max(initial=0) < _INFINITE:
            return
        found = words >= _INFINITE
    else:
        found = ~np.isfinite(result)
    if not found.any():
        return
    with np.errstate(all="ignore"):
        down = 2.0 ** -math.ceil(math.log2(max(2, len(addends))))
        total = np.zeros(int(found.sum()))
        least, largest = total + np.inf, total - np.inf
        for each in addends:
            values = each[found].astype(np.float64)
            total += values * down
            np.minimum(least, values, out=least)
            np.maximum(largest, values, out=largest)
        # A mean lies between its addends; rounding may lead out of them, and out of the range.
        total = total / down if mean is None else np.clip(total / (mean * down), least, largest)
        result[found] = total.astype(result.dtype)
