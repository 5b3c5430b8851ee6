"""Small models as PyTorch's two exporters write them, with weights of our own, and data that they learn quickly.

``tests/data/exports`` holds their graphs as ONNX text: a CNN whose batch norms stand behind activations (so that no
exporter folds them away) and a transformer encoder of one layer, each by the TorchScript and by the dynamo exporter
with a dynamic batch, and with the batch of 1 of an export by default.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

import amp_transpiler as amp
from tests.helpers.where import RECORDED

FOLDER = RECORDED / "exports"
#: Vectors of normalisations, which begin as ones and zeros.
_NORM = re.compile(r"[bn]\d\.(weight|bias)")


def exported(name: str, seed: int = 0) -> onnx.ModelProto:
    """The model of ``<name>.txt``; what the text declares without content gets random weights."""
    model = onnx.parser.parse_model((FOLDER / f"{name}.txt").read_text(encoding="utf-8"))
    rng = np.random.default_rng(seed)
    for value in model.graph.value_info:
        shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
        norm = _NORM.fullmatch(value.name)
        array = rng.normal(size=shape) / np.sqrt(max(np.prod(shape[1:]), 4))
        if norm:
            array = np.full(shape, norm[1] == "weight")
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), value.name))
    del model.graph.value_info[:]
    return model


def samples(name: str, count: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Arrays for a model of this name: noisy pictures of four kinds, or sequences to be told apart by their first
    token; the label is called ``label``."""
    rng = np.random.default_rng(seed + 1)
    if name.startswith("cnn"):
        label = rng.integers(0, 4, count)
        kinds = np.random.default_rng(99).normal(size=(4, 1, 8, 8))
        return {"image": (kinds[label] + rng.normal(size=(count, 1, 8, 8)) * 0.7).astype(np.float32), "label": label}
    tokens = rng.integers(0, 20, (count, 6))
    return {"tokens": tokens, "label": tokens[:, 0] // 7}


def scores(path: Path, data: dict[str, np.ndarray]) -> np.ndarray:
    """What a file gives for the data: in bare onnxruntime; where it computes in bfloat16, which onnxruntime does not on
    CPU, in the faithful lowering."""
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    feed = {name: array for name, array in data.items() if name != "label"}
    if not any(t.data_type == onnx.TensorProto.BFLOAT16 for t in model.graph.initializer):
        session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        return np.asarray(session.run(None, feed)[0], np.float32)
    program, executor, scope = amp.Program.from_onnx(path), amp.Executor(threads=1), amp.Scope()
    executor.run(program.startup, scope=scope)
    return np.asarray(executor.run(program, feed=feed, fetch_list=program.outputs, scope=scope)[0], np.float32)


def loss_and_accuracy(path: Path, data: dict[str, np.ndarray]) -> tuple[float, float]:
    """Cross entropy, in float64, and the share of right decisions."""
    logits = scores(path, data).astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    picked = logits[np.arange(len(logits)), data["label"]]
    return float((np.log(np.exp(logits).sum(-1)) - picked).mean()), float((logits.argmax(-1) == data["label"]).mean())
