"""What lowering gives: the model that a place runs, and which tensor of it is which variable."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx

from amp_transpiler.ir.control import CONTROL, nested_graphs
from amp_transpiler.ir.emitter import Value
from amp_transpiler.ir.flat import Segment
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.infer import type_proto
from amp_transpiler.ir.nodes import Operator, Shape, Variable
from amp_transpiler.ir.serializing import write_model
from amp_transpiler.ir.types import HALF, NAMES

_TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype")


@dataclass(frozen=True)
class Port:
    """A graph input or output of the lowered model: a program variable and its tensor there.

    A flat one holds several variables: ``segments`` says where each lies, and ``variable`` is a name for all of them.
    ``holds``: the variable's element type where the tensor has another, which has its values (64-bit integers in 32;
    sequences of 16-bit tensors in fp32).
    """

    variable: str
    tensor: str
    dtype: str
    shape: tuple[int | str | None, ...] | None = None
    segments: tuple[Segment, ...] = ()
    holds: str = ""


@dataclass
class Lowered:
    """What a place runs. ``feeds`` and ``states`` are graph inputs, ``fetches`` and ``updates`` outputs.

    ``updates`` name the state that takes the tensor's value after the step. A variable that lies in a flat state and is
    an input of its own too has one memory for both. ``scalars`` are graph inputs
    of constant zeros (a run-time zero cannot be folded into megabytes of constants). ``tensors`` says which tensor is
    which variable of the program, with its shape where that is fixed, ``origins`` which operator a node comes from
    (None: none; nodes at the end are left out); ``inner`` says that of nodes in nested graphs, by what they make,
    and which operator hands in a 16-bit input of such a graph. ``joined_through`` says of tensors that are part of a
    flat one, and perhaps not in the model by themselves, which one that is, and what each was made of. ``given`` has
    tensors of known shape that a node makes whose inputs say that shape. ``tensor_cores``: it has 16-bit
    convolutions on CUDA, and nothing that TF32 would round. ``decided``: tensors whose sizes data decide; ``sized``
    then has numbers in the place of all sizes that follow, about as large as they can be, for forecasts.
    """

    model: onnx.ModelProto
    place: str
    feeds: list[Port] = field(default_factory=list)
    states: list[Port] = field(default_factory=list)
    fetches: list[Port] = field(default_factory=list)
    updates: list[Port] = field(default_factory=list)
    scalars: list[str] = field(default_factory=list)
    tensors: dict[str, Value] = field(default_factory=dict)
    origins: list[Operator | None] = field(default_factory=list)
    inner: dict[str, Operator] = field(default_factory=dict)
    joined_through: dict[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    given: dict[str, Value] = field(default_factory=dict)
    tensor_cores: bool = False
    decided: list[str] = field(default_factory=list)
    sized: Lowered | None = None

    def to_onnx(self, path: str) -> None:
        """Write the model; it appears whole or not at all."""
        write_model(self.model, path)


def needed(program: Graph, targets: Sequence[Variable]) -> list[Operator]:
    """Operators that the targets depend on, in the program's order; one reverse sweep."""
    wanted = {v.key for v in targets}
    kept = []
    for op in reversed(program.operators):
        if any(v is not None and v.key in wanted for v in op.outputs):
            kept.append(op)
            wanted.update(v.key for v in op.inputs if v is not None)
            wanted.update(v.key for v in op.captures)
    return kept[::-1]


@dataclass(slots=True)
class Row:
    """A node, and what it reads (by graphs nested in it too) and makes: reading that off a node takes a while.

    ``origin``: the operator that it comes from.
    """

    node: onnx.NodeProto
    origin: Operator | None
    reads: Collection[str]
    makes: list[str]


def row(node: onnx.NodeProto, origin: Operator | None = None) -> Row:
    """The row of a node."""
    plain = not node.domain and node.op_type not in CONTROL
    return Row(node, origin, list(node.input) if plain else used_tensors([node]), list(node.output))


def live(rows: Sequence[Row], outputs: set[str]) -> list[Row]:
    """The rows that the outputs depend on; one reverse sweep.

    A rule may compute what nobody asked it for, or a gradient read an activation for its shape alone; onnxruntime
    runs such nodes.
    """
    wanted = set(outputs)
    kept: list[Row] = []
    for each in reversed(rows):
        if not wanted.isdisjoint(each.makes):
            kept.append(each)
            wanted.update(each.reads)
    return kept[::-1]


def renamed(rows: Sequence[Row], names: Mapping[str, str]) -> list[Row]:
    """The rows with tensors renamed, in the graphs nested in nodes too."""
    found: list[Row] = []
    for each in rows:
        if not (names.keys().isdisjoint(each.reads) and names.keys().isdisjoint(each.makes)):
            rename_tensors([each.node], names)
            each = row(each.node, each.origin)
        found.append(each)
    return found


def emulated_type(proto: onnx.TypeProto) -> None:
    """Turn the 16-bit tensors of a type into the fp32 ones that emulate them on CPU."""
    kind = proto.WhichOneof("value")
    if kind in ("tensor_type", "sparse_tensor_type"):
        tensor = getattr(proto, kind)
        if NAMES.get(tensor.elem_type) in HALF:
            tensor.elem_type = onnx.TensorProto.FLOAT
    elif kind in ("sequence_type", "optional_type"):
        emulated_type(getattr(proto, kind).elem_type)


def nested_type(variable: Variable, cpu: bool) -> onnx.TypeProto:
    """The type of an input or output of a nested graph, as the place stores it."""
    if variable.type_proto is None:
        return type_proto("float32" if cpu and variable.dtype in HALF else variable.dtype, variable.shape)
    proto = onnx.TypeProto()
    proto.CopyFrom(variable.type_proto)
    if cpu:
        emulated_type(proto)
    return proto


def output_type(variable: Variable, dtype: str | None, shape: Shape | None, cpu: bool) -> onnx.TypeProto:
    """The type of an output that holds a variable in element type ``dtype``; a sequence as the place stores it."""
    no_tensor = variable.dtype is None and variable.type_proto is not None
    return nested_type(variable, cpu) if no_tensor else type_proto(dtype, shape)


def half_sequence(variable: Variable, cpu: bool) -> str:
    """The 16-bit type of the tensors of a sequence, which are fp32 on CPU; "" for anything else."""
    kind = variable.type_proto if variable.dtype is None and cpu else None
    if kind is None or kind.WhichOneof("value") != "sequence_type":
        return ""
    found = NAMES.get(kind.sequence_type.elem_type.tensor_type.elem_type, "")
    return found if found in HALF else ""


def emulated_attribute(proto: onnx.AttributeProto) -> onnx.AttributeProto:
    """An attribute as it is emitted on CPU: one that asks for a 16-bit type asks for fp32."""
    if proto.name in _TYPE_ATTRIBUTES and NAMES.get(proto.i) in HALF:
        return onnx.helper.make_attribute(proto.name, onnx.TensorProto.FLOAT)
    if proto.type == onnx.AttributeProto.TENSOR and NAMES.get(proto.t.data_type) in HALF:
        array = onnx.numpy_helper.to_array(proto.t).astype(np.float32)
        return onnx.helper.make_attribute(proto.name, onnx.numpy_helper.from_array(array, proto.t.name))
    return proto


def rename_tensors(nodes: Sequence[onnx.NodeProto], names: Mapping[str, str]) -> None:
    """Rename tensors in nodes and in the graphs nested in them."""
    if not names:
        return
    for node in nodes:
        for slots in (node.input, node.output):
            if not names.keys().isdisjoint(slots):
                slots[:] = [names.get(name, name) for name in slots]
        for graph in nested_graphs(node) if node.domain or node.op_type in CONTROL else ():
            rename_tensors(graph.node, names)


def used_tensors(nodes: Sequence[onnx.NodeProto]) -> set[str]:
    """Names of the tensors that nodes, and the graphs nested in them, read."""
    used: set[str] = set()
    for node in nodes:
        used.update(filter(None, node.input))
        if not node.domain and node.op_type not in CONTROL:
            continue
        for graph in nested_graphs(node):
            used |= used_tensors(graph.node) | {out.name for out in graph.output}
    return used
