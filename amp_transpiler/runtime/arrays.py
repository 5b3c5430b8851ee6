"""Files of arrays, for calibration and training alike: what is wrong with one is refused, by name, before use.

:func:`read_arrays` reads an ``.npz`` file or a folder of ``.npy`` files; large arrays are mapped, not read.
:func:`as_declared` brings an array to what a program declares, where that loses nothing.
"""

from __future__ import annotations

import math
import os
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from amp_transpiler.errors import ArgumentError, FeedError, FeedTypeError
from amp_transpiler.ir.types import FLOATS, element_type, numpy_dtype

#: Bytes from which on an array of an archive is mapped rather than read, where it lies there uncompressed.
_MAPPED = 1 << 26
#: A compressed array above this many bytes that unpacks to more than RATIO times its size in the file is refused.
_SUSPECT, RATIO = 1 << 28, 200
#: Elements (of the larger type) of the pieces in which values are checked.
_PIECE = 1 << 20

_Read = TypeVar("_Read")


def read_arrays(path: str | os.PathLike[str], names: Collection[str] | None = None) -> dict[str, np.ndarray]:
    """The arrays of an ``.npz`` file, or of a folder of ``.npy`` files, by name (that of a file is its stem).

    Args:
        path: the file or folder.
        names: those that are wanted; others are not looked at, and one that is not there is left out. All where None.

    Returns:
        Arrays, in the order of the file (a folder's: by name). Those of ``.npy`` files, and large uncompressed ones of
        an archive, are mapped read-only: a data set may exceed the memory. What is compressed is unpacked.

    Raises:
        ArgumentError: nothing there, or another kind of file; one that is cut short or damaged; Python objects; a
        compressed array that would not fit into half of the memory, or unpacks to 200 times its size in the file.
    """
    path = Path(path)
    if os.path.isdir(path):
        return {name: read_array(path / f"{name}.npy") for name in array_names(path) if names is None or name in names}
    return _guarded(path, "an .npz file", lambda: _archive(path, names))


def array_names(path: str | os.PathLike[str]) -> list[str]:
    """The names that :func:`read_arrays` knows there; nothing of the arrays is read. ArgumentError as there."""
    path = Path(path)
    if os.path.isdir(path):
        found = sorted(file.stem for file in path.glob("*.npy"))
        if not found:
            raise ArgumentError(f"folder '{path}' holds no .npy files")
        return found
    with _guarded(path, "an .npz file", lambda: _opened(path)) as archive:
        return list(_guarded(path, "an .npz file", lambda: _members(archive)))


def read_array(path: str | os.PathLike[str]) -> np.ndarray:
    """The array of one ``.npy`` file, mapped read-only. ArgumentError as :func:`read_arrays`."""
    path = Path(path)
    return _guarded(path, "an .npy file", lambda: _mapped_npy(path))


def as_declared(array: np.ndarray, dtype: str, what: str) -> np.ndarray:
    """The array in the element type ``dtype``, itself where it has it; for data of any numeric type.

    Between floating-point types numbers are rounded to the declared one, but none may leave its range; every other
    conversion keeps each value exactly (uint8 images for float32, float64 labels for int64). Apply it to batches of a
    mapped array, and :func:`check_declared` to all of it before.

    Raises: FeedError, FeedTypeError where a value would change; ``what`` names the array in it.
    """
    found = _numeric_type(array, dtype, what)
    if found == dtype:
        return array
    target = numpy_dtype(dtype)
    with np.errstate(all="ignore"):
        typed = array.astype(target)
    _check_kept(array, typed, found, dtype, what)
    return typed


def check_declared(array: np.ndarray, dtype: str, what: str) -> None:
    """What :func:`as_declared` would raise, found piece by piece so that a mapped array need not fit into memory."""
    found = _numeric_type(array, dtype, what)
    target = numpy_dtype(dtype)
    # numpy calls int64 to float64 safe as well
    if found != dtype and not (np.can_cast(array.dtype, target, "safe") and array.itemsize < target.itemsize):
        for _, piece in pieces(array):
            as_declared(piece, dtype, what)


def as_ranked(array: np.ndarray, shape: tuple[Any, ...] | None) -> np.ndarray:
    """Labels ``[N]`` for a declared ``[N, 1]``, and the other way round; any other array as it is."""
    if shape is None or array.ndim == len(shape):
        return array
    if array.ndim + 1 == len(shape) and array.ndim and shape[-1] in (1, None):
        return array[..., np.newaxis]
    if array.ndim == len(shape) + 1 and len(shape) and array.shape[-1] == 1:
        return array[..., 0]
    return array


# -- files -------------------------------------------------------------------------------------------------
def _guarded(path: Path, kind: str, read: Callable[[], _Read]) -> _Read:
    """What ``read`` gives; ArgumentError for whatever it raises."""
    if not os.path.exists(path):  # pathlib raises for names that cannot be
        raise ArgumentError(f"there is no file '{path}'")
    if not os.path.isfile(path):
        raise ArgumentError(f"'{path}' cannot be read as {kind}: it is no regular file")
    try:
        return read()
    except Exception as error:  # numpy, zipfile, zlib, lzma and tokenize raise a dozen classes for broken files
        raise ArgumentError(f"'{path}' cannot be read as {kind}: {_said(error)}") from None


def _said(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError):
        return "it does not fit into memory"
    return text or type(error).__name__


def _opened(path: Path) -> zipfile.ZipFile:
    with path.open("rb") as file:
        if file.read(6) == b"\x93NUMPY":
            raise ValueError("it is a single array; an .npz file holds one for each input")
    return zipfile.ZipFile(path)


def _members(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """The entries of an archive by the name of their array."""
    members: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        name = info.filename.removesuffix(".npy")
        if name in members:
            raise ValueError(f"it holds two arrays called '{name}'")
        members[name] = info
    return members


def _archive(path: Path, names: Collection[str] | None) -> dict[str, np.ndarray]:
    with _opened(path) as archive:
        wanted = {name: info for name, info in _members(archive).items() if names is None or name in names}
        budget = _memory() // 2
        arrays = {}
        for name, info in wanted.items():
            arrays[name] = _member(path, archive, name, info, budget)
            if not isinstance(arrays[name], np.memmap):
                budget -= arrays[name].nbytes
        return arrays


def _member(path: Path, archive: zipfile.ZipFile, name: str, info: zipfile.ZipInfo, budget: int) -> np.ndarray:
    with archive.open(info) as stream:
        shape, fortran, dtype = _header(stream, name)
        start = stream.tell()
        size = _bytes(shape, dtype)
        if size != info.file_size - start:
            raise ValueError(
                f"array '{name}' is cut short: {dtype}{list(shape)} takes {size:,} bytes, and "
                f"{info.file_size - start:,} follow its header"
            )
        stored = info.compress_type == zipfile.ZIP_STORED
        if stored and size >= _MAPPED:
            while stream.read(1 << 20):  # to its end, where the check sum is compared
                pass
            at = _content(path, info) + start
            return np.memmap(path, dtype, "r", at, shape, "F" if fortran else "C")
        _check_size(name, info, size, budget)
        flat = np.empty(math.prod(shape), dtype)
        view = flat.view(np.uint8).data
        got = 0
        while got < size:
            piece = stream.read(min(1 << 20, size - got))
            if not piece:
                raise ValueError(f"array '{name}' is cut short")
            view[got : got + len(piece)] = piece
            got += len(piece)
        stream.read(1)  # the end, where the check sum is compared
        return flat.reshape(shape, order="F" if fortran else "C")


def _check_size(name: str, info: zipfile.ZipInfo, size: int, budget: int) -> None:
    way_out = "; save it uncompressed (numpy.savez) or as .npy files in a folder, which are mapped"
    if size > _SUSPECT and size > RATIO * max(info.compress_size, 1):
        raise ValueError(
            f"array '{name}' unpacks from {info.compress_size:,} to {size:,} bytes, more than {RATIO} "
            f"times its size in the file{way_out}"
        )
    if size > budget:
        raise ValueError(
            f"array '{name}' takes {size:,} bytes once it is unpacked, and {max(budget, 0):,} are left "
            f"of half of this machine's memory{way_out}"
        )


def _content(path: Path, info: zipfile.ZipInfo) -> int:
    """Where the bytes of an entry begin: its own header tells the lengths of what stands before."""
    with path.open("rb") as file:
        file.seek(info.header_offset)
        header = file.read(30)
    return info.header_offset + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")


def _mapped_npy(path: Path) -> np.ndarray:
    with path.open("rb") as file:
        if file.read(4) == b"PK\x03\x04":
            raise ValueError("it is an archive of arrays; call it .npz")
        file.seek(0)
        shape, fortran, dtype = _header(file, path.stem)
        start = file.tell()
    size, there = _bytes(shape, dtype), path.stat().st_size - start
    if size > there:
        raise ValueError(f"it is cut short: {dtype}{list(shape)} takes {size:,} bytes, and {there:,} follow its header")
    if not size:
        return np.zeros(shape, dtype)
    return np.memmap(path, dtype, "r", start, shape, "F" if fortran else "C")


def _header(file: Any, name: str) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, whether the order is Fortran's, and element type of an array file; the stream stands at its content."""
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    try:  # version 3.0 differs for names of fields alone
        shape, fortran, dtype = readers[np.lib.format.read_magic(file)](file)
    except Exception as error:
        if isinstance(error, zipfile.BadZipFile | zlib.error | EOFError | OSError):
            raise
        raise ValueError(f"the header of array '{name}' is damaged, or it is no array file at all") from None
    if dtype.hasobject:
        raise ValueError(
            f"array '{name}' holds Python objects; save strings as array.astype(str), numbers in a type of theirs"
        )
    if dtype.names is not None or dtype.subdtype is not None:
        raise ValueError(f"array '{name}' has the element type {dtype}, which no input takes")
    if any(size < 0 for size in shape):
        raise ValueError(f"array '{name}' has the shape {list(shape)}")
    return shape, fortran, dtype


def _bytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _memory() -> int:
    """Bytes of memory of this machine."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 1 << 33


# -- values ------------------------------------------------------------------------------------------------
def _numeric_type(array: np.ndarray, dtype: str, what: str) -> str:
    try:
        found = element_type(array.dtype)
    except ArgumentError:
        raise FeedTypeError(f"{what} is an array of {array.dtype}; it is declared as {dtype}") from None
    if found != dtype and ("string" in (found, dtype) or "complex" in found + dtype):
        raise FeedTypeError(f"{what} is {found}; it is declared as {dtype}")
    return found


def _check_kept(array: np.ndarray, typed: np.ndarray, found: str, dtype: str, what: str) -> None:
    with np.errstate(all="ignore"):
        if found in FLOATS and dtype in FLOATS:
            beyond = np.isfinite(array) & ~np.isfinite(typed)
            if beyond.any():
                raise FeedError(f"{what} holds {array[beyond].flat[0]:g}, beyond the range of {dtype}")
            return
        changed = _changed(array, typed, found, dtype)
        if changed.any():
            raise FeedTypeError(
                f"{what} is {found}, declared as {dtype}, which cannot hold its value {array[changed].flat[0]}"
            )


def _changed(array: np.ndarray, typed: np.ndarray, found: str, dtype: str) -> np.ndarray:
    """Where the value is not the same any more. The way back alone does not tell: it may stop at the largest number."""
    if found == "bool":
        return np.zeros(array.shape, bool)
    if dtype == "bool":
        changed: np.ndarray = (array != 0) & (array != 1)
        return changed
    changed = typed.astype(array.dtype) != array
    if _is_integer(dtype):
        end, least = _limits(typed.dtype)
        exact = array if _is_integer(found) else array.astype(np.float64)
        changed |= (exact < least) | (exact >= end) | ~np.isfinite(exact)
    elif _is_integer(found):
        wide = typed.astype(np.float64)
        changed |= (wide >= _limits(array.dtype)[0]) | ~np.isfinite(wide)
    return changed


def _is_integer(dtype: str) -> bool:
    return dtype.startswith(("int", "uint"))


def _limits(dtype: np.dtype) -> tuple[int, int]:
    """The power of two above the largest integer of a type, and the least."""
    limits = ml_dtypes.iinfo(dtype)
    return int(limits.max) + 1, int(limits.min)


def pieces(array: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """The array in parts along its first dimension, each with the index of its first row; a mapped one is read so."""
    if array.ndim == 0:
        yield 0, array
        return
    rows = max(1, _PIECE // max(1, math.prod(array.shape[1:])))
    for start in range(0, len(array), rows):
        yield start, np.asarray(array[start : start + rows])
