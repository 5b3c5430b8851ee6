"""What onnxruntime tells of its kernels, and ``lists/kernels.json``, where it is recorded."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib import metadata
from typing import Any

from tests.helpers.where import ROOT

FILE = ROOT / "lists" / "kernels.json"
DOMAINS = ("ai.onnx", "com.microsoft")

Registry = dict[str, dict[str, dict[str, dict[str, list[str]]]]]
"""Domain, operator, versions ("6-12", "13+"), type parameter: element types."""


def read(kernels: Iterable[Any]) -> Registry:
    """The kernels that onnxruntime's bindings list, but for its copies between memories."""
    found: Registry = {domain: {} for domain in DOMAINS}
    for kernel in kernels:
        domain = kernel.domain or "ai.onnx"
        if domain not in DOMAINS or kernel.op_name.startswith("Memcpy"):
            continue
        first, last = kernel.version_range
        versions = f"{first}+" if last >= 2**31 - 1 else str(first) if first == last else f"{first}-{last}"
        params = found[domain].setdefault(kernel.op_name, {}).setdefault(versions, {})
        for param, types in kernel.type_constraints.items():
            params[param] = sorted({*params.get(param, []), *map(_element, types)})
    return found


def _element(spelled: str) -> str:
    return spelled.removeprefix("tensor(").removesuffix(")") if spelled.startswith("tensor(") else spelled


def installed_version() -> str:
    """The packages of onnxruntime's that this interpreter has, with their versions."""
    names = ("onnxruntime-ep-webgpu", "onnxruntime-webgpu", "onnxruntime", "onnxruntime-gpu")
    found = {each.metadata["Name"]: each.version for each in metadata.distributions()}
    return " on ".join(f"{name} {found[name]}" for name in names if name in found)


def record(provider: str, found: Registry, source: str) -> None:
    """Writes a provider's registry into the file, and where it comes from."""
    table = json.loads(FILE.read_text())
    table["source"][provider] = source
    table["kernels"][provider] = numbered(found, table["type_sets"])
    FILE.write_text(_written(table))


def _written(table: dict[str, Any]) -> str:
    """The file's text: a line for each operator."""
    providers = [
        f"{json.dumps(provider)}: {{\n" + ",\n".join(_domain(*each) for each in domains.items()) + "\n}"
        for provider, domains in table["kernels"].items()
    ]
    sets = ",\n".join(json.dumps(each) for each in table["type_sets"])
    sources = json.dumps(table["source"], indent=0)
    head = f'"source": {sources},\n"layout": {json.dumps(table["layout"])},\n'
    return f'{{\n{head}"type_sets": [\n{sets}\n],\n"kernels": {{\n' + ",\n".join(providers) + "\n}}\n"


def _domain(name: str, operators: dict[str, Any]) -> str:
    lines = [f"{json.dumps(op)}: {json.dumps(of, separators=(',', ':'))}" for op, of in operators.items()]
    return f"{json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n}"


def numbered(found: Registry, sets: list[list[str]]) -> dict[str, Any]:
    """A registry with sets of element types by number, as the file has them; new sets are added to ``sets``."""

    def number(types: list[str]) -> int:
        if types not in sets:
            sets.append(types)
        return sets.index(types)

    return {
        domain: {
            op: {v: {p: number(types) for p, types in sorted(params.items())} for v, params in _by_version(of)}
            for op, of in sorted(operators.items())
        }
        for domain, operators in found.items()
    }


def _by_version(registrations: dict[str, Any]) -> list[tuple[str, Any]]:
    return sorted(registrations.items(), key=lambda each: int(each[0].rstrip("+").partition("-")[0]))
