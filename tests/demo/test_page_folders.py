"""The folders of the page in ``demo/browser``: what is refused before anything is made."""

from __future__ import annotations

from pathlib import Path

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
