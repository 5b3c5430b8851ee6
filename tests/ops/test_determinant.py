"""Det's gradient, against central differences in float64."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.gradcheck import check_gradient

pytestmark = pytest.mark.rules


@pytest.mark.parametrize("shape", [(1, 1), (3, 3), (2, 3, 4, 4), (0, 3, 3)])
def test_the_gradient_of_a_determinant(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).uniform(-1, 1, shape) + 2 * np.eye(shape[-1])
    check_gradient("Det", [x])
