"""What the page of ``demo/browser`` trains, exported by the program beside it."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest

from tests.helpers.browser import PAGE


def make_folders(out: Path, *options: str, status: int | re.Pattern[str] = 0) -> None:
    """Run ``demo/browser/make_folders.py``, which ends with this status, or with an error that says so."""
    words = ["make_folders.py", "--out", str(out), *options]
    with mock.patch.object(sys, "argv", words), pytest.raises(SystemExit) as ended:
        runpy.run_path(str(PAGE / "make_folders.py"), run_name="__main__")
    code = ended.value.code
    assert status.search(str(code)) if isinstance(status, re.Pattern) else code == status, code
