"""The README's python runs as it stands."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.cli.main import main as command
from tests.helpers.where import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)
CONSOLE = re.findall(r"```console\n\$ amp-transpile (.*?)\n(.*?)```", README, re.S)
#: What the example of the first ten minutes exports, recorded.
EXPORT = ROOT / "tests" / "data" / "readme"


def block(sign: str) -> str:
    """The one example that holds ``sign``."""
    (found,) = (text for text in BLOCKS if sign in text)
    return found


def test_training_example() -> None:
    names: dict[str, object] = {}
    with amp.scope_guard(amp.Scope()), amp.unique_name.guard():
        exec(block("init_loss_scaling=128.0"), names)
        assert np.isfinite(np.ravel(names["value"])).all() and names["scale"][0] == 128.0
        assert amp.global_scope().find_var("fc_0.w_0").dtype == np.float16


def test_loop_example(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        amp.scope_guard(amp.Scope()),
        amp.unique_name.guard(),
        pytest.warns(RuntimeWarning, match="MatMulGrad -> fc_0"),
    ):
        exec(block("get_unscaled_gradients"), {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8 and "scale 1024, lr 0.002," in lines[4] and "scale 1024 -> 512, skipped" in lines[5]


def test_checkpoint_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    with amp.scope_guard(amp.Scope()) as scope, amp.unique_name.guard():
        exec(block("init_loss_scaling=128.0"), names)
        before = {name: scope.find_var(name).tobytes() for name in scope.var_names()}
        exec(block("load_checkpoint"), names)
        assert names["first"] == 5 and names["loaded"].exact  # type: ignore[attr-defined]
        assert before == {name: scope.find_var(name).tobytes() for name in scope.var_names()}


def test_conversion_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = """<ir_version: 10, opset_import: ["" : 21]> net (float[2,4] x) => (float[2,4] y) { h = Relu(x) y = Softmax(h) }"""
    onnx.save(onnx.parser.parse_model(text), "model.onnx")
    exec(block("amp.convert("), {})
    onnx.checker.check_model(onnx.load("model_fp16.onnx"), full_check=True)
    assert "black list" in capsys.readouterr().out


def example(folder: Path) -> None:
    """What ``export.py`` leaves behind: the recorded model, and the data as the example itself makes it."""
    for file in EXPORT.iterdir():
        shutil.copy(file, folder)
    code = block("torch.onnx.export")
    data = code[code.index("digits = load_digits()") :]
    exec("import numpy as np\nfrom sklearn.datasets import load_digits\n" + data, {})


def shape_of(text: str) -> str:
    """A text without its numbers, which depend on the machine."""
    return re.sub(r"\d[\d,.]*(e[-+]\d+)?", "#", text)


def test_the_first_ten_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Command by command, on what PyTorch's exporter wrote; each prints what the README shows."""
    monkeypatch.chdir(tmp_path)
    example(tmp_path)
    commands = [(line.split(), shown) for line, shown in CONSOLE if "digits.onnx" in line]
    assert [arguments[0] for arguments, _ in commands] == ["info", "convert", "train"]
    for arguments, shown in commands:
        assert command(arguments) == 0
        told = capsys.readouterr().out
        assert shape_of(told) == shape_of(shown)
    first, last = (re.findall(r"test accuracy ([\d.]+)%", text)[-1] for text in (told.split("epoch")[0], told))
    assert float(first) < 30 and float(last) > 95
    exec(block("onnxruntime.InferenceSession"), {})
    assert capsys.readouterr().out == f"{last}% right\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "digits.onnx",
        "digits.onnx.data",
        "digits_fp16.onnx",
        "test.npz",
        "train.npz",
        "tuned.onnx",
    ]


def test_the_recorded_export_is_that_of_the_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch_python: str
) -> None:
    """With ``--torch-python``: the example as it stands writes the model that the other tests use."""
    subprocess.run([torch_python, "-c", block("torch.onnx.export")], cwd=tmp_path, check=True, capture_output=True)
    fresh, recorded = (onnx.load(folder / "digits.onnx") for folder in (tmp_path, EXPORT))
    assert [n.op_type for n in fresh.graph.node] == [n.op_type for n in recorded.graph.node]
    assert fresh.graph.input == recorded.graph.input and fresh.graph.output == recorded.graph.output
    assert {f.name for f in tmp_path.iterdir()} == {"digits.onnx", "digits.onnx.data", "train.npz", "test.npz"}


def test_fine_tuning_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    example(tmp_path)
    names: dict[str, object] = {}
    with amp.scope_guard(amp.Scope()), amp.unique_name.guard():
        exec(block("amp.prepare_training(main"), names)
    told = capsys.readouterr().out
    assert "4 parameters are trained, 2 are frozen" in told and "1 Dropout of 0.1" in told and "peak" in told
    main = amp.Program.from_onnx("digits.onnx")
    main.mark_fp16("body*")
    assert [op.type for op in main.operators if op.guard] == ["Conv", "Relu"]


def test_gradient_example() -> None:
    exec(block("@amp.register_gradient"), {"amp": amp})
    program = amp.Program()
    with amp.program_guard(program, amp.Program("startup")):
        w = amp.create_parameter([3], "float32", name="w", initializer=np.array([1, 2, 3], np.float32))
        y = program.add_variable("y", "float32", [3])
        program.add_operator("Square", [w], [y], domain="my.domain")
        pairs = amp.append_backward(amp.nn.functional.sum(y))
        assert [gradient.name for _, gradient in pairs] == ["w@GRAD"]
        (w_grad,) = [g for _, g in pairs]
        assert w_grad.producer.type == "my.domain.SquareGrad"
