"""How deep graphs lie in one another in a model file that protobuf refuses to read: it ends at 100 messages."""

from __future__ import annotations

#: Kind of message -> number of a field -> kind of the message in it. Graphs are the steps that are counted.
_PARTS: dict[str, dict[int, str]] = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node"},
    "function": {7: "node"},
    "node": {5: "attribute"},
    "attribute": {6: "graph", 11: "graph"},
}


def nesting(content: bytes) -> int:
    """The number of graphs around the innermost one, as far as the bytes make sense as an ONNX model."""
    deepest = 0
    pending = [("model", 0, len(content), -1)]
    while pending:
        kind, at, end, depth = pending.pop()
        depth += kind == "graph"
        deepest = max(deepest, depth)
        while at < end:
            tag, at = _varint(content, at, end)
            wire = tag & 7
            if wire == 0:
                _, at = _varint(content, at, end)
            elif wire in (1, 5):
                at += 8 if wire == 1 else 4
            elif wire == 2:
                length, at = _varint(content, at, end)
                inner = _PARTS[kind].get(tag >> 3)
                if inner is not None and at + length <= end:
                    pending.append((inner, at, at + length, depth))
                at += length
            else:
                break  # no model, or damaged here
    return deepest


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
