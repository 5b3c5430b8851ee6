"""One optimizer on parameters whose gradients are fed."""

from __future__ import annotations

from typing import Any

import numpy as np

from amp_transpiler.ir import unique_name
from amp_transpiler.nn.parameters import create_parameter
from amp_transpiler.optimizer.base import Optimizer
from amp_transpiler.program import Program, program_guard
from tests.helpers.steps import Steps, feed


class Training:
    """One optimizer on parameters whose gradients are fed."""

    def __init__(
        self,
        optimizer: Optimizer,
        arrays: list[np.ndarray[Any, Any]],
        dtype: str = "float32",
        gated: bool = False,
        level: str = "BASIC",
    ) -> None:
        self.main, self.startup = Program(), Program("startup")
        with program_guard(self.main, self.startup), unique_name.guard():
            parameters = [create_parameter(a.shape, "float32", f"p{i}", a) for i, a in enumerate(arrays)]
            for parameter in parameters:
                parameter.dtype = dtype  # as a precision pass does; the startup program stays fp32
            grads = [feed(self.main, f"p{i}@GRAD", "float32", a.shape) for i, a in enumerate(arrays)]
            found = feed(self.main, "found", "bool", (1,)) if gated else None
            pairs = list(zip(parameters, grads, strict=True))
            self.gated = gated
            self.ops = optimizer.append_updates(pairs, self.startup, found)
        self.steps = Steps(self.main, self.startup, level)
        for i, array in enumerate(arrays):
            self.steps.state[f"p{i}"] = array.astype(dtype)

    def step(self, *grads: Any, found: bool = False) -> None:
        feeds = {f"p{i}@GRAD": np.asarray(g, np.float32) for i, g in enumerate(grads)}
        self.steps(feeds | ({"found": np.array([found])} if self.gated else {}), [])

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        return self.steps.state[name]
