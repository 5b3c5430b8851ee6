"""Calls into onnx's type inference, guarded: what it raises, and sizes that it would spend the memory on.

With data propagation onnx keeps a tensor of one dimension as a list of its elements, known or not, wherever an operator
adds, multiplies, casts or slices it: a declared input of two billion elements takes hundreds of gigabytes. It keeps
them by name, those of all graphs together: of tensors that the branches of an If both have it takes one for the other.

Sizes that come of scales are those of onnxruntime, which runs the model (:func:`settle_scales`). Defaults are those of
ONNX's operators (:func:`spell_out`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError, EncodeError

from amp_transpiler.ir.constant_data import constant_tensor
from amp_transpiler.ir.control import nested_graphs
from amp_transpiler.lists import plain_domain

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
#: What the names of scales begin with that are put in the place of a model's.
_SETTLED = "scales__"
#: Attributes that inference takes for something else where a node leaves them out, and what they are then: it gives an
#: STFT the frequencies of both sides.
_MISREAD = {"STFT": ("onesided", 1)}
#: What the names begin with that ONNX's inference makes up for sizes that it does not know.
INVENTED = "unk__"


def inferred_types(model: onnx.ModelProto, nested: bool) -> onnx.ModelProto | None:
    """The model, which has no weights, with inferred types; None where inference gives up on it as a whole.

    Long sizes of declared tensors of one dimension come as names; :func:`size_of` gives them back. ``nested``: whether
    a node holds a graph.
    """
    graphs = list(_graphs(model.graph)) if nested else [model.graph]
    long, misread = any(map(_has_long, graphs)), any([_misread(node) for graph in graphs for node in graph.node])
    if long or misread:
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        model = copy
        for graph in list(_graphs(model.graph)):
            _hide_sizes(graph)
            for node in graph.node:
                spell_out(node)
    found = _inferred(model, nested)
    scaled = None if found is None else _with_settled_scales(model, found)
    while scaled is not None and found is not None:
        model, found = scaled, _inferred(scaled, nested)
        scaled = None if found is None else _with_settled_scales(model, found)
    return found


def _inferred(model: onnx.ModelProto, nested: bool) -> onnx.ModelProto | None:
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


# -- defaults -------------------------------------------------------------------------------------------------
def spell_out(node: onnx.NodeProto) -> None:
    """Write the attribute of a node that inference would misread for want of it."""
    if _misread(node):
        node.attribute.append(onnx.helper.make_attribute(*_MISREAD[node.op_type]))


def _misread(node: onnx.NodeProto) -> bool:
    if node.op_type not in _MISREAD or plain_domain(node.domain):
        return False
    return all(attribute.name != _MISREAD[node.op_type][0] for attribute in node.attribute)


# -- sizes by scales ------------------------------------------------------------------------------------------
def settle_scales(
    node: onnx.NodeProto, opset: int, types: Mapping[str, onnx.TypeProto], data: dict[str, onnx.TensorProto]
) -> bool:
    """Put scales into ``data``, the known inputs of a node, that give the sizes of onnxruntime.

    That multiplies in float32, and ONNX's inference in float64, which makes 9 of 24 * float32(10 / 24). They stand in
    the middle of those that give a size. Returns whether there were others.
    """
    if node.op_type not in ("Resize", "Upsample") or plain_domain(node.domain) or not node.input:
        return False
    slot = 2 if node.op_type == "Resize" and opset > 10 else 1
    name = node.input[slot] if slot < len(node.input) else ""
    read = types.get(node.input[0])
    if name not in data or data[name].data_type != onnx.TensorProto.FLOAT or read is None:
        return False
    dims, scales = read.tensor_type.shape.dim, onnx.numpy_helper.to_array(data[name]).reshape(-1)
    axes = next((list(a.ints) for a in node.attribute if a.name == "axes"), range(len(dims)))
    if len(axes) != scales.size or not all(-len(dims) <= axis < len(dims) for axis in axes):
        return False
    settled = scales.astype(np.float64)
    for place, axis in enumerate(axes):
        size, scale = dims[axis].dim_value, scales[place]
        if 0 < size * float(scale) < 2.0**62 and math.floor(size * float(scale)) != computed_size(size, scale):
            settled[place] = (computed_size(size, scale) + 0.5) / size
    if np.array_equal(settled, scales, equal_nan=True):
        return False
    data[name] = onnx.numpy_helper.from_array(settled.astype(scales.dtype), name)
    return True


def computed_size(size: int, scale: np.float32) -> int:
    """The size that onnxruntime gives to a dimension by a scale."""
    return int(np.float32(size) * scale)


def _with_settled_scales(model: onnx.ModelProto, found: onnx.ModelProto) -> onnx.ModelProto | None:
    """A copy of ``model`` with settled scales of the first node where those that it has gave other sizes; None where
    there is none. What is behind it is looked at when its sizes are inferred anew."""
    opset = next((each.version for each in model.opset_import if not plain_domain(each.domain)), 1)
    for number, graph in enumerate(_graphs(model.graph)):
        resized = [at for at, node in enumerate(graph.node) if node.op_type in ("Resize", "Upsample")]
        if not resized:
            continue
        held = {tensor.name: tensor for tensor in graph.initializer}
        made = ((node.output[0], constant_tensor(node)) for node in graph.node if node.op_type == "Constant")
        held |= {name: tensor for name, tensor in made if tensor is not None}
        same = list(_graphs(found.graph))[number]
        types = {info.name: info.type for info in (*same.input, *same.value_info, *same.output)}
        for at in resized:
            given = {slot: name for slot, name in enumerate(graph.node[at].input) if name in held}
            data = {name: held[name] for name in given.values() if not name.startswith(_SETTLED)}
            if settle_scales(graph.node[at], opset, types, data):
                copy = onnx.ModelProto()
                copy.CopyFrom(model)
                into = list(_graphs(copy.graph))[number]
                slot, name = next((s, n) for s, n in given.items() if data.get(n) is not held[n])
                into.node[at].input[slot] = f"{_SETTLED}{number}_{at}"
                into.initializer.add().CopyFrom(data[name])
                into.initializer[-1].name = into.node[at].input[slot]
                return copy
    return None


# -- names and sizes ------------------------------------------------------------------------------------------
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
