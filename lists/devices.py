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
    """A device as its maker publishes it.

    ``memory`` in bytes, ``bandwidth`` in bytes a second, ``rates`` in operations a second: "float16" and "bfloat16" of
    matrix units that add up in fp32, "tf32" of the same with fp32 operands, "float32" of everything else. ``launch``,
    ``captured``: seconds between two kernels that are launched one by one, or as a CUDA graph.
    """

    key: str
    name: str
    memory: int
    bandwidth: float
    launch: float
    captured: float
    source: str
    rates: Mapping[str, float] = field(hash=False)

    def rate(self, dtype: str, tf32: bool = False) -> float:
        """Operations a second of products with operands of this type; TF32 where it is asked for and there."""
        asked = "tf32" if tf32 and dtype == "float32" else dtype
        return self.rates.get(asked, self.rates["float32"])


def parse_devices(text: str, file: str) -> Mapping[str, Device]:
    """The devices in a TOML text: ``[launch]``, and a table ``[device.KEY]`` each.

    ArgumentError: a field that is missing or unknown, or a number that is not above zero.
    """
    data = tomllib.loads(text)
    launch = data["launch"]
    return MappingProxyType({key: _device(key, entry, launch, file) for key, entry in data["device"].items()})


def _device(key: str, entry: Mapping[str, Any], launch: Mapping[str, float], file: str) -> Device:
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
    )


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
