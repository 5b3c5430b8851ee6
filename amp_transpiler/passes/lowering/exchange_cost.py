"""How long ranks take to exchange arrays: what a step costs for each message and each byte, by the slowest link.

A message of n bytes takes a + n / B (Hockney, 1994). With that an all-reduce of n bytes over N ranks takes
2 (N - 1) / N n / B, and messages one behind the other (Thakur, Rabenseifner and Gropp, "Optimization of Collective
Communication Operations in MPICH", 2005); no algorithm sends less (Patarasuk and Yuan, "Bandwidth optimal all-reduce
algorithms", 2009).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

#: Bytes of an array that the engine for memory sends at once, at least, and for each rank
#: (``runtime/collective/ordered.py``).
_SEGMENT, _SHARE = 1 << 24, 1 << 15
ENGINES = ("mpi", "nccl")


class ExchangeCost(NamedTuple):
    """Bytes that a rank sends in an exchange, and as many that it receives; the seconds that it takes."""

    sent: int
    seconds: float


@dataclass(frozen=True)
class Network:
    """What ranks exchange through.

    ``engine``: "mpi", whose ranks each send to every other one, or "nccl", whose rings cross each link once, and whose
    trees take as many messages as they have levels. ``bandwidth``: bytes a second that a node of ``node`` ranks
    sends to others while it receives as many; ``within``: that a rank sends to others of its node. ``latency``: seconds
    that a message takes beside its bytes.
    """

    engine: str
    bandwidth: float
    within: float
    latency: float
    node: int

    def all_reduce(self, size: int, ranks: int) -> ExchangeCost:
        """Every rank gets the sum of arrays of ``size`` bytes."""
        scattered, gathered = self.reduce_scatter(size, ranks), self.all_gather(size, ranks)
        return ExchangeCost(scattered.sent + gathered.sent, scattered.seconds + gathered.seconds)

    def reduce_scatter(self, size: int, ranks: int) -> ExchangeCost:
        """Every rank gets its part of the sum of arrays of ``size`` bytes."""
        return self._phase(size, ranks)

    def all_gather(self, size: int, ranks: int) -> ExchangeCost:
        """Every rank gets ``size`` bytes, of which each brings as many."""
        return self._phase(size, ranks)

    def _phase(self, size: int, ranks: int) -> ExchangeCost:
        """Each rank sends an N-th of ``size`` bytes to every other one."""
        if ranks == 1 or not size:
            return ExchangeCost(0, 0.0)
        node = min(self.node, ranks)
        sent = size * (ranks - 1) // ranks
        if self.engine == "nccl":
            slowest = self.within if node == ranks else min(self.within, self.bandwidth)
            return ExchangeCost(sent, sent / slowest + math.ceil(math.log2(ranks)) * self.latency)
        inside = size * (node - 1) / ranks / self.within
        outside = node * size * (ranks - node) / ranks / self.bandwidth
        segments = max(1, math.ceil(size / max(_SEGMENT, _SHARE * ranks)))
        messages = (ranks - 1) * segments
        return ExchangeCost(sent, max(inside, outside) + messages * self.latency)

    def without_latency(self) -> Network:
        """The same network, on which a message takes as long as its bytes."""
        return replace(self, latency=0.0)
