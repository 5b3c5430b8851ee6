"""What an imported model makes of x, and a gradient of it."""

from __future__ import annotations

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
