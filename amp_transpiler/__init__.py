"""Mixed and pure 16-bit precision for ONNX programs: rewriting, training and serving on stock onnxruntime."""

import typing as _typing
from importlib import import_module as _import_module
from pathlib import Path as _Path

_root = _Path(__file__).resolve().parent.parent
if (_root / "ops" / "__init__.py").is_file() and (_root / "amp_transpiler" / "__init__.py").is_file():
    __path__.append(str(_root))  # a checkout keeps the subpackages ops and lists at its top level

import onnxruntime as _onnxruntime

from amp_transpiler.errors import AmpError, MissingPackageError

if not hasattr(_onnxruntime, "InferenceSession"):  # onnxruntime and onnxruntime-gpu share a folder; one was uninstalled
    raise MissingPackageError(
        "the installed onnxruntime is damaged, as it is where both onnxruntime and onnxruntime-gpu were installed and "
        "one was removed. Mend it: pip uninstall -y onnxruntime onnxruntime-gpu, then pip install onnxruntime-gpu"
    )

from amp_transpiler.ir.gc_pause import collector_paused as _collector_paused

with _collector_paused(lasting=True):  # modules are no garbage, and to go through them again and again takes long
    from amp_transpiler import errors, nn, ops, optimizer, regularizer
from amp_transpiler.ir import unique_name
from amp_transpiler.ir.context import fp16_guard, name_scope
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.user_rules import register_gradient
from amp_transpiler.lists.amp_lists import AutoMixedPrecisionLists
from amp_transpiler.lists.paddle import paddle_attributes
from amp_transpiler.nn import ParamAttr, create_parameter, custom_getter, data, float32_variable_storage_getter
from amp_transpiler.nn.initializer import set_seed as seed
from amp_transpiler.optimizer import (
    LossScale,
    LossScaleOptimizer,
    LossScaler,
    Policy,
    check_finite_and_unscale,
    decorate,
    enable_static,
    get_global_policy,
    policy_scope,
    set_global_policy,
    update_loss_scaling,
)
from amp_transpiler.passes.autodiff.backward import append_backward
from amp_transpiler.passes.autodiff.segments import recompute
from amp_transpiler.passes.lowering.cost_estimate import CostEstimate
from amp_transpiler.passes.lowering.memory_estimate import MemoryEstimate
from amp_transpiler.passes.precision.pure import cast_model_to_fp16
from amp_transpiler.passes.precision.rewrite import rewrite_program
from amp_transpiler.passes.step_check.check_step import check_step
from amp_transpiler.program import (
    Program,
    default_main_program,
    default_startup_program,
    program_guard,
    set_exporter as _set_exporter,
    split_embedding_parameters,
)
from amp_transpiler.runtime import CPUPlace, CUDAPlace, Executor, Scope, WebGPUPlace, global_scope, scope_guard
from amp_transpiler.runtime.cast_parameters import cast_parameters_to_fp16
from amp_transpiler.runtime.inference_model import load_inference_model, save_inference_model
from amp_transpiler.version import __version__ as __version__

if _typing.TYPE_CHECKING:
    from amp_transpiler import distributed, mixed_precision, static
    from amp_transpiler.conversion.check_model import ModelCheck, check_model
    from amp_transpiler.conversion.converting import convert
    from amp_transpiler.conversion.known_passes import Pipeline
    from amp_transpiler.conversion.leaving import Leaving
    from amp_transpiler.export.trained_model import write_trained_model
    from amp_transpiler.finetune.fit import fit
    from amp_transpiler.finetune.options import FitOptions
    from amp_transpiler.finetune.prepare import prepare_training
    from amp_transpiler.finetune.training_record import FitResult
    from amp_transpiler.monitor import (
        CsvWriter,
        Culprit,
        GradientUnderflow,
        JsonlWriter,
        StepReport,
        StepReports,
        TensorBoardWriter,
        Watch,
        find_culprit,
        gradient_underflow,
        save_step,
        step_state,
        watch,
    )
    from amp_transpiler.passes.lowering.cost_comparison import CostComparison, compare_costs
    from amp_transpiler.runtime.checkpoint.checkpoints import (
        Checkpoint,
        latest_checkpoint,
        load_checkpoint,
        save_checkpoint,
    )
    from amp_transpiler.runtime.checkpoint.weight_files import load_weights

#: What not every program needs, by modules: they are loaded when a name of theirs is first asked for.
_LATER = {
    "": ("distributed", "mixed_precision", "static"),
    "conversion.check_model": ("ModelCheck", "check_model"),
    "conversion.converting": ("convert",),
    "conversion.known_passes": ("Pipeline",),
    "conversion.leaving": ("Leaving",),
    "export.trained_model": ("write_trained_model",),
    "finetune.fit": ("fit",),
    "finetune.options": ("FitOptions",),
    "finetune.prepare": ("prepare_training",),
    "finetune.training_record": ("FitResult",),
    "monitor": (
        "CsvWriter",
        "Culprit",
        "GradientUnderflow",
        "JsonlWriter",
        "StepReport",
        "StepReports",
        "TensorBoardWriter",
        "Watch",
        "find_culprit",
        "gradient_underflow",
        "save_step",
        "step_state",
        "watch",
    ),
    "passes.lowering.cost_comparison": ("CostComparison", "compare_costs"),
    "runtime.checkpoint.checkpoints": ("Checkpoint", "latest_checkpoint", "load_checkpoint", "save_checkpoint"),
    "runtime.checkpoint.weight_files": ("load_weights",),
}
_homes = {name: f"{__name__}.{module}" for module, names in _LATER.items() if module for name in names}
#: Rooms, and modules, that are attributes when they are loaded.
_rooms = {*_LATER[""], *(module.partition(".")[0] for module in _LATER if module)}
_of_paddle = paddle_attributes(__name__)


def _attribute(name: str) -> _typing.Any:
    if name in _rooms:
        return _import_module(f"{__name__}.{name}")
    if name not in _homes:
        return _of_paddle(name)
    found = globals()[name] = getattr(_import_module(_homes[name]), name)
    return found


if not _typing.TYPE_CHECKING:  # to a type checker an unknown name is an error
    __getattr__ = _attribute


def __dir__() -> list[str]:
    return sorted({*globals(), *_homes, *_rooms})


_set_exporter(
    lambda *args, **kwargs: _import_module(f"{__name__}.export.training_export").export_training(*args, **kwargs)
)

__all__ = [
    "AmpError",
    "AutoMixedPrecisionLists",
    "CPUPlace",
    "CUDAPlace",
    "Checkpoint",
    "CostComparison",
    "CostEstimate",
    "CsvWriter",
    "Culprit",
    "Executor",
    "FitOptions",
    "FitResult",
    "GradientUnderflow",
    "JsonlWriter",
    "Leaving",
    "LossScale",
    "LossScaleOptimizer",
    "LossScaler",
    "MemoryEstimate",
    "ModelCheck",
    "Operator",
    "ParamAttr",
    "Pipeline",
    "Policy",
    "Program",
    "Scope",
    "StepReport",
    "StepReports",
    "TensorBoardWriter",
    "Variable",
    "Watch",
    "WebGPUPlace",
    "append_backward",
    "cast_model_to_fp16",
    "cast_parameters_to_fp16",
    "check_finite_and_unscale",
    "check_model",
    "check_step",
    "compare_costs",
    "convert",
    "create_parameter",
    "custom_getter",
    "data",
    "decorate",
    "default_main_program",
    "default_startup_program",
    "distributed",
    "errors",
    "enable_static",
    "find_culprit",
    "fit",
    "float32_variable_storage_getter",
    "fp16_guard",
    "get_global_policy",
    "global_scope",
    "gradient_underflow",
    "latest_checkpoint",
    "load_checkpoint",
    "load_inference_model",
    "load_weights",
    "mixed_precision",
    "name_scope",
    "nn",
    "ops",
    "optimizer",
    "policy_scope",
    "prepare_training",
    "program_guard",
    "split_embedding_parameters",
    "recompute",
    "register_gradient",
    "regularizer",
    "rewrite_program",
    "save_checkpoint",
    "save_inference_model",
    "save_step",
    "scope_guard",
    "seed",
    "set_global_policy",
    "static",
    "step_state",
    "unique_name",
    "update_loss_scaling",
    "watch",
    "write_trained_model",
]
