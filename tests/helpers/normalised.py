"""A small net whose batch normalisations several ranks share, and its training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import amp_transpiler as amp
from amp_transpiler import distributed
from amp_transpiler.nn import functional as F

BATCH, STEPS = 12, 4
State = dict[str, np.ndarray]


class Net:
    """Two convolutions and a layer, normalised each; the loss is a sum over examples, times the ranks."""

    def __init__(self, mode: str = "fp32", synchronized: bool = True, by_hand: bool = False) -> None:
        self.main, startup = amp.Program(), amp.Program("startup")
        startup.seed = 3
        with amp.program_guard(self.main, startup), amp.unique_name.guard():
            x, y = amp.data("x", [None, 3, 6, 6], "float32"), amp.data("y", [None, 1], "int64")
            h = amp.nn.conv2d(x * amp.data("boost", [1], "float32"), 4, 3, padding=1, bias_attr=False)
            h = amp.nn.batch_norm(h, act="relu", synchronized=synchronized)
            h = amp.nn.conv2d(h, 4, 3, bias_attr=False)
            h = amp.nn.batch_norm(h, act="relu", synchronized=synchronized)
            h = amp.nn.batch_norm(amp.nn.fc(h, 8, bias_attr=False), act="relu", synchronized=synchronized)
            share = distributed.world_size() / BATCH
            self.loss = F.sum(F.cross_entropy(amp.nn.fc(h, 3), y, reduction="none")) * share
            self.test = self.main.clone(for_test=True)
            optimizer: Any = amp.optimizer.Momentum(0.02, 0.9, multi_precision=mode == "pure")
            if mode != "fp32":
                scaling = {"init_loss_scaling": 128.0, "decr_every_n_nan_or_inf": 1}
                optimizer = amp.decorate(optimizer, use_pure_fp16=mode == "pure", use_fp16_guard=False, **scaling)
            if by_hand:
                optimizer.apply_gradients(distributed.all_reduce(optimizer.backward(self.loss, startup)))
            else:
                optimizer.minimize(self.loss, startup)
        self.exe, self.scope = amp.Executor(amp.CPUPlace(), optimization_level="basic"), amp.Scope()
        self.exe.run(startup, scope=self.scope)
        if mode == "pure":
            optimizer.amp_init(amp.CPUPlace(), scope=self.scope)

    def feed(self, number: int, shares: Sequence[int] = (0,), boost: float = 1.0) -> dict[str, np.ndarray]:
        """This rank's share of a batch, with values far from 0 besides the spread."""
        rng = np.random.default_rng(number)
        x = rng.normal(size=(BATCH, 3, 6, 6)) * [[[[1.0]], [[20.0]], [[0.1]]]] + [[[[5.0]], [[-90.0]], [[3.0]]]]
        y = (x[:, :1].mean(axis=(2, 3)) > 5).astype(np.int64)
        mine = slice(*[*shares, BATCH][distributed.rank() :][:2])
        return {"x": x.astype(np.float32)[mine], "y": y[mine], "boost": np.full(1, boost, np.float32)}

    def step(self, number: int, shares: Sequence[int] = (0,), boost: float = 1.0) -> float:
        return float(self.exe.run(self.main, self.feed(number, shares, boost), [self.loss], self.scope)[0])

    def state(self) -> State:
        return {v.name: np.array(self.scope.find_var(v.name)) for v in self.main.variables if v.persistable}


def trained(mode: str, shares: Sequence[int] = (0,), by_hand: bool = False) -> Callable[[], tuple[list[float], State]]:
    """What a rank's losses and state are after a few steps."""

    def run() -> tuple[list[float], State]:
        net = Net(mode, by_hand=by_hand)
        return [net.step(number, shares) for number in range(STEPS)], net.state()

    return run
