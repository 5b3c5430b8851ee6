"""Attributes of an operator: python values on the surface, the exact protobuf underneath."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from amp_transpiler.errors import ArgumentTypeError, MissingKeyError
from amp_transpiler.option_checks import shown

if TYPE_CHECKING:
    from amp_transpiler.ir.graph import Graph


def _encode(name: str, value: Any) -> onnx.AttributeProto:
    if isinstance(value, np.ndarray):
        value = onnx.numpy_helper.from_array(value)
    elif isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool):
        value = int(value)
    try:
        return onnx.helper.make_attribute(name, value)
    except (TypeError, ValueError):
        raise ArgumentTypeError(
            f"attribute {name!r} is {shown(value)}; expected a number, text, an array, a type, a graph, or a list of "
            "one of them that is not empty"
        ) from None


#: The field of the attributes that nearly all operators have: onnx's helper takes many times as long.
_NUMBERS = {onnx.AttributeProto.INT: "i", onnx.AttributeProto.FLOAT: "f"}


def _decode(proto: onnx.AttributeProto) -> Any:
    if proto.type in _NUMBERS and not proto.ref_attr_name:
        return getattr(proto, _NUMBERS[proto.type])
    if proto.type == proto.INTS and not proto.ref_attr_name:
        return proto.ints[:]
    value = onnx.helper.get_attribute_value(proto)
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    if proto.type in (proto.INTS, proto.FLOATS):
        return list(value)
    if proto.type == proto.STRINGS:
        return [item.decode("utf-8", "surrogateescape") for item in value]
    return value


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    """The attributes of a node as python values: text decoded, graphs as they are."""
    return {proto.name: _decode(proto) for proto in node.attribute}


class Attributes(MutableMapping[str, Any]):
    """A mapping name -> value, in order. Graph attributes are :class:`Graph` objects (or lists of them).

    What came from a file is kept as its AttributeProto and decoded when read, so that it leaves
    byte for byte as it came (types of empty lists, references of a function's attributes, doc strings).
    """

    __slots__ = ("_graphs", "_protos", "_values", "programs")

    def __init__(self, values: dict[str, Any] | None = None) -> None:
        #: The protobuf of every attribute, in order; for a graph attribute that of a file, without the graph, or None.
        self._protos: dict[str, onnx.AttributeProto | None] = {}
        #: What was decoded, and the nested programs; most operators have neither, and share an empty mapping.
        self._values: Mapping[str, Any] = _NOTHING
        self._graphs: Mapping[str, Any] = _NOTHING
        #: Every nested program, in attribute order.
        self.programs: Sequence[Graph] = ()
        if values:
            if not isinstance(values, Mapping):
                raise ArgumentTypeError(f"attributes are {shown(values)}; expected a mapping from names to values")
            for name, value in values.items():
                self[name] = value

    def __getitem__(self, name: str) -> Any:
        if name in self._graphs:
            return self._graphs[name]
        if name not in self._values:
            self._values = {**self._values, name: _decode(self.proto(name))}
        return self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        graph = _is_program(value)
        proto = value if graph or isinstance(value, onnx.AttributeProto) else _encode(name, value)
        self._values = _without(self._values, name)
        held = name in self._graphs
        self._graphs = _without(self._graphs, name)
        self._protos[name] = None if graph else proto
        if graph:
            self._graphs = {**self._graphs, name: value}
        if graph or held:
            self._list_programs()

    def _list_programs(self) -> None:
        held = (value if isinstance(value, list) else [value] for value in self.graphs.values())
        self.programs = [program for programs in held for program in programs]

    def __contains__(self, name: object) -> bool:
        return name in self._protos

    def get(self, name: str, default: Any = None) -> Any:
        """The value of an attribute, or ``default``; without the exception that a mapping makes of a missing one."""
        return self[name] if name in self._protos else default

    def keep(self, proto: onnx.AttributeProto) -> None:
        """Take in an attribute that holds no graph, as a file has it, under a name that is new."""
        self._protos[proto.name] = proto

    def __delitem__(self, name: str) -> None:
        if name not in self._protos:
            raise self._missing(name)
        del self._protos[name]
        self._values = _without(self._values, name)
        if name in self._graphs:
            self._graphs = _without(self._graphs, name)
            self._list_programs()

    def __iter__(self) -> Iterator[str]:
        return iter(self._protos)

    def __len__(self) -> int:
        return len(self._protos)

    def set_graph(self, header: onnx.AttributeProto, value: Graph | list[Graph]) -> None:
        """A graph attribute from a file: ``header`` is its AttributeProto without the graph."""
        self[header.name] = value
        self._protos[header.name] = header

    def graph_header(self, name: str) -> onnx.AttributeProto | None:
        """The AttributeProto, without the graph, that a graph attribute had in its file."""
        return self._protos.get(name)

    @property
    def graphs(self) -> dict[str, Any]:
        """Nested programs by attribute name, in attribute order."""
        return {name: self._graphs[name] for name in self._protos if name in self._graphs} if self._graphs else {}

    def protos(self) -> list[onnx.AttributeProto]:
        """The attributes that hold no graph, as protobuf (the very objects: do not change them)."""
        return [proto for name, proto in self._protos.items() if proto is not None and name not in self._graphs]

    def proto(self, name: str) -> onnx.AttributeProto:
        """One attribute that holds no graph, as protobuf."""
        if name not in self._protos:
            raise self._missing(name)
        proto = self._protos[name]
        assert proto is not None
        return proto

    def _missing(self, name: object) -> MissingKeyError:
        held = ", ".join(map(repr, self._protos))
        return MissingKeyError(f"no attribute {shown(name)}; there {'are ' + held if held else 'is none'}")

    def kind(self, name: str) -> int:
        """The type of an attribute, as onnx numbers them."""
        if name not in self._graphs:
            return self.proto(name).type
        return onnx.AttributeProto.GRAPHS if isinstance(self._graphs[name], list) else onnx.AttributeProto.GRAPH

    def copy(self) -> Attributes:
        """The attributes that hold no graph, shared (protobufs are never changed in place)."""
        new = Attributes()
        for proto in self.protos():
            new.keep(proto)
        return new

    def copy_with(self, program: Callable[[Graph], Graph]) -> Attributes:
        """All attributes, in order, each nested program replaced by ``program`` of it."""
        new = Attributes()
        for name, proto in self._protos.items():
            value = self._graphs.get(name)
            if value is not None:
                new[name] = [program(item) for item in value] if isinstance(value, list) else program(value)
            new._protos[name] = proto
        return new


#: What operators without such attributes share; nobody writes to it.
_NOTHING: Mapping[str, Any] = {}


def _without(held: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return {key: value for key, value in held.items() if key != name} if name in held else held


def _is_program(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and _is_program(value[0])
    return hasattr(value, "add_operator")
