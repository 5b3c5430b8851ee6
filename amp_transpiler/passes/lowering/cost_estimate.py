"""What a program costs on a place: kernels, bytes and arithmetic of its lowered model. Nothing runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from amp_transpiler.errors import ArgumentError
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.reasons import Kind
from amp_transpiler.ir.types import HALF, SHORT
from amp_transpiler.lists.devices import Device, devices, find_device
from amp_transpiler.passes.lowering.forecast import Forecast, Work, roofline
from amp_transpiler.passes.lowering.kernels import CASTS, Kernel, kernels_of, work_of
from amp_transpiler.passes.lowering.liveness import Liveness, plan
from amp_transpiler.passes.lowering.lowered import Lowered
from amp_transpiler.passes.lowering.memory_estimate import MemoryEstimate, estimate_memory, lower_sized
from amp_transpiler.passes.lowering.place import Place, check_place
from amp_transpiler.passes.lowering.tensor_types import inferred, types_in

_GIB = 2**30
_ROWS = 20


@dataclass(frozen=True)
class OperatorCost:
    """What the operators of one type of a program take together.

    bytes, bytes_by_type: of the operands and results of their kernels. flops_16, flops_32: additions and
    multiplications of sums of products on 16-bit operands, and on others. why: of the one among them that moves
    most in fp32, the reason why it runs in fp32; "" where there is none.
    """

    operator: str
    kernels: int
    bytes: int
    bytes_by_type: dict[str, int]
    flops_16: int
    flops_32: int
    why: str


@dataclass(frozen=True)
class CostEstimate:
    """What :meth:`Program.cost_estimate` counts. Sizes in bytes.

    kernels: nodes of the lowered model that are launched; views, constants and reads of shapes are none. Nodes of
        nested graphs count as often as they run.
    bytes, bytes_by_type: what kernels read and write, each operand whole, in all and by element type.
    casts, cast_bytes: how many of the kernels are casts, and their bytes.
    flops_16, flops_32: additions and multiplications of matrix products, convolutions and the like, on 16-bit operands,
        and on others: fp32 and quantised ones.
    temporaries: the most that tensors made in the run take at one time.
    peak: that and all else, as ``memory_estimate`` forecasts it.
    operators: the same by type of operator of the program, the most bytes first.
    unknown: control flow that runs an unknown number of times (counted once), and nodes inside of it whose sizes are
        not known (counted as kernels without bytes).
    work: the kernels as :meth:`forecast` takes them: without what a selection leaves unread.
    """

    program: str
    place: str
    feed_shapes: dict[str, tuple[int, ...]]
    kernels: int
    bytes: int
    bytes_by_type: dict[str, int]
    casts: int
    cast_bytes: int
    flops_16: int
    flops_32: int
    temporaries: int
    peak: int
    operators: tuple[OperatorCost, ...]
    unknown: tuple[str, ...]
    work: tuple[Work, ...] = field(repr=False)

    def forecast(self, device: str, *, captured: bool = False, tf32: bool = False) -> Forecast:
        """The time on a device ("A100"; ArgumentError lists those known), by a roofline.

        ``captured``: with the whole captured as a CUDA graph. ``tf32``: fp32 products in TF32, which
        ``Executor(tf32=True)`` computes. The result has ``seconds``, and of these ``memory``, ``arithmetic`` and
        ``launch``, by what binds each kernel; ``bound``, the largest of the three; the seconds of ``casts``; how many
        kernels are shorter than a launch (``launched``); and whether the peak ``fits`` into the device's memory.
        ArgumentError too for an estimate on a place other than CUDA (``has_forecast``).
        """
        if not self.has_forecast:
            raise ArgumentError(f"forecast: the estimate is one for {self.place}; forecasts are of CUDA devices")
        return self._forecast(find_device(device), captured, tf32)

    @property
    def has_forecast(self) -> bool:
        """Whether :meth:`forecast` knows devices of the estimate's place."""
        return self.place.startswith("CUDAPlace")

    def _forecast(self, device: Device, captured: bool, tf32: bool = False) -> Forecast:
        return roofline(self.work, device, captured=captured, tf32=tf32, peak=self.peak)

    def to_dict(self) -> dict[str, Any]:
        """The record as numbers, strings, lists and dictionaries, for JSON; forecasts for every device with it."""
        record = asdict(self)
        record["feed_shapes"] = {name: list(shape) for name, shape in self.feed_shapes.items()}
        record["operators"], record["unknown"] = list(record["operators"]), list(self.unknown)
        record["work"] = [list(each) for each in self.work]
        known = devices().values() if self.has_forecast else ()
        ways = [(device, captured) for device in known for captured in (False, True)]
        record["forecasts"] = [asdict(self._forecast(*way)) for way in ways]
        return record

    def __str__(self) -> str:
        shapes = ", ".join(f"{name} {list(shape)}" for name, shape in self.feed_shapes.items())
        share = self.cast_bytes / self.bytes if self.bytes else 0.0
        lines = [
            f"program '{self.program}' on {self.place}" + (f", {shapes}" if shapes else ""),
            f"  {self.kernels:,} kernels move {amount(self.bytes)}: {by_type(self.bytes_by_type)}",
            f"  {self.casts:,} of them are casts, {share:.1%} of the bytes",
            f"  arithmetic: {self.flops_16 / 1e9:,.1f} GFLOP on 16-bit operands, {self.flops_32 / 1e9:,.1f} on others",
            f"  memory at the peak: {amount(self.peak)}, of it temporaries {amount(self.temporaries)}",
            f"  {'operator':<32} {'kernels':>8} {'bytes':>11} {'16 bit':>11} {'GFLOP':>9}",
        ]
        for row in self.operators[:_ROWS]:
            narrow = sum(size for kind, size in row.bytes_by_type.items() if kind in HALF)
            lines.append(
                f"  {row.operator:<32} {row.kernels:>8,} {amount(row.bytes):>11} {amount(narrow):>11} "
                f"{(row.flops_16 + row.flops_32) / 1e9:>9,.1f}"
            )
        if len(self.operators) > _ROWS:
            lines.append(f"  and {len(self.operators) - _ROWS} more")
        if self.unknown:
            lines.append(f"  not known before the run: how often or on what sizes {', '.join(self.unknown[:5])} runs")
        return "\n".join(lines)


def amount(size: int) -> str:
    """Bytes for people: in GiB, MiB or KiB."""
    if not size:
        return "0"
    unit, name = next(((u, n) for u, n in ((_GIB, "GiB"), (2**20, "MiB")) if size >= u), (2**10, "KiB"))
    return f"{size / unit:,.1f} {name}"


def by_type(sizes: Mapping[str, int]) -> str:
    """Bytes by element type for people, the most first."""
    return ", ".join(
        f"{SHORT.get(kind, kind)} {amount(size)}" for kind, size in sorted(sizes.items(), key=lambda e: -e[1])
    )


@dataclass(frozen=True)
class Counted:
    """A program as a place runs it: its kernels, those that run an unknown number of times, and memory."""

    lowered: Lowered
    kernels: list[Kernel]
    unknown: list[str]
    live: Liveness
    memory: MemoryEstimate


def count_kernels(
    call: str,
    program: Graph,
    place: Place,
    feed_shapes: Mapping[str, Sequence[int]] | None,
    fetch_list: Sequence[Variable | str],
) -> Counted:
    """Lower a program and count; ``call`` is the caller, for messages."""
    lowered, shapes = lower_sized(call, program, place, feed_shapes, fetch_list)
    graph = inferred(lowered)
    types = types_in(graph)
    kernels, unknown = kernels_of(lowered, graph, types)
    live = plan(lowered, types)
    return Counted(lowered, kernels, unknown, live, estimate_memory(program, lowered, place, shapes, live))


def cost_estimate(
    program: Graph,
    place: Place | str,
    feed_shapes: Mapping[str, Sequence[int]] | None = None,
    fetch_list: Sequence[Variable | str] = (),
) -> CostEstimate:
    """What running ``program`` costs on ``place``; see ``Program.cost_estimate``."""
    place = check_place(place, "cost_estimate: place")
    counted = count_kernels("cost_estimate", program, place, feed_shapes, fetch_list)
    kernels, live = counted.kernels, counted.live
    sizes: Counter[str] = Counter()
    groups: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        sizes.update({kind: size * kernel.times for kind, size in kernel.bytes.items()})
        groups.setdefault(kernel.operator.type if kernel.operator else kernel.type, []).append(kernel)
    rows = sorted((_row(name, group) for name, group in groups.items()), key=lambda row: (-row.bytes, row.operator))
    casts = [kernel for kernel in kernels if kernel.type in CASTS]
    return CostEstimate(
        program=program.name,
        place=repr(place),
        feed_shapes=counted.memory.feed_shapes,
        kernels=sum(kernel.times for kernel in kernels),
        bytes=sum(sizes.values()),
        bytes_by_type=dict(sorted(sizes.items())),
        casts=sum(kernel.times for kernel in casts),
        cast_bytes=sum(kernel.times * sum(kernel.bytes.values()) for kernel in casts),
        flops_16=sum(row.flops_16 for row in rows),
        flops_32=sum(row.flops_32 for row in rows),
        temporaries=max(live.totals(), default=0),
        peak=counted.memory.peak,
        operators=tuple(rows),
        unknown=tuple(dict.fromkeys(counted.unknown)),
        work=tuple(Work(times, *alike) for alike, times in work_of(kernels).items()),
    )


def _row(name: str, kernels: Sequence[Kernel]) -> OperatorCost:
    sizes: Counter[str] = Counter()
    wide: Counter[Operator] = Counter()
    flops: Counter[bool] = Counter()
    for kernel in kernels:
        sizes.update({kind: size * kernel.times for kind, size in kernel.bytes.items()})
        flops[kernel.dtype in HALF] += kernel.times * kernel.flops
        if kernel.operator is not None:
            wide[kernel.operator] += kernel.times * kernel.bytes.get("float32", 0)
    operator, most = max(wide.items(), key=lambda each: each[1], default=(None, 0))
    return OperatorCost(
        operator=name,
        kernels=sum(kernel.times for kernel in kernels),
        bytes=sum(sizes.values()),
        bytes_by_type=dict(sorted(sizes.items())),
        flops_16=flops[True],
        flops_32=flops[False],
        why=_kept_wide(operator) if operator is not None and most else "",
    )


def _kept_wide(operator: Operator) -> str:
    """Why an operator runs in fp32; "" where it does not, or does so for another one's sake."""
    why = operator.why
    if why is None or why.kind is Kind.GRADIENT or why.runs in {SHORT[kind] for kind in HALF}:
        return ""
    return why.group()
