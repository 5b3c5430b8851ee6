"""How long kernels take on a device at least: a roofline over their bytes, their arithmetic and their launches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from amp_transpiler.lists.devices import Device


class Work(NamedTuple):
    """Kernels that are alike for a forecast: how many, and what each of them moves (bytes) and computes."""

    kernels: int
    moved: int
    flops: int
    dtype: str
    cast: bool


@dataclass(frozen=True)
class Forecast:
    """How long the kernels of a program take on a device at least, in seconds, by a roofline.

    Each kernel takes as long as its bytes at the device's bandwidth, its arithmetic at the device's rate, or a launch,
    whichever is longest. ``memory``, ``arithmetic``, ``launch`` are the seconds of kernels that these three bind,
    ``casts`` those of casts, ``launched`` the number of kernels that are shorter than a launch. ``fits``: whether the
    forecast peak is within the device's memory. Real kernels reach a part of these rates; ratios are surer than times.
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
    for kernels, moved, flops, dtype, cast in work:
        terms = {
            "memory": moved / device.bandwidth,
            "arithmetic": flops / device.rate(dtype, tf32),
            "launch": launch,
        }
        longest = max(terms, key=lambda term: terms[term])
        bound[longest] += kernels * terms[longest]
        casts += kernels * terms[longest] if cast else 0.0
        launched += kernels if longest == "launch" else 0
    return Forecast(
        device.key, captured, sum(bound.values()), **bound, casts=casts, launched=launched, fits=peak <= device.memory
    )
