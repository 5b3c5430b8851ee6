"""What an imported model makes of x, and a gradient of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

import amp_transpiler as amp
from amp_transpiler.nn import functional as F


def slope(found: amp.Program, x: np.ndarray) -> list[np.ndarray]:
    """The output of a program of one input, and the gradient of the sum of its squares, on CPU."""
    with amp.program_guard(found), amp.unique_name.guard():
        given, y = found.inputs[0], found.outputs[0]
        given.stop_gradient = False
        ((_, gradient),) = amp.append_backward(F.sum(y * y), parameter_list=[given])
    executor, scope = amp.Executor(amp.CPUPlace()), amp.Scope()
    executor.run(found.startup, scope=scope)
    return executor.run(found, {"x": x}, [y, gradient], scope)


def assert_slope(found: amp.Program, x: np.ndarray, expected: Sequence[np.ndarray], tolerance: float = 1e-5) -> None:
    """A rewritten program gives what :func:`slope` gave of it before."""
    for value, right in zip(slope(found, x), expected, strict=True):
        np.testing.assert_allclose(value, right, rtol=tolerance, atol=tolerance)


def assert_stays(found: amp.Program, rewrite: Callable[[amp.Program], list[str]]) -> None:
    """A rewriting finds nothing in a program, and leaves its operators."""
    before = [op.type for op in found.operators]
    assert not rewrite(found) and [op.type for op in found.operators] == before
