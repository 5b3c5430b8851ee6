"""The record of a conversion as one HTML page that needs nothing beside it.

The page carries its data as JSON in which no "<" is left, so that no name in a model can end the script element;
its script puts names into the document as text alone. A content security policy admits this page's own script and
style, by their hashes, and no network at all.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from importlib import resources
from typing import Any

from amp_transpiler.conversion.report.json import FORMAT, plain
from amp_transpiler.conversion.report.layout import layout
from amp_transpiler.conversion.report.record import Conversion, ProgramRecord
from amp_transpiler.conversion.report.summary import KINDS, casts, facts, group, headline, kind, recorded
from amp_transpiler.errors import ArgumentError
from amp_transpiler.ir.types import LIMITS

#: The script, in the order in which its parts use each other.
_SCRIPTS = ("data.js", "table.js", "graph.js", "details.js", "main.js")
#: Steps of a column that positions are rounded to.
_STEPS = 16


def to_html(conversion: Conversion) -> str:
    """The page; the same record gives the same text.

    Raises:
        ArgumentError: a ``dtype`` that is no 16-bit type. OrderError: a conversion without record of its programs.
    """
    data = json.dumps(page_data(conversion), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    style = _part("page.css")
    script = "\n".join(_part(name) for name in _SCRIPTS)
    parts = {
        "TITLE": html.escape(f"{_utf8(conversion.source)} in {conversion.dtype}"),
        "SCRIPT_HASH": _hash(script),
        "STYLE_HASH": _hash(style),
        "STYLE": style,
        "SCRIPT": script,
        "DATA": data,
    }
    # Split rather than replaced one by one: a model's name may look like a placeholder.
    pieces = _part("page.html").split("%%")
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def page_data(conversion: Conversion) -> dict[str, Any]:
    """What the page shows, in columns, with every string once in a table of strings."""
    if conversion.dtype not in ("float16", "bfloat16"):
        raise ArgumentError(f"report: dtype is 'float16' or 'bfloat16', got {conversion.dtype!r}")
    before, after = recorded(conversion)
    strings = _Strings()
    content = {
        "format": FORMAT,
        "kinds": KINDS,
        "headline": headline(conversion),
        "facts": facts(conversion),
        "limits": _limits(conversion.dtype),
        "before": _program(before, strings),
        "after": _program(after, strings),
        "constants": plain([vars(note) for note in conversion.constants], "constants"),
        "ranges": plain([vars(each) for each in conversion.ranges], "ranges"),
        "outputs": plain(list(conversion.outputs.items()), "outputs"),
        "tolerance": plain(conversion.tolerance, "tolerance"),
        "rounds": conversion.rounds,
        "notes": conversion.notes,
    }
    return content | {"strings": list(strings.numbers)}


class _Strings:
    """A table of strings: a number for each, in the order of their first use."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))


def _program(program: ProgramRecord, strings: _Strings) -> dict[str, Any]:
    places = layout(program)
    operators, tensors = program.operators, program.tensors
    return {
        "inputs": [strings(name) for name in program.inputs],
        "outputs": [strings(name) for name in program.outputs],
        "name": [strings(op.name) for op in operators],
        "type": [strings(op.type) for op in operators],
        "scope": [strings(op.scope) for op in operators],
        "graph": [strings(op.program) for op in operators],
        "precision": [strings(op.precision) for op in operators],
        "reason": [strings(op.reason) for op in operators],
        "group": [strings(group(op.why)) for op in operators],
        "kind": [KINDS.index(kind(op)) for op in operators],
        "holder": [-1 if op.holder is None else op.holder for op in operators],
        "reads": [op.reads for op in operators],
        "makes": [op.makes for op in operators],
        "layer": places.layer,
        "column": [round(place * _STEPS) for place in places.column],
        "steps": _STEPS,
        "tensors": {
            "name": [strings(tensor.name) for tensor in tensors],
            "dtype": [strings(tensor.dtype) for tensor in tensors],
            "shape": [strings(_shape(tensor.shape)) for tensor in tensors],
            "bytes": [tensor.bytes if tensor.constant else -1 for tensor in tensors],
        },
        "casts": [
            [cast.index, strings(cast.tensor), strings(cast.source), strings(cast.target), cast.bytes, cast.inserted]
            for cast in casts(program)
        ],
    }


def _shape(shape: tuple[int | str | None, ...] | None) -> str:
    if shape is None:
        return "unknown rank"
    return " × ".join("?" if size is None else str(size) for size in shape) or "scalar"


def _limits(dtype: str) -> dict[str, Any]:
    """The format's largest number, smallest normal and smallest number above zero."""
    limits = LIMITS[dtype]
    return {"dtype": dtype, "largest": limits.largest, "normal": limits.normal, "smallest": limits.smallest}


def _utf8(path: str) -> str:
    """A path whose bytes are not UTF-8 has them as escapes, as the data of the page has."""
    return path.encode("utf-8", "backslashreplace").decode("utf-8")


def _part(name: str) -> str:
    return (resources.files(__package__) / "page" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
