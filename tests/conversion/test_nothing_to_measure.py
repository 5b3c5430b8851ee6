"""Data on which a model gives nothing but NaN measure nothing, which is no error of 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.cli import main
from amp_transpiler.conversion.synthetic import SYNTHETIC
from amp_transpiler.conversion.verdict import CALIBRATION, Verdict

TEXT = '<ir_version: 9, opset_import: ["" : 17]> g (float[4] x) => (float[4] y, float[4] z) { y = Exp(x)  z = BODY }'
NAN = np.full(4, np.nan, np.float32)


@pytest.fixture
def model() -> onnx.ModelProto:
    return onnx.parser.parse_model(TEXT.replace("BODY", "Neg(x)"))


@pytest.mark.parametrize("keywords", [{"mode": "auto"}, {"check": True}])
def test_data_that_give_nothing_but_nan_are_refused(model: onnx.ModelProto, keywords: dict[str, Any]) -> None:
    with pytest.raises(
        amp.AmpError, match="every floating-point output of program 'g' is NaN in float32 too on the cal"
    ):
        amp.convert(model, calibration={"x": NAN}, **keywords)
    some = amp.convert(model, calibration=[{"x": NAN}, {"x": np.ones(4, np.float32)}], **keywords)
    assert some.conversion.verdict.met


def test_an_output_that_is_always_nan_is_left_to_the_model() -> None:
    model = onnx.parser.parse_model(TEXT.replace("BODY", "Log(w)"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(-np.ones(4, np.float32), "w"))
    assert amp.convert(model, check=True).conversion.verdict.met


def test_a_synthetic_sample_that_gives_nan_asks_for_data() -> None:
    text = TEXT.replace("y = Exp(x)", "p = Exp(x)  n = Neg(p)  y = Sqrt(n)").replace("BODY", "Neg(y)")
    model = onnx.parser.parse_model(text)
    verdict = amp.convert(model, check=True).conversion.verdict
    assert not verdict.met and "is NaN in float32 too on a synthetic sample" in verdict.why


def test_a_folder_is_told_from_a_file_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("o.onnx").write_bytes(b"")
    assert main(["convert", ".", "o.onnx"]) == 1
    assert "the model file '.' cannot be read: Is a directory" in capsys.readouterr().err


def test_an_output_that_left_the_range_on_a_synthetic_sample_asks_for_data() -> None:
    """The way out of "off by nan": calibration data keep fp32 what left the range."""
    verdict = Verdict({"y": float("nan"), "z": 0.5}, SYNTHETIC, 0.01)
    assert verdict.failures[0].endswith("on calibration data (--calibration) what does stays fp32")
    assert verdict.failures[1] == "output 'z' is off by 0.5, above 0.01"
    assert Verdict({"y": float("nan")}, CALIBRATION, 0.01).failures == ("output 'y' is off by nan, above 0.01",)
