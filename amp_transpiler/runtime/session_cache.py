"""Optimised models on disk, by what they were made of, so that a program that was run before starts sooner.

An entry holds the graph that a session ran, as onnxruntime had optimised it. It is one file, named by a hash of all
that goes into it: the lowered model, the version of onnxruntime, the place and its options, and the processor, for
whose vector registers onnxruntime lays out tensors. So no entry is ever stale, and machines may share a folder.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import onnxruntime as ort

from amp_transpiler.errors import AmpError, ArgumentError
from amp_transpiler.file_targets import folder_path
from amp_transpiler.files import put, write_files
from amp_transpiler.warn import warn_user

_MAGIC = b"amp_transpiler session 1\n"
_SUFFIX = ".ampsession"
#: The domain of convolutions that WebGPU has laid out anew: with them onnxruntime lays out a saved model once more.
_LAID_OUT = b"com.ms.internal.nhwc"
#: A model beyond this is not kept: reading its constants takes as long as making the session.
LARGEST = 256 << 20
#: Bytes in the folder beyond which the entries go that were used longest ago.
CAPACITY = 1 << 30


class SessionCache:
    """The entries in one folder, which is made when there is one to write. Processes may share it.

    What cannot be read or written costs a warning and nothing else. ArgumentTypeError for what is no path,
    ArgumentError where there is something else than a folder.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = folder_path(folder, "cache_dir")
        if os.path.exists(self.folder) and not os.path.isdir(self.folder):
            raise ArgumentError(f"cache_dir '{self.folder}' is no folder")

    def key(self, model: bytes, made: Sequence[object]) -> str:
        """The name of the entry for a lowered model; ``made``: how its session is made, save what cannot change it."""
        digest = hashlib.sha256(_MAGIC)
        for part in (model, repr((*made, ort.__version__, ort.get_build_info(), _processor())).encode()):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        return digest.hexdigest()

    def read(self, key: str) -> bytes | None:
        """The model of an entry; None where there is none, and with a warning where it is damaged."""
        path = self._path(key)
        try:
            content = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self._warn(f"'{path}' cannot be read ({error.strerror or error})")
            return None
        head = _head(key, content[len(_head(key, b"")) :])
        if not content.startswith(head):
            self._warn(f"'{path}' is damaged, or was not written by this package; it is made anew")
            return None
        with suppress(OSError):  # somebody else's folder: then the time of its last use is not known
            os.utime(path)
        return content[len(head) :]

    def write(self, key: str, model: bytes) -> None:
        """Make an entry; it appears whole or not at all."""
        if len(model) > LARGEST:
            self._warn(f"a model of {len(model) >> 20} MiB is not kept; the largest kept is {LARGEST >> 20} MiB")
            return
        if _LAID_OUT in model:
            self._warn("a model with convolutions laid out for WebGPU is not kept: onnxruntime does not load it again")
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_files([(self._path(key), put(_head(key, model) + model))])
        except (OSError, AmpError) as error:
            self._warn(f"nothing is kept: {error}")
            return
        self._trim(key)

    def discard(self, key: str, why: str) -> None:
        """Say that an entry does not serve; the next write replaces it."""
        self._warn(f"'{self._path(key)}' does not load ({why}); it is made anew")

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{_SUFFIX}"

    def _trim(self, newest: str) -> None:
        """Remove what was used longest ago until the rest fits; other processes do so too."""
        with suppress(OSError):
            found = []
            for entry in os.scandir(self.folder):
                if entry.name.endswith(_SUFFIX) and entry.name != f"{newest}{_SUFFIX}":
                    with suppress(FileNotFoundError):
                        found.append((entry.stat().st_mtime_ns, entry.stat().st_size, entry.path))
            left = CAPACITY - self._path(newest).stat().st_size
            for _, size, path in sorted(found, reverse=True):
                left -= size
                if left < 0:
                    with suppress(FileNotFoundError):
                        os.remove(path)

    def _warn(self, what: str) -> None:
        warn_user(f"cache of sessions: {what}")


def _head(key: str, model: bytes) -> bytes:
    return _MAGIC + key.encode() + b"\n" + hashlib.sha256(model).hexdigest().encode() + b"\n"


@cache
def _processor() -> str:
    """What the processor can do, as far as the system tells."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        told = [line for line in lines if line.split("\t")[0].strip() in ("flags", "Features", "model name")]
        return "\n".join([platform.machine(), *sorted(set(told))])
    return f"{platform.machine()} {platform.processor()}"
