"""Files on disk: which paths may be written, and writing that is whole or not at all. Every write goes through here.

**Paths.** What cannot be a target (:mod:`amp_transpiler.file_targets`) is refused, and so is an output that is also an
input, or another output: by what the file is, not by how it is spelled. Links and letter case do not matter.

**Writing.** Files that belong together are a :class:`Group`. Each is written and brought to the disk in a hidden
workspace beside its target, ``.amp_write.<random>.tmp``; then all are renamed, the model last. Where there are several,
those that they replace are moved aside first, so that a model never stands beside the data of another. What belonged
to a file that was replaced, and to none that stands now, is removed last.

**Kills.** A workspace is locked while its process lives. The next write into the same folder removes those whose lock
is free; renames that a journal there says are left are made good first, unless somebody else has put a file in the
place since. That is done folder by folder: a report in another folder than its model's may be that of the run before.
Where the system has no such locks (Windows, some network drives), what a killed process left stays there.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

from amp_transpiler.errors import AmpError, ArgumentError, ModelFileWriteError
from amp_transpiler.file_targets import PathLike, check_target, identities

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

Write = Callable[[BinaryIO], None]

#: What workspaces are called: nobody else's files, for they are removed.
PREFIX, SUFFIX = ".amp_write.", ".tmp"
#: How the files of arrays in a folder are called.
_ARRAYS = (".npz", ".npy", ".pb")
#: What network drives and file systems in user space answer that bring no folder to the disk.
_NO_SYNC = (errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.EOPNOTSUPP)
_LOCK, _JOURNAL, _NEW, _OLD = "amp_transpiler.lock", "journal.json", "new", "old"


# -- which paths may be written --------------------------------------------------------------------------
def check_outputs(outputs: Mapping[str, PathLike | None], inputs: Mapping[str, Iterable[PathLike]]) -> None:
    """Refuse before the work what could not be written after it.

    ``outputs``: paths to write, by the option or argument that named each; None is left out. ``inputs``: what is read,
    likewise, a model with its external data; for a folder, the files in it count.

    ArgumentError: an output is an input, or another output. ModelFileWriteError: it, or its folder, is no target.
    """
    seen: dict[Any, str] = {}
    for what, paths in inputs.items():
        for path in (file for one in paths for file in _files_in(one)):
            seen |= dict.fromkeys(identities(path), f"{what} '{os.fspath(path)}'")
    for what, path in [(what, path) for what, path in outputs.items() if path is not None]:
        same = next((seen[one] for one in identities(path) if one in seen), None)
        if same is not None:
            raise ArgumentError(f"{what} '{os.fspath(path)}' and {same} are the same file; choose another name")
        seen |= dict.fromkeys(identities(path), f"{what} '{os.fspath(path)}'")
        target = check_target(path, what)
        probe(target.parent, f"{what} '{os.fspath(path)}'")


def array_files(source: PathLike) -> list[PathLike]:
    """What arrays are read from: a file, or of a folder those that hold arrays, whatever else lies there."""
    return [path for path in _files_in(source) if path is source or os.fspath(path).endswith(_ARRAYS)]


def _files_in(path: PathLike) -> list[PathLike]:
    try:
        return [entry.path for entry in os.scandir(path) if not entry.is_dir()]
    except (OSError, ValueError):  # a file, or what reading it says more of
        return [path]


def probe(folder: Path, refused: str, kind: type[AmpError] = ModelFileWriteError) -> None:
    """Make sure that the folder takes files; what killed processes left in it is made good and removed."""
    try:
        remove_leftovers(folder)
        made = tempfile.mkdtemp(SUFFIX, PREFIX, folder)
        with suppress(FileNotFoundError):  # another process may take it for left behind
            os.rmdir(made)
    except OSError as error:
        raise kind(
            f"{refused} cannot be written: folder '{folder}' takes no files: {error.strerror or error}"
        ) from None


# -- workspaces ------------------------------------------------------------------------------------------
class Workspace:
    """A hidden folder in ``parent`` to write in, locked while this process lives, and removed by :meth:`remove`.

    ``new`` is the folder for what is to get its name later. Those that killed processes left in ``parent`` are
    made good and removed first. OSError where the folder cannot be written to.
    """

    def __init__(self, parent: Path) -> None:
        remove_leftovers(parent)
        self._lock: int | None = None
        while self._lock is None:
            self.path = Path(tempfile.mkdtemp(SUFFIX, PREFIX, parent))
            try:
                self._lock = _hold(self.path, os.O_CREAT)
                self.new, self.old, self.journal = (self.path / name for name in (_NEW, _OLD, _JOURNAL))
                if self._lock is not None:
                    self.new.mkdir()
                    self.old.mkdir()
            except BaseException:  # Ctrl-C too
                self.remove()
                raise

    def remove(self) -> None:
        """Remove it with all that is in it, and let go of its lock; also where Ctrl-C comes meanwhile."""
        try:
            self._remove()
        except BaseException:
            self._remove()
            raise

    def _remove(self) -> None:
        _empty(self.path)
        lock, self._lock = self._lock, None
        _end(self.path, lock)


def _empty(workspace: Path) -> None:
    """Remove all but the lock, which goes last: a workspace without it would stay where this process is killed now."""
    with suppress(OSError):
        (workspace / _JOURNAL).unlink(missing_ok=True)
    for name in (_NEW, _OLD):
        shutil.rmtree(workspace / name, ignore_errors=True)


def _end(workspace: Path, lock: int | None) -> None:
    """Remove an empty one. Its lock is closed first: network drives, and file systems in user space, only rename a
    file that is removed while it is open, and its folder then stays."""
    if lock is not None:
        os.close(lock)
    shutil.rmtree(workspace, ignore_errors=True)


def _hold(workspace: Path, create: int = 0) -> int | None:
    """The lock of a workspace, as an open file; None where another process has it, or has just removed it."""
    try:
        handle = os.open(workspace / _LOCK, os.O_RDWR | create, 0o600)
    except FileNotFoundError:
        return None
    if fcntl is None:
        return handle
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(handle), os.stat(workspace / _LOCK)):
            return handle
    except FileNotFoundError:
        pass
    except OSError as error:
        if create and not isinstance(error, BlockingIOError):
            return handle  # no locks on this file system: nobody takes it for left behind either
    os.close(handle)
    return None


def remove_leftovers(folder: Path) -> None:
    """Make good and remove the workspaces of processes that were killed."""
    if fcntl is None:
        return
    with suppress(OSError):  # a folder that cannot be listed
        for name in os.listdir(folder):
            if name.startswith(PREFIX) and name.endswith(SUFFIX):
                with suppress(FileNotFoundError):  # its process, or another that cleans up, was faster
                    _remove_leftover(folder / name)


def _remove_leftover(workspace: Path) -> None:
    found = workspace.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return  # nobody else makes us rename what he put into a shared folder
    handle = _hold(workspace)
    if handle is not None:
        try:
            _finish(workspace)
        except OSError:  # what cannot be made good stays for the next one
            os.close(handle)
        else:
            _empty(workspace)
            _end(workspace, handle)
    elif not os.listdir(workspace):  # killed before it was locked; one that lives makes itself another
        with suppress(OSError):
            os.rmdir(workspace)


def stamp(path: Path) -> list[int] | None:
    """What tells a file from one that was put in its place; None where there is none."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return [found.st_ino, found.st_size, found.st_mtime_ns]


def _finish(workspace: Path) -> None:
    """Do the renames that a killed process left, unless somebody else has written one of the targets since.

    The journal names the inode of its workspace: one that came out of an archive moves nothing.
    """
    journal = workspace / _JOURNAL
    try:
        said = json.loads(journal.read_text(encoding="utf-8")) if journal.is_file() else None
    except (ValueError, RecursionError):
        said = None  # it was not whole: nothing had been renamed
    if not isinstance(said, dict) or said.get("workspace") != workspace.stat().st_ino:
        return
    waiting = [(name, before) for name, before in said["files"] if (workspace / _NEW / name).exists()]
    if any(stamp(workspace.parent / name) not in (None, before) for name, before in waiting):
        return
    for name, _ in waiting:
        os.replace(workspace / _NEW / name, workspace.parent / name)
    sync_folder(workspace.parent)


# -- groups ----------------------------------------------------------------------------------------------
class Group:
    """Files that appear together or not at all: ``add`` each, then ``commit``; without that nothing changes.

    A context manager, which removes what was not committed. ``written`` are the targets that stand after a commit.
    """

    def __init__(self) -> None:
        self._workspaces: dict[Path, Workspace] = {}
        self._staged: list[Path] = []  # targets, in order
        self._left: dict[Path, list[int] | None] = {}  # what nobody needs after the commit, and what tells it
        self._moving = False
        self.written: tuple[Path, ...] = ()

    def add(self, path: PathLike, write: Write) -> None:
        """Write what is to appear at ``path``.

        ModelFileWriteError where that cannot be, ArgumentError where the group has that file already.
        """
        target = check_target(path)
        try:
            if target.parent not in self._workspaces:
                self._workspaces[target.parent] = Workspace(target.parent)
            staged = self._at(target).new / target.name
            with open(staged, "xb") as stream:
                write(stream)
                stream.flush()
                os.fsync(stream.fileno())
            if target.exists():
                set_mode(staged, target.stat().st_mode & 0o777)
        except FileExistsError:
            raise ArgumentError(f"two outputs are the same file, '{os.fspath(path)}'; choose another name") from None
        except OSError as error:
            raise _failed(path, error) from None
        self._staged.append(target)

    def leave(self, path: Path) -> None:
        """Let a file be removed after the commit, as it is now: what belongs to one that is replaced."""
        self._left[path] = stamp(path)

    def staged(self, path: PathLike) -> Path:
        """Where a file that was added lies until the commit, under its own name, and its data beside it."""
        target = check_target(path)
        return self._at(target).new / target.name

    def commit(self) -> None:
        """Give every file its name, in the order in which they were added, or none of them.

        ModelFileWriteError where one cannot get it; then everything is as it was.
        """
        target = Path()
        try:
            for target in self._staged:
                sync_folder(self._at(target).new)
            self._write_journals()
            self._moving = True
            if len(self._staged) > 1:
                for target in reversed(self._staged):
                    if target.exists():
                        os.rename(target, self._at(target).old / target.name)
            for target in self._staged:
                os.replace(self._at(target).new / target.name, target)
            self.written = tuple(self._staged)
        except BaseException as error:
            self._take_back(target)
            if isinstance(error, OSError):
                raise _failed(target, error) from None
            raise
        self._moving = False
        for folder in self._workspaces:
            with suppress(OSError):  # they stand; a power cut right now may still undo that
                sync_folder(folder)
        for path, before in self._left.items():
            with suppress(OSError):  # as one that another program holds open, on Windows
                if before is not None and stamp(path) == before:
                    path.unlink()

    def _at(self, target: Path) -> Workspace:
        return self._workspaces[target.parent]

    def _write_journals(self) -> None:
        """Say in each workspace what is renamed, where a kill between two renames would leave a part."""
        for folder, workspace in self._workspaces.items():
            names = [target.name for target in self._staged if target.parent == folder]
            if len(self._staged) > 1:
                with open(workspace.journal, "x", encoding="utf-8") as stream:
                    said = {
                        "workspace": workspace.path.stat().st_ino,
                        "files": [(name, stamp(folder / name)) for name in names],
                    }
                    json.dump(said, stream)
                    stream.flush()
                    os.fsync(stream.fileno())
                sync_folder(workspace.path)

    def _take_back(self, failed: Path) -> None:
        """Undo the renames, whichever of them were done; all of them done is a commit that was interrupted."""
        if self._moving and not any((self._at(target).new / target.name).exists() for target in self._staged):
            self.written, self._moving = tuple(self._staged), False
            return
        try:
            for target in self._staged:
                new, old = (folder / target.name for folder in (self._at(target).new, self._at(target).old))
                if self._moving and not new.exists():
                    os.rename(target, new)
                if old.exists():
                    os.rename(old, target)
        except OSError as error:
            kept = ", ".join(f"'{workspace.path}'" for workspace in self._workspaces.values())
            raise ModelFileWriteError(
                f"'{failed}' cannot be put in place, and what was there cannot be put back: {error.strerror or error}; "
                f"old and new files lie in {kept}, and the next write there puts the new ones in place"
            ) from None
        self._moving = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._moving:  # taking back failed: the journal, and what was moved aside, are needed
            return
        for workspace in self._workspaces.values():
            workspace.remove()


def _failed(path: PathLike, error: OSError) -> ModelFileWriteError:
    return ModelFileWriteError(f"'{os.fspath(path)}' cannot be written: {error.strerror or error}; nothing changed")


def write_files(files: Sequence[tuple[PathLike, Write]]) -> None:
    """Write files that belong together, all or none; the last is the model. Errors as of :class:`Group`."""
    with Group() as group:
        for path, write in files:
            group.add(path, write)
        group.commit()


def put(content: bytes) -> Write:
    """What writes ``content``, for a group."""

    def write(stream: BinaryIO) -> None:
        stream.write(content)

    return write


def set_mode(path: Path, mode: int) -> None:
    """Give a file its mode, where it has another.

    One that the file system does not change, as some network drives and those in user space do not, stays as it is;
    OSError where it lets in somebody whom ``mode`` does not.
    """
    found = path.stat().st_mode & 0o777
    if found != mode:
        try:
            path.chmod(mode)
        except OSError:
            if found & ~mode:
                raise


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last through a power cut, where the system and the disk do that for folders."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(handle)
