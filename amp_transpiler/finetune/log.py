"""The log of a training: a folder with CSV files of steps and epochs, and what TensorBoard draws."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from amp_transpiler.errors import MissingPackageError, ModelFileWriteError
from amp_transpiler.files import put, write_files
from amp_transpiler.finetune.training_record import EpochRecord
from amp_transpiler.monitor import CsvWriter, TensorBoardWriter
from amp_transpiler.runtime.report import StepReport

STEPS, EPOCHS = "steps.csv", "epochs.csv"


class Log:
    """Writes reports of steps and records of epochs; a context manager.

    The folder is made with the first of them, so that a training that is refused leaves none. A run that is resumed
    goes on in the files that are there; what lies behind its checkpoint is taken out first. ``tell`` is told what is
    missing for TensorBoard, and where the files cannot be written any more: the training goes on without them.
    """

    def __init__(
        self, folder: str | os.PathLike[str], metric: str, epochs: int, steps: int, tell: Callable[[str], None]
    ) -> None:
        self.folder = Path(folder)
        self._metric, self._epochs_done, self._steps_done, self._tell = metric, epochs, steps, tell
        self._steps: CsvWriter | None = None
        self._board: TensorBoardWriter | None = None
        self._ended = False

    def step(self, report: StepReport) -> None:
        """Add a step."""
        if not self._ended:
            with self._kept_going():
                self._opened().write(report)
                if self._board is not None:
                    self._board.write(report)

    def epoch(self, record: EpochRecord) -> None:
        """Add an epoch."""
        if not self._ended:
            with self._kept_going():
                self._opened()
                rows = _rows(self.folder / EPOCHS)
                fields = record.columns(self._metric)
                rows.append({name: "" if value is None else str(value) for name, value in fields.items()})
                _write(self.folder / EPOCHS, list(fields), rows)
                if self._board is not None:
                    self._board.write_scalars("epoch", {k: v for k, v in fields.items() if k != "epoch"}, record.epoch)

    @contextmanager
    def _kept_going(self) -> Iterator[None]:
        """The log ends, and not the training, where it cannot be written."""
        try:
            yield
        except OSError as error:  # ModelFileWriteError among them
            self._ended = True
            self._tell(f"the log ends before the training, which goes on: {error}")

    def _opened(self) -> CsvWriter:
        if self._steps is None:
            try:
                self.folder.mkdir(exist_ok=True)
            except OSError as error:
                raise ModelFileWriteError(f"'{self.folder}' cannot be made: {error.strerror or error}") from None
            _cut(self.folder / STEPS, "step", self._steps_done)
            _cut(self.folder / EPOCHS, "epoch", self._epochs_done + 1 if self._epochs_done else 0)
            self._steps = CsvWriter(self.folder / STEPS, append=True)
            try:
                self._board = TensorBoardWriter(self.folder)
            except MissingPackageError as error:
                self._tell(f"{self.folder}: CSV files alone; {error}")
        return self._steps

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in (self._steps, self._board):
            if writer is not None:
                with suppress(OSError) if self._ended else self._kept_going():
                    writer.close()


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return [row for row in csv.DictReader(file) if None not in row and None not in row.values()]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ModelFileWriteError(f"'{path}' cannot be gone on with: {error}") from None


def _write(path: Path, names: list[str], rows: list[dict[str, str]]) -> None:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, names, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    write_files([(path, put(text.getvalue().encode()))])


def _cut(path: Path, column: str, end: int) -> None:
    """Leave the rows below ``end`` in a file; no file where none is left."""
    rows = _rows(path)
    kept = [row for row in rows if row.get(column, "").isdecimal() and int(row[column]) < end]
    if kept:
        _write(path, list(kept[0]), kept)
    elif path.exists():
        path.unlink()
