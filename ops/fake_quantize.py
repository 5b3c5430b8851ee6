"""Fake quantisation: numbers that a QuantizeLinear makes integers and a DequantizeLinear brings back by the same scale.

Networks that are trained to be quantised hold such pairs behind weights and activations. A pair computes what its two
operators say; its gradient is that of one operator, FakeQuantize, which no program holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from amp_transpiler.ir.constant_data import constant_array
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.infer import one_element
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import gradient, own, traits
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.ir.types import numpy_dtype
from amp_transpiler.option_checks import listed

TYPE = "FakeQuantize"
_QUANTIZE, _DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
#: Attributes of the gradient: the integers between which numbers are not cut off.
_LEAST, _LARGEST = "quant_min", "quant_max"

traits(_DEQUANTIZE, settings=(1,))
traits(_QUANTIZE, settings=(1,), quantises=True)


def quantizer(op: Operator) -> Operator | None:
    """The QuantizeLinear whose integers this DequantizeLinear brings back; None of any other operator.

    A Clip may lie between, as torch writes it for 7 bits.
    """
    if op.full_type != _DEQUANTIZE:
        return None
    before = _made_by(op.input(0))
    if before is not None and before.full_type == "Clip":
        before = _made_by(before.input(0))
    return before if before is not None and before.full_type == _QUANTIZE else None


def limits(op: Operator) -> dict[str, int]:
    """What the gradient of a pair has to be told beside the attributes of its DequantizeLinear."""
    read = op.input(0)
    assert read is not None and read.dtype is not None
    of_type = ml_dtypes.iinfo(numpy_dtype(read.dtype))
    least, largest = int(of_type.min), int(of_type.max)
    if read.producer is not None and read.producer.type == "Clip":
        low, high = (_number(read.producer.input(slot)) for slot in (1, 2))
        least, largest = max(least, least if low is None else low), min(largest, largest if high is None else high)
    return {_LEAST: least, _LARGEST: largest}


def stored_quantised(program: Graph) -> str:
    """What to say of weights that are stored as integers, for a DequantizeLinear to read; "" where there are none."""
    read = [op.input(0) for op in program.operators if op.full_type == _DEQUANTIZE]
    names = list(dict.fromkeys(v.name for v in read if v is not None and _is_stored(v)))
    if not names:
        return ""
    return (
        f"{listed(names)}: stored as integers, not trained; what is trained is stored as floats, and a QuantizeLinear "
        "reads it: export the model so"
    )


def _is_stored(variable: Variable) -> bool:
    producer = variable.producer
    return variable.data is not None if producer is None else producer.type == "Constant"


def _made_by(variable: Variable | None) -> Operator | None:
    """What makes these integers."""
    integers = variable is not None and (variable.dtype or "").startswith(("int", "uint"))
    return variable.producer if variable is not None and integers else None


def _number(variable: Variable | None) -> int | None:
    array = _array(variable)
    return None if array is None else int(array.reshape(-1)[0])


def _array(variable: Variable | None) -> np.ndarray | None:
    """The content of a constant, however many channels it has numbers for."""
    if variable is None or variable.persistable or variable.is_input or variable.data is None:
        return constant_array(variable)
    return as_array(variable.data)


def _unlike(op: Operator) -> str:
    """Why what a DequantizeLinear reads was not quantised as it brings it back; "" where it was."""
    before = quantizer(op)
    if before is None:
        return "nothing quantises what it reads"
    made, clip = f"'{before.label}' (QuantizeLinear), which makes its numbers", _made_by(op.input(0))
    bounds = clip.inputs[1:] if clip is not None and clip is not before else ()
    if any(v is not None and _number(v) is None for v in bounds):
        return "its numbers are cut off at bounds that are computed"
    learned = next((v.name for each in (op, before) if (v := each.input(1)) is not None and v.is_parameter), None)
    if learned is not None:
        return f"its scale '{learned}' is to be trained, and that of a pair is a constant: leave it out of trainable"
    for what, slot in (("scale", 1), ("zero point", 2)):
        if not _equal(op.input(slot), before.input(slot)):
            return f"its {what} is not that of {made}"
    scale = before.input(1)
    one = scale is not None and one_element(scale.shape)
    return "" if one or _along(op, before) == _along(before, before) else f"its axis is not that of {made}"


def _along(op: Operator, before: Operator) -> tuple[int, int]:
    """The axis along which there are several scales, and how many elements each is for, 0 for all."""
    x, axis = before.input(0), int(op.attrs.get("axis", 1))
    return (axis % len(x.shape) if x is not None and x.shape else axis), int(op.attrs.get("block_size", 0))


def _equal(one: Variable | None, other: Variable | None) -> bool:
    """Whether both are one variable, or constants of equal numbers; what is left out is 0."""
    if one is other:
        return True
    first, second = (np.zeros(1) if v is None else _array(v) for v in (one, other))
    if first is None or second is None or (first.size != second.size and 1 not in (first.size, second.size)):
        return False
    return bool(np.all(first.astype(float).reshape(-1) == second.astype(float).reshape(-1)))


@gradient(own(TYPE), reads="x0 x1 x2 dy0", inputs=[0], refuse=_unlike)
def fake_quantize_gradient(
    e: Emitter, op: Operator, x: Value, scale: Value, zero_point: Value | None, dy: Value
) -> Sequence[Value | None]:
    """The straight-through estimator (Bengio et al. 2013), as of ``torch.fake_quantize_per_channel_affine``: dy where
    round(x / scale) + zero point, half to even, is an integer that is not cut off, else 0."""
    least, largest = (int(op.attrs[name]) for name in (_LEAST, _LARGEST))
    number, zeros = e.Round(e.Div(x, _spread(e, op, scale, x))), e.known(op.inputs[2])
    if zeros is not None and bool((zeros == zeros.reshape(-1)[0]).all()):
        zero = int(zeros.reshape(-1)[0])
        least, largest = least - zero, largest - zero
    elif zero_point is not None:
        given = e.cast(zero_point, x.dtype) if zeros is None else e.const(zeros.astype(np.float32), x.dtype)
        number = e.Add(number, _spread(e, op, given, x))
    inside = e.Equal(e.Clip(number, e.like(least, x), e.like(largest, x)), number)
    return [e.Where(inside, dy, e.like(0, dy))]


def _spread(e: Emitter, op: Operator, given: Value, x: Value) -> Value:
    """Scales or zero points in a shape that broadcasts against x: one, one along an axis, one for each block of it."""
    sizes, shape = given.shape, x.shape
    assert sizes is not None and shape is not None
    if math.prod(sizes) == 1:
        return e.reshape(given, [])
    axis = int(op.attrs.get("axis", 1)) % len(shape)
    if len(sizes) == 1:
        return e.reshape(given, [size if at == axis else 1 for at, size in enumerate(shape)])
    block, (before, after) = int(op.attrs["block_size"]), (sizes[: axis + 1], sizes[axis + 1 :])
    each = e.reshape(given, (*before, 1, *after))
    each = e.Expand(each, e.ints(*before, block, *after), shape=(*before, block, *after))
    each = e.reshape(each, (*before[:-1], before[-1] * block, *after))
    if each.shape == shape:
        return each
    return e.Slice(each, e.ints(0), e.ints(shape[axis]), e.ints(axis), shape=shape)
