"""How long kernels take on a device: a roofline over their bytes, their arithmetic and their launches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from amp_transpiler.lists.devices import Device


class Work(NamedTuple):
    """Kernels that are alike for a forecast: how many, and what each of them moves (bytes) and computes.

    ``busy``: seconds that its instructions take on the device that was measured, 0 where they bind nothing.
    """

    kernels: int
    moved: int
    flops: int
    dtype: str
    cast: bool
    busy: float


@dataclass(frozen=True)
class Forecast:
    """How long the kernels of a program take on a device, in seconds, by a roofline.

    Each kernel takes as long as its bytes at the device's bandwidth, its arithmetic at the device's rate, or a launch,
    whichever is longest; of bandwidth and rate the share that onnxruntime's kernels reached on an H200, and of kernels
    that their instructions bind the numbers they got through there (``lists/devices.toml``). ``memory``,
    ``arithmetic``, ``launch`` are the seconds of kernels that these three bind, ``casts`` those of casts, ``launched``
    the number of kernels that are shorter than a launch. ``fits``: whether the forecast peak is within the device's
    memory. Ratios between programs are surer than times.
    """

    device: str
    captured: bool
    seconds: float
    memory: float
    arithmetic: float
    launch: float
    casts: float
    launched: int
    fits: bool

    @property
    def bound(self) -> str:
        """What takes most of the time: "memory", "arithmetic" or "launch"."""
        return max(("memory", "arithmetic", "launch"), key=lambda part: float(getattr(self, part)))


def roofline(work: Iterable[Work], device: Device, *, captured: bool, tf32: bool, peak: int) -> Forecast:
    """The forecast for a device; ``peak``: bytes of memory that the program takes."""
    launch = device.captured if captured else device.launch
    bound = {"memory": 0.0, "arithmetic": 0.0, "launch": 0.0}
    casts, launched = 0.0, 0
    bandwidth, products = device.reached
    for kernels, moved, flops, dtype, cast, busy in work:
        terms = {
            "memory": moved / (device.bandwidth * bandwidth),
            "arithmetic": max(flops / (device.rate(dtype, tf32) * products), busy * device.slower),
            "launch": launch,
        }
        longest = max(terms, key=lambda term: terms[term])
        bound[longest] += kernels * terms[longest]
        casts += kernels * terms[longest] if cast else 0.0
        launched += kernels if longest == "launch" else 0
    return Forecast(
        device.key, captured, sum(bound.values()), **bound, casts=casts, launched=launched, fits=peak <= device.memory
    )
