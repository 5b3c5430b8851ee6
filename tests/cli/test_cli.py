"""The ``amp-transpile`` command and ``amp.convert``."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import amp_transpiler as amp
from amp_transpiler.cli import main

TEXT = """<ir_version: 10, opset_import: ["" : 21]>
net (float[2,8] x) => (float[2,4] y) <float[8,4] w = {WEIGHTS}>
{ h = MatMul(x, w)  s = Softmax(h)  y = Mul(s, s) }"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    weights = np.random.default_rng(0).standard_normal(32)
    path = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(TEXT.replace("WEIGHTS", ", ".join(f"{w:.6f}" for w in weights))), path)
    return path


@pytest.mark.parametrize(
    ("mode", "halves"),
    [("pure", "3 of 3 operators in float16, 2 casts"), ("mixed", "1 of 3 operators in float16, 2 casts")],
)
def test_converted_models_load_and_agree(
    model: Path, tmp_path: Path, mode: str, halves: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before, out = model.read_bytes(), tmp_path / "half.onnx"
    assert main(["convert", str(model), str(out), "--mode", mode]) == 0
    assert halves in capsys.readouterr().out
    assert model.read_bytes() == before
    half = onnx.load(out)
    onnx.checker.check_model(half, full_check=True)
    assert half.graph.initializer[0].data_type == onnx.TensorProto.FLOAT16
    feed = {"x": np.random.default_rng(1).standard_normal((2, 8)).astype(np.float32)}
    want, got = (
        ort.InferenceSession(str(p), providers=["CPUExecutionProvider"]).run(None, feed)[0] for p in (model, out)
    )
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, atol=2e-3)
    assert main(["convert", str(out), str(tmp_path / "again.onnx"), "--mode", mode]) == 0
    again = onnx.load(tmp_path / "again.onnx")
    assert [n.op_type for n in again.graph.node] == [n.op_type for n in half.graph.node], "a second run changes nothing"


def test_lists_are_followed(model: Path) -> None:
    program = amp.convert(model, black_list=["matmul_v2"])
    assert {op.type: op.precision for op in program.operators if op.type != "Cast"} == {
        "MatMul": "float32",
        "Softmax": "float16",
        "Mul": "float16",
    }


@pytest.mark.parametrize(
    ("arguments", "complaint", "status"),
    [
        (["{missing}", "{out}"], "no model file", 1),
        (["{model}", "{out}", "--black-list", "MatMull"], "MatMul", 2),
        (["{model}", "{out}", "--black-varnames", "nowhere"], "nowhere", 2),
        (["{text}", "{out}"], "text.onnx", 1),
        (["{model}", "{folder}/no/such/folder.onnx"], "folder", 1),
    ],
)
def test_what_goes_wrong_is_said_in_one_line(
    model: Path, tmp_path: Path, arguments: list[str], complaint: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.onnx").write_text("not a model")
    places = {
        "missing": tmp_path / "missing.onnx",
        "model": model,
        "out": tmp_path / "out.onnx",
        "folder": tmp_path,
        "text": tmp_path / "text.onnx",
    }
    assert main(["convert", *(a.format(**places) for a in arguments)]) == status
    error = capsys.readouterr().err
    assert complaint in error and error.startswith("amp-transpile: ") and error.count("\n") == 1
    assert not (tmp_path / "out.onnx").exists()


def test_info(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(model)]) == 0
    out = capsys.readouterr().out
    assert "MatMul" in out and "opset 21, 3 operators" in out


@pytest.mark.parametrize(
    ("given", "wanted"),
    [("--place cpu", "--cost"), ("--ranks 2 --place cpu", "--cost"), ("--device A100", "--cost or --ranks")]
    + [(option, "--ranks") for option in ("--cost --mode pure", "--latency 20", "--cost --shard-state")],
)
def test_info_refuses_options_of_what_is_not_asked_for(
    model: Path, given: str, wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", str(model), *given.split()]) == 2
    assert f" goes with {wanted}, which is not given" in capsys.readouterr().err


def test_info_of_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = '<ir_version: 10, opset_import: ["" : 21]> g (float[N, 64] x, float[64, 64] w) => (float[N, 64] y) '
    path = str(tmp_path / "open.onnx")
    onnx.save(onnx.parser.parse_model(text + "{ h = MatMul(x, w)  y = Relu(h) }"), path)
    assert main(["info", path, "--cost"]) == 2
    assert "input 'x' has the shape [N,64]; give its sizes, as in --shape x=8,64" in capsys.readouterr().err
    assert main(["info", path, "--cost", "--shape", "x"]) == 2
    assert "--shape takes NAME=SIZE,SIZE" in capsys.readouterr().err
    for size in ("9" * 5000, str(2**63), "1.5"):
        assert main(["info", path, "--cost", "--shape", f"x={size},64"]) == 2
        assert "--shape takes NAME=SIZE,SIZE" in capsys.readouterr().err
    assert main(["info", path, "--cost", "--shape", "x=8,64", "x=32,64"]) == 2
    assert "--shape gives 'x' twice" in capsys.readouterr().err
    assert main(["info", path, "--cost", "--shape", "x=32,65"]) == 2
    assert "--shape x=32,65: input 'x' has the shape [N,64]" in capsys.readouterr().err
    assert main(["info", path, "--cost", "--shape", "x=32,64", "--device", "T4", "a100"]) == 0
    out = capsys.readouterr().out
    sizes = 4 * (3 * 32 * 64 + 64 * 64 + 32 * 64)
    assert f"2 kernels move {sizes / 1024:.1f} KiB: fp32" in out and f"{'MatMul':<32} {1:>8}" in out
    assert "pure: will not pay on T4, because launches bind it" in out and "A100" in out and "H100" not in out
    assert main(["info", path, "--cost", "--shape", "x=32,64", "--place", "webgpu"]) == 0
    printed = capsys.readouterr().out
    assert "on WebGPUPlace(0)" in printed and "no forecast: those are of CUDA devices\n" in printed
    assert "16 bit is no faster on WebGPU" in printed.splitlines()[-1]
    assert main(["info", path, "--cost", "--shape", "x=32,64", "--place", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "T4" not in printed and "16 bit is" not in printed
    amp.convert(path).to_onnx(tmp_path / "half.onnx")
    assert main(["info", str(tmp_path / "half.onnx"), "--cost", "--shape", "x=32,64", "--device", "T4"]) == 0
    assert "T4         0.0" in capsys.readouterr().out


def test_info_of_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = '<ir_version: 10, opset_import: ["" : 21]> g (float[N, 64] x) => (float[N, 64] y) <float[64, 64] w> '
    model = onnx.parser.parse_model(text + "{ h = MatMul(x, w)  y = Relu(h) }")
    del model.graph.initializer[:]
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((64, 64), np.float32), "w"))
    path = str(tmp_path / "open.onnx")
    onnx.save(model, path)
    arguments = ["info", path, "--ranks", "1,2", "4096", "--shape", "x=32,64"]
    assert main(arguments) == 2
    assert "--ranks needs --bandwidth" in capsys.readouterr().err
    assert main([*arguments, "--bandwidth", "1"]) == 2
    assert "--ranks needs --device A100, say, or --step-time" in capsys.readouterr().err
    assert main([*arguments, "--bandwidth", "1", "--device", "T4", "A100"]) == 0
    out = capsys.readouterr().out
    assert "the forecast for T4; nccl, 1 GB/s" in out and "the forecast for A100; nccl, 1 GB/s" in out
    assert out.count("buckets of gradients: 8.0 KiB") == 2 and out.count("\n   4096 ") == 2
    said = [
        "--step-time",
        "0.5",
        "--mode",
        "fp32",
        "--ranks-per-node",
        "2",
        "--bandwidth-within",
        "50",
        "--shard-state",
    ]
    assert main([*arguments, "--bandwidth", "1", *said]) == 0
    out = capsys.readouterr().out
    assert "a step of 500 ms on one rank; mpi, 50 GB/s within nodes of 2 ranks, 1 GB/s between them" in out
    assert "buckets of gradients: 16.0 KiB" in out and "sharded state" in out
    for ranks in ("many", "9" * 5000):
        assert main([*arguments, "--ranks", ranks, "--bandwidth", "1", "--step-time", "1"]) == 2


def test_wrong_usage_is_status_2() -> None:
    with pytest.raises(SystemExit) as done:
        main(["convert"])
    assert done.value.code == 2
    with pytest.raises(amp.AmpError, match="expected one of pure, mixed, auto"):
        amp.convert("model.onnx", mode="fp16")


@pytest.mark.parametrize(
    ("given", "near"),
    [
        (["convert", "--exclude", "x*"], "--exclude x*; did you mean '--except'?"),
        (["convert", "--op-block-list=Conv"], "--op-block-list=Conv; did you mean '--black-list'?"),
        (["train", "--learning-rate", "1"], "--learning-rate 1; did you mean '--lr'?"),
        (["train", "--device", "cuda"], "--device cuda; did you mean '--place'?"),
        (["info", "--fp16"], "--fp16\n"),
    ],
)
def test_an_unknown_option_is_named_with_those_near_it(
    given: list[str], near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"convert": ["a.onnx", "b.onnx"], "train": ["a.onnx", "b.onnx", "--data", "d.npz"], "info": ["a.onnx"]}
    with pytest.raises(SystemExit) as done:
        main([given[0], *files[given[0]], *given[1:]])
    assert done.value.code == 2
    told = capsys.readouterr().err
    assert f"unrecognized arguments: {near}" in told and f"'amp-transpile {given[0]} --help' lists" in told


def test_ctrl_c_while_a_command_is_loaded_is_quiet(monkeypatch, capsys):
    def interrupted(command):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules[main.__module__], "load", interrupted)
    assert main(["info", "m.onnx"]) == 130
    assert "interrupted; nothing was written" in capsys.readouterr().err
