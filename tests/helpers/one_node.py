"""Models of one node, made from the operator's schema: each asks a provider about one kernel."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, defs, helper, numpy_helper

NAMES = {
    "float": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "double": TensorProto.DOUBLE,
    "int8": TensorProto.INT8,
    "uint8": TensorProto.UINT8,
    "int32": TensorProto.INT32,
    "uint32": TensorProto.UINT32,
    "int64": TensorProto.INT64,
    "bool": TensorProto.BOOL,
}
"""Element types, in onnxruntime's spelling, that a kernel is asked for."""

# What a schema does not say: attributes of some meaning, inputs that are optional and yet needed, further outputs.
_ATTRIBUTES = {
    ("Einsum", "equation"): "...i->...i",
    ("BitShift", "direction"): "LEFT",
    ("Cast", "to"): "T2",
    ("BitCast", "to"): "T2",
    ("EyeLike", "dtype"): "T2",
    ("GRU", "hidden_size"): 1,
    ("LSTM", "hidden_size"): 1,
    ("RNN", "hidden_size"): 1,
}
_INPUTS = {"Resize": (0, 2), "Clip": (0, 1)}
_OUTPUTS = {"TopK": 2}


class Contrib:
    """A schema of com.microsoft as onnxruntime tells it, in the manner of onnx's."""

    def __init__(self, schema: Any) -> None:
        self.name, self.domain, self.since_version = schema.name, schema.domain, schema.since_version
        self.type_constraints, self.attributes = schema.type_constraints, schema.attributes
        self.inputs = [_Slot(slot) for slot in schema.inputs]
        self.outputs = [_Slot(slot) for slot in schema.outputs]


class _Slot:
    def __init__(self, slot: Any) -> None:
        self.type_str, self.option = slot.typeStr, slot.option


Schema = defs.OpSchema | Contrib


def allowed(schema: Schema, type_str: str) -> tuple[str, ...]:
    """The element types among :data:`NAMES` that a slot may hold, for tensors."""
    texts: Iterable[str] = (type_str,)
    for constraint in schema.type_constraints:
        if constraint.type_param_str == type_str:
            texts = constraint.allowed_type_strs
    return tuple(name for name in NAMES if f"tensor({name})" in texts)


def questions(schema: Schema) -> Iterator[dict[str, str]]:
    """Every combination of element types of the type parameters that a node of the operator has."""
    inputs, outputs = _slots(schema)
    params = dict.fromkeys(slot.type_str for slot in [*inputs.values(), *outputs])
    choices = {param: allowed(schema, param) for param in params}
    if all(choices.values()):  # else it takes sequences or strings alone
        yield from (dict(zip(choices, each, strict=True)) for each in itertools.product(*choices.values()))


def one_node(schema: Schema, types: dict[str, str], opset: int) -> onnx.ModelProto:
    """A model of one node, of inputs whose shapes are open; optional inputs are left out."""
    inputs, outputs = _slots(schema)
    names = [f"x{i}" if i in inputs else "" for i in range(max(inputs, default=-1) + 1)]
    given = [_value(f"x{i}", types[slot.type_str]) for i, slot in inputs.items()]
    results = [_value(f"y{i}", types[slot.type_str]) for i, slot in enumerate(outputs)]
    node = helper.make_node(schema.name, names, [r.name for r in results], name="node", domain=schema.domain)
    node.attribute.extend(_attributes(schema, types))
    imports = [helper.make_opsetid(schema.domain, opset)]
    graph = helper.make_graph([node], "g", given, results)
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def _slots(schema: Schema) -> tuple[dict[int, Any], list[Any]]:
    """The inputs that a node gets, by number, and its outputs."""
    wanted = _INPUTS.get(schema.name, ())
    inputs = {i: slot for i, slot in enumerate(schema.inputs) if i in wanted or "Optional" not in str(slot.option)}
    return inputs, list(schema.outputs)[: _OUTPUTS.get(schema.name, 1)]


def _value(name: str, element: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, NAMES[element], None)


def _attributes(schema: Schema, types: dict[str, str]) -> Iterator[onnx.AttributeProto]:
    for name, attribute in sorted(schema.attributes.items()):
        fixed: Any = _ATTRIBUTES.get((schema.name, name))
        if fixed is not None:
            yield helper.make_attribute(name, NAMES[types[fixed]] if fixed in types else fixed)
        elif attribute.required:
            kind = str(attribute.type).rpartition(".")[2]
            yield helper.make_attribute(name, _branch(types) if kind == "GRAPH" else _PLAIN[kind])


_PLAIN = {"INT": 1, "INTS": [1, 1], "FLOAT": 1.0, "FLOATS": [1.0], "STRING": "", "STRINGS": [""]}


def _branch(types: dict[str, str]) -> onnx.GraphProto:
    element = NAMES[types["V"]]
    one = numpy_helper.from_array(np.ones(1, np.float32), "one")
    cast = helper.make_node("Cast", ["one"], ["result"], to=element)
    return helper.make_graph([cast], "branch", [], [helper.make_tensor_value_info("result", element, [1])], [one])
