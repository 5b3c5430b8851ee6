"""The folders of the page in ``demo/browser``: what is refused before anything is made."""

from __future__ import annotations

import re
from pathlib import Path

import onnx
import pytest

from tests.helpers.page_folders import make_folders


def test_a_folder_of_others_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "letter.txt").write_text("kept", encoding="utf-8")
    make_folders(tmp_path, status=2)
    assert "was not made by this program: name a new folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


@pytest.mark.parametrize("option", ["--batch=0", "--size=-3", "--contrast=nan"])
def test_numbers_are_above_0(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_folders(tmp_path / "steps", option, status=2)
    assert "above 0 value" in capsys.readouterr().err
    assert not (tmp_path / "steps").exists()


@pytest.mark.parametrize("shape", ["N, 7", "N, 3, 8, 6", ""])
def test_a_model_of_something_else_than_colour_images_is_told(shape: str, tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21]> m (float[{shape}] x) => (float[n, k] y) <float[1, 4] w = {{1, 2, 3, 4}}> {{
        a = ReduceMean(x)  y = MatMul(a, w) }}"""
    )
    onnx.save(model, tmp_path / "model.onnx")
    wanted = r"model.onnx takes \[.*\]; the page feeds colour images \[batch, 3, n, n\]"
    make_folders(tmp_path / "steps", "--model", str(tmp_path / "model.onnx"), status=re.compile(wanted))
    assert not (tmp_path / "steps").exists()
