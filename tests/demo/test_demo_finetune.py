"""The fine-tuning demo runs on scikit-learn's digits, in every mode, and freezes what it is told to."""

from __future__ import annotations

import sys
from pathlib import Path

import finetune_imported
import numpy as np
import onnx
import pytest


def test_fine_tunes_what_it_exported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    recwarn: pytest.WarningsRecorder,
) -> None:
    arguments = ["demo", "--out", str(tmp_path), "--epochs", "2", "--freeze", "*conv2d_0*"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert finetune_imported.main() == 0
    assert not [str(told.message) for told in recwarn if "no gradient" in str(told.message)], "of the head replaced"
    told = capsys.readouterr().out
    rows = [
        line.split() for line in told.splitlines() if line.split()[:1] and line.split()[0] in ("fp32", "mixed", "pure")
    ]
    assert [row[0] for row in rows] == ["fp32", "mixed", "pure"]
    assert all(float(row[1].rstrip("%")) > 80 for row in rows), told
    before, after = (
        {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(tmp_path / name).graph.initializer}
        for name in ("pretrained.onnx", "finetuned.onnx")
    )
    frozen = before["conv2d_0.w_0"]
    np.testing.assert_array_equal(after["conv2d_0.w_0"], frozen.astype(np.float16))  # stored in 16 bit, not trained
    assert "fc_0.w_0" not in after and after["new_head.w_0"].shape[1] == 10


def test_help_says_what_a_missing_option_means(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["demo", "--help"])
    with pytest.raises(SystemExit):
        finetune_imported.main()
    told = " ".join(capsys.readouterr().out.split())
    assert "trains and exports)" in told and "(default: 10000)" in told
    assert "None" not in told and "[])" not in told


def test_images_fit_the_model() -> None:
    images = np.arange(2 * 9, dtype=np.float32).reshape(2, 1, 3, 3)
    fitted = finetune_imported.fit_images(images, ("N", 3, 6, 6))
    assert fitted.shape == (2, 3, 6, 6)
    np.testing.assert_array_equal(fitted[:, 1, ::2, 1::2], images[:, 0])
    np.testing.assert_array_equal(finetune_imported.fit_images(images, ("N", 1, None, None)), images)
