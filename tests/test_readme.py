"""The README's python runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest

import amp_transpiler as amp

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)


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
    with amp.scope_guard(amp.Scope()), amp.unique_name.guard(), pytest.warns(RuntimeWarning, match="MatMulGrad -> fc_0"):
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


def test_fine_tuning_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    stem, head = (", ".join(f"{v:.3f}" for v in np.random.default_rng(0).normal(size=n)) for n in (27, 30))
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17]>
      net (float[N,3,64,64] image) => (float[N,10] scores)
        <float[1,3,3,3] stem = {{{stem}}}, float[3,10] w = {{{head}}}>
      {{ a = Conv(image, stem)  b = MaxPool <kernel_shape = [20, 62], strides = [21, 62]> (a)
         c = Flatten(b)  scores = MatMul(c, w) }}""")
    for node, name in zip(model.graph.node, ("conv_stem/Conv", "pool/MaxPool", "Flatten", "head/MatMul"), strict=True):
        node.name = f"/{name}"
    onnx.save(model, "model.onnx")
    names: dict[str, object] = {}
    with amp.scope_guard(amp.Scope()), amp.unique_name.guard():
        exec(block("amp.prepare_training(main"), names)
    told = capsys.readouterr().out
    assert "1 parameters are trained, 1 are frozen" in told and "1 Dropout of 0.1" in told and "peak" in told


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


@pytest.mark.parametrize(("file", "name"), [("activation.py", "softsign"), ("contrib.py", "gelu")])
def test_examples_of_entries_are_those_of_the_package(file: str, name: str) -> None:
    (block,) = (block for block in BLOCKS if f"def {name}(" in block)
    assert block in (ROOT / "ops" / file).read_text(encoding="utf-8")
