"""Running programs: places, scopes, executors, and the parameters and models that live in them."""

from amp_transpiler.passes.lowering.place import (
    CPUPlace as CPUPlace,
    CUDAPlace as CUDAPlace,
    WebGPUPlace as WebGPUPlace,
)
from amp_transpiler.runtime.cast_parameters import cast_parameters_to_fp16 as cast_parameters_to_fp16
from amp_transpiler.runtime.executor import Executor as Executor, MemoryReport as MemoryReport
from amp_transpiler.runtime.inference_model import (
    load_inference_model as load_inference_model,
    save_inference_model as save_inference_model,
)
from amp_transpiler.runtime.scope import Scope as Scope, global_scope as global_scope, scope_guard as scope_guard
