"""A lowered model in parts that run one after the other.

onnxruntime sorts a graph for each of its optimisers, and keeps the ready nodes of a sort in a list that it walks for
every node that becomes ready. In a training step the number of those grows with its depth, since half of a backward
pass reads what the forward pass has made alone: a session takes time of the square of the nodes. Parts of one size
each take the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise

import onnx

from amp_transpiler.ir.control import CONTROL, nested_graphs
from amp_transpiler.passes.lowering.lowered import rename_tensors, used_tensors

#: Nodes of a part, about, and of a model that stays whole, at most.
PART, WHOLE = 1500, 8000


def cuts(graph: onnx.GraphProto) -> list[int]:
    """Where the parts of a graph end, the last node but one of each: [its length] where it stays whole.

    A part ends, within a fifth of its size, where the fewest tensors cross that are soon read: between two layers
    rather than inside of one, so that what onnxruntime fuses stays together.
    """
    count = len(graph.node)
    if count <= WHOLE:
        return [count]
    change = [0] * (count + 1)
    for made, last in _lives(graph):
        if last - made <= PART:
            change[made + 1] += 1
            change[last + 1] -= 1
    crossing = list(accumulate(change))  # [i]: short-lived tensors that are made before node i and read by it or later
    size = count / round(count / PART)
    ends: list[int] = []
    while count - (ends[-1] if ends else 0) > 1.5 * size:
        about = (ends[-1] if ends else 0) + size
        near = range(int(about - 0.2 * size), int(about + 0.2 * size))
        ends.append(min(near, key=lambda i: (crossing[i], abs(i - about))))
    return [*ends, count]


def _lives(graph: onnx.GraphProto) -> list[tuple[int, int]]:
    """The node that makes a tensor and the last one that reads it, for each tensor that a node reads."""
    made = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
    last: dict[str, int] = {}
    for i, node in enumerate(graph.node):
        last.update((name, i) for name in used_tensors([node]) & made.keys())
    return [(made[name], i) for name, i in last.items()]


class Parts:
    """The parts of ``model``: what each reads of others or of the model's inputs, and what it gives.

    A tensor may be read by nodes of several later parts, and be an output of the model besides. Those that are ``sent``
    to other ranks are given in any case.
    """

    def __init__(self, model: onnx.ModelProto, ends: Sequence[int], sent: Iterable[str] = ()) -> None:
        self.model = model
        self.head = onnx.ModelProto(ir_version=model.ir_version, producer_name=model.producer_name)
        self.head.opset_import.extend(model.opset_import)
        self.head.functions.extend(model.functions)
        self.head.graph.name = model.graph.name
        self.infos = {info.name: info for info in (*model.graph.input, *model.graph.output)}
        self.constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self.spans = list(pairwise([0, *ends]))
        nodes = model.graph.node
        self.made = [[name for i in range(*span) for name in nodes[i].output if name] for span in self.spans]
        self.read = [used_tensors(nodes[first:end]) for first, end in self.spans]
        maker = {name: part for part, names in enumerate(self.made) for name in names}
        outputs = {info.name for info in model.graph.output}
        #: The last part that reads a tensor which another one has made.
        self.last: dict[str, int] = {}
        for part, names in enumerate(self.read):
            self.last.update((name, part) for name in names if maker.get(name, part) != part)
        inputs = {info.name for info in model.graph.input}
        self.inputs = [
            sorted(name for name in names if name in inputs or maker.get(name, part) != part)
            for part, names in enumerate(self.read)
        ]
        asked = outputs.union(sent)
        self.outputs = [[name for name in names if name in self.last or name in asked] for names in self.made]

    def part(self, number: int, types: Mapping[str, onnx.TypeProto]) -> onnx.ModelProto:
        """A part as a model; ``types`` has those of tensors that earlier parts give it."""
        part = onnx.ModelProto()
        part.CopyFrom(self.head)
        graph = part.graph
        first, end = self.spans[number]
        graph.node.extend(self.model.graph.node[first:end])
        for name in self.inputs[number]:
            info = self.infos.get(name)
            graph.input.append(onnx.ValueInfoProto(name=name, type=types[name]) if info is None else info)
        for name in self.outputs[number]:
            graph.output.append(self.infos.get(name) or onnx.ValueInfoProto(name=name))
        made = set(self.made[number])
        graph.value_info.extend(info for info in self.model.graph.value_info if info.name in made)
        graph.initializer.extend(self.constants[name] for name in sorted(self.read[number] & self.constants.keys()))
        return part

    def joined(self, graphs: Sequence[onnx.GraphProto], names: Sequence[Mapping[str, str]]) -> onnx.GraphProto:
        """One graph of those that the parts really run, one behind the other; names inside are made its own.

        ``names``: what a part's graph calls its inputs and outputs.
        """
        whole = onnx.GraphProto(name=self.model.graph.name)
        whole.input.extend(self.model.graph.input)
        whole.output.extend(self.model.graph.output)
        for number, graph in enumerate(graphs):
            first = len(whole.node)
            whole.node.extend(graph.node)
            inside = {name for node in graph.node for name in node.output if name}
            renamed = {name: f"{name}/part {number}" for name in inside}
            renamed |= {within: name for name, within in names[number].items()}
            rename_tensors(whole.node[first:], renamed)
        return whole


def named_alike(part: onnx.ModelProto) -> dict[str, str]:
    """Name the tensors of a part by their place in it: layers that are alike make parts that are equal.

    Gives the new name of each. A part with nested graphs, of which a step has few, keeps its names.
    """
    graph = part.graph
    if any((node.domain or node.op_type in CONTROL) and any(nested_graphs(node)) for node in graph.node):
        return {info.name: info.name for info in (*graph.input, *graph.output)}
    names = {"": ""}
    for node in graph.node:
        for slots in (node.input, node.output):
            known = list(slots)
            for name in known:
                if name not in names:
                    names[name] = f"t{len(names)}"
            slots[:] = [names[name] for name in known]
        node.name = node.output[0]
    places = {name: place for place, name in enumerate(names)}
    for infos in (graph.input, graph.output, graph.value_info, graph.initializer):
        ordered = sorted(infos, key=lambda info: places[info.name])
        for info in ordered:
            info.name = names[info.name]
        del infos[:]
        infos.extend(ordered)
    return names
