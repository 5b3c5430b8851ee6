"""What variables and Constant operators hold, whichever attribute holds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx

from amp_transpiler.ir.attributes import attributes_of
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.lists import plain_domain

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
