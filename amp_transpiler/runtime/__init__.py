"""Running programs: places, scopes, executors, and the parameters and models that live in them."""

from amp_transpiler.passes.lowering.place import CPUPlace, CUDAPlace, WebGPUPlace
from amp_transpiler.runtime.cast_parameters import cast_parameters_to_fp16
from amp_transpiler.runtime.executor import Executor, MemoryReport
from amp_transpiler.runtime.inference_model import load_inference_model, save_inference_model
from amp_transpiler.runtime.scope import Scope, global_scope, scope_guard

__all__ = [
    "CPUPlace",
    "CUDAPlace",
    "WebGPUPlace",
    "Executor",
    "MemoryReport",
    "Scope",
    "cast_parameters_to_fp16",
    "global_scope",
    "load_inference_model",
    "save_inference_model",
    "scope_guard",
]
