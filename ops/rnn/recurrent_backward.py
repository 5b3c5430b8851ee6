"""Gradients of LSTM, GRU and RNN: back-propagation through time.

Notation of https://onnx.ai/onnx/operators/onnx__LSTM.html. What the forward operator has not kept is computed again
from its output Y: the previous hidden state of every step is Y shifted by one, so the gates of all steps are
two matrix products. The recurrences that are left hold no more than they must: the cell states of an LSTM, and the
gradients of the states, backwards. A step of these is a matrix product and a few elementwise operators, because
each gate's gradient is the state's times a factor that is known for all steps. The gradients of weights and
input are large matrix products again. Arithmetic is fp32, but for the products of all steps on a GPU: of what is 16 bit
these are products of 16 bit, which take the gates' gradients rounded. Each result is rounded once.

With sequence lengths, a state passes unchanged through the steps behind a sequence's end, in both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.opdef import gradient, traits
from amp_transpiler.ops.common import Grads, size_of, sliced
from amp_transpiler.ops.gpu_kernels import plus_product
from amp_transpiler.ops.rnn.directions import Direction, Layer, assembled, pick, product, rows, split
from amp_transpiler.ops.rnn.gates import Activation, activations, unknown
from amp_transpiler.ops.rnn.recurrence import concat, recur

#: Gradients of one direction, by forward input slot.
Found = dict[int, Value]
#: ``back(states, slices) -> (gradients of the previous states, outputs)``; the first state is dh, dY included.
Back = Callable[[list[Value], Sequence[Value]], tuple[list[Value], list[Value]]]


def _backwards(
    d: Direction, back: Back, states: list[Value], sequences: list[Value], dy: Value | None
) -> tuple[list[Value], list[Value]]:
    """Run ``back`` against the direction's time. Where a step is behind the sequence's end, states pass unchanged.

    States before and after, and what ``back`` gives, are [batch, units]; ``back`` and the sequences have them as steps
    hold them. What is turned in a step is in the cache, and onnxruntime moves no Transpose into it.
    """
    e, dys, valid = d.e, d.sequence(dy), d.valid()
    dys = None if dys is None else e.f32(dys)
    extra = [v for v in (dys, valid) if v is not None]

    def step(old: Sequence[Value], slices: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        own, rest = slices[: len(sequences)], list(slices[len(sequences) :])
        arrived = list(old)
        if dys is not None:
            arrived[0] = e.Add(arrived[0], d.turned(rest.pop(0)))
        new, outputs = back(arrived, own)
        if valid is not None:
            new = [e.Where(rest[0], n, o, shape=o.shape) for n, o in zip(new, old, strict=True)]
        return new, [d.turned(output) for output in outputs]

    given = [d.turned(state) for state in states]
    found, outputs = recur(e, d.layer.op, step, given, sequences + extra, reverse=not d.reverse)
    return [d.turned(state) for state in found], outputs


def _within(d: Direction, factors: Value) -> Value:
    """Factors of gradients, 0 behind the end of a sequence."""
    valid = d.valid()
    return factors if valid is None else d.e.Where(valid, factors, d.e.like(0, factors), shape=factors.shape)


def _of_weights(d: Direction, of_input: Value, of_state: Value, previous: Value | None) -> Found:
    """Gradients of X, W, B and, from the previous states, R.

    They come from those [steps, batch, gates * hidden] of the input's and the state's part of the gates.
    """
    e, found = d.e, Found()
    same, of_input = of_state is of_input, d.as_stored(of_input)
    if e.wants(0):
        flat, w = rows(e, of_input), d.w
        found[0] = e.Gemm(flat, w, shape=(size_of(flat)[0], size_of(w)[1]))
    over_input = d.over_all(of_input)
    over_state = over_input if same else d.over_all(d.as_stored(of_state))
    if e.wants(1):
        found[1] = over_input.product(rows(e, d.layer.x))
    if e.wants(2) and previous is not None:
        found[2] = over_state.product(rows(e, previous))
    if e.wants(3):
        first = over_input.total()
        second = first if over_state is over_input else over_state.total()
        found[3] = concat(e, [first, second], 0)
    return found


def _parts(d: Direction, previous: Value) -> tuple[Value, Value]:
    """The input's and the state's part of all gates, as steps hold them, biases included."""
    e, layer, kept = d.e, d.layer, d.kept()
    if kept is not None:
        return d.turned(kept[0]), kept[1]
    of_input, of_state = d.biases()
    shape = (layer.steps, layer.batch, size_of(layer.w)[1])
    return (
        d.turned(e.f32(e.reshape(product(e, rows(e, layer.x), d.w, of_input), shape))),
        d.turned(e.f32(e.reshape(product(e, rows(e, previous), d.r, of_state), shape))),
    )


def _gates(d: Direction, previous: Value) -> Value:
    """All gates, the sum of the two parts, of an operator that is no GRU."""
    e, layer, kept = d.e, d.layer, d.kept()
    if kept is not None:
        return kept[1]
    bias, of_state = d.biases()
    if bias is not None and of_state is not None:
        bias = e.cast(e.Add(e.f32(bias), e.f32(of_state)), bias.dtype)
    gates = product(e, rows(e, previous), d.r, product(e, rows(e, layer.x), d.w, bias))
    return d.turned(e.f32(e.reshape(gates, (layer.steps, layer.batch, size_of(layer.w)[1]))))


# -- RNN and GRU, which have one state --------------------------------------------------------------------------------
def of_one_state(
    e: Emitter,
    op: Operator,
    x: Value,
    w: Value,
    r: Value,
    b: Value | None,
    lengths: Value | None,
    h0: Value | None,
    y: Value,
    dy: Value | None,
    dlast: Value | None,
) -> Grads:
    rule = _rnn
    if op.type == "GRUGrad":
        rule = _gru_after if op.attrs.get("linear_before_reset", 0) else _gru_before
    if rule is _gru_before:
        x, w, r, b = e.f32(x), e.f32(w), e.f32(r), b and e.f32(b)
    layer = Layer.in_products(e, op, x, w, r, b, lengths)
    kinds = activations(op, layer.directions)
    return assembled(layer, [rule(d, kinds[d.index], h0, y, dy, dlast) for d in layer.each()])


for _type in ("RNN", "GRU"):
    gradient(_type, "x0 x1 x2 x3 x4 x5 y0 dy0 dy1", inputs=[0, 1, 2, 3, 5], native=True, refuse=unknown)(of_one_state)


def _rnn(
    d: Direction, kinds: Sequence[Activation], h0: Value | None, y: Value, dy: Value | None, dlast: Value | None
) -> Found:
    e, (f,) = d.e, kinds
    previous = _previous(d, y, h0)
    _, slope = f(e, _gates(d, previous))
    through = d.backwards()

    def back(states: list[Value], slices: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        dgate = e.Mul(states[0], slices[0])
        return [through(dgate)], [dgate]

    (dh,), (dgates,) = _backwards(d, back, [d.last(dlast)], [_within(d, slope)], dy)
    return _of_weights(d, dgates, dgates, previous) | {5: dh}


def _previous(d: Direction, y: Value, h0: Value | None) -> Value:
    sequence = d.sequence(y)
    assert sequence is not None
    return d.previous(d.e.cast(sequence, d.layer.x.dtype), d.state(h0), padded=True)


# -- LSTM ------------------------------------------------------------------------------------------------------------
@gradient(
    "LSTM",
    reads="x0 x1 x2 x3 x4 x5 x6 x7 y0 dy0 dy1 dy2",
    inputs=[0, 1, 2, 3, 5, 6, 7],
    native=True,
    refuse=unknown,
)
def lstm(
    e: Emitter,
    op: Operator,
    x: Value,
    w: Value,
    r: Value,
    b: Value | None,
    lengths: Value | None,
    h0: Value | None,
    c0: Value | None,
    p: Value | None,
    y: Value,
    dy: Value | None,
    dlast: Value | None,
    dcell: Value | None,
) -> Grads:
    layer = Layer.in_products(e, op, x, w, r, b, lengths)
    kinds = activations(op, layer.directions)
    return assembled(layer, [_lstm(_Cells.of(d, kinds[d.index], h0, c0, p, y), dy, dlast, dcell) for d in layer.each()])


@dataclass(frozen=True)
class _Cells:
    """The gates before their activations, and the cell states, of one direction of an LSTM."""

    d: Direction
    kinds: Sequence[Activation]
    coupled: bool  # the forget gate is 1 - input gate
    previous: Value
    gates: list[Value]  # input, output, forget, cell; each [steps, batch, hidden], as steps hold it
    peepholes: list[Value] | None  # input, output, forget; each [hidden]
    before: Value  # the cell state before each step, as steps hold it
    after: Value

    @classmethod
    def of(
        cls, d: Direction, kinds: Sequence[Activation], h0: Value | None, c0: Value | None, p: Value | None, y: Value
    ) -> _Cells:
        e, coupled = d.e, bool(d.layer.op.attrs.get("input_forget", 0))
        previous = _previous(d, y, h0)
        i, o, f, c = split(e, _gates(d, previous), 4, 1 + d.units)
        peepholes = None if p is None else [d.column(v) for v in split(e, e.f32(pick(e, p, d.index, 0)), 3)]
        initial = d.turned(d.state(c0))
        kept = d.kept()
        after = _cells(d, kinds, coupled, [i, f, c], peepholes, initial) if kept is None else kept[2]
        before = d.previous(after, initial)
        if peepholes is not None:
            i, f = e.Add(i, e.Mul(before, peepholes[0])), e.Add(f, e.Mul(before, peepholes[2]))
            o = e.Add(o, e.Mul(after, peepholes[1]))
        return cls(d, kinds, coupled, previous, [i, o, f, c], peepholes, before, after)


def _cells(
    d: Direction,
    kinds: Sequence[Activation],
    coupled: bool,
    gates: Sequence[Value],
    peepholes: Sequence[Value] | None,
    initial: Value,
) -> Value:
    """The cell state after every step. Without peepholes the gates are known before the recurrence."""
    e, valid = d.e, d.valid()
    f, g, _ = kinds

    def opened(i: Value, forget: Value) -> list[Value]:
        i = f.value(e, i)
        return [i, e.Sub(e.like(1, i), i) if coupled else f.value(e, forget)]

    candidate = g.value(e, gates[2])
    sequences = [*gates[:2], candidate]
    if peepholes is None:
        i, forget = opened(*gates[:2])
        sequences = [e.Mul(i, candidate), forget]

    def step(states: Sequence[Value], slices: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        old = states[0]
        if peepholes is None:
            added, forget = slices[:2]
        else:
            i, forget = opened(*(e.Add(v, e.Mul(old, p)) for v, p in zip(slices[:2], peepholes[::2], strict=True)))
            added = e.Mul(i, slices[2])
        new = plus_product(e, added, old, forget)
        if valid is not None:
            new = e.Where(slices[-1], new, old, shape=old.shape)
        return [new], [new]

    _, (cells,) = recur(e, d.layer.op, step, [initial], [*sequences, *([] if valid is None else [valid])], d.reverse)
    return cells


def _lstm(cells: _Cells, dy: Value | None, dlast: Value | None, dcell: Value | None) -> Found:
    d, e = cells.d, cells.d.e
    f, g, h = cells.kinds
    (i, i_slope), (o, o_slope), (forget, f_slope) = (f(e, gate) for gate in cells.gates[:3])
    c, c_slope = g(e, cells.gates[3])
    squashed, h_slope = h(e, cells.after)
    to_cell = _within(d, e.Mul(o, h_slope))
    of_input, of_forget = c, cells.before
    if cells.coupled:
        of_input, of_forget = e.Sub(c, cells.before), e.zeros(size_of(c), c.dtype)
        forget = e.Sub(e.like(1, i), i)
    factors = [e.Mul(of_input, i_slope), e.Mul(squashed, o_slope), e.Mul(of_forget, f_slope), e.Mul(i, c_slope)]
    through, peepholes = d.backwards(), cells.peepholes

    def back(states: list[Value], slices: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        (dh, dc), (factor, to_c, keep) = states, slices
        dc = plus_product(e, dc, dh, to_c)
        if peepholes is not None:
            dc = e.Add(dc, e.Mul(e.Mul(dh, split(e, factor, 4, d.units)[1]), peepholes[1]))
        dgates = e.Mul(concat(e, [dc, dh, dc, dc], d.units), factor)
        dc = e.Mul(dc, keep)
        if peepholes is not None:
            di, _, df, _ = split(e, dgates, 4, d.units)
            dc = e.Add(dc, e.Add(e.Mul(di, peepholes[0]), e.Mul(df, peepholes[2])))
        return [through(dgates), dc], [dgates]

    states, sequences = [d.last(dlast), d.last(dcell)], [_within(d, concat(e, factors, 1 + d.units)), to_cell, forget]
    (dh0, dc0), (dgates,) = _backwards(d, back, states, sequences, dy)
    found = _of_weights(d, dgates, dgates, cells.previous) | {5: dh0, 6: dc0}
    if peepholes is not None and e.wants(7):
        di, do, df, _ = split(e, dgates, 4)
        seen = d.turned(concat(e, [cells.before, cells.after, cells.before], 1 + d.units))
        total = e.reduce_sum(e.Mul(concat(e, [di, do, df], 2), seen), [0, 1])
        found[7] = e.reshape(total, (3 * d.layer.hidden,))
    return found


def _gru_after(
    d: Direction, kinds: Sequence[Activation], h0: Value | None, y: Value, dy: Value | None, dlast: Value | None
) -> Found:
    """The reset gate applied to the state's product: every gate's gradient is a multiple of dh."""
    e, (f, g) = d.e, kinds
    previous = _previous(d, y, h0)
    axis = 1 + d.units
    (xz, xr, xh), (hz, hr, hh) = (split(e, part, 3, axis) for part in _parts(d, previous))
    z, z_slope = f(e, e.Add(xz, hz))
    reset, reset_slope = f(e, e.Add(xr, hr))
    candidate, slope = g(e, e.Add(xh, e.Mul(reset, hh)))
    dz = e.Mul(e.Sub(e.f32(d.turned(previous)), candidate), z_slope)
    dcandidate = e.Mul(e.Sub(e.like(1, z), z), slope)
    dreset = e.Mul(dcandidate, e.Mul(hh, reset_slope))
    factors = _within(d, concat(e, [dz, dreset, e.Mul(dcandidate, reset)], axis))
    through = d.backwards()

    def back(states: list[Value], slices: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        dh, (factor, keep) = states[0], slices
        dgates = _times_each(e, dh, factor) if e.at.fused else e.Mul(concat(e, [dh] * 3, d.units), factor)
        return [plus_product(e, through(dgates), dh, keep)], [dh, dgates]

    (dh0,), (dh, of_state) = _backwards(d, back, [d.last(dlast)], [factors, z], dy)
    dz, dreset, _ = split(e, of_state, 3)
    of_input = concat(e, [dz, dreset, e.Mul(dh, d.turned(_within(d, dcandidate)))], 2)
    return _of_weights(d, of_input, of_state, previous) | {5: dh0}


def _times_each(e: Emitter, dh: Value, factors: Value) -> Value:
    """A matrix times each of several that stand side by side."""
    (count, width), whole = size_of(dh), size_of(factors)
    apart = (count, whole[1] // width, width)
    return e.reshape(e.Mul(e.reshape(factors, apart), e.reshape(dh, (count, 1, width)), shape=apart), whole)


def _gru_before(
    d: Direction, kinds: Sequence[Activation], h0: Value | None, y: Value, dy: Value | None, dlast: Value | None
) -> Found:
    """The reset gate applied to the state itself, before the candidate's product."""
    e, (f, g) = d.e, kinds
    hidden = d.layer.hidden
    previous = _previous(d, y, h0)
    of_input, of_state = _parts(d, previous)
    (xz, xr, xh), (hz, hr, _) = split(e, of_input, 3), split(e, of_state, 3)
    r = d.r
    *_, last = split(e, r, 3, 0)
    gates = sliced(e, r, 0, 0, 2 * hidden)
    z, z_slope = f(e, e.Add(xz, hz))
    reset, reset_slope = f(e, e.Add(xr, hr))
    kept = rows(e, e.Mul(reset, previous))
    bias = d.biases()[1]
    linear = product(e, kept, last, None if bias is None else split(e, bias, 3)[2])
    candidate, slope = g(e, e.Add(xh, e.reshape(linear, size_of(xh))))
    factor_z = e.Mul(e.Sub(previous, candidate), z_slope)
    factor_h = e.Mul(e.Sub(e.like(1, z), z), slope)
    factor_r = e.Mul(previous, reset_slope)
    sequences = [*(_within(d, v) for v in (factor_z, factor_r, factor_h)), z, reset]

    def back(states: list[Value], slices: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        dh, (kz, kr, kh, keep, opened) = states[0], slices
        dcandidate = e.Mul(dh, kh)
        dkept = e.MatMul(dcandidate, last)
        dgates = concat(e, [e.Mul(dh, kz), e.Mul(dkept, kr)], 1)
        through = e.Add(e.Mul(dkept, opened), e.Mul(dh, keep))
        return [e.Add(e.MatMul(dgates, gates), through)], [dgates, dcandidate]

    (dh0,), (dgates, dcandidate) = _backwards(d, back, [d.last(dlast)], sequences, dy)
    each = [*split(e, dgates, 2), dcandidate]
    dgates = concat(e, each, 2)
    found = _of_weights(d, dgates, dgates, None) | {5: dh0}
    if e.wants(2):
        states = [rows(e, v) for v in (previous, previous)] + [kept]
        found[2] = concat(e, [product(e, rows(e, g), s, across=True) for g, s in zip(each, states, strict=True)], 0)
    return found


traits("GRU", "LSTM", "RNN", biases=(3,), starts=(5,))
traits("LSTM", starts=(5, 6))
