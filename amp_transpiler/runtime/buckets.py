"""What ranks exchange, on its way: memory that it keeps for good, and the calls of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from amp_transpiler.ir.flat import Rows
from amp_transpiler.ir.types import SHORT, numpy_dtype
from amp_transpiler.passes.lowering.exchanges import Exchanged, Tensor
from amp_transpiler.runtime import device_tensors
from amp_transpiler.runtime.collective.current import several
from amp_transpiler.runtime.collective.engine import Engine
from amp_transpiler.runtime.collective.journal import Journal
from amp_transpiler.runtime.collective.thread import Work


@dataclass(frozen=True)
class _Call:
    """A call of the engine, or of several exchanges that are joined, on arrays that are here for good."""

    exchanged: Exchanged
    sent: Sequence[np.ndarray]
    received: Sequence[np.ndarray]

    @property
    def name(self) -> str:
        """What it is called in journals."""
        each = self.exchanged
        dtypes = ", ".join(dict.fromkeys(SHORT.get(tensor.dtype, tensor.dtype) for tensor in each.sent))
        return f"bucket {each.bucket}, {dtypes}" + ("" if each.call.joined else f" {each.received[0].name}")

    @property
    def nbytes(self) -> int:
        """Bytes of what is received."""
        return sum(array.nbytes for array in self.received)

    def run(self, engine: Engine) -> None:
        self.exchanged.call.call(engine, self.sent, self.received, self.exchanged.attrs)

    def run_alone(self) -> None:
        """What there is of it for one rank; see ``by_itself`` in ``passes/lowering/exchanges.py``."""
        if not self.exchanged.call.in_place:
            for sent, received in zip(self.sent, self.received, strict=True):
                received[...] = np.resize(sent, received.shape)


class Buckets:
    """The memory of what one run at a time exchanges, and its views: joined exchanges of a bucket lie in one array."""

    def __init__(self, exchanged: Sequence[Exchanged]) -> None:
        #: The tensors that travel, by name.
        self.views: dict[str, Any] = {}
        self._wholes = list[Any]()
        self._calls: dict[int, list[_Call]] = {}  # by the part after which they begin
        groups: dict[Any, list[Exchanged]] = {}
        for number, each in enumerate(exchanged):
            kind = repr((each.bucket, each.type, each.sent[0].dtype, sorted(each.attrs.items())))
            groups.setdefault(kind if each.call.joined else number, []).append(each)
        for members in groups.values():
            first = members[0]
            if first.call.joined:
                sent = [self._flat([tensor for each in members for tensor in each.sent])]
            else:
                sent = [self._shaped(tensor) for tensor in first.sent]
            received = sent if first.call.in_place else [self._shaped(tensor) for tensor in first.received]
            self._calls.setdefault(first.part, []).append(_Call(first, sent, received))

    def _flat(self, tensors: Sequence[Tensor]) -> np.ndarray:
        """Memory of several tensors of one type, one behind the other."""
        rows = Rows(tuple(range(len(tensors))), tuple(each.shape for each in tensors))
        flat = np.zeros(max(1, rows.shape[1]), numpy_dtype(tensors[0].dtype))
        whole = device_tensors.alias(flat, tensors[0].dtype)
        self._wholes.append(whole)
        for each, offset in zip(tensors, rows.offsets, strict=True):
            empty = 0 in each.shape
            self.views[each.name] = (
                device_tensors.empty(each.shape, each.dtype)
                if empty
                else device_tensors.view(whole, offset, each.shape)
            )
        return flat

    def _shaped(self, tensor: Tensor) -> np.ndarray:
        """Memory of a tensor."""
        array = np.zeros(tensor.shape, numpy_dtype(tensor.dtype))
        self.views[tensor.name] = device_tensors.alias(array, tensor.dtype)
        return array

    def start(self, part: int, journal: Journal) -> list[tuple[int, str, Work[Any]]]:
        """Let travel what leaves after a part: the number of its send, its name, what waits until it is there."""
        engine = several()
        calls = self._calls.get(part, ())
        if engine is None:
            for call in calls:
                call.run_alone()
            return []
        started = []
        for call in calls:
            run = partial(journal.exchange, engine, call.name, call.nbytes, partial(call.run, engine))
            started.append((call.exchanged.bucket, call.name, engine.submit(run)))
        return started
