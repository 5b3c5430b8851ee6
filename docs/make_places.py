"""Write the tables of ``docs/places.md`` from recorded data: ``python docs/make_places.py``.

``--check`` only says whether they are current. What is made stands between ``<!-- made: … -->`` and ``<!-- end -->``:
``kernels`` from ``lists/kernels.json``, ``around`` from ``lists/faults.toml``, ``roundings`` and ``faults`` from
``tests/data/webgpu_operators.json``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from made_tables import main

from amp_transpiler.lists import TARGET_OPSET, faults as listed, kernel_types

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "places.md"
_ULPS = re.compile(r"^([\d.e+]+) ulps(?:; )?")
_PLUGIN, _WHEEL = "WebGpuExecutionProvider/plugin", "WebGpuExecutionProvider"
_SHORT = {"float": "fp32", "float16": "fp16"}
#: Roundings up to this many steps are what functions and short sums have everywhere.
_PLAIN_ROUNDINGS = 4.0


def kernels() -> Iterator[tuple[str, ...]]:
    """By the element types that the plugin has a kernel for: the operators, and what 1.27 lacks of them."""
    yield "element types", "operators", "not in onnxruntime-webgpu 1.27"
    table = json.loads((DOCS.parent / "lists" / "kernels.json").read_text(encoding="utf-8"))["kernels"]
    by_types: dict[tuple[str, ...], list[str]] = {}
    for op_type in table[_PLUGIN]["ai.onnx"]:
        types = _types(_PLUGIN, op_type)
        if types:
            by_types.setdefault(types, []).append(op_type)
    for types, names in sorted(by_types.items(), key=lambda each: (-len(each[1]), each)):
        lacks = [f"{n} ({lost})" for n in names if (lost := ", ".join(t for t in types if t not in _types(_WHEEL, n)))]
        yield ", ".join(types), " ".join(names), ", ".join(lacks)


def _types(provider: str, op_type: str) -> tuple[str, ...]:
    found = kernel_types(provider, op_type, TARGET_OPSET) or {}
    data = next((found[param] for param in ("T", "T1", "V") if param in found), frozenset())
    return tuple(_SHORT.get(each, each) for each in sorted(data))


def _verdicts() -> Iterator[tuple[str, str, str, str, str]]:
    """Operator, element type, case, and the plugin's and the wheel's verdict."""
    found: Any = json.loads((DOCS.parent / "tests" / "data" / "webgpu_operators.json").read_text(encoding="utf-8"))
    for op_type, types in found["operators"].items():
        for element, by_case in types.items():
            for what, told in by_case.items():
                plugin, wheel = (told, told) if isinstance(told, str) else told
                yield op_type, _SHORT.get(element, element), what, plugin, wheel


def roundings() -> Iterator[tuple[str, ...]]:
    """The operators that lose more than a few steps of their type, with the case that loses most."""
    yield "operator", "fp32", "fp16"
    worst: dict[str, dict[str, tuple[float, str]]] = {}
    for op_type, element, what, plugin, _ in _verdicts():
        match = _ULPS.match(plugin)
        if match and float(match[1]) > worst.get(op_type, {}).get(element, (_PLAIN_ROUNDINGS, ""))[0]:
            worst.setdefault(op_type, {})[element] = float(match[1]), what
    for op_type, by_type in sorted(worst.items()):
        cells = (by_type.get(element) for element in ("fp32", "fp16"))
        yield op_type, *(f"{_steps(each[0])} ({each[1]})" if each else "" for each in cells)


def _steps(number: float) -> str:
    return "over 100,000" if number > 1e5 else f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def faults() -> Iterator[tuple[str, ...]]:
    """What kernels do other than the operator means, or fail at."""
    yield "operator", "types", "case", "what happens"
    rows: dict[tuple[str, str, str], list[str]] = {}
    for op_type, element, what, plugin, wheel in _verdicts():
        here, there = _ULPS.sub("", plugin), _ULPS.sub("", wheel)
        here, there = ("" if each == "exact" else each for each in (here, there))
        if not here and (not there or there == "not on WebGPU"):
            continue
        said = here or "right"
        if there != here and there != "not on WebGPU":
            said += f" (1.27: {there or 'right'})"
        rows.setdefault((op_type, what, said), []).append(element)
    for (op_type, what, said), elements in rows.items():
        yield op_type, ", ".join(elements), what, said.replace("|", "\\|")


def around() -> Iterator[tuple[str, ...]]:
    """The faults that programs are written around, and how."""
    yield "operator", "where", "what its kernel does", "instead"
    ways = {"body": "its body", "fp32": "fp32 operands", "left out": "one input less"}
    for op_type, rows in sorted(listed("webgpu").items()):
        for row in rows:
            yield (
                op_type,
                row.where,
                row.what,
                ways.get(row.around) or f"channels of zeros, to a multiple of {row.channels}",
            )


TABLES = {"kernels": kernels, "roundings": roundings, "faults": faults, "around": around}


def rows(what: str) -> Iterator[tuple[str, ...]]:
    """Of a table by name."""
    return TABLES[what]()


if __name__ == "__main__":
    main(PAGE, rows)
