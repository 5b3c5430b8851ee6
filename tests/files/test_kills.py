"""Some of the kills of ``tests.tools.kills``: what writes is killed at random moments, and leaves nothing but whole files."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.helpers.where import ROOT


@pytest.mark.skipif(sys.platform != "linux", reason="locks and kills are POSIX's")
def test_kills_leave_whole_files_and_the_next_run_nothing_else() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "tests.tools.kills", "4", "11"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert found.returncode == 0, found.stderr
    told = json.loads(found.stdout.splitlines()[-1])
    assert told["kills"] == 4 and {"embedded", "external", "reports", "train"} < set(told)
