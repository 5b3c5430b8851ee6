"""A lowered step of several ranks, taken apart where ranks exchange something.

What is exchanged lies in memory of its own for good. Where it is received where it was sent from, its node is gone, and
its readers read that tensor, in a later part; otherwise what is sent is an output of the whole, and what is received
an input.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx

from amp_transpiler.ir.attributes import attributes_of
from amp_transpiler.ir.exchange_call import ORDER, Exchange
from amp_transpiler.ir.infer import type_proto
from amp_transpiler.ir.nodes import OWN
from amp_transpiler.ir.opdef import exchange_of
from amp_transpiler.ir.types import BYTES, NAMES
from amp_transpiler.passes.lowering.lowered import rename_tensors, used_tensors
from amp_transpiler.passes.lowering.rounds import rounds


@dataclass(frozen=True)
class Tensor:
    """A tensor that is sent or received, of fixed shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return math.prod(self.shape) * BYTES[self.dtype]


@dataclass(frozen=True)
class Exchanged:
    """What ranks exchange at one place of a step.

    ``call`` says how; ``bucket`` is the number of the send in which it leaves, at the end of part ``part``. Where the
    call works in place, ``received`` is what was sent.
    """

    type: str
    call: Exchange
    sent: tuple[Tensor, ...]
    received: tuple[Tensor, ...]
    bucket: int
    part: int
    attrs: Mapping[str, Any] = field(default_factory=dict)


def has_exchanges(model: onnx.ModelProto) -> bool:
    """Whether ranks exchange something in a lowered step."""
    return any(entry.domain == OWN for entry in model.opset_import) and any(map(_call, model.graph.node))


def _call(node: onnx.NodeProto) -> Exchange | None:
    return exchange_of(node.op_type) if node.domain == OWN else None


def taken_apart(
    model: onnx.ModelProto, updates: Container[str] = ()
) -> tuple[onnx.ModelProto, list[int], list[Exchanged]]:
    """The model without the exchanges, its nodes part by part, where the parts end, and what is exchanged.

    That is in the order in which it leaves. ``updates``: outputs that may be written where an input lies.
    """
    types = _types(model)
    nodes = _apart(model, types)
    attrs = {i: attributes_of(node) for i, node in enumerate(nodes) if _call(node) is not None}
    numbers = {i: attrs[i].pop(ORDER, i) for i in attrs}
    calls = {i: call for i in sorted(attrs, key=numbers.__getitem__) if (call := _call(nodes[i])) is not None}
    maker = {name: i for i, node in enumerate(nodes) for name in node.output if name}
    reads = [[maker[name] for name in used_tensors([node]) if name in maker] for node in nodes]
    sizes = {i: sum(types[name].nbytes for name in nodes[i].input) for i in calls}
    late = {i for i, node in enumerate(nodes) if any(name in updates for name in node.output)}
    plan = rounds(reads, sizes, {i for i, call in calls.items() if call.uneven}, late)
    whole, names = _emptied(model), dict[str, str]()
    exchanged = []
    for i, call in sorted(calls.items(), key=lambda each: (plan.send[each[0]], -numbers[each[0]])):
        node = nodes[i]
        sent, received = (tuple(types[name] for name in slots) for slots in (node.input, node.output))
        if call.in_place:
            names |= zip(node.output, node.input, strict=True)
            received = sent
        else:
            whole.graph.output.extend(map(_info, sent))
            whole.graph.input.extend(map(_info, received))
        exchanged.append(Exchanged(node.op_type, call, sent, received, plan.send[i], plan.part[i], attrs[i]))
    order = sorted((i for i in range(len(nodes)) if i not in calls), key=lambda i: plan.part[i])
    whole.graph.node.extend(nodes[i] for i in order)
    rename_tensors(whole.graph.node, names)
    parts = [plan.part[i] for i in order]
    return whole, [bisect_right(parts, part) for part in range(plan.parts)], exchanged


def by_itself(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model as a rank computes it without the others: it receives what it sends, as often as there is room."""
    types, whole = _types(model), _emptied(model)
    for node in model.graph.node:
        call = _call(node)
        if call is None:
            whole.graph.node.append(node)
            continue
        for sent, received in zip(node.input, node.output, strict=False):
            if call.in_place:
                whole.graph.node.append(_identity(sent, received))
            else:
                _repeat(whole.graph, types[sent], types[received])
    return whole


def _types(model: onnx.ModelProto) -> dict[str, Tensor]:
    """What is known of tensors: inputs, outputs, constants, and what exchanges read and make."""
    graph, found = model.graph, dict[str, Tensor]()
    for info in (*graph.input, *graph.output, *graph.value_info):
        kind = info.type.tensor_type
        if kind.elem_type in NAMES:
            found[info.name] = Tensor(info.name, NAMES[kind.elem_type], tuple(d.dim_value for d in kind.shape.dim))
    for tensor in graph.initializer:
        found[tensor.name] = Tensor(tensor.name, NAMES[tensor.data_type], tuple(tensor.dims))
    return found


def _emptied(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model without nodes, and without the domain of exchanges."""
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    del whole.graph.node[:], whole.opset_import[:]
    whole.opset_import.extend(entry for entry in model.opset_import if entry.domain != OWN)
    return whole


def _info(tensor: Tensor) -> onnx.ValueInfoProto:
    return onnx.ValueInfoProto(name=tensor.name, type=type_proto(tensor.dtype, tensor.shape))


def _identity(source: str, target: str) -> onnx.NodeProto:
    return onnx.helper.make_node("Identity", [source], [target], target)


def _apart(model: onnx.ModelProto, types: dict[str, Tensor]) -> list[onnx.NodeProto]:
    """The nodes; what is sent has a node that makes it, and no other reader, and what is received is no output."""
    nodes, outputs = list(model.graph.node), {info.name for info in model.graph.output}
    made = {name for node in nodes if _call(node) is None for name in node.output} - outputs
    readers = Counter(name for node in nodes for name in used_tensors([node]))
    found = []
    for node in nodes:
        if _call(node) is None:
            found.append(node)
            continue
        own = onnx.NodeProto()
        own.CopyFrom(node)
        for number, name in enumerate(node.input):
            if name not in made or readers[name] > 1:
                own.input[number] = f"{node.name}/sent {number}"
                types[own.input[number]] = replace(types[name], name=own.input[number])
                found.append(_identity(name, own.input[number]))
        found.append(own)
        for number, name in enumerate(node.output):
            if name in outputs:
                own.output[number] = f"{node.name}/received {number}"
                types[own.output[number]] = replace(types[name], name=own.output[number])
                found.append(_identity(own.output[number], name))
    return found


def _repeat(graph: onnx.GraphProto, sent: Tensor, received: Tensor) -> None:
    """Nodes that make a tensor of the elements of another, again and again."""
    size = math.prod(received.shape)
    copies = -(-size // max(1, math.prod(sent.shape)))
    flat, many, cut = (f"{received.name}/{what}" for what in ("flat", "many", "cut"))
    for name, values in ((f"{flat}/shape", [-1]), (f"{cut}/start", [0]), (f"{cut}/end", [size])):
        graph.initializer.append(onnx.numpy_helper.from_array(np.array(values, np.int64), name))
    shape = onnx.numpy_helper.from_array(np.array(received.shape, np.int64), f"{received.name}/shape")
    graph.initializer.append(shape)
    graph.node.add(op_type="Reshape", input=[sent.name, f"{flat}/shape"], output=[flat])
    graph.node.append(onnx.helper.make_node("Concat", [flat] * max(1, copies), [many], axis=0))
    graph.node.add(op_type="Slice", input=[many, f"{cut}/start", f"{cut}/end"], output=[cut])
    graph.node.add(op_type="Reshape", input=[cut, shape.name], output=[received.name])
