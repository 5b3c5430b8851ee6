"""Variances over sizes that are known in the run alone: advantages of a batch, lengths of a text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.ir.types import numpy_dtype
from amp_transpiler.nn import functional as F

Array = np.ndarray


def computed(call: Callable[..., Any], x: Array, mode: str, **arguments: Any) -> tuple[Array, Array]:
    """The value and the gradient of its sum, of an input whose sizes are open."""
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        fed = amp.data("x", [None] * x.ndim, "float32")
        by = amp.create_parameter([1], name="by", initializer=np.ones(1, np.float32))
        scaled = fed * by
        y = call(scaled, **arguments)
        loss = F.sum(F.cast(y, "float32"))
        if mode == "fp32":
            grad = amp.append_backward(loss, parameter_list=[scaled])[0][1]
        else:
            plain = amp.optimizer.SGD(0.0, multi_precision=True)
            rate = {"init_loss_scaling": 128.0, "use_dynamic_loss_scaling": False} if mode == "float16" else {}
            optimizer = amp.decorate(plain, use_pure_fp16=True, use_fp16_guard=False, dtype=mode, **rate)
            grad = optimizer.backward(loss, parameter_list=[by])[0][1]
    scope, executor = amp.Scope(), amp.Executor(threads=1)
    executor.run(startup, scope=scope)
    if mode != "fp32":
        optimizer.amp_init(amp.CPUPlace(), scope=scope)
    value, slope = executor.run(main, feed={"x": x}, fetch_list=[y, grad], scope=scope)
    scale = 128.0 if mode == "float16" else 1.0
    return np.asarray(value, np.float64), np.asarray(slope, np.float64) / scale


@pytest.mark.parametrize("name", ["var", "std"])
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize(("shape", "axis"), [((7,), None), ((3, 5), 1), ((4, 3, 5), (0, 2)), ((2, 3), None)])
def test_unbiased_over_open_sizes(name: str, keepdim: bool, shape: tuple[int, ...], axis: Any) -> None:
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    value, slope = computed(getattr(F, name), x, "fp32", axis=axis, keepdim=keepdim)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(value, getattr(wide, name)(axis, ddof=1, keepdims=keepdim), rtol=2e-6)
    count = x.size / wide.var(axis).size
    deviation = wide - wide.mean(axis, keepdims=True)
    exact = (
        2 * deviation / (count - 1)
        if name == "var"
        else deviation / (count - 1) / wide.std(axis, ddof=1, keepdims=True)
    )
    np.testing.assert_allclose(slope, exact, rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("mode", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["var", "std"])
@pytest.mark.parametrize("count", [2, 64, 70000])
def test_in_16_bit(name: str, mode: str, count: int) -> None:
    """Where the count itself is beyond float16, too."""
    x = np.random.default_rng(1).normal(3, 2, size=count).astype(numpy_dtype(mode)).astype(np.float32)
    value, slope = computed(getattr(F, name), x, mode)
    exact = getattr(x.astype(np.float64), name)(ddof=1)
    close = 4e-3 if mode == "float16" else 3e-2
    assert value == pytest.approx(exact, rel=close)
    assert slope == pytest.approx(exact * (2 if name == "var" else 1), rel=10 * close)


def test_of_one_element_it_is_nan() -> None:
    for call in (F.var, F.std):
        assert np.isnan(computed(call, np.ones(1, np.float32), "fp32")[0])
