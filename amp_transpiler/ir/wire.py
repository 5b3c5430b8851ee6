"""The bytes of a model file as they are: how deep graphs lie in one another, and where initializers have their content.

protobuf refuses to read a file whose messages lie deeper than 100, and never says where in a file something is.
"""

from __future__ import annotations

from collections.abc import Iterator

#: Kind of message -> number of a field -> kind of the message in it. Graphs are the steps that are counted.
_PARTS: dict[str, dict[int, str]] = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node"},
    "function": {7: "node"},
    "node": {5: "attribute"},
    "attribute": {6: "graph", 11: "graph"},
}
#: The numbers of fields: the graph of a model, the initializers of a graph, name and content of a tensor.
_GRAPH, _INITIALIZER, _NAME, _RAW_DATA = 7, 5, 8, 9


def nesting(content: bytes) -> int:
    """The number of graphs around the innermost one, as far as the bytes make sense as an ONNX model."""
    deepest = 0
    pending = [("model", 0, len(content), -1)]
    while pending:
        kind, at, end, depth = pending.pop()
        depth += kind == "graph"
        deepest = max(deepest, depth)
        for number, start, stop in _fields(content, at, end):
            inner = _PARTS[kind].get(number)
            if inner is not None and stop <= end:
                pending.append((inner, start, stop, depth))
    return deepest


def contents(content: bytes) -> dict[str, tuple[int, int]]:
    """Where in a model file the content of each initializer of its main graph lies: its name -> offset, length.

    Of those that have their content in the file, as raw bytes.
    """
    found: dict[str, tuple[int, int]] = {}
    for part, start, stop in _fields(content, 0, len(content)):
        if part != _GRAPH:
            continue
        for field, first, last in _fields(content, start, stop):
            if field == _INITIALIZER:
                held = {number: (at, end) for number, at, end in _fields(content, first, last)}
                if _NAME in held and _RAW_DATA in held:
                    at, end = held[_NAME]
                    found[content[at:end].decode()] = (held[_RAW_DATA][0], held[_RAW_DATA][1] - held[_RAW_DATA][0])
    return found


def _fields(content: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The fields of a message that have a length: number, first byte, end. Up to where it makes no sense any more."""
    while at < end:
        tag, at = _varint(content, at, end)
        wire = tag & 7
        if wire == 0:
            _, at = _varint(content, at, end)
        elif wire in (1, 5):
            at += 8 if wire == 1 else 4
        elif wire == 2:
            length, at = _varint(content, at, end)
            yield tag >> 3, at, at + length
            at += length
        else:
            return  # no model, or damaged here


def _varint(content: bytes, at: int, end: int) -> tuple[int, int]:
    """The number that begins here, and where the next field begins; the end where it is cut short."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= end:
            return 0, end
        byte = content[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    return 0, end
