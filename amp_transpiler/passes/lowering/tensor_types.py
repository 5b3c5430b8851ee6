"""Element types and shapes of a lowered model's tensors: what lowering knows, and ONNX's inference for the rest."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import onnx

from amp_transpiler.errors import GraphError
from amp_transpiler.ir.control import nested_graphs
from amp_transpiler.ir.emitter import Value
from amp_transpiler.ir.infer import type_proto
from amp_transpiler.ir.types import NAMES
from amp_transpiler.lists import full_name, plain_domain
from amp_transpiler.passes.lowering.lowered import Lowered

#: Element type and shape of a tensor; None where the shape is not fixed.
Type = tuple[str, tuple[int, ...] | None]

_CONTENT = 64  # elements: more than any shape vector, whose content inference reads
_SIZES = 2**14  # elements of an integer vector: more than a tensor is split into


def inferred(lowered: Lowered) -> onnx.GraphProto:
    """The graph of a lowered model without the content of its weights, with inferred types, in nested graphs too."""
    graph = lowered.model.graph
    light = onnx.ModelProto(ir_version=lowered.model.ir_version)
    light.opset_import.extend(lowered.model.opset_import)
    for field in ("node", "input", "output", "value_info"):
        getattr(light.graph, field).extend(getattr(graph, field))
    listed = {info.name for info in graph.input}
    for tensor in graph.initializer:
        integers = tensor.data_type == onnx.TensorProto.INT64 and len(tensor.dims) == 1
        if math.prod(tensor.dims) <= (_SIZES if integers else _CONTENT):
            light.graph.initializer.append(tensor)
        elif tensor.name not in listed:
            info = light.graph.input.add(name=tensor.name)
            info.type.CopyFrom(type_proto(NAMES[tensor.data_type], tuple(tensor.dims)))
    made = {name for node in graph.node for name in node.output}
    given = {info.name: info for info in light.graph.output}
    for value in lowered.tensors.values():
        if value.name in made and value.shape is not None and value.dtype:
            info = given.get(value.name) or light.graph.value_info.add(name=value.name)
            info.type.CopyFrom(type_proto(value.dtype, value.shape))
    return onnx.shape_inference.infer_shapes(light).graph


def unsized(name: str, nodes: Iterable[onnx.NodeProto], types: Mapping[str, Type]) -> GraphError:
    """The error for a tensor whose shape is not known: it names the first node on the way whose result has none."""
    makers = {made: node for node in nodes for made in node.output if made}
    at, maker, seen = name, makers.get(name), set[str]()
    while maker is not None and at not in seen:
        seen.add(at)
        before = next((n for n in maker.input if n in makers and types.get(n, ("", None))[1] is None), None)
        if before is None:
            break
        at, maker = before, makers[before]
    what = f"the shape of tensor '{name}' is not known before the run"
    if maker is None:
        return GraphError(f"{what}; give the shapes of all feeds")
    full_type = full_name(maker.op_type, plain_domain(maker.domain))
    made_by = f"{full_type} '{maker.name or at}'" + (f", which makes '{at}'," if at != name else "")
    if full_type != maker.op_type:
        return GraphError(f"{what}: {made_by} has no shape rule here; declare '{at}' in the model's value_info")
    return GraphError(
        f"{what}: the sizes of what {made_by} makes hang on data or feeds; give the shapes of all feeds, or leave out "
        "operators whose results depend on data"
    )


def foreign_types(graph: onnx.GraphProto, values: Iterable[Value]) -> Iterator[onnx.ValueInfoProto]:
    """The types of ``values`` that operators make or read of which ONNX's inference knows nothing."""
    foreign = {name for node in graph.node for name in (*node.output, *node.input)}
    foreign -= {each.name for each in (*graph.input, *graph.output, *graph.initializer)}
    for value in {value.name: value for value in values}.values():
        if value.name in foreign and value.shape is not None:
            yield onnx.ValueInfoProto(name=value.name, type=type_proto(value.dtype, value.shape))


def types_in(graph: onnx.GraphProto) -> dict[str, Type]:
    """Element type and fixed shape of each tensor of an inferred graph, those of nested graphs left out."""
    found: dict[str, Type] = {}
    for info in [*graph.value_info, *graph.input, *graph.output]:
        if info.type.WhichOneof("value") == "tensor_type":
            tensor_type = info.type.tensor_type
            dims = [d.dim_value if d.HasField("dim_value") else None for d in tensor_type.shape.dim]
            fixed = tensor_type.HasField("shape") and None not in dims
            found[info.name] = (NAMES.get(tensor_type.elem_type, ""), tuple(dims) if fixed else None)  # type: ignore[arg-type]
    for tensor in graph.initializer:
        found[tensor.name] = (NAMES[tensor.data_type], tuple(tensor.dims))
    return found


def types_within(graph: onnx.GraphProto) -> dict[str, Type]:
    """The same, with those of nested graphs, whose tensors have names of their own in a lowered model."""
    found = types_in(graph)
    for node in graph.node:
        for nested in nested_graphs(node):
            found |= types_within(nested)
    return found


def unpooled_types(graph: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto]:
    """The types of what MaxUnpool makes where it is told the shape, which ONNX's inference does not look at.

    Its only kernel is the CPU's, of fp32.
    """
    content, declared = {tensor.name: tensor for tensor in graph.initializer}, {info.name for info in graph.output}
    for node in graph.node:
        told = content.get(node.input[2]) if node.op_type == "MaxUnpool" and node.input[2:] else None
        if told is not None and node.output[0] not in declared:
            shape = onnx.numpy_helper.to_array(told).tolist()
            yield onnx.helper.make_tensor_value_info(node.output[0], onnx.TensorProto.FLOAT, shape)
