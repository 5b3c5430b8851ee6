"""Cases by kind and number: what is made of a seed is the same everywhere."""

from __future__ import annotations

import contextlib
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz import checkpoints
from tests.fuzz.arguments import command_line, prepared
from tests.fuzz.bytes import damaged
from tests.fuzz.commands import COMMANDS, quiet, ran, violation
from tests.fuzz.models import models
from tests.fuzz.structure import mutated

KINDS = ("bytes", "structure", "options", "checkpoint")


@dataclass(frozen=True)
class Case:
    """Mutation ``number`` of a seed. It is judged by every command."""

    kind: str
    seed: int
    number: int

    def __str__(self) -> str:
        return f"{self.kind} {self.seed} {self.number}"

    @property
    def rng(self) -> random.Random:
        """What the case follows from."""
        return random.Random(f"{self.kind} {self.seed} {self.number}")

    def content(self) -> bytes:
        """The model file."""
        rng = self.rng
        all_models = models()
        name = list(all_models)[self.number % len(all_models)]
        if self.kind in ("options", "checkpoint"):
            return all_models["mlp"].SerializeToString()
        if self.kind == "structure":
            return mutated(all_models[name], rng).SerializeToString()
        return damaged(all_models[name].SerializeToString(), rng)


@dataclass(frozen=True)
class Given:
    """A model that lies somewhere, as it is."""

    path: Path

    def __str__(self) -> str:
        return self.path.stem

    def content(self) -> bytes:
        """The model file."""
        return self.path.read_bytes()


def judged(case: Case | Given, folder: Path) -> str:
    """What is wrong with what the commands make of a case; "" where nothing is. ``folder`` is used and emptied."""
    folder.mkdir(exist_ok=True)
    if isinstance(case, Case) and case.kind == "options":
        return _judged_options(case, folder / str(case).replace(" ", "_"))
    if isinstance(case, Case) and case.kind == "checkpoint":
        return checkpoints.wrong(case.rng, folder / str(case).replace(" ", "_"))
    model = folder / f"{str(case).replace(' ', '_')}.onnx"
    model.write_bytes(case.content())
    try:
        for command in [*COMMANDS, "prepare"]:
            found = violation(command, model, folder / f"{model.stem}_{command}")
            if found:
                return f"{command}: {found}"
        return ""
    finally:
        model.unlink()


def _judged_options(case: Case, folder: Path) -> str:
    files = prepared(folder)
    out = Path(files["o"]).parent
    out.mkdir()
    arguments = command_line(case.rng, files)
    before = {path: path.lstat().st_size for path in folder.rglob("*") if path.parent != out}
    with quiet(), contextlib.chdir(folder):  # what is written beside the file that was meant is found there
        found = ran(arguments, out)
    after = {path: path.lstat().st_size for path in folder.rglob("*") if path.parent != out}
    shutil.rmtree(folder)
    changed = sorted(str(path) for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    found = found or (f"changed {changed}" if changed else "")
    return f"{arguments}: {found}" if found else ""
