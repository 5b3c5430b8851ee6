"""Which paths may be written.

A target is a new file or an ordinary one that may be replaced, in a folder that is there. A device, a fifo, a socket, a
folder, a write-protected file and a symbolic link are refused: a link would let something be written that nobody named.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import Any

from amp_transpiler.errors import ArgumentTypeError, ModelFileWriteError

PathLike = str | os.PathLike[str]
_KINDS = {
    stat.S_IFDIR: "a folder, not the name of a file in it",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


def folder_path(path: PathLike, what: str) -> Path:
    """``path``, of a folder that may be still to be made; ArgumentTypeError, naming ``what``, for what is no path."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path) or "\0" in os.fspath(path):
        raise ArgumentTypeError(f"{what} is {path!r:.80}; expected the path of a folder")
    return Path(path)


def check_target(path: PathLike, what: str = "") -> Path:
    """Where ``path`` will be written: its name in the folder that it leads to.

    ArgumentTypeError for what is no path, ModelFileWriteError for what cannot be a target; ``what`` names the option or
    argument in the message.
    """
    if not isinstance(path, str | os.PathLike):
        raise ArgumentTypeError(f"{what or 'the output'} is {path!r:.80}; expected the path of a file")
    text = os.fspath(path)
    refused = f"{what} '{text}' cannot be written" if what else f"'{text}' cannot be written"
    name = os.path.basename(text)
    if not text or "\0" in text:
        raise ModelFileWriteError(f"{what or 'the output'} is {text!r:.80}, which is no name of a file")
    named = os.path.dirname(text) or os.curdir
    try:
        folder = os.path.realpath(named, strict=True)
        if not os.path.isdir(folder):
            raise OSError(0, f"'{folder}' is no folder")
    except FileNotFoundError:  # the working folder too may have been removed
        raise ModelFileWriteError(f"{refused}: there is no folder '{named}'") from None
    except OSError as error:
        raise ModelFileWriteError(f"{refused}: {error.strerror or error}") from None
    target = Path(folder, name)
    try:
        mode = target.lstat().st_mode if name not in ("", os.curdir, os.pardir) else stat.S_IFDIR
    except FileNotFoundError:
        return target
    except OSError as error:
        raise ModelFileWriteError(f"{refused}: {error.strerror or error}") from None
    if stat.S_ISLNK(mode):
        raise ModelFileWriteError(
            f"{refused}: it is a symbolic link (to '{os.readlink(target)}'), through which nothing "
            "is written; name the file itself, or remove the link"
        )
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "no ordinary file")
        raise ModelFileWriteError(f"{refused}: it is {kind}; only ordinary files are written and replaced")
    if not os.access(target, os.W_OK):
        raise ModelFileWriteError(f"{refused}: the file is write-protected")
    return target


def identities(path: PathLike) -> list[Any]:
    """What a file is known by: its real path, and its inode where it is there; nothing for what can be no file."""
    try:
        real = os.path.realpath(path)
    except (OSError, ValueError):  # relative to a folder that was removed; with a null in it
        return []
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return [] if "\0" in os.fspath(path) else [real]
    return [real, (found.st_dev, found.st_ino)]


def same_file(one: PathLike, other: PathLike) -> bool:
    """Whether two paths are one file, whatever they are called."""
    return bool(set(identities(one)) & set(identities(other)))


def is_utf8(path: PathLike) -> bool:
    """Whether a path is UTF-8, as names in a model are, and as onnx and onnxruntime want those of files."""
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:  # the bytes of another encoding, or all that is not ASCII under an ASCII locale
        return False
    return True


def check_space(path: PathLike, needed: int) -> None:
    """ModelFileWriteError where the disk under ``path`` has less than ``needed`` bytes free, or its folder is none."""
    folder = os.fspath(path)
    try:
        folder = os.path.dirname(os.path.realpath(path))
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise ModelFileWriteError(
            f"'{os.fspath(path)}' cannot be written: folder '{folder}': {error.strerror or error}"
        ) from None
    if free < needed:
        raise ModelFileWriteError(
            f"'{os.fspath(path)}' cannot be written: it needs {needed:,} bytes, and {free:,} are free in '{folder}'"
        )
