"""Calibration data: feeds in memory, npz files, folders of arrays or ONNX test data; checked before anything runs."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from amp_transpiler.errors import ArgumentError, ArgumentTypeError, FeedError, FeedTypeError
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.program import Program
from amp_transpiler.runtime.arrays import array_names, as_declared, as_ranked, read_array, read_arrays
from amp_transpiler.runtime.feeds import Feeds, shape_of

_WAYS = (
    "feeds (a dict of arrays, or several), .npz files, or folders of .npz files, of .npy files named after the inputs "
    "or of ONNX test data (input_0.pb)"
)
_NUMBERED = re.compile(r"(.+)_(\d+)")

Sample = dict[str, Any]


def load_calibration(source: Any, program: Program) -> list[dict[str, Any]]:
    """Samples for ``program``, each a dict of input name -> array of the declared element type.

    Args:
        source: a dict of arrays; or a path; or a sequence of either. An ``.npz`` file is one sample, or, where
            the program has a fixed batch and the file holds more, as many batches, the last filled up from the first.
            A folder holds ``.npz`` files, each a sample; or ``.npy`` files called ``<input>.npy`` (one sample) or
            ``<input>_<number>.npy`` (one sample a number); or ``input_<number>.pb`` files, numbered as the inputs
            are ordered (one sample), or folders ``test_data_set_<number>`` of such.
        program: whose inputs the samples are for. Arrays are brought to the declared element type where that loses
            nothing (:func:`.arrays.as_declared`), and labels to the declared rank. Arrays of files that are no input
            of the program are not looked at, so that one data set serves calibration and training.

    Raises:
        ArgumentError: no sample, a file that is missing, broken or of another kind, one of pickled objects.
        FeedError, FeedTypeError: a sample with missing or unknown names, values that the declared type does not hold,
        or other shapes; the message names the sample. ArgumentTypeError: no source at all.
    """
    if isinstance(source, Mapping | str | os.PathLike):
        source = [source]
    if not isinstance(source, Sequence) or isinstance(source, bytes):
        raise ArgumentTypeError(f"calibration takes {_WAYS}; got {type(source).__name__}")
    feeds = Feeds(program, program.outputs)
    samples: list[tuple[str, Mapping[str, Any]]] = []
    for number, item in enumerate(source, 1):
        if isinstance(item, Mapping):
            samples.append((f"sample {number}", item))
        elif isinstance(item, str | os.PathLike):
            samples += [(where, part) for where, sample in _read(Path(item), feeds) for part in _parts(feeds, sample)]
        else:
            raise ArgumentTypeError(f"calibration takes {_WAYS}; got {type(item).__name__}")
    if not samples:
        raise ArgumentError(f"calibration is empty; give {_WAYS}")
    return [_checked(feeds, sample, where) for where, sample in samples]


# -- one sample ------------------------------------------------------------------------------------------
def _inputs(feeds: Feeds) -> list[str]:
    return [name for name, feed in feeds.feeds.items() if not feed.fixed]


def _looked_at(feeds: Feeds, names: Iterable[str]) -> list[str]:
    """Which arrays of a file are read: those of inputs; all of them where an input is missing, for the message."""
    found = list(names)
    complete = all(feed.name in found for feed in feeds.required)
    return [name for name in found if name in feeds.feeds] if complete else found


def _parts(feeds: Feeds, sample: Sample) -> list[Sample]:
    """A sample of a file in batches of the size that every input is fixed to, where all its arrays hold more."""
    inputs = [feed for feed in feeds.feeds.values() if feed.name in sample]
    sizes = {feed.shape[0] if feed.shape else None for feed in inputs}
    counts = {len(array) if np.ndim(array := sample[feed.name]) else 0 for feed in inputs}
    batch = sizes.pop() if len(sizes) == 1 else None
    count = counts.pop() if len(counts) == 1 else 0
    if not isinstance(batch, int) or batch < 1 or count <= batch:
        return [sample]
    chosen = [np.arange(start, start + batch) % count for start in range(0, count, batch)]
    return [{name: np.asarray(array)[rows] for name, array in sample.items()} for rows in chosen]


def _checked(feeds: Feeds, sample: Mapping[str, Any], where: str) -> Sample:
    try:
        _check_names(feeds, sample)
        checked = feeds.check({name: _typed(feeds, name, value) for name, value in sample.items()})
        feeds.check_shapes(checked)
    except FeedTypeError as error:
        raise FeedTypeError(f"calibration, {where}: {error}") from None
    except FeedError as error:
        raise FeedError(f"calibration, {where}: {error}") from None
    arrays = [value for value in checked.values() if isinstance(value, np.ndarray)]
    if arrays and not any(array.size for array in arrays):
        shapes = ", ".join(f"'{name}' {list(shape_of(value))}" for name, value in checked.items())
        raise FeedError(f"calibration, {where}: every input is empty ({shapes}); nothing can be measured on it")
    return checked


def _check_names(feeds: Feeds, sample: Mapping[str, Any]) -> None:
    """FeedError that lists every name that is wrong, where more than one is."""
    missing = [feed.name for feed in feeds.required if feed.name not in sample]
    unknown = [name for name in sample if isinstance(name, str) and name not in feeds.feeds]
    if len(missing) + len(unknown) > 1:
        wrong = [
            f"{_quoted(names)} {'are' if len(names) > 1 else 'is'} {what}"
            for names, what in ((unknown, "no input"), (missing, "missing"))
            if names
        ]
        known = [name for name, feed in feeds.feeds.items() if not feed.fixed]
        raise FeedError(f"{' and '.join(wrong)}; the inputs of program '{feeds.program}' are {_quoted(known)}")


def _typed(feeds: Feeds, name: str, value: Any) -> Any:
    """An array in the declared element type and rank; FeedError, FeedTypeError where it cannot have it."""
    declared = feeds.feeds.get(name)
    if declared is None or declared.dtype is None or not isinstance(value, np.ndarray) or value.dtype == object:
        return value
    return as_ranked(as_declared(value, declared.dtype, f"feed '{name}'"), declared.shape)


# -- files -------------------------------------------------------------------------------------------------
def _read(path: Path, feeds: Feeds) -> list[tuple[str, Sample]]:
    if os.path.isdir(path):
        return _read_folder(path, feeds)
    if not os.path.exists(path):  # pathlib raises for names that cannot be
        raise ArgumentError(f"calibration: there is no file or folder '{path}'")
    if path.suffix == ".npz":
        return [_archive(path, feeds)]
    alone = f"; give the folder '{path.parent}'" if path.suffix in (".npy", ".pb") else ""
    raise ArgumentError(f"calibration: '{path}' is neither an .npz file nor a folder of .npz, .npy or .pb files{alone}")


def _archive(path: Path, feeds: Feeds) -> tuple[str, Sample]:
    wanted = _looked_at(feeds, _load(path, array_names))
    return f"'{path}'", _load(path, lambda file: read_arrays(file, wanted))


def _read_folder(folder: Path, feeds: Feeds) -> list[tuple[str, Sample]]:
    found = {kind: paths for kind in ("npz", "npy", "pb") if (paths := _in_order(folder.glob(f"*.{kind}")))}
    if len(found) > 1:
        kinds = " and ".join(f".{kind}" for kind in found)
        raise ArgumentError(f"calibration: folder '{folder}' holds {kinds} files; keep one kind in it")
    if "npz" in found:
        return [_archive(path, feeds) for path in found["npz"]]
    if "npy" in found:
        return _arrays(folder, found["npy"], feeds)
    if "pb" in found:
        return [(f"folder '{folder}'", _test_data(folder, found["pb"], _inputs(feeds)))]
    sets = _in_order(path for path in folder.glob("test_data_set_*") if path.is_dir())
    if not sets:
        raise ArgumentError(f"calibration: folder '{folder}' holds no .npz, .npy or .pb files")
    return [sample for path in sets for sample in _read_folder(path, feeds)]


def _arrays(folder: Path, paths: Iterable[Path], feeds: Feeds) -> list[tuple[str, Sample]]:
    """Samples of ``<input>.npy`` or ``<input>_<number>.npy`` files; an input's own name may end in a number."""
    inputs = _inputs(feeds)
    samples: dict[int | None, dict[str, Path]] = {}
    for path in paths:
        numbered = None if path.stem in inputs else _NUMBERED.fullmatch(path.stem)
        name, number = (numbered[1], int(numbered[2])) if numbered else (path.stem, None)
        sample = samples.setdefault(number, {})
        if name in sample:
            raise ArgumentError(f"calibration: folder '{folder}' holds two arrays numbered {number} for '{name}'")
        sample[name] = path
    if None in samples and len(samples) > 1:
        raise ArgumentError(
            f"calibration: in folder '{folder}' some arrays are numbered and {_quoted(samples[None])} "
            "not; give each sample its own of every input (<input>_<number>.npy)"
        )
    return [
        (
            f"folder '{folder}'" if number is None else f"sample {number} of folder '{folder}'",
            {name: _load(sample[name], read_array) for name in _looked_at(feeds, sample)},
        )
        for number, sample in sorted(samples.items(), key=lambda item: item[0] or 0)
    ]


def _test_data(folder: Path, paths: Iterable[Path], inputs: Sequence[str]) -> Sample:
    """The sample of ``input_<number>.pb`` files; the outputs that lie beside them are not read."""
    sample: Sample = {}
    for path in paths:
        numbered = _NUMBERED.fullmatch(path.stem)
        if numbered is None or numbered[1] != "input":
            continue
        name, array = _load(path, _tensor)
        place = int(numbered[2])
        if name not in inputs and place >= len(inputs):
            raise ArgumentError(
                f"calibration: '{path}' is for input {place}, counted from 0, and the model has "
                f"{len(inputs)}: {_quoted(inputs)}"
            )
        sample[name if name in inputs else inputs[place]] = array
    if not sample:
        raise ArgumentError(f"calibration: folder '{folder}' holds .pb files, but no input_0.pb")
    return sample


def _in_order(paths: Iterable[Path]) -> list[Path]:
    """By name, numbers by value."""

    def key(path: Path) -> list[Any]:
        return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"([0-9]+)", path.name))]

    return sorted(paths, key=key)


def _load(path: Path, read: Callable[[Path], Any]) -> Any:
    """What ``read`` gives, its error in the words of calibration."""
    try:
        return read(path)
    except ArgumentError as error:
        raise ArgumentError(f"calibration: {error}") from None


def _tensor(path: Path) -> tuple[str, np.ndarray]:
    """Name and content of a tensor of ONNX test data."""
    try:
        tensor = onnx.TensorProto.FromString(path.read_bytes())
        if tensor.data_type == onnx.TensorProto.UNDEFINED:
            raise ValueError("it holds no tensor")
        return tensor.name, as_array(tensor)
    except Exception as error:  # protobuf, numpy and onnx raise a dozen classes for broken files
        text = " ".join(str(error).split()) or type(error).__name__
        raise ArgumentError(f"'{path}' cannot be read as a tensor of ONNX test data: {text}") from None


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "none"
