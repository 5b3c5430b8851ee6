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


def test_training_example() -> None:
    names: dict[str, object] = {}
    with amp.scope_guard(amp.Scope()), amp.unique_name.guard():
        exec(BLOCKS[0], names)
        assert np.isfinite(np.ravel(names["value"])).all() and names["scale"][0] == 128.0
        assert amp.global_scope().find_var("fc_0.w_0").dtype == np.float16


def test_conversion_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = """<ir_version: 10, opset_import: ["" : 21]> net (float[2,4] x) => (float[2,4] y) { h = Relu(x) y = Softmax(h) }"""
    onnx.save(onnx.parser.parse_model(text), "model.onnx")
    exec(BLOCKS[1], {})
    onnx.checker.check_model(onnx.load("model_fp16.onnx"), full_check=True)
    assert "black list" in capsys.readouterr().out


def test_gradient_example() -> None:
    exec(BLOCKS[2], {"amp": amp})
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
