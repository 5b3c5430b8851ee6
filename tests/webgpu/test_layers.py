"""Functions of the builder on WebGPU alone: values and gradients beside torch's."""

from __future__ import annotations

import numpy as np
import pytest

import amp_transpiler as amp
from tests.corpora.layer_cases import CASES
from tests.helpers.recorded_layers import built, recorded

pytestmark = pytest.mark.webgpu

PLACE = amp.WebGPUPlace(0)


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_are_torchs(name: str) -> None:
    main, startup, feeds, y, grads = built(name)
    scope, exe = amp.Scope(), amp.Executor(PLACE)
    exe.run(startup, scope=scope)
    value, *found = exe.run(main, feed=feeds, fetch_list=[y, *grads.values()], scope=scope)
    expected = recorded()[f"{name}/y"]
    assert value.dtype == expected.dtype and value.shape == expected.shape
    np.testing.assert_allclose(value, expected, rtol=3e-4, atol=3e-5)
    for i, gradient in zip(grads, found, strict=True):
        np.testing.assert_allclose(gradient, recorded()[f"{name}/d{i}"], rtol=1e-3, atol=1e-4, err_msg=f"input {i}")
