"""What a model file said, kept in its order, so that whatever nobody changed leaves as it came."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.infer import type_proto
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.lists import plain_domain

_KEY = "source"


def _state(variable: Variable) -> tuple[Any, ...]:
    return variable.dtype, variable.shape, variable.doc, tuple(variable.metadata.items())


@dataclass(slots=True)
class Entry:
    """One ValueInfoProto of a file, and what its variable said when the import was done.

    ``variable`` is None where the graph has no variable of that name; ``state`` is empty while the import lasts.
    """

    variable: Variable | None
    proto: onnx.ValueInfoProto
    state: tuple[Any, ...] = ()

    def settle(self) -> None:
        """Remember the variable as it is now: what differs later was changed by a pass."""
        if self.variable is not None:
            self.state = _state(self.variable)

    @property
    def alive(self) -> bool:
        """Whether the variable is still in its program, or never was."""
        v = self.variable
        return v is None or (v.program.has_var(v.name) and v.program.var(v.name) is v)

    def written(self) -> onnx.ValueInfoProto:
        """The entry for a file: as it came, but for what has changed since."""
        variable = self.variable
        if variable is None or not self.state or (variable.name == self.proto.name and _state(variable) == self.state):
            return self.proto
        proto = onnx.ValueInfoProto()
        proto.CopyFrom(self.proto)
        fresh = value_info(variable)
        dtype, shape, doc, metadata = self.state
        if (variable.dtype, variable.shape) != (dtype, shape):
            if variable.shape == shape and proto.type.HasField("tensor_type"):
                proto.type.tensor_type.elem_type = fresh.type.tensor_type.elem_type
            else:
                proto.type.CopyFrom(fresh.type)
        if variable.doc != doc:
            proto.doc_string = variable.doc
        if tuple(variable.metadata.items()) != metadata:
            del proto.metadata_props[:]
            proto.metadata_props.extend(fresh.metadata_props)
        proto.name = variable.name
        return proto


def value_info(variable: Variable) -> onnx.ValueInfoProto:
    """The ValueInfoProto of a variable, from the variable alone."""
    proto = onnx.ValueInfoProto(name=variable.name)
    if variable.dtype is None and variable.type_proto is not None:
        proto.type.CopyFrom(variable.type_proto)
    elif variable.dtype is not None or variable.shape is not None:
        proto.type.CopyFrom(type_proto(variable.dtype, variable.shape))
    if variable.doc:
        proto.doc_string = variable.doc
    for key, value in variable.metadata.items():
        proto.metadata_props.add(key=key, value=value)
    return proto


@dataclass(slots=True)
class Source:
    """What the file said about one graph: ``header`` is the GraphProto, ``model`` the ModelProto, less their lists."""

    header: onnx.GraphProto
    name: str
    model: onnx.ModelProto | None = None
    #: The model file, where one was read.
    path: Path | None = None
    inputs: list[Entry] = field(default_factory=list)
    outputs: list[Entry] = field(default_factory=list)
    value_info: list[Entry] = field(default_factory=list)
    initializers: list[Variable] = field(default_factory=list)
    #: External data files, and how many tensors came from each.
    external: dict[Path, int] = field(default_factory=dict)

    def settle(self) -> None:
        """The import is done: remember every variable as it is now."""
        for entry in (*self.inputs, *self.outputs, *self.value_info):
            entry.settle()

    def copy(self, variables: dict[Variable, Variable]) -> Source:
        """The same for a clone: ``variables`` maps each variable that lives on to its clone."""

        def entries(old: list[Entry]) -> list[Entry]:
            return [
                Entry(None if e.variable is None else variables[e.variable], e.proto, e.state)
                for e in old
                if e.variable is None or e.variable in variables
            ]

        initializers = [variables[v] for v in self.initializers if v in variables]
        return Source(
            self.header,
            self.name,
            self.model,
            self.path,
            entries(self.inputs),
            entries(self.outputs),
            entries(self.value_info),
            initializers,
            self.external,
        )


def source_of(program: Graph) -> Source | None:
    """What the file said about this program, None for a program that was built."""
    found: Source | None = program.info.extra.get(_KEY)
    return found


def listed_inputs(program: Graph) -> set[Variable]:
    """What the file lists as inputs, initializers among them."""
    source = source_of(program)
    return {entry.variable for entry in source.inputs if entry.variable is not None} if source else set()


def hand_over(old: Variable, new: Variable) -> None:
    """Let what the file said of a variable be said of the one that takes its place, unless it spoke of that one too."""
    entries = source.value_info if (source := source_of(old.program)) else []
    if not any(entry.variable is new for entry in entries):
        for entry in entries:
            entry.variable = new if entry.variable is old else entry.variable


def set_source(program: Graph, source: Source) -> None:
    """Let the program remember its file."""
    program.info.extra[_KEY] = source


#: The fields of a NodeProto that are text, and may be there and empty.
_TEXTS = ("name", "op_type", "domain", "overload", "doc_string")


def leftover(node: onnx.NodeProto) -> onnx.NodeProto | None:
    """What of a node an Operator has no place for: fields that are present but empty, device configurations, …"""
    props = node.metadata_props
    present = {name: getattr(node, name) for name in _TEXTS if node.HasField(name)}
    kept = [name for name, value in present.items() if not value or (name == "domain" and not plain_domain(value))]
    if not (kept or props or node.device_configurations):
        return None
    rest = onnx.NodeProto()
    for name in kept:
        setattr(rest, name, present[name])
    rest.device_configurations.extend(node.device_configurations)
    partial = any(not (entry.HasField("key") and entry.HasField("value")) for entry in props)
    if partial or len({entry.key for entry in props}) < len(props):
        rest.metadata_props.extend(props)
    return rest if rest.ListFields() else None
