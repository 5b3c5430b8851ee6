"""The proof that a state may be updated where it lies.

Binding an update's output to the very buffer of the state's input halves the memory of training, and onnxruntime
neither checks nor orders it: whoever reads the state after the update was written reads the new value. It is safe
where, in the graph that the session really runs,

- every node that reads the state is an ancestor of the node that produces the update, so that it has run before, or
  is that node itself;
- that node, if it reads the state, is elementwise in it: it reads each element before it writes the same one. Of an
  If, which writes what its branch gives straight to its output, both hold inside each branch; of a Scan, whose body
  gets slices of its inputs and writes to slices of its outputs, inside the body, for slices at the same place.

A node that may hand on its input's memory as its output (Reshape, Identity, whatever is not known to compute) counts
as reading on: its readers read the state too. What cannot be shown is refused; refusing costs one more buffer, never
a result.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from itertools import count

import onnx

from amp_transpiler.ir.control import nested_graphs
from amp_transpiler.lists import plain_domain
from amp_transpiler.passes.lowering.lowered import Port, Row, used_tensors

#: Operators that write every output to memory of its own.
_COMPUTES = frozenset(
    """
    Abs Add And ArgMax ArgMin AveragePool BiasGelu BiasSoftmax Cast Ceil Clip Concat Conv ConvTranspose Cos
    CumSum Div Equal Erf Exp Expand FastGelu Floor FusedConv FusedGemm FusedMatMul GatedAdd Gather GatherElements
    GatherND Gelu Gemm GlobalAveragePool GlobalMaxPool Greater GreaterOrEqual HyperConnectionPostMix IsInf IsNaN
    LayerNormalization LeakyRelu Less LessOrEqual Log LogSoftmax MatMul Max MaxPool Mean Min Mod Mul Neg Not
    OneHot Or Pad Pow QuickGelu RMSNormalization Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp
    ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Round ScatterElements ScatterND Shape
    Sigmoid Sign SimplifiedLayerNormalization Sin Size SkipLayerNormalization Slice Softmax Softplus Split Sqrt
    Sub Sum Tanh Tile TopK Transpose Where
    """.split()  # noqa: SIM905
)
#: Of these, operators that move elements, and that another one may read through.
_MOVES = frozenset({"Cast", "Transpose"})
_DOMAINS = frozenset({"", "ai.onnx", "com.microsoft", "com.microsoft.nchwc", "com.ms.internal.nhwc"})

#: Operators that compute element i of their one output from element i of each input, slot -> may be written over.
_ELEMENTWISE = {
    ("", "Add"): (0, 1),
    ("", "Sub"): (0, 1),
    ("", "Mul"): (0, 1),
    ("", "Div"): (0, 1),
    ("", "Where"): (1, 2),
    ("", "ScatterND"): (0,),  # it copies its first input where that is not its output already, and writes slices
    ("com.microsoft", "GatedAdd"): (0, 1),
}


def refusals(
    graph: onnx.GraphProto,
    pairs: Sequence[tuple[str, str]],
    within: Mapping[str, Sequence[str]] | None = None,
    ends: Sequence[int] = (),
) -> list[str]:
    """For each (state input, update output) of ``graph`` why it may not share one buffer; "" where it is proved safe.

    ``graph`` is the optimised one. ``within`` names further inputs that lie in the memory of a state. ``ends``: where
    parts of it end that run one after the other, the last node but one of each. One sweep answers for all pairs.
    """
    return _Proof(graph, within or {}, ends).answer(pairs)


def late_readers(
    rows: Sequence[Row], pairs: Sequence[tuple[str, str]], within: Mapping[str, Sequence[str]]
) -> list[list[onnx.NodeProto]]:
    """For each (state, update) the nodes that read the state, or what lies ``within`` it, perhaps after the update.

    They are other nodes than that which makes the update. What only moves the state's elements counts as reading on:
    onnxruntime fuses it into what reads it.
    """
    proof = _Reads([each.node for each in rows], [each.reads for each in rows], within, _COMPUTES - _MOVES)
    readers = [proof.readers_of(state)[0] for state, _ in pairs]
    targets = {proof.producer[output] for _, output in pairs}
    earlier = proof.ancestors({index for found in readers for index in found}, targets)
    late: list[list[onnx.NodeProto]] = []
    for (_, output), found in zip(pairs, readers, strict=True):
        producer = proof.producer[output]
        behind = [i for i in found if i != producer and not earlier[producer] >> proof.bit[i] & 1]
        late.append([node for i in behind if (node := proof.nodes[i]).op_type not in _MOVES])
    return late


def inputs_within(states: Sequence[Port]) -> dict[str, list[str]]:
    """Of each flat state input: the inputs whose memory is part of its own."""
    tensors = {port.variable: port.tensor for port in states}
    return {
        port.tensor: [tensors[s.variable] for s in port.segments if s.variable in tensors]
        for port in states
        if port.segments
    }


class _Reads:
    """Nodes in order, read for who reads the states and what comes before what."""

    def __init__(
        self,
        nodes: Sequence[onnx.NodeProto],
        reads: Sequence[Collection[str]],
        within: Mapping[str, Sequence[str]],
        computes: frozenset[str],
        ends: Sequence[int] = (),
    ) -> None:
        """``reads``: what each node reads ("" is nothing). ``computes``: operators that hand no memory on."""
        self.nodes, self.reads, self.within, self.computes = nodes, reads, within, computes
        self.part = [bisect_right(ends, index) for index in range(len(nodes))] if ends else [0] * len(nodes)
        self.producer: dict[str, int] = {}
        self.readers: dict[str, list[int]] = {}
        self.bit: dict[int, int] = {}
        self.own_memory: dict[int, bool] = {}  # by node that has been asked
        for index, (node, names) in enumerate(zip(nodes, reads, strict=True)):
            for name in filter(None, names):
                self.readers.setdefault(name, []).append(index)
            self.producer.update((name, index) for name in node.output if name)

    def readers_of(self, state: str) -> tuple[list[int], set[str]]:
        """The nodes that read the state's memory, and every tensor that may be that memory."""
        queue, found = [state, *self.within.get(state, ())], dict[int, None]()
        views = set(queue)
        while queue:
            for index in self.readers.get(queue.pop(), ()):
                if index in found:
                    continue
                found[index] = None
                node = self.nodes[index]
                if index not in self.own_memory:
                    self.own_memory[index] = self._computes(node)
                if not self.own_memory[index]:
                    new = set(node.output) - views - {""}
                    views |= new
                    queue.extend(new)
        return list(found), views

    def _computes(self, node: onnx.NodeProto) -> bool:
        """Whether each output has memory of its own."""
        if _holds_graphs(node):
            ends = [(graph, {info.name for info in graph.output}) for graph in nested_graphs(node)]
            makers = [inner for graph, names in ends for inner in graph.node if not names.isdisjoint(inner.output)]
            return all(inner.op_type == "Identity" or self._computes(inner) for inner in makers)
        return node.op_type in self.computes and node.domain in _DOMAINS and not any(nested_graphs(node))

    def ancestors(self, wanted: set[int], targets: set[int]) -> dict[int, int]:
        """For each target node, a bit for each of the wanted nodes of its part that is an ancestor of it.

        ``wanted`` nodes get their bits in the graph's order; a node's bits are dropped after its last reader.
        """
        numbers = [count() for _ in range(max(self.part, default=0) + 1)]
        self.bit = {index: next(numbers[self.part[index]]) for index in sorted(wanted)}
        last = {name: max(indices) for name, indices in self.readers.items()}
        above: dict[str, int] = {}  # tensors still to be read
        result: dict[int, int] = {}
        expiring: dict[int, list[str]] = {}
        for index, node in enumerate(self.nodes):
            if index and self.part[index] != self.part[index - 1]:
                above.clear()
            bits = 0
            for name in self.reads[index]:
                bits |= above.get(name, 0)
            if index in targets:
                result[index] = bits
            if index in self.bit:
                bits |= 1 << self.bit[index]
            for name in node.output:
                if last.get(name, -1) > index:
                    above[name] = bits
                    expiring.setdefault(last[name], []).append(name)
            for name in expiring.pop(index, ()):
                above.pop(name, None)
        return result


class _Proof(_Reads):
    """A graph, for which state may be written where it lies."""

    is_nested = False

    def __init__(self, graph: onnx.GraphProto, within: Mapping[str, Sequence[str]], ends: Sequence[int] = ()) -> None:
        nodes = list(graph.node)
        super().__init__(nodes, [used_tensors([node]) for node in nodes], within, _COMPUTES, ends)
        self.types = {
            info.name: info.type.SerializeToString() for info in [*graph.input, *graph.output] if _static(info)
        }

    def answer(self, pairs: Sequence[tuple[str, str]]) -> list[str]:
        readers = [self.readers_of(state) for state, _ in pairs]
        targets = {self.producer[output] for _, output in pairs if output in self.producer}
        earlier = self.ancestors({index for found, _ in readers for index in found}, targets)
        inside = self._inside(pairs, [views for _, views in readers])
        return [
            self._check(state, output, *found, earlier) or inside.get((state, output), "")
            for (state, output), found in zip(pairs, readers, strict=True)
        ]

    def _inside(self, pairs: Sequence[tuple[str, str]], views: Sequence[set[str]]) -> dict[tuple[str, str], str]:
        """Of pairs whose update an If or a Scan makes that reads the state, why a graph of it refuses."""
        by_node: dict[int, dict[tuple[str, str], set[str]]] = {}
        for (state, output), same in zip(pairs, views, strict=True):
            index = self.producer.get(output, -1)
            if index >= 0 and _holds_graphs(self.nodes[index]) and not same.isdisjoint(self.reads[index]):
                by_node.setdefault(index, {})[state, output] = same
        found: dict[tuple[str, str], str] = {}
        for index, its in by_node.items():
            node = self.nodes[index]
            for graph in nested_graphs(node):
                names = {out: info.name for out, info in zip(node.output, graph.output, strict=True)}
                if node.op_type == "Scan":
                    names |= {read: info.name for read, info in zip(node.input, graph.input, strict=True)}
                inner = [(names.get(state, state), names[output]) for state, output in its]
                within = {names.get(state, state): [*same - {state}] for (state, _), same in its.items()}
                body = _Proof(graph, within)
                body.is_nested = True
                body.types |= {name: b"" for pair in inner for name in pair}  # the node was asked
                found |= {pair: answer for pair, answer in zip(its, body.answer(inner), strict=True) if answer}
        return found

    def _check(self, state: str, output: str, readers: list[int], views: set[str], earlier: dict[int, int]) -> str:
        producer = self.producer.get(output)
        if producer is None:
            return f"no node produces '{output}'"
        if self.types.get(state) is None or self.types.get(state) != self.types.get(output):
            return "its type or shape is not known to stay as it is"
        bits, part = earlier[producer], self.part[producer]
        for index in readers:
            runs_before = bits >> self.bit[index] & 1 if self.part[index] == part else self.part[index] < part
            if index != producer and not runs_before:
                return f"{_label(self.nodes[index])} may read it after the update"
        node = self.nodes[producer]
        if producer not in readers or (node.op_type == "If" and not node.domain):
            return ""
        slots = [slot for slot, name in enumerate(node.input) if name in views]
        if _walks_alike(node) and [node.input[slot] for slot in slots] == [state]:
            whole = any(views & used_tensors(body.node) for body in nested_graphs(node))  # not the slice alone
            return f"{_label(node)}, which makes the update, reads more of it than a slice" if whole else ""
        direct = all(node.input[slot] == state for slot in slots)
        if self.is_nested and node.op_type == "Identity":  # without aliases there: it copies the state onto itself
            return ""
        if not direct or not set(slots) <= set(_ELEMENTWISE.get((plain_domain(node.domain), node.op_type), ())):
            return f"{_label(node)}, which makes the update, is not elementwise in it"
        return ""


def _holds_graphs(node: onnx.NodeProto) -> bool:
    return node.op_type in ("If", "Scan") and not node.domain


def _walks_alike(node: onnx.NodeProto) -> bool:
    """Whether a Scan walks over all that it reads and writes in one way, along the first axis, and carries nothing."""
    numbers = {a.name: a.i for a in node.attribute if a.type == a.INT}
    plain = {a.name for a in node.attribute} == {"body", "num_scan_inputs"}
    return node.op_type == "Scan" and not node.domain and plain and numbers["num_scan_inputs"] == len(node.input)


def _static(info: onnx.ValueInfoProto) -> bool:
    tensor = info.type.tensor_type
    return tensor.HasField("shape") and all(d.HasField("dim_value") for d in tensor.shape.dim)


def _label(node: onnx.NodeProto) -> str:
    return f"{node.op_type} '{node.name or next(iter(node.output), '')}'"
