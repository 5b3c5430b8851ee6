"""A plan of ranks: volume, time, overlap and memory of a training step, for each number of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from amp_transpiler.errors import ArgumentError
from amp_transpiler.passes.lowering.cost_estimate import amount


@dataclass(frozen=True)
class PlanRow:
    """One number of ranks. Sizes in bytes of one rank, times in seconds of one step.

    sent: bytes that it sends, and as many that it receives. exchange: how long that takes. exposed: how much of it the
    rank does nothing else. compute: sessions alone. memory: at the peak, buckets included. limit: "compute",
    "bandwidth", "latency", "rows" or "memory"; because: a sentence that says why.
    """

    ranks: int
    sent: int
    exchange: float
    exposed: float
    compute: float
    memory: int
    limit: str
    because: str
    efficiency: float

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return self.compute + self.exposed

    @property
    def overlap(self) -> float:
        """The share of the exchanges that goes on while the rank computes, 0 to 1."""
        return max(0.0, 1 - self.exposed / self.exchange) if self.exchange else 0.0

    @property
    def speedup(self) -> float:
        """Examples a second, as a multiple of one rank's."""
        return self.ranks * self.efficiency


@dataclass(frozen=True)
class RankPlan:
    """What :func:`amp.distributed.plan` forecasts. ``rows`` by number of ranks; ``plan[8]`` is that of eight.

    ``str()`` is a table. ``buckets``: bytes that a rank brings to each, as they leave; ``assumed``: what the
    forecast is made of, in words.
    """

    program: str
    assumed: str
    buckets: tuple[int, ...]
    rows: tuple[PlanRow, ...]

    def __getitem__(self, ranks: int) -> PlanRow:
        for row in self.rows:
            if row.ranks == ranks:
                return row
        raise ArgumentError(f"the plan has no row for {ranks!r} ranks; it has {[row.ranks for row in self.rows]}")

    def to_dict(self) -> dict[str, Any]:
        """The record as numbers, strings, lists and dictionaries, for JSON."""
        more = ("step", "overlap", "speedup")
        rows = [asdict(row) | {name: getattr(row, name) for name in more} for row in self.rows]
        return {"program": self.program, "assumed": self.assumed, "buckets": list(self.buckets), "rows": rows}

    def __str__(self) -> str:
        buckets = ", ".join(map(amount, self.buckets)) or "none"
        lines = [f"program '{self.program}': {self.assumed}", f"  buckets of gradients: {buckets}"]
        lines.append(
            f"  {'ranks':>5} {'step ms':>9} {'exchange':>9} {'hidden':>7} {'sent':>10} {'memory':>10} "
            f"{'efficiency':>10} {'speed':>8}  limit"
        )
        for row in self.rows:
            lines.append(
                f"  {row.ranks:>5} {1e3 * row.step:>9.2f} {1e3 * row.exchange:>9.2f} {row.overlap:>7.0%} "
                f"{amount(row.sent):>10} {amount(row.memory):>10} {row.efficiency:>10.1%} "
                f"{row.speedup:>7.1f}x  {row.limit}"
            )
        last = {row.limit: row for row in self.rows}
        lines += [f"  {limit} (at {row.ranks}): {row.because}" for limit, row in last.items()]
        return "\n".join(lines)
