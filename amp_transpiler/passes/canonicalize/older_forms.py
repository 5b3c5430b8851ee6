"""How operators of ai.onnx whose form changed from one opset to another are written in the newer form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx

from amp_transpiler.errors import GraphError
from amp_transpiler.ir.nodes import Operator, Variable, origin
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.ir.types import numpy_dtype
from amp_transpiler.lists import TARGET_OPSET
from amp_transpiler.passes.canonicalize.matching import drop_unread
from amp_transpiler.passes.view.constants import constant_content

Adapter = Callable[[Operator], None]
#: operator type -> (first version that needs no change, adapter), oldest change first.
ADAPTERS: dict[str, list[tuple[int, Adapter]]] = {}


def _adapter(upto: int, *types: str) -> Callable[[Adapter], Adapter]:
    def register(function: Adapter) -> Adapter:
        for type_ in types:
            ADAPTERS.setdefault(type_, []).append((upto, function))
        return function

    return register


def _constant(op: Operator, what: str, array: np.ndarray) -> Variable:
    first = next(v for v in op.outputs if v is not None)
    return op.program.add_constant(f"{first.name}.{what}", array)


def _attribute_to_input(op: Operator, name: str, slot: int, dtype: Any = np.int64) -> None:
    if name in op.attrs:
        op.set_input(slot, _constant(op, name, np.asarray(op.attrs[name], dtype)))
        del op.attrs[name]


def _type_of_data(op: Operator) -> Any:
    source = op.inputs[0]
    return np.float32 if source is None or source.dtype is None else numpy_dtype(source.dtype)


@_adapter(13, "ReduceSum", "Squeeze", "Unsqueeze")
@_adapter(
    18,
    "ReduceMean",
    "ReduceL1",
    "ReduceL2",
    "ReduceLogSum",
    "ReduceLogSumExp",
    "ReduceProd",
    "ReduceSumSquare",
    "ReduceMax",
    "ReduceMin",
)
def _axes(op: Operator) -> None:
    _attribute_to_input(op, "axes", 1)


@_adapter(13, "Split")
def _split(op: Operator) -> None:
    _attribute_to_input(op, "split", 1)


@_adapter(18, "Split")
def _split_evenly(op: Operator) -> None:
    if op.input(1) is None:
        op.attrs["num_outputs"] = len(op.outputs)


@_adapter(10, "Slice")
def _slice(op: Operator) -> None:
    for slot, name in enumerate(("starts", "ends", "axes"), 1):
        _attribute_to_input(op, name, slot)


@_adapter(11, "Clip")
def _clip(op: Operator) -> None:
    for slot, name in enumerate(("min", "max"), 1):
        _attribute_to_input(op, name, slot, _type_of_data(op))


@_adapter(11, "Pad")
def _pad(op: Operator) -> None:
    _attribute_to_input(op, "pads", 1)
    _attribute_to_input(op, "value", 2, _type_of_data(op))


@_adapter(10, "Dropout")
def _mask(op: Operator) -> None:
    """The mask was of the type of the data, and became a truth value; until 12 it is zeros where nothing trains."""
    mask, source = op.output(1), op.inputs[0]
    if mask is None:
        return
    op.set_output(1, None)
    if mask.readers or mask in op.program.outputs:
        shape = op.program.fresh_variable(f"{mask.name}.shape", "int64")
        zero = np.zeros(1, _type_of_data(op) if mask.dtype is None else numpy_dtype(mask.dtype))
        op.program.add_operator("Shape", [source], [shape], like=op)
        op.program.add_operator(
            "ConstantOfShape", [shape], [mask], attrs={"value": onnx.numpy_helper.from_array(zero)}, like=op
        )
    else:
        op.program.remove_variable(mask)


@_adapter(12, "Dropout")
def _dropout(op: Operator) -> None:
    _mask(op)
    _attribute_to_input(op, "ratio", 1, np.float32)


@_adapter(10, "TopK")
def _top_k(op: Operator) -> None:
    if "k" in op.attrs:
        op.attrs["k"] = [op.attrs["k"]]
    _attribute_to_input(op, "k", 1)


@_adapter(9, "Upsample")
def _upsample(op: Operator) -> None:
    _attribute_to_input(op, "scales", 1, np.float32)


@_adapter(10, "Upsample")
def _renamed(op: Operator) -> None:
    op.type = "Resize"


@_adapter(20, "GridSample")
def _grid_sample(op: Operator) -> None:
    if "mode" in op.attrs:
        op.attrs["mode"] = {"bilinear": "linear", "bicubic": "cubic"}.get(op.attrs["mode"], op.attrs["mode"])


@_adapter(11, "Resize", "Upsample")
def _resize(op: Operator) -> None:
    """The old form has asymmetric coordinates; the new one names a region of interest before the scales."""
    scales = op.input(1)
    op.set_input(1, _constant(op, "roi", np.zeros(0, np.float32)))
    op.set_input(2, scales)
    op.attrs["coordinate_transformation_mode"] = "asymmetric"
    if op.attrs.get("mode", "nearest") == "nearest":
        _rounded(op, scales)
    elif op.attrs["mode"] == "bilinear":
        op.attrs["mode"] = "linear"


def _rounded(op: Operator, scales: Variable | None) -> None:
    """Places between elements: onnxruntime's kernel of the old form takes the one before them along an axis that grows,
    and the one behind along an axis that shrinks. Resize has one way for all axes: two of them where some do either."""
    known = constant_content(scales)
    factors = None if known is None else as_array(known)
    op.attrs["nearest_mode"] = "floor"
    if factors is None or (factors >= 1).all():
        return
    if (factors > 1).any():
        first, source = dict(op.attrs), op.inputs[0]
        assert source is not None
        shrunk = op.program.fresh_variable(f"{source.name}.shrunk", source.dtype)
        smaller, larger = (
            _constant(op, name, bound(factors, 1)) for name, bound in (("down", np.minimum), ("up", np.maximum))
        )
        op.program.add_operator(
            "Resize", [source, op.inputs[1], smaller], [shrunk], attrs={**first, "nearest_mode": "ceil"}, like=op
        )
        op.set_input(0, shrunk)
        op.set_input(2, larger)
    else:
        op.attrs["nearest_mode"] = "ceil"


@_adapter(13, "Resize", "Upsample")
def _no_region(op: Operator) -> None:
    """A region of interest may be left out, and scales where there are sizes: what is empty stood for nothing."""
    for slot in (1, 2) if op.input(3) is not None else (1,):
        given = op.input(slot)
        if given is not None and given.shape == (0,) and origin(given).is_constant and not origin(given).is_input:
            op.set_input(slot, None)
            drop_unread(given)


@_adapter(16, "RoiAlign")
def _roi_align(op: Operator) -> None:
    """Boxes lay half an element further on."""
    op.attrs["coordinate_transformation_mode"] = "output_half_pixel"


@_adapter(11, "Scatter")
def _scatter(op: Operator) -> None:
    op.type = "ScatterElements"


@_adapter(13, "Softmax", "LogSoftmax", "Hardmax")
def _softmax(op: Operator) -> None:
    """Before opset 13 these work on the tensor flattened to 2-D at ``axis`` (default 1)."""
    source, target = op.inputs[0], op.outputs[0]
    assert source is not None and target is not None
    axis = op.attrs.get("axis", 1)
    rank = None if source.shape is None else len(source.shape)
    if axis == -1 or (rank is not None and axis % max(rank, 1) == rank - 1):
        op.attrs["axis"] = -1
        return
    program = op.program
    flat = program.fresh_variable(f"{target.name}.flat", source.dtype, (None, None))
    soft = program.fresh_variable(f"{target.name}.soft", source.dtype, (None, None))
    shape = program.fresh_variable(f"{target.name}.shape", "int64", (rank,))
    op.set_input(0, flat)
    op.set_output(0, soft)
    op.attrs["axis"] = -1
    program.add_operator("Flatten", [source], [flat], attrs={"axis": axis}, like=op)
    program.add_operator("Shape", [source], [shape], like=op)
    program.add_operator("Reshape", [soft, shape], [target], like=op)


@_adapter(20, "DFT")
def _dft(op: Operator) -> None:
    """The axis was an attribute with default 1 and is an input with default -2."""
    op.attrs.setdefault("axis", 1)
    _attribute_to_input(op, "axis", 2)


@_adapter(9, "Scan")
def _scan(op: Operator) -> None:
    raise GraphError(f"operator '{op.label}' (Scan of opset 8, with a batch axis) has no form at opset {TARGET_OPSET}")


@_adapter(9, "BatchNormalization")
def _spatial(op: Operator) -> None:
    if op.attrs.pop("spatial", 1) != 1:
        what = f"operator '{op.label}' (BatchNormalization with spatial=0)"
        raise GraphError(f"{what} has no form at opset {TARGET_OPSET}")


@_adapter(14, "BatchNormalization")
def _batch_norm(op: Operator) -> None:
    for slot in range(1, len(op.outputs)):
        made = op.outputs[slot]
        if made is not None and (made.readers or made in op.program.outputs):
            raise GraphError(
                f"operator '{op.label}' (BatchNormalization of opset {op.program.opset()}) uses its training "
                "outputs, which opset 14 defines differently"
            )
    for slot in range(len(op.outputs) - 1, 0, -1):
        op.set_output(slot, None)


@_adapter(21, "GroupNormalization")
def _group_norm(op: Operator) -> None:
    """Opset 18 scales per group, 21 per channel."""
    source, groups = op.inputs[0], int(op.attrs["num_groups"])
    if source is None or source.shape is None or not isinstance(source.shape[1], int):
        raise GraphError(f"operator '{op.label}' (GroupNormalization of opset 18) needs a known number of channels")
    program, per_group = op.program, source.shape[1] // groups
    for slot in (1, 2):
        old = op.inputs[slot]
        assert old is not None
        column = program.fresh_variable(f"{old.name}.column", old.dtype, (groups, 1))
        wide = program.fresh_variable(f"{old.name}.wide", old.dtype, (groups, per_group))
        flat = program.fresh_variable(f"{old.name}.channels", old.dtype, (source.shape[1],))
        program.add_operator("Unsqueeze", [old, _constant(op, f"axes{slot}", np.array([1]))], [column])
        program.add_operator("Expand", [column, _constant(op, f"wide{slot}", np.array([groups, per_group]))], [wide])
        program.add_operator("Reshape", [wide, _constant(op, f"flat{slot}", np.array([-1]))], [flat])
        op.set_input(slot, flat)
