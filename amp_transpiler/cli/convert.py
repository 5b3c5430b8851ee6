"""``amp-transpile convert``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..convert import TOLERANCE
from ..convert import convert as convert_model
from ..errors import ArgumentError, ModelFileWriteError
from ..ir.program import Program
from ..report.html import write_html
from ..report.json import write_json
from ..report.record import record_program
from .check import check

#: Bytes from which on a conversion takes long enough for a progress bar.
_LARGE = 100_000_000


def run(options: argparse.Namespace) -> int:
    """Convert, write, report; 3 where the tolerance or the check was not met."""
    _check_paths(options)
    if options.tolerance is not None and not (options.calibration or options.check):
        raise ArgumentError("--tolerance is kept to on data: give --calibration as well, or --check")
    tolerance = options.tolerance
    bar = _Bar(options)
    with bar:
        program = convert_model(
            options.input,
            mode=options.mode,
            dtype=options.dtype,
            keep_io=_keep_io(options),
            white_list=options.white_list,
            black_list=options.black_list,
            black_varnames=options.black_varnames,
            only=options.only,
            exclude=getattr(options, "except"),
            calibration=options.calibration,
            tolerance=tolerance if options.mode == "auto" and options.calibration else None,
            input_ranges=_ranges(options.input_range or []),
            numeric_guards=not options.no_numeric_guards,
            record=bool(options.report or options.json),
            progress=bar.stage,
        )
        bar.stage("writing")
        program.to_onnx(options.output, external_data=options.external_data)
    status = 0
    if not options.quiet:
        print(_summary(program, options))
    if options.check:
        limit = tolerance or TOLERANCE[options.dtype]
        status = check(options.input, options.output, program, options.calibration, limit)
    _write_reports(program, options)
    errors = program.conversion.outputs
    if program.conversion.tolerance is not None and not all(e <= program.conversion.tolerance for e in errors.values()):
        print(f"amp-transpile: {program.conversion.rounds[-1]}", file=sys.stderr)
        status = 3
    return status


def _check_paths(options: argparse.Namespace) -> None:
    """Refuse before the work what could not be written after it."""
    targets = {"OUT.onnx": options.output, "--report": options.report, "--json": options.json}
    seen = {_real(options.input): "IN.onnx"}
    for what, path in targets.items():
        if path is None:
            continue
        if _real(path) in seen:
            raise ArgumentError(f"{seen[_real(path)]} and {what} are the same file, {path}; choose another name")
        seen[_real(path)] = what
        if os.path.isdir(path):
            raise ModelFileWriteError(f"{what} '{path}' is a folder; give the name of a file in it")
        folder = Path(path).resolve().parent
        if not folder.is_dir():
            raise ModelFileWriteError(f"{what} '{path}' cannot be written: there is no folder '{folder}'")
        if not os.access(folder, os.W_OK):
            raise ModelFileWriteError(f"{what} '{path}' cannot be written: no permission to write to '{folder}'")


def _real(path: str) -> str:
    return os.path.realpath(path)


def _keep_io(options: argparse.Namespace) -> Any:
    if options.no_keep_io:
        return False
    return options.keep_io or True


def _ranges(texts: list[str]) -> dict[str, tuple[float, float]]:
    ranges = {}
    for text in texts:
        name, equals, bounds = text.rpartition("=")
        low, colon, high = bounds.partition(":")
        try:
            ranges[name] = float(low), float(high)
        except ValueError:
            equals = ""
        if not (name and equals and colon):
            raise ArgumentError(f"--input-range takes NAME=LOW:HIGH, such as image=0:1, got {text!r}")
    return ranges


def _summary(program: Program, options: argparse.Namespace) -> str:
    operators = list(program.walk())
    casts = sum(op.type == "Cast" for op in operators)
    halves = sum(op.precision == options.dtype and op.type != "Cast" for op in operators)
    done = program.conversion
    lines = [f"{options.output}: {halves} of {len(operators) - casts} operators in {options.dtype}, {casts} casts, "
             f"{_size(options.input):,} -> {_size(options.output):,} bytes"]  # fmt: skip
    actions: dict[str, list[str]] = {}
    for note in done.constants:
        actions.setdefault(note.action, []).append(note.name)
    for action, names in actions.items():
        some = f"{', '.join(names[:2])}{f' and {len(names) - 2} more' if len(names) > 2 else ''}"
        lines.append(f"  constant{'s' * (len(names) > 1)} {some}: {action}")
    lines += [f"  {line}" for line in (*done.notes, *done.rounds)]
    lines += [f"  output '{name}': relative error {error:.3g}" for name, error in done.outputs.items()]
    return "\n".join(lines)


def _size(path: str) -> int:
    """Bytes of a model file and of the data file beside it."""
    beside = f"{path}.data"
    return os.path.getsize(path) + (os.path.getsize(beside) if os.path.exists(beside) else 0)


def _write_reports(program: Program, options: argparse.Namespace) -> None:
    done = program.conversion
    if options.report or options.json:
        done.after = record_program(program, options.output)
    if options.report:
        write_html(done, options.report)
    if options.json:
        write_json(done, options.json)


class _Bar:
    """A progress bar for large models, on a terminal."""

    def __init__(self, options: argparse.Namespace) -> None:
        large = os.path.exists(options.input) and (_size(options.input) >= _LARGE or bool(options.calibration))
        shown = large and not options.quiet and sys.stderr.isatty()
        self.bar = tqdm(total=None if options.calibration else 5, disable=not shown, leave=False, unit="stage")
        self.stage: Callable[[str], None] = self._stage

    def _stage(self, line: str) -> None:
        self.bar.update()
        self.bar.set_description(line)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.close()
