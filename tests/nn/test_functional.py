"""Functions of the builder: values and gradients beside torch's, element types, every node on CUDA."""

from __future__ import annotations

import re

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.nn import functional as F
from amp_transpiler.passes.lowering.lowering import lower
from tests.corpora.layer_cases import CASES
from tests.helpers.cuda_kernels import without_cuda_kernel
from tests.helpers.recorded_layers import built, recorded
from tests.helpers.where import ROOT


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_are_torchs(name: str) -> None:
    main, startup, feeds, y, grads = built(name)
    scope, exe = amp.Scope(), amp.Executor(threads=1)
    exe.run(startup, scope=scope)
    value, *found = exe.run(main, feed=feeds, fetch_list=[y, *grads.values()], scope=scope)
    expected = recorded()[f"{name}/y"]
    assert value.dtype == expected.dtype and y.dtype == expected.dtype.name
    assert y.shape is not None and len(y.shape) == expected.ndim
    assert all(size in (None, there) for size, there in zip(y.shape, expected.shape, strict=True))
    np.testing.assert_allclose(value, expected, rtol=2e-4, atol=2e-5)
    wanted = {int(key.split("/d")[1]) for key in recorded() if key.startswith(f"{name}/d")}
    assert set(grads) == wanted
    for i, gradient in zip(grads, found, strict=True):
        np.testing.assert_allclose(gradient, recorded()[f"{name}/d{i}"], rtol=3e-4, atol=3e-5, err_msg=f"input {i}")


@pytest.mark.parametrize("name", CASES)
def test_every_node_has_a_cuda_kernel(name: str) -> None:
    main, _, feeds, y, grads = built(name)
    model = lower(main, "cuda", {key: array.shape for key, array in feeds.items()}, [y, *grads.values()]).model
    missing = [node.split("(")[0] for node in without_cuda_kernel(model)]
    # of which onnxruntime has no kernel anywhere, and which it replaces by its function body, of operators that all have one
    assert set(missing) <= {"Mish"}


def test_the_record_is_of_these_cases() -> None:
    assert {key.split("/")[0] for key in recorded()} == set(CASES)


def test_every_function_is_tried_somewhere() -> None:
    """A function that is added to F without a test fails here."""
    text = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    assert [name for name in F.__all__ if not re.search(rf"F\.{name}\b", text) and name not in CASES] == []
