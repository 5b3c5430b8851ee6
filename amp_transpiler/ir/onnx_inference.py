"""Calls into onnx's type inference, guarded: what it raises, and sizes that it would spend the memory on.

With data propagation onnx keeps a tensor of one dimension as a list of its elements, known or not, wherever an operator
adds, multiplies, casts or slices it: a declared input of two billion elements takes hundreds of gigabytes. It keeps
them by name, those of all graphs together: of tensors that the branches of an If both have it takes one for the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import onnx
from google.protobuf.message import DecodeError, EncodeError

from amp_transpiler.ir.control import nested_graphs

#: What calls into onnx raise: its own classes, and what pybind makes of C++ exceptions.
ONNX_ERRORS = (
    onnx.shape_inference.InferenceError,
    onnx.checker.ValidationError,
    RuntimeError,
    ValueError,
    TypeError,
    MemoryError,
    DecodeError,
    EncodeError,
)
#: Elements from which on a tensor of one dimension is no shape, and takes no part in data propagation.
LONG = 1 << 16
#: Nodes up to which a model is looked at twice: once for such tensors inside it.
_SMALL = 2000
_SIZE = "size__"
#: What the names begin with that ONNX's inference makes up for sizes that it does not know.
INVENTED = "unk__"


def inferred_types(model: onnx.ModelProto, nested: bool) -> onnx.ModelProto | None:
    """The model, which has no weights, with inferred types; None where inference gives up on it as a whole.

    Long sizes of declared tensors of one dimension come as names; :func:`size_of` gives them back. ``nested``: whether
    a node holds a graph.
    """
    if any(map(_has_long, _graphs(model.graph) if nested else (model.graph,))):
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        model = copy
        for graph in list(_graphs(model.graph)):
            _hide_sizes(graph)
    doubled = nested and _share_names(model.graph)
    try:
        if doubled or len(model.graph.node) <= _SMALL:
            plain = onnx.shape_inference.infer_shapes(model)
            graphs = list(_graphs(plain.graph)) if nested else [plain.graph]
            if doubled or any(_long(info.type) for graph in graphs for info in graph.value_info):
                return plain
        return onnx.shape_inference.infer_shapes(model, data_prop=True)
    except ONNX_ERRORS:
        return None


def _share_names(graph: onnx.GraphProto) -> bool:
    """Whether two of the graphs make tensors of one name."""
    made = [name for each in _graphs(graph) for node in each.node for name in node.output if name]
    return len(set(made)) < len(made)


def size_of(size: Any) -> Any:
    """A dimension as it was declared: a number again where :func:`inferred_types` hid it."""
    if isinstance(size, str) and size.startswith(_SIZE) and size[len(_SIZE) :].isdecimal():
        return int(size[len(_SIZE) :])
    return size


def _long(proto: onnx.TypeProto) -> bool:
    dims = proto.tensor_type.shape.dim
    return len(dims) == 1 and dims[0].dim_value > LONG


def _has_long(graph: onnx.GraphProto) -> bool:
    infos = (*graph.input, *graph.output, *graph.value_info)
    return any([_long(info.type) for info in infos]) or any([_long_dims(t.dims) for t in graph.initializer])


def _long_dims(dims: Sequence[int]) -> bool:
    return len(dims) == 1 and dims[0] > LONG


def _hide_sizes(graph: onnx.GraphProto) -> None:
    for info in (*graph.input, *graph.output, *graph.value_info):
        if _long(info.type):
            dim = info.type.tensor_type.shape.dim[0]
            dim.dim_param = f"{_SIZE}{dim.dim_value}"
    long = [t for t in graph.initializer if _long_dims(t.dims)]
    listed = {info.name for info in graph.input}
    for tensor in long:
        if tensor.name not in listed:
            tensor_type = graph.input.add(name=tensor.name).type.tensor_type
            tensor_type.elem_type = tensor.data_type
            tensor_type.shape.dim.add().dim_param = f"{_SIZE}{tensor.dims[0]}"
    if long:
        kept = [t for t in graph.initializer if not _long_dims(t.dims)]
        del graph.initializer[:]
        graph.initializer.extend(kept)


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The graph and those nested in it."""
    yield graph
    for node in graph.node:
        for inner in nested_graphs(node):
            yield from _graphs(inner)
