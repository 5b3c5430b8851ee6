"""Checkpoints forged from a good one: a field altered, every checksum made to fit again. The same seed, the same forgeries."""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from amp_transpiler.runtime.checkpoint.writing import META, TENSORS

#: Values that no field of a checkpoint may have: wrong types, wrong ranges, ways out of the folder.
ODD: tuple[Any, ...] = (
    True,
    -1,
    1.5,
    float("nan"),
    "",
    "../../x",
    "a\0b",
    "state.safetensors/..",
    "\ud800",
    [],
    [[1]],
    [-1],
    [True],
    {},
    {"a": {}},
    2**63,
    10**4000,
    [2**70],
    "float99",
    "string",
    "x" * 100_000,
)
#: Fields that hold what the caller gave: anything is right there.
FREE = frozenset({"data_position", "extra"})


@dataclass(frozen=True)
class Forgery:
    """``what`` was altered; ``make`` turns a copy of a good checkpoint into it. ``fatal``: nobody may load it."""

    what: str
    make: Callable[[Path], None]
    fatal: bool


def sign(folder: Path, meta: dict[str, Any], *, file: bool = False) -> None:
    """Write the meta.json with checksums that fit; with ``file`` those of the tensors file too."""
    if file:
        content = (folder / TENSORS).read_bytes()
        meta["file"] = {"name": TENSORS, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    meta = {key: value for key, value in meta.items() if key != "checksum"}
    text = json.dumps(meta, sort_keys=True, separators=(",", ":"))
    meta["checksum"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / META).write_text(json.dumps(meta))


def _altered(path: tuple[str, ...], value: Any, *, gone: bool = False) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        meta = json.loads((folder / META).read_text())
        holder = meta
        for key in path[:-1]:
            holder = holder[key]
        if gone:
            del holder[path[-1]]
        else:
            holder[path[-1]] = value
        sign(folder, meta)

    return make


def _fields(meta: dict[str, Any], chance: random.Random) -> list[tuple[str, ...]]:
    """The paths of the fields, those of a few tensors among them."""
    paths: list[tuple[str, ...]] = [(key,) for key in meta if key != "checksum"]
    paths += [(outer, inner) for outer in ("program", "file", "versions") for inner in meta[outer]]
    for name in chance.sample(sorted(meta["tensors"]), 4):
        paths += [("tensors", name)] + [("tensors", name, key) for key in meta["tensors"][name]]
    return paths


def _fits(path: tuple[str, ...], value: Any) -> bool:
    """Whether an odd value may stand there, or is told from a right one only by what it means."""
    text = isinstance(value, str)
    if path[0] in FREE:
        return True
    if path[0] == "versions":
        return text if len(path) == 2 else value == {}
    if path in (("program", "name"), ("program", "fingerprint")) or (
        path[0] == "tensors" and path[-1] in ("role", "of")
    ):
        return text and (path[-1] != "role" or value != "")
    return path == ("scaling",) and value == []


def in_meta(folder: Path, seed: int) -> Iterator[Forgery]:
    """Every field gone, and every field with odd values."""
    chance = random.Random(seed)
    meta = json.loads((folder / META).read_text())
    for path in _fields(meta, chance):
        told = ".".join(path)
        optional = (path[0] == "versions" and len(path) == 2) or (path[-1] in ("of", "number") and len(path) == 3)
        yield Forgery(f"{told} gone", _altered(path, None, gone=True), not optional)
        if path != ("step",) and path[0] not in FREE:
            yield Forgery(f"{told} null", _altered(path, None), True)
        for value in chance.sample(ODD, 6):
            yield Forgery(f"{told} = {value!r:.40}", _altered(path, copy.deepcopy(value)), not _fits(path, value))


def in_tensors(folder: Path, seed: int) -> Iterator[Forgery]:
    """The tensors file against what is said of it."""
    chance = random.Random(seed)
    arrays = load_file(folder / TENSORS)
    names = sorted(arrays)

    def rewritten(change: Callable[[dict[str, np.ndarray]], None]) -> Callable[[Path], None]:
        def make(target: Path) -> None:
            held = dict(arrays)
            change(held)
            save_file(held, target / TENSORS)
            sign(target, json.loads((target / META).read_text()), file=True)

        return make

    def raw(content: Callable[[bytes], bytes]) -> Callable[[Path], None]:
        def make(target: Path) -> None:
            (target / TENSORS).write_bytes(content((target / TENSORS).read_bytes()))
            sign(target, json.loads((target / META).read_text()), file=True)

        return make

    for name in chance.sample(names, 4):
        old = arrays[name]
        yield Forgery(f"{name} missing", rewritten(lambda held, n=name: held.pop(n)), True)  # type: ignore[misc]
        for what, new in (
            ("int8", np.zeros(old.shape, np.int8)),
            ("longer", np.zeros((*old.shape, 2), old.dtype)),
            ("complex", np.zeros(old.shape, np.float64)),
            ("empty", np.zeros(0, old.dtype)),
        ):
            yield Forgery(f"{name} {what}", rewritten(lambda held, n=name, a=new: held.update({n: a})), True)  # type: ignore[misc]
    yield Forgery("a tensor more", rewritten(lambda held: held.update(more=np.zeros(2, np.float32))), True)
    yield Forgery("no tensors", rewritten(lambda held: held.clear()), True)
    for what, content in (
        ("cut", lambda old: old[:-5]),
        ("empty", lambda old: b""),
        ("text", lambda old: b"no tensors"),
        ("head", lambda old: b"\xff" * 8 + old[8:]),
        ("json", lambda old: old[:8] + b"}" * 50 + old[58:]),
        ("longer", lambda old: old + b"more"),
    ):
        yield Forgery(f"file {what}", raw(content), True)


def in_meaning(folder: Path, seed: int) -> Iterator[Forgery]:
    """Well formed, and wrong or not by what it means: two tensors change places, roles or owners; one takes a new name."""
    chance = random.Random(seed)
    meta = json.loads((folder / META).read_text())
    names = sorted(meta["tensors"])
    for _ in range(40):
        one, other = chance.sample(names, 2)
        key = chance.choice(("dtype", "shape", "role", "of"))
        if key in meta["tensors"][other]:
            yield Forgery(
                f"{one}.{key} is that of {other}",
                _altered(("tensors", one, key), meta["tensors"][other][key]),
                key in ("dtype", "shape") and meta["tensors"][one].get(key) != meta["tensors"][other][key],
            )
        yield Forgery(f"{one} is {other}", _altered(("tensors", one), meta["tensors"][other]), False)


def written_out(folder: Path) -> Iterator[Forgery]:
    """The text of meta.json itself, and what else can lie under the names of the files."""

    def text(content: str) -> Callable[[Path], None]:
        return lambda target: target.joinpath(META).write_text(content) and None  # type: ignore[return-value]

    def linked(target: Path) -> None:
        (target / TENSORS).rename(target / "elsewhere")
        (target / TENSORS).mkdir()

    for what, content in (
        ("deep", "[" * 100_000),
        ("number", "3"),
        ("null", "null"),
        ("list", "[]"),
        ("string", '"a"'),
        ("digits", '{"step": ' + "9" * 5000 + "}"),
        ("none", ""),
        ("open", '{"format": '),
    ):
        yield Forgery(f"meta.json {what}", text(content), True)
    yield Forgery("tensors are a folder", linked, True)


def forgeries(folder: Path, seed: int) -> list[Forgery]:
    """All of them, for the good checkpoint in ``folder``."""
    return [*in_meta(folder, seed), *in_tensors(folder, seed), *in_meaning(folder, seed), *written_out(folder)]
