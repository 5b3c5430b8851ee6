"""What ``info`` and ``diff`` say of weights: those of Constant operators, of branches and sparse ones count."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.cli import main
from amp_transpiler.conversion.report.record import record_program

TEXT = """<ir_version: 10, opset_import: ["" : 21]>
net (bool c, float[2] x) => (float[2] y) <float[2] w = {1, 2}> {
  k = Constant <value = float16[4] {1, 2, 3, 4}> ()  n = Constant <value_float = 0.5> ()
  i = Constant <value_ints = [1, 2, 3]> ()  t = Constant <value_string = "t"> ()
  y = If (c) <
    then_branch = a () => (float[2] u) { p = Constant <value = float[2] {3, 4}> ()  u = Add(p, x) },
    else_branch = b () => (float[2] v) <float[2] q = {5, 6}> { r = Mul(w, q)  v = Mul(r, n) } >
}"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    model = onnx.parser.parse_model(TEXT)
    numbers = onnx.numpy_helper.from_array(np.ones(3, np.float64), "")
    sparse = onnx.helper.make_sparse_tensor(numbers, onnx.numpy_helper.from_array(np.arange(3), ""), [9])
    model.graph.node.insert(0, onnx.helper.make_node("Constant", [], ["s"], sparse_value=sparse))
    onnx.save(model, tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def test_info_counts_every_constant(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(path)]) == 0
    sizes = {"float16": 4 * 2, "float32": 4 * (2 + 1 + 2 + 2), "float64": 3 * 8, "int64": 8 * (3 + 3), "string": 0}
    said = ", ".join(f"{size:,} bytes {dtype}" for dtype, size in sizes.items())
    assert f"weights: {said}\n" in capsys.readouterr().out


def test_reports_and_differences_count_the_same(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = amp.Program.from_onnx(path)
    record = record_program(program, path)
    assert record.weights == 8 + 28 + 24 + 48
    assert {tensor.name for tensor in record.tensors if tensor.constant} == set("wknitspq")
    assert main(["convert", str(path), str(path.with_name("half.onnx")), "--quiet"]) == 0
    assert main(["diff", str(path), str(path.with_name("half.onnx"))]) == 0
    assert "weights in float32: 28 -> " in capsys.readouterr().out


def test_weights_beside_a_model_go_into_the_converted_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a folder of arrays may hold the model, its copies and what else there is."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> n (float[4096] x) => (float[4096] y) { y = Add(x, w) }'
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(4096, np.float32), "w"))
    amp.Program.from_onnx(model).to_onnx(tmp_path / "m.onnx", external_data=True)
    np.save(tmp_path / "x.npy", np.ones(4096, np.float32))
    source, out = str(tmp_path / "m.onnx"), tmp_path / "out.onnx"
    for option, files in (("--external-data", 2), ("--no-external-data", 1), ("--no-external-data", 1)):
        assert main(["convert", source, str(out), option, "--calibration", str(tmp_path), "--check"]) == 0
        assert len(list(tmp_path.glob("out.onnx*"))) == files
    assert "onnxruntime loads it" in capsys.readouterr().out
    assert main(["convert", source, str(tmp_path / "x.npy"), "--calibration", str(tmp_path)]) == 2
    assert "are the same file" in capsys.readouterr().err
