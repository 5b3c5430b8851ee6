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
from amp_transpiler.passes.lowering.place import Place
from amp_transpiler.runtime import device_tensors
from amp_transpiler.runtime.collective.current import engine_on
from amp_transpiler.runtime.collective.engine import Engine
from amp_transpiler.runtime.collective.journal import Journal
from amp_transpiler.runtime.collective.thread import Work


@dataclass(frozen=True)
class _Call:
    """A call of the engine, or of several exchanges that are joined, on arrays that are here for good."""

    exchanged: Exchanged
    sent: Sequence[Any]
    received: Sequence[Any]
    nbytes: int

    @property
    def name(self) -> str:
        """What it is called in journals."""
        each = self.exchanged
        dtypes = ", ".join(dict.fromkeys(SHORT.get(tensor.dtype, tensor.dtype) for tensor in each.sent))
        return f"bucket {each.bucket}, {dtypes}" + ("" if each.call.joined else f" {each.received[0].name}")

    def run(self, engine: Engine, mark: Any) -> None:
        """``mark``: of the stream on which sessions compute, behind what is sent."""
        if mark is None or self.exchanged.call.on_device:
            engine.follow(mark)
            self.exchanged.call.call(engine, self.sent, self.received, self.exchanged.attrs)
            return
        mark.sync()
        sent = [device_tensors.to_array(value) for value in self.sent]
        in_place = self.exchanged.call.in_place
        received = sent if in_place else [device_tensors.to_array(value) for value in self.received]
        self.exchanged.call.call(engine, sent, received, self.exchanged.attrs)
        for value, array in zip(self.received, received, strict=True):
            device_tensors.write(value, array)

    def run_alone(self) -> None:
        """What there is of it for one rank; see ``by_itself`` in ``passes/lowering/exchanges.py``."""
        if not self.exchanged.call.in_place:
            for sent, received in zip(self.sent, self.received, strict=False):
                if isinstance(received, np.ndarray):
                    received[...] = np.resize(sent, received.shape)
                else:
                    array = device_tensors.to_array(sent)
                    device_tensors.write(received, np.resize(array, received.shape()))


class Buckets:
    """The memory of what one run at a time exchanges, and its views: joined exchanges of a bucket lie in one array.

    ``made_for``: the engine on whose stream sessions compute, where there is such a stream. Then exchanges are called
    with values on its place, which have a ``size``; otherwise with numpy's arrays.
    """

    def __init__(self, exchanged: Sequence[Exchanged], place: Place, made_for: Engine | None) -> None:
        self.place, self.made_for = place, made_for
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
            count = sum(each.nbytes for member in members for each in member.received)
            self._calls.setdefault(first.part, []).append(_Call(first, sent, received, count))

    def _flat(self, tensors: Sequence[Tensor]) -> Any:
        """Memory of several tensors of one type, one behind the other."""
        rows = Rows(tuple(range(len(tensors))), tuple(each.shape for each in tensors))
        whole, flat = self._zeros((max(1, rows.shape[1]),), tensors[0].dtype)
        self._wholes.append(whole)
        for each, offset in zip(tensors, rows.offsets, strict=True):
            empty = 0 in each.shape
            self.views[each.name] = (
                device_tensors.empty(each.shape, each.dtype, self.place)
                if empty
                else device_tensors.view(whole, offset, each.shape)
            )
        return flat

    def _shaped(self, tensor: Tensor) -> Any:
        """Memory of a tensor."""
        self.views[tensor.name], array = self._zeros(tensor.shape, tensor.dtype)
        return array

    def _zeros(self, shape: tuple[int, ...], dtype: str) -> tuple[Any, Any]:
        """A value of zeros, and as what exchanges are called with it."""
        zeros = np.zeros(shape, numpy_dtype(dtype))
        if self.made_for is None:
            return device_tensors.alias(zeros, dtype), zeros
        value = device_tensors.from_array(zeros, self.place)
        value.size = zeros.size
        return value, value

    def start(self, part: int, journal: Journal) -> list[tuple[int, str, Work[Any]]]:
        """Let travel what leaves after a part: the number of its send, its name, what waits until it is there."""
        calls = self._calls.get(part, ())
        engine = engine_on(self.place) if calls else None
        if engine is None:
            for call in calls:
                call.run_alone()
            return []
        mark = None if self.made_for is None else self.made_for.mark()
        started = []
        for call in calls:
            run = partial(journal.exchange, engine, call.name, call.nbytes, partial(call.run, engine, mark))
            started.append((call.exchanged.bucket, call.name, engine.submit(run)))
        return started
