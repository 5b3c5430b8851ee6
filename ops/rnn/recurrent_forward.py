"""LSTM, GRU and RNN composed: in the forms that no kernel computes, and on CPU where a gradient follows.

The kernels give no gates, and computing them again takes as long as the forward pass. So where a program trains on CPU
the operator is composed there too, and keeps its gates as they are before their activations.

No kernel takes layout 1. On CUDA the kernels are cuDNN's: default activations without parameters or clipping, no
peepholes, no coupled gates, a GRU that resets after its product; and what they read from host memory, sequence lengths
and the reversal of time, no CUDA graph captures. Formulas: https://onnx.ai/onnx/operators/onnx__LSTM.html.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.nodes import BACKWARD, Operator
from amp_transpiler.ir.opdef import SlotShapes, flops, lowering_rule
from amp_transpiler.ir.types import HALF
from amp_transpiler.ops.common import Grads, size_of
from amp_transpiler.ops.rnn.directions import Direction, Layer, pick, product, rows, sequence_of, split
from amp_transpiler.ops.rnn.gates import Activation, activations, defaults
from amp_transpiler.ops.rnn.recurrence import concat, recur

#: ``cell(the input's part of the gates, states) -> (new states, gates)``; the first state is the output. Gradients take
#: the gates as they are before their activations; of a GRU the state's part of them.
Cell = Callable[[Value, Sequence[Value]], tuple[list[Value], list[Value]]]


def _on_cuda(op: Operator) -> bool:
    """Whether cuDNN computes this form."""
    attrs = op.attrs
    names = [name.lower() for name in attrs.get("activations") or ()]
    default = [name.lower() for name in defaults(op)]
    after = op.type != "GRU" or attrs.get("linear_before_reset", 0) == 1
    parameters = any(name in attrs for name in ("activation_alpha", "activation_beta", "clip"))
    parameters = parameters or bool(attrs.get("input_forget", 0))
    extra = op.input(4) is not None or op.input(7) is not None
    return after and not parameters and not extra and names in ([], default, default * 2)


def _other(op: Operator) -> bool:
    return bool(op.attrs.get("layout", 0)) or op.attrs.get("direction") == "reverse" or not _on_cuda(op)


def _composed_on_cpu(op: Operator) -> bool:
    """Whether it is composed there: a gradient wants what it keeps, or what its recomputed copy does, of equal bits."""
    if op.type == "GRU" and not op.attrs.get("linear_before_reset", 0):
        return False
    weights = op.input(2)
    copies = [] if weights is None else [r for r, _ in weights.readers if r.type == op.type and r.role == BACKWARD]
    return any(_keeps(each) for each in (op, *copies))


def _keeps(op: Operator) -> bool:
    """Whether a gradient wants what a composed operator keeps."""
    y = op.outputs[0]
    return y is not None and any(reader.type == f"{op.type}Grad" for reader, _ in y.readers)


def _ruled(op: Operator) -> bool:
    return _other(op) or _composed_on_cpu(op)


def _kernel(e: Emitter, op: Operator, inputs: Sequence[Value | None]) -> tuple[bool, list[Value] | None]:
    """Whether this place has a kernel for it; if so, the operator at layout 0, or None where it stands as it is."""
    if not (e.at.device and e.at.recurrent and _on_cuda(op)) and (not e.at.host or _composed_on_cpu(op)):
        return False, None
    return True, _emitted(e, op, inputs) if _other(op) else None


def _emitted(e: Emitter, op: Operator, inputs: Sequence[Value | None]) -> list[Value]:
    """The operator itself, at layout 0."""
    x, *rest = inputs
    assert x is not None
    layer = Layer.of(e, op, x, *rest[:2], *rest[2:4])  # type: ignore[arg-type]
    states = [layer.state(state) for state in rest[4:6]]
    shapes = _shapes(layer)[: 3 if op.type == "LSTM" else 2]
    attrs = {name: value for name, value in op.attrs.items() if name != "layout"}
    turned = e.at.device and attrs.get("direction") == "reverse"
    if turned:  # cuDNN's reversal reads from host memory in the run
        attrs["direction"] = "forward"
    given = [_turned(e, layer.x) if turned else layer.x, *rest[:4], *states, *rest[6:]]
    while given[-1] is None:
        given.pop()
    found = e.op(op.type, *given, outputs=len(shapes), **attrs)
    y, *last = (Value(v.name, v.dtype, s) for v, s in zip(found, shapes, strict=True))
    return _at_layout(layer, [_turned(e, y) if turned else y, *last])


def _turned(e: Emitter, value: Value) -> Value:
    """Time reversed."""
    return e.Gather(value, e.const(np.arange(size_of(value)[0])[::-1].copy()), axis=0, shape=value.shape)


def _shapes(layer: Layer) -> list[tuple[int, ...]]:
    state = (layer.directions, layer.batch, layer.hidden)
    return [(layer.steps, *state), state, state]


def _at_layout(layer: Layer, results: Sequence[Value]) -> list[Value]:
    if not layer.first:
        return list(results)
    return [layer.e.transpose(results[0], [2, 0, 1, 3]), *(layer.e.transpose(v, [1, 0, 2]) for v in results[1:])]


def _run(layer: Layer, cell_of: Callable[[Direction], tuple[Cell, list[Value]]]) -> list[Value]:
    """Y and the last states of every direction, stacked."""
    e, found = layer.e, []
    composed = e.at.host and _composed_on_cpu(layer.op)
    keeps, variable = composed and _keeps(layer.op), sequence_of(layer.op)
    held = variable.dtype if composed and variable is not None and _on_cuda(layer.op) else None
    for d in layer.each():
        (cell, states), valid = cell_of(d), d.valid()
        bias, of_state = d.biases()
        if layer.op.type != "GRU" and bias is not None:  # their biases are only ever added
            bias = e.Add(bias, of_state)
        part = product(e, rows(e, layer.x), d.w, bias)
        sequences = [e.reshape(part, (layer.steps, layer.batch, size_of(layer.w)[1]))]

        def step(
            old: Sequence[Value],
            slices: Sequence[Value],
            cell: Cell = cell,
            d: Direction = d,
            valid: Value | None = valid,
        ) -> tuple[list[Value], list[Value]]:
            new, gates = cell(d.turned(slices[0]), old)
            if held is not None and held in HALF:  # as CUDA's kernel feeds its output back
                new[0] = e.stored(new[0], held)
            if valid is not None:
                new = [e.Where(slices[1], n, o, shape=o.shape) for n, o in zip(new, old, strict=True)]
            y = new[0] if valid is None else e.Where(slices[1], new[0], e.like(0, new[0]), shape=new[0].shape)
            return new, [d.turned(y), *gates, *new[1:]] if keeps else [d.turned(y)]

        given = sequences + ([] if valid is None else [valid])
        last, (y, *kept) = recur(e, layer.op, step, [d.turned(state) for state in states], given, d.reverse)
        if keeps:
            d.kept(sequences[0], *kept)
        last = [d.unless_empty(d.turned(state)) for state in last]
        found.append([e.reshape(y, (layer.steps, 1, *size_of(y)[1:])), *last])
    columns: list[list[Value]] = [list(each) for each in zip(*found, strict=True)]
    stacked = [concat(e, [e.reshape(v, (1, *size_of(v))) for v in each], 0) for each in columns[1:]]
    return _at_layout(layer, [concat(e, columns[0], 1), *stacked])


@lowering_rule("RNN", "GRU", "LSTM", native=True, when=_ruled, kernels=lambda at: at.recurrent)
def recurrent(
    e: Emitter,
    op: Operator,
    x: Value,
    w: Value,
    r: Value,
    b: Value | None = None,
    lengths: Value | None = None,
    h0: Value | None = None,
    c0: Value | None = None,
    p: Value | None = None,
) -> Grads | None:
    """An operator of any of the three types: where no kernel computes it, composed in fp32, step by step."""
    has_kernel, given = _kernel(e, op, [x, w, r, b, lengths, h0, c0, p])
    if has_kernel:
        return given
    layer = Layer.of(e, op, e.f32(x), e.f32(w), e.f32(r), b and e.f32(b), lengths)
    kinds = activations(op, layer.directions)

    def cell_of(d: Direction) -> tuple[Cell, list[Value]]:
        if op.type == "LSTM":
            return _lstm(d, kinds[d.index], p), [d.state(h0), d.state(c0)]
        after = op.attrs.get("linear_before_reset", 0)
        rule = _rnn if op.type == "RNN" else _gru_after if after else _gru_before
        return rule(d, kinds[d.index]), [d.state(h0)]

    return _run(layer, cell_of)


def _rnn(d: Direction, kinds: Sequence[Activation]) -> Cell:
    e, (f,), recurrence = d.e, kinds, d.recurrence()

    def cell(part: Value, states: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        gate = recurrence(states[0], part)
        return [f.value(e, gate)], [gate]

    return cell


def _gru_after(d: Direction, kinds: Sequence[Activation]) -> Cell:
    e, (f, g), recurrence, bias = d.e, kinds, d.recurrence(), d.biases()[1]
    bias = None if bias is None else d.column(bias)

    def cell(part: Value, states: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        of_state = recurrence(states[0], bias)
        (xz, xr, xh), (hz, hr, hh) = (split(e, v, 3, d.units) for v in (part, of_state))
        candidate = g.value(e, e.Add(xh, e.Mul(f.value(e, e.Add(xr, hr)), hh)))
        return [_mixed(e, f.value(e, e.Add(xz, hz)), candidate, states[0])], [of_state]

    return cell


def _gru_before(d: Direction, kinds: Sequence[Activation]) -> Cell:
    e, (f, g), bias = d.e, kinds, d.biases()[1]
    parts = [e.transpose(part, [1, 0]) for part in split(e, d.r, 3, 0)]
    biases = [None] * 3 if bias is None else split(e, bias, 3)

    def of(state: Value, x: Value, index: int) -> Value:
        total = e.Add(x, e.MatMul(state, parts[index]))
        added = biases[index]
        return total if added is None else e.Add(total, added)

    def cell(part: Value, states: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        old, (xz, xr, xh) = states[0], split(e, part, 3)
        candidate = g.value(e, of(e.Mul(f.value(e, of(old, xr, 1)), old), xh, 2))
        return [_mixed(e, f.value(e, of(old, xz, 0)), candidate, old)], []

    return cell


def _mixed(e: Emitter, z: Value, candidate: Value, old: Value) -> Value:
    return e.Add(e.Mul(e.Sub(e.like(1, z), z), candidate), e.Mul(z, old))


def _lstm(d: Direction, kinds: Sequence[Activation], p: Value | None) -> Cell:
    e, (f, g, h), recurrence = d.e, kinds, d.recurrence()
    peepholes = None if p is None else [d.column(v) for v in split(e, e.f32(pick(e, p, d.index, 0)), 3)]
    coupled = bool(d.layer.op.attrs.get("input_forget", 0))

    def seen(gate: Value, cell: Value, index: int) -> Value:
        return gate if peepholes is None else e.Add(gate, e.Mul(cell, peepholes[index]))

    def cell(part: Value, states: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        gates = recurrence(states[0], part)
        i, o, forget, c = split(e, gates, 4, d.units)
        old = states[1]
        i = f.value(e, seen(i, old, 0))
        kept = e.Sub(e.like(1, i), i) if coupled else f.value(e, seen(forget, old, 2))
        new = e.Add(e.Mul(old, kept), e.Mul(i, g.value(e, c)))
        return [e.Mul(f.value(e, seen(o, new, 1)), h.value(e, new)), new], [gates]

    return cell


@flops("LSTM", "GRU", "RNN")
def recurrent_flops(attrs: Mapping[str, Any], inputs: SlotShapes, outputs: SlotShapes) -> int:
    """For each step and row the products with W and R of every direction."""
    x, w, r = inputs[:3]
    assert x is not None and w is not None and r is not None
    return 2 * math.prod(x[:2]) * (math.prod(w) + math.prod(r))
