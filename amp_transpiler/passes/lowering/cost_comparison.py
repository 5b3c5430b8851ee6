"""Whether 16 bit pays: the forecasts of one program in several precisions side by side, and what stands in the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.ir.types import HALF
from amp_transpiler.lists import devices as known
from amp_transpiler.passes.lowering.cost_estimate import CostEstimate, amount
from amp_transpiler.passes.lowering.forecast import Forecast

#: From this share of the other's time on a precision does not pay: no forecast is that sure.
PAYS = 0.95
_NAMED = 3


@dataclass(frozen=True)
class Verdict:
    """What a precision is forecast to bring on a device, beside the first one.

    ``alone``, ``captured``: its forecasts, with kernels launched one by one, and as a CUDA graph. ``ratio``,
    ``captured_ratio``: its time as a share of the first one's. ``because``: why it will not pay; "" where it pays.
    """

    device: str
    mode: str
    alone: Forecast
    captured: Forecast
    ratio: float
    captured_ratio: float
    because: str

    @property
    def pays(self) -> bool:
        """Whether it is forecast to take less time, launched one by one; so of the first one, which is the measure."""
        return not self.because


@dataclass(frozen=True)
class CostComparison:
    """What :func:`compare_costs` finds. ``estimates`` by mode, the first the one that others are measured by.

    ``verdicts``: of each mode on each device: ``alone`` and ``captured``, its forecasts with kernels launched one by
    one and as a CUDA graph; ``ratio`` and ``captured_ratio``, its time as a share of the first one's; ``pays``; and
    ``because``, why it will not.
    """

    estimates: dict[str, CostEstimate]
    verdicts: tuple[Verdict, ...]

    def verdict(self, mode: str, device: str) -> Verdict:
        """That of one mode on one device; ArgumentError where there is none."""
        for each in self.verdicts:
            if (each.mode, each.device.lower()) == (mode, device.lower()):
                return each
        modes, named = list(self.estimates), sorted({each.device for each in self.verdicts})
        raise ArgumentError(f"no verdict on {mode!r} on {device!r}; modes are {modes}, devices {named}")

    def to_dict(self) -> dict[str, Any]:
        """The record as numbers, strings, lists and dictionaries, for JSON."""
        return {
            "estimates": {mode: estimate.to_dict() for mode, estimate in self.estimates.items()},
            "verdicts": [asdict(each) for each in self.verdicts],
        }

    def __str__(self) -> str:
        modes = list(self.estimates)
        first, wide = max(10, *map(len, modes)), max(21, *map(len, modes))
        heads = f"{'kernels':>9} {'bytes':>11} {'casts':>7} {'GFLOP 16':>10} {'GFLOP 32':>10} {'peak':>10}"
        lines = [f"{'':<{first}} {heads}"]
        for mode, found in self.estimates.items():
            share = found.cast_bytes / found.bytes if found.bytes else 0.0
            lines.append(
                f"{mode:<{first}} {found.kernels:>9,} {amount(found.bytes):>11} {share:>7.1%} "
                f"{found.flops_16 / 1e9:>10,.1f} {found.flops_32 / 1e9:>10,.1f} {amount(found.peak):>10}"
            )
        lines.append("forecast in ms, launched one by one / captured as a CUDA graph:")
        lines.append(f"{'':<10} " + " ".join(f"{mode:>{wide}}" for mode in modes))
        cells: dict[str, list[str]] = {}
        for each in self.verdicts:
            fits = "" if each.alone.fits else " (does not fit)"
            cells.setdefault(each.device, []).append(
                f"{each.alone.seconds * 1e3:,.2f} / {each.captured.seconds * 1e3:,.2f}{fits}"
            )
        lines += [f"{device:<10} " + " ".join(f"{cell:>{wide}}" for cell in row) for device, row in cells.items()]
        for mode in modes[1:]:
            mine = [each for each in self.verdicts if each.mode == mode]
            pays = [f"{each.device} ({each.ratio:.2f})" for each in mine if each.pays]
            if pays:
                lines.append(f"{mode}: pays on {', '.join(pays)} (its time as a share of that of {modes[0]})")
            lines += [
                f"{mode}: will not pay on {each.device}, because {each.because}" for each in mine if not each.pays
            ]
        return "\n".join(lines)


def _kind(given: object) -> str:
    """What was given instead: estimates themselves are pages long."""
    return type(given).__name__ if isinstance(given, CostEstimate) else f"{given!r:.80}"


def compare_costs(
    estimates: Mapping[str, CostEstimate], devices: Sequence[str] | None = None, *, tf32: bool = False
) -> CostComparison:
    """Forecasts of a program in several precisions, and whether those after the first pay on each device.

    Args:
        estimates: ``cost_estimate`` of each by its name, on a CUDA place; the first is what others are measured by:
            ``{"fp32": ..., "pure": ...}``.
        devices: by their names ("A100"); None takes all that are known.
        tf32: fp32 products are computed in TF32, as ``Executor(tf32=True)`` does.

    Raises: ArgumentTypeError for what is no estimate, ArgumentError for fewer than two of them, for estimates on a
        place that is no GPU, and for an unknown device.
    """
    if not isinstance(estimates, Mapping) or not all(isinstance(each, CostEstimate) for each in estimates.values()):
        raise ArgumentTypeError(f"compare_costs takes a mapping of names to CostEstimates, got {_kind(estimates)}")
    if len(estimates) < 2:
        raise ArgumentError(f"compare_costs takes two estimates at least, got {len(estimates)}")
    first = next(iter(estimates))
    verdicts = []
    for device in _devices(devices):
        base = [estimates[first].forecast(device.key, captured=captured, tf32=tf32) for captured in (False, True)]
        for mode, estimate in estimates.items():
            alone, captured = (
                estimate.forecast(device.key, captured=captured, tf32=tf32) for captured in (False, True)
            )
            ratio, behind = _ratio(alone, base[0]), _ratio(captured, base[1])
            because = ""
            if mode != first and ratio > PAYS:
                because = _because(estimates[first], estimate, base[0], alone, device)
                if behind <= PAYS:
                    because += f"; captured as a CUDA graph it takes {behind:.2f} of the time of {first}"
            verdicts.append(Verdict(device.key, mode, alone, captured, ratio, behind, because))
    return CostComparison(dict(estimates), tuple(verdicts))


def _devices(names: Sequence[str] | None) -> list[known.Device]:
    return list(known.devices().values()) if names is None else [known.find_device(name) for name in names]


def _ratio(one: Forecast, other: Forecast) -> float:
    return one.seconds / other.seconds if other.seconds else 1.0


def _because(first: CostEstimate, found: CostEstimate, base: Forecast, forecast: Forecast, device: known.Device) -> str:
    """What stands in the way of 16 bit, the largest obstacle first; one of them."""
    time, share = forecast.seconds or 1.0, found.cast_bytes / max(found.bytes, 1)
    narrow = next((each.dtype for each in found.work if each.flops and each.dtype in HALF), "")
    if forecast.launch > 0.5 * time:
        return (
            f"launches bind it: {forecast.launched:,} of {found.kernels:,} kernels are shorter than a launch and take "
            f"{forecast.launch / time:.0%} of the time"
        )
    if narrow and narrow not in device.rates and forecast.bound == "arithmetic":
        return f"{device.name} has no matrix units for {narrow}"
    if forecast.seconds - forecast.casts <= PAYS * base.seconds:
        return (
            f"casts take back what it saves: {found.casts:,} of them move {amount(found.cast_bytes)}, {share:.0%} of "
            f"the bytes, and take {forecast.casts / time:.0%} of the time"
        )
    total = found.flops_16 + found.flops_32
    if forecast.bound == "arithmetic" and 2 * found.flops_32 > total:
        return f"{found.flops_32 / total:.0%} of its arithmetic is on fp32 operands: {_largest(found, 'flops_32')}"
    wide = found.bytes_by_type.get("float32", 0)
    if 3 * wide > found.bytes:
        return f"{wide / found.bytes:.0%} of its bytes are fp32 still, most of them of {_largest(found, 'float32')}"
    return (
        f"it moves {amount(found.bytes)} in {found.kernels:,} kernels where the other moves {amount(first.bytes)} in "
        f"{first.kernels:,}"
    )


def _largest(found: CostEstimate, what: str) -> str:
    """The operators that have most of something, with the reason for their precision where there is one."""
    pairs = [(row.flops_32 if what == "flops_32" else row.bytes_by_type.get(what, 0), row) for row in found.operators]
    rows = sorted((pair for pair in pairs if pair[0]), key=lambda pair: -pair[0])[:_NAMED]
    return ", ".join(row.operator + (f" ({row.why})" if row.why else "") for _, row in rows)
