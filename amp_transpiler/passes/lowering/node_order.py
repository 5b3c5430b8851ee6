"""The order in which a lowered model lists its nodes, and who reads its hot scalars: what a session is made fast from.

Each of onnxruntime's optimisers sorts the graph anew: it takes the ready node that stands first in the file, and keeps
the ready ones in a linked list that it walks from the start for every node that becomes ready. So a session takes time
of nodes x ready nodes; in a step of many parameters thousands are ready at once, as whatever reads state alone is
from the start, and an update is once the verdict on its gradients is known. Two things keep the list short:

- nodes that no feed reaches (casts of weights, parts of updates) come first, and those of an operator that treats very
  many tensors one by one (the check of the gradients, the update) as soon as what they read is made;
- a scalar that very many nodes read is handed on: link after link of the chain ``Max(previous link, scalar)`` is the
  scalar bit for bit, and serves a group of readers. A shorter way does not outlive the optimiser.

onnxruntime runs nodes in an order of its own (depth first from the results), in which places in the file only
settle which result is made first, and which of a node's inputs: the one that stands last. That order keeps little alive
(what lists nodes by the bytes that they free does not do better on whole steps). Two things it cannot see:

- what fetches alone need stands last in the file, so that it is made first: a loss made last would keep the scores;
- a feed cast to 16 bit for the forward pass is cast again for the backward pass, and its copy not kept in between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

import onnx

from amp_transpiler.ir.control import CONTROL
from amp_transpiler.ir.emitter import Emitter
from amp_transpiler.ir.nodes import FORWARD, Operator, Shape
from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.ir.types import HALF, NAMES
from amp_transpiler.passes.lowering.lowered import live, static, used_tensors

#: Readers of one scalar from which on it is handed on, and the readers of each link.
_HOT, _GROUP = 256, 64
#: Inputs of an operator, and nodes, from which on its nodes stand behind what they read. onnxruntime then makes the
#: last gradients first, and keeps what the others are made of; for fewer tensors the time to sort is not worth that.
_ROWS = 2048
#: What a link computes of two equal scalars.
_LINK = {"bool": "And", "float32": "Max", "float64": "Max"}

Nodes = list[onnx.NodeProto]
Origins = list[Operator | None]


def arranged(
    e: Emitter,
    origins: Sequence[Operator | None],
    updates: set[str],
    feeds: Mapping[str, Shape | None],
) -> tuple[Nodes, Origins]:
    """The nodes emitted, with links and in order, each with its operator.

    ``updates``: what they make that is a new value of state. ``feeds``: the tensors that are fed, with their shapes.
    """
    nodes, kept = fetched_last(e.nodes, origins, updates)
    nodes, kept = cast_again(e, nodes, kept, feeds)
    return listed(*handed_on(nodes, kept, e.scalars, e.name), feeds)


def fetched_last(
    nodes: Sequence[onnx.NodeProto], origins: Sequence[Operator | None], updates: set[str]
) -> tuple[Nodes, Origins]:
    """The nodes, those behind the others that no update depends on."""
    needed = {node.output[0] for node in live(nodes, origins, updates)[0]} if updates else set()
    order = sorted(range(len(nodes)), key=lambda i: nodes[i].output[0] not in needed)
    return [nodes[i] for i in order], [origins[i] for i in order]


def cast_again(
    e: Emitter, nodes: Sequence[onnx.NodeProto], origins: Sequence[Operator | None], feeds: Mapping[str, Shape | None]
) -> tuple[Nodes, Origins]:
    """The nodes with a second cast of feeds that forward and backward operators read in 16 bit.

    It casts another view of the feed: of two equal casts onnxruntime would make one.
    """
    casts = {
        node.output[0]: node
        for node in nodes
        if node.op_type == "Cast" and static(feeds.get(node.input[0])) and NAMES.get(node.attribute[0].i) in HALF
    }
    if not casts:
        return list(nodes), list(origins)
    again: dict[str, Nodes] = {}
    ahead: set[str] = set()
    for node, origin in zip(nodes, origins, strict=True):
        forward = origin is None or origin.role == FORWARD
        for slot, name in enumerate(node.input) if not casts.keys().isdisjoint(node.input) else ():
            if name in casts and forward:
                ahead.add(name)
            elif name in casts and name in ahead:
                if name not in again:
                    again[name] = _cast_of_view(e, casts[name], static(feeds[casts[name].input[0]]) or ())
                node.input[slot] = again[name][-1].output[0]
    kept: Nodes = []
    owners: Origins = []
    for node, origin in zip(nodes, origins, strict=True):
        more = again.get(node.output[0], [])
        kept += [node, *more]
        owners += [origin] * (1 + len(more))
    return kept, owners


def _cast_of_view(e: Emitter, cast: onnx.NodeProto, shape: tuple[int, ...]) -> Nodes:
    other = e.ints(-1) if len(shape) > 1 else e.ints(1, -1)
    view, narrow, result = (e.name(kind) for kind in ("Reshape", "Cast", "Reshape"))
    twin = onnx.helper.make_node("Cast", [view], [narrow], narrow)
    twin.attribute.extend(cast.attribute)
    return [
        onnx.helper.make_node("Reshape", [cast.input[0], other.name], [view], view),
        twin,
        onnx.helper.make_node("Reshape", [narrow, e.ints(*shape).name], [result], result),
    ]


def handed_on(
    nodes: Sequence[onnx.NodeProto],
    origins: Sequence[Operator | None],
    scalars: Mapping[str, str],
    fresh: Callable[[str], str],
) -> tuple[Nodes, Origins]:
    """The nodes with links for the scalars that very many of them read.

    ``scalars``: the element types of tensors of one element, by name. ``fresh``: a new name.
    """
    made = {name for node in nodes for name in scalars.keys() & node.output}
    links = {name: _LINK[kind] for name, kind in scalars.items() if kind in _LINK and name in made}
    readers = Counter(name for node in nodes for name in links.keys() & node.input)
    hot = {name: links[name] for name, count in readers.items() if count > _HOT}
    if not hot:
        return list(nodes), list(origins)
    now = dict.fromkeys(hot, (0, ""))
    kept: Nodes = []
    owners: Origins = []
    for node, origin in zip(nodes, origins, strict=True):
        for name in sorted(hot.keys() & node.input):
            count, link = now[name]
            if count and count % _GROUP == 0:
                link = fresh(hot[name])
                kept.append(onnx.helper.make_node(hot[name], [now[name][1] or name, name], [link], link))
                owners.append(origin)
            now[name] = (count + 1, link)
            for slot, read in enumerate(node.input):
                if read == name and link:
                    node.input[slot] = link
        kept.append(node)
        owners.append(origin)
    return kept, owners


def listed(
    nodes: Sequence[onnx.NodeProto], origins: Sequence[Operator | None], feeds: Collection[str]
) -> tuple[Nodes, Origins]:
    """The nodes in an order in which few are ready at a time; every node behind those that it reads.

    ``feeds``: the tensors that are fed.
    """
    fed = set(feeds)
    many = {op.key for op in dict.fromkeys(origins) if op is not None and len(op.inputs) > _ROWS}
    pairs = zip(nodes, origins, strict=True)
    counts = Counter(op.key for node, op in pairs if op is not None and op.key in many and not _is_view(node))
    after: dict[str, int] = {}  # tensor -> the place of the node behind which it is made
    places: list[tuple[int, int]] = []
    for i, (node, origin) in enumerate(zip(nodes, origins, strict=True)):
        read = used_tensors([node]) if node.domain or node.op_type in CONTROL else node.input
        place = (i, -1)
        if fed.isdisjoint(read):
            place = (-1, i)
        else:
            fed.update(filter(None, node.output))
            if origin is not None and counts[origin.key] > _ROWS:
                behind = max((after[name] for name in read if name in after), default=-1)
                place = (behind, i) if behind >= 0 else place
        if many:
            after.update((name, place[0]) for name in node.output if name)
        places.append(place)
    order = sorted(range(len(nodes)), key=places.__getitem__)
    return [nodes[i] for i in order], [origins[i] for i in order]


def _is_view(node: onnx.NodeProto) -> bool:
    return traits_of(node.op_type, node.domain).view
