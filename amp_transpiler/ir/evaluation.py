"""Operators run in ONNX's reference evaluator, for what is known before a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx

from amp_transpiler.ir.nodes import Operator


def evaluated(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> np.ndarray:
    """The first output of a model in the reference evaluator, which raises whatever its operators do."""
    from onnx.reference import ReferenceEvaluator  # noqa: PLC0415 - its import takes 20 ms, and few programs need it

    results: Any = ReferenceEvaluator(model).run(None, dict(feeds))
    return np.asarray(results[0])


def fold(op: Operator, values: list[np.ndarray]) -> np.ndarray | None:
    """Run one small operator in the reference evaluator; None where that cannot."""
    names = iter(f"i{i}" for i in range(len(values)))
    inputs = ["" if v is None else next(names) for v in op.inputs]
    node = onnx.helper.make_node(op.type, inputs, ["out"], domain=op.domain)
    node.attribute.extend(op.attrs.protos())
    feeds = dict(zip([n for n in inputs if n], values, strict=True))
    given = [
        onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in feeds.items()
    ]
    graph = onnx.helper.make_graph([node], "fold", given, [onnx.helper.make_empty_tensor_value_info("out")])
    opset = onnx.helper.make_opsetid(op.domain, op.program.opset(op.domain))
    model = onnx.helper.make_model(graph, opset_imports=[opset])
    try:
        return evaluated(model, feeds)
    except Exception:  # the evaluator raises whatever its operator does; an unknown value is no error here
        return None
