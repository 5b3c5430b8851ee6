"""Values worked on a chunk at a time, so that what is made of a chunk stays in the cache: a Scan."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx

from amp_transpiler.ir.control import every_node
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.types import ONNX_TYPES
from amp_transpiler.ops.training.branches import as_tensor, emulating, needed


def by_chunks(e: Emitter, values: Sequence[Value], write: Callable[..., Sequence[Value]]) -> list[Value]:
    """What ``write`` makes of a chunk of each of the ``values``, for all their chunks, along the first dimension.

    What it computes without them is computed once.
    """
    with e.nested():
        chunks = [Value(e.name("chunk"), e.tensor_type(v), (v.shape or ())[1:]) for v in values]
        written = write(*(Value(c.name, v.dtype, c.shape) for c, v in zip(chunks, values, strict=True)))
        made = [as_tensor(e, value) for value in written]
        read, given = (
            [onnx.helper.make_tensor_value_info(v.name, ONNX_TYPES[v.dtype], v.shape) for v in each]
            for each in (chunks, made)
        )
        ahead, inner = _apart(needed(e.nodes, made), chunks)
    body = onnx.helper.make_graph(inner, "chunk", read, given)
    e.nodes += ahead
    names = [e.name("Scan") for _ in made]
    scanned = [value.name for value in values]
    e.nodes.append(onnx.helper.make_node("Scan", scanned, names, names[0], body=body, num_scan_inputs=len(values)))
    count = (values[0].shape or ())[:1]
    shapes = [None if tensor.shape is None else (*count, *tensor.shape) for tensor in made]
    return [
        emulating(e, Value(name, tensor.dtype, shape), Value(name, value.dtype, shape))
        for name, tensor, value, shape in zip(names, made, written, shapes, strict=True)
    ]


def _apart(
    nodes: Sequence[onnx.NodeProto], chunks: Sequence[Value]
) -> tuple[list[onnx.NodeProto], list[onnx.NodeProto]]:
    """The nodes that no chunk reaches, and the others."""
    reached, ahead, inner = {c.name for c in chunks}, list[onnx.NodeProto](), list[onnx.NodeProto]()
    for node in nodes:
        if all(reached.isdisjoint(part.input) for part in every_node([node])):
            ahead.append(node)
        else:
            reached.update(node.output)
            inner.append(node)
    return ahead, inner
