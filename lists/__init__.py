"""Which operator runs in which precision, and for which element types onnxruntime has a kernel.

It is data beside this module: ``default.toml`` (white, black and gray operators), ``aliases.toml`` (Paddle's operator
names), ``kernels.json`` (onnxruntime's kernel registry) and ``places.toml`` (what is true of a place); the slots that
stay fp32 are declared beside the operators, in ``ops/``. An operator of ai.onnx is named by its type (``MatMul``),
another one by domain and type (``com.microsoft::FusedMatMul``).
"""

from amp_transpiler.lists._data import OpLists, default_lists, keep_fp32, kept_fp32, resolve
from amp_transpiler.lists._kernels import (
    NO_KERNEL,
    TARGET_IR_VERSION,
    TARGET_OPSET,
    has_kernel,
    kernel_types,
    unsupported_operators,
    unsupported_reason,
)
from amp_transpiler.lists._places import PlaceTraits, place_kinds, place_traits
from amp_transpiler.lists.amp_lists import AutoMixedPrecisionLists

__all__ = [
    "NO_KERNEL",
    "TARGET_IR_VERSION",
    "TARGET_OPSET",
    "AutoMixedPrecisionLists",
    "OpLists",
    "PlaceTraits",
    "default_lists",
    "has_kernel",
    "keep_fp32",
    "kept_fp32",
    "kernel_types",
    "place_kinds",
    "place_traits",
    "resolve",
    "unsupported_operators",
    "unsupported_reason",
]
