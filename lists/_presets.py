"""Named recipes (``presets.toml``): operators, by type and by name, that one kind of model runs in fp32."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

from amp_transpiler.errors import ListError
from amp_transpiler.lists._data import check_operator
from amp_transpiler.lists._schemas import near_matches, read_text


@dataclass(frozen=True)
class Preset:
    """One recipe: ``black`` operator types, and ``names``, patterns of operators that run fp32.

    ``why``: what the recipe is for. ``reasons``: why each operator and pattern is where it is.
    """

    why: str
    black: frozenset[str]
    names: tuple[str, ...]
    reasons: Mapping[str, str]


def parse_presets(text: str, file: str) -> Mapping[str, Preset]:
    """The recipes in a TOML text: a table each, with ``why``, ``[[black]]`` and ``[[names]]``.

    Raises:
        ListError: another table, an operator without an onnx schema, or an entry that stands twice.
    """
    return MappingProxyType({name: _preset(entry, f"{file}, {name}") for name, entry in tomllib.loads(text).items()})


def _preset(entry: dict[str, Any], where: str) -> Preset:
    unknown = sorted(entry.keys() - {"why", "black", "names"})
    if unknown:
        raise ListError(f"{where}: there is no list '{unknown[0]}'; a preset has why, black and names.")
    reasons: dict[str, str] = {}
    members: dict[str, list[str]] = {"black": [], "names": []}
    for table, key in (("black", "operators"), ("names", "patterns")):
        for group in entry.get(table, []):
            for name in group[key]:
                if name in reasons:
                    raise ListError(f"{where}: '{name}' stands there twice; keep one of them.")
                if table == "black":
                    check_operator(name, f"{where}, list black")
                members[table].append(name)
                reasons[name] = group["why"]
    return Preset(entry["why"], frozenset(members["black"]), tuple(members["names"]), MappingProxyType(reasons))


@cache
def presets() -> Mapping[str, Preset]:
    """The recipes of ``presets.toml`` by name."""
    return parse_presets(read_text("presets.toml"), "presets.toml")


def find_preset(name: str) -> Preset:
    """The recipe of that name; ListError, with the names there are, for any other."""
    known = presets()
    if not isinstance(name, str) or name not in known:
        near = near_matches(name, known) if isinstance(name, str) else ""
        raise ListError(f"AutoMixedPrecisionLists: there is no preset {name!r}.{near} Known: {', '.join(known)}.")
    return known[name]
