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
from amp_transpiler.cli.conversion_arguments import add_conversion_options as add_options
from amp_transpiler.cli.terminal import complain, printable
from amp_transpiler.conversion.auto import Stage
from amp_transpiler.conversion.conversion_options import ConversionOptions
from amp_transpiler.conversion.converting import convert_with
from amp_transpiler.conversion.report.html import to_html
from amp_transpiler.conversion.report.json import to_json
from amp_transpiler.conversion.report.record import record_program
from amp_transpiler.errors import ArgumentError
from amp_transpiler.file_targets import check_space, same_file
from amp_transpiler.files import Group, array_files, check_outputs, put
from amp_transpiler.ir.external import check_unnamed
from amp_transpiler.ir.locations import model_files, model_size, total_size
from amp_transpiler.ir.onnx_out import save
from amp_transpiler.option_checks import listed
from amp_transpiler.program import Program
from amp_transpiler.runtime.budget import available_memory
from amp_transpiler.stops import stop_of

__all__ = ["add_options", "run"]

#: Bytes from which on a conversion takes long enough for a progress bar.
_LARGE = 100_000_000


def run(arguments: argparse.Namespace) -> int:
    """Convert, write, report; 3 where the tolerance or the check was not met."""
    read = model_files(arguments.input)
    size = total_size(read)
    _check_paths(arguments, read, size)
    bar = _Bar(arguments, size)
    options = _options(arguments, bar.stage)
    with Group() as group:
        try:
            with bar:
                program = convert_with(options, arguments.input)
                bar.stage("writing")
                save(program, arguments.output, external_data=arguments.external_data, group=group)
            return _finished(program, arguments, options, size, group)
        except KeyboardInterrupt as stopped:
            if not group.written:
                raise
            stop = stop_of(stopped)
            complain(f"{stop.word}; {_listed(group.written)} stand whole")
            return stop.status


def _finished(
    program: Program, arguments: argparse.Namespace, options: ConversionOptions, size: int, group: Group
) -> int:
    """All files, the reports too, appear together at the end, after the check."""
    waiting = group.staged(arguments.output)
    if not arguments.quiet:
        print(_summary(program, arguments, size, model_size(waiting)))
    failures = check(str(waiting), program, options) if options.check else []
    for failure in failures:
        shown = failure.replace(str(waiting), os.path.basename(waiting))  # it lies where it waits for its name
        complain(f"check failed: {shown}")
    _add_reports(program, arguments, group, waiting)
    group.commit()
    beside = f"{arguments.output}.data"
    if os.path.exists(beside) and not arguments.quiet and not any(same_file(beside, one) for one in group.written):
        print(f"  '{beside}' lies there from before; {arguments.output} has no use for it")
    verdict = program.conversion.verdict
    if verdict is not None and verdict.why and not failures:
        complain(verdict.why)
    if not failures and (verdict is None or verdict.met):
        return 0
    complain(f"{_listed(group.written)} written all the same")
    return 3


def _options(arguments: argparse.Namespace, progress: Callable[[str], None]) -> ConversionOptions:
    """What was asked for; lists that were not given are None."""
    memory = _bytes(arguments.memory_budget)
    if memory is None and arguments.calibration:
        memory = available_memory() * 9 // 10
    return ConversionOptions(
        mode=arguments.mode,
        dtype=arguments.dtype,
        place=arguments.place,
        keep_io=False if arguments.no_keep_io else arguments.keep_io or True,
        white_list=arguments.white_list,
        black_list=arguments.black_list,
        black_varnames=arguments.black_varnames,
        only=arguments.only,
        exclude=getattr(arguments, "except"),
        calibration=arguments.calibration,
        tolerance=arguments.tolerance,
        input_ranges=_ranges(arguments.input_range or []),
        numeric_guards=not arguments.no_numeric_guards,
        record=bool(arguments.report or arguments.json),
        check=arguments.check,
        progress=progress,
        time_budget=arguments.time_budget,
        memory_budget=memory,
        flags=True,
    )


def _bytes(gib: Any) -> Any:
    """GiB in bytes; what is no budget as it was typed, for the message that refuses it."""
    usable = isinstance(gib, int | float) and 0 < gib < math.inf
    return int(min(gib, 1 << 30) * (1 << 30)) if usable else gib


def _listed(paths: Sequence[Path]) -> str:
    return ", ".join(f"'{path}'" for path in paths)


def _check_paths(arguments: argparse.Namespace, read: Sequence[Path], size: int) -> None:
    """Refuse before the work what could not be written after it."""
    output, data = Path(arguments.output), arguments.external_data
    beside = output.parent / (data if isinstance(data, str) else f"{output.name}.data")
    external = len(read) > 1 if data is None else data is not False  # else large models alone get a data file
    outputs = {
        "OUT.onnx": arguments.output,
        "--external-data": beside if external else None,
        "--report": arguments.report,
        "--json": arguments.json,
    }
    files = [path for path in read if not os.path.isdir(path)]  # reading it says that a folder is no model
    calibration = [path for source in arguments.calibration or () for path in array_files(source)]
    check_outputs(outputs, {"IN.onnx": files, "--calibration": calibration})
    if external and not isinstance(data, str):
        check_unnamed(output, beside)
    check_space(arguments.output, size // 2)


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


def _summary(program: Program, arguments: argparse.Namespace, before: int, after: int) -> str:
    own = [op for op in program.walk() if not op.inserted]
    casts = sum(op.inserted for op in program.walk())
    done = program.conversion
    halves = sum(op.precision == done.dtype for op in own)
    lines = [
        f"{arguments.output}: {halves} of {len(own)} operators in {done.dtype}, {casts} casts inserted, "
        f"{before:,} -> {after:,} bytes"
    ]
    actions: dict[str, list[str]] = {}
    for note in done.constants:
        actions.setdefault(note.action, []).append(note.name)
    for action, names in actions.items():
        lines.append(f"  constant{'s' * (len(names) > 1)} {listed(names, 2, quote='')}: {action}")
    lines += [f"  {line}" for line in (*done.notes, *done.rounds)]
    if arguments.calibration:  # without, the check tells what it measured
        lines += [f"  output '{name}': relative error {error:.3g}" for name, error in done.outputs.items()]
    return "\n".join(map(printable, lines))


def _add_reports(program: Program, arguments: argparse.Namespace, group: Group, written: Path) -> None:
    done = program.conversion
    if arguments.report or arguments.json:
        done.after = record_program(program, written)
    if arguments.report:
        group.add(arguments.report, put(to_html(done).encode("utf-8")))
    if arguments.json:
        group.add(arguments.json, put(to_json(done).encode("ascii")))


class _Bar:
    """A progress bar for large models, on a terminal."""

    def __init__(self, arguments: argparse.Namespace, size: int) -> None:
        large = size >= _LARGE or bool(arguments.calibration)
        shown = large and not arguments.quiet and sys.stderr.isatty()
        self.runs = bool(arguments.calibration)  # which the bar counts then: what lies between them does not take long
        total, unit = (None, "run") if self.runs else (5 + arguments.check, "stage")
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
