"""Which operator has no kernel on a place, and which meets one that does not compute what it should.

The tables are ``lists/kernels.json`` and ``lists/faults.toml``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.types import FLOATS, HALF
from amp_transpiler.lists import Fault, faults, has_kernel, kernel_types, place_traits, unsupported_reason
from amp_transpiler.passes.view.typing import operator_name

#: Control flow, whose graphs are looked into, and constants, which are loaded and not run.
_NOT_RUN = frozenset({"Constant", "If", "Loop", "Scan", "SequenceMap"})
#: A channel count that kernels read whole vectors of.
VECTOR = 4


@dataclass(frozen=True)
class Call:
    """What a kernel is given: attributes, element types and shapes of its inputs, where they are known, and how many
    results are wanted."""

    attrs: Mapping[str, Any]
    dtypes: Sequence[str | None]
    shapes: Sequence[tuple[int, ...] | None]
    results: int

    @property
    def groups(self) -> int:
        """Of a convolution."""
        return int(self.attrs.get("group") or 1)

    @property
    def rank(self) -> int:
        """Of the first input; 0 where nobody knows."""
        return len(self.shapes[0] or ())


def fault_of(kind: str, full_type: str, call: Call) -> Fault | None:
    """The fault of the kernel that runs an operator on a place of this kind; None for none."""
    return next((f for f in faults(kind).get(full_type, ()) if _HOLDS[f.where](call)), None)


def fault_at(kind: str, op: Operator, dtype: str | None = None) -> Fault | None:
    """The same of an operator of a program, as if its first input had type ``dtype``."""
    name = operator_name(op)
    if name not in faults(kind):
        return None
    dtypes = [None if v is None else v.dtype for v in op.inputs]
    shapes = [None if v is None else _known(v) for v in op.inputs]
    wanted = sum(v is not None for v in op.outputs)
    return fault_of(kind, name, Call(op.attrs, [dtype or dtypes[0], *dtypes[1:]], shapes, wanted))


def leaves(op: Operator, kind: str) -> str:
    """Why onnxruntime would not run the operator on a place of this kind at its opset; "" where it would."""
    at, opset = place_traits(kind), op.program.opset(op.domain)
    dtype = next((str(v.dtype) for v in (*op.outputs, *op.inputs) if v is not None and v.dtype in FLOATS), "")
    if op.type in _NOT_RUN:
        return ""
    if dtype == "float16" and at.emulates:
        dtype = "float32"  # onnxruntime puts casts around it there
    if dtype in HALF:
        return unsupported_reason(operator_name(op), dtype, opset, kind) or ""
    if kernel_types(at.provider, op.type, opset, op.domain) is None:
        runs = unsupported_reason(operator_name(op), "float16", opset, kind) is None
        return "" if runs else "no kernel"
    if dtype and not has_kernel(at.provider, op.type, dtype, opset, op.domain):
        return f"no kernel for {dtype} at opset {opset}"
    return ""


def _known(variable: Variable) -> tuple[int, ...] | None:
    """The shape, where it is fixed."""
    sizes = [size for size in variable.shape or () if isinstance(size, int)]
    return tuple(sizes) if variable.shape is not None and len(sizes) == len(variable.shape) else None


def _by_threes(call: Call) -> bool:
    """Of a Conv: more than three channels, a multiple of three and not of four, to a multiple of four channels."""
    w = call.shapes[1]
    if w is None or len(w) not in (3, 4) or call.groups != 1:
        return False
    outputs, channels, *kernel = w
    steps, pads = call.attrs.get("strides") or [1], call.attrs.get("pads") or [0]
    plain = set(kernel) == set(steps) == {1} and not any(pads)  # a matrix product, which another kernel computes
    return not plain and channels > 3 and channels % 3 == 0 and channels % VECTOR != 0 and outputs % VECTOR == 0


def _other_statistics(call: Call) -> bool:
    return call.dtypes[0] in HALF and any(dtype != call.dtypes[0] for dtype in call.dtypes[1:])


def _scalar_added(call: Call) -> bool:
    added = call.shapes[2] if len(call.shapes) > 2 else None
    return added is not None and math.prod(added) == 1 and len(added) < 2


def _vector(call: Call) -> bool:
    return any(shape is not None and len(shape) == 1 for shape in call.shapes)


def _nothing_summed(call: Call) -> bool:
    return (call.shapes[0] or (1,))[-1] == 0


def _even_groups_to_one(call: Call) -> bool:
    """Of a ConvTranspose."""
    w = call.shapes[1]
    return w is not None and call.groups > 1 and w[1] == 1 and w[0] // call.groups % 2 == 0


_HOLDS: Mapping[str, Callable[[Call], bool]] = {
    "channels by threes": _by_threes,
    "16-bit image, fp32 statistics": _other_statistics,
    "scalar added": _scalar_added,
    "a vector": _vector,
    "nothing to add up": _nothing_summed,
    "groups of an even number of channels to one": _even_groups_to_one,
    "16-bit numbers combined": lambda call: call.dtypes[0] in HALF and call.attrs.get("reduction", "none") != "none",
    "indices wanted": lambda call: call.results > 1,
    "floating-point numbers": lambda call: call.dtypes[0] in FLOATS,
    "truth values chosen": lambda call: call.dtypes[1] == "bool",
    "three axes": lambda call: call.rank > 4,
    "three axes, in groups": lambda call: call.rank > 4 and call.groups > 1,
}
