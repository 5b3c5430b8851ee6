"""Attributes of an operator: python values on the surface, the exact protobuf underneath."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

if TYPE_CHECKING:
    from .program import Program


def _encode(name: str, value: Any) -> onnx.AttributeProto:
    if isinstance(value, np.ndarray):
        value = onnx.numpy_helper.from_array(value)
    elif isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool):
        value = int(value)
    return onnx.helper.make_attribute(name, value)


def _decode(proto: onnx.AttributeProto) -> Any:
    value = onnx.helper.get_attribute_value(proto)
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    if proto.type in (proto.INTS, proto.FLOATS):
        return list(value)
    if proto.type == proto.STRINGS:
        return [item.decode("utf-8", "surrogateescape") for item in value]
    return value


class Attributes(MutableMapping[str, Any]):
    """A mapping name -> value. Graph attributes are :class:`Program` objects (or lists of them).

    What came from a file is kept as its AttributeProto and decoded when read, so that it leaves
    byte for byte as it came (types of empty lists, references of a function's attributes, doc strings).
    """

    __slots__ = ("_graphs", "_protos", "_values")

    def __init__(self, values: dict[str, Any] | None = None) -> None:
        self._protos: dict[str, onnx.AttributeProto] = {}
        self._values: dict[str, Any] = {}
        self._graphs: dict[str, Any] = {}
        for name, value in (values or {}).items():
            self[name] = value

    def __getitem__(self, name: str) -> Any:
        if name in self._graphs:
            return self._graphs[name]
        if name not in self._values:
            self._values[name] = _decode(self._protos[name])
        return self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.pop(name, None)
        if isinstance(value, onnx.AttributeProto):
            self._protos[name] = value
        elif _is_program(value):
            self._graphs[name] = value
        else:
            self._protos[name] = _encode(name, value)

    def __delitem__(self, name: str) -> None:
        self._values.pop(name, None)
        if self._graphs.pop(name, None) is None:
            del self._protos[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._protos
        yield from self._graphs

    def __len__(self) -> int:
        return len(self._protos) + len(self._graphs)

    @property
    def programs(self) -> list[Program]:
        """Every nested program, in attribute order."""
        found: list[Program] = []
        for value in self._graphs.values():
            found.extend(value if isinstance(value, list) else [value])
        return found

    @property
    def graphs(self) -> dict[str, Any]:
        """Nested programs by attribute name."""
        return self._graphs

    def protos(self) -> list[onnx.AttributeProto]:
        """The attributes that hold no graph, as protobuf (the very objects: do not change them)."""
        return list(self._protos.values())

    def proto(self, name: str) -> onnx.AttributeProto:
        """One attribute as protobuf."""
        return self._protos[name]

    def copy(self) -> Attributes:
        """The attributes that hold no graph, shared (protobufs are never changed in place)."""
        new = Attributes()
        new._protos = dict(self._protos)
        return new


def _is_program(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and _is_program(value[0])
    return hasattr(value, "add_operator")
