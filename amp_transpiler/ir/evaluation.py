"""Operators run in ONNX's reference evaluator, for what is known before a run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import onnx

from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.tensors import SMALL


def evaluated(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> np.ndarray:
    """The first output of a model in the reference evaluator, which raises whatever its operators do."""
    from onnx.reference import ReferenceEvaluator  # noqa: PLC0415 - its import takes 20 ms, and few programs need it

    results: Any = ReferenceEvaluator(model).run(None, dict(feeds))
    return np.asarray(results[0])


def fold(op: Operator, values: list[np.ndarray]) -> np.ndarray | None:
    """Run one small operator in the reference evaluator; None where that cannot. Do not write to the result."""
    attrs = tuple(proto.SerializeToString(deterministic=True) for proto in op.attrs.protos())
    kept = all(array.size <= SMALL and not array.dtype.hasobject for array in values)
    run = _folded if kept else _folded.__wrapped__
    read = tuple(map(_Read, values))
    return run(op.type, op.domain, op.program.opset(op.domain), attrs, tuple(v is not None for v in op.inputs), read)


class _Read:
    """What an operator reads: equal to another of the same numbers."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.same = (array.dtype, array.shape, array.tobytes())

    def __hash__(self) -> int:
        return hash(self.same)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Read) and self.same == other.same


@lru_cache(maxsize=4096)  # the layers of a net compute their sizes alike
def _folded(
    type_: str, domain: str, opset: int, attrs: tuple[bytes, ...], given: tuple[bool, ...], read: tuple[_Read, ...]
) -> np.ndarray | None:
    names = iter(f"i{i}" for i in range(len(read)))
    inputs = [next(names) if each else "" for each in given]
    node = onnx.helper.make_node(type_, inputs, ["out"], domain=domain)
    node.attribute.extend(map(onnx.AttributeProto.FromString, attrs))
    feeds = dict(zip([n for n in inputs if n], (each.array for each in read), strict=True))
    known = [
        onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in feeds.items()
    ]
    graph = onnx.helper.make_graph([node], "fold", known, [onnx.helper.make_empty_tensor_value_info("out")])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid(domain, opset)])
    try:
        return evaluated(model, feeds)
    except Exception:  # the evaluator raises whatever its operator does; an unknown value is no error here
        return None
