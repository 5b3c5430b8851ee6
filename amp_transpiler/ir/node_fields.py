"""The fields of nodes that the checks of a model and the reader both ask for: protobuf takes its time for each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import onnx

_Attribute = onnx.AttributeProto
#: Types of attributes that hold numbers, and with them no text but their name.
NUMBERS = frozenset({_Attribute.FLOAT, _Attribute.INT, _Attribute.FLOATS, _Attribute.INTS})
#: Bytes of the longest attributes that are looked at once for all nodes that have them.
_SHORT = 256


class NodeFields(NamedTuple):
    """A node, and what most nodes have.

    ``numbers``: its attributes in one piece, where they are numbers and few; None where they are not. ``plain``: there
    is nothing besides these fields, not even empty text, and the text in them decodes; of attributes that are no
    numbers nothing is said.
    """

    proto: onnx.NodeProto
    type: str
    domain: str
    name: str
    inputs: list[str]
    outputs: list[str]
    attributes: Sequence[onnx.AttributeProto]
    numbers: bytes | None
    plain: bool


def fields_of(nodes: Iterable[onnx.NodeProto]) -> list[NodeFields]:
    """The fields of nodes, in order."""
    found = []
    known: dict[bytes, bool] = {}
    for node in nodes:
        type_, domain, name, has = node.op_type, node.domain, node.name, node.HasField
        inputs, outputs, attributes = node.input[:], node.output[:], node.attribute
        more = has("doc_string") or has("overload") or (has("domain") and not domain)
        try:
            "".join([type_, domain, name, *inputs, *outputs])
            plain = not (more or node.metadata_props or node.device_configurations)
        except TypeError:  # what does not decode comes as bytes
            plain = False
        attributes = attributes[:] if attributes else ()
        numbers = _numbers(attributes, known) if attributes else b""
        found.append(NodeFields(node, type_, domain, name, inputs, outputs, attributes, numbers, plain))
    return found


def _numbers(attributes: Iterable[onnx.AttributeProto], known: dict[bytes, bool]) -> bytes | None:
    """The attributes in one piece, if all of them are numbers."""
    whole = b""
    for attribute in attributes:
        if attribute.type not in NUMBERS or attribute.ByteSize() > _SHORT:
            return None
        piece = attribute.SerializeToString()
        if piece not in known:
            known[piece] = _only_numbers(attribute)
        if not known[piece]:
            return None
        whole += piece
    return whole


def _only_numbers(attribute: onnx.AttributeProto) -> bool:
    """Whether an attribute holds numbers and no text but its name, and that decodes."""
    texts = attribute.doc_string or attribute.ref_attr_name or attribute.s or attribute.strings
    nested = attribute.HasField("t") or attribute.HasField("g") or attribute.HasField("tp") or attribute.tensors
    more = attribute.graphs or attribute.type_protos or attribute.sparse_tensors or attribute.HasField("sparse_tensor")
    return isinstance(attribute.name, str) and not (texts or nested or more)
