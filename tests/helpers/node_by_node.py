"""Runs a model node by node on the CPU.

Run alone, a 16-bit operator of onnxruntime's CPU provider computes in fp32 and rounds its result once, as a GPU does.
"""

from __future__ import annotations

import numpy as np
import onnx

from tests.helpers.sessions import session


def _bias_softmax(node: onnx.NodeProto, x: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """As its kernel counts: rows by number, of which each run, or each of a run, has a row of the bias."""
    attrs = {a.name: a.i for a in node.attribute}
    width = int(np.prod(x.shape[attrs["axis"] :]))
    rows, of_bias = x.astype(np.float32).reshape(-1, width), bias.astype(np.float32).reshape(-1, width)
    number, count = np.arange(len(rows)), len(of_bias)
    total = rows + of_bias[number // (len(rows) // count) if attrs["is_inner_broadcast"] else number % count]
    power = np.exp(total - total.max(axis=-1, keepdims=True))
    return (power / power.sum(axis=-1, keepdims=True)).reshape(x.shape).astype(x.dtype)


#: Operators of com.microsoft that onnxruntime has no CPU kernel of.
_ON_CUDA_ALONE = {"BiasSoftmax": _bias_softmax}


def node_by_node(model: onnx.ModelProto, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every tensor of a flat model, each node run in a session of its own."""
    known = dict(values) | {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type in _ON_CUDA_ALONE:
            known[node.output[0]] = _ON_CUDA_ALONE[node.op_type](node, *(known[name] for name in node.input))
            continue
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
