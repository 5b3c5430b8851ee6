"""Feeds that are on the device before the step that needs them."""

from __future__ import annotations

import contextvars
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.ir.types import element_type
from amp_transpiler.lists import place_traits
from amp_transpiler.option_checks import whole
from amp_transpiler.passes.lowering.place import CPUPlace, Place
from amp_transpiler.runtime import device_tensors
from amp_transpiler.runtime.binding import UNBOUND
from amp_transpiler.runtime.feeds import LITERALS
from amp_transpiler.runtime.providers import in_turn

_WIDE = frozenset({"int64", "uint64"})


def staged(feed: Mapping[Any, Any], place: Place) -> dict[Any, Any]:
    """The feed with a copy on ``place`` of each tensor; see ``Executor.stage``."""
    if not isinstance(feed, Mapping):
        raise ArgumentTypeError(f"feed is a dictionary of input name -> array, got {type(feed).__name__}")
    with in_turn(place):
        return {name: _staged(value, place) for name, value in feed.items()}


def _staged(value: Any, place: Place) -> Any:
    if hasattr(value, "data_ptr") and hasattr(value, "device_name"):
        if not value.is_tensor():
            return value
        return device_tensors.copy_to(value, _memory_for(device_tensors.dtype_of(value), place))
    if value is None or isinstance(value, (*LITERALS, str, bytes)):
        return value  # these take the type that the program declares, which is not known here
    try:
        array = np.asarray(value)
        kind = element_type(array.dtype)
    except (ArgumentError, TypeError, ValueError, RuntimeError):
        return value  # what is wrong with it the run says
    return value if kind in UNBOUND else device_tensors.from_array(array, _memory_for(kind, place))


def _memory_for(kind: str, place: Place) -> Place:
    """Where a tensor is staged: what a place computes with in another type, a run converts on the host."""
    return CPUPlace() if kind in _WIDE and not place_traits(place.kind).wide_integers else place


_END = object()


class _Line:
    """What the thread that stages and the one that runs share."""

    def __init__(
        self, batches: Iterable[Mapping[Any, Any]], stage: Callable[[Mapping[Any, Any]], Any], free: int
    ) -> None:
        self.batches, self.stage, self.free = iter(batches), stage, free
        self.ready: deque[Any] = deque()
        self.told = threading.Condition()
        self.closed = False

    def fill(self) -> None:
        last: Any = _END
        try:
            while self._may_stage():
                batch: Any = next(self.batches, _END)
                if batch is _END:
                    break
                self._put(self.stage(batch))
        except BaseException as error:  # raised where the batch was to come
            last = error
        self._put(last)

    def _may_stage(self) -> bool:
        with self.told:
            self.told.wait_for(lambda: self.free or self.closed)
            self.free -= 1
            return not self.closed

    def _put(self, item: Any) -> None:
        with self.told:
            self.ready.append(item)
            self.told.notify_all()

    def take(self) -> Any:
        with self.told:
            self.told.wait_for(lambda: self.ready or self.closed)
            item = _END if self.closed else self.ready.popleft()
            self.free += 1
            self.closed = self.closed or not isinstance(item, dict)
            self.told.notify_all()
            return item

    def close(self) -> None:
        with self.told:
            self.closed = True
            self.ready.clear()
            self.told.notify_all()


class Prefetch(Iterator[dict[Any, Any]]):
    """Staged feeds in the order of ``batches``, at most ``ahead`` of them before they are asked for.

    A thread reads the batches and stages them. What it raises is raised where its batch would have come. It ends with
    the batches, or after the one that it is at when this is closed or dropped.
    """

    def __init__(
        self, batches: Iterable[Mapping[Any, Any]], stage: Callable[[Mapping[Any, Any]], dict[Any, Any]], ahead: int
    ) -> None:
        whole("prefetch: ahead", ahead, 1)
        self._line = _Line(batches, stage, ahead)
        weakref.finalize(self, self._line.close)
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._line.fill,), name="prefetch", daemon=True)
        self._thread.start()

    def __next__(self) -> dict[Any, Any]:
        item = self._line.take()
        if isinstance(item, dict):
            return item
        self._thread.join()
        if item is _END:
            raise StopIteration
        raise item

    def close(self) -> None:
        """Stop; what is staged is dropped. It waits for the batch that is being made."""
        self._line.close()
        self._thread.join()

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
