"""A net whose weights lie in an external file, and what stands in a folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, numpy_helper

from amp_transpiler.cli import main
from tests.helpers.sessions import run

X = np.random.default_rng(5).standard_normal((2, 64)).astype(np.float32)


def external(tensor: TensorProto, location: str, offset: int = 0) -> bytes:
    """Make the tensor external; gives its bytes."""
    raw = tensor.raw_data
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(len(raw)))):
        tensor.external_data.add(key=key, value=value)
    return raw


def net(folder: Path, name: str = "net.onnx", data: str = "net.onnx.data", seed: int = 0) -> Path:
    """y = Relu(x @ w) with w external, and uint8 tensors that no conversion changes."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,64] x) => (float[N,64] y, uint8[2048] k) { h = MatMul(x, w)\n y = Relu(h)\n k = Identity(u) }""")
    w = numpy_helper.from_array(rng.standard_normal((64, 64)).astype(np.float32) / 8, "w")
    u = numpy_helper.from_array(rng.integers(0, 256, 2048).astype(np.uint8), "u")
    raw = external(w, data)
    (folder / data).write_bytes(raw + external(u, data, len(raw)))
    model.graph.initializer.extend([w, u])
    onnx.save_model(model, folder / name)
    return folder / name


def outputs(path: Path) -> list[np.ndarray]:
    """What onnxruntime gives for ``X``."""
    return run(path, {"x": X})


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones too, and what it holds; links by where they lead."""
    return {
        str(p.relative_to(folder)): os.readlink(p).encode() if p.is_symlink() else p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_symlink() or p.is_file()
    }


def convert(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    status = main(["convert", *map(str, arguments)])
    told = capsys.readouterr()
    return status, told.out, told.err


def net_at(path: Path, location: str) -> Path:
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        tensor.external_data[0].value = location
    onnx.save_model(model, path)
    return path
