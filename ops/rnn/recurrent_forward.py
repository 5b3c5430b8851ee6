"""LSTM, GRU and RNN in the forms that onnxruntime's own kernels do not compute, composed.

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
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.opdef import SlotShapes, flops, lowering_rule
from amp_transpiler.ops.common import Grads, size_of
from amp_transpiler.ops.rnn.directions import Direction, Layer, pick, product, rows, split
from amp_transpiler.ops.rnn.gates import Activation, activations, defaults
from amp_transpiler.ops.rnn.recurrence import concat, recur
from amp_transpiler.ops.rnn.recurrent_backward import thirds

#: ``cell(the input's part of the gates, states) -> new states``; the first state is the output.
Cell = Callable[[Value, Sequence[Value]], list[Value]]


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


def _has_kernel(e: Emitter, op: Operator) -> bool:
    """Whether this place computes the form, once it is at layout 0."""
    return e.place == "cpu" or (e.place == "cuda" and _on_cuda(op))


def _emitted(e: Emitter, op: Operator, inputs: Sequence[Value | None]) -> list[Value]:
    """The operator itself, at layout 0."""
    x, *rest = inputs
    assert x is not None
    layer = Layer.of(e, op, x, *rest[:2], *rest[2:4])  # type: ignore[arg-type]
    states = [layer.state(state) for state in rest[4:6]]
    shapes = _shapes(layer)[: 3 if op.type == "LSTM" else 2]
    attrs = {name: value for name, value in op.attrs.items() if name != "layout"}
    turned = e.place == "cuda" and attrs.get("direction") == "reverse"
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
    valid = layer.valid()
    for d in layer.each():
        cell, states = cell_of(d)
        part = product(e, rows(e, layer.x), d.w, d.biases()[0])
        sequences = [e.reshape(part, (layer.steps, layer.batch, size_of(layer.w)[1]))]

        def step(old: Sequence[Value], slices: Sequence[Value], cell: Cell = cell) -> tuple[list[Value], list[Value]]:
            new = cell(slices[0], old)
            if valid is None:
                return new, new[:1]
            new = [e.Where(slices[1], n, o, shape=o.shape) for n, o in zip(new, old, strict=True)]
            return new, [e.Where(slices[1], new[0], e.like(0, new[0]), shape=new[0].shape)]

        last, (y,) = recur(e, layer.op, step, states, sequences + ([] if valid is None else [valid]), d.reverse)
        found.append([e.reshape(y, (layer.steps, 1, *size_of(y)[1:])), *(d.unless_empty(state) for state in last)])
    columns: list[list[Value]] = [list(each) for each in zip(*found, strict=True)]
    stacked = [concat(e, [e.reshape(v, (1, *size_of(v))) for v in each], 0) for each in columns[1:]]
    return _at_layout(layer, [concat(e, columns[0], 1), *stacked])


def _product(d: Direction) -> Callable[[Value], Value]:
    """``h -> h @ R.T + Rb`` of this direction."""
    e, r, bias = d.e, d.e.transpose(d.r, [1, 0]), d.biases()[1]
    return lambda h: e.MatMul(h, r) if bias is None else e.Add(e.MatMul(h, r), bias)


@lowering_rule("RNN", when=_other)
def rnn(
    e: Emitter,
    op: Operator,
    x: Value,
    w: Value,
    r: Value,
    b: Value | None = None,
    lengths: Value | None = None,
    h0: Value | None = None,
) -> Grads:
    if _has_kernel(e, op):
        return _emitted(e, op, [x, w, r, b, lengths, h0])
    layer = Layer.of(e, op, x, w, r, b, lengths)
    kinds = activations(op, layer.directions)

    def cell_of(d: Direction) -> tuple[Cell, list[Value]]:
        (f,), product_of = kinds[d.index], _product(d)
        return lambda part, states: [f.value(e, e.Add(part, product_of(states[0])))], [d.state(h0)]

    return _run(layer, cell_of)


@lowering_rule("GRU", when=_other)
def gru(
    e: Emitter,
    op: Operator,
    x: Value,
    w: Value,
    r: Value,
    b: Value | None = None,
    lengths: Value | None = None,
    h0: Value | None = None,
) -> Grads:
    if _has_kernel(e, op):
        return _emitted(e, op, [x, w, r, b, lengths, h0])
    layer = Layer.of(e, op, x, w, r, b, lengths)
    kinds = activations(op, layer.directions)
    rule = _gru_after if op.attrs.get("linear_before_reset", 0) else _gru_before
    return _run(layer, lambda d: (rule(d, kinds[d.index]), [d.state(h0)]))


def _gru_after(d: Direction, kinds: Sequence[Activation]) -> Cell:
    e, (f, g), product_of = d.e, kinds, _product(d)

    def cell(part: Value, states: Sequence[Value]) -> list[Value]:
        (xz, xr, xh), (hz, hr, hh) = split(e, part, 3), split(e, product_of(states[0]), 3)
        candidate = g.value(e, e.Add(xh, e.Mul(f.value(e, e.Add(xr, hr)), hh)))
        return [_mixed(e, f.value(e, e.Add(xz, hz)), candidate, states[0])]

    return cell


def _gru_before(d: Direction, kinds: Sequence[Activation]) -> Cell:
    e, (f, g), bias = d.e, kinds, d.biases()[1]
    parts = [e.transpose(part, [1, 0]) for part in thirds(e, d.r)]
    biases = [None] * 3 if bias is None else split(e, bias, 3)

    def of(state: Value, x: Value, index: int) -> Value:
        total = e.Add(x, e.MatMul(state, parts[index]))
        added = biases[index]
        return total if added is None else e.Add(total, added)

    def cell(part: Value, states: Sequence[Value]) -> list[Value]:
        old, (xz, xr, xh) = states[0], split(e, part, 3)
        candidate = g.value(e, of(e.Mul(f.value(e, of(old, xr, 1)), old), xh, 2))
        return [_mixed(e, f.value(e, of(old, xz, 0)), candidate, old)]

    return cell


def _mixed(e: Emitter, z: Value, candidate: Value, old: Value) -> Value:
    return e.Add(e.Mul(e.Sub(e.like(1, z), z), candidate), e.Mul(z, old))


@lowering_rule("LSTM", when=_other)
def lstm(
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
) -> Grads:
    if _has_kernel(e, op):
        return _emitted(e, op, [x, w, r, b, lengths, h0, c0, p])
    layer = Layer.of(e, op, x, w, r, b, lengths)
    kinds = activations(op, layer.directions)
    return _run(layer, lambda d: (_lstm(d, kinds[d.index], p), [d.state(h0), d.state(c0)]))


def _lstm(d: Direction, kinds: Sequence[Activation], p: Value | None) -> Cell:
    e, (f, g, h), product_of = d.e, kinds, _product(d)
    peepholes = None if p is None else split(e, pick(e, p, d.index, 0), 3)
    coupled = bool(d.layer.op.attrs.get("input_forget", 0))

    def seen(gate: Value, cell: Value, index: int) -> Value:
        return gate if peepholes is None else e.Add(gate, e.Mul(cell, peepholes[index]))

    def cell(part: Value, states: Sequence[Value]) -> list[Value]:
        i, o, forget, c = split(e, e.Add(part, product_of(states[0])), 4)
        old = states[1]
        i = f.value(e, seen(i, old, 0))
        kept = e.Sub(e.like(1, i), i) if coupled else f.value(e, seen(forget, old, 2))
        new = e.Add(e.Mul(old, kept), e.Mul(i, g.value(e, c)))
        return [e.Mul(f.value(e, seen(o, new, 1)), h.value(e, new)), new]

    return cell


@flops("LSTM", "GRU", "RNN")
def recurrent_flops(attrs: Mapping[str, Any], inputs: SlotShapes, outputs: SlotShapes) -> int:
    """For each step and row the products with W and R of every direction."""
    x, w, r = inputs[:3]
    assert x is not None and w is not None and r is not None
    return 2 * math.prod(x[:2]) * (math.prod(w) + math.prod(r))
