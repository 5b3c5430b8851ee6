"""What everything behind the reading takes for granted of a ModelProto, checked once, on the protobuf.

Text is UTF-8; a tensor's content is of the length that its element type and dims ask for; attributes have the types,
and nodes the numbers of inputs and outputs, that the operators' schemas say; control flow fits its graphs. Nothing
is read of the content of dense tensors but its length, and no call into onnx sees a model before it has passed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np
import onnx

from amp_transpiler.errors import GraphError, ModelFileError
from amp_transpiler.ir.control import CONTROL
from amp_transpiler.ir.functions import check_functions
from amp_transpiler.ir.node_fields import NodeFields, fields_of
from amp_transpiler.ir.tensors import byte_size
from amp_transpiler.ir.text import check_text
from amp_transpiler.ir.types import FLOATS, NAMES, RANK, numpy_dtype
from amp_transpiler.ir.verify import schema_of
from amp_transpiler.lists import first_opset, plain_domain
from amp_transpiler.option_checks import counted

#: Bytes that a sparse tensor may take once it is dense.
DENSE = 1 << 30
#: What numpy and onnxruntime count bytes in.
_LARGEST = 2**63 - 1

_Attribute = onnx.AttributeProto
_type_name = _Attribute.AttributeType.Name
#: The field of an AttributeProto that holds the value of each type.
_FIELDS = {
    _Attribute.FLOAT: "f",
    _Attribute.INT: "i",
    _Attribute.STRING: "s",
    _Attribute.TENSOR: "t",
    _Attribute.GRAPH: "g",
    _Attribute.SPARSE_TENSOR: "sparse_tensor",
    _Attribute.TYPE_PROTO: "tp",
    _Attribute.FLOATS: "floats",
    _Attribute.INTS: "ints",
    _Attribute.STRINGS: "strings",
    _Attribute.TENSORS: "tensors",
    _Attribute.GRAPHS: "graphs",
    _Attribute.SPARSE_TENSORS: "sparse_tensors",
    _Attribute.TYPE_PROTOS: "type_protos",
}
_VALUES = frozenset(_FIELDS.values())
_CONTENT = ("float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")
#: Attributes of standard operators that are element types, without a number that means another one's.
_ELEMENT_TYPES = frozenset({"to", "dtype"})
_SINGLE = onnx.defs.OpSchema.FormalParameterOption.Single


def check_model(
    model: onnx.ModelProto, nodes: Sequence[NodeFields], initializers: Iterable[onnx.TensorProto], label: str
) -> None:
    """Refuse what is wrong with a model that parses; ``nodes`` and ``initializers`` are those of its main graph.

    Raises: ModelFileError for text and tensors, GraphError for nodes, graphs and functions; both begin with ``label``.
    """
    try:
        check_text(model, nodes)
        initializers = [tensor for tensor in initializers if not plain_weight(tensor)]
        for tensor in initializers:
            check_text(tensor)
        functions = {(plain_domain(f.domain), f.name, f.overload) for f in model.functions}
        checker = _Checker(functions)
        opsets = {plain_domain(opset.domain): opset.version for opset in model.opset_import}
        check_functions(model)
        for tensor in initializers:
            check_tensor(tensor, f"initializer '{tensor.name}'")
        checker.graph(model.graph, opsets, None, nodes)
        for function in model.functions:
            of_function = {plain_domain(opset.domain): opset.version for opset in function.opset_import}
            checker.nodes(
                fields_of(function.node),
                opsets | of_function,
                f"function '{function.name}'",
                frozenset([*function.attribute, *(a.name for a in function.attribute_proto)]),
            )
    except ModelFileError as error:
        raise ModelFileError(f"{label}: {error}") from None
    except GraphError as error:
        raise GraphError(f"{label}: {error}") from None


# -- tensors ---------------------------------------------------------------------------------------------------
_FIELD = onnx.TensorProto.DESCRIPTOR.fields_by_name
_NUMBER = tuple(_FIELD[name] for name in ("data_type", "name", "raw_data"))
_ARRAY = (_FIELD["dims"], *_NUMBER)
#: Bytes of an element, by the number of its type.
_WIDTHS = {number: numpy_dtype(NAMES[number]).itemsize for number, name in NAMES.items() if name in FLOATS}


def plain_weight(tensor: onnx.TensorProto, raw: int | None = None) -> bool:
    """Whether a tensor is a name, a size and as many floating-point numbers, inside: nearly every one.

    ``raw``: the number of its bytes, where they were taken out.
    """
    fields = tensor.ListFields()
    if len(fields) not in (len(_NUMBER), len(_ARRAY)):
        return False
    found, values = zip(*fields, strict=True)
    if raw is not None:
        found, values = (*found, _FIELD["raw_data"]), (*values, range(raw))
    if found != _ARRAY and found != _NUMBER:
        return False
    *dims, data_type, name, content = values
    sizes = dims[0][:] if dims else [1]
    fits = isinstance(name, str) and data_type in _WIDTHS and len(sizes) <= RANK and min(sizes) > 0
    return fits and math.prod(sizes) * _WIDTHS[data_type] == len(content)


def check_tensor(tensor: onnx.TensorProto, what: str) -> None:
    """Refuse a dense tensor whose element type, dims and content disagree; of external ones type and dims."""
    if tensor.data_type not in NAMES:
        raise ModelFileError(f"{what} has the element type {tensor.data_type}, which ONNX does not define")
    dtype = NAMES[tensor.data_type]
    typed = f"{what} ({dtype}{list(tensor.dims)})"
    count = _elements(tensor.dims, dtype, typed)
    if tensor.HasField("segment"):
        raise ModelFileError(f"{typed} is a segment of a tensor, which ONNX keeps for later; it cannot be used")
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        return
    given = [name for name in _CONTENT if len(getattr(tensor, name))]
    if tensor.HasField("raw_data"):
        if given:
            raise ModelFileError(f"{typed} has its content twice, in raw_data and in {given[0]}")
        needed = byte_size(dtype, tensor.dims)
        if dtype == "string":
            raise ModelFileError(f"{typed} has raw_data, which strings cannot have")
        length = len(tensor.raw_data)
        if length != needed:
            raise ModelFileError(
                f"{typed} {'is cut short' if length < needed else 'is too long'}: it takes {needed} "
                f"bytes, and raw_data holds {length}"
            )
        return
    field = onnx.helper.tensor_dtype_to_field(tensor.data_type)
    if given and given != [field]:
        wrong = next(name for name in given if name != field)
        raise ModelFileError(f"{typed} has content in {wrong}; {dtype} belongs into raw_data or {field}")
    entries = len(getattr(tensor, field))
    if entries != _entries(dtype, count):
        raise ModelFileError(
            f"{typed} {'has no content' if not entries else 'is cut short or too long'}: it takes "
            f"{_entries(dtype, count)} entries, and {field} holds {entries}"
        )


def _elements(dims: Iterable[int], dtype: str, what: str) -> int:
    dims = list(dims)
    if len(dims) > RANK:
        raise ModelFileError(
            f"{what.partition(' (')[0]} has {len(dims)} dimensions; numpy, through which arrays go, knows {RANK}"
        )
    if any(size < 0 for size in dims):
        raise ModelFileError(f"{what} has a negative dimension")
    itemsize = 1 if dtype == "string" else numpy_dtype(dtype).itemsize
    # sizes beside a zero count as well: numpy multiplies those that are not zero
    if math.prod(max(size, 1) for size in dims) * itemsize > _LARGEST:
        raise ModelFileError(f"{what} has more elements than 64 bits can count bytes of")
    return math.prod(dims)


def _entries(dtype: str, count: int) -> int:
    """Entries of the typed field for so many elements."""
    if dtype.startswith("complex"):
        return 2 * count
    if dtype in ("int4", "uint4", "float4e2m1"):
        return (count + 1) // 2
    return (count + 3) // 4 if dtype in ("int2", "uint2") else count


def check_sparse(sparse: onnx.SparseTensorProto, what: str) -> None:
    """Refuse a sparse tensor whose indices leave it, or that is too large to be dense."""
    values, indices, dims = sparse.values, sparse.indices, list(sparse.dims)
    check_tensor(values, f"the values of {what}")
    check_tensor(indices, f"the indices of {what}")
    if onnx.TensorProto.EXTERNAL in (values.data_location, indices.data_location):
        raise ModelFileError(f"{what} is sparse and lies in an external file; only dense tensors can")
    dtype = NAMES[values.data_type]
    count = _elements(dims, dtype, what)
    if byte_size(dtype, dims) > DENSE:
        raise ModelFileError(
            f"{what} ({dtype}{dims}) takes {byte_size(dtype, dims):,} bytes where it is used dense, "
            f"above the limit of {DENSE:,}"
        )
    if len(values.dims) != 1 or NAMES[indices.data_type] != "int64":
        raise ModelFileError(
            f"{what} is sparse: its values have one dimension, its indices are int64; found values "
            f"{list(values.dims)}, indices of {NAMES[indices.data_type]}"
        )
    nonzero = values.dims[0]
    if list(indices.dims) not in ([nonzero], [nonzero, len(dims)]):
        raise ModelFileError(
            f"{what} is sparse of shape {dims} with {nonzero} values, and its indices have the shape "
            f"{list(indices.dims)}; expected [{nonzero}] or [{nonzero}, {len(dims)}]"
        )
    array = onnx.numpy_helper.to_array(indices)
    limits = np.asarray(dims) if array.ndim == 2 else count
    if array.size and ((array < 0) | (array >= limits)).any():
        raise ModelFileError(f"{what} is sparse of shape {dims}, and an index of it lies outside")


# -- nodes -----------------------------------------------------------------------------------------------------
class _Schema:
    """What a schema demands of a node."""

    def __init__(self, schema: onnx.defs.OpSchema) -> None:
        self.inputs = schema.min_input, schema.max_input
        self.outputs = schema.min_output, schema.max_output
        self.single = tuple(formal.option == _SINGLE for formal in schema.inputs)
        value = _Attribute.AttributeType.Value
        self.attributes = {name: value(str(a.type).rpartition(".")[2]) for name, a in schema.attributes.items()}
        self.required = frozenset(name for name, a in schema.attributes.items() if a.required)


@lru_cache(maxsize=4096)
def _schema(type_: str, opset: int, domain: str) -> _Schema | None:
    """Of an operator that onnxruntime had before ONNX, in a model of that time: of the form that ONNX took over."""
    found = schema_of(type_, max(opset, first_opset(type_, domain) or 0), domain)
    return None if found is None else _Schema(found)


class _Checker:
    """Walks the graphs of one model. ``functions``: domain, name and overload of those that it defines."""

    def __init__(self, functions: set[tuple[str, str, str]]) -> None:
        self.functions = functions

    def graph(
        self,
        graph: onnx.GraphProto,
        opsets: Mapping[str, int],
        parameters: frozenset[str] | None,
        nodes: Sequence[NodeFields] | None = None,
    ) -> None:
        """A graph less its dense initializers; ``nodes``: its own, where they were read already."""
        where = f"graph '{graph.name}'"
        for sparse in graph.sparse_initializer:
            check_sparse(sparse, f"initializer '{sparse.values.name}'")
        for info in (*graph.input, *graph.output, *graph.value_info):
            self.type(info.type, f"'{info.name}' of {where}")
        self.nodes(fields_of(graph.node) if nodes is None else nodes, opsets, where, parameters)

    def type(self, proto: onnx.TypeProto, what: str) -> None:
        """The element type of a declaration."""
        kind = proto.WhichOneof("value")
        if kind in ("tensor_type", "sparse_tensor_type"):
            found = getattr(proto, kind).elem_type
            if found and found not in NAMES:
                raise GraphError(f"{what} is declared with the element type {found}, which ONNX does not define")
        elif kind in ("sequence_type", "optional_type"):
            self.type(getattr(proto, kind).elem_type, what)
        elif kind == "map_type":
            self.type(proto.map_type.value_type, what)

    def nodes(
        self, nodes: Iterable[NodeFields], opsets: Mapping[str, int], where: str, parameters: frozenset[str] | None
    ) -> None:
        """``parameters``: attributes of the function around, None outside of functions."""
        passed: set[tuple[str, str, bytes | None, int, int]] = set()
        for node in nodes:
            kind = (node.type, node.domain, node.numbers, len(node.inputs), len(node.outputs))
            if kind in passed and node.plain and "" not in node.inputs:
                continue
            problem = self.node(node, opsets, where, parameters)
            if problem:
                raise GraphError(f"node {node_label(node.proto)} of {where} {problem}")
            if node.numbers is not None and node.plain:
                passed.add(kind)

    def node(self, node: NodeFields, opsets: Mapping[str, int], where: str, parameters: frozenset[str] | None) -> str:
        """What is wrong with a node, as the rest of a sentence that begins with it; "" where nothing is."""
        type_, domain, proto = node.type, plain_domain(node.domain), node.proto
        if not type_:
            return "names no operator"
        given = {attribute.name: attribute for attribute in node.attributes}
        if given:
            if len(given) < len(node.attributes):
                return f"has two attributes of one name ({', '.join(sorted(given))})"
            for attribute in given.values():
                problem = self.attribute(attribute, opsets, f"node {node_label(proto)} of {where}", parameters)
                if problem:
                    return f"has an attribute '{attribute.name}' that {problem}"
        if (domain, type_, proto.overload) in self.functions:
            return ""
        schema = _schema(type_, opsets.get(domain, 1), domain)
        if schema is None:
            return ""
        problem = _against(proto, given, schema)
        return problem or (CONTROL[type_](proto) if not domain and type_ in CONTROL else "")

    def attribute(
        self, attribute: onnx.AttributeProto, opsets: Mapping[str, int], node: str, parameters: frozenset[str] | None
    ) -> str:
        """What is wrong with one attribute by itself: its type, its value; its tensors and graphs raise."""
        field = _FIELDS.get(attribute.type)
        if field is None:
            return "says no type"
        held = {f.name for f, _ in attribute.ListFields()} & _VALUES
        if attribute.ref_attr_name:
            if parameters is None or attribute.ref_attr_name not in parameters:
                return f"refers to '{attribute.ref_attr_name}' of a function around it, and there is none"
            return "refers to another, and has a value as well" if held else ""
        # numbers and text that are 0 or empty may be left out, as proto3 writers do
        if held - {field} or (field in ("t", "g", "sparse_tensor", "tp") and not held):
            return f"says that it is {_type_name(attribute.type)}, and holds {', '.join(sorted(held)) or 'nothing'}"
        for tensor in [attribute.t] if "t" in held else attribute.tensors:
            check_tensor(tensor, f"attribute '{attribute.name}' of {node}")
        for sparse in [attribute.sparse_tensor] if "sparse_tensor" in held else attribute.sparse_tensors:
            check_sparse(sparse, f"attribute '{attribute.name}' of {node}")
        for graph in [attribute.g] if "g" in held else attribute.graphs:
            for tensor in graph.initializer:
                check_tensor(tensor, f"initializer '{tensor.name}' of graph '{graph.name}'")
            self.graph(graph, opsets, parameters)
        return ""


def _against(node: onnx.NodeProto, given: Mapping[str, onnx.AttributeProto], schema: _Schema) -> str:
    """How a node breaks its schema: numbers of inputs and outputs, types of attributes."""
    for kind, found, (least, most) in (
        ("input", len(node.input), schema.inputs),
        ("output", len(node.output), schema.outputs),
    ):
        if not least <= found <= most:
            takes = least if least == most else f"at least {least}" if found < least else f"at most {most}"
            return f"has {counted(found, kind)}; the operator has {takes}"
    for slot, (name, single) in enumerate(zip(node.input, schema.single, strict=False)):
        if single and not name:
            return f"leaves out its input {slot}, which the operator needs"
    for name, attribute in given.items():
        wanted = schema.attributes.get(name)
        if wanted is not None and attribute.type != wanted:
            return (
                f"has the attribute '{name}' as {_type_name(attribute.type)}; the operator takes {_type_name(wanted)}"
            )
        if name in _ELEMENT_TYPES and wanted == _Attribute.INT and not attribute.ref_attr_name:
            if attribute.i not in NAMES:
                return f"has the attribute '{name}' as {attribute.i}, an element type that ONNX does not define"
    missing = sorted(schema.required - given.keys())
    return f"lacks the attribute '{missing[0]}', which the operator needs" if missing else ""


def node_label(node: onnx.NodeProto) -> str:
    """A node in a message: its name, or its first output, and its type."""
    name = node.name or next((f"-> {output}" for output in node.output if output), "")
    return f"'{name}' ({node.op_type})" if name else f"of type {node.op_type}"
