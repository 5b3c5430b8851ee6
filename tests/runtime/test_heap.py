"""Memory of values that were replaced goes back to the system."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.tools.memory_run import measured

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is read from /proc")


def test_values_that_were_replaced_take_no_memory(tmp_path: Path) -> None:
    """In a process of its own: what other tests left in the heap of this one may hold a block of either size."""
    taken = measured("--replaced", str(tmp_path))
    assert taken[1] < taken[0] - 12 and taken[2] < taken[1] + 4, taken  # MiB; the parameters are 32, and then 16


def test_a_checkpoint_is_loaded_in_the_memory_of_its_state_and_a_tensor(tmp_path: Path) -> None:
    over, anew, state = measured("--loaded", str(tmp_path))  # MiB; each of the largest tensors has 4
    assert state > 72 and over < 48 and anew < state + 16, (over, anew)
