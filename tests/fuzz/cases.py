"""Cases by kind and number: what is made of a seed is the same everywhere."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from pathlib import Path

from .arguments import command_line, prepared
from .commands import COMMANDS, quiet, ran, violation
from .models import models
from .structure import mutated

KINDS = ("bytes", "structure", "options")


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
        if self.kind == "options":
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


def damaged(content: bytes, rng: random.Random) -> bytes:
    """Bytes changed, cut out, repeated, swapped, or the end cut off."""
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 4, 16])):
        at, size = rng.randrange(len(data)), rng.choice([1, 1, 2, 8, 64])
        what = rng.randrange(6)
        if what <= 1:
            data[at] = rng.choice([0, 1, 127, 128, 255, data[at] ^ (1 << rng.randrange(8)), rng.randrange(256)])
        elif what == 2:
            del data[at : at + size]
        elif what == 3:
            data[at:at] = data[at : at + size]
        elif what == 4:
            data[at : at + size] = rng.randbytes(size)
        elif rng.random() < 0.2:
            del data[at:]
        data = data or bytearray(b"\0")
    return bytes(data)


def judged(case: Case | Given, folder: Path) -> str:
    """What is wrong with what the commands make of a case; "" where nothing is. ``folder`` is used and emptied."""
    folder.mkdir(exist_ok=True)
    if isinstance(case, Case) and case.kind == "options":
        return _judged_options(case, folder / str(case).replace(" ", "_"))
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
    with quiet():
        found = ran(arguments, out)
    after = {path: path.lstat().st_size for path in folder.rglob("*") if path.parent != out}
    shutil.rmtree(folder)
    changed = sorted(str(path) for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    found = found or (f"changed {changed}" if changed else "")
    return f"{arguments}: {found}" if found else ""
