"""What the tables of this package are read and checked with: onnx's schemas, names of operators, data files."""

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

from onnx import defs

#: The float element types as onnxruntime spells them.
ELEMENTS = {"float16": "float16", "bfloat16": "bfloat16", "float32": "float", "float64": "double"}


def plain_domain(domain: str) -> str:
    """The domain of operators as programs and tables write it: "" for ai.onnx, as which files may have it."""
    return "" if domain == "ai.onnx" else domain


def split_name(name: str) -> tuple[str, str]:
    """Domain and operator type of ``Type`` or ``domain::Type``; the domain of ai.onnx is the empty string."""
    domain, _, op_type = name.rpartition("::")
    return plain_domain(domain), op_type


def full_name(op_type: str, domain: str) -> str:
    """``Type``, or ``domain::Type`` of an operator of another domain than ai.onnx."""
    return f"{domain}::{op_type}" if domain else op_type


@cache
def schemas() -> Mapping[tuple[str, str], defs.OpSchema]:
    """The newest schema of every operator that onnx knows, deprecated ones included, by domain and type."""
    newest: dict[tuple[str, str], defs.OpSchema] = {}
    for schema in defs.get_all_schemas_with_history():
        key = (schema.domain, schema.name)
        if key not in newest or newest[key].since_version < schema.since_version:
            newest[key] = schema
    return MappingProxyType(newest)


def first_opset(op_type: str, domain: str) -> int | None:
    """The opset of its domain that an operator came with; None where onnx knows no such operator."""
    return _first_opsets().get((domain, op_type))


@cache
def _first_opsets() -> Mapping[tuple[str, str], int]:
    first: dict[tuple[str, str], int] = {}
    for schema in defs.get_all_schemas_with_history():
        key = (schema.domain, schema.name)
        first[key] = min(first.get(key, schema.since_version), schema.since_version)
    return MappingProxyType(first)


def schema_at(op_type: str, opset: int, domain: str) -> defs.OpSchema | None:
    """The schema of an operator at an opset of its domain; None where it has none."""
    try:
        return defs.get_schema(op_type, opset, domain)
    except defs.SchemaError:
        return None


@cache
def element_of(type_str: str) -> str:
    """``seq(tensor(float16))`` -> ``float16``."""
    match = re.search(r"\(([a-z0-9]+)\)+$", type_str)
    return match.group(1) if match else type_str


def admitted(schema: defs.OpSchema, type_str: str) -> frozenset[str]:
    """The element types that a slot of this type may hold: a type parameter of the schema, or a type itself."""
    for constraint in schema.type_constraints:
        if constraint.type_param_str == type_str:
            return frozenset(element_of(each) for each in constraint.allowed_type_strs)
    return frozenset({element_of(type_str)})


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
