"""A checkpoint that cannot be written leaves the one before it."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import amp_transpiler as amp
from amp_transpiler.errors import (
    CheckpointWriteError,
)
from amp_transpiler.runtime.checkpoint import writing as checkpoint_files
from amp_transpiler.runtime.checkpoint.writing import META, TENSORS
from tests.helpers.checkpoints import Small, loads, state


@contextmanager
def small_files(size: int) -> Iterator[None]:
    """No file may grow beyond ``size`` bytes: writing fails as on a full disk, at any place that is wanted."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_disk(net: Small, scope: amp.Scope, tmp_path: Path) -> None:
    first = amp.save_checkpoint(tmp_path / "run", net.main, scope, step=1)
    amp.save_checkpoint(tmp_path / "one", net.main, scope)
    before, size = state(net.main, scope), (first / TENSORS).stat().st_size
    net.train(scope, 2, 3)
    for limit in (0, 100, size // 2, size - 1):
        for path, arguments in (("run", {"step": 2, "keep_last": 1}), ("one", {})):
            with small_files(limit), pytest.raises(CheckpointWriteError, match="cannot be written"):
                amp.save_checkpoint(tmp_path / path, net.main, scope, **arguments)  # type: ignore[arg-type]
            assert loads(net, tmp_path / path) == before
    assert os.listdir(tmp_path / "run") == ["step_00000001"]
    assert sorted(os.listdir(tmp_path / "one")) == [META, TENSORS]
    assert sorted(os.listdir(tmp_path)) == ["one", "run"]


def test_full_disk_at_the_meta_file(net: Small, scope: amp.Scope, tmp_path: Path) -> None:
    folder = amp.save_checkpoint(tmp_path / "one", net.main, scope)
    before, size = state(net.main, scope), (folder / TENSORS).stat().st_size
    net.train(scope, 2, 3)
    with small_files(size + 10), pytest.raises(CheckpointWriteError, match="cannot be written"):
        amp.save_checkpoint(tmp_path / "one", net.main, scope, extra=["long"] * size)
    assert loads(net, tmp_path / "one") == before
    assert sorted(os.listdir(tmp_path / "one")) == [META, TENSORS]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("call", ["replace", "fsync"])
def test_no_tensors_stay_of_a_replacement_that_failed(
    call: str, error: BaseException, net: Small, scope: amp.Scope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = amp.save_checkpoint(tmp_path / "one", net.main, scope)
    before, plain = state(net.main, scope), getattr(os, call)
    net.train(scope, 2, 3)

    def failing(*arguments: Any) -> None:
        if len(os.listdir(folder)) == 3:  # the new tensors are there
            raise error
        plain(*arguments)

    monkeypatch.setattr(os, call, failing)
    with pytest.raises((CheckpointWriteError, KeyboardInterrupt)):
        amp.save_checkpoint(folder, net.main, scope)
    monkeypatch.undo()
    assert sorted(os.listdir(folder)) == [META, TENSORS] and loads(net, folder) == before


def test_a_checkpoint_is_written_though_the_old_tensors_stay(
    net: Small, scope: amp.Scope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, plain = amp.save_checkpoint(tmp_path / "one", net.main, scope), os.unlink
    net.train(scope, 2, 3)

    def failing(path: Any, **more: Any) -> None:
        if os.fspath(path).endswith(TENSORS):
            raise PermissionError(1, "Operation not permitted")
        plain(path, **more)

    monkeypatch.setattr(os, "unlink", failing)
    amp.save_checkpoint(folder, net.main, scope)
    assert loads(net, folder) == state(net.main, scope)
    monkeypatch.undo()
    assert len(os.listdir(folder)) == 3
    amp.save_checkpoint(folder, net.main, scope)
    assert len(os.listdir(folder)) == 2


def test_paths_that_are_too_long(net: Small, scope: amp.Scope, tmp_path: Path) -> None:
    path = tmp_path / ("x" * 300)
    for call in (
        lambda: amp.save_checkpoint(path, net.main, scope, step=1),
        lambda: amp.load_checkpoint(path, net.main, scope),
        lambda: amp.load_weights(f"{path}.npz", net.main, scope),
        lambda: amp.load_weights(f"{path}.safetensors", net.main, scope),
        lambda: net.main.export_training(path, "cpu", outputs=[net.output], scope=scope),
        lambda: amp.write_trained_model(path, tmp_path / "o.onnx"),
        lambda: amp.write_trained_model(tmp_path, path),
    ):
        with pytest.raises(amp.AmpError):
            call()
    amp.Executor(cache_dir=path)
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="needs POSIX users")
def test_read_only_folder(net: Small, scope: amp.Scope) -> None:
    home = Path(tempfile.mkdtemp())
    root = os.geteuid() == 0  # whom no permission stops
    try:
        amp.save_checkpoint(home, net.main, scope, step=1)
        before = state(net.main, scope)
        home.chmod(0o555)
        if root:
            os.seteuid(65534)
        try:
            with pytest.raises(CheckpointWriteError, match="Permission denied"):
                amp.save_checkpoint(home, net.main, scope, step=2)
            with pytest.raises(CheckpointWriteError, match="Permission denied"):
                amp.save_checkpoint(home / "new" / "er", net.main, scope)
        finally:
            if root:
                os.seteuid(0)
        assert os.listdir(home) == ["step_00000001"] and loads(net, home) == before
    finally:
        home.chmod(0o755)
        shutil.rmtree(home)


@pytest.mark.parametrize("path", ["run", "one"])
def test_interrupted_at_any_call(
    net: Small, scope: amp.Scope, tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception in place of each call that touches the disk: the old checkpoint, or the new one, but whole."""
    arguments: dict[str, Any] = {"step": 1} if path == "run" else {}
    amp.save_checkpoint(tmp_path / path, net.main, scope, **arguments)
    seen = set()
    for stop in range(40):
        old = state(net.main, scope)
        net.train(scope, 2, 3)
        new = state(net.main, scope)
        count = iter(range(1000))

        def stopped(call: Callable[..., Any], number: Iterator[int] = count, stop: int = stop) -> Callable[..., Any]:
            def wrapped(*given: Any, **named: Any) -> Any:
                if next(number) == stop:
                    raise KeyboardInterrupt
                return call(*given, **named)

            return wrapped

        with monkeypatch.context() as patch:
            for owner, name in (
                (os, "fsync"),
                (os, "replace"),
                (Path, "rename"),
                (Path, "unlink"),
                (json, "dump"),
                (checkpoint_files, "serialize_file"),
            ):
                patch.setattr(owner, name, stopped(getattr(owner, name)))
            try:
                amp.save_checkpoint(tmp_path / path, net.main, scope, **arguments)
            except KeyboardInterrupt:
                pass
        found = loads(net, tmp_path / path)
        assert found in (old, new)
        seen.add("new" if found == new else "old")
        if next(count) <= stop:
            break
        amp.load_checkpoint(tmp_path / path, net.main, scope)
    assert stop > 5 and seen == {"old", "new"}
    amp.save_checkpoint(tmp_path / path, net.main, scope, **arguments)
    folder = tmp_path / path / ("step_00000001" if arguments else "")
    assert len(os.listdir(folder)) == 2 and not [n for n in os.listdir(tmp_path / path) if n.startswith(".")]


def test_leftovers_are_ignored_and_removed(net: Small, scope: amp.Scope, tmp_path: Path) -> None:
    left = tmp_path / ".amp_write.abc.tmp"
    (left / "new").mkdir(parents=True)
    (left / "amp_transpiler.lock").touch()
    (left / "new" / META).write_text("{}")
    (tmp_path / ".other.tmp").mkdir()
    (tmp_path / "step_00000009").mkdir()  # made by hand: no checkpoint
    assert amp.latest_checkpoint(tmp_path) is None
    amp.save_checkpoint(tmp_path, net.main, scope, step=1)
    assert sorted(os.listdir(tmp_path)) == [".other.tmp", "step_00000001", "step_00000009"]
    assert amp.latest_checkpoint(tmp_path) == tmp_path / "step_00000001"


def test_another_process_may_be_writing(net: Small, scope: amp.Scope, tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    busy = tmp_path / ".amp_write.abc.tmp"
    busy.mkdir()
    handle = os.open(busy / "amp_transpiler.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    amp.save_checkpoint(tmp_path, net.main, scope, step=1)
    assert busy.exists()
    os.close(handle)
    amp.save_checkpoint(tmp_path, net.main, scope, step=2)
    assert not busy.exists()
