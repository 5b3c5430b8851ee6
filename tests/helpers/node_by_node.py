"""Runs a model node by node on the CPU.

Run alone, a 16-bit operator of onnxruntime's CPU provider computes in fp32 and rounds its result once, as a GPU does.
"""

from __future__ import annotations

import numpy as np
import onnx

from tests.helpers.sessions import session


def node_by_node(model: onnx.ModelProto, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every tensor of a flat model, each node run in a session of its own."""
    known = dict(values) | {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    for node in model.graph.node:
        infos = [
            onnx.helper.make_tensor_value_info(n, onnx.helper.np_dtype_to_tensor_dtype(known[n].dtype), known[n].shape)
            for n in dict.fromkeys(node.input)
            if n
        ]
        outputs = [onnx.helper.make_empty_tensor_value_info(n) for n in node.output if n]
        graph = onnx.helper.make_graph([node], "one", infos, outputs)
        one = onnx.helper.make_model(graph, ir_version=10, opset_imports=model.opset_import)
        running = session(one, "DISABLE_ALL")
        results = running.run(None, {i.name: known[i.name] for i in infos})
        known |= dict(zip([n for n in node.output if n], results, strict=True))
    return known
