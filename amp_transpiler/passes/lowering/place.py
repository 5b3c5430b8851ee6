"""Places: where a program runs."""

from __future__ import annotations

from dataclasses import dataclass

from amp_transpiler.errors import ArgumentError, ArgumentTypeError


@dataclass(frozen=True)
class CPUPlace:
    """The processor. 16-bit programs run there with every rounding and overflow that a GPU would show."""

    @property
    def kind(self) -> str:
        """The name of this place's lowering and device."""
        return "cpu"

    @property
    def device_id(self) -> int:
        """There is one."""
        return 0

    def __repr__(self) -> str:
        return "CPUPlace()"


@dataclass(frozen=True)
class CUDAPlace:
    """One CUDA device. Lowering for it needs no GPU; only an Executor does."""

    device_id: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.device_id, int) or isinstance(self.device_id, bool):
            raise ArgumentTypeError(f"CUDAPlace takes the number of a device, got {self.device_id!r}")
        if self.device_id < 0:
            raise ArgumentError(f"CUDAPlace takes the number of a device, got {self.device_id}")

    @property
    def kind(self) -> str:
        """The name of this place's lowering and device."""
        return "cuda"

    def __repr__(self) -> str:
        return f"CUDAPlace({self.device_id})"


Place = CPUPlace | CUDAPlace


def check_place(place: object, caller: str) -> Place:
    """``place`` itself; ArgumentTypeError naming ``caller`` where it is no place."""
    if isinstance(place, (CPUPlace, CUDAPlace)):
        return place
    hint = ""
    if isinstance(place, type) and issubclass(place, (CPUPlace, CUDAPlace)):
        hint = f"; write {place.__name__}() for a place instead of the class"
    raise ArgumentTypeError(f"{caller} takes a place, CPUPlace() or CUDAPlace(0), got {place!r}{hint}")
