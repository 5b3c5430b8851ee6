"""Files of step reports: CSV, JSON lines, TensorBoard. Each is a context manager with ``write(report)``."""

from __future__ import annotations

import csv
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from amp_transpiler.errors import ArgumentError, ArgumentTypeError, MissingPackageError, ModelFileWriteError
from amp_transpiler.file_targets import check_target, folder_path
from amp_transpiler.runtime.report import StepReport


class _Writer:
    """Writes reports one by one; closed when its ``with`` block ends."""

    _closed = False

    def __init__(self, path: str) -> None:
        self._path = path

    def write(self, report: StepReport) -> None:
        """Add one step. ArgumentTypeError: no StepReport; ArgumentError: the writer is closed; ModelFileWriteError, an
        OSError: the file cannot be written."""
        if not isinstance(report, StepReport):
            raise ArgumentTypeError(f"{type(self).__name__}.write takes a StepReport, got {report!r}")
        self._must_be_open("write")
        with self._named():
            self._write(report)

    def _must_be_open(self, call: str) -> None:
        if self._closed:
            raise ArgumentError(f"{type(self).__name__}.{call}: the writer is closed; write before its with block ends")

    def _write(self, report: StepReport) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Write out what is buffered. A closed writer stays closed."""
        closed, self._closed = self._closed, True
        with self._named():
            if not closed:
                self._close()

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ModelFileWriteError(f"'{self._path}' cannot be written: {error.strerror or error}") from None

    def _close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _LineWriter(_Writer):
    """One line a step, readable while training goes on. ``append`` goes on with a file that is there."""

    def __init__(self, path: str | os.PathLike[str], append: bool = False) -> None:
        target = check_target(path)
        super().__init__(os.fspath(path))
        if append:
            _end_line(target)
        self._file = open(target, "a" if append else "w", encoding="utf-8", newline="", buffering=1)  # noqa: SIM115
        self._empty = self._file.tell() == 0

    def _close(self) -> None:
        self._file.close()


def _end_line(path: Path) -> None:
    """End the last line of a file where it was cut short, so that the next one is whole."""
    if path.exists() and path.stat().st_size:
        with open(path, "rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")


class CsvWriter(_LineWriter):
    """A CSV file with a head line; fields as in ``StepReport.to_dict``, groups joined by spaces, nothing for None.

    One that is gone on with keeps the columns that it has; a line that was cut short is ended.

    ModelFileWriteError, an OSError, where the file can be no target, or cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], append: bool = False) -> None:
        super().__init__(path, append)
        self._columns: list[str] = []
        if not self._empty:
            try:
                with open(self._file.name, encoding="utf-8", newline="") as file:
                    self._columns = next(csv.reader(file), [])
            except (UnicodeDecodeError, csv.Error):
                self._columns = [""]
            if "step" not in self._columns:
                self.close()
                raise ModelFileWriteError(
                    f"'{path}' cannot be gone on with: its first line names no columns of step reports"
                )

    def _write(self, report: StepReport) -> None:
        record = report.to_dict()
        record["overflow"] = " ".join(record["overflow"])
        writer = csv.DictWriter(self._file, self._columns or list(record), lineterminator="\n", extrasaction="ignore")
        if not self._columns:
            writer.writeheader()
        self._columns = list(writer.fieldnames)
        writer.writerow(record)


class JsonlWriter(_LineWriter):
    """A file of JSON objects, one a line; fields as in ``StepReport.to_dict``.

    Numbers that are not finite, which JSON does not have, are the strings "inf", "-inf" and "nan". Errors as of
    :class:`CsvWriter`.
    """

    def _write(self, report: StepReport) -> None:
        record = {name: _json_number(value) for name, value in report.to_dict().items()}
        self._file.write(json.dumps(record, allow_nan=False) + "\n")


def _json_number(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class TensorBoardWriter(_Writer):
    """Scalars under ``train/`` in a TensorBoard log folder, through the package tensorboardX.

    Beside the fields of ``StepReport.to_dict``: ``grad_norm/<parameter>`` with ``parameters=True``. Values that are
    not finite are left out, since TensorBoard cannot draw them. Each step is in the file when ``write`` returns.
    MissingPackageError where tensorboardX is not installed, ModelFileWriteError, an OSError, where the file cannot be
    written.
    """

    def __init__(self, folder: str | os.PathLike[str], parameters: bool = False) -> None:
        try:
            from tensorboardX import event_file_writer  # noqa: PLC0415 - an optional package
        except ImportError:
            raise MissingPackageError(
                "TensorBoardWriter needs the package tensorboardX; install it with `pip install tensorboardX`"
            ) from None
        path = str(folder_path(folder, "TensorBoardWriter: folder"))
        try:
            os.makedirs(path, exist_ok=True)
        except (OSError, RecursionError) as error:  # a path of a thousand folders, or one that cannot be
            reason = getattr(error, "strerror", None) or error
            raise ModelFileWriteError(f"{path!r} can be no folder of logs: {reason}") from None
        super().__init__(path)
        self._parameters = parameters
        with self._named():  # the package's SummaryWriter waits for ever where its thread could not write
            self._events = event_file_writer.EventsWriter(
                os.path.join(path, "events"), f".{os.getpid()}.{time.time_ns()}"
            )

    def _write(self, report: StepReport) -> None:
        record = {
            f"train/{name}": value for name, value in report.to_dict().items() if name not in ("step", "overflow")
        }
        if self._parameters:
            record |= {f"grad_norm/{name}": norm for name, norm in report.grad_norms.items()}
        self._add(record, report.step)

    def write_scalars(self, group: str, values: Mapping[str, float | None], step: int) -> None:
        """Add numbers of other kinds, under ``<group>/``: those of an epoch, say. ArgumentError once it is closed."""
        self._must_be_open("write_scalars")
        with self._named():
            self._add({f"{group}/{name}": value for name, value in values.items()}, step)

    def _add(self, record: Mapping[str, Any], step: int) -> None:
        from tensorboardX.proto.event_pb2 import Event  # noqa: PLC0415 - an optional package
        from tensorboardX.summary import scalar  # noqa: PLC0415

        event = Event(wall_time=time.time(), step=step)
        for tag, value in record.items():
            if value is not None and math.isfinite(value):
                event.summary.MergeFrom(scalar(tag, float(value)))
        self._events.write_event(event)
        self._events.flush()

    def _close(self) -> None:
        self._events.close()
