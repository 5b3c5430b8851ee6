"""When each tensor of a lowered model lives, as onnxruntime plans it; no session is made.

The graph is taken as its optimiser leaves it where memory is concerned: what reads constants alone is a constant,
Identity vanishes, equal subexpressions are one. Then, as in onnxruntime:

- nodes run in its default order, a depth-first walk from the nodes that nothing reads, the last one first, that
  visits the producers of a node's inputs from the last one on;
- views share the buffer of their input; some kernels write over an input that nobody reads any more (that a new tensor
  takes the buffer of a dead one, which stays allocated in between, sessions are made without);
- a buffer is freed after its last reader. Graph inputs and constants are held by others all the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import onnx

from amp_transpiler.ir.kernel_cost import tensor_bytes
from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.ir.types import BYTES
from amp_transpiler.lists import place_traits
from amp_transpiler.ops.common import exchanges_matrices
from amp_transpiler.passes.lowering.lowered import Lowered, used_tensors
from amp_transpiler.passes.lowering.tensor_types import Type, inferred, types_in, unsized
from amp_transpiler.passes.lowering.workspace import workspace

_OWN_STATISTICS = {1: 3, 2: 4}  # BatchNormalization in training mode: output -> the input that it writes over
_BLOCK = 8  # channels that the CPU's own layout keeps together
_POOLS = frozenset({"MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool"})


@dataclass
class Node:
    """One node as it runs. ``index`` is its number in the model."""

    index: int
    proto: onnx.NodeProto
    inputs: list[str]
    outputs: list[str]


@dataclass
class Buffer:
    """Memory that one tensor or several share in turn. ``first`` and ``last`` are steps of the order."""

    size: int
    tensors: list[str]
    first: int
    last: int


@dataclass
class Liveness:
    """The plan of one graph: its nodes in the order in which they run, and the buffers that they allocate.

    ``tensors`` gives element type and shape of every tensor, ``spans`` the steps from which and to which one that a
    node makes is needed, ``constants`` those known before the run (folded ones included), ``workspace`` the bytes that
    a step takes beside its tensors, piece by piece.
    """

    order: list[Node]
    buffers: list[Buffer]
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    spans: dict[str, tuple[int, int]]
    constants: set[str]
    workspace: list[tuple[int, ...]]
    #: Names that stand for another tensor: of Identity, and of equal subexpressions.
    merged: dict[str, str] = field(default_factory=dict)

    def totals(self) -> list[int]:
        """Bytes of live buffers and workspace at each step."""
        change = [0] * (len(self.order) + 1)
        for buffer in self.buffers:
            change[buffer.first] += buffer.size
            change[buffer.last + 1] -= buffer.size
        live, totals = 0, []
        for step, extra in enumerate(self.workspace):
            live += change[step]
            totals.append(live + sum(extra))
        return totals

    def live_at(self, step: int) -> list[Buffer]:
        """The buffers allocated while a step runs, the largest first."""
        found = [b for b in self.buffers if b.first <= step <= b.last]
        return sorted(found, key=lambda b: -b.size)


def plan(lowered: Lowered, types: dict[str, Type] | None = None) -> Liveness:
    """The plan for what a place runs; updates of state take no memory of their own.

    ``types``: of the model's tensors, where the caller has them already. GraphError names a tensor whose shape is not
    known before the run.
    """
    return _Planner(lowered, types_in(inferred(lowered)) if types is None else types).run()


class _Planner:
    def __init__(self, lowered: Lowered, types: dict[str, Type]) -> None:
        model = lowered.model
        self.graph, self.at = model.graph, place_traits(lowered.place)
        self.bound = {port.tensor for port in lowered.updates}
        self.types = dict(types)
        self.outputs = {info.name for info in model.graph.output}
        self.constants = {tensor.name for tensor in model.graph.initializer}
        self.inputs = {info.name for info in model.graph.input} - self.constants
        self.merged: dict[str, str] = {}

    def run(self) -> Liveness:
        nodes = self._simplified()
        order = _order(self._blocked(self._fused(nodes)))
        buffers = _Buffers(self, order).run()
        names = {n for b in buffers for n in b.tensors} | self.constants | self.inputs | self.outputs
        tensors = {name: self.tensor(name) for name in sorted(names) if name in self.types}
        taken = [
            workspace(node.proto, node.inputs, node.outputs, self.tensor) if self.at.host else () for node in order
        ]
        return Liveness(order, buffers, tensors, _spans(order, self.outputs), self.constants, taken, self.merged)

    def tensor(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Element type and shape; GraphError where the shape is not fixed."""
        found = self.types.get(name)
        if found is None or found[1] is None:
            raise unsized(name, self.graph.node, self.types)
        return found[0], found[1]

    # -- what the optimiser does ---------------------------------------------------------------------
    def _simplified(self) -> list[Node]:
        """The nodes without constant ones, Identity and repetitions: of equal ones the first that would run stays."""
        protos = [Node(i, p, sorted(used_tensors([p])), list(p.output)) for i, p in enumerate(self.graph.node)]
        known: dict[tuple[object, ...], list[str]] = {}
        nodes = []
        for node in _order(protos):
            proto, outputs = node.proto, node.outputs
            inputs = [self.merged.get(name, name) for name in proto.input]
            nested = any(a.HasField("g") or a.graphs for a in proto.attribute)
            kept = nested or any(name in self.outputs for name in outputs)
            kept |= traits_of(proto.op_type, proto.domain).random
            if not kept and all(not n or n in self.constants for n in inputs):
                self.constants.update(name for name in outputs if name)
                continue
            if proto.op_type == "Identity" and not kept:
                self.merged[outputs[0]] = inputs[0]
                continue
            attributes = tuple(sorted(a.SerializeToString(deterministic=True) for a in proto.attribute))
            key = (proto.op_type, proto.domain, attributes, tuple(inputs), tuple(bool(o) for o in outputs))
            if not kept and key in known:
                self.merged.update(zip(outputs, known[key], strict=True))
                continue
            known.setdefault(key, outputs)
            if nested:
                inputs += sorted(self.merged.get(name, name) for name in used_tensors([proto]) - set(proto.input))
            nodes.append(Node(node.index, proto, inputs, outputs))
        return sorted(nodes, key=lambda node: node.index)

    def _fused(self, nodes: list[Node]) -> list[Node]:
        """The nodes without transpositions that a matrix product takes on itself, and with a bias inside its product.

        What is made of two nodes comes behind all others, those with a bias first: so onnxruntime numbers them, and
        orders by number.
        """
        readers: dict[str, list[Node]] = {}
        for node in nodes:
            for name in node.inputs:
                readers.setdefault(name, []).append(node)
        gone: set[int] = set()
        biased: dict[int, Node] = {}
        turned: dict[int, Node] = {}
        for node in nodes:
            read = readers.get(node.outputs[0], []) if len(node.outputs) == 1 else []
            if node.outputs[0] in self.outputs or not read:
                continue
            if self._turned(node) and all(reader.proto.op_type == "MatMul" for reader in read):
                gone.add(node.index)
                turned |= {reader.index: reader for reader in read}
                for reader in read:
                    reader.inputs = [node.inputs[0] if name == node.outputs[0] else name for name in reader.inputs]
            elif node.proto.op_type == "MatMul" and len(read) == 1 and self._biased(node, read[0]):
                gone.add(read[0].index)
                biased[node.index] = node
                node.inputs.append(next(name for name in read[0].inputs if name != node.outputs[0]))
                node.outputs = list(read[0].outputs)
        turned = {index: node for index, node in sorted(turned.items()) if index not in biased}
        kept = [node for node in nodes if node.index not in gone | biased.keys() | turned.keys()]
        return [*kept, *biased.values(), *turned.values()]

    def _turned(self, node: Node) -> bool:
        """Whether a node swaps the last two axes and nothing else."""
        if node.proto.op_type != "Transpose" or self.types[node.inputs[0]][0] != "float32":
            return False
        return exchanges_matrices(_axes(node) or range(len(self._shape(node.inputs[0])))[::-1])

    def _biased(self, product: Node, add: Node) -> bool:
        """Whether a matrix product and the sum of it with a row run as one."""
        if add.proto.op_type != "Add" or add.outputs[0] in self.outputs or len(set(add.inputs)) != 2:
            return False
        row = next(name for name in add.inputs if name != product.outputs[0])
        width = self._shape(product.outputs[0])[-1:]
        return all(len(self._shape(name)) == 2 for name in product.inputs) and self._shape(row) == width

    def _blocked(self, nodes: list[Node]) -> list[Node]:
        """The nodes with the copies from and to blocks of channels, in which pooling runs on CPU.

        The blocked input serves every pooling of one tensor, those of the backward pass too. New nodes come last.
        """
        ins: dict[str, str] = {}
        pooled: set[str] = set()
        outs: list[Node] = []
        pools: list[Node] = []
        for node in nodes if self.at.host else ():
            if node.proto.op_type == "Transpose" and node.inputs[0] in pooled and _axes(node) == [0, 2, 3, 1]:
                node.inputs = [ins[node.inputs[0]]]  # the copy from blocks makes this order of axes too
                outs.append(node)
            if node.proto.op_type not in _POOLS or len(node.outputs) > 1 or node.outputs[0] in self.outputs:
                continue
            plain, result = node.inputs[0], node.outputs[0]
            if len(shape := self._shape(plain)) != 4 or shape[1] % _BLOCK:
                continue
            if plain not in ins:
                ins[plain] = self._copy(plain)
                copy = onnx.NodeProto(op_type="ReorderInput", name=ins[plain])
                pools.append(Node(node.index, copy, [plain], [ins[plain]]))
            pooled.add(result)
            ins[result] = self._copy(result)  # a pooling of a pooled tensor stays in blocks
            outs.append(Node(node.index, onnx.NodeProto(op_type="ReorderOutput", name=result), [ins[result]], [result]))
            pools.append(Node(node.index, node.proto, [ins[plain]], [ins[result]]))
        gone = {node.index for node in outs}
        kept = [node for node in nodes if node.index not in gone]
        read = {name for node in (*kept, *pools) for name in node.inputs} | self.outputs
        return [*kept, *pools, *(node for node in outs if node.outputs[0] in read)]

    def _copy(self, name: str) -> str:
        self.types[f"{name}/blocked"] = self.types[name]
        return f"{name}/blocked"

    def bytes_of(self, name: str) -> int:
        """Bytes of a tensor; 0 for one that is left out or of no known type."""
        return tensor_bytes(self.tensor(name)) if name and name in self.types else 0

    def _shape(self, name: str) -> tuple[int, ...]:
        return self.tensor(name)[1]


def _axes(node: Node) -> list[int] | None:
    return next((list(a.ints) for a in node.proto.attribute if a.name == "perm"), None)


def _order(nodes: Sequence[Node]) -> list[Node]:
    """onnxruntime's default order of nodes."""
    producer = {name: i for i, node in enumerate(nodes) for name in node.outputs if name}
    sources = [sorted({producer[name] for name in node.inputs if name in producer}) for node in nodes]
    read = {i for found in sources for i in found}
    stack = [(i, False) for i in range(len(nodes)) if i not in read]
    visited: set[int] = set()
    order = []
    while stack:
        i, leave = stack.pop()
        if leave:
            order.append(nodes[i])
        elif i not in visited:
            visited.add(i)
            stack.append((i, True))
            stack.extend((source, False) for source in sources[i] if source not in visited)
    return order


def _spans(order: Sequence[Node], outputs: set[str]) -> dict[str, tuple[int, int]]:
    spans: dict[str, tuple[int, int]] = {}
    for step, node in enumerate(order):
        spans.update((name, (spans[name][0], step)) for name in node.inputs if name in spans)
        spans.update((name, (step, len(order) - 1 if name in outputs else step)) for name in node.outputs if name)
    return spans


class _Buffers:
    """Which tensor gets which buffer."""

    def __init__(self, planner: _Planner, order: Sequence[Node]) -> None:
        self.planner, self.order = planner, order
        self.uses: dict[str, int] = {}
        self.owner: dict[str, str] = {}  # tensor -> the tensor whose buffer it has
        self.buffers: dict[str, Buffer] = {}

    def run(self) -> list[Buffer]:
        for node in self.order:
            for name in filter(None, node.inputs):
                self.uses[name] = self.uses.get(name, 0) + 1
        for name in (*self.planner.inputs, *self.planner.constants, *self.planner.outputs):
            self.uses[name] = self.uses.get(name, 0) + 1
        for name in (*self.planner.inputs, *self.planner.constants):
            self.owner[name] = name
        for step, node in enumerate(self.order):
            for slot, name in enumerate(node.outputs):
                if name:
                    self._place(step, node, slot, name)
            self._release(step, [name for name in node.inputs if name])
        for name in self.planner.outputs:
            owner = self.owner.get(name)
            if owner in self.buffers:
                self.buffers[owner].last = len(self.order) - 1
        return list(self.buffers.values())

    def _place(self, step: int, node: Node, slot: int, name: str) -> None:
        """Choose the buffer of one output."""
        if name in self.planner.outputs:
            self.owner[name] = name
            if name not in self.planner.bound:
                self.buffers[name] = Buffer(self.planner.bytes_of(name), [name], step, step)
            return
        reused = self._reused_input(node, slot, name)
        if reused is None:
            self.owner[name] = name
            self.buffers[name] = Buffer(tensor_bytes(self.planner.tensor(name)), [name], step, step)
            return
        self.owner[name] = reused
        self.uses[reused] = self.uses.get(reused, 0) + self.uses.get(name, 0)
        if reused in self.buffers:
            self.buffers[reused].tensors.append(name)
            self.buffers[reused].last = step

    def _reused_input(self, node: Node, slot: int, name: str) -> str | None:
        type_ = node.proto.op_type
        if slot == 0 and traits_of(type_, node.proto.domain).view:
            return self.owner[node.inputs[0]]
        if type_ == "BatchNormalization" and slot in _OWN_STATISTICS:
            return self.owner[node.inputs[_OWN_STATISTICS[slot]]]
        if slot == 0 and type_ in self.planner.at.over_first:
            first = node.inputs[0]
            if self.uses[self.owner[first]] == 1 and self._like(first) == self._like(name):
                return self.owner[first]
        return None

    def _like(self, name: str) -> tuple[tuple[int, ...], int]:
        type_, shape = self.planner.tensor(name)
        return shape, BYTES.get(type_, 1)

    def _release(self, step: int, names: Sequence[str]) -> None:
        for name in names:
            owner = self.owner.get(name, name)
            if owner in self.buffers:
                self.buffers[owner].last = max(self.buffers[owner].last, step)
            self.uses[owner] -= 1
