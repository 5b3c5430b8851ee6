"""Which operator runs in which precision, and for which element types onnxruntime has a kernel.

It is data beside this module: ``default.toml`` (white, black and gray operators), ``aliases.toml`` (Paddle's operator
names), ``kernels.json`` (onnxruntime's kernel registry), ``places.toml`` (what is true of a place), ``roundings.toml``
(how its kernels round) and ``faults.toml`` (those that fail); the slots that stay fp32 are declared beside the
operators, in ``ops/``. An operator of ai.onnx is named by its type (``MatMul``), another one by domain and type
(``com.microsoft::FusedMatMul``).
"""

from amp_transpiler.lists._data import (
    OpLists as OpLists,
    default_lists as default_lists,
    keep_fp32 as keep_fp32,
    kept_fp32 as kept_fp32,
    resolve as resolve,
)
from amp_transpiler.lists._faults import Fault as Fault, faults as faults
from amp_transpiler.lists._kernels import (
    NEWEST_OPSET as NEWEST_OPSET,
    TARGET_IR_VERSION as TARGET_IR_VERSION,
    TARGET_OPSET as TARGET_OPSET,
    USUAL_PLACE as USUAL_PLACE,
    has_kernel as has_kernel,
    kernel_types as kernel_types,
    lowering_gap as lowering_gap,
    no_kernel as no_kernel,
    parts_of as parts_of,
    unsupported_operators as unsupported_operators,
    unsupported_reason as unsupported_reason,
    written_out as written_out,
)
from amp_transpiler.lists._places import (
    PlaceTraits as PlaceTraits,
    half_places as half_places,
    place_kinds as place_kinds,
    place_traits as place_traits,
)
from amp_transpiler.lists._roundings import Roundings as Roundings, roundings as roundings
from amp_transpiler.lists._schemas import (
    first_opset as first_opset,
    full_name as full_name,
    plain_domain as plain_domain,
    split_name as split_name,
)
from amp_transpiler.lists.amp_lists import AutoMixedPrecisionLists as AutoMixedPrecisionLists
