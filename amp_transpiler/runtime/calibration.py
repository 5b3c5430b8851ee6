"""Calibration data: feeds in memory, npz files, folders of npz or npy files; checked before anything runs."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ArgumentError, ArgumentTypeError, FeedError, FeedTypeError
from ..ir.program import Program
from ..ir.types import FLOATS, element_type, numpy_dtype
from .feeds import Feeds

_WAYS = (
    "feeds (a dict of arrays, or several), .npz files, or folders of .npz files or of .npy files named after the inputs"
)


def load_calibration(source: Any, program: Program) -> list[dict[str, np.ndarray]]:
    """Samples for ``program``, each a dict of input name -> array as the program declares its inputs.

    Args:
        source: a dict of arrays; or a path; or a sequence of either. An ``.npz`` file is one sample. A folder
            holds ``.npz`` files, or ``.npy`` files called ``<input>.npy`` (one sample) or ``<input>_<number>.npy``
            (one sample a number).
        program: whose inputs the samples are for. Floating-point arrays are brought to the declared type.

    Raises:
        ArgumentError: no sample, a file that is missing, broken or of another kind. FeedError, FeedTypeError: a
        sample with missing or unknown names, other element types or other shapes; the message names the sample.
    """
    if isinstance(source, Mapping | str | os.PathLike):
        source = [source]
    if not isinstance(source, Sequence):
        raise ArgumentTypeError(f"calibration takes {_WAYS}; got {type(source).__name__}")
    samples: list[tuple[str, Mapping[str, Any]]] = []
    for number, item in enumerate(source, 1):
        if isinstance(item, Mapping):
            samples.append((f"sample {number}", item))
        elif isinstance(item, str | os.PathLike):
            samples += _read(Path(item))
        else:
            raise ArgumentTypeError(f"calibration takes {_WAYS}; got {type(item).__name__}")
    if not samples:
        raise ArgumentError(f"calibration is empty; give {_WAYS}")
    feeds = Feeds(program, program.outputs)
    return [_checked(feeds, sample, where) for where, sample in samples]


def _checked(feeds: Feeds, sample: Mapping[str, Any], where: str) -> dict[str, np.ndarray]:
    declared = {name: feed.dtype for name, feed in feeds.feeds.items()}
    typed = {}
    for name, value in sample.items():
        wanted = declared.get(name)
        if isinstance(value, np.ndarray) and wanted in FLOATS and _is_float(value):
            value = value.astype(numpy_dtype(wanted))
        typed[name] = value
    try:
        checked = feeds.check(typed)
        feeds.check_shapes(checked)
    except FeedTypeError as error:
        raise FeedTypeError(f"calibration, {where}: {error}") from None
    except FeedError as error:
        raise FeedError(f"calibration, {where}: {error}") from None
    return checked


def _is_float(value: np.ndarray) -> bool:
    try:
        return element_type(value.dtype) in FLOATS
    except ArgumentError:
        return False


def _read(path: Path) -> list[tuple[str, dict[str, np.ndarray]]]:
    if path.is_dir():
        return _read_folder(path)
    if not path.exists():
        raise ArgumentError(f"calibration: there is no file or folder '{path}'")
    if path.suffix == ".npz":
        return [(f"'{path}'", _npz(path))]
    raise ArgumentError(f"calibration: '{path}' is neither an .npz file nor a folder of .npz or .npy files")


def _read_folder(folder: Path) -> list[tuple[str, dict[str, np.ndarray]]]:
    archives, arrays = sorted(folder.glob("*.npz")), sorted(folder.glob("*.npy"))
    if archives and arrays:
        raise ArgumentError(f"calibration: folder '{folder}' holds .npz and .npy files; keep one kind in it")
    if archives:
        return [(f"'{path}'", _npz(path)) for path in archives]
    if not arrays:
        raise ArgumentError(f"calibration: folder '{folder}' holds no .npz and no .npy files")
    samples: dict[int, dict[str, np.ndarray]] = {}
    for path in arrays:
        numbered = re.fullmatch(r"(.+)_(\d+)", path.stem)
        name, number = (numbered[1], int(numbered[2])) if numbered else (path.stem, 0)
        samples.setdefault(number, {})[name] = _npy(path)
    return [(f"sample {number} of folder '{folder}'", samples[number]) for number in sorted(samples)]


def _npz(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ArgumentError(f"calibration: '{path}' cannot be read as an .npz file: {_said(error)}") from None


def _npy(path: Path) -> np.ndarray:
    try:
        return np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ArgumentError(f"calibration: '{path}' cannot be read as an .npy file: {_said(error)}") from None


def _said(error: Exception) -> str:
    if "pickle" in str(error).lower():
        return "it holds Python objects, or is no array file at all"
    return str(error).strip() or type(error).__name__
