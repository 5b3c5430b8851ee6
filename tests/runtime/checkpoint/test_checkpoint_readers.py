"""A checkpoint that is read while another process trains on, and writes the next one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import amp_transpiler as amp
from amp_transpiler.errors import CheckpointError
from amp_transpiler.runtime.checkpoint import reading
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
