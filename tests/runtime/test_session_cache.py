"""Optimised models on disk: a session that comes from there is the one that was made, and nothing wrong is taken."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.runtime import session, session_cache
from amp_transpiler.runtime.session_cache import SessionCache
from amp_transpiler.warn import AmpWarning
from tests.helpers.programs import build
from tests.helpers.running import FEED, linear


@pytest.fixture
def levels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The optimisation levels of the sessions that are made; "disable" is one that came from the disk."""
    made: list[str] = []
    real = session._session

    def counted(data, place, settings, *rest, **more):  # type: ignore[no-untyped-def]
        if settings.cache is not None:
            made.append(settings.optimization_level)
        return real(data, place, settings, *rest, **more)

    monkeypatch.setattr(session, "_session", counted)
    return made


def trained(folder: Path | None, mode: str = "pure-fp16", steps: int = 3) -> dict[str, bytes]:
    """The state after some steps, by an executor of its own."""
    net = build("use_case", mode)
    scope, exe = amp.Scope(), amp.Executor(amp.CPUPlace(), threads=1, cache_dir=folder)
    exe.run(net.startup, scope=scope)
    if mode != "fp32":
        net.optimizer.amp_init(amp.CPUPlace(), scope=scope)
    losses = [exe.run(net.main, net.feeds, [net.loss], scope)[0] for _ in range(steps)]
    state = {name: scope.find_var(name).tobytes() for name in scope.var_names()}
    report = exe.memory_report(net.main)
    return state | {"losses": np.array(losses).tobytes(), "in place": repr(report).encode()}


@pytest.mark.parametrize("mode", ["fp32", "amp", "pure-fp16"])
def test_a_session_from_the_disk_is_the_same(mode: str, tmp_path: Path, levels: list[str]) -> None:
    plain = trained(None, mode)
    folder = tmp_path / "not" / "there yet"
    assert trained(folder, mode) == plain
    entries = {path.name: path.stat().st_ino for path in folder.iterdir()}
    assert entries and set(levels) == {"all"}
    del levels[:]
    assert trained(folder, mode) == plain
    assert set(levels) == {"disable"} and {p.name: p.stat().st_ino for p in folder.iterdir()} == entries


def small(folder: Path | None) -> list[bytes]:
    """What two steps of a small program leave, by an executor of its own."""
    program, scope, exe = linear(), amp.Scope(), amp.Executor(threads=1, cache_dir=folder)
    exe.run(program.startup, scope=scope)
    fetched = [exe.run(program, FEED, ["y"], scope)[0] for _ in range(2)]
    return [array.tobytes() for array in (*fetched, *map(scope.find_var, scope.var_names()))]


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "foreign", "renamed", "folder"])
def test_a_damaged_entry_is_told_and_made_anew(damage: str, tmp_path: Path) -> None:
    plain = small(tmp_path)
    (entry,) = tmp_path.iterdir()
    content = entry.read_bytes()
    if damage == "folder":
        entry.unlink()
        entry.mkdir()
    else:
        key = session_cache._MAGIC
        wrong = {
            "cut": content[:-1],
            "flipped": content[:-9] + bytes([content[-9] ^ 1]) + content[-8:],
            "empty": b"",
            "foreign": b"PK\3\4 something else",
            "renamed": content.replace(content[len(key) : len(key) + 8], b"01234567", 1),
        }
        entry.write_bytes(wrong[damage])
    with pytest.warns(AmpWarning, match="cache of sessions: .*" + entry.name[:8]):
        assert small(tmp_path) == plain
    assert (entry.is_dir() and damage == "folder") or entry.read_bytes() == content


def test_an_entry_that_onnxruntime_refuses_is_made_anew(tmp_path: Path) -> None:
    plain = small(tmp_path)
    (entry,) = tmp_path.iterdir()
    content = entry.read_bytes()
    entry.write_bytes(session_cache._head(entry.stem, b"no model") + b"no model")
    with pytest.warns(AmpWarning, match="does not load .*made anew"):
        assert small(tmp_path) == plain
    assert entry.read_bytes() == content


def test_the_key_is_all_that_goes_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = SessionCache(tmp_path)
    keys = {cache.key(b"model", made) for made in [("cpu",), ("cpu", "x"), ("cuda",)]}
    keys.add(cache.key(b"other", ("cpu",)))
    monkeypatch.setattr(session_cache.ort, "__version__", "0.0")
    keys.add(cache.key(b"model", ("cpu",)))
    monkeypatch.setattr(session_cache, "_processor", lambda: "avx512")
    keys.add(cache.key(b"model", ("cpu",)))
    assert len(keys) == 6


def test_another_level_is_another_entry(tmp_path: Path, levels: list[str]) -> None:
    program = linear()
    for level in ("all", "basic", "all"):
        scope, exe = amp.Scope(), amp.Executor(threads=1, cache_dir=tmp_path, optimization_level=level)
        exe.run(program.startup, scope=scope)
        exe.run(program, FEED, ["y"], scope)
    assert levels == ["all", "basic", "disable"]


def test_the_folder_is_bounded_and_what_was_used_last_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = SessionCache(tmp_path)
    size = len(session_cache._head("0" * 64, b"")) + 100
    monkeypatch.setattr(session_cache, "CAPACITY", 3 * size)
    keys = [f"{number}" * 64 for number in range(5)]
    (tmp_path / "not ours").write_bytes(bytes(10 * size))
    for time, key in enumerate(keys[:3]):
        cache.write(key, bytes(100))
        os.utime(cache._path(key), (time, time))
    assert cache.read(keys[0]) == bytes(100)  # now used later than the others
    cache.write(keys[3], bytes(100))
    assert [cache.read(key) is not None for key in keys] == [True, False, True, True, False]
    assert (tmp_path / "not ours").exists()


def test_what_is_large_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_cache, "LARGEST", 99)
    with pytest.warns(AmpWarning, match="is not kept"):
        SessionCache(tmp_path).write("0" * 64, bytes(100))
    assert not list(tmp_path.iterdir())


def test_a_folder_that_takes_nothing_stops_no_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(amp.AmpError, match="is no folder"):
        amp.Executor(cache_dir=tmp_path / "file")
    for wrong in (3, ""):
        with pytest.raises(amp.AmpError, match="path of a folder"):
            amp.Executor(cache_dir=wrong)  # type: ignore[arg-type]
    with pytest.warns(AmpWarning, match="nothing is kept"):
        assert small(tmp_path / "file" / "below") == small(None)


def test_writers_at_the_same_time_leave_whole_entries(tmp_path: Path) -> None:
    cache, key, wrong = SessionCache(tmp_path), "a" * 64, []

    def work(content: bytes) -> None:
        for _ in range(10):
            cache.write(key, content)
            if cache.read(key) not in contents:
                wrong.append(content[:1])

    contents = [bytes([number]) * 20_000 for number in range(4)]
    threads = [threading.Thread(target=work, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and [path.name for path in tmp_path.iterdir()] == [cache._path(key).name]
