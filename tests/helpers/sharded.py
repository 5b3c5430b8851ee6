"""A net whose optimizer's state is dealt out among the ranks, or not, with all that a step may hold."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

import amp_transpiler as amp
from amp_transpiler import distributed
from amp_transpiler.nn import functional as F

BATCH = 8
#: A loss scale that is no power of two: what is multiplied by its inverse sooner or later is rounded otherwise.
SCALE = 1000.0


class Net:
    """``layers`` of ``width``, as one rank trains them; ``mode`` is "fp32", "mixed" or "pure"."""

    def __init__(
        self,
        shard: bool,
        mode: str = "pure",
        dtype: str = "float16",
        kind: str = "Adam",
        layers: int = 1,
        width: int = 12,
        ema: bool = False,
        groups: bool = False,
        more: dict[str, Any] | None = None,
        **decorated: Any,
    ) -> None:
        self.main, self.startup = amp.Program(), amp.Program("startup")
        self.startup.seed = 5
        with amp.program_guard(self.main, self.startup), amp.unique_name.guard():
            x, label = amp.data("x", [None, 6], "float32"), amp.data("label", [None, 1], "int64")
            h = x * amp.data("boost", [1], "float32")
            for _ in range(layers):
                h = amp.nn.fc(h, width, act="relu")
            self.loss = F.mean(F.cross_entropy(amp.nn.fc(h, 4), label))
            self.test = self.main.clone(for_test=True)
            options: dict[str, Any] = {"multi_precision": True} | (more or {})
            if groups:
                first, *rest = self.main.parameters
                slow: dict[str, Any] = {"params": [first], "learning_rate": 0.5, "weight_decay": 0.1}
                options["parameter_list"] = [slow, {"params": rest}]
            self.optimizer: Any = getattr(amp.optimizer, kind)(0.02, **options)
            if mode != "fp32":
                scaling = {"init_loss_scaling": SCALE, "decr_every_n_nan_or_inf": 1} if dtype == "float16" else {}
                self.optimizer = amp.decorate(
                    self.optimizer,
                    use_pure_fp16=mode == "pure",
                    use_fp16_guard=False,
                    dtype=dtype,
                    **{**scaling, **decorated},
                )
            if shard:
                assert distributed.shard_optimizer(self.optimizer) is self.optimizer
            self.optimizer.minimize(self.loss, self.startup)
            self.ema = amp.optimizer.ExponentialMovingAverage(0.5) if ema else None
            if self.ema is not None:
                self.ema.update(self.main, self.startup)
        self.exe, self.scope = amp.Executor(amp.CPUPlace(), threads=1), amp.Scope()
        self.exe.run(self.startup, scope=self.scope)
        if mode != "fp32":
            self.optimizer.amp_init(amp.CPUPlace(), scope=self.scope)

    def step(self, number: int, boost: float = 1.0) -> float:
        """The loss on this rank's share of a batch."""
        rng = np.random.default_rng(number)
        feed = {"x": rng.normal(size=(BATCH, 6)).astype(np.float32), "label": rng.integers(0, 4, (BATCH, 1))}
        mine = slice(distributed.rank(), None, distributed.world_size())
        feed = {name: np.ascontiguousarray(array[mine]) for name, array in feed.items()}
        feed["boost"] = np.full(1, boost, np.float32)
        return float(self.exe.run(self.main, feed=feed, fetch_list=[self.loss], scope=self.scope)[0])

    def names(self) -> list[str]:
        """The variables of the state."""
        return [v.name for v in self.main.variables if v.persistable]

    def state(self) -> dict[str, bytes]:
        """All of the state, from whatever rank has it."""
        return {name: distributed.find_var(name, self.scope).tobytes() for name in self.names()}

    def saved(self, folder: Path) -> list[str]:
        """Hashes of the files of a checkpoint, as rank 0 wrote it."""
        amp.save_checkpoint(folder, self.main, self.scope)
        return [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())]
