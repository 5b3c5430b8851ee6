"""Two nets as a rank trains them on its share of a batch, with a step that overflows on one rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import amp_transpiler as amp
from amp_transpiler.nn import functional as F

#: Examples of a batch of all ranks, and of classes.
BATCH, CLASSES = 8, 4
MODES = ("fp32", "mixed", "pure")


def mlp(x: amp.Variable, width: int) -> amp.Variable:
    h = amp.nn.fc(x, width, act="relu")
    return amp.nn.fc(amp.nn.fc(h, width, act="relu"), CLASSES)


def cnn(x: amp.Variable, width: int) -> amp.Variable:
    h = F.relu(amp.nn.conv2d(x, width, 3, padding=1))
    h = F.relu(amp.nn.conv2d(h, width, 3, padding=1, stride=2))
    return amp.nn.fc(F.global_avg_pool2d(h), CLASSES)


def normed(x: amp.Variable, width: int) -> amp.Variable:
    """With batch normalisation over all ranks, which they meet at in the forward pass."""
    h = amp.nn.batch_norm(amp.nn.conv2d(x, width, 3, padding=1), act="relu", synchronized=True)
    return amp.nn.fc(F.global_avg_pool2d(h), CLASSES)


def _image(width: int) -> tuple[int, ...]:
    return 2, 6, 6


#: The nets, and the shape of an example for each width.
NETS = {"mlp": (mlp, lambda width: (width,)), "cnn": (cnn, _image), "normed": (normed, _image)}


@dataclass
class Run:
    """What a rank saw of its training: losses and loss scales of the steps, their seconds, the state at the end."""

    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    state: dict[str, np.ndarray] = field(default_factory=dict)
    skipped: list[int] = field(default_factory=list)


class Trainer:
    """A net in one mode on one place, by this rank of those that there are."""

    def __init__(self, net: str, mode: str, place: Any, width: int = 16) -> None:
        layers, shape = NETS[net]
        self.shape, self.place, self.mode = shape(width), place, mode
        self.main, startup = amp.Program(net), amp.Program("startup")
        startup.seed = 5
        with amp.program_guard(self.main, startup), amp.unique_name.guard():
            x = amp.data("x", [None, *self.shape], "float32")
            label = amp.data("label", [None, 1], "int64")
            self.loss = F.mean(F.cross_entropy(layers(x, width) * amp.data("boost", [1], "float32"), label))
            optimizer: Any = amp.optimizer.Momentum(0.05, 0.9, multi_precision=True)
            if mode != "fp32":
                scaling = {"init_loss_scaling": 64.0, "decr_every_n_nan_or_inf": 1, "decr_ratio": 0.5}
                optimizer = amp.decorate(optimizer, use_pure_fp16=mode == "pure", use_fp16_guard=False, **scaling)
            optimizer.minimize(self.loss, startup)
        self.exe, self.scope = amp.Executor(place), amp.Scope()
        amp.Executor(amp.CPUPlace()).run(
            startup, scope=self.scope
        )  # where numbers are numbers, over stub libraries too
        if mode != "fp32":
            optimizer.amp_init(amp.CPUPlace(), scope=self.scope)
        self.scale = next((v.name for v in self.main.variables if v.name.startswith("loss_scaling")), None)

    def feed(self, step: int, boost: float = 1.0, batch: int = BATCH) -> dict[str, np.ndarray]:
        """This rank's share of a batch."""
        rng = np.random.default_rng(step)
        whole = {
            "x": rng.normal(size=(batch, *self.shape)).astype(np.float32),
            "label": rng.integers(0, CLASSES, (batch, 1)),
        }
        mine = slice(amp.distributed.rank(), None, amp.distributed.world_size())
        return {name: array[mine].copy() for name, array in whole.items()} | {"boost": np.full(1, boost, np.float32)}

    def run(self, step: int, boost: float = 1.0, batch: int = BATCH) -> float:
        """The loss on this rank's share."""
        return float(self.exe.run(self.main, self.feed(step, boost, batch), [self.loss], self.scope)[0])

    def state(self) -> dict[str, np.ndarray]:
        return {v.name: np.array(self.scope.find_var(v.name)) for v in self.main.variables if v.persistable}

    def parameters(self) -> dict[str, np.ndarray]:
        return {v.name: np.array(self.scope.find_var(v.name)) for v in self.main.parameters}

    def train(self, steps: Sequence[int] | range, bad: tuple[int, int] = (-1, -1), batch: int = BATCH) -> Run:
        """``bad``: the step that overflows, and the rank on which it does."""
        run = Run()
        for step in steps:
            here = (step, amp.distributed.rank()) == bad
            boost = np.inf if here and self.mode != "fp32" else 1.0
            before = self.parameters() if step == bad[0] else {}
            started = time.perf_counter()
            run.losses.append(self.run(step, boost, batch))
            run.seconds.append(time.perf_counter() - started)
            run.scales.append(1.0 if self.scale is None else float(self.scope.find_var(self.scale)[0]))
            if before and all(np.array_equal(value, before[name]) for name, value in self.parameters().items()):
                run.skipped.append(step)
        run.state = self.state()
        return run
