"""Recommenders whose tables are dealt out among the ranks, and their batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import amp_transpiler as amp
from amp_transpiler import distributed
from tests.helpers.tables import IDS, ROWS

BATCH = 8


def dealing(make: Callable[[], Any], dealt: bool = True) -> Callable[[amp.Program], Any]:
    """An optimizer of a program whose tables are dealt out before."""

    def optimizer(program: amp.Program) -> Any:
        if dealt:
            distributed.shard_tables(amp.split_embedding_parameters(program)[0])
        return make()

    return optimizer


def batch(step: int, ids: Callable[[Any], np.ndarray] | None = None) -> dict[str, np.ndarray]:
    """This rank's share of a batch."""
    rng = np.random.default_rng(step)
    rows = rng.integers(0, ROWS, (BATCH, IDS)) if ids is None else ids(rng)
    feed = {"ids": rows, "label": rng.normal(size=(len(rows), 1)).astype(np.float32)}
    return {k: np.ascontiguousarray(v[distributed.rank() :: distributed.world_size()]) for k, v in feed.items()}
