"""Command lines with values that nobody means: numbers, names, patterns and paths of the wrong kind."""

from __future__ import annotations

import random
from pathlib import Path

from tests.fuzz.models import models

_NUMBERS = ["0", "-1", "1", "nan", "inf", "-inf", "1e308", "1e-320", "99999999999999999999", "", "x", "0x10", "1e", "½"]
_NAMES = [
    "",
    "x",
    "nowhere",
    "h",
    "*",
    "re:(",
    "re:.*",
    "re:(a+)+$",
    "[",
    "\x1b[31m",
    "\udcff",
    "a" * 3000,
    "\0",
    "a\nb",
    "MatMul",
    "matmul_v2",
    "Softmax Relu",
    "../..",
    "é",
    "-x",
]
_PATHS = [
    "",
    ".",
    "/",
    "/dev/null",
    "/dev/full",
    "/dev/zero",
    "/nowhere/x",
    "{d}",
    "{d}/none.npz",
    "{d}/text.npz",
    "{m}",
    "{d}/a\0b",
    "{d}/none/\udcff",
    "{d}/" + "n" * 300,
    "~",
    "-",
    "{d}/loop",
]
#: Where something may be written: that it replaces what lies there is what it is told to do.
_TARGETS = [path for path in _PATHS if path not in ("{d}/text.npz", "-", "~")]
_RANGES = ["x=0:1", "x=1:0", "x=nan:1", "x=:", "=", "x", "x=0:inf", "=0:1", "x=0:1:2", "y=0:1", ""]
#: Option -> values to choose from; None: it takes none.
_CONVERT: dict[str, list[str] | None] = {
    "--mode": ["pure", "pure-fp16", "mixed", "auto", "fp16", "", "\x1b"],
    "--dtype": ["float16", "bfloat16", "bf16", "int8", ""],
    "--white-list": _NAMES,
    "--black-list": _NAMES,
    "--black-varnames": _NAMES,
    "--only": _NAMES,
    "--except": _NAMES,
    "--keep-io": _NAMES,
    "--no-keep-io": None,
    "--no-numeric-guards": None,
    "--calibration": _PATHS,
    "--tolerance": _NUMBERS,
    "--input-range": _RANGES,
    "--external-data": [*_NAMES, *_TARGETS],
    "--report": _TARGETS,
    "--json": _TARGETS,
    "--check": None,
    "--quiet": None,
    "--time-budget": _NUMBERS,
    "--memory-budget": _NUMBERS,
}


def prepared(folder: Path) -> dict[str, str]:
    """Files that command lines name: a model, a text that is no archive, a link to itself."""
    folder.mkdir(exist_ok=True)
    (folder / "m.onnx").write_bytes(models()["mlp"].SerializeToString())
    (folder / "text.npz").write_text("no archive")
    (folder / "loop").symlink_to(folder / "loop")
    return {"d": str(folder), "m": str(folder / "m.onnx"), "o": str(folder / "out" / "out.onnx")}


def command_line(rng: random.Random, files: dict[str, str]) -> list[str]:
    """One command with one to three options, or odd positional arguments."""

    def filled(text: str) -> str:
        return text.replace("{d}", files["d"]).replace("{m}", files["m"])

    command = rng.choice(["convert", "convert", "convert", "convert", "info", "explain", "diff", "convrt"])
    odd = rng.random() < 0.15
    source = filled(rng.choice(_PATHS)) if odd else files["m"]
    if command != "convert":
        extra = rng.sample([*_NAMES, *map(filled, _PATHS)], rng.choice([0, 1, 2]))
        return [command, source, *([files["m"]] if command == "diff" else []), *extra]
    arguments = [command, source, filled(rng.choice(_TARGETS)) if rng.random() < 0.1 else files["o"]]
    for option in rng.sample(list(_CONVERT), rng.choice([1, 1, 2, 3])):
        values = _CONVERT[option]
        arguments += [option] if values is None else [option, filled(rng.choice(values))]
    return arguments
