"""Raw onnxruntime sessions on CUDA, for what proves rules there."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from amp_transpiler.ir.types import NAMES
from amp_transpiler.runtime.device_tensors import alias, to_array

PROVIDER = "CUDAExecutionProvider"


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray[Any, Any]]) -> list[Any]:
    """Every output of a model on CUDA, whose graph is not optimised and whose fp32 products are in fp32."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    providers = [(PROVIDER, {"use_tf32": "0"}), "CPUExecutionProvider"]
    session = ort.InferenceSession(model.SerializeToString(), options, providers=providers, enable_fallback=0)
    assert session.get_providers()[0] == PROVIDER, "onnxruntime does not load its CUDA provider"
    binding = session.io_binding()
    kinds = {info.name: NAMES[info.type.tensor_type.elem_type] for info in model.graph.input}
    for name, array in feeds.items():
        binding.bind_ortvalue_input(name, alias(np.ascontiguousarray(array).reshape(array.shape), kinds[name]))
    for output in session.get_outputs():
        binding.bind_output(output.name, "cpu")
    session.run_with_iobinding(binding)
    return [to_array(value) for value in binding.get_outputs()]
