"""What the tables of this package are read and checked with: onnx's schemas, names of operators, data files."""

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

from onnx import defs


def split_name(name: str) -> tuple[str, str]:
    """Domain and operator type of ``Type`` or ``domain::Type``; the domain of ai.onnx is the empty string."""
    domain, _, op_type = name.rpartition("::")
    return ("" if domain == "ai.onnx" else domain), op_type


@cache
def schemas() -> Mapping[tuple[str, str], defs.OpSchema]:
    """The newest schema of every operator that onnx knows, deprecated ones included, by domain and type."""
    newest: dict[tuple[str, str], defs.OpSchema] = {}
    for schema in defs.get_all_schemas_with_history():
        key = (schema.domain, schema.name)
        if key not in newest or newest[key].since_version < schema.since_version:
            newest[key] = schema
    return MappingProxyType(newest)


def near_matches(name: str, known: Iterable[str]) -> str:
    """A sentence with the known names nearest to ``name``, letter case ignored; empty where nothing is near."""
    by_lower: dict[str, str] = {}
    for each in sorted(known):
        by_lower.setdefault(each.lower(), each)
    near = difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(repr(by_lower[each]) for each in near)}?" if near else ""


def read_tables(file: str, name: str) -> Any:
    """What a TOML file of this package has under a name, empty where it has nothing: then it is not even parsed, for
    that takes long."""
    text = read_text(file)
    return tomllib.loads(text).get(name, {}) if f"[{name}." in text or f"[{name}]" in text else {}


def read_text(file: str) -> str:
    """The text of a data file of this package."""
    return resources.files(__package__).joinpath(file).read_text(encoding="utf-8")
