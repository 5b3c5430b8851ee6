"""The record of a conversion as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from amp_transpiler.conversion.report.record import Conversion, OperatorRecord, ProgramRecord
from amp_transpiler.conversion.report.summary import casts, kind, kinds, reasons
from amp_transpiler.errors import ArgumentTypeError

#: Version of the layout of the JSON report; a reader that knows another one should refuse.
FORMAT = 1


def to_json(conversion: Conversion) -> str:
    """The record as JSON text, an operator or a tensor a line; the same record gives the same text.

    The keys are the fields of :class:`.Conversion`, after ``"format"``, and of its verdict ``outputs`` and
    ``tolerance``. A program has in addition ``kinds``
    (operators by the way they run), ``reasons`` (groups of reasons with counts) and ``cast_list``
    (:class:`.summary.CastRecord`), an operator ``kind``. Numbers that JSON cannot hold are the strings "NaN",
    "Infinity" and "-Infinity", as JavaScript reads them.

    Raises:
        ArgumentTypeError: a field of a type that JSON has no counterpart for.
    """
    content: dict[str, Any] = {"format": FORMAT}
    for f in dataclasses.fields(conversion):
        for name in ("outputs", "tolerance") if f.name == "verdict" else (f.name,):
            value = getattr(conversion, name)
            content[name] = _program(value) if isinstance(value, ProgramRecord) else plain(value, name)
    return _lines(content, 3) + "\n"


def _program(program: ProgramRecord) -> dict[str, Any]:
    """Operators and tensors hold plain values alone, and there are many: they go in as they are."""
    fields = {f.name: getattr(program, f.name) for f in dataclasses.fields(program)}
    return fields | {
        "operators": [_operator(op) for op in program.operators],
        "tensors": [vars(tensor) for tensor in program.tensors],
        "kinds": kinds(program),
        "reasons": reasons(program),
        "cast_list": [vars(cast) for cast in casts(program)],
    }


def _operator(op: OperatorRecord) -> dict[str, Any]:
    shown = (("reason", op.reason) if name == "why" else (name, value) for name, value in vars(op).items())
    return dict(shown) | {"kind": kind(op)}


def plain(value: Any, where: str) -> Any:
    """A value in JSON's own types; ArgumentTypeError, naming ``where``, for what has no counterpart."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name), f"{where}.{f.name}") for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    raise ArgumentTypeError(
        f"report: {where} is a {type(value).__name__}, which JSON cannot hold; give numbers, strings, lists and dicts"
    )


def _lines(value: Any, depth: int) -> str:
    """JSON text with a line for each entry of the outer ``depth`` levels."""
    if depth and value and isinstance(value, dict):
        inside = [f"{json.dumps(key)}: {_lines(item, depth - 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(inside) + "\n}"
    if depth and value and isinstance(value, list | tuple):
        return "[\n" + ",\n".join(_lines(item, 0) for item in value) + "\n]"
    return json.dumps(value, allow_nan=False)
