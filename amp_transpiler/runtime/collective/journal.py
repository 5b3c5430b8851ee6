"""What the steps of a rank do when: sessions, exchanges with other ranks, and the time spent waiting for these."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from amp_transpiler.passes.lowering.cost_estimate import amount
from amp_transpiler.runtime.collective.engine import Engine


class Span(NamedTuple):
    """Something that took from ``start`` to ``end``, in seconds since the step began."""

    name: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


@dataclass(frozen=True)
class Exchange:
    """One exchange of a step: ``bytes`` of tensors, for which this rank ``sent`` and ``received`` so many.

    ``start``, ``end``: seconds since the step began. ``overlapped``: how long sessions of this rank ran meanwhile.
    """

    name: str
    bytes: int
    sent: int
    received: int
    start: float
    end: float
    overlapped: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


@dataclass(frozen=True)
class StepExchanges:
    """What one step of a rank exchanged with other ranks, in bytes and seconds. ``str()`` is a table.

    ``exchanges`` in the order in which they travelled; ``sessions``: what the rank computed; ``waits``: where it did
    nothing but wait for an exchange. ``began``: when, on the clock ``time.perf_counter``.
    """

    rank: int
    ranks: int
    began: float
    seconds: float
    exchanges: tuple[Exchange, ...]
    sessions: tuple[Span, ...]
    waits: tuple[Span, ...]

    @property
    def bytes(self) -> int:
        """Of the tensors that were exchanged."""
        return sum(each.bytes for each in self.exchanges)

    @property
    def sent(self) -> int:
        """Bytes that this rank sent to others."""
        return sum(each.sent for each in self.exchanges)

    @property
    def received(self) -> int:
        """Bytes that others sent to this rank."""
        return sum(each.received for each in self.exchanges)

    @property
    def exchanging(self) -> float:
        """Seconds that the exchanges took, one after the other."""
        return sum(each.seconds for each in self.exchanges)

    @property
    def waited(self) -> float:
        """Seconds in which the rank did nothing but wait for them."""
        return sum(each.seconds for each in self.waits)

    @property
    def overlap(self) -> float:
        """The share of ``exchanging`` in which the rank computed meanwhile, 0 to 1."""
        overlapped = sum(each.overlapped for each in self.exchanges)
        return overlapped / self.exchanging if self.exchanging else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The sums as plain numbers, as they stand in logs of steps."""
        return {
            "bytes_sent": self.sent,
            "bytes_received": self.received,
            "exchange_seconds": self.exchanging,
            "waited_seconds": self.waited,
            "overlap": self.overlap,
        }

    def line(self) -> str:
        """The sums for a line of a log."""
        return (
            f"sent {amount(self.sent)}, received {amount(self.received)} in {1e3 * self.exchanging:.1f} ms, "
            f"{self.overlap:.0%} of it while computing, waited {1e3 * self.waited:.1f} ms"
        )

    def __str__(self) -> str:
        lines = [f"rank {self.rank} of {self.ranks}, a step of {1e3 * self.seconds:.1f} ms: {self.line()}"]
        width = max([8, *(len(each.name) for each in self.exchanges)])
        lines.append(f"  {'exchange':<{width}} {'tensors':>10} {'sent':>10} {'received':>10} {'ms':>8} {'overlap':>8}")
        for each in self.exchanges:
            share = each.overlapped / each.seconds if each.seconds else 0.0
            sizes = " ".join(f"{amount(size):>10}" for size in (each.bytes, each.sent, each.received))
            lines.append(f"  {each.name:<{width}} {sizes} {1e3 * each.seconds:>8.1f} {share:>8.0%}")
        return "\n".join(lines)


#: What :meth:`StepExchanges.to_dict` says of a run that exchanged nothing.
NOTHING = dict.fromkeys(StepExchanges(0, 1, 0.0, 0.0, (), (), ()).to_dict())


class Journal:
    """The times of one step while it runs: the engine's thread adds exchanges, the caller's sessions and waits."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._exchanges: list[tuple[Span, int, int, int]] = []
        self.sessions: list[Span] = []
        self.waits: list[Span] = []

    @contextmanager
    def timed(self, spans: list[Span], name: str) -> Iterator[None]:
        """Add what runs inside to ``spans``, which is ``sessions`` or ``waits``."""
        start = self._now()
        yield
        spans.append(Span(name, start, self._now()))

    def exchange(self, engine: Engine, name: str, size: int, call: Callable[[], object]) -> None:
        """Make an exchange of so many bytes, in the engine's thread."""
        start, sent, received = self._now(), engine.sent, engine.received
        call()
        span = Span(name, start, self._now())
        self._exchanges.append((span, size, engine.sent - sent, engine.received - received))

    def close(self, engine: Engine) -> None:
        """The step is over: it is the last one of this rank."""
        seconds = self._now()
        exchanges = tuple(
            Exchange(span.name, size, sent, received, span.start, span.end, _within(span, self.sessions))
            for span, size, sent, received in self._exchanges
        )
        times = exchanges, tuple(self.sessions), tuple(self.waits)
        step = StepExchanges(engine.rank, engine.size, self._began, seconds, *times)
        _last[engine] = step
        for heard in _listeners.get(engine, ()):
            heard(step)

    def _now(self) -> float:
        return time.perf_counter() - self._began


def _within(span: Span, others: Sequence[Span]) -> float:
    """The seconds of a span in which one of the others goes on; these do not overlap one another."""
    return sum(max(0.0, min(span.end, other.end) - max(span.start, other.start)) for other in others)


_last: weakref.WeakKeyDictionary[Engine, StepExchanges] = weakref.WeakKeyDictionary()
_listeners: weakref.WeakKeyDictionary[Engine, list[Callable[[StepExchanges], object]]] = weakref.WeakKeyDictionary()


def last_step(engine: Engine | None) -> StepExchanges | None:
    """What the last step of this engine's rank exchanged; None where none did."""
    return None if engine is None else _last.get(engine)


@contextmanager
def listening(engine: Engine, heard: Callable[[StepExchanges], object]) -> Iterator[None]:
    """Call ``heard`` with every step of this engine's rank inside."""
    listeners = _listeners.setdefault(engine, [])
    listeners.append(heard)
    try:
        yield
    finally:
        listeners.remove(heard)
