"""Concat and Split as the kernels of a place take them by address: as many tensors as they may, pieces of one length.

For others CUDA's kernels make a table of 8 bytes for each element along the axis, on the host and in every step: a
Split of 85 million elements took 3 seconds (H200, onnxruntime 1.31). And a captured graph copies the table again from
memory that is somebody else's by then.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import onnx

from amp_transpiler.ir.attributes import attributes_of
from amp_transpiler.ir.emitter import Emitter
from amp_transpiler.ir.infer import static
from amp_transpiler.ir.node_protos import emitted_node
from amp_transpiler.ir.nodes import Operator, Shape

_Node: TypeAlias = tuple[onnx.NodeProto, Operator | None]
#: From these opsets on an operator reads where it cuts, which an attribute said before.
_SLICE_READS, _SPLIT_READS = 10, 13


def by_address(e: Emitter, nodes: Iterable[_Node], feeds: Mapping[str, Shape | None]) -> Iterator[_Node]:
    """The nodes, and their origins, with those in place of a Concat or Split that would make a table.

    A Concat becomes a tree, a Split a Slice for each run of pieces of one length and a Split of each run. One whose
    lengths are known in the run alone stays. ``feeds`` has the shapes of what is fed.
    """
    for node, origin in nodes:
        made = [node]
        if e.at.by_address and not node.domain:
            if node.op_type == "Concat":
                made = list(_tree(e, node))
            elif node.op_type == "Split":
                made = list(_runs(e, node, feeds))
        yield from ((each, origin) for each in made)


def _tree(e: Emitter, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    """As few of the inputs as can be are moved twice."""
    names, most = list(node.input), e.at.most_tensors
    while len(names) > most:
        level, at = list[str](), 0
        while at < len(names):
            count = min(most, max(1, len(level) + len(names) - at - most + 1), len(names) - at)
            group = names[at : at + count]
            if count > 1:
                part = onnx.NodeProto(op_type="Concat", input=group, attribute=node.attribute)
                part.name = e.name("Concat")
                part.output.append(part.name)
                yield part
                group = [part.name]
            level, at = level + group, at + count
        names = level
    del node.input[:]
    node.input.extend(names)
    yield node


def _runs(e: Emitter, node: onnx.NodeProto, feeds: Mapping[str, Shape | None]) -> Iterator[onnx.NodeProto]:
    axis, lengths = next((a.i for a in node.attribute if a.name == "axis"), 0), _lengths(e, node, feeds)
    fits = lengths is None or (len(set(lengths)) == 1 and len(lengths) <= e.at.most_pieces)
    if lengths is None or fits or e.opset < _SLICE_READS:
        yield node
        return
    names, start = iter(node.output), 0
    for length, run in itertools.groupby(lengths):
        for group in _groups(list(itertools.islice(names, len(list(run)))), e.at.most_pieces):
            whole, end = group[0] if len(group) == 1 else e.name("Slice"), start + length * len(group)
            cut = [e.ints(number).name for number in (start, end, axis)]
            if any(group):
                yield emitted_node("Slice", [node.input[0], *cut], [whole])
            if len(group) > 1 and any(group):
                each = [name or e.name("Split") for name in group]
                sizes = [e.ints(*[length] * len(group)).name] if e.opset >= _SPLIT_READS else []
                yield emitted_node("Split", [whole, *sizes], each, attrs={"axis": axis})
            start = end


def _groups(names: Sequence[str], most: int) -> list[Sequence[str]]:
    return [names[at : at + most] for at in range(0, len(names), most)]


def _lengths(e: Emitter, node: onnx.NodeProto, feeds: Mapping[str, Shape | None]) -> list[int] | None:
    """How long the pieces are along the axis; None where the run alone knows."""
    attrs = attributes_of(node)
    if len(node.input) > 1 and node.input[1]:
        sizes = e.initializers.get(node.input[1])
        return None if sizes is None else [int(n) for n in onnx.numpy_helper.to_array(sizes)]
    if "split" in attrs:
        return list(attrs["split"])
    given = e.given.get(node.input[0])
    shape = given.shape if given is not None else static(feeds.get(node.input[0]))
    if shape is None:
        return None
    size, count = shape[attrs.get("axis", 0)], len(node.output)
    each = -(-size // count)
    return [max(0, min(each, size - number * each)) for number in range(count)]
