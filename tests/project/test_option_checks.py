"""What counts as a number in arguments: truth values never do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from amp_transpiler.option_checks import is_finite, is_real, is_whole


@pytest.mark.parametrize(
    "value, whole, real, finite",
    [
        (3, True, True, True),
        (np.int64(3), True, True, True),
        (0.5, False, True, True),
        (np.float32(0.5), False, True, True),
        (float("nan"), False, True, False),
        (float("inf"), False, True, False),
        (10**400, True, True, False),  # beyond all floats
        (True, False, False, False),
        (np.True_, False, False, False),
        ("3", False, False, False),
        (None, False, False, False),
        (1j, False, False, False),
    ],
)
def test_what_is_a_number(value: Any, whole: bool, real: bool, finite: bool) -> None:
    assert (is_whole(value), is_real(value), is_finite(value)) == (whole, real, finite)
