"""``amp-transpile`` as a newcomer meets it: what it prints, what it writes, and what it says of wrong requests."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.cli import main
from amp_transpiler.errors import ArgumentError, ArgumentTypeError

W = ", ".join(f"{v:.4f}" for v in np.random.default_rng(0).standard_normal(1024) / 6)
TEXT = f"""<ir_version: 10, opset_import: ["" : 21]>
net (float[N,32] x, bool[N,32] keep) => (float[N,32] y, float[N,32] p) <float[32,32] w = {{{W}}}, float low = {{-1e9}}, float eps = {{1e-12}}>
{{ [encoder__h] h = MatMul(x, w)
   [encoder__r] r = Relu(h)
   [decoder__m] m = Where(keep, r, low)
   [decoder__p] p = Softmax(m)
   [decoder__s] s = Add(p, eps)
   [decoder__l] l = Log(s)
   [decoder__y] y = MatMul(l, w) }}"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path, proto = tmp_path / "model.onnx", onnx.parser.parse_model(TEXT)
    for node in proto.graph.node:
        node.name = node.name.replace("__", "/")
    onnx.save(proto, path)
    return path


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    path = tmp_path / "sample.npz"
    np.savez(path, x=rng.standard_normal((4, 32)).astype(np.float32), keep=rng.random((4, 32)) > 0.2)
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    try:
        status = main([str(a) for a in arguments])
    except SystemExit as done:
        status = int(str(done.code))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def precisions(path: Path) -> dict[str, str]:
    return {op.name: op.precision for op in amp.Program.from_onnx(path).operators if op.name}


# -- convert -------------------------------------------------------------------------------------------------
def test_convert_says_what_became_of_constants(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "convert", model, tmp_path / "o.onnx", "--check")
    assert (status, err) == (0, "")
    assert "constant low: takes -65504 instead: it only masks" in out and "constant eps:" in out
    assert "check: onnx.checker accepts the file" in out and "check: onnxruntime loads it" in out
    assert "check: output 'y' is off by" in out
    assert precisions(tmp_path / "o.onnx")["decoder/s"] == "float32"


@pytest.mark.parametrize("opset", [21, 28])
def test_that_onnxruntime_loads_no_such_model_is_no_failure_of_the_file(
    opset: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : {opset}, "mine" : 1]> net (float[2,2] x) => (float[2,2] y) '
        "{ p = MatMul (x, x) y = mine.Twice (p) }"
    )
    onnx.save(made, tmp_path / "m.onnx")
    status, out, err = run(capsys, "convert", tmp_path / "m.onnx", tmp_path / "o.onnx", "--check")
    assert "does not load the file, nor the model" in out and "m.onnx" in out and ".amp_write" not in out
    assert ("export the model at opset 26 or before, or take a newer onnxruntime" in out) == (opset == 28)
    assert (
        status == 3
        and "does not load the model itself, whatever the data" in err
        and "give --calib" not in err
        and "load the file" not in err
    )


def test_a_search_shows_its_budget_of_runs_on_a_terminal(
    model: Path, sample: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("convert", model, tmp_path / "o.onnx", "--mode", "auto", "--calibration", sample, "--tolerance", "3e-4")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TQDM_MININTERVAL", "0")
    status, _, shown = run(capsys, *given)
    assert status == 0
    counts = re.findall(r"run (\d+) of at most (\d+) on 1 sample.*? (\d+)/(\d+) ", shown)
    assert len(counts) > 3 and all((run, most) == (n, total) for run, most, n, total in counts)
    assert run(capsys, *given, "--quiet")[2] == ""


def test_patterns(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "o.onnx"
    assert run(capsys, "convert", model, out, "--only", "encoder/*")[0] == 0
    assert {n for n, kind in precisions(out).items() if kind == "float16"} == {"encoder/h", "encoder/r"}
    assert run(capsys, "convert", model, out, "--except", "re:.*/[hy]")[0] == 0
    kept = precisions(out)
    assert kept["encoder/h"] == kept["decoder/y"] == "float32"
    reasons = {op.name: op.reason for op in amp.Program.from_onnx(out).operators}
    assert reasons["encoder/h"] == "fp32: matches --except 're:.*/[hy]'"


def test_inputs_and_outputs_in_16_bit(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    types = {}
    for name, flags in {"kept": [], "none": ["--no-keep-io"], "named": ["--keep-io", "p"]}.items():
        assert run(capsys, "convert", model, tmp_path / "o.onnx", *flags, "--check")[0] == 0, name
        graph = onnx.load(tmp_path / "o.onnx").graph
        types[name] = [i.type.tensor_type.elem_type for i in (*graph.input, *graph.output)]
        assert [i.name for i in (*graph.input, *graph.output)] == ["x", "keep", "y", "p"]
    assert types == {"kept": [1, 9, 1, 1], "none": [10, 9, 10, 10], "named": [10, 9, 10, 1]}
    once = onnx.load(tmp_path / "o.onnx")
    assert amp.convert(once, keep_io=["p"]).to_onnx().SerializeToString() == once.SerializeToString()


def test_auto_mode_and_reports(model: Path, sample: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, data = tmp_path / "why.html", tmp_path / "why.json"
    status, out, _ = run(
        capsys,
        "convert",
        model,
        tmp_path / "o.onnx",
        "--mode",
        "auto",
        "--calibration",
        sample,
        "--report",
        page,
        "--json",
        data,
    )
    assert status == 0 and "within 0.01" in out and "output 'y': relative error" in out
    found = json.loads(data.read_text())
    assert found["outputs"]["y"] <= 0.01 and found["cut"]["value"] <= found["cut"]["all_full"]
    assert {c["name"] for c in found["constants"]} >= {"low", "eps"} and found["ranges"]
    assert found["after"]["file"] == (tmp_path / "o.onnx").stat().st_size
    text = page.read_text()
    assert "decoder/s" in text and "http://" not in text and "https://" not in text


def test_a_check_that_fails_is_status_3(
    model: Path, sample: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for data in ([], ["--calibration", sample]):
        status, _, err = run(capsys, "convert", model, tmp_path / "o.onnx", "--check", "--tolerance", "1e-9", *data)
        assert status == 3 and "check failed: output 'y' is off by" in err


@pytest.mark.parametrize("declared", ["", "[N, 7]"])
def test_what_the_checker_refuses_the_model_for_is_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], declared: str
) -> None:
    """Exporters of classical models leave the shape of an output out, or declare one that it has not."""
    proto = onnx.parser.parse_model(TEXT.replace("float[N,32] y", f"float{declared or '[N, 32]'} y"))
    if not declared:
        proto.graph.output[0].type.tensor_type.ClearField("shape")
    onnx.save(proto, tmp_path / "model.onnx")
    status, out, error = run(capsys, "convert", tmp_path / "model.onnx", tmp_path / "o.onnx", "--check")
    assert status == 0 and "onnx.checker refuses the file, and the model too: " in out and not error


def test_a_shape_that_the_model_declares_wrongly_is_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As scikit-learn's exporter does behind a Cast to the type that its operand has, which a conversion takes out."""
    text = "m (float[N,4] x) => (int64[N] y) { e = Relu(x) a = ArgMax<axis = 1>(e) y = Cast<to = 7>(a) }"
    onnx.save(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {text}'), tmp_path / "m.onnx")
    status, out, error = run(capsys, "convert", tmp_path / "m.onnx", tmp_path / "half.onnx", "--check")
    assert status == 0 and "onnx.checker refuses the file, and the model too: " in out and not error


def test_what_the_checker_does_not_know_at_any_opset_is_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An operator that onnxruntime's optimisers write into ai.onnx; the conversion raises the opset."""
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> net (float[1,4,4] x, float[4] s, float[4,4,1] w) => (float[1,4,4] y)'
        " { n = SimplifiedLayerNormalization <axis = -1> (x, s)  y = Conv(n, w) }"
    )
    onnx.save(proto, tmp_path / "m.onnx")
    status, out, error = run(
        capsys, "convert", tmp_path / "m.onnx", tmp_path / "o.onnx", "--check", "--dtype", "bfloat16"
    )
    assert "opset 17 raised to" in out and "onnx.checker refuses the file, and the model too: " in out
    assert status == 0 and not error


def test_a_check_does_not_load_what_was_bfloat16_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """onnxruntime computes no bfloat16 on CPU, which is no fault of the conversion."""
    relu = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]>\n'
        "m (float[2, 3] x) => (float[2, 3] y) { h = Relu (x)\n y = Mul (h, h) }"
    )
    onnx.save(relu, tmp_path / "model.onnx")
    run(capsys, "convert", tmp_path / "model.onnx", tmp_path / "half.onnx", "--dtype", "bfloat16")
    status, out, error = run(capsys, "convert", tmp_path / "half.onnx", tmp_path / "out.onnx", "--check")
    assert (status, error) == (0, ""), out
    assert "onnx.checker accepts" in out and "onnxruntime" not in out


def test_external_data(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "convert", model, tmp_path / "o.onnx", "--external-data", "o.weights")[0] == 0
    assert (tmp_path / "o.weights").stat().st_size == 2 * 1024
    assert run(capsys, "convert", tmp_path / "o.onnx", tmp_path / "again.onnx", "--check")[0] == 0


# -- explain, diff, info ---------------------------------------------------------------------------------------
def test_explain(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "convert", model, tmp_path / "o.onnx")
    status, out, _ = run(capsys, "explain", tmp_path / "o.onnx")
    assert status == 0 and "fp16: white list" in out and "casts inserted" in out
    out = run(capsys, "explain", tmp_path / "o.onnx", "decoder/s")[1]
    assert "type       Add" in out and "reason     fp32: " in out and "eps" in out and "read by decoder/l" in out
    assert "encoder/h" in run(capsys, "explain", tmp_path / "o.onnx", "h")[1], (
        "a tensor finds the operator that makes it"
    )
    out = run(capsys, "explain", model, "--mode", "mixed")[1]
    assert "carries no reasons; convert --mode mixed" in out and "fp32: comes near" in out
    status, _, err = run(capsys, "explain", model, "encodr/h")
    assert status == 2 and "did you mean 'encoder/h'" in err
    status, _, err = run(capsys, "explain", model, "re:[")
    assert status == 2 and "'[' is no regular expression: unterminated" in err


def test_diff(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "convert", model, tmp_path / "o.onnx", "--no-keep-io")
    status, out, _ = run(capsys, "diff", model, tmp_path / "o.onnx")
    assert status == 0
    for line in (
        "input 'x': float32 -> float16",
        "2 MatMul: float32 -> float16: encoder/h, decoder/y",
        "inserted casts: 0 -> ",
    ):
        assert line in out
    assert "gone" not in out and "new" not in out
    assert "no difference" in run(capsys, "diff", model, model)[1]


def test_info(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "info", model)[1]
    assert (
        "input: x float32[N,32]" in out
        and "weights: 4,104 bytes float32" in out
        and "a kernel for every operator" in out
    )


def test_info_names_what_leaves_cuda(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = '<ir_version: 10, opset_import: ["" : 22]> m (float[1,1,4,4] x) => (float[1,1,2,2] y) { y = MaxPool<kernel_shape=[2,2], strides=[2,2]>(x) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    assert "1 operators would leave it: 1 MaxPool (no kernel" in run(capsys, "info", tmp_path / "m.onnx")[1]


@pytest.mark.parametrize("dtype", ["float", "float16"])
def test_info_says_what_nobody_knows(tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str) -> None:
    text = f"""<ir_version: 10, opset_import: ["" : 17, "own" : 1, "f" : 1]> m ({dtype}[2] x) => ({dtype}[2] y)
        {{ a = own.Foo(x) b = f.Twice(a) y = Relu(b) }}
        <domain: "f", opset_import: ["" : 17]> Twice (x) => (y) {{ y = BODY }}"""
    for body, expected in (
        ("Add(x, x)", "CUDA: a kernel for every other operator; nobody here knows 1 own::Foo"),
        ("Det(x)", "CUDA: 1 operators would leave it: 1 Det (no"),
    ):
        onnx.save(onnx.parser.parse_model(text.replace("BODY", body)), tmp_path / "m.onnx")
        found = run(capsys, "info", tmp_path / "m.onnx")[1]
        assert expected in found and "nobody here knows 1 own::Foo\n" in found


# -- wrong requests ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "status", "complaint"),
    [
        (["{model}", "{model}"], 2, "the same file"),
        (["{model}", "{out}", "--json", "{out}"], 2, "the same file"),
        (["{model}", "{folder}"], 1, "is a folder"),
        (["{model}", "{out}", "--report", "{folder}/none/r.html"], 1, "there is no folder"),
        (["{model}", "{out}", "--only", "nothing*"], 2, "'nothing*' matches no operator name or scope"),
        (["{model}", "{out}", "--except", "re:("], 2, "is no regular expression"),
        (["{model}", "{out}", "--only", "encoder/*", "--except", "*"], 2, "nothing is left to convert"),
        (["{model}", "{out}", "--keep-io", "z"], 2, "'z', which is no input or output"),
        (["{model}", "{out}", "--keep-io", "y", "--no-keep-io"], 2, "not allowed with"),
        (
            ["{model}", "{out}", "--tolerance", "0.1"],
            2,
            "give --mode auto and --calibration, which keep to it, or --check",
        ),
        (
            ["{model}", "{out}", "--mode", "auto", "--calibration", "{sample}", "--tolerance", "-1"],
            2,
            "--tolerance is -1; expected a number above 0",
        ),
        (["{model}", "{out}", "--input-range", "x"], 2, "NAME=LOW:HIGH"),
        (["{model}", "{out}", "--input-range", "x=1:0"], 2, "least value first"),
        (["{model}", "{out}", "--input-range", "z=0:1"], 2, "'z', which is no floating-point input"),
        (["{model}", "{out}", "--white-list", "MatMul", "--black-list", "MatMul"], 2, "overlap in MatMul"),
        (["{model}", "{out}", "--mode", "auto", "--calibration", "{folder}/none.npz"], 2, "no file or folder"),
        (["{model}", "{out}", "--mode", "auto", "--calibration", "{wrong}"], 1, "'x', 'keep' are missing"),
        (["{cut}", "{out}"], 1, "cut"),
        (["{missing_data}", "{out}"], 1, "which is missing"),
    ],
)
def test_wrong_requests(
    model: Path,
    sample: Path,
    tmp_path: Path,
    arguments: list[str],
    status: int,
    complaint: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    np.savez(tmp_path / "wrong.npz", z=np.zeros(3, np.float32))
    (tmp_path / "cut.onnx").write_bytes(model.read_bytes()[:-200])
    amp.Program.from_onnx(model).to_onnx(tmp_path / "ext.onnx", external_data="gone.bin")
    (tmp_path / "gone.bin").unlink()
    places = {
        "model": model,
        "out": tmp_path / "out.onnx",
        "folder": tmp_path,
        "sample": sample,
        "cut": tmp_path / "cut.onnx",
        "wrong": tmp_path / "wrong.npz",
        "missing_data": tmp_path / "ext.onnx",
    }
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    found, _, err = run(capsys, "convert", *(a.format(**places) for a in arguments))
    assert found == status and complaint in err
    assert err.strip().splitlines()[-1].startswith("amp-transpile"), "one clear sentence at the end"
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before, "nothing written, nothing touched"


def test_a_full_disk_leaves_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("amp_transpiler.files.os.fsync", full)
    status, _, err = run(capsys, "convert", model, tmp_path / "o.onnx", "--external-data")
    assert status == 1 and "No space left on device" in err and err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_an_interrupt_leaves_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("amp_transpiler.files.os.fsync", interrupt)
    status, _, err = run(capsys, "convert", model, tmp_path / "o.onnx")
    assert status == 130 and "interrupted" in err
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


@pytest.mark.parametrize(
    ("options", "error", "complaint"),
    [
        ({"keep_io": "y"}, ArgumentTypeError, "keep_io is 'y'; expected True, False or a list of names"),
        ({"only": "a"}, ArgumentTypeError, "only is 'a'; expected a list of names or patterns"),
        ({"tolerance": 0.1}, ArgumentError, "give mode=auto and calibration"),
        ({"mode": "auto", "calibration": {}, "tolerance": 0.0}, ArgumentError, "above 0"),
        ({"input_ranges": {"x": (0.0, float("nan"))}}, ArgumentError, "least value first"),
    ],
)
def test_wrong_arguments(model: Path, options: dict[str, object], error: type[Exception], complaint: str) -> None:
    with pytest.raises(error, match=complaint):
        amp.convert(model, **options)  # type: ignore[arg-type]


def test_a_bfloat16_copy_converted_on_to_float16_gives_no_nan(model: Path, sample: Path, tmp_path: Path) -> None:
    """The 1e-12 before the Log lies in bfloat16 by then, and would be 0 in float16."""
    amp.convert(model, dtype="bfloat16").to_onnx(tmp_path / "bf.onnx")
    amp.convert(tmp_path / "bf.onnx").to_onnx(tmp_path / "half.onnx")
    feed = dict(np.load(sample))
    results = []
    for path in (model, tmp_path / "half.onnx"):
        program, scope, executor = amp.Program.from_onnx(path), amp.Scope(), amp.Executor(threads=1)
        if program.startup is not None:
            executor.run(program.startup, scope=scope)
        results.append(executor.run(program, feed=feed, fetch_list=["y", "p"], scope=scope))
    for wanted, found in zip(*results, strict=True):
        assert np.linalg.norm(found - wanted) <= 0.02 * np.linalg.norm(wanted)
