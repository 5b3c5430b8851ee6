"""``amp-transpile convert``."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from amp_transpiler.cli.check import check
from amp_transpiler.cli.terminal import complain, printable
from amp_transpiler.conversion.auto import Stage
from amp_transpiler.conversion.converting import TOLERANCE
from amp_transpiler.conversion.converting import convert as convert_model
from amp_transpiler.conversion.report.html import to_html
from amp_transpiler.conversion.report.json import to_json
from amp_transpiler.conversion.report.record import record_program
from amp_transpiler.errors import ArgumentError
from amp_transpiler.files import Group, check_outputs, check_space, put, same_file
from amp_transpiler.ir.external import check_unnamed
from amp_transpiler.ir.locations import model_files, model_size
from amp_transpiler.ir.metadata import inserted
from amp_transpiler.ir.onnx_out import save
from amp_transpiler.program import Program
from amp_transpiler.runtime.budget import available_memory

#: Bytes from which on a conversion takes long enough for a progress bar.
_LARGE = 100_000_000


def run(options: argparse.Namespace) -> int:
    """Convert, write, report; 3 where the tolerance or the check was not met."""
    _check_paths(options)
    _check_numbers(options)
    with Group() as group:
        try:
            return _run(options, group)
        except KeyboardInterrupt:
            if not group.written:
                raise
            complain(f"interrupted; {_listed(group.written)} stand whole")
            return 130


def _run(options: argparse.Namespace, group: Group) -> int:
    """All files, the reports too, appear together at the end, after the check."""
    tolerance, memory = options.tolerance, _bytes(options.memory_budget)
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
            time_budget=options.time_budget,
            memory_budget=memory or available_memory() * 9 // 10,
        )
        bar.stage("writing")
        save(program, options.output, external_data=options.external_data, group=group)
    waiting = group.staged(options.output)
    status = 0
    if not options.quiet:
        print(_summary(program, options, model_size(waiting)))
    if options.check:
        limit = TOLERANCE[options.dtype] if tolerance is None else tolerance
        status = check(options.input, str(waiting), program, options.calibration, limit, options.time_budget, memory)
    _add_reports(program, options, group, waiting)
    group.commit()
    beside = f"{options.output}.data"
    if os.path.exists(beside) and not options.quiet and not any(same_file(beside, one) for one in group.written):
        print(f"  '{beside}' lies there from before; {options.output} has no use for it")
    errors = program.conversion.outputs
    if program.conversion.tolerance is not None and not all(e <= program.conversion.tolerance for e in errors.values()):
        complain(program.conversion.rounds[-1])
        status = 3
    if status:
        complain(f"{_listed(group.written)} written all the same")
    return status


def _check_numbers(options: argparse.Namespace) -> None:
    """Refuse numbers that mean nothing."""
    tolerance = options.tolerance
    if tolerance is not None and not (options.calibration or options.check):
        raise ArgumentError("--tolerance is kept to on data: give --calibration as well, or --check")
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise ArgumentError(f"--tolerance is a relative error, 0 or above, such as 0.01; got {tolerance}")
    for option, value in (("--time-budget", options.time_budget), ("--memory-budget", options.memory_budget)):
        if value is not None and not 0 < value < math.inf:
            raise ArgumentError(f"{option} is a number above 0; got {value}")


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else int(min(gib, 1 << 30) * (1 << 30))


def _listed(paths: Sequence[Path]) -> str:
    return ", ".join(f"'{path}'" for path in paths)


def _check_paths(options: argparse.Namespace) -> None:
    """Refuse before the work what could not be written after it."""
    output, data = Path(options.output), options.external_data
    read = model_files(options.input)
    beside = output.parent / (data if isinstance(data, str) else f"{output.name}.data")
    external = data is not None or len(read) > 1  # else it is large models alone that get a data file
    outputs = {
        "OUT.onnx": options.output,
        "--external-data": beside if external else None,
        "--report": options.report,
        "--json": options.json,
    }
    check_outputs(outputs, {"IN.onnx": read, "--calibration": options.calibration or []})
    if external and not isinstance(data, str):
        check_unnamed(output, beside)
    check_space(options.output, model_size(options.input) // 2)


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


def _summary(program: Program, options: argparse.Namespace, size: int) -> str:
    own = [op for op in program.walk() if not inserted(op)]
    casts = sum(inserted(op) for op in program.walk())
    halves = sum(op.precision == options.dtype for op in own)
    done = program.conversion
    lines = [
        f"{options.output}: {halves} of {len(own)} operators in {options.dtype}, {casts} casts inserted, "
        f"{model_size(options.input):,} -> {size:,} bytes"
    ]
    actions: dict[str, list[str]] = {}
    for note in done.constants:
        actions.setdefault(note.action, []).append(note.name)
    for action, names in actions.items():
        some = f"{', '.join(names[:2])}{f' and {len(names) - 2} more' if len(names) > 2 else ''}"
        lines.append(f"  constant{'s' * (len(names) > 1)} {some}: {action}")
    lines += [f"  {line}" for line in (*done.notes, *done.rounds)]
    lines += [f"  output '{name}': relative error {error:.3g}" for name, error in done.outputs.items()]
    return "\n".join(map(printable, lines))


def _add_reports(program: Program, options: argparse.Namespace, group: Group, written: Path) -> None:
    done = program.conversion
    if options.report or options.json:
        done.after = record_program(program, written)
    if options.report:
        group.add(options.report, put(to_html(done).encode("utf-8")))
    if options.json:
        group.add(options.json, put(to_json(done).encode("ascii")))


class _Bar:
    """A progress bar for large models, on a terminal."""

    def __init__(self, options: argparse.Namespace) -> None:
        large = model_size(options.input) >= _LARGE or bool(options.calibration)
        shown = large and not options.quiet and sys.stderr.isatty()
        self.runs = bool(options.calibration)  # which the bar counts then: what lies between them does not take long
        total, unit = (None, "run") if self.runs else (5, "stage")
        self.bar = tqdm(total=total, disable=not shown, leave=False, unit=unit)
        self.stage: Callable[[str], None] = self._stage

    def _stage(self, line: str) -> None:
        if isinstance(line, Stage):
            self.bar.total, self.bar.n = line.total, line.done
        elif not self.runs:
            self.bar.update()
        self.bar.set_description(line)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.close()
