"""Proves the gradient of a linear operator A of a model's input times its parameter w."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.nn import functional as F
from tests.helpers.cuda_kernels import without_cuda_kernel


def check_linear(
    model: onnx.ModelProto, x: np.ndarray, u: np.ndarray, forward: Callable[[np.ndarray], np.ndarray]
) -> None:
    """Of y = A(x w), w all ones: y as ``forward`` has it, and the slope of <g, A(x w)> by w along u is <g, A(x u)>.

    The gradient's program for CUDA has kernels for all it does.
    """
    expected = forward(x)
    weights = np.random.default_rng(1).standard_normal(expected.shape).astype(np.float32)
    program = amp.Program.from_onnx(model)
    amp.prepare_training(program)
    with amp.program_guard(program, program.startup), amp.unique_name.guard():
        y = program.outputs[0]
        loss = F.sum(y * amp.data("g", list(expected.shape), "float32"))
        ((_, gradient),) = amp.append_backward(loss)
    feed = {"x": x, "g": weights}
    lowered = program.lower(amp.CUDAPlace(0), feed_shapes={n: a.shape for n, a in feed.items()}, fetch_list=[gradient])
    assert not without_cuda_kernel(onnx.shape_inference.infer_shapes(lowered.model))
    exe, scope = amp.Executor(amp.CPUPlace()), amp.Scope()
    exe.run(program.startup, scope=scope)
    found, slope = exe.run(program, feed, [y, gradient], scope)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * max(1, float(np.abs(expected).max())))
    along = np.sum(weights * forward(x * u))
    assert np.sum(slope.astype(np.float64) * u) == pytest.approx(along, abs=1e-5 * float(np.abs(weights).sum()))
