"""What the tests of ``amp.fit`` train, and on what."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import amp_transpiler as amp
from tests.helpers.exported import exported, samples

FAST: dict[str, Any] = {"lr": 0.01, "mode": "fp32", "batch_size": 16}


def linear(outputs: int = 3, batch: str = "n") -> onnx.ModelProto:
    """A linear model of four features."""
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21]>\n'
        f"net (float[{batch}, 4] x) => (float[{batch}, {outputs}] y) {{ y = Gemm (x, w, b) }}"
    )
    rng = np.random.default_rng(5)
    for name, shape in (("w", (4, outputs)), ("b", (outputs,))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name))
    return model


def features(count: int, outputs: int = 3, seed: int = 0) -> dict[str, np.ndarray]:
    x = np.random.default_rng(seed).normal(size=(count, 4)).astype(np.float32)
    return {"x": x, "label": x[:, :outputs].argmax(1)}


def rows(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def trained(folder: Path, name: str, **options: Any) -> tuple[bytes, amp.FitResult, list[str]]:
    told: list[str] = []
    data = samples("encoder_dynamo", 90)
    result = amp.fit(
        exported("encoder_dynamo"),
        folder / name,
        **{
            "data": data,
            "test": data,
            "say": told.append,
            "lr": 0.01,
            "batch_size": 16,
            "dropout": {"node_gelu": 0.1},
            **options,
        },
    )
    return (folder / name).read_bytes(), result, told
