"""Element types and shapes of the tensors of a lowered model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import onnx

from amp_transpiler.ir.emitter import Value
from amp_transpiler.ir.infer import type_proto
from amp_transpiler.ir.types import NAMES


def tensor_types(model: onnx.ModelProto, known: Iterable[Value]) -> dict[str, tuple[str, tuple[int, ...] | None]]:
    """Element type and fixed shape (None where it is not) of each tensor, by ONNX's inference without weights."""
    light = onnx.ModelProto()
    light.CopyFrom(model)
    del light.graph.initializer[:]
    listed = {info.name for info in light.graph.input}
    for tensor in model.graph.initializer:
        if math.prod(tensor.dims) <= 64:
            light.graph.initializer.append(tensor)
        elif tensor.name not in listed:
            info = light.graph.input.add(name=tensor.name)
            info.type.CopyFrom(type_proto(NAMES[tensor.data_type], tuple(tensor.dims)))
    made = {name for node in model.graph.node for name in node.output} - {info.name for info in model.graph.output}
    light.graph.value_info.extend(_unpooled(model))
    for value in known:
        if value.name in made and value.shape is not None and value.dtype:
            light.graph.value_info.add(name=value.name).type.CopyFrom(type_proto(value.dtype, value.shape))
    graph = onnx.shape_inference.infer_shapes(light).graph
    found: dict[str, tuple[str, tuple[int, ...] | None]] = {}
    for info in [*graph.value_info, *graph.input, *graph.output]:
        if info.type.WhichOneof("value") == "tensor_type":
            tensor_type = info.type.tensor_type
            dims = [d.dim_value if d.HasField("dim_value") else None for d in tensor_type.shape.dim]
            fixed = tensor_type.HasField("shape") and None not in dims
            found[info.name] = (NAMES.get(tensor_type.elem_type, ""), tuple(dims) if fixed else None)  # type: ignore[arg-type]
    for tensor in model.graph.initializer:
        found[tensor.name] = (NAMES[tensor.data_type], tuple(tensor.dims))
    return found


def _unpooled(model: onnx.ModelProto) -> Iterator[onnx.ValueInfoProto]:
    """The results of MaxUnpool that are told their shape, which ONNX's inference does not look at."""
    content = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "MaxUnpool" and len(node.input) > 2 and node.input[2] in content:
            shape = onnx.numpy_helper.to_array(content[node.input[2]]).tolist()
            yield onnx.helper.make_tensor_value_info(node.output[0], onnx.TensorProto.FLOAT, shape)
