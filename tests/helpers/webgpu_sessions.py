"""Raw onnxruntime sessions on WebGPU, for probes: through the plugin of stock onnxruntime, or in the wheel that has it built in.

Nothing of the package is imported: the interpreters that are asked need onnx and onnxruntime alone.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper

PROVIDER = "WebGpuExecutionProvider"
#: With this in the environment, which the tests run in that found a device, none may be skipped for want of one.
REQUIRED = "AMP_TEST_WEBGPU"


def real_card() -> bool:
    """Whether the machine has a graphics card of its own."""
    return any(Path("/sys/class/drm").glob("card*/device/vendor"))


def software_allowed() -> dict[str, str]:
    """The environment in which the plugin offers software Vulkan too, where there is no graphics card."""
    return {**os.environ} | ({} if real_card() else {"ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER": "1"})


def built_in() -> bool:
    """Whether onnxruntime has the provider without a plugin. A plugin that is registered is among the providers too."""
    return PROVIDER in onnxruntime.get_available_providers() and not _listed()


def devices() -> list[Any]:
    """The plugin's devices, which is registered if it has not been."""
    if not _listed() and importlib.util.find_spec("onnxruntime_ep_webgpu") is not None:
        _register()
    return _listed()


def _listed() -> list[Any]:
    return [device for device in onnxruntime.get_ep_devices() if device.ep_name == PROVIDER]


@functools.cache
def _register() -> None:
    import onnxruntime_ep_webgpu

    onnxruntime.register_execution_provider_library("webgpu", onnxruntime_ep_webgpu.get_library_path())


def missing() -> str | None:
    """Why nothing runs on WebGPU in 16 bit here, or None where it does."""
    if not built_in() and not devices():
        if importlib.util.find_spec("onnxruntime_ep_webgpu") is None:
            return "onnxruntime has no WebGPU here: neither onnxruntime-webgpu nor the plugin onnxruntime-ep-webgpu"
        return "the plugin onnxruntime-ep-webgpu lists no device: onnxruntime finds no graphics card"
    half = onnx.TensorProto.FLOAT16
    value = [helper.make_tensor_value_info(name, half, [4]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "g", value[:1], value[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    try:
        (found,) = session(model, strict=True).run(None, {"x": np.arange(4, dtype=np.float16)})
    except Exception as error:  # onnxruntime's errors have no common base
        return f"no adapter with shader-f16: {str(error)[:300]}"
    return None if found.tolist() == [0, 2, 4, 6] else f"0..3 doubled in float16 gives {found.tolist()}"


def session(
    model: onnx.ModelProto,
    options: dict[str, str] | None = None,
    *,
    optimized: str = "",
    strict: bool = False,
    level: str = "DISABLE_ALL",
) -> onnxruntime.InferenceSession:
    """A session of a model, as it is, on WebGPU.

    Args:
        model: the model.
        options: options of the provider.
        optimized: where to write the graph that runs.
        strict: refuse a node on CPU.
        level: onnxruntime's optimizations.
    """
    how = onnxruntime.SessionOptions()
    how.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_{level}")
    how.log_severity_level = 4
    how.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if strict:
        how.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    if optimized:
        how.optimized_model_filepath = optimized
    if built_in():
        providers = [(PROVIDER, options or {}), *([] if strict else ["CPUExecutionProvider"])]
        return onnxruntime.InferenceSession(model.SerializeToString(), how, providers=providers)
    how.add_provider_for_devices(devices(), options or {})
    return onnxruntime.InferenceSession(model.SerializeToString(), how)


def lands(model: onnx.ModelProto, options: dict[str, str] | None = None) -> bool:
    """Whether the only node of a model runs on WebGPU. False too where onnxruntime refuses the model."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "optimized.onnx")
        try:
            made = session(model, options, optimized=path if built_in() else "")
        except Exception:  # onnxruntime's errors have no common base
            return False
        kinds = {
            node.op_type: part.ep_name
            for part in made.get_provider_graph_assignment_info()
            for node in part.get_nodes()
        }
        op_type = model.graph.node[0].op_type
        if not built_in():
            return kinds.get(op_type) == PROVIDER
        # The wheel tells of the nodes on CPU alone; a node that a function's body replaced is in the graph no more.
        graph = onnx.load(Path(path), load_external_data=False).graph
        return op_type not in kinds and any(node.op_type == op_type for node in graph.node)
