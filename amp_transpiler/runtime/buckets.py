"""Gradients on their way between ranks: buckets that lie one tensor behind the other, reduced where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from amp_transpiler.ir.flat import Rows
from amp_transpiler.ir.types import SHORT, numpy_dtype
from amp_transpiler.passes.lowering.exchanges import Exchanged
from amp_transpiler.runtime import device_tensors
from amp_transpiler.runtime.collective.current import several
from amp_transpiler.runtime.collective.engine import Engine
from amp_transpiler.runtime.collective.journal import Journal
from amp_transpiler.runtime.collective.thread import Work


class Buckets:
    """The memory of what one run at a time exchanges: a flat array for each bucket and element type, and its views."""

    def __init__(self, exchanged: Sequence[Exchanged]) -> None:
        groups: dict[tuple[int, str, str], list[Exchanged]] = {}
        for each in exchanged:
            groups.setdefault((each.bucket, each.dtype, each.name if each.gathered else ""), []).append(each)
        #: The tensors that travel, by name.
        self.views: dict[str, Any] = {}
        self._flat: dict[int, list[tuple[str, np.ndarray, bool]]] = {}
        self._wholes = []
        for (bucket, dtype, gathered), members in groups.items():
            rows = Rows(tuple(range(len(members))), tuple(each.shape for each in members))
            flat = np.zeros(rows.shape[1] or (0 if gathered else 1), numpy_dtype(dtype))
            whole = device_tensors.alias(flat, dtype)
            self._wholes.append(whole)
            for each, offset in zip(members, rows.offsets, strict=True):
                empty = 0 in each.shape
                view = (
                    device_tensors.empty(each.shape, dtype) if empty else device_tensors.view(whole, offset, each.shape)
                )
                self.views[each.name] = view
            name = f"bucket {bucket}, {SHORT.get(dtype, dtype)}" + (f" {gathered}" if gathered else "")
            self._flat.setdefault(bucket, []).append((name, flat, bool(gathered)))

    def start(self, bucket: int, journal: Journal) -> list[tuple[str, Work[Any]]]:
        """Let a bucket travel: names of exchanges, and what waits until each is there."""
        engine = several()
        if engine is None:
            return []
        started = []
        for name, flat, gathered in self._flat.get(bucket, ()):
            call = partial(_gather if gathered else _reduce, engine, flat)
            started.append((name, engine.submit(partial(journal.exchange, engine, name, flat.nbytes, call))))
        return started


def _reduce(engine: Engine, flat: np.ndarray) -> None:
    engine.all_reduce(flat, "mean")


def _gather(engine: Engine, flat: np.ndarray) -> None:
    own = flat.size // engine.size
    engine.all_gather(flat[engine.rank * own :][:own], [own] * engine.size, flat)
