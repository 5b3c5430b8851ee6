"""Text of a model decodes: every string field is UTF-8."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import onnx
from google.protobuf.descriptor import FieldDescriptor

from amp_transpiler.errors import GraphError, ModelFileError
from amp_transpiler.ir.functions import NESTED, too_deep
from amp_transpiler.ir.node_fields import NodeFields, fields_of


def check_text(message: Any, nodes: Iterable[NodeFields] | None = None, depth: int = 0) -> None:
    """Refuse a string field that does not decode, which protobuf gives as bytes; of tensors their labels alone.

    It goes first of all, and so it also ends where messages lie too deep in one another. ``nodes``: those of the main
    graph of a model, whose initializers the caller looks at.
    """
    if depth > 3 * NESTED + 1 and isinstance(message, onnx.GraphProto):
        raise GraphError(too_deep("the model"))
    tensor = isinstance(message, onnx.TensorProto)
    if tensor and _plain(message):
        return
    for field, value in _labels(message) if tensor else message.ListFields():
        kind = field.type
        if field.name == "node":
            _check_nodes(fields_of(value) if nodes is None else nodes, depth + 1)
        elif field.name == "initializer" and nodes is not None:
            continue
        elif kind == FieldDescriptor.TYPE_MESSAGE:
            for item in value if _repeated(value) else (value,):
                check_text(item, nodes if field.name == "graph" else None, depth + 1)
        elif kind == FieldDescriptor.TYPE_STRING:
            for item in (value,) if isinstance(value, str | bytes) else value:
                if not isinstance(item, str):
                    raise ModelFileError(
                        f"holds text that is not UTF-8: field '{field.name}' of a "
                        f"{type(message).__name__} is {bytes(item)[:40]!r}"
                    )
    if tensor and message.data_type == onnx.TensorProto.STRING:
        _check_strings(message)


def _check_nodes(nodes: Iterable[NodeFields], depth: int) -> None:
    for node in nodes:
        if not (node.plain or _labelled(node)):
            check_text(node.proto, depth=depth)
        elif node.numbers is None:
            for attribute in node.attributes:
                check_text(attribute, depth=depth + 1)


def _labelled(node: NodeFields) -> bool:
    """Whether a node has text and metadata besides what most have, and all of it decodes: those of newer exporters."""
    proto = node.proto
    labels = [text for entry in proto.metadata_props for text in (entry.key, entry.value)]
    texts = [node.type, node.domain, node.name, proto.doc_string, proto.overload, *node.inputs, *node.outputs, *labels]
    return not proto.device_configurations and all(isinstance(text, str) for text in texts)


def _plain(tensor: onnx.TensorProto) -> bool:
    """Whether a tensor holds no text but its name, and that decodes: nearly every one."""
    named = isinstance(tensor.name, str) and not tensor.doc_string and tensor.data_type != onnx.TensorProto.STRING
    return named and not tensor.external_data and not tensor.metadata_props


def _repeated(value: Any) -> bool:
    return hasattr(value, "extend")


def _labels(tensor: onnx.TensorProto) -> Iterable[tuple[Any, Any]]:
    """The fields of a tensor that hold text; the others may hold gigabytes."""
    fields = onnx.TensorProto.DESCRIPTOR.fields_by_name
    for name in ("name", "doc_string", "external_data", "metadata_props"):
        yield fields[name], getattr(tensor, name)


def _check_strings(tensor: onnx.TensorProto) -> None:
    for item in tensor.string_data:
        try:
            item.decode("utf-8")
        except UnicodeDecodeError:
            raise ModelFileError(f"tensor '{tensor.name}' of strings holds {item[:40]!r}, which is not UTF-8") from None
