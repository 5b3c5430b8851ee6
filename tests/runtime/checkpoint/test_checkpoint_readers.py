"""A checkpoint that is read while another process trains on, and writes the next one."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import amp_transpiler as amp
from amp_transpiler.errors import CheckpointError, CheckpointWriteError, ScopeError
from amp_transpiler.finetune.claims import Claims
from amp_transpiler.runtime.checkpoint import checkpoints, reading, writing
from amp_transpiler.runtime.checkpoint.writing import TENSORS
from tests.helpers.checkpoints import Small, loads, state


@contextmanager
def meanwhile(monkeypatch: pytest.MonkeyPatch, write: Callable[[], object], after: int = 1) -> Iterator[None]:
    """``write`` happens once: when a ``meta.json`` has been read, for the time of this number, and its tensors not."""
    parsed, calls = reading._parsed, list[Path]()

    def then(folder: Path) -> Any:
        said = parsed(folder)
        calls.append(folder)
        if len(calls) == after:
            write()
        return said

    with monkeypatch.context() as patch:
        patch.setattr(reading, "_parsed", then)
        yield
    assert len(calls) > after


def test_one_that_is_replaced(net: Small, scope: amp.Scope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    amp.save_checkpoint(tmp_path, net.main, scope)
    net.train(scope, 2, 3)
    with meanwhile(monkeypatch, lambda: amp.save_checkpoint(tmp_path, net.main, scope)):
        assert loads(net, tmp_path) == state(net.main, scope)


def test_one_that_goes_for_the_next(
    net: Small, scope: amp.Scope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    amp.save_checkpoint(tmp_path, net.main, scope, step=1)
    net.train(scope, 2, 3)
    # The first time it is found out which one is the last, the second time it is read.
    with meanwhile(monkeypatch, lambda: amp.save_checkpoint(tmp_path, net.main, scope, step=2, keep_last=1), 2):
        assert loads(net, tmp_path) == state(net.main, scope)


def test_one_that_is_damaged_stays_so(net: Small, scope: amp.Scope, tmp_path: Path) -> None:
    amp.save_checkpoint(tmp_path, net.main, scope)
    (tmp_path / TENSORS).unlink()
    with pytest.raises(CheckpointError, match=r"is damaged.*No such file"):
        loads(net, tmp_path)


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt()])
def test_a_reading_that_ends_half_way_leaves_no_mixture(
    net: Small, scope: amp.Scope, tmp_path: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fails when all was verified, or Ctrl-C: the state of the program is gone, what is of others stays."""
    scope.set_var("mine", 1.0)
    amp.save_checkpoint(tmp_path, net.main, scope)
    read, calls = reading.TensorFile.read, itertools.count()

    class Broken:
        def seek(self, to: int) -> None:
            raise error

    def failing(self: reading.TensorFile, name: str) -> Any:
        if next(calls) == 5:
            monkeypatch.setattr(self, "_stream", Broken())
        return read(self, name)

    monkeypatch.setattr(reading.TensorFile, "read", failing)
    with pytest.raises((CheckpointError, KeyboardInterrupt)) as found:
        amp.load_checkpoint(tmp_path, net.main, scope)
    monkeypatch.undo()
    if isinstance(error, OSError):
        told = "damaged.*Input/output error; program '.*' has no state in the scope any more: load a checkpoint again"
        assert re.search(told, str(found.value))
    assert scope.var_names() == ["mine"]
    with pytest.raises(ScopeError, match="run its startup program"):
        net.train(scope, 2, 3)
    amp.load_checkpoint(tmp_path, net.main, scope)
    assert state(net.main, scope) == loads(net, tmp_path)


def test_a_file_that_is_cut_while_it_is_read(net: Small, scope: amp.Scope, tmp_path: Path) -> None:
    amp.save_checkpoint(tmp_path, net.main, scope)
    meta, file = reading.read_checkpoint(tmp_path)
    (tmp_path / TENSORS).write_bytes((tmp_path / TENSORS).read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="was cut short while it was read"):
        for name in meta["tensors"]:
            file.read(name)


def test_two_that_replace_the_same_one(
    net: Small, scope: amp.Scope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that is ended and the one that takes its place: the tensors of the first, which nothing named yet, went."""
    pytest.importorskip("fcntl")
    amp.save_checkpoint(tmp_path, net.main, scope)
    net.train(scope, 2, 3)
    other = Thread(target=amp.save_checkpoint, args=(tmp_path, net.main, scope))
    sync = writing.sync_folder

    def slow(folder: Path) -> None:
        sync(folder)
        if folder == tmp_path and other.ident is None:  # the tensors have their name, and nothing names them
            other.start()
            other.join(1.0)

    monkeypatch.setattr(writing, "sync_folder", slow)
    amp.save_checkpoint(tmp_path, net.main, scope)
    other.join()
    assert loads(net, tmp_path) == state(net.main, scope)
    assert len(list(tmp_path.iterdir())) == 2


def test_one_that_another_keeps_is_waited_for_no_longer_than_a_minute(
    net: Small, scope: amp.Scope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fcntl")
    amp.save_checkpoint(tmp_path, net.main, scope)
    before = loads(net, tmp_path)
    monkeypatch.setattr(writing, "_PATIENCE", 0.1)
    net.train(scope, 2, 3)
    with Claims() as claims:
        claims.take(tmp_path, "checkpoint", CheckpointError)
        with pytest.raises(CheckpointWriteError, match="cannot be replaced: another process or training writes there"):
            amp.save_checkpoint(tmp_path, net.main, scope)
    assert loads(net, tmp_path) == before and len(list(tmp_path.iterdir())) == 2


def test_an_older_one_that_another_removed(net: Small, scope: amp.Scope, tmp_path: Path) -> None:
    for step in (1, 2):
        amp.save_checkpoint(tmp_path, net.main, scope, step=step)
    found = checkpoints._written(writing.step_folders(tmp_path))
    writing.remove_checkpoint(tmp_path / "step_00000001")
    checkpoints._remove_older(tmp_path / "step_00000002", found, 1)
    assert loads(net, tmp_path) == state(net.main, scope)
