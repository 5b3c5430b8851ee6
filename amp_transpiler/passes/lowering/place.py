"""Places: where a program runs. What is true of each kind stands in ``lists/places.toml``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.lists import place_kinds, place_traits, roundings
from amp_transpiler.option_checks import shown
from amp_transpiler.passes.lowering.arithmetic import Arithmetic
from amp_transpiler.passes.lowering.wanted import Cores


@dataclass(frozen=True)
class CPUPlace:
    """The processor. 16-bit programs run there with every rounding and overflow that a GPU would show.

    ``emulate``: the kind of a place ("webgpu") whose kernels round inside of sums too: sums are then added up in the
    order and with the roundings of that place, which takes long. By default each result is rounded once.
    """

    #: The name of this place's lowering.
    kind: ClassVar[str] = "cpu"
    emulate: str = ""

    def __post_init__(self) -> None:
        if self.emulate not in ("", *place_kinds()):
            raise ArgumentError(f"CPUPlace emulates one of {', '.join(place_kinds())}, got {self.emulate!r}")

    @property
    def device_id(self) -> int:
        """There is one."""
        return 0

    def __repr__(self) -> str:
        return f"CPUPlace(emulate={self.emulate!r})" if self.emulate else "CPUPlace()"


@dataclass(frozen=True)
class _Device:
    device_id: int = 0
    kind: ClassVar[str]

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not isinstance(self.device_id, int) or isinstance(self.device_id, bool):
            raise ArgumentTypeError(f"{name} takes the number of a device, got {self.device_id!r}")
        if self.device_id < 0:
            raise ArgumentError(f"{name} takes the number of a device, got {self.device_id}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.device_id})"


@dataclass(frozen=True, repr=False)
class CUDAPlace(_Device):
    """One CUDA device. Lowering for it needs no GPU; only an Executor does."""

    kind: ClassVar[str] = "cuda"


@dataclass(frozen=True, repr=False)
class WebGPUPlace(_Device):
    """One GPU of any make (Vulkan, Metal, Direct3D 12), through onnxruntime's WebGPU provider.

    The provider is a plugin of stock onnxruntime (``pip install onnxruntime-ep-webgpu``), or built into the wheel
    onnxruntime-webgpu. It picks the GPU itself, one for a process, so the number is 0. Lowering needs neither; only an
    Executor does.
    """

    kind: ClassVar[str] = "webgpu"


Place = CPUPlace | CUDAPlace | WebGPUPlace
_PLACES = (CPUPlace, CUDAPlace, WebGPUPlace)
#: The place of each kind, the first where there may be several: what a name in an option stands for.
PLACES: Mapping[str, Place] = MappingProxyType({place.kind: place() for place in _PLACES})


def no_faster(kind: str) -> str:
    """That 16 bit is no faster on places of this kind; "" where it may be."""
    if roundings(kind, "float16") is None:
        return ""
    title = place_traits(kind).title
    return f"16 bit is no faster on {title}: sums that kernels would round in 16 bit are widened (docs/places.md)"


def arithmetic_of(place: Place) -> Arithmetic:
    """Whose 16-bit arithmetic programs have on a place."""
    return Arithmetic((place.emulate if isinstance(place, CPUPlace) else "") or place.kind)


def cores_of(place: Place, threads: int | None, caches: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> Cores:
    """The cores of this machine for a session with so many threads (None: onnxruntime's default, all cores).

    What a core has for itself is its second level of cache, where Linux tells its size.
    """
    if not place_traits(place.kind).host:
        return Cores()
    try:
        found = [each for each in caches.glob("index*") if (each / "level").read_text().strip() == "2"]
        size = sum(1024 * int((each / "size").read_text().strip().removesuffix("K")) for each in found)
    except (OSError, ValueError):
        size = 0
    return Cores(size, threads or os.cpu_count() or 1)


def check_place(place: object, what: str) -> Place:
    """A place given as such, or by the name of its kind, for which the first of that kind stands.

    ArgumentError naming ``what``, the argument, for another name; ArgumentTypeError for what is neither.
    """
    if isinstance(place, _PLACES):
        return place
    if isinstance(place, str) and place.lower() in PLACES:
        return PLACES[place.lower()]
    hint = ""
    if isinstance(place, type) and issubclass(place, _PLACES):
        hint = f"; write {place.__name__}() for a place instead of the class"
    elif isinstance(place, Mapping):
        hint = "; named, feed_shapes=... and place=... may come in any order"
    kind = ArgumentError if isinstance(place, str) else ArgumentTypeError
    raise kind(
        f"{what} is {shown(place)}; expected a place, CPUPlace(), CUDAPlace(0) or WebGPUPlace(0), or its kind: "
        f"{', '.join(PLACES)}{hint}"
    )
