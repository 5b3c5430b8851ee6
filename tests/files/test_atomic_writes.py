"""Files appear whole, together, or not at all, whatever ends the process that writes them."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from amp_transpiler import files
from amp_transpiler.errors import ArgumentError, ModelFileWriteError
from amp_transpiler.files import Group, put, write_files
from tests.helpers.external_nets import contents

OLD = {"m.onnx": b"old model", "m.data": b"old data", "page": b"old page"}
NEW = {"m.data": b"new data", "page": b"new page", "m.onnx": b"new model"}
CALLS = ("rename", "replace", "fsync", "mkdir", "open")


def laid(home: Path, held: dict[str, bytes]) -> None:
    home.mkdir()
    for name, content in held.items():
        (home / name).parent.mkdir(exist_ok=True)
        (home / name).write_bytes(content)


def write_all(home: Path, new: dict[str, bytes] = NEW) -> None:
    write_files([(home / name, put(content)) for name, content in new.items()])


def killed_at(stop: int, call: Callable[..., None], *arguments: Any) -> bool:
    """Run ``call`` in a process that dies before its call number ``stop`` that touches names; whether it did."""
    child = os.fork()
    if child == 0:
        count = iter(range(10**6))

        def dying(real: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*given: Any, **named: Any) -> Any:
                if next(count) == stop:
                    os._exit(9)
                return real(*given, **named)

            return wrapped

        for name in CALLS:
            setattr(os, name, dying(getattr(os, name)))
        call(*arguments)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.parametrize("held", [OLD, {}, {"m.data": b"old data"}], ids=["over", "fresh", "part"])
def test_a_kill_at_any_call_leaves_old_or_new(tmp_path: Path, held: dict[str, bytes]) -> None:
    pytest.importorskip("fcntl")
    seen = set()
    for stop in range(200):
        home = tmp_path / str(stop)
        laid(home, held)
        died = killed_at(stop, write_all, home)
        visible = {n: c for n, c in contents(home).items() if ".amp_write" not in n}
        assert all(c in (held.get(n), NEW[n]) for n, c in visible.items()), "no part of a file under its name"
        pair = visible.get("m.onnx"), visible.get("m.data")
        assert pair[0] is None or pair in ((held.get("m.onnx"), held.get("m.data")), (NEW["m.onnx"], NEW["m.data"])), (
            "a model beside the data of another"
        )
        write_files([(home / "else", put(b""))])  # the next run
        after = contents(home)
        assert after.pop("else") == b"" and after in (held, NEW), stop
        seen.add(after == NEW)
        if not died:
            break
    assert stop > 15 and seen == {True, False}


def test_a_kill_at_any_call_with_files_in_two_folders(tmp_path: Path) -> None:
    """Each folder has its old files or its new ones."""
    pytest.importorskip("fcntl")
    old = {"r/page": b"old", "r/m.json": b"old", "m.onnx": b"old", "m.data": b"old"}
    new = dict.fromkeys(old, b"new")
    for stop in range(0, 200, 3):
        home = tmp_path / str(stop)
        laid(home, old)
        died = killed_at(stop, write_all, home, new)
        write_files([(home / "else", put(b"")), (home / "r" / "else", put(b""))])
        after = contents(home)
        assert len(after) == 6 and after["r/page"] == after["r/m.json"] and after["m.onnx"] == after["m.data"], stop
        if not died:
            break
    assert stop > 15 and set(after.values()) == {b"new", b""}


def test_a_file_that_came_after_a_kill_is_kept(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    reached = False
    for stop in range(200):
        home = tmp_path / str(stop)
        laid(home, OLD)
        if not killed_at(stop, write_all, home):
            break
        if not (home / "m.onnx").exists():
            reached = True
            (home / "m.onnx").write_text("somebody else's")
            write_files([(home / "else", put(b""))])
            assert (home / "m.onnx").read_text() == "somebody else's"
    assert reached


def failing(patch: pytest.MonkeyPatch, names: Sequence[str], stop: int, error: BaseException) -> None:
    """In the place of call number ``stop`` of these functions of ``os`` comes an error."""
    count = iter(range(1000))

    def wrapped(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            if next(count) == stop:
                raise error
            return real(*given, **named)

        return call

    for name in names:
        patch.setattr(os, name, wrapped(getattr(os, name)))


@pytest.mark.parametrize("error", [OSError(13, "Permission denied"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_rename_that_fails_takes_the_others_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    for stop in range(20):
        home = tmp_path / str(stop)
        laid(home, OLD)
        with monkeypatch.context() as patch:
            failing(patch, ("rename", "replace"), stop, error)
            try:
                write_all(home)
            except (ModelFileWriteError, KeyboardInterrupt):
                assert contents(home) == OLD
                continue
        assert contents(home) == NEW
        break
    assert stop == 6  # three moved aside, three put in place


def test_an_interrupt_leaves_no_workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for stop in range(100):
        home = tmp_path / str(stop)
        home.mkdir()
        with monkeypatch.context() as patch:
            failing(patch, ("mkdir", "open", "rmdir", "unlink"), stop, KeyboardInterrupt())
            try:
                write_files([(home / "a", put(b"1"))])
            except KeyboardInterrupt:
                assert {"a"}.issuperset(os.listdir(home))
                continue
        break
    assert 10 < stop < 99  # in its making, in the writing and in its end


def test_a_disk_that_keeps_open_files_under_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NFS does, and file systems in user space: what is removed while it is open stays in its folder till then."""
    unlink, own = os.unlink, Path("/proc/self/fd")
    if not own.is_dir():
        pytest.skip("this system does not say which files are open")

    def renaming(path: Any, *, dir_fd: int | None = None) -> None:
        found = os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
        held = [os.stat(own / name) for name in os.listdir(own) if (own / name).exists()]
        if any(os.path.samestat(found, one) for one in held):
            os.rename(path, f".nfs{found.st_ino}", src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        else:
            unlink(path, dir_fd=dir_fd)

    left = tmp_path / ".amp_write.left.tmp"
    (left / "new").mkdir(parents=True)
    (left / "amp_transpiler.lock").touch()
    monkeypatch.setattr(os, "unlink", renaming)
    write_files([(tmp_path / "a", put(b"1"))])
    assert os.listdir(tmp_path) == ["a"]


def test_a_disk_that_sets_no_modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a network drive: what replaces a file is written, unless more people could read it then."""
    path = tmp_path / "a"
    write_files([(path, put(b"1"))])
    usual = path.stat().st_mode & 0o777
    closed = tmp_path / "closed"
    closed.touch(0o600)

    def refusing(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "chmod", refusing)
    write_files([(path, put(b"2"))])
    assert path.read_bytes() == b"2" and path.stat().st_mode & 0o777 == usual
    with pytest.raises(ModelFileWriteError, match="'.*closed' cannot be written: Operation not permitted"):
        write_files([(closed, put(b"2"))])
    assert sorted(os.listdir(tmp_path)) == ["a", "closed"] and closed.read_bytes() == b""


def test_a_workspace_that_came_out_of_an_archive_moves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    home, private = tmp_path / "home", tmp_path / "private"
    private.mkdir()
    (private / "key").write_text("mine")
    for stop in range(200):  # one that a real kill left between two renames, as somebody could pack it up
        laid(home, OLD)
        assert killed_at(stop, write_all, home)
        if not (home / "m.onnx").exists():
            break
        shutil.rmtree(home)
    shutil.copytree(home, tmp_path / "copy")
    work = next((tmp_path / "copy").glob(".amp_write.*"))
    shutil.rmtree(work / "new")
    (work / "new").symlink_to(private)
    journal = json.loads((work / "journal.json").read_text())
    for files_, inode in (([["key", None]], journal["workspace"]), ([["../key", None]], 1)):
        (work / "journal.json").write_text(json.dumps({"workspace": inode, "files": files_}))
        packed = shutil.copytree(tmp_path / "copy", tmp_path / str(inode), symlinks=True)
        write_files([(packed / "else", put(b""))])
        assert os.listdir(private) == ["key"] and not (packed / "key").exists()
    write_files([(home / "else", put(b""))])
    assert contents(home) == NEW | {"else": b""}, "where it was left it is made good"


def test_only_what_killed_runs_of_ours_left_is_removed(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    users = [
        ".out.onnx.data.abc.tmp",
        ".out.onnx.1234.tmp",
        ".amp_write.txt",
        ".amp_write.mine.tmp/work",
        ".amp_write_backup.tmp/a",
        ".other.tmp/b",
    ]
    for name in users:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    (tmp_path / ".amp_write.link.tmp").symlink_to(".other.tmp")
    for name in ("live", "dead"):
        left = tmp_path / f".amp_write.{name}.tmp"
        left.mkdir()
        (left / "amp_transpiler.lock").touch()
        (left / "new").mkdir()
    (tmp_path / ".amp_write.born.tmp").mkdir()
    with open(tmp_path / ".amp_write.live.tmp" / "amp_transpiler.lock", "r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        write_files([(tmp_path / "out.onnx", put(b"new"))])
        names = set(os.listdir(tmp_path))
    assert ".amp_write.live.tmp" in names and not {".amp_write.dead.tmp", ".amp_write.born.tmp"} & names
    assert all((tmp_path / name).read_text() == "mine" for name in users)
    assert (tmp_path / ".amp_write.link.tmp").is_symlink()


def test_many_write_into_one_folder_at_once(tmp_path: Path) -> None:
    def many(number: int) -> None:
        for turn in range(12):
            names = [f"{number}.data", f"{number}.onnx"]
            write_files([(tmp_path / name, put(f"{number} {turn}".encode())) for name in names])

    children = []
    for number in range(6):
        child = os.fork()
        if child == 0:
            try:
                many(number)
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 6
    assert contents(tmp_path) == {f"{n}.{kind}": f"{n} 11".encode() for n in range(6) for kind in ("data", "onnx")}


def test_what_cannot_be_put_back_is_kept_and_put_in_place_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fcntl")
    home = tmp_path / "home"
    laid(home, OLD)
    real, count = os.rename, iter(range(100))

    def failing(*given: Any) -> None:
        if next(count) >= 2:
            raise OSError(30, "Read-only file system")
        real(*given)

    monkeypatch.setattr(os, "rename", failing)
    group = Group()
    with pytest.raises(ModelFileWriteError, match=r"cannot be put back.*\.amp_write.*next write"), group:
        for name, content in NEW.items():
            group.add(home / name, put(content))
        group.commit()
    monkeypatch.undo()
    held = [path for path in home.rglob("*") if path.is_file()]
    assert {path.read_bytes() for path in held} >= {*OLD.values(), *NEW.values()}, "nothing is lost"
    for workspace in group._workspaces.values():
        os.close(workspace._lock)  # as the end of the process does
    write_files([(home / "else", put(b""))])
    assert contents(home) == NEW | {"else": b""}


def test_two_names_for_one_new_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="two outputs"), Group() as group:
        group.add(tmp_path / "a", put(b"1"))
        group.add(tmp_path / "." / "a", put(b"2"))
    assert not list(tmp_path.iterdir())


def test_a_workspace_that_is_taken_for_left_behind_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process cleans up between the birth of a workspace and its lock."""
    made, taken = files.tempfile.mkdtemp, []

    def stolen(*given: Any) -> str:
        folder = made(*given)
        if len(taken) < 2:
            taken.append(folder)
            files.remove_leftovers(tmp_path)
        return folder

    monkeypatch.setattr(files.tempfile, "mkdtemp", stolen)
    write_files([(tmp_path / "a", put(b"1"))])
    assert len(taken) == 2 and contents(tmp_path) == {"a": b"1"} and os.listdir(tmp_path) == ["a"]


@pytest.mark.skipif(os.name != "posix", reason="folders are brought to the disk on POSIX alone")
@pytest.mark.parametrize("answer", ["EINVAL", "ENOSYS", "EOPNOTSUPP", "EIO"])
def test_a_disk_that_brings_no_folder_to_itself_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    """As drives of other systems, and file systems in user space. A disk that fails is an error as before."""
    laid(tmp_path / "home", OLD)
    sync = os.fsync

    def refuses(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(getattr(errno, answer), os.strerror(getattr(errno, answer)))
        sync(handle)

    monkeypatch.setattr(os, "fsync", refuses)
    if answer == "EIO":
        with pytest.raises(ModelFileWriteError, match="cannot be written: Input/output error"):
            write_all(tmp_path / "home")
    else:
        write_all(tmp_path / "home")
    assert contents(tmp_path / "home") == (OLD if answer == "EIO" else NEW)
