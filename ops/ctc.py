"""Connectionist temporal classification: the loss and its gradient.

A. Graves, S. Fernandez, F. Gomez, J. Schmidhuber, "Connectionist temporal classification", ICML 2006: forward and
backward variables over the label with blanks between, before and behind its symbols, here as logarithms in fp32. A
step of either recurrence is a gather of the (at most three) states that a state is reached from, and a log-sum-exp.

``CTCLoss(logits [T, N, C], labels [N, S], input_lengths [N], label_lengths [N])`` with the attributes ``blank``,
``reduction`` ("mean" over the batch of loss / label length, "sum", "none": [N]) and ``zero_infinity``. It applies
log-softmax; on log-probabilities that changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.nodes import Operator, Types
from amp_transpiler.ir.opdef import gradient, lowering_rule, own
from amp_transpiler.ops.common import Grads, size_of
from amp_transpiler.ops.rnn.recurrence import recur

#: The logarithm of a probability of zero: finite, so that no difference is NaN, whatever is added to it.
_NEVER = -1e30
#: A path whose logarithm is below this does not exist.
_IMPOSSIBLE = -1e29
#: An index that no tensor reaches, nor does its double overflow 32 bits: onnxruntime wraps negative indices on CPU, and
#: refuses this one.
_BEYOND = np.int64(2**30 - 1)


@dataclass(frozen=True)
class _Batch:
    """The inputs of one operator, and sizes: T steps, N sequences, L = 2 S + 1 states of a label with its blanks."""

    e: Emitter
    op: Operator
    logits: Value
    labels: Value
    steps_of: Value  # input lengths, int64 [N]
    symbols_of: Value  # label lengths, int64 [N]
    key: str  # equal for a loss and its gradient

    @classmethod
    def of(cls, e: Emitter, op: Operator, logits: Value, labels: Value, steps_of: Value, symbols_of: Value) -> _Batch:
        """From the operator's inputs as they are. On CPU a negative length becomes an index that is refused."""
        names = (v.name for v in (logits, labels, steps_of, symbols_of))
        key = " ".join(["ctc", *names, str(op.attrs.get("blank", 0))])
        rows = size_of(logits)[1]
        lengths = [e.reshape(e.cast(value, "int64"), (rows,)) for value in (steps_of, symbols_of)]
        if e.at.host:
            lengths = [e.Where(e.Less(v, e.const(np.int64(0))), e.const(_BEYOND), v, shape=v.shape) for v in lengths]
        return cls(e, op, logits, labels, lengths[0], lengths[1], key)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """T, N, C, L."""
        steps, batch, classes = size_of(self.logits)
        return steps, batch, classes, 2 * size_of(self.labels)[1] + 1

    def number(self, value: int) -> Value:
        return self.e.const(np.int64(value))

    def column(self, value: Value) -> Value:
        return self.e.reshape(value, (self.sizes[1], 1))

    def used(self) -> Value:
        """Which labels count, bool [N, S]."""
        places = self.e.const(np.arange(size_of(self.labels)[1]).reshape(1, -1))
        return self.e.Less(places, self.column(self.symbols_of))

    def states(self) -> Value:
        """The class of each state, int64 [N, L]: blank, label, blank, label, .., blank."""
        e, (_, batch, classes, count) = self.e, self.sizes
        blank = self.number(int(self.op.attrs.get("blank", 0)))
        if count == 1:
            return e.Expand(blank, e.ints(batch, 1), shape=(batch, 1))
        labels = e.cast(self.labels, "int64")
        labels = e.Where(self.used(), labels, blank, shape=labels.shape)
        negative = e.Less(labels, self.number(0))
        labels = e.Where(negative, e.const(_BEYOND) if e.at.host else blank, labels, shape=labels.shape)
        if not e.at.host:
            labels = e.Where(e.Less(labels, self.number(classes)), labels, blank, shape=labels.shape)
        position = np.arange(count)
        spread = e.Gather(labels, e.const(np.maximum(position - 1, 0) // 2), axis=1, shape=(batch, count))
        return e.Where(e.const((position % 2 == 1).reshape(1, -1)), spread, blank)

    def unfit(self) -> Value:
        """Which sequences have a length or a label that cannot be, bool [N]. On CPU these stop the run instead."""
        e, (steps, batch, classes, count) = self.e, self.sizes
        wrong = []
        for value, limit in ((self.steps_of, steps), (self.symbols_of, count // 2)):
            wrong.append(e.Or(e.Less(value, self.number(0)), e.Greater(value, self.number(limit))))
        found = e.Or(*wrong)
        if count == 1:
            return found
        labels = e.cast(self.labels, "int64")
        outside = e.Or(e.Less(labels, self.number(0)), e.Greater(labels, self.number(classes - 1)))
        each = e.cast(e.And(outside, self.used()), "float32")
        any_ = e.Greater(e.reshape(e.reduce_sum(each, [1]), (batch,)), e.like(0, each))
        return e.Or(found, any_)


@dataclass(frozen=True)
class _Lattice:
    """The states of every sequence, and which follow each other.

    The gradient, where it is emitted beside the loss, uses that of the loss.
    """

    batch: _Batch
    log_prob: Value  # [T, N, C]
    classes: Value  # int64 [N, L]
    skips: Value  # bool [N, L]: reached from two states before, over a blank between different labels
    emissions: Value  # the log-probability of each state's class at every step, [T, N, L]

    @classmethod
    def of(cls, batch: _Batch) -> _Lattice:
        e, shared = batch.e, batch.e.shared
        if batch.key not in shared:
            log_prob = e.LogSoftmax(batch.logits, axis=2)
            classes, skips = cls._states(batch)
            shared[batch.key] = (log_prob, classes, skips, _emissions(batch, log_prob, classes))
        return cls(batch, *shared[batch.key])

    @staticmethod
    def _states(batch: _Batch) -> tuple[Value, Value]:
        e, (_, rows, _, count) = batch.e, batch.sizes
        classes = batch.states()
        before = e.Gather(classes, e.const(np.maximum(np.arange(count) - 2, 0)), axis=1, shape=(rows, count))
        beyond = e.const((np.arange(count) >= 2).reshape(1, -1))
        return classes, e.And(e.Not(e.Equal(classes, before)), beyond)

    def moves(self, onward: int) -> tuple[Value, Value]:
        """For each state the three that it is reached from (``onward`` -1) or that follow it (1).

        Indices int64 [3, L], and [N, 3, L]: 0 where the move exists, else the logarithm of no probability.
        """
        e, (_, rows, _, count) = self.batch.e, self.batch.sizes
        target = np.arange(count) + onward * np.arange(3).reshape(3, 1)
        inside = (target >= 0) & (target < count)
        target = np.clip(target, 0, count - 1)
        skips = self.skips if onward < 0 else e.Gather(self.skips, e.const(target[2]), axis=1, shape=(rows, count))
        always, maybe = inside & [[True], [True], [False]], inside & [[False], [False], [True]]
        exists = e.Or(e.And(e.reshape(skips, (rows, 1, count)), e.const(maybe[None])), e.const(always[None]))
        zero = e.like(0, self.batch.logits)
        return e.const(target), e.Where(exists, zero, e.like(_NEVER, zero), shape=(rows, 3, count))

    def advance(self, onward: int) -> Callable[[Value], Value]:
        """``states [N, L] -> log-sum-exp over the moves into each state [N, L]``."""
        e, (_, rows, _, count) = self.batch.e, self.batch.sizes
        index, allowed = self.moves(onward)

        def apply(states: Value) -> Value:
            each = e.Add(e.Gather(states, index, axis=1, shape=(rows, 3, count)), allowed)
            return e.ReduceLogSumExp(each, e.ints(1), keepdims=0, shape=(rows, count))

        return apply

    def ends(self) -> tuple[Value, Value]:
        """The two states that a path may end in, int64 [N, 2], and 0 or "never" for each."""
        e, batch = self.batch.e, self.batch
        doubled = e.Mul(batch.column(batch.symbols_of), batch.number(2))
        ends = e.Add(doubled, e.const(np.array([[0, -1]])))
        zero = e.like(0, batch.logits)
        missing = e.Where(e.Less(ends, batch.number(0)), e.like(_NEVER, zero), zero, shape=(batch.sizes[1], 2))
        return e.Max(ends, batch.number(0)), missing


def _emissions(batch: _Batch, log_prob: Value, classes: Value) -> Value:
    e, (steps, rows, _, count) = batch.e, batch.sizes
    index = e.Expand(e.reshape(classes, (1, rows, count)), e.ints(steps, 1, 1), shape=(steps, rows, count))
    found = e.GatherElements(log_prob, index, axis=2, shape=index.shape)
    return e.Max(found, e.like(_NEVER, found))


def _forward(lattice: _Lattice) -> tuple[Value, Value]:
    """Forward variables [T, N, L], and the label's log-probability [N]; the gradient uses those of the loss."""
    batch = lattice.batch
    e, key = batch.e, f"{batch.key} forward"
    if key not in e.shared:
        advance, start = lattice.advance(-1), _start(batch)

        def step(states: Sequence[Value], slices: Sequence[Value]) -> tuple[list[Value], list[Value]]:
            new = e.Add(advance(states[0]), slices[0])
            return [new], [new]

        _, (alphas,) = recur(e, batch.op, step, [start], [lattice.emissions])
        e.shared[key] = (alphas, _total(lattice, alphas, start))
    alphas, total = e.shared[key]
    return alphas, total


def _start(batch: _Batch) -> Value:
    """Forward variables before the first step: only the first state exists, and the first symbol follows it."""
    e, (_, rows, _, count) = batch.e, batch.sizes
    first = np.where(np.arange(count) == 0, 0.0, _NEVER).reshape(1, -1)
    return e.Expand(e.const(first, batch.logits.dtype), e.ints(rows, 1), shape=(rows, count))


def _total(lattice: _Lattice, alphas: Value, start: Value) -> Value:
    """The forward variables of the last step of each sequence, in its last two states, together."""
    batch = lattice.batch
    e, (steps, rows, _, count) = batch.e, batch.sizes
    lengths = batch.steps_of
    row = e.Max(e.Sub(lengths, batch.number(1)), batch.number(0))
    if not e.at.host:
        row = e.Min(row, batch.number(steps - 1))
    index = e.Add(e.Mul(row, batch.number(rows)), e.const(np.arange(rows)))
    last = e.Gather(e.reshape(alphas, (steps * rows, count)), index, axis=0, shape=(rows, count))
    last = e.Where(e.Less(batch.column(lengths), batch.number(1)), start, last, shape=(rows, count))
    ends, missing = lattice.ends()
    if not e.at.host:
        ends = e.Max(e.Min(ends, batch.number(count - 1)), batch.number(0))
    both = e.Add(e.GatherElements(last, ends, axis=1, shape=(rows, 2)), missing)
    return e.ReduceLogSumExp(both, e.ints(1), keepdims=0, shape=(rows,))


def _share(batch: _Batch) -> Value | None:
    """What a sequence's loss counts in the mean, [N]: 1 / (N * label length), a length of 0 taken as 1."""
    e = batch.e
    if batch.op.attrs.get("reduction", "mean") != "mean":
        return None
    symbols = e.cast(e.Max(batch.symbols_of, batch.number(1)), batch.logits.dtype)
    return e.Reciprocal(e.Mul(symbols, e.like(batch.sizes[1], batch.logits)))


def _types(op: Operator) -> Types:
    x = op.inputs[0]
    assert x is not None
    if op.attrs.get("reduction", "mean") != "none":
        return [(x.dtype, ())]
    return [(x.dtype, None if x.shape is None else (x.shape[1],))]


@lowering_rule(own("CTCLoss"), infer=_types)
def ctc_loss(e: Emitter, op: Operator, logits: Value, labels: Value, steps_of: Value, symbols_of: Value) -> Grads:
    batch = _Batch.of(e, op, logits, labels, steps_of, symbols_of)
    _, total = _forward(_Lattice.of(batch))
    none = 0.0 if op.attrs.get("zero_infinity", 0) else np.inf
    loss = e.Where(e.Less(total, e.like(_IMPOSSIBLE, total)), e.like(none, total), e.Neg(total))
    if not e.at.host:
        loss = e.Where(batch.unfit(), e.like(np.nan, loss), loss)
    if op.attrs.get("reduction", "mean") == "none":
        return [loss]
    share = _share(batch)
    return [e.reduce_sum(loss if share is None else e.Mul(loss, share))]


@gradient(own("CTCLoss"), reads="x0 x1 x2 x3 dy0", inputs=[0])
def ctc_loss_grad(
    e: Emitter, op: Operator, logits: Value, labels: Value, steps_of: Value, symbols_of: Value, dy: Value
) -> Grads:
    """softmax - (probability that the path is at a state of this class, given the label), up to a sequence's end.

    NaN for a label that no path gives, unless ``zero_infinity``.
    """
    batch = _Batch.of(e, op, logits, labels, steps_of, symbols_of)
    steps, rows, _, _ = batch.sizes
    lattice = _Lattice.of(batch)
    alphas, total = _forward(lattice)
    occupancy = _occupancy(lattice, alphas, total)
    none = e.like(0.0 if op.attrs.get("zero_infinity", 0) else np.nan, logits)
    impossible = e.Less(total, e.like(_IMPOSSIBLE, total))
    if not e.at.host:
        impossible = e.Or(impossible, batch.unfit())
    difference = e.Where(e.reshape(impossible, (1, rows, 1)), none, e.Sub(e.Exp(lattice.log_prob), occupancy))
    within = e.Less(e.const(np.arange(steps).reshape(-1, 1, 1)), e.reshape(batch.steps_of, (1, rows, 1)))
    share = _share(batch)
    scale = dy if share is None else e.Mul(dy, share)
    scale = scale if not size_of(scale) else e.reshape(scale, (1, rows, 1))
    return [e.Where(within, e.Mul(difference, scale), e.like(0, logits))]


def _occupancy(lattice: _Lattice, alphas: Value, total: Value) -> Value:
    """The probability, given the label, that the path is at a state of each class, [T, N, C]."""
    e, (steps, rows, classes, count) = lattice.batch.e, lattice.batch.sizes
    betas = _betas(lattice)
    posterior = e.Exp(e.Sub(e.Add(alphas, betas), e.reshape(total, (1, rows, 1))))
    states = e.reshape(lattice.classes, (rows, count, 1))
    # Summed by a product, whose order is fixed; a scatter adds in any order on CUDA.
    chosen = e.cast(e.Equal(states, e.const(np.arange(classes).reshape(1, 1, -1))), posterior.dtype)
    summed = e.MatMul(e.transpose(posterior, [1, 0, 2]), chosen)
    return e.transpose(Value(summed.name, summed.dtype, (rows, steps, classes)), [1, 0, 2])


def _betas(lattice: _Lattice) -> Value:
    """Backward variables [T, N, L]: the log-probability of the label's rest after a step, given the state at it."""
    batch = lattice.batch
    e, (steps, rows, _, count) = batch.e, batch.sizes
    advance = lattice.advance(1)
    times = e.const(np.arange(1, steps + 1).reshape(-1, 1, 1))
    last = e.Equal(times, e.reshape(batch.steps_of, (1, rows, 1)))
    double = e.Mul(batch.column(batch.symbols_of), batch.number(2))
    states = e.const(np.arange(count).reshape(1, -1))
    final = e.Or(e.Equal(states, double), e.Equal(e.Add(states, batch.number(1)), double))
    zero = e.like(0, batch.logits)
    never = e.like(_NEVER, zero)
    ending = e.Where(final, zero, never, shape=(rows, count))

    def step(old: Sequence[Value], slices: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        emission, is_last = slices
        beta = e.Where(is_last, ending, advance(old[0]), shape=(rows, count))
        return [e.Add(beta, emission)], [beta]

    start = e.Expand(never, e.ints(rows, count), shape=(rows, count))
    _, (betas,) = recur(e, batch.op, step, [start], [lattice.emissions, last], reverse=True)
    return betas
