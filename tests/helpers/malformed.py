"""Models with something wrong, and the message with which they are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import GraphError, ModelFileError

HEAD = '<ir_version: 10, opset_import: ["" : 21, "f" : 1]>\n'
PLAIN = HEAD + "g (float[4] x) => (float[4] y) <float[4] w = {1, 2, 3, 4}> { [add] y = Add(x, w) }"


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(text if text.startswith("<") else HEAD + text)


def refused(model: onnx.ModelProto, tmp_path: Path, *words: str) -> str:
    """The message with which a model is refused, from a file and from memory alike."""
    messages = []
    path = tmp_path / "bad.onnx"
    path.write_bytes(model.SerializeToString())
    for source in (path, model):
        with pytest.raises((GraphError, ModelFileError)) as caught:
            amp.Program.from_onnx(source)
        messages.append(str(caught.value))
    assert messages[0].startswith(f"'{path}'") and messages[0].count("\n") == 0
    for message in messages:
        assert all(word in message for word in words), message
    return messages[0]


def changed(change: Callable[[onnx.NodeProto], Any], text: str = "y = Softmax<axis = 0>(x)") -> onnx.ModelProto:
    model = parsed(f"g (float[4] x) => (float[4] y) {{ [node] {text} }}")
    change(model.graph.node[0])
    return model


def attribute(**fields: Any) -> Callable[[onnx.NodeProto], Any]:
    def change(node: onnx.NodeProto) -> None:
        del node.attribute[:]
        node.attribute.append(onnx.AttributeProto(**fields))

    return change


A = onnx.AttributeProto
