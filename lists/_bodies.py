"""The function bodies that onnx gives operators, and of which of them onnxruntime makes use.

onnxruntime computes an operator without kernel by its body. Where the body is the same for every node, it asks first
whether each operator in it is, in the model's opset, of the version that the body was written with, and otherwise
leaves the node as it is, without a kernel: ReduceLogSumExp has its body in opset 18, Cast in it a new version in
opset 19. A body that depends on the node (of what it is given) is taken as it comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
from onnx import TensorProto, TypeProto, defs, helper, shape_inference

from amp_transpiler.lists._schemas import ELEMENTS, admitted, schema_at

_ELEM_TYPES = {
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "float": TensorProto.FLOAT,
    "double": TensorProto.DOUBLE,
}


def outgrown_parts(schema: Any, opset: int) -> tuple[str, ...]:  # Any: the stubs of OpSchema lack has_function
    """The operators of a body that have another version in an opset than that which the body was written with: with
    any, onnxruntime does not use it. Empty for an operator that is newer than the opset, which lowering decomposes."""
    body = None if schema.since_version > opset else _fixed(schema, opset)
    if body is None:
        return ()
    (own,) = (each.version for each in body.opset_import if not each.domain)
    kinds = dict.fromkeys(node.op_type for node in body.node)
    return tuple(kind for kind in kinds if _version(kind, own) != _version(kind, opset))


def _version(op_type: str, opset: int) -> int | None:
    schema = schema_at(op_type, opset, "")
    return None if schema is None else schema.since_version


def _fixed(schema: Any, opset: int) -> onnx.FunctionProto | None:
    """The body of an operator that is the same for every node, as of an opset; None where it has none by then."""
    written = schema.get_function_with_opset_version(max(opset, schema.since_version)) if schema.has_function else b""
    return onnx.FunctionProto.FromString(written) if written else None


def bodies_of(schema: defs.OpSchema, dtype: str, opset: int) -> list[onnx.ModelProto]:
    """The function bodies of an operator at an opset, as models of an element type; empty where it has none."""
    return [_body(schema, function, dtype) for function in _functions(schema, dtype, opset)]


def _body(schema: defs.OpSchema, function: onnx.FunctionProto, dtype: str) -> onnx.ModelProto:
    nodes = [_with_defaults(node, schema) for node in function.node]
    inputs = [
        helper.make_value_info(name, _value_type(schema, slot.type_str, dtype))
        for name, slot in zip(function.input, schema.inputs, strict=False)
    ]
    graph = helper.make_graph(nodes, schema.name, inputs, [])
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=function.opset_import)
    return model


def is_typed(body: onnx.ModelProto) -> bool:
    """Whether element types fit each other: that of MeanVarianceNormalization adds float32 to its element type."""
    try:
        shape_inference.infer_shapes(body, check_type=True, strict_mode=True)
    except (shape_inference.InferenceError, ValueError) as error:
        return "inconsistent type" not in str(error)
    return True


def parts_in(body: onnx.ModelProto, dtype: str) -> list[tuple[str, frozenset[str]]]:
    """The operator types of a body, with the float element types of each."""
    try:
        inferred = shape_inference.infer_shapes(body).graph
    except (shape_inference.InferenceError, ValueError):
        inferred = body.graph  # untyped values count as data of the element type
    types = {value.name: value.type for value in [*inferred.input, *inferred.value_info]}
    parts = []
    for node in body.graph.node:
        elements = {_float_of(types.get(name), dtype) for name in [*node.input, *node.output] if name}
        parts.append((node.op_type, frozenset(elements - {""})))
    return parts


def _functions(schema: Any, dtype: str, opset: int) -> list[onnx.FunctionProto]:  # Any: see outgrown_parts
    """The bodies of an operator: one, or those that depend on what it is given: the least, and everything."""
    fixed = _fixed(schema, opset)
    if fixed is not None or not schema.has_context_dependent_function:
        return [] if fixed is None else [fixed]
    optional = defs.OpSchema.FormalParameterOption.Optional
    least = [slot for slot in schema.inputs if slot.option != optional]
    bodies = (_function(schema, given, dtype) for given in (least, schema.inputs))
    return [body for body in bodies if body is not None]


def _function(schema: Any, given: Sequence[Any], dtype: str) -> onnx.FunctionProto | None:
    """The body of an operator that is given these inputs."""
    node = helper.make_node(schema.name, [slot.name for slot in given], [schema.outputs[0].name], domain=schema.domain)
    for name, attribute in schema.attributes.items():
        if attribute.required and attribute.type == defs.OpSchema.AttrType.INT:
            node.attribute.append(helper.make_attribute(name, 1))
    for rank in (None, 4, 3):  # some bodies are built for a known shape alone
        types = [_value_type(schema, slot.type_str, dtype, rank).SerializeToString() for slot in given]
        try:
            written = schema.get_context_dependent_function(node.SerializeToString(), types)
        except Exception:  # onnx builds the body in C++ and raises whatever comes; without a body there is no lowering
            continue
        if written:
            body: onnx.FunctionProto = onnx.FunctionProto.FromString(written)
            return body
    return None


def _value_type(schema: defs.OpSchema, type_str: str, dtype: str, rank: int | None = None) -> TypeProto:
    allowed = admitted(schema, type_str)
    preferred = (ELEMENTS[dtype], "int64", "float", "bool")
    element = next((each for each in preferred if each in allowed), "float")
    numbers = {"int64": TensorProto.INT64, "bool": TensorProto.BOOL} | _ELEM_TYPES
    return helper.make_tensor_type_proto(numbers[element], None if rank is None else [1] * rank)


def _with_defaults(node: onnx.NodeProto, schema: defs.OpSchema) -> onnx.NodeProto:
    """A copy of a function's node with the schema's defaults in place of references to the function's attributes."""
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    del copy.attribute[:]
    for attribute in node.attribute:
        if not attribute.ref_attr_name:
            copy.attribute.append(attribute)
            continue
        default: Any = schema.attributes[attribute.ref_attr_name].default_value
        if default.type:
            copy.attribute.append(default)
            copy.attribute[-1].name = attribute.name
    return copy


def _float_of(value_type: TypeProto | None, dtype: str) -> str:
    """The float element type of a value; of an untyped one, ``dtype``; empty for other types."""
    if value_type is None or not value_type.HasField("tensor_type"):
        return ELEMENTS[dtype]
    numbers: dict[int, str] = {number: name for name, number in _ELEM_TYPES.items()}
    return numbers.get(value_type.tensor_type.elem_type, "")
