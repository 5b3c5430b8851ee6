"""What LSTM, GRU and RNN share: layout, directions, sequence lengths, weights of one direction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.nodes import OWN, Operator, Variable
from amp_transpiler.ops.common import size_of
from amp_transpiler.ops.rnn.recurrence import concat


def pick(e: Emitter, value: Value, index: int, axis: int) -> Value:
    """``value[:, .., index]`` at ``axis``."""
    shape = list(size_of(value))
    del shape[axis]
    if size_of(value)[axis] == 1:
        return e.reshape(value, shape)
    return e.Gather(value, e.const(np.int64(index)), axis=axis, shape=shape)


def split(e: Emitter, value: Value, parts: int) -> list[Value]:
    """The last dimension in equal parts."""
    if parts == 1:
        return [value]
    *lead, size = size_of(value)
    each = size // parts
    axis = len(lead)
    return list(e.Split(value, e.ints(*[each] * parts), axis=axis, outputs=parts, shape=(*lead, each)))


def rows(e: Emitter, value: Value) -> Value:
    """[steps, batch, n] as [steps * batch, n]."""
    steps, batch, size = size_of(value)
    return e.reshape(value, (steps * batch, size))


def product(e: Emitter, a: Value, b: Value, bias: Value | None = None, *, across: bool = False) -> Value:
    """``a @ b.T + bias``; with ``across``, ``a.T @ b``."""
    (m, n) = (size_of(a)[1], size_of(b)[1]) if across else (size_of(a)[0], size_of(b)[0])
    inputs = [a, b] if bias is None else [a, b, bias]
    return e.Gemm(*inputs, transA=int(across), transB=int(not across), shape=(m, n))


def sequence_of(op: Operator) -> Variable | None:
    """The output Y of a recurrent operator; of a gradient, that of the operator whose gradient it is."""
    return op.outputs[0] if op.domain != OWN else op.input(8 if op.type == "LSTMGrad" else 6)


@dataclass(frozen=True)
class Layer:
    """One recurrent operator on a batch; all values are at layout 0 (time first)."""

    e: Emitter
    op: Operator
    x: Value
    w: Value
    r: Value
    b: Value | None
    lengths: Value | None
    first: bool  # layout 1: the batch comes first in inputs and outputs

    @classmethod
    def of(
        cls, e: Emitter, op: Operator, x: Value, w: Value, r: Value, b: Value | None, lengths: Value | None
    ) -> Layer:
        """From the operator's inputs as they are."""
        first = bool(op.attrs.get("layout", 0))
        x = e.transpose(x, [1, 0, 2]) if first else x
        return cls(e, op, x, w, r, b, lengths, first)

    @property
    def steps(self) -> int:
        return size_of(self.x)[0]

    @property
    def batch(self) -> int:
        return size_of(self.x)[1]

    @property
    def hidden(self) -> int:
        return size_of(self.r)[2]

    @property
    def directions(self) -> int:
        return size_of(self.r)[0]

    def sequence(self, y: Value | None) -> Value | None:
        """Y, or its gradient, as [steps, directions, batch, hidden]."""
        return y if y is None or not self.first else self.e.transpose(y, [1, 2, 0, 3])

    def state(self, state: Value | None) -> Value | None:
        """An initial or last state, or its gradient, as [directions, batch, hidden]."""
        return state if state is None or not self.first else self.e.transpose(state, [1, 0, 2])

    def each(self) -> list[Direction]:
        """The directions, in the order of the weights."""
        backwards = self.op.attrs.get("direction", "forward") == "reverse"
        return [Direction(self, i, backwards or i == 1) for i in range(self.directions)]

    def _times(self) -> Value:
        return self.e.const(np.arange(self.steps, dtype=np.int64).reshape(-1, 1, 1))

    def ends(self) -> Value:
        """The sequence lengths, int64 [1, batch, 1]."""
        assert self.lengths is not None
        return self.e.reshape(self.e.cast(self.lengths, "int64"), (1, self.batch, 1))

    def valid(self) -> Value | None:
        """Which steps lie within their sequence, bool [steps, batch, 1]; None where all do."""
        return None if self.lengths is None else self.e.Less(self._times(), self.ends())

    def last(self) -> Value | None:
        """Which step is the last of its sequence, bool [steps, batch, 1]; None without lengths."""
        if self.lengths is None:
            return None
        return self.e.Equal(self._times(), self.e.Sub(self.ends(), self.e.const(np.int64(1))))


@dataclass(frozen=True)
class Direction:
    """One direction of a layer: ``reverse`` runs from the last time step to the first."""

    layer: Layer
    index: int
    reverse: bool

    @property
    def e(self) -> Emitter:
        return self.layer.e

    @property
    def w(self) -> Value:
        """[gates * hidden, inputs]"""
        return pick(self.e, self.layer.w, self.index, 0)

    @property
    def r(self) -> Value:
        """[gates * hidden, hidden]"""
        return pick(self.e, self.layer.r, self.index, 0)

    def biases(self) -> list[Value | None]:
        """The biases of the input's and of the state's part, each [gates * hidden]."""
        b = self.layer.b
        return [None, None] if b is None else [*split(self.e, pick(self.e, b, self.index, 0), 2)]

    def state(self, state: Value | None) -> Value:
        """This direction's part of a state, [batch, hidden]; zeros where it is left out."""
        layer = self.layer
        state = layer.state(state)
        if state is None:
            return self.e.zeros((layer.batch, layer.hidden), layer.x.dtype)
        return pick(self.e, state, self.index, 0)

    def last(self, dlast: Value | None) -> Value:
        """This direction's part of the gradient of a last state."""
        return self.state(None) if dlast is None else self.unless_empty(self.state(dlast))

    def unless_empty(self, state: Value) -> Value:
        """A last state, or its gradient: 0 for an empty sequence."""
        e, layer = self.e, self.layer
        if layer.lengths is None:
            return state
        empty = e.Less(e.reshape(layer.ends(), (layer.batch, 1)), e.const(np.int64(1)))
        return e.Where(empty, e.like(0, state), state, shape=state.shape)

    def kept(self, *values: Value) -> tuple[Value, ...] | None:
        """What the forward pass has kept of this direction for its gradient, once it was given; None before that."""
        y = sequence_of(self.layer.op)
        key = f"kept of direction {self.index} for the gradient of {y.name if y is not None else ''}"
        if values:
            self.e.shared[key] = values
        return self.e.shared.get(key)

    def sequence(self, y: Value | None) -> Value | None:
        """This direction's part of Y or its gradient, [steps, batch, hidden]."""
        y = self.layer.sequence(y)
        return None if y is None else pick(self.e, y, self.index, 1)

    def previous(self, states: Value, initial: Value, padded: bool = False) -> Value:
        """For every step the state before it. ``padded``: steps behind a sequence's end hold 0, not a state."""
        e, (steps, batch, hidden) = self.e, size_of(states)
        initial = e.reshape(initial, (1, batch, hidden))
        if steps == 1:
            return initial
        times = np.arange(steps)
        before = np.clip(times + 1 if self.reverse else times - 1, 0, steps - 1)
        shifted = e.Gather(states, e.const(before), axis=0, shape=states.shape)
        first = self.layer.last() if padded and self.reverse else None
        if first is None:
            first = e.const((times == (steps - 1 if self.reverse else 0)).reshape(-1, 1, 1))
        return e.Where(first, initial, shifted, shape=states.shape)


def assembled(layer: Layer, found: Sequence[dict[int, Value]]) -> list[Value | None]:
    """The gradients of a layer's inputs from those of its directions, by slot."""
    e = layer.e
    results: list[Value | None] = [None] * 8
    for slot in found[0]:
        parts = [each[slot] for each in found]
        if slot == 0:
            total = parts[0] if len(parts) == 1 else e.Add(*parts)
            whole = e.reshape(total, size_of(layer.x))
            results[slot] = e.transpose(whole, [1, 0, 2]) if layer.first else whole
            continue
        stacked = concat(e, [e.reshape(part, (1, *size_of(part))) for part in parts], 0)
        results[slot] = layer.state(stacked) if slot in (5, 6) else stacked
    return results
