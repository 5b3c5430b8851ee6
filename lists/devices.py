"""What GPUs move and compute at most (``devices.toml``), for forecasts."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any

from amp_transpiler.errors import ArgumentError
from amp_transpiler.lists._schemas import near_matches, read_text

_RATES = ("float16", "bfloat16", "tf32", "float32")


@dataclass(frozen=True)
class Device:
    """A device as its maker publishes it, and what kernels reach of that.

    ``memory`` in bytes, ``bandwidth`` in bytes a second, ``rates`` in operations a second: "float16" and "bfloat16" of
    matrix units that add up in fp32, "tf32" of the same with fp32 operands, "float32" of everything else. ``launch``,
    ``captured``: seconds between two kernels that are launched one by one, or as a CUDA graph. ``reached``: the shares
    of the bandwidth and of the rate of products. ``slower``: how many times as long as on the device that was measured
    instructions take, for kernels that :func:`busy_seconds` knows.
    """

    key: str
    name: str
    memory: int
    bandwidth: float
    launch: float
    captured: float
    source: str
    rates: Mapping[str, float] = field(hash=False)
    reached: tuple[float, float] = (1.0, 1.0)
    slower: float = 1.0

    def rate(self, dtype: str, tf32: bool = False) -> float:
        """Operations a second of products with operands of this type; TF32 where it is asked for and there."""
        asked = "tf32" if tf32 and dtype == "float32" else dtype
        return self.rates.get(asked, self.rates["float32"])


def parse_devices(text: str, file: str) -> Mapping[str, Device]:
    """The devices in a TOML text: ``[launch]``, ``[reached]``, ``[numbers]``, and a table ``[device.KEY]`` each.

    ArgumentError: a field that is missing or unknown, or a number that is not above zero.
    """
    data = tomllib.loads(text)
    return MappingProxyType({key: _device(key, entry, data, file) for key, entry in data["device"].items()})


def _device(key: str, entry: Mapping[str, Any], data: Mapping[str, Any], file: str) -> Device:
    launch, reached, measured = data["launch"], data["reached"], data["device"][data["numbers"]["device"]]
    fields = {"name", "source", "memory", "bandwidth", "float32"}
    wrong = sorted((fields - entry.keys()) | (entry.keys() - fields - set(_RATES)))
    numbers = {name: value for name, value in entry.items() if name not in ("name", "source")}
    wrong += [name for name, value in numbers.items() if not isinstance(value, (int, float)) or value <= 0]
    if wrong:
        raise ArgumentError(
            f"{file}: device '{key}' has no good {wrong[0]}; it has a name, a source, and numbers above zero: memory, "
            f"bandwidth, and of {', '.join(_RATES)} at least float32"
        )
    return Device(
        key,
        entry["name"],
        round(entry["memory"] * 1e9),
        entry["bandwidth"] * 1e9,
        launch["alone"],
        launch["captured"],
        entry["source"],
        MappingProxyType({rate: entry[rate] * 1e12 for rate in _RATES if rate in entry}),
        (reached["bandwidth"], reached["products"]),
        measured["float32"] / entry["float32"],
    )


@cache
def _numbers() -> Mapping[str, float]:
    """Numbers a second of kernels that their instructions bind, by type, on the device that was measured."""
    found = tomllib.loads(read_text("devices.toml"))["numbers"]
    return {name: rate * 1e9 for name, rate in found.items() if name != "device"}


def busy_seconds(type_: str, numbers: int) -> float:
    """Seconds that the instructions of a kernel of this type take for so many numbers, on the device that was measured;
    0 where its bytes bind it, as far as is known."""
    rate = _numbers().get(type_)
    return numbers / rate if rate else 0.0


@cache
def devices() -> Mapping[str, Device]:
    """The devices of ``devices.toml`` by their keys."""
    return parse_devices(read_text("devices.toml"), "devices.toml")


def find_device(name: object) -> Device:
    """The device of that key, in any case; ArgumentError, with the keys there are, for any other."""
    known = devices()
    for key, device in known.items():
        if isinstance(name, str) and name.lower() == key.lower():
            return device
    near = near_matches(name, known) if isinstance(name, str) else ""
    raise ArgumentError(f"there is no device {name!r}.{near} Known: {', '.join(known)}")
