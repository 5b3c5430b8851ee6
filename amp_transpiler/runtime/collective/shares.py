"""Who takes which examples: batches are those of all ranks together, and each rank takes its share of every one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.option_checks import is_whole, shown, switch, whole
from amp_transpiler.runtime.collective import current


class Batch(NamedTuple):
    """One rank's share of a batch of all ranks.

    ``number`` counts the batches of the epoch, from 0 on. ``rows`` are this rank's examples. ``weight`` is what this
    rank's mean (a loss) is multiplied by, so that the mean over ranks is that of the batch: 1 where every rank has as
    many examples, and below 2. ``own`` is False where fewer examples than ranks were left, and ``rows`` is another
    rank's: with the weights of both it counts once. ``size`` is the number of examples of all ranks.
    """

    number: int
    rows: np.ndarray
    weight: float
    own: bool
    size: int


def dealt(rows: np.ndarray, rank: int, ranks: int, counts: np.ndarray | None = None) -> tuple[np.ndarray, float, bool]:
    """The share of a rank in a batch, dealt out in turn, its weight, and whether it is this rank's own; see Batch.

    ``counts``: how many values of each example a mean loss is taken over, one where None. Where none of a share counts,
    an example that does stands for it, with the weight 0.
    """
    number = len(rows)
    if ranks == 1:
        return rows, 1.0, True
    if counts is None and number < ranks:
        holders = ranks // number + (rank % number < ranks % number)
        return rows[[rank % number]], ranks / (number * holders), rank < number
    counted = np.ones(number, np.int64) if counts is None else counts
    share, own, whole = rows[rank::ranks], int(counted[rank::ranks].sum()), int(counted.sum())
    if own:
        return share, own * ranks / whole, True
    return np.resize(rows[[int(np.argmax(counted > 0))]], max(len(share), 1)), 0.0 if whole else 1.0, False


def _shares(order: np.ndarray, size: int, rank: int, ranks: int, start: int, drop_last: bool) -> Iterator[Batch]:
    """The shares of one rank in batches of ``size`` examples, from batch ``start`` on."""
    end = len(order) // size * size if drop_last else len(order)
    for number, begin in enumerate(range(0, end, size)):
        if number >= start:
            rows = order[begin : min(begin + size, end)]
            yield Batch(number, *dealt(rows, rank, ranks), len(rows))


def shard(
    n_or_indices: int | Sequence[int] | np.ndarray,
    epoch: int = 0,
    seed: int = 0,
    rank: int | None = None,
    world_size: int | None = None,
    drop_last: bool = False,
) -> np.ndarray:
    """The examples of this rank in one epoch: every rank the same number, each example once in the epoch.

    All examples are permuted by (seed, epoch), the same on every rank, and dealt out in turn: the ranks' batches ``b``
    together hold what batch ``b`` of one rank with the N-fold batch holds.

    Args:
        n_or_indices: the number of examples, or their indices.
        epoch, seed: whole numbers from 0 on, of which the order is made.
        rank, world_size: which part of how many; those of the engine where None.
        drop_last: leave out up to ``world_size - 1`` examples where the number does not divide; else as many from the
            front of the permutation come again.

    Returns: indices, int64.
    """
    switch("shard: drop_last", drop_last)
    own, parts = _part("shard", rank, world_size)
    order = _order("shard", n_or_indices, epoch, seed)
    each = len(order) // parts if drop_last else -(-len(order) // parts)
    return np.resize(order, each * parts)[own::parts] if each else order[:0]


def batches(
    n_or_indices: int | Sequence[int] | np.ndarray,
    batch_size: int,
    epoch: int = 0,
    seed: int = 0,
    *,
    start: int = 0,
    drop_last: bool = False,
    shuffle: bool = True,
    rank: int | None = None,
    world_size: int | None = None,
) -> Iterator[Batch]:
    """This rank's share of each batch of one epoch; a batch is one of all ranks, of ``batch_size`` examples together.

    So training does not depend on the number of ranks: batch ``b`` is the same on 1, 2 or 4 of them, in the same order,
    and each example comes once in the epoch. A training that saved ``batch.number`` goes on in the middle of an epoch,
    on any number of ranks, with ``start=number + 1``. Where shares of a batch are of several sizes (the last one, or a
    size that does not divide), the mean over ranks of ``loss * batch.weight`` is the mean over the batch.

    Args:
        n_or_indices: the number of examples, or their indices.
        batch_size: examples of all ranks together; at least as many as there are ranks.
        epoch, seed: whole numbers from 0 on, of which the order is made, as :func:`shard` makes it.
        start: the number of batches of this epoch that are done.
        drop_last: leave out the examples that do not fill the last batch.
        shuffle: False takes the examples in their own order.
        rank, world_size: which part of how many; those of the engine where None.

    Returns: an iterator over :class:`Batch`.
    """
    switch("batches: drop_last", drop_last)
    switch("batches: shuffle", shuffle)
    whole("batches: start", start, 0)
    own, parts = _part("batches", rank, world_size)
    whole("batches: batch_size", batch_size, 1)
    if batch_size < parts:
        raise ArgumentError(
            f"batches: batch_size is {batch_size}; expected at least one example for each of the {parts} ranks"
        )
    order = _order("batches", n_or_indices, epoch, seed) if shuffle else _indices("batches", n_or_indices)
    return _shares(order, batch_size, own, parts, start, drop_last)


def _part(call: str, rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Which part of how many; errors for numbers that do not go together."""
    parts = current.world_size() if world_size is None else world_size
    whole(f"{call}: world_size", parts, 1)
    own = current.rank() if rank is None else rank
    whole(f"{call}: rank", own, 0)
    if own >= parts:
        raise ArgumentError(f"{call}: rank is {own}; expected one below the world size, {parts}")
    return own, parts


def _order(call: str, n_or_indices: int | Sequence[int] | np.ndarray, epoch: int, seed: int) -> np.ndarray:
    whole(f"{call}: epoch", epoch, 0)
    whole(f"{call}: seed", seed, 0)
    indices = _indices(call, n_or_indices)
    return indices[np.random.default_rng([seed, epoch]).permutation(len(indices))]


def _indices(call: str, given: int | Sequence[int] | np.ndarray) -> np.ndarray:
    if is_whole(given):
        whole(f"{call}: the number of examples", given, 0)
        return np.arange(given, dtype=np.int64)
    indices = np.asarray(given)
    if indices.ndim != 1 or (indices.size and indices.dtype.kind not in "iu"):
        raise ArgumentTypeError(f"{call}: expected a number or a list of whole numbers, got {shown(given)}")
    return indices.astype(np.int64)
