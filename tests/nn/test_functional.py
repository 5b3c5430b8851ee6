"""Functions of the builder: values and gradients beside torch's, element types, every node on CUDA."""

from __future__ import annotations

import inspect
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


@pytest.mark.parametrize("mode", ["fp32", "pure"])
def test_the_deviation_of_what_is_alike_has_no_slope(mode: str) -> None:
    """Not NaN, as the slope of a root at 0 would make it; other rows have theirs."""
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        rows = np.float32([[2, 2, 2, 2], [1, 2, 3, 4]])
        x = amp.create_parameter([2, 4], "float32", "x", default_initializer=amp.nn.initializer.Assign(rows))
        spread = F.std(x, axis=1)
        optimizer = amp.optimizer.SGD(0.0, multi_precision=mode == "pure")
        if mode == "pure":
            optimizer = amp.decorate(optimizer, use_pure_fp16=True, use_fp16_guard=False, init_loss_scaling=1.0)
        _, ((_, gradient),) = optimizer.minimize(F.sum(F.cast(spread, "float32")), startup)
    scope, exe = amp.Scope(), amp.Executor()
    exe.run(startup, scope=scope)
    if mode == "pure":
        optimizer.amp_init(amp.CPUPlace(), scope)
    found, slope = exe.run(main, fetch_list=[spread, gradient], scope=scope)
    np.testing.assert_allclose(found, rows.std(1, ddof=1), rtol=2e-3)
    expected = np.array([np.zeros(4), np.array([-1.5, -0.5, 0.5, 1.5]) / (3 * rows[1].std(ddof=1))])
    np.testing.assert_allclose(slope, expected, rtol=5e-3)


@pytest.mark.parametrize("name", sorted(F.__all__))
def test_what_help_shows_of_a_function_is_what_it_takes(name: str) -> None:
    function = getattr(F, name)
    parameters = inspect.signature(function).parameters
    assert parameters["name"].kind is inspect.Parameter.KEYWORD_ONLY and parameters["name"].default is None
    assert function.__doc__ and "{" not in function.__doc__
    with pytest.raises(TypeError) as refused:
        function(no_such_argument=1)
    assert sorted(str(refused.value).split("the arguments are ")[1].split(", ")) == sorted(parameters)


def test_functions_of_a_family_share_a_signature() -> None:
    pools = [inspect.signature(f) for f in (F.max_pool1d, F.max_pool2d, F.max_pool3d)]
    assert pools[0] == pools[1] == pools[2]
    assert list(pools[0].parameters)[:2] == ["x", "kernel_size"]
    assert (F.conv3d.__doc__ or "").startswith("3-D convolution")
