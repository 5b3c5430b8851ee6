"""A lowered step of several ranks, taken apart where gradients are exchanged.

The first parts are forward and backward pass, each up to the gradients of one bucket, which travel while the next part
is computed; the last part is what depends on the reduced gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import onnx

from amp_transpiler.ir.nodes import OWN
from amp_transpiler.ir.types import BYTES, NAMES
from amp_transpiler.ops.training.all_reduce import ALL_GATHER, EXCHANGES
from amp_transpiler.passes.lowering.lowered import rename_tensors, used_tensors

#: Bytes of a bucket, about, as in torch's DistributedDataParallel; and buckets at most.
BUCKET, MOST = 25 * 2**20, 4


@dataclass(frozen=True)
class Exchanged:
    """A tensor that is made in one part, exchanged between ranks where it lies, and read by the last part.

    ``gathered``: what it holds are the tensors of all ranks; otherwise their mean.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bucket: int
    gathered: bool


def has_exchanges(model: onnx.ModelProto) -> bool:
    """Whether gradients are exchanged in a lowered step."""
    return any(entry.domain == OWN for entry in model.opset_import) and any(map(_is_exchange, model.graph.node))


def _is_exchange(node: onnx.NodeProto) -> bool:
    return node.domain == OWN and node.op_type in EXCHANGES


def taken_apart(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[int], list[Exchanged]]:
    """The model without the exchanges, its nodes part by part, where the parts end, and what is exchanged."""
    nodes = list(model.graph.node)
    maker = {name: i for i, node in enumerate(nodes) for name in node.output if name}
    reads = [[maker[name] for name in used_tensors([node]) if name in maker] for node in nodes]
    exchanged = _exchanged(model, [node for node in nodes if _is_exchange(node)])
    buckets = max((each.bucket for each in exchanged.values()), default=-1) + 1
    part = _parts(nodes, reads, exchanged, buckets)
    copies, found = _alone(nodes, exchanged, {info.name for info in model.graph.output})
    whole, ends = onnx.ModelProto(), list[int]()
    whole.CopyFrom(model)
    del whole.graph.node[:], whole.opset_import[:]
    for number in range(buckets + 1):
        its = [node for node, its_part in zip(nodes, part, strict=True) if its_part == number]
        whole.graph.node.extend(node for node in its if not _is_exchange(node))
        whole.graph.node.extend(copies.get(number, ()))
        ends.append(len(whole.graph.node))
    names = {node.output[0]: found[node.input[0]].name for node in nodes if _is_exchange(node)}
    rename_tensors(whole.graph.node, names)
    whole.opset_import.extend(entry for entry in model.opset_import if entry.domain != OWN)
    return whole, ends, list(found.values())


def _exchanged(model: onnx.ModelProto, nodes: Sequence[onnx.NodeProto]) -> dict[str, Exchanged]:
    """What the exchanges read, by tensor. Of an operator's gradients the last ones are made first."""
    types = {info.name: info.type.tensor_type for info in model.graph.value_info}
    listed = []
    for node in reversed(nodes):
        kind = types[node.output[0]]
        shape, gathered = tuple(d.dim_value for d in kind.shape.dim), node.op_type == ALL_GATHER
        listed.append((node.input[0], NAMES[kind.elem_type], shape, gathered))
    sizes = [math.prod(shape) * BYTES[dtype] for _, dtype, shape, _ in listed]
    count = min(MOST, max(1, round(sum(sizes) / BUCKET)))
    begins = [end - size for end, size in zip(accumulate(sizes), sizes, strict=True)]
    share = max(1, -(-sum(sizes) // count))
    return {
        name: Exchanged(name, dtype, shape, begin // share, gathered)
        for (name, dtype, shape, gathered), begin in zip(listed, begins, strict=True)
    }


def _parts(
    nodes: Sequence[onnx.NodeProto], reads: Sequence[Sequence[int]], exchanged: dict[str, Exchanged], last: int
) -> list[int]:
    """The part of each node: the first bucket for which it is needed; ``last`` behind an exchange."""
    needed = [last] * len(nodes)
    behind = [False] * len(nodes)
    for i, node in enumerate(nodes):
        behind[i] = any(behind[j] or _is_exchange(nodes[j]) for j in reads[i])
        if _is_exchange(node):
            needed[i] = exchanged[node.input[0]].bucket
    for i in reversed(range(len(nodes))):
        if not behind[i]:
            for j in reads[i]:
                needed[j] = min(needed[j], needed[i])
    part = [last] * len(nodes)
    for i in range(len(nodes)):
        if behind[i]:
            continue
        part[i] = needed[i] if needed[i] < last else max((part[j] for j in reads[i]), default=0)
    return part


def _alone(
    nodes: Sequence[onnx.NodeProto], exchanged: dict[str, Exchanged], outputs: set[str]
) -> tuple[dict[int, list[onnx.NodeProto]], dict[str, Exchanged]]:
    """Copies of exchanged tensors that somebody else reads or that nobody makes, by part, and all as they travel."""
    readers: dict[str, int] = {}
    makers = {name: i for i, node in enumerate(nodes) for name in node.output}
    for node in nodes:
        for name in used_tensors([node]):
            readers[name] = readers.get(name, 0) + 1
    copies: dict[int, list[onnx.NodeProto]] = {}
    found = {}
    for name, each in exchanged.items():
        if readers[name] > 1 or name in outputs or name not in makers:
            own = f"{name}/sent"
            copies.setdefault(each.bucket, []).append(onnx.helper.make_node("Identity", [name], [own]))
            each = replace(each, name=own)
        found[name] = each
    return copies, found
