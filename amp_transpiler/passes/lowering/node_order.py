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

from amp_transpiler.ir.emitter import Emitter
from amp_transpiler.ir.infer import static
from amp_transpiler.ir.nodes import FORWARD, Shape
from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.ir.types import HALF, NAMES
from amp_transpiler.passes.lowering.lowered import Row, live, row

#: Readers of one scalar from which on it is handed on, and the readers of each link.
_HOT, _GROUP = 256, 64
#: Inputs of an operator, and nodes, from which on its nodes stand behind what they read. onnxruntime then makes the
#: last gradients first, and keeps what the others are made of; for fewer tensors the time to sort is not worth that.
_ROWS = 2048
#: What a link computes of two equal scalars.
_LINK = {"bool": "And", "float32": "Max", "float64": "Max"}


def arranged(e: Emitter, rows: Sequence[Row], updates: set[str], feeds: Mapping[str, Shape | None]) -> list[Row]:
    """What was emitted, with links and in order.

    ``updates``: what nodes make that is a new value of state. ``feeds``: the tensors that are fed, with their shapes.
    """
    return listed(handed_on(cast_again(e, fetched_last(rows, updates), feeds), e.scalars, e.name), feeds)


def fetched_last(rows: Sequence[Row], updates: set[str]) -> list[Row]:
    """The rows, those behind the others that no update depends on."""
    needed = {each.makes[0] for each in live(rows, updates)} if updates else set()
    return sorted(rows, key=lambda each: each.makes[0] not in needed)


def cast_again(e: Emitter, rows: Sequence[Row], feeds: Mapping[str, Shape | None]) -> list[Row]:
    """The rows with a second cast of feeds that forward and backward operators read in 16 bit.

    It casts another view of the feed: of two equal casts onnxruntime would make one.
    """
    fed = {name for name, shape in feeds.items() if static(shape)}
    casts = {
        each.makes[0]: each.node
        for each in rows
        if not fed.isdisjoint(each.reads)
        and each.node.op_type == "Cast"
        and each.node.input[0] in fed
        and NAMES.get(each.node.attribute[0].i) in HALF
    }
    if not casts:
        return list(rows)
    again: dict[str, list[onnx.NodeProto]] = {}
    ahead: set[str] = set()
    changed: dict[int, Row] = {}
    for place, each in enumerate(rows):
        if casts.keys().isdisjoint(each.reads):
            continue
        forward = each.origin is None or each.origin.role == FORWARD
        for slot, name in enumerate(each.node.input):
            if name in casts and forward:
                ahead.add(name)
            elif name in casts and name in ahead:
                if name not in again:
                    again[name] = _cast_of_view(e, casts[name], static(feeds[casts[name].input[0]]) or ())
                each.node.input[slot] = again[name][-1].output[0]
                changed[place] = row(each.node, each.origin)
    kept: list[Row] = []
    for place, each in enumerate(rows):
        kept += [changed.get(place, each), *(row(node, each.origin) for node in again.get(each.makes[0], ()))]
    return kept


def _cast_of_view(e: Emitter, cast: onnx.NodeProto, shape: tuple[int, ...]) -> list[onnx.NodeProto]:
    other = e.ints(-1) if len(shape) > 1 else e.ints(1, -1)
    view, narrow, result = (e.name(kind) for kind in ("Reshape", "Cast", "Reshape"))
    twin = onnx.helper.make_node("Cast", [view], [narrow], narrow)
    twin.attribute.extend(cast.attribute)
    return [
        onnx.helper.make_node("Reshape", [cast.input[0], other.name], [view], view),
        twin,
        onnx.helper.make_node("Reshape", [narrow, e.ints(*shape).name], [result], result),
    ]


def handed_on(rows: Sequence[Row], scalars: Mapping[str, str], fresh: Callable[[str], str]) -> list[Row]:
    """The rows with links for the scalars that very many of them read.

    ``scalars``: the element types of tensors of one element, by name. ``fresh``: a new name.
    """
    links = {n: _LINK[scalars[n]] for each in rows for n in each.makes if n in scalars and scalars[n] in _LINK}
    readers = Counter(name for each in rows if not links.keys().isdisjoint(each.reads) for name in _linked(each, links))
    hot = {name: links[name] for name, count in readers.items() if count > _HOT}
    if not hot:
        return list(rows)
    now = dict.fromkeys(hot, (0, ""))
    kept: list[Row] = []
    for each in rows:
        for name in sorted(_linked(each, hot)) if not hot.keys().isdisjoint(each.reads) else ():
            count, link = now[name]
            if count and count % _GROUP == 0:
                link = fresh(hot[name])
                node = onnx.helper.make_node(hot[name], [now[name][1] or name, name], [link], link)
                kept.append(row(node, each.origin))
            now[name] = (count + 1, link)
            for slot, read in enumerate(each.node.input):
                if read == name and link:
                    each.node.input[slot] = link
            each = row(each.node, each.origin)
        kept.append(each)
    return kept


def _linked(each: Row, links: Mapping[str, str]) -> set[str]:
    """The scalars that the node itself reads."""
    return links.keys() & set(each.node.input)


def listed(rows: Sequence[Row], feeds: Collection[str]) -> list[Row]:
    """The rows in an order in which few are ready at a time; every node behind those that it reads.

    ``feeds``: the tensors that are fed.
    """
    fed = set(feeds)
    origins = dict.fromkeys(each.origin for each in rows)
    many = {op.key for op in origins if op is not None and len(op.inputs) > _ROWS}
    owned = [(each.node, each.origin.key) for each in rows if each.origin is not None and each.origin.key in many]
    counts = Counter(key for node, key in owned if not _is_view(node))
    after: dict[str, int] = {}  # tensor -> the place of the node behind which it is made
    places: list[tuple[int, int]] = []
    for i, each in enumerate(rows):
        place = (i, -1)
        if fed.isdisjoint(each.reads):
            place = (-1, i)
        else:
            fed.update(filter(None, each.makes))
            if each.origin is not None and counts[each.origin.key] > _ROWS:
                behind = max((after[name] for name in each.reads if name in after), default=-1)
                place = (behind, i) if behind >= 0 else place
        if many:
            after.update((name, place[0]) for name in each.makes if name)
        places.append(place)
    return [rows[i] for i in sorted(range(len(rows)), key=places.__getitem__)]


def _is_view(node: onnx.NodeProto) -> bool:
    return traits_of(node.op_type, node.domain).view
