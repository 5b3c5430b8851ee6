"""What more ranks bring to a training step, forecast for any number of them. Nothing runs."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from amp_transpiler.errors import ArgumentError
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.lists.devices import Device, devices, find_device
from amp_transpiler.option_checks import choice, is_whole, number, whole
from amp_transpiler.passes.lowering.cost_estimate import amount, count_kernels
from amp_transpiler.passes.lowering.exchange_cost import ENGINES, ExchangeCost, Network
from amp_transpiler.passes.lowering.forecast import Work, roofline
from amp_transpiler.passes.lowering.kernels import Alike, Kernel, work_of
from amp_transpiler.passes.lowering.own_rows import fullest
from amp_transpiler.passes.lowering.place import CPUPlace, CUDAPlace, Place
from amp_transpiler.passes.lowering.rank_plan import PlanRow, RankPlan
from amp_transpiler.passes.lowering.rank_units import DEALT, GATHERED, REDUCED, Sent, size_of, units_of
from amp_transpiler.passes.view.training_step import ParameterUpdate, training_step
from amp_transpiler.spelling import TYPES, read_as

#: From this share of a step on what is not hidden of the exchanges limits it.
_SEEN = 0.05
#: What the engine for memory keeps beside the arrays: two segments.
_SEGMENTS = 2 * 2**24
#: In what gradients travel.
PRECISIONS = ("float16", "bfloat16", "float32")
#: What a core of a CPU moves and computes, about: of a measured step only the shares of its parts depend on it.
_CORE = Device("CPU core", "a core of a CPU", 0, 1e10, 2e-6, 2e-6, "assumed", MappingProxyType({"float32": 5e10}))


@dataclass(frozen=True)
class Assumed:
    """What a plan is made for; :func:`plan` has what each is."""

    network: Network
    device: Device | None
    captured: bool
    step_time: float | None
    precision: str | None
    shard_state: bool
    overlap: float

    def __str__(self) -> str:
        network, time = self.network, f"a step of {1e3 * (self.step_time or 0):.4g} ms on one rank"
        if self.step_time is None and self.device is not None:
            time = f"the forecast for {self.device.key}" + (" as a CUDA graph" if self.captured else "")
        links = f"{network.bandwidth / 1e9:g} GB/s"
        if network.node > 1:
            links = f"{network.within / 1e9:g} GB/s within nodes of {network.node} ranks, {links} between them"
        more = (", sharded state" if self.shard_state else "") + f", overlap {self.overlap:g}"
        return f"{time}; {network.engine}, {links}, {1e6 * network.latency:g} us a message{more}"


def plan(
    program: Graph,
    ranks: int | Sequence[int] = (1, 8, 64, 512, 4096),
    *,
    bandwidth: float,
    latency: float = 20.0,
    feed_shapes: Mapping[str, Sequence[int]] | None = None,
    fetch_list: Sequence[Variable | str] = (),
    device: str | None = None,
    captured: bool = False,
    step_time: float | None = None,
    ranks_per_node: int = 1,
    bandwidth_within: float | None = None,
    engine: str | None = None,
    allreduce_precision: str | None = None,
    shard_state: bool = False,
    overlap: float = 1.0,
) -> RankPlan:
    """Forecasts the training step of ``program`` on any number of ranks, each with a batch of ``feed_shapes``.

    Nothing runs. The result is a table: what a rank sends, how long that takes and how much of it is hidden behind the
    backward pass, memory of a rank, examples a second beside one rank, and what limits them, in a sentence::

        print(amp.distributed.plan(program, [1, 8, 64], bandwidth=12.5, device="A100", ranks_per_node=8,
                                   bandwidth_within=200))

    Gradients leave in the buckets of the program, each when the part of the backward pass is over that makes it; a
    program that was built by one rank is planned as if several had. Where gradients accumulate over several runs, a
    step is all of these. Formulas: docs/distributed.md#plan.

    Args:
        ranks: how many; a number or several.
        bandwidth: GB/s (10^9 bytes; 100 Gbit/s are 12.5) that a node sends while it receives as many.
        latency: microseconds of a message, beside its bytes.
        feed_shapes, fetch_list: as for ``program.cost_estimate``.
        device, captured: forecasts of computing for this device, "A100" say, as a CUDA graph; and its memory.
        step_time: seconds of a run on one rank, as measured; needed without a device. The forecast then says only
            which share of it belongs to which part.
        ranks_per_node, bandwidth_within: ranks that share the bandwidth of a node, and GB/s of each to others there.
        engine: "mpi" or "nccl"; by default "nccl" where a device is named.
        allreduce_precision: the type in which gradients travel; by default the program's.
        shard_state: masters and moments are dealt out among the ranks (:func:`shard_optimizer`).
        overlap: the share of an exchange in which a rank can compute: 1 where the network works by itself, 0 where the
            cores that compute also carry the bytes, as with as many ranks as cores.

    Raises: ArgumentError: no training step, a number out of range, an unknown device, neither device nor step_time.
    """
    counts = [ranks] if is_whole(ranks) else list(ranks)  # type: ignore[arg-type]
    if not counts:
        raise ArgumentError("plan: ranks names no number; give one or several, such as [1, 8, 64]")
    for each in counts:
        whole("plan: ranks", each, 1)
    whole("plan: ranks_per_node", ranks_per_node, 1)
    for name, given in (("bandwidth", bandwidth), ("step_time", step_time), ("bandwidth_within", bandwidth_within)):
        if given is not None:
            number(f"plan: {name}", given)
    number("plan: latency", latency, taken=True)
    number("plan: overlap", overlap, taken=True)
    if overlap > 1:
        raise ArgumentError(f"plan: overlap is {overlap:g}; expected a share of an exchange, from 0 to 1")
    allreduce_precision = read_as(TYPES, allreduce_precision)
    for name, value, known in (("engine", engine, ENGINES), ("allreduce_precision", allreduce_precision, PRECISIONS)):
        if value is not None:
            choice(f"plan: {name}", value, known)
    if device is None and step_time is None:
        raise ArgumentError(
            f"plan: how long computing takes is not said; name a device ({', '.join(devices())}), or give the "
            "step_time of one rank in seconds, as measured"
        )
    found = None if device is None else find_device(device)
    within = bandwidth if bandwidth_within is None else bandwidth_within
    chosen = engine or ("mpi" if found is None else "nccl")
    network = Network(chosen, 1e9 * bandwidth, 1e9 * within, 1e-6 * latency, int(ranks_per_node))
    assumed = Assumed(network, found, captured, step_time, allreduce_precision, shard_state, overlap)
    return Planner(program, assumed, feed_shapes, fetch_list).table(counts)


class Planner:
    """A program that is lowered and counted, of which rows are made."""

    def __init__(
        self,
        program: Graph,
        assumed: Assumed,
        feed_shapes: Mapping[str, Sequence[int]] | None = None,
        fetch_list: Sequence[Variable | str] = (),
    ) -> None:
        self.program, self.assumed, self.step = program, assumed, training_step(program)
        if not self.step.gradients:
            raise ArgumentError(f"plan: program '{program.name}' makes no gradients; minimize a loss first")
        #: Whether the program was built with state that is dealt out; whether it is, or shall be.
        self.dealt = any(row.parameter is not None and row.parameter.owner is not None for row in self.step.rows)
        self.sharded = self.dealt or assumed.shard_state
        place: Place = CPUPlace() if assumed.device is None else CUDAPlace(0)
        self.counted = counted = count_kernels("plan", program, place, feed_shapes, fetch_list)
        self.units = units_of(program, self.step, counted, assumed.precision)
        self.plan = self.units.rounds()
        #: What is exchanged, by send; the part after which each send leaves; the sends that each part waits for.
        self.sends: list[list[Sent]] = [[] for _ in set(self.plan.send.values())]
        self.leaves: dict[int, list[int]] = {}
        self.waits: list[set[int]] = [set() for _ in range(self.plan.parts)]
        for unit, send in self.plan.send.items():
            self.sends[send] += self.units.sent[unit]
            self.leaves.setdefault(self.plan.part[unit], []).append(send)
        for unit, read in enumerate(self.units.reads):
            if unit not in self.units.sent:
                self.waits[self.plan.part[unit]].update(self.plan.send[each] for each in read if each in self.plan.send)
        parts = [Counter[Alike]() for _ in range(self.plan.parts)]
        for unit, work in enumerate(self.units.work):
            parts[min(self.plan.part[unit], self.plan.parts - 1)].update(work)
        forecast = [self._seconds(work) for work in parts]
        self.compute = assumed.step_time or sum(forecast)
        self.parts = [seconds * self.compute / sum(forecast) for seconds in forecast]
        updating = work_of(self._updating())
        self.updating = self.compute * self._seconds(updating) / sum(forecast)
        runs = 1 if program.accumulation is None else program.accumulation.steps
        self.alone = self.compute + (runs - 1) * (self.compute - self.updating)  # all runs of a window

    def table(self, ranks: Sequence[int]) -> RankPlan:
        """The plan for these numbers of ranks."""
        sizes = tuple(sum(each.size for each in send) for send in self.sends)
        return RankPlan(self.program.name, str(self.assumed), sizes, tuple(self.row(each) for each in ranks))

    # -- time --------------------------------------------------------------------------------------------
    def _updating(self) -> list[Kernel]:
        """The kernels that update parameters."""
        operators = {update.operator.key for update in self.step.updates}
        return [each for each in self.counted.kernels if each.operator is not None and each.operator.key in operators]

    def _seconds(self, work: Mapping[Alike, int]) -> float:
        """The forecast for kernels."""
        listed = [Work(times, *alike) for alike, times in work.items()]
        return roofline(
            listed, self.assumed.device or _CORE, captured=self.assumed.captured, tf32=False, peak=0
        ).seconds

    def _exposed(self, costs: Sequence[float]) -> float:
        """Seconds in which a rank does nothing but wait for exchanges, which travel one after the other."""
        now = free = 0.0
        there = [0.0] * len(costs)
        for part, seconds in enumerate(self.parts):
            now = max([now, *(there[send] for send in self.waits[part])]) + seconds
            for send in sorted(set(self.leaves.get(part, ()))):
                free = there[send] = max(now, free) + costs[send]
        exposed = max([now, *there]) - sum(self.parts)
        return exposed + (1 - self.assumed.overlap) * (sum(costs) - exposed)

    # -- a row -------------------------------------------------------------------------------------------
    def row(self, ranks: int) -> PlanRow:
        """The forecast for so many ranks."""
        costs, sharing = self._costs(self.assumed.network, ranks), self._sharing(self.assumed.network, ranks)
        spared = self.updating * (1 - 1 / ranks) if self.assumed.shard_state and not self.dealt else 0.0
        compute = self.alone - spared
        exposed = self._exposed([cost.seconds for cost in costs]) + sharing.seconds
        memory = self._memory(ranks, self.sharded)
        limit, because = self._limit(ranks, exposed, compute + exposed, memory)
        return PlanRow(
            ranks=ranks,
            sent=sum(cost.sent for cost in costs) + sharing.sent,
            exchange=sum(cost.seconds for cost in costs) + sharing.seconds,
            exposed=exposed,
            compute=compute,
            memory=memory,
            limit=limit,
            because=because,
            efficiency=self.alone / (compute + exposed),
        )

    def _costs(self, network: Network, ranks: int, *, rows: bool = True) -> list[ExchangeCost]:
        """What each send costs: one all-reduce of what is reduced in a type, and a call for all else."""
        found = []
        for send in self.sends:
            joined = Counter[str]()
            for each in send:
                joined[each.dtype] += each.size if each.how == REDUCED else 0
            calls = [network.all_reduce(size, ranks) for size in joined.values() if size]
            calls += [network.all_gather(each.size * ranks, ranks) for each in send if each.how == GATHERED and rows]
            calls += [network.reduce_scatter(each.size, ranks) for each in send if each.how == DEALT]
            found.append(ExchangeCost(sum(call.sent for call in calls), sum(call.seconds for call in calls)))
        return found

    def _sharing(self, network: Network, ranks: int) -> ExchangeCost:
        """Parameters that their ranks have updated go to all others: as much as the fullest rank sends."""
        if not self.sharded:
            return ExchangeCost(0, 0.0)
        sizes = [size_of(self.counted, row.parameter) for row in self._dense_rows() if row.parameter is not None]
        if network.engine == "mpi":
            return network.all_gather(ranks * _fullest(sizes, ranks), ranks)
        return network.all_gather(sum(sizes), ranks)  # broadcasts along rings, in one call

    def _dense_rows(self) -> list[ParameterUpdate]:
        """The updates whose state is dealt out among the ranks."""
        return [row for row in self.step.rows if row.parameter is not None and not row.parameter.sparse]

    # -- memory, and what limits -------------------------------------------------------------------------
    def _memory(self, ranks: int, sharded: bool) -> int:
        """The peak of one rank; buckets and the engine's segments beside that of a rank alone."""
        total = self.counted.memory.peak
        if ranks > 1:
            total += sum(each.size * (ranks if each.how == GATHERED else 1) for send in self.sends for each in send)
            total += _SEGMENTS if self.assumed.network.engine == "mpi" else 0
        rows, here = self._dense_rows(), fullest(self.program)
        kept = {v.key: size_of(self.counted, v) for row in rows for v in _states(row)}
        sizes = [sum(kept[v.key] for v in _states(row)) for row in rows]
        counted = sum(kept[v.key] for row in rows for v in _states(row) if v.owner in (None, here))
        return total - counted + (_fullest(sizes, ranks) if sharded else sum(sizes))

    def _limit(self, ranks: int, exposed: float, step: float, memory: int) -> tuple[str, str]:
        """What keeps a step from being faster, or from running at all, and a sentence about it."""
        device, network = self.assumed.device, self.assumed.network
        if device is not None and memory > device.memory:
            less = self._memory(ranks, True)
            way = f"; sharded state would take {amount(less)}" if less < memory else ""
            return "memory", f"a rank takes {amount(memory)} of the {amount(device.memory)} that there are{way}"
        if exposed <= _SEEN * step:
            return "compute", "exchanges take no more than a twentieth of a step beside what is computed meanwhile"
        fast = network.without_latency()
        sharing, share = self._sharing(fast, ranks).seconds, f"{exposed / step:.0%} of a step"
        by_bytes = self._exposed([cost.seconds for cost in self._costs(fast, ranks)]) + sharing
        if exposed - by_bytes > by_bytes:
            return "latency", (
                f"messages of {1e6 * network.latency:g} us, not their bytes, take most of the {share} in which ranks "
                "wait; fewer ranks, or more computed by each, raise the efficiency"
            )
        without = self._exposed([cost.seconds for cost in self._costs(fast, ranks, rows=False)]) + sharing
        sent = [each for send in self.sends for each in send]
        if by_bytes - without > by_bytes / 2:
            rows = sum(each.size for each in sent if each.how == GATHERED)
            return "rows", (
                f"every rank gets the rows of sparse tables of all others, {amount(rows)} of each, which takes most of "
                f"the {share} in which ranks wait and grows with their number"
            )
        inside = network.node >= ranks
        link, rate = ("within a node", network.within) if inside else ("between nodes", network.bandwidth)
        ways = ("16-bit gradients, " if any(each.dtype == "float32" for each in sent) else "") + "larger batches"
        return "bandwidth", (
            f"{amount(sum(each.size for each in sent))} of gradients at {rate / 1e9:g} GB/s {link} let ranks wait for "
            f"{share}; {ways} or accumulation send less for each example"
        )


def _states(row: ParameterUpdate) -> list[Variable]:
    """What an update keeps beside its parameter."""
    return [v for v in (row.master, *row.accumulators.values()) if v is not None]


def _fullest(sizes: Sequence[int], ranks: int) -> int:
    """What the rank gets that gets most, where the largest go first, each to one that has least."""
    load = [0] * ranks
    for size in sorted(sizes, reverse=True):
        heapq.heapreplace(load, load[0] + size)
    return max(load)
