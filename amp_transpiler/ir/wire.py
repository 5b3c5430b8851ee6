"""The bytes of a model file as they are: how deep graphs lie in one another, and where initializers have their content.

protobuf refuses to read a file whose messages lie deeper than 100, and never says where in a file something is. What it
reads and writes it copies several times, into memory that it has just asked for: the content of large initializers goes
past it (:func:`without_contents`, :func:`with_contents`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

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
#: Bytes of the largest content that protobuf is left to copy. A file is looked through for larger ones while a field of
#: the graph takes as many on average.
COPIED = 1 << 12


def nesting(content: bytes | memoryview) -> int:
    """The number of graphs around the innermost one, as far as the bytes make sense as an ONNX model."""
    deepest = 0
    pending = [("model", 0, len(content), -1)]
    while pending:
        kind, at, end, depth = pending.pop()
        depth += kind == "graph"
        deepest = max(deepest, depth)
        for number, _, start, stop in _fields(content, at, end):
            inner = _PARTS[kind].get(number)
            if inner is not None and stop <= end:
                pending.append((inner, start, stop, depth))
    return deepest


def contents(content: bytes) -> dict[str, tuple[int, int]]:
    """Where in a model file the content of each initializer of its main graph lies: its name -> offset, length.

    Of those that have their content in the file, as raw bytes.
    """
    found: dict[str, tuple[int, int]] = {}
    for part, _, start, stop in _fields(content, 0, len(content)):
        if part != _GRAPH:
            continue
        for field, _, first, last in _fields(content, start, stop):
            if field == _INITIALIZER:
                held = {number: (at, end) for number, _, at, end in _fields(content, first, last)}
                if _NAME in held and _RAW_DATA in held:
                    at, end = held[_NAME]
                    found[content[at:end].decode()] = (held[_RAW_DATA][0], held[_RAW_DATA][1] - held[_RAW_DATA][0])
    return found


class _Part(NamedTuple):
    """A message in a file: where its field begins, it itself begins, and it ends.

    Of the ``number``-th initializer ``at`` and ``until`` are where the field of its raw bytes is, or belongs.
    """

    begin: int
    start: int
    stop: int
    at: int = 0
    until: int = 0
    number: int = 0


def without_contents(file: memoryview) -> tuple[bytes, dict[int, tuple[int, int]]]:
    """A model file less the raw bytes of large initializers of its graph, and where in it they are.

    By number, in the order of the file: offset, length. A file that holds little but such bytes, or makes no sense, is
    left as it is.
    """
    graphs = [_Part(*place) for part, *place in _fields(file, 0, len(file)) if part == _GRAPH]
    if len(graphs) != 1 or graphs[0].stop > len(file):
        return bytes(file), {}
    tensors, found = [], dict[int, tuple[int, int]]()
    left, number = len(file) // COPIED, 0
    for field, begin, start, stop in _fields(file, graphs[0].start, graphs[0].stop):
        left -= 1
        if left < 0 or stop > graphs[0].stop:
            return bytes(file), {}
        if field != _INITIALIZER:
            continue
        if stop - start > COPIED:
            raw = [place for part, *place in _fields(file, start, stop) if part == _RAW_DATA]
            if len(raw) == 1 and raw[0][2] - raw[0][1] > COPIED and raw[0][2] <= stop:
                at, content, until = raw[0]
                tensors.append(_Part(begin, start, stop, at, until, number))
                found[number] = content, until - content
        number += 1
    return (b"".join(_spliced(file, graphs[0], tensors, {})) if found else bytes(file)), found


def with_contents(file: bytes, lengths: Mapping[int, int]) -> list[bytes | int]:
    """The bytes of a model file in order, and the numbers of initializers in the place of their raw bytes.

    ``lengths``: how many bytes each has, by number. What :func:`without_contents` took out comes in again.
    """
    graph = next(_Part(*place) for part, *place in _fields(file, 0, len(file)) if part == _GRAPH)
    held = (place for part, *place in _fields(file, graph.start, graph.stop) if part == _INITIALIZER)
    tensors = []
    for number, (begin, start, stop) in enumerate(held):
        if number in lengths:
            at = next((before for part, before, *_ in _fields(file, start, stop) if part > _RAW_DATA), stop)
            tensors.append(_Part(begin, start, stop, at, at, number))
    return _spliced(file, graph, tensors, lengths)


def _spliced(file: Any, graph: _Part, tensors: Iterable[_Part], lengths: Mapping[int, int]) -> list[Any]:
    """The file in pieces, each tensor of its graph with the raw bytes of this length alone; its number stands there."""
    pieces: list[Any] = []
    done, size = graph.start, 0
    for tensor in tensors:
        raw = lengths.get(tensor.number)
        before = b"" if raw is None else _head(_RAW_DATA, raw)
        length = tensor.stop - tensor.start - (tensor.until - tensor.at) + len(before) + (raw or 0)
        head = _head(_INITIALIZER, length)
        pieces += [file[done : tensor.begin], head, file[tensor.start : tensor.at], before]
        pieces += [] if raw is None else [tensor.number]
        pieces.append(file[tensor.until : tensor.stop])
        size += tensor.begin - done + len(head) + length
        done = tensor.stop
    size += graph.stop - done
    return [file[: graph.begin], _head(_GRAPH, size), *pieces, file[done:]]


def _head(field: int, length: int) -> bytes:
    """What stands before a field of this length."""
    found = bytearray([field << 3 | 2])
    while length > 127:
        found.append(length & 127 | 128)
        length >>= 7
    return bytes([*found, length])


def _fields(content: bytes | memoryview, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """The fields of a message that have a length: number, where the field begins, its first byte, its end.

    Up to where it makes no sense any more.
    """
    while at < end:
        begin = at
        tag, at = _varint(content, at, end)
        wire = tag & 7
        if wire == 0:
            _, at = _varint(content, at, end)
        elif wire in (1, 5):
            at += 8 if wire == 1 else 4
        elif wire == 2:
            length, at = _varint(content, at, end)
            yield tag >> 3, begin, at, at + length
            at += length
        else:
            return  # no model, or damaged here


def _varint(content: bytes | memoryview, at: int, end: int) -> tuple[int, int]:
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
