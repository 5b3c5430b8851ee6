"""One parameter that a run moves by its rate."""

from __future__ import annotations

from typing import Any

import numpy as np

import amp_transpiler as amp
from amp_transpiler import optimizer as optim
from amp_transpiler.nn import functional as F


class Net:
    """One parameter under SGD; a run reports the rate that it moved by."""

    def __init__(self, rule: Any, **decorated: Any) -> None:
        main, startup = amp.Program(), amp.Program("startup")
        with amp.program_guard(main, startup), amp.unique_name.guard():
            w = amp.create_parameter([1], name="w", initializer=np.zeros(1, np.float32))
            loss = F.mean(w * amp.data("x", [1]))
            self.optimizer: Any = optim.SGD(rule)
            if decorated:
                self.optimizer = amp.decorate(self.optimizer, **decorated)
            self.optimizer.minimize(loss, startup)
        self.main, self.startup, self.scope = main, startup, amp.Scope()
        self.executor = amp.Executor(amp.CPUPlace())
        self.executor.run(startup, scope=self.scope)

    def run(self, x: float = 1.0) -> float:
        self.scope.set_var("w", np.zeros(1, np.float32))
        self.executor.run(self.main, feed={"x": np.array([x], np.float32)}, scope=self.scope)
        return -float(self.scope.find_var("w")[0])
