"""What variables and Constant operators hold, whichever attribute holds it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx

from amp_transpiler.ir.attributes import attributes_of
from amp_transpiler.ir.nodes import Operator, Variable, origin
from amp_transpiler.ir.tensors import as_array, tensor_type
from amp_transpiler.lists import plain_domain

SMALL = 256
"""Elements: more than any shape vector, less than any weight."""

#: Attributes of a Constant, and the type of those that are no tensor.
_ATTRIBUTES: dict[str, Any] = {
    **{"value": None, "sparse_value": None, "value_string": object, "value_strings": object},
    **{"value_int": np.int64, "value_ints": np.int64, "value_float": np.float32, "value_floats": np.float32},
}


def held_data(variable: Variable) -> Any:
    """What a variable holds in its file, itself or in the Constant that makes it, dense or sparse; None of others."""
    producer = variable.producer
    if variable.data is not None or producer is None or producer.full_type != "Constant":
        return variable.data
    return _data(producer.attrs)


def constant_array(variable: Variable | None, most: int = SMALL) -> np.ndarray | None:
    """The content of a constant of at most so many elements, also of an enclosing graph; None of what is none or is
    larger, and of what may hold something else in a run: parameters, other state, and initializers that are inputs."""
    held = None if variable is None else origin(variable)
    if held is None or held.persistable or held.is_input:
        return None
    data = held_data(held)
    return None if data is None or math.prod(tensor_type(data)[1]) > most else as_array(data)


def constant_number(variable: Variable | None) -> Any:
    """The one element that such a constant has, of whatever shape; None of all others."""
    array = constant_array(variable)
    return None if array is None or array.size != 1 else array.item()


def given_axes(op: Operator) -> list[int] | None:
    """The axes that its attribute or its second input names, as they stand there; None where it names none that are
    known."""
    given = op.attrs.get("axes")
    if given is None:
        given = constant_array(op.input(1))
    return None if given is None else [int(axis) for axis in np.reshape(given, -1)]


def constant_tensor(node: onnx.NodeProto) -> onnx.TensorProto | None:
    """What a Constant of a model makes, under any name; None of another node, and of text and sparse tensors."""
    if node.op_type != "Constant" or plain_domain(node.domain):
        return None
    data = _data(attributes_of(node))
    if isinstance(data, np.ndarray) and data.dtype != object:
        return onnx.numpy_helper.from_array(data)
    return data if isinstance(data, onnx.TensorProto) else None


def _data(attributes: Mapping[str, Any]) -> Any:
    """What a Constant with these attributes holds: a tensor, or an array of its numbers or strings."""
    for name, value in attributes.items():
        if name in _ATTRIBUTES:
            return value if _ATTRIBUTES[name] is None else np.asarray(value, _ATTRIBUTES[name])
    return None
