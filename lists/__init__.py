"""Which operator runs in which precision, and for which element types onnxruntime has a kernel.

It is data beside this module: ``default.toml`` (white, black and gray operators), ``aliases.toml`` (Paddle's operator
names), ``kernels.json`` (onnxruntime's kernel registry), ``places.toml`` (what is true of a place), ``roundings.toml``
(how its kernels round) and ``faults.toml`` (those that fail); the slots that stay fp32 are declared beside the
operators, in ``ops/``. An operator of ai.onnx is named by its type (``MatMul``), another one by domain and type
(``com.microsoft::FusedMatMul``).
"""

from amp_transpiler.lists._data import OpLists, default_lists, keep_fp32, kept_fp32, resolve
from amp_transpiler.lists._faults import Fault, faults
from amp_transpiler.lists._kernels import (
    NEWEST_OPSET,
    TARGET_IR_VERSION,
    TARGET_OPSET,
    USUAL_PLACE,
    has_kernel,
    kernel_types,
    lowering_gap,
    no_kernel,
    parts_of,
    unsupported_operators,
    unsupported_reason,
    written_out,
)
from amp_transpiler.lists._places import PlaceTraits, half_places, place_kinds, place_traits
from amp_transpiler.lists._roundings import Roundings, roundings
from amp_transpiler.lists._schemas import first_opset, plain_domain
from amp_transpiler.lists.amp_lists import AutoMixedPrecisionLists

__all__ = [
    "NEWEST_OPSET",
    "USUAL_PLACE",
    "TARGET_IR_VERSION",
    "TARGET_OPSET",
    "AutoMixedPrecisionLists",
    "Fault",
    "OpLists",
    "PlaceTraits",
    "Roundings",
    "default_lists",
    "faults",
    "first_opset",
    "half_places",
    "has_kernel",
    "keep_fp32",
    "kept_fp32",
    "kernel_types",
    "lowering_gap",
    "no_kernel",
    "parts_of",
    "place_kinds",
    "place_traits",
    "plain_domain",
    "resolve",
    "roundings",
    "unsupported_operators",
    "unsupported_reason",
    "written_out",
]
