"""``amp-transpile explain --passes``: the pipelines, the passes, and what they change in a model."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from amp_transpiler.cli.main import main
from amp_transpiler.passes.pipeline import PASSES
from tests.helpers.exported import exported


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "cnn.onnx"
    onnx.save(exported("cnn_dynamo"), path)
    return str(path)


def test_every_pass_and_what_the_calls_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--passes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["convert", "decorate", "lower"]
    assert lines[2].endswith("mixed-norms{place=cuda},room-for-rows,emit{place=cuda}")
    assert [line for line in lines[3:] if line and not line.startswith(" ")] == sorted(PASSES)
    at = lines.index("precision")
    assert lines[at + 1].split()[0] == "does" and "mode: mixed or pure" in lines[at + 3]
    assert any(line.split() == ["needs", "typed,", "no", "gradients"] for line in lines[at:])


def test_what_passes_change_in_a_model(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = Path(model).read_bytes()
    assert main(["explain", model, "--passes", "opset,freeze-weights,precision{mode=pure}"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "changed  opset",
        "changed  freeze-weights",
        "changed  precision{mode=pure}",
        "9 operators before, 11 after",
    ]
    assert main(["explain", model, "--passes", "--mode", "mixed"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert "changed  partition" in out and "      -  constraints" in out
    assert Path(model).read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--passes", "opsett"], 2, "character 1: there is no pass 'opsett'; did you mean opset"),
        (["--passes", "partition"], 1, "pass 1 of pipeline 'partition': partition needs known weights are constants"),
        (["node", "--passes", "opset"], 2, "nodes, or --passes"),
    ],
)
def test_what_is_wrong_is_one_line(
    model: str, arguments: list[str], status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", model, *arguments]) == status
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1


def test_explain_wants_a_model_or_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 2 and "takes a model, or --passes" in capsys.readouterr().err
    assert main(["explain", "--passes", "model.onnx"]) == 2  # it would be taken for the list
    assert "give the model before it" in capsys.readouterr().err
