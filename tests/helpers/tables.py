"""A small recommender: a table, dense layers behind it, and its training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import amp_transpiler as amp
from amp_transpiler.nn import functional as F

#: Rows of whole vectors: onnxruntime sums others by where they begin, so that a row alone has other bits than in a table.
ROWS, WIDTH, BATCH, IDS = 40, 8, 4, 5
Net = tuple[amp.Program, amp.Variable, amp.Variable]


def looked_up(ids: amp.Variable, table: amp.Variable, sparse: bool) -> amp.Variable:
    return F.mean(F.embedding(ids, table, sparse=sparse), axis=1)


def fewer_on_rank_1(ids: amp.Variable, table: amp.Variable, sparse: bool) -> amp.Variable:
    return looked_up(ids[:, : IDS - 2 * amp.distributed.rank()], table, sparse)


class Recommender:
    """``forward(ids, table, sparse)`` gives what the dense layers read; ``mode`` is fp32, mixed, pure or bf16.

    ``calls``: the parameters of each call of ``apply_gradients``, in the place of ``minimize``; ``code``: what
    ``minimize`` lets change the gradients; ``scaled_by``: a feed, by which the loss is multiplied.
    """

    def __init__(
        self,
        optimizers: Callable[[amp.Program], Any],
        mode: str = "fp32",
        sparse: bool = True,
        forward: Callable[[amp.Variable, amp.Variable, bool], amp.Variable] = looked_up,
        dtype: str = "float32",
        rows: int = ROWS,
        calls: Callable[[amp.Program], Sequence[set[str]]] | None = None,
        code: Callable[[Any], Any] | None = None,
        scaled_by: str = "",
        **decorated: Any,
    ) -> None:
        self.main, startup = amp.Program(), amp.Program("startup")
        startup.seed = 3
        with amp.program_guard(self.main, startup), amp.unique_name.guard():
            ids, label = amp.data("ids", [None, IDS], "int64"), amp.data("label", [None, 1], "float32")
            initial = np.random.default_rng(7).normal(size=(rows, WIDTH)).astype(np.float32)
            table = amp.create_parameter(
                [rows, WIDTH], dtype, "table", amp.nn.initializer.NumpyArrayInitializer(initial)
            )
            h = amp.nn.fc(F.cast(forward(ids, table, sparse), "float32"), 8, act="tanh")
            error = amp.nn.fc(h, 1) - label
            self.loss = F.mean(error * error)
            if scaled_by:
                self.loss = self.loss * F.sum(self.main.var(scaled_by))
            optimizer = optimizers(self.main)
            if mode != "fp32" or decorated:
                half = {"dtype": "bfloat16"} if mode == "bf16" else {}
                pure = mode in ("pure", "bf16")
                optimizer = amp.decorate(optimizer, use_pure_fp16=pure, use_fp16_guard=False, **half, **decorated)
            self.optimizer = optimizer
            if calls is None:
                optimizer.minimize(self.loss, startup, post_allreduce_callbacks=None if code is None else [code])
            else:
                pairs = optimizer.backward(self.loss, startup)
                for names in calls(self.main):
                    optimizer.apply_gradients([pair for pair in pairs if pair[0].name in names])
        self.exe, self.scope = amp.Executor(amp.CPUPlace()), amp.Scope()
        self.exe.run(startup, scope=self.scope)
        if mode not in ("fp32",):
            optimizer.amp_init(amp.CPUPlace(), scope=self.scope)

    def feed(self, step: int, ids: Any = None) -> dict[str, np.ndarray]:
        """Ids of every step among a few rows, so that they repeat within it and from one to the next."""
        rng = np.random.default_rng(step)
        ids = rng.integers(0, 9, (BATCH, IDS)) if ids is None else np.asarray(ids)
        return {"ids": ids, "label": rng.normal(size=(len(ids), 1)).astype(np.float32)}

    def train(self, steps: Sequence[int] | range = range(5), ids: Any = None) -> list[Any]:
        """The losses."""
        return [self.run(self.feed(step, ids)) for step in steps]

    def run(self, feed: dict[str, np.ndarray], fetch: Any = None) -> Any:
        return self.exe.run(self.main, feed=feed, fetch_list=[self.loss if fetch is None else fetch], scope=self.scope)[
            0
        ].copy()

    def state(self) -> dict[str, bytes]:
        """What is kept of parameters, masters and moments, bit for bit."""
        return {
            v.name: np.asarray(self.scope.find_var(v.name)).tobytes()
            for v in self.main.variables
            if v.persistable and self.scope.has_var(v.name)
        }

    def table(self) -> np.ndarray:
        return np.asarray(self.scope.find_var("table"))


def twice(
    optimizers: Callable[[amp.Program], Any], mode: str = "fp32", **options: Any
) -> tuple[Recommender, Recommender]:
    """The same net with a sparse gradient of its table, and with a dense one."""
    return Recommender(optimizers, mode, True, **options), Recommender(optimizers, mode, False, **options)
