"""What LSTM, GRU and RNN share: layout, directions, sequence lengths, weights of one direction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.nodes import OWN, Operator, Variable
from amp_transpiler.ir.types import HALF
from amp_transpiler.ops.common import exchanged, once, size_of, summed_to
from amp_transpiler.ops.rnn.recurrence import FEW, concat

#: A batch of fewer rows takes no longer on the left of a product.
_WIDE = 8


def pick(e: Emitter, value: Value, index: int, axis: int) -> Value:
    """``value[:, .., index]`` at ``axis``, made once."""
    shape = list(size_of(value))
    del shape[axis]
    if size_of(value)[axis] == 1:
        return e.reshape(value, shape)
    key = f"{index} along axis {axis} of {value.name}"
    return once(e, key, lambda: e.Gather(value, e.const(np.int64(index)), axis=axis, shape=shape))


def split(e: Emitter, value: Value, parts: int, axis: int = -1) -> list[Value]:
    """A dimension, the last one by itself, in equal parts."""
    if parts == 1:
        return [value]
    shape = list(size_of(value))
    axis %= len(shape)
    shape[axis] //= parts
    return list(e.Split(value, e.ints(*[shape[axis]] * parts), axis=axis, outputs=parts, shape=shape))


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
    """One recurrent operator on a batch; all values are at layout 0 (time first).

    They are fp32, but in gradients on a GPU: there input and weights are in 16 bit what they are, and products of all
    steps at once are products in 16 bit.
    """

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

    @classmethod
    def in_products(
        cls, e: Emitter, op: Operator, x: Value, w: Value, r: Value, b: Value | None, lengths: Value | None
    ) -> Layer:
        """From the inputs that a gradient reads, in the type in which products of all steps read them."""
        if not e.at.fused:
            x, w, r, b = (e.f32(x), e.f32(w), e.f32(r), b and e.f32(b))
        return cls.of(e, op, x, w, r, b, lengths)

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

    @property
    def columns(self) -> bool:
        """Whether a step holds [units, batch], and weights stand left in its products. [batch, units] otherwise.

        onnxruntime packs the right factor of each product on CPU. That is the weights, in every step, or the batch.
        """
        before = self.op.type.startswith("GRU") and not self.op.attrs.get("linear_before_reset", 0)
        return self.e.at.host and self.steps > FEW and self.batch >= _WIDE and not before

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

    @property
    def units(self) -> int:
        """Which axis of what a step holds is that of the units."""
        return 0 if self.layer.columns else 1

    def turned(self, value: Value) -> Value:
        """[.., batch, units] as steps hold it, or that as [.., batch, units]."""
        return exchanged(self.e, value) if self.layer.columns else value

    def column(self, vector: Value) -> Value:
        """A vector of units, to be added to or multiplied with what a step holds."""
        return self.e.reshape(vector, (*size_of(vector), 1)) if self.layer.columns else vector

    def valid(self) -> Value | None:
        """Which steps lie within their sequence, as steps hold it; None where all do."""
        valid = self.layer.valid()
        return None if valid is None else self.turned(valid)

    def recurrence(self) -> Callable[[Value, Value | None], Value]:
        """``(state, bias) -> the state's part of the gates, bias added``."""
        e, r = self.e, self.r
        if not self.layer.columns:
            return lambda state, bias: product(e, state, r, bias)
        return lambda state, bias: e.Gemm(
            *[v for v in (r, state, bias) if v is not None], shape=(size_of(r)[0], size_of(state)[1])
        )

    def backwards(self) -> Callable[[Value], Value]:
        """``gradient of the state's part of the gates -> gradient of the state``."""
        e, r = self.e, self.e.f32(self.r)
        if not self.layer.columns:
            return lambda dgates: e.MatMul(dgates, r)
        turned = e.transpose(r, [1, 0])
        return lambda dgates: e.MatMul(turned, dgates)

    def over_all(self, values: Value) -> OverAll:
        """Values [steps, batch, units] to be added up over steps and rows."""
        if not self.layer.columns:
            return OverAll(self.e, values, False)
        return OverAll(self.e, self.e.transpose(rows(self.e, values), [1, 0]), True)

    def as_stored(self, gradient: Value) -> Value:
        """A gradient of all steps, rounded where the operator is of 16 bit: as a GPU's products read it."""
        e, read, kind = self.e, self.layer.op.inputs[0], self.layer.x.dtype
        if read is None or read.dtype not in HALF or not (kind in HALF or e.emulates):
            return gradient
        return e.cast(e.cast(gradient, read.dtype), kind)

    def biases(self) -> list[Value | None]:
        """The biases of the input's and of the state's part, each [gates * hidden]."""
        b = self.layer.b
        return [None, None] if b is None else [*split(self.e, pick(self.e, b, self.index, 0), 2)]

    def state(self, state: Value | None) -> Value:
        """This direction's part of a state, [batch, hidden]; zeros where it is left out."""
        layer = self.layer
        state = layer.state(state)
        if state is None:
            wide = "float32" if layer.x.dtype in HALF else layer.x.dtype
            return self.e.zeros((layer.batch, layer.hidden), wide)
        return self.e.f32(pick(self.e, state, self.index, 0))

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
        """For every step the state before it. ``padded``: steps behind a sequence's end hold 0, not a state (of Y)."""
        e, (steps, *sizes) = self.e, size_of(states)
        initial = e.cast(e.reshape(initial, (1, *sizes)), states.dtype)
        if steps == 1:
            return initial
        times = np.arange(steps)
        before = np.clip(times + 1 if self.reverse else times - 1, 0, steps - 1)
        shifted = e.Gather(states, e.const(before), axis=0, shape=states.shape)
        first = self.layer.last() if padded and self.reverse else None
        if first is None:
            first = e.const((times == (steps - 1 if self.reverse else 0)).reshape(-1, 1, 1))
        return e.Where(first, initial, shifted, shape=states.shape)


@dataclass(frozen=True)
class OverAll:
    """Values of units at all steps of all rows: [steps, batch, units], or [units, steps * batch]."""

    e: Emitter
    values: Value
    units_first: bool

    def product(self, b: Value) -> Value:
        """The sum of their products with ``b`` [steps * batch, n], as [units, n]."""
        if not self.units_first:
            return product(self.e, rows(self.e, self.values), b, across=True)
        return self.e.Gemm(self.values, b, shape=(size_of(self.values)[0], size_of(b)[1]))

    def total(self) -> Value:
        """Their sum, [units]."""
        shape = size_of(self.values)
        if self.values.dtype in HALF:
            return summed_to(self.e, self.values, shape[2:], shape)
        units = shape[0 if self.units_first else 2]
        return self.e.reshape(self.e.reduce_sum(self.values, [1] if self.units_first else [0, 1]), (units,))


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
    return results[: len(layer.op.outputs)]  # the rest are inputs that this operator does not have
