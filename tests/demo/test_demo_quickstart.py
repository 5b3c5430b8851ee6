"""The first command of a newcomer: it learns in every mode, and leaves models to serve and to convert."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import quickstart
import training

import amp_transpiler as amp
from amp_transpiler.cli.main import main as command


def test_learns_in_every_mode_and_leaves_a_model_to_convert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["demo", "--out", str(tmp_path), "--epochs", "8"])
    assert quickstart.main() == 0
    told = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in told.splitlines()[1:4]}
    assert list(rows) == list(training.MODES)
    for accuracy, loss, _, bad, _ in rows.values():
        assert float(accuracy.rstrip("%")) > 90 and float(loss) < 0.4 < math.log(10) and int(bad) == 0, told
    served = re.findall(r"model: +\S+(quickstart_\w+\.onnx) .* bare onnxruntime: ([\d.]+)% right", told)
    assert [name for name, _ in served] == [f"quickstart_{mode}.onnx" for mode in ("fp32", "mixed", "pure")]
    assert [f"{share}%" for _, share in served] == [row[0] for row in rows.values()]
    assert (tmp_path / "quickstart.png").read_bytes().startswith(b"\x89PNG")
    weights = onnx.load(tmp_path / "quickstart_fp32.onnx").graph.initializer
    assert {t.data_type for t in weights} <= {onnx.TensorProto.FLOAT, onnx.TensorProto.INT64}
    assert command(["convert", str(tmp_path / "quickstart_fp32.onnx"), str(tmp_path / "half.onnx"), "--check"]) == 0


def test_a_bfloat16_model_is_saved_and_not_served_on_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--out", str(tmp_path), "--epochs", "1", "--mode", "pure", "--dtype", "bfloat16"]
    monkeypatch.setattr(sys, "argv", ["demo", *options])
    assert quickstart.main() == 0
    assert "quickstart_pure.onnx" in (told := capsys.readouterr().out) and "for a CUDA device" in told


def test_the_network_has_an_output_for_each_digit_and_no_softmax_of_its_own() -> None:
    program = amp.Program()
    with amp.program_guard(program, amp.Program("startup")), amp.unique_name.guard():
        *_, scores, loss = quickstart.network()
    assert scores.shape is not None and scores.shape[-1] == 10
    assert not [op for op in program.operators if op.type == "Softmax"]
    assert [op.guard for op in program.operators if op.type in ("Conv", "MatMul")] == [False, True] and loss.shape == ()


def test_curves_of_runs_that_coincide_are_drawn_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import matplotlib.pyplot as plt

    loss = list(np.exp(-np.arange(100) / 20))
    histories = [training.History(mode, loss, [1.0] * 100, [0.5, 0.9]) for mode in training.MODES]
    drawn: list[list[str]] = []

    def look(figure: plt.Figure) -> None:
        drawn.extend([line.get_label() for line in axes.lines] for axes in figure.axes)
        assert figure.axes[0].get_yscale() == "linear"

    monkeypatch.setattr(plt, "close", look)
    training.plot(histories, str(tmp_path / "p.png"), "three alike")
    assert len(drawn) == 9  # each mode has panels of its own, the first one in gray behind
    assert drawn[0] == ["fp32"] and drawn[3] == ["fp32", "mixed"] and drawn[6] == ["fp32", "pure"]
