"""For which element types onnxruntime has a kernel, and which operators have no lowering to 16 bit on a place.

The table is the registry of the onnxruntime-gpu wheel that ``kernels.json`` names, and of WebGPU: under
``WebGpuExecutionProvider`` what the plugin and the wheel that has the provider built in have in common, under
``WebGpuExecutionProvider/plugin`` all that the plugin has. One trap is built into it: a kernel
registered for ``12+`` serves only operators whose schema is of version 12 exactly, so that an operator may *lose* its
kernel in a newer opset.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import onnx
from onnx import TensorProto, TypeProto, defs, helper, shape_inference

from amp_transpiler.errors import ListError
from amp_transpiler.lists._places import place_traits
from amp_transpiler.lists._schemas import read_text, schemas, split_name

TARGET_OPSET = 21
"""The opset of ai.onnx that layers, gradients and lowering rules are written in, and programs are lowered at.

From 22 on onnxruntime's CUDA provider has no MaxPool, Dropout and others.
"""

NEWEST_OPSET = 26
"""The newest opset of ai.onnx whose models every admitted onnxruntime takes; 1.31 refuses later ones."""

TARGET_IR_VERSION = 10
"""The ONNX format version that the target opset needs."""

#: The place whose kernels count where none is named.
USUAL_PLACE = "cuda"

_DTYPES = {"float16": "float16", "bfloat16": "bfloat16", "float32": "float", "float64": "double"}
_FLOATS = frozenset(_DTYPES.values())
_ELEM_TYPES = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16, "float": TensorProto.FLOAT}
# A constant becomes an initializer, which needs no kernel.
_NO_KERNEL_NEEDED = frozenset({"Constant"})
#: Operators that a lowering rule writes out; the rules declare them.
_WRITTEN_OUT: set[str] = set()

_Ranges = list[tuple[int, int, dict[str, frozenset[str]]]]


@cache
def _data() -> Any:
    return json.loads(read_text("kernels.json"))


@cache
def _table() -> Mapping[str, Mapping[str, Mapping[str, Mapping[str, Mapping[str, int]]]]]:
    """By provider, domain, operator type and versions: the number of the set of element types of each parameter."""
    return MappingProxyType(_data()["kernels"])


@cache
def _type_set(index: int) -> frozenset[str]:
    """Element types; a sequence or an optional counts as what it holds."""
    return frozenset(_element(each) for each in _data()["type_sets"][index])


@cache
def _ranges(provider: str, domain: str, op_type: str) -> _Ranges:
    """First and last version of each registration of an operator, with the element types of its parameters."""
    registered = _table()[provider].get(domain, {}).get(op_type, {})
    return [
        (*_versions(versions), {param: _type_set(index) for param, index in params.items()})
        for versions, params in registered.items()
    ]


def _versions(text: str) -> tuple[int, int]:
    """First and last schema version that a registration serves; an open end serves the first one alone."""
    first, _, last = text.rstrip("+").partition("-")
    return int(first), int(last or first)


@cache
def _element(type_str: str) -> str:
    """``seq(tensor(float16))`` -> ``float16``."""
    match = re.search(r"\(([a-z0-9]+)\)+$", type_str)
    return match.group(1) if match else type_str


def runtime_operators(domain: str) -> frozenset[str]:
    """The operator types of a domain (empty for ai.onnx) that onnxruntime has a kernel for, known to onnx or not."""
    name = domain or "ai.onnx"
    return frozenset(op_type for domains in _table().values() for op_type in domains.get(name, ()))


def _schema(op_type: str, opset: int, domain: str) -> defs.OpSchema | None:
    try:
        return defs.get_schema(op_type, opset, domain)
    except defs.SchemaError:
        return None


def kernel_types(provider: str, op_type: str, opset: int, domain: str = "") -> dict[str, frozenset[str]] | None:
    """The element types that a provider has a kernel for, by the operator's type parameters.

    Args:
        provider: a provider of the table, such as ``CUDAExecutionProvider`` or ``CPUExecutionProvider``.
        op_type: the operator's type.
        opset: the opset version of the operator's domain that the model imports. It is ignored for operators without an
            onnx schema (com.microsoft), which count as version 1.
        domain: the operator's domain; empty for ai.onnx.

    Returns:
        Type parameter to element types in onnxruntime's spelling (``float`` is 32 bit wide, ``double`` 64). A parameter
        that is absent is not constrained. None where there is no kernel.

    Raises:
        ListError: the table does not know the provider.
    """
    table = _table()
    if provider not in table:
        raise ListError(f"The kernel table has no provider '{provider}'; it has {', '.join(sorted(table))}.")
    domain = "" if domain == "ai.onnx" else domain
    version = 1
    if defs.has(op_type, domain):
        schema = _schema(op_type, opset, domain)
        if schema is None or schema.deprecated:
            return None
        version = schema.since_version
    found: dict[str, frozenset[str]] | None = None
    for first, last, params in _ranges(provider, domain or "ai.onnx", op_type):
        if first <= version <= last:
            found = found or {}
            for param, types in params.items():
                found[param] = found.get(param, frozenset()) | types
    return found


def has_kernel(provider: str, op_type: str, dtype: str, opset: int, domain: str = "") -> bool:
    """Whether a provider has a kernel for the operator with data of this element type.

    The element type is asked of the first input and the first output that may be of a float type, in the schema and in
    the kernel. An input for which there are integer kernels alone (the indices of OneHot) is passed over.

    Args:
        provider: a provider of the table, see :func:`kernel_types`.
        op_type: the operator's type.
        dtype: ``float16``, ``bfloat16``, ``float32`` or ``float64``.
        opset: the opset version that the model imports, see :func:`kernel_types`.
        domain: the operator's domain; empty for ai.onnx.

    Raises:
        ListError: unknown provider or element type.
    """
    if dtype not in _DTYPES:
        raise ListError(f"The kernel table has no element type '{dtype}'; expected one of {', '.join(_DTYPES)}.")
    element = _DTYPES[dtype]
    kernels = kernel_types(provider, op_type, opset, domain)
    if kernels is None:
        return False
    schema = _schema(op_type, opset, "" if domain == "ai.onnx" else domain)
    if schema is None:  # no schema says which parameter is the data's; onnxruntime calls it T, or numbers it from 1
        types = next(
            (found for param in ("T", "T1", "V") if (found := kernels.get(param, frozenset()) & _FLOATS)), None
        )
        return any(element in each for each in ((types,) if types else kernels.values()))
    data = [_first_float(schema, schema.inputs, kernels), _first_float(schema, schema.outputs, kernels)]
    return any(data) and all(element in types for types in data if types)


def _first_float(
    schema: defs.OpSchema, slots: Iterable[defs.OpSchema.FormalParameter], kernels: Mapping[str, frozenset[str]]
) -> frozenset[str]:
    """Element types, in the schema and in the kernel, of the first slot that may be of a float type; empty for none."""
    for slot in slots:
        allowed = _allowed(schema, slot.type_str)
        if allowed & _FLOATS:
            types = allowed & kernels.get(slot.type_str, allowed)
            if types & _FLOATS:
                return types
    return frozenset()


def _allowed(schema: defs.OpSchema, type_str: str) -> frozenset[str]:
    for constraint in schema.type_constraints:
        if constraint.type_param_str == type_str:
            return frozenset(_element(each) for each in constraint.allowed_type_strs)
    return frozenset({_element(type_str)})


def is_float_operator(schema: defs.OpSchema) -> bool:
    """Whether an input or output of the operator may hold fp16 or fp32."""
    slots = [*schema.inputs, *schema.outputs]
    return any(_allowed(schema, slot.type_str) & {"float", "float16"} for slot in slots)


def unsupported_reason(op_type: str, dtype: str, opset: int = TARGET_OPSET, place: str = USUAL_PLACE) -> str | None:
    """Why an operator cannot run at a 16-bit element type on a place, or None if it can.

    It can with a kernel at this opset, or with a function body in its onnx schema each part of which can. An operator
    newer than the opset is judged by its newest function body, for lowering decomposes it.

    Args:
        op_type: ``Type`` for ai.onnx, ``domain::Type`` for other domains. A domain that onnxruntime does not define
            cannot be judged, and gives None.
        dtype: ``float16`` or ``bfloat16``.
        opset: the opset that programs are lowered to.
        place: a kind of place.
    """
    domain, name = split_name(op_type)
    if domain != "com.microsoft" and not defs.has(name, domain):
        return None
    return _gap(name, domain, dtype, opset, place)


def written_out(op_type: str) -> None:
    """Declare that a lowering rule writes an operator out in others: it needs neither a kernel nor a function body."""
    _WRITTEN_OUT.add(op_type)


def lowering_gap(op_type: str, dtype: str, opset: int = TARGET_OPSET, place: str = USUAL_PLACE) -> str | None:
    """:func:`unsupported_reason` of an operator that no lowering rule writes out; None for the others."""
    return None if op_type in _WRITTEN_OUT else unsupported_reason(op_type, dtype, opset, place)


def no_kernel(place: str) -> str:
    """What the reason of an operator without kernel on a place begins with."""
    return f"no {place_traits(place).title} kernel for "


def parts_of(op_type: str, dtype: str, opset: int, place: str) -> tuple[str, ...]:
    """The operator types that onnxruntime computes an operator of ai.onnx by on a place without a kernel for it; none
    where there is one, or nothing to compute it by."""
    if has_kernel(place_traits(place).provider, op_type, dtype, opset):
        return ()
    schema = _schema(op_type, opset, "")
    bodies = [] if schema is None else _bodies(schema, dtype)
    return tuple(dict.fromkeys(part for body in bodies for part, _ in _parts(body, dtype)))


def unsupported_operators(dtype: str, opset: int = TARGET_OPSET, place: str = USUAL_PLACE) -> frozenset[str]:
    """The float operators of ai.onnx for which :func:`lowering_gap` has a reason."""
    return frozenset(
        name
        for (domain, name), schema in schemas().items()
        if not domain and is_float_operator(schema) and lowering_gap(name, dtype, opset, place)
    )


@cache
def _gap(op_type: str, domain: str, dtype: str, opset: int, place: str) -> str | None:
    """:func:`unsupported_reason` of a known operator."""
    if not domain and op_type in _NO_KERNEL_NEEDED:
        return None
    if has_kernel(place_traits(place).provider, op_type, dtype, opset, domain):
        return None
    lacking = f"{no_kernel(place)}{op_type} at {dtype} in opset {opset}"
    schema = _schema(op_type, opset, domain) or schemas().get((domain, op_type))
    if schema is None:
        return lacking
    if not any(_DTYPES[dtype] in _allowed(schema, slot.type_str) for slot in [*schema.inputs, *schema.outputs]):
        return f"{lacking}, and its schema does not admit {dtype}"
    bodies = _bodies(schema, dtype)
    if not bodies:
        return f"{lacking}, and no function body"
    if not all(map(_is_typed, bodies)):
        return f"{lacking}, and its function body mixes types"
    for part, elements in (part for body in bodies for part in _parts(body, dtype)):
        gap = _part_gap(part, elements, opset, place)
        if gap:
            return f"{lacking}, and its function body has no lowering: {gap}"
    return None


def _part_gap(op_type: str, elements: frozenset[str], opset: int, place: str) -> str | None:
    names = {element: name for name, element in _DTYPES.items()}
    for element in sorted(elements & _FLOATS):
        gap = _gap(op_type, "", names[element], opset, place)
        if gap:
            return gap
    return None


def _bodies(schema: defs.OpSchema, dtype: str) -> list[onnx.ModelProto]:
    """The schema's function bodies as models of an element type."""
    return [_body(schema, function, dtype) for function in _functions(schema, dtype)]


def _body(schema: defs.OpSchema, function: onnx.FunctionProto, dtype: str) -> onnx.ModelProto:
    nodes = [_with_defaults(node, schema) for node in function.node]
    inputs = [
        helper.make_value_info(name, _value_type(schema, slot.type_str, dtype))
        for name, slot in zip(function.input, schema.inputs, strict=False)
    ]
    graph = helper.make_graph(nodes, schema.name, inputs, [])
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=function.opset_import)
    return model


def _is_typed(body: onnx.ModelProto) -> bool:
    """Whether element types fit each other: that of MeanVarianceNormalization adds float32 to its element type."""
    try:
        shape_inference.infer_shapes(body, check_type=True, strict_mode=True)
    except (shape_inference.InferenceError, ValueError) as error:
        return "inconsistent type" not in str(error)
    return True


def _parts(body: onnx.ModelProto, dtype: str) -> list[tuple[str, frozenset[str]]]:
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


def _functions(schema: Any, dtype: str) -> list[onnx.FunctionProto]:  # Any: the stubs of OpSchema lack has_function
    """The bodies of an operator: one, or those that depend on what it is given: the least, and everything."""
    if schema.has_function:
        return [schema.function_body]
    if not schema.has_context_dependent_function:
        return []
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
    allowed = _allowed(schema, type_str)
    preferred = (_DTYPES[dtype], "int64", "float", "bool")
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
        return _DTYPES[dtype]
    numbers: dict[int, str] = {number: name for name, number in _ELEM_TYPES.items()}
    return numbers.get(value_type.tensor_type.elem_type, "")
