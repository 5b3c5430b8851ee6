"""Data sets: arrays by input name, whose first dimension counts samples; checked whole before the first step."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from amp_transpiler.errors import ArgumentTypeError, FeedError, FeedTypeError
from amp_transpiler.finetune.metrics import IGNORED
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.ir.types import FLOATS, element_type
from amp_transpiler.runtime.arrays import array_names, as_declared, as_ranked, check_declared, pieces, read_arrays
from amp_transpiler.runtime.collective.shares import dealt

Source = str | os.PathLike[str] | Mapping[str, Any]


def read(source: Source, wanted: list[str], what: str, option: str = "") -> dict[str, np.ndarray]:
    """The wanted arrays of a file, a folder or a mapping; others are left alone. FeedError names a missing one.

    ``option``: the one that names the last of them, which are the labels.
    """
    if isinstance(source, Mapping):
        known = [str(name) for name in source]
        arrays = {name: np.asarray(source[name]) for name in wanted if name in source}
    elif isinstance(source, str | os.PathLike):
        arrays = read_arrays(source, wanted)
        known = list(arrays)
        if len(arrays) < len(wanted):
            known = array_names(source)
    else:
        raise ArgumentTypeError(
            f"{what} is {source!r:.80}; expected the path of an npz file or of a folder of npy files, or arrays by name"
        )
    missing = [name for name in wanted if name not in arrays]
    if missing:
        raise FeedError(
            f"{what} has no array '{missing[0]}'; the program is fed {', '.join(wanted)}, and there is "
            f"{', '.join(known) or 'nothing'}"
            + (f"; {option} names the labels' array" if option and missing[0] == wanted[-1] else "")
        )
    return arrays


class Share(NamedTuple):
    """One rank's part of a batch: what the loss of the whole batch is a mean over, samples or labels that count, and
    what this rank is fed.

    ``weight`` and ``own`` are as :class:`amp.distributed.Batch` has them; a weight of 0 is that of samples that do not
    count.
    """

    size: int
    weight: float
    own: bool
    feed: dict[str, np.ndarray]


@dataclass
class Samples:
    """Arrays for the inputs of a program. ``what`` names the data in messages.

    ``ignorable``: the array of labels some of which may not count.
    """

    what: str
    arrays: dict[str, np.ndarray]
    dtypes: dict[str, str]
    count: int
    ignorable: str | None = None

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray], inputs: list[Variable], what: str) -> Samples:
        """Arrays checked against inputs: ranks, sizes, types, one number of samples, nothing that is not finite.

        FeedError, FeedTypeError with the array and the first place in it.
        """
        fitted = {v.name: _fitted(arrays[v.name], v, what) for v in inputs}
        count = _count(fitted, what)
        for variable in inputs:
            check_declared(fitted[variable.name], str(variable.dtype), f"{what}: array '{variable.name}'")
            _check_finite(fitted[variable.name], f"{what}: array '{variable.name}'")
        return cls(what, fitted, {v.name: str(v.dtype) for v in inputs}, count)

    def with_label(self, arrays: Mapping[str, np.ndarray], label: Variable, ignorable: bool) -> Samples:
        """These samples with their label, which is checked as they were; whether some labels may not count."""
        if ignorable:
            self._check_indices(arrays[label.name], label)
        other = Samples.of(arrays, [label], self.what)
        both = {**self.arrays, **other.arrays}
        name = label.name if ignorable else None
        if ignorable and not any((piece != IGNORED).any() for _, piece in pieces(other.arrays[label.name])):
            raise FeedError(f"{self._array(label.name)} holds {IGNORED} alone: no label counts")
        return Samples(self.what, both, {**self.dtypes, **other.dtypes}, _count(both, self.what), name)

    def rows(self, chosen: Any) -> dict[str, np.ndarray]:
        """A feed of these samples."""
        return {
            name: as_declared(np.ascontiguousarray(array[chosen]), self.dtypes[name], self._array(name))
            for name, array in self.arrays.items()
        }

    def _check_indices(self, array: np.ndarray, label: Variable) -> None:
        """FeedError where labels have a number for each class, as one-hot ones do, in the place of the class."""
        if as_ranked(array, label.shape).ndim == len(label.shape or ()) + 1:
            raise FeedError(
                f"{self._array(label.name)} has the shape {list(array.shape)}, a number for each class, as one-hot "
                "labels have; the loss cross_entropy takes the index of the class alone: give it np.argmax(labels, "
                "axis) over the classes. For shares of the classes choose the loss kl_div"
            )

    def _array(self, name: str) -> str:
        return f"{self.what}: array '{name}'"

    def batches(
        self, sizes: list[int], rng: np.random.Generator | None, rank: int = 0, ranks: int = 1
    ) -> Iterator[Share]:
        """A rank's shares in batches of these samples; in another order where there is a generator."""
        order = np.arange(self.count) if rng is None else rng.permutation(self.count)
        start = 0
        for size in sizes:
            rows = np.sort(order[start : start + size])
            counted = self._counted(rows)
            chosen, weight, own = dealt(rows, rank, ranks, None if ranks == 1 else counted)
            yield Share(size if counted is None else int(counted.sum()), weight, own, self.rows(chosen))
            start += size

    def _counted(self, rows: np.ndarray) -> np.ndarray | None:
        """How many values of each of these samples the loss is a mean over; None where that is the same for all."""
        if self.ignorable is None:
            return None
        labels = np.asarray(self.arrays[self.ignorable][rows])
        return np.asarray((labels != IGNORED).reshape(len(rows), -1).sum(1))

    def identity(self) -> dict[str, Any]:
        """What tells this data from other data: types, shapes and check sums by array."""
        return {name: [str(array.dtype), list(array.shape), _checksum(array)] for name, array in self.arrays.items()}


def _count(arrays: Mapping[str, np.ndarray], what: str) -> int:
    counts = {name: len(array) for name, array in arrays.items()}
    if not counts:
        raise FeedError(f"{what}: no input is left to be fed; leave one of them without a value for good")
    if len(set(counts.values())) != 1:
        raise FeedError(f"{what}: arrays differ in the number of samples: {counts}")
    count = next(iter(counts.values()))
    if not count:
        raise FeedError(f"{what} holds no samples")
    return count


def batch_sizes(count: int, batch: int, accumulate: int, *, whole: bool = False) -> list[int]:
    """The sizes of an epoch's batches; with gradients added up over several, every window is complete.

    What does not fill a window is one window more, of shorter batches; fewer samples than a window has batches join
    the one before. ``whole``: the batch is fixed, and samples that do not fill a window of whole ones are left out.
    """
    windows, rest = divmod(count, batch * accumulate)
    sizes = [batch] * (windows * accumulate)
    if whole or not rest:
        return sizes
    if rest >= accumulate or not windows:
        micro_steps = min(accumulate, rest)
        return sizes + [rest // micro_steps + (micro_step < rest % micro_steps) for micro_step in range(micro_steps)]
    last = len(sizes) - accumulate
    return [size + (last <= micro_step < last + rest) for micro_step, size in enumerate(sizes)]


def check_labels(samples: Samples, label: str, loss: str, classes: Any) -> None:
    """FeedError where a label is no class of an output of so many classes, or no probability."""
    array, what = samples.arrays[label], f"{samples.what}: label array '{label}'"
    for start, piece in pieces(array):
        if loss == "cross_entropy":
            wrong = (piece < 0) & (piece != IGNORED)
            if isinstance(classes, int):
                wrong |= piece >= classes
            expected = f"classes from 0 to {classes - 1}" if isinstance(classes, int) else "classes from 0 on"
            expected += f", or {IGNORED} for what does not count"
            if classes == 1:
                expected += "; one number needs the loss bce_with_logits (yes or no) or mse"
        elif loss in ("bce_with_logits", "kl_div"):
            wrong, expected = (piece < 0) | (piece > 1), "probabilities from 0 to 1"
        else:
            return
        if wrong.any():
            place = _place(wrong, start)
            raise FeedError(
                f"{what} holds {array[place]} at index {list(place)}; the loss {loss} on this output takes {expected}"
            )


def check_classes(array: np.ndarray, what: str, ways: str) -> None:
    """FeedTypeError where labels that are to be classes are fractions, or times; ``ways``: what takes fractions."""
    if array.dtype.kind in "mM":
        raise FeedTypeError(f"{what} is {array.dtype}; the loss cross_entropy takes classes, which are whole numbers")
    if element_type(array.dtype) not in FLOATS:
        return
    for start, piece in pieces(array):
        wrong = np.isfinite(piece) & (piece != np.floor(piece))
        if wrong.any():
            place = _place(wrong, start)
            raise FeedTypeError(
                f"{what} is {array.dtype} and holds {array[place]} at index {list(place)}; the loss "
                f"cross_entropy takes classes, which are whole numbers. {ways}"
            )


def check_has_samples(variable: Variable) -> None:
    """FeedError for an input that is one number."""
    if variable.shape == ():
        raise FeedError(
            f"input '{variable.name}' is a single number, which has no samples; give it a value for good "
            f"(--value {variable.name}=NUMBER, or values={{'{variable.name}': …}})"
        )


def _fitted(array: np.ndarray, variable: Variable, what: str) -> np.ndarray:
    """The array with the rank of an input; FeedError where its sizes are others."""
    check_has_samples(variable)
    shape = variable.shape
    array = as_ranked(array, shape)
    wrong = array.ndim == 0 or (
        shape is not None
        and (
            len(shape) != array.ndim
            or any(isinstance(d, int) and d != size for d, size in zip(shape[1:], array.shape[1:], strict=True))
        )
    )
    if wrong:
        sizes = ", ".join("?" if d is None else str(d) for d in shape or ())
        raise FeedError(
            f"{what}: array '{variable.name}' has the shape {list(array.shape)}; the program is fed "
            f"[{sizes}], the first of which counts samples"
        )
    return array


def _check_finite(array: np.ndarray, what: str) -> None:
    if element_type(array.dtype) not in FLOATS:
        return
    for start, piece in pieces(array):
        wrong = ~np.isfinite(piece.astype(np.float32) if piece.dtype == ml_dtypes.bfloat16 else piece)
        if wrong.any():
            place = _place(wrong, start)
            raise FeedError(
                f"{what} holds {array[place]} at index {list(place)}; no training survives that: correct "
                "or leave out such samples"
            )


def largest(array: np.ndarray) -> float:
    """The largest magnitude in an array of numbers."""
    found = (float(np.max(np.abs(piece.astype(np.float64)), initial=0.0)) for _, piece in pieces(array))
    return max(found, default=0.0)


def _place(wrong: np.ndarray, start: int) -> tuple[int, ...]:
    first = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
    return (int(first[0]) + start, *(int(index) for index in first[1:]))


def _checksum(array: np.ndarray) -> int:
    found = 0
    for _, piece in pieces(array):
        found = zlib.crc32(np.ascontiguousarray(piece).view(np.uint8).reshape(-1).data, found)
    return found
