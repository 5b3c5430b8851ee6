"""Roundings that a run can leave out: the CPU lowering of a converted program, with a switch for each.

In the lowered model every 16-bit tensor is an fp32 one that was rounded. Here each operator that reads one chooses,
by a graph input, between the rounded tensor and the one before rounding, and every 16-bit constant that it reads is
a graph input as well. So one session shows what the program gives with any choice of operators in fp32.

A tensor is stored in 16 bit unless the operator that makes it and the one that reads it both run in fp32.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import onnx

from amp_transpiler.ir.control import nested_graphs
from amp_transpiler.ir.nodes import Operator, Variable, origin
from amp_transpiler.ir.types import HALF, NAMES, ONNX_TYPES
from amp_transpiler.lists import plain_domain
from amp_transpiler.passes.lowering.lowered import Lowered, Port, live, rename_tensors, row, used_tensors
from amp_transpiler.passes.view.names import source
from amp_transpiler.passes.view.typing import is_float

#: Tags of operators beside the numbers of those that can be switched: runs in fp32; stores 16 bit whatever is chosen.
FULL, FIXED = -1, -2


@dataclass
class Switches:
    """The inputs that were added to a lowered model, among its states.

    ``roundings``: a boolean, and the operators that have to run in fp32 for it to be true (the rounding left out).
    ``weights``: a float32 tensor, the 16-bit constant of the program that it stands for, and the operator that reads
    it; unrounded where that runs in fp32.
    """

    roundings: dict[str, frozenset[int]] = field(default_factory=dict)
    weights: dict[str, tuple[str, int]] = field(default_factory=dict)


def neighbours(operators: Iterable[Operator]) -> dict[Operator, list[Operator | None]]:
    """Of each operator of a converted program, the makers of the floating-point tensors that it reads, inserted casts
    looked through; None for what is fed, and where there are constants alone. An operator with nested graphs reads what
    they give, and makes what it hands in.
    """
    found: dict[Operator, list[Operator | None]] = {}
    for op in operators:
        given = [v for nested in op.attrs.programs for v in nested.outputs]
        read = [source(v) for v in (*op.inputs, *given) if v is not None and is_float(v)]
        makers = [v.producer or v.program.parent for v in read if v.data is None and not _made_constant(v)]
        found[op] = makers or [None]
    return found


def constant_pairs(pairs: Iterable[tuple[Operator, Operator]]) -> dict[str, Variable]:
    """The 16-bit constants that converted operators read, by name, and the fp32 variable that each was.

    ``pairs``: every operator of the fp32 program, nested ones too, and what became of it.
    """
    found: dict[str, Variable] = {}
    for before, after in pairs:
        for old, new in zip(before.inputs, after.inputs, strict=True):
            if old is None or new is None or new.dtype not in HALF:
                continue
            old, new = origin(old), origin(new)
            if old.dtype == "float32" and (new.data is not None or _made_constant(new)):
                found[new.name] = old
    return found


def _made_constant(variable: Variable) -> bool:
    return variable.producer is not None and variable.producer.type == "Constant"


def add_switches(lowered: Lowered, dtype: str, tags: Mapping[str, int], constants: Collection[str]) -> Switches:
    """Let the roundings of a model that was lowered for the CPU be switched, in place.

    Args:
        lowered: of opset 9 or later.
        dtype: the 16-bit type.
        tags: by the name of what an operator makes, its number; or FULL, FIXED.
        constants: names of the 16-bit constants that may be unrounded.
    """
    return _Switching(lowered, dtype, tags, constants).run()


class _Switching:
    def __init__(self, lowered: Lowered, dtype: str, tags: Mapping[str, int], constants: Collection[str]) -> None:
        self.lowered, self.dtype, self.tags = lowered, dtype, tags
        self.graph = lowered.model.graph
        self.constants = constants
        self.found = Switches()
        self.nodes: list[onnx.NodeProto] = []
        #: By the fp32 tensor that emulates a 16-bit one: its operator; the tensor before rounding, and after it.
        self.made: dict[str, int] = {}
        self.exact: dict[str, str] = {}
        self.rounded: dict[str, str] = {}
        self.narrow: dict[str, str] = {}
        self.chosen: dict[tuple[str, frozenset[int]], str] = {}
        shapes = {t.name: tuple(t.dims) for t in self.graph.initializer}
        emulated = {name: name for name in constants if name in shapes}
        emulated |= {lowered.tensors[name].name: name for name in constants if name in lowered.tensors}
        self.weights = emulated
        self.serial = 0

    def run(self) -> Switches:
        nodes = list(self.graph.node)
        origins = [*self.lowered.origins, *[None] * (len(nodes) - len(self.lowered.origins))]
        for node, op in zip(nodes, origins, strict=True):
            self._node(node, op, self._tag(op))
            for variable in op.outputs if op is not None else ():  # held in fp32 without having been rounded here
                if variable is not None and variable.dtype in HALF and variable.name in self.lowered.tensors:
                    name = self.lowered.tensors[variable.name].name
                    if name in node.output:
                        self.made.setdefault(name, self._tag(op))
        self._outputs()
        self.nodes = [each.node for each in live([*map(row, self.nodes)], {info.name for info in self.graph.output})]
        used = used_tensors(self.nodes)
        initializers = [t for t in self.graph.initializer if t.name in used]
        del self.graph.node[:], self.graph.initializer[:]
        self.graph.node.extend(self.nodes)
        self.graph.initializer.extend(initializers)
        self.lowered.origins = []
        return self.found

    def _tag(self, op: Operator | None) -> int:
        if op is None or op.inserted:
            return FULL
        names = [v.name for v in op.outputs if v is not None]
        known = [self.tags[name] for name in names if name in self.tags]
        if known:
            return known[0]
        return FIXED if any(v is not None and v.dtype in HALF for v in op.outputs) else FULL

    def _node(self, node: onnx.NodeProto, op: Operator | None, tag: int) -> None:
        """Take a node over: let it and its nested graphs choose what they read, and note the 16-bit tensor it makes."""
        for slot, name in enumerate(node.input):
            if self._carries(name):
                node.input[slot] = self._chosen(name, tag)
        for graph in nested_graphs(node):
            self._nested(graph, tag)
        self.nodes.append(node)
        to = _target(node)
        if to in HALF:
            self.narrow[node.output[0]] = node.input[0]
        elif to == "float32" and node.input[0] in self.narrow:
            constant = op.outputs[0] if op is not None and op.type == "Constant" else None
            if constant is not None and constant.name in self.constants:
                self.weights[node.output[0]] = constant.name
            self.made[node.output[0]] = tag
            self.exact[node.output[0]] = self.narrow[node.input[0]]

    def _carries(self, name: str) -> bool:
        return name in self.made or name in self.weights

    def _chosen(self, name: str, reader: int) -> str:
        """What an operator reads of a 16-bit tensor."""
        if name in self.weights:
            return self._weight(name, reader) if reader >= 0 else name
        maker = self.made[name]
        if FIXED in (maker, reader):
            return self._rounded(name)
        units = frozenset(tag for tag in (maker, reader) if tag != FULL)
        if not units:
            return name
        if (name, units) not in self.chosen:
            exact = self._emit("Cast", self.exact[name], to="float32") if name in self.exact else name
            self.chosen[name, units] = self._emit("Where", self._switch(units), exact, self._rounded(name))
        return self.chosen[name, units]

    def _rounded(self, name: str) -> str:
        if name in self.exact:
            return name
        if name not in self.rounded:
            self.rounded[name] = self._emit("Cast", self._emit("Cast", name, to=self.dtype), to="float32")
        return self.rounded[name]

    def _weight(self, name: str, reader: int) -> str:
        tensor = f"@weight/{reader}/{name}"
        if tensor not in self.found.weights:
            self.found.weights[tensor] = (self.weights[name], reader)
            self._input(tensor, "float32", None)
        return tensor

    def _switch(self, units: frozenset[int]) -> str:
        tensor = "@exact/" + "/".join(map(str, sorted(units)))
        if tensor not in self.found.roundings:
            self.found.roundings[tensor] = units
            self._input(tensor, "bool", ())
        return tensor

    def _input(self, tensor: str, dtype: str, shape: tuple[int, ...] | None) -> None:
        self.graph.input.append(onnx.helper.make_tensor_value_info(tensor, ONNX_TYPES[dtype], shape))
        self.lowered.states.append(Port(tensor, tensor, dtype, shape))

    def _nested(self, graph: onnx.GraphProto, around: int) -> None:
        """The same within a nested graph; what it gives is read by the operator that holds it."""
        saved = self.nodes, dict(self.chosen), dict(self.rounded)  # what is made within is not known outside
        self.nodes = []
        self.made.update((info.name, around) for info in graph.input if info.name in self.lowered.inner)
        for node in list(graph.node):
            op = self.lowered.inner.get(node.output[0])
            self._node(node, op, around if op is None else self._tag(op))
            if op is not None and node.op_type == op.type and len(node.output) == len(op.outputs):
                for name, variable in zip(node.output, op.outputs, strict=True):
                    if variable is not None and variable.dtype in HALF and _target(node) not in HALF:
                        self.made.setdefault(name, self._tag(op))
        del graph.node[:]
        graph.node.extend(self.nodes)
        self.nodes, self.chosen, self.rounded = saved

    def _outputs(self) -> None:
        """Outputs in fp32 choose as readers do."""
        names = [info.name for info in self.graph.output if self._carries(info.name)]
        for name in names:
            chosen = self._chosen(name, FULL)
            made = f"{name}@made"
            rename_tensors(self.nodes, {name: made})
            self.nodes.append(onnx.helper.make_node("Identity", [made if chosen == name else chosen], [name]))

    def _emit(self, type_: str, *inputs: str, to: str | None = None) -> str:
        self.serial += 1
        name = f"@{type_}/{self.serial}"
        node = onnx.helper.make_node(type_, list(inputs), [name], name)
        if to is not None:
            node.attribute.append(onnx.helper.make_attribute("to", ONNX_TYPES[to]))
        self.nodes.append(node)
        return name


def _target(node: onnx.NodeProto) -> str:
    """The element type to which a node casts; "" for other nodes."""
    if node.op_type != "Cast" or plain_domain(node.domain):
        return ""
    return next((NAMES.get(attribute.i, "") for attribute in node.attribute if attribute.name == "to"), "")
