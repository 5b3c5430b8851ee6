"""LSTM, GRU and RNN in plain numpy, step by step, in the float type of their inputs: an oracle for tests.

https://onnx.ai/onnx/operators/onnx__LSTM.html with onnxruntime's reading of it: "clip" bounds the input of every
activation but h, "input_forget" makes the forget gate 1 - the input gate, alphas and betas that are not given are
those of the ONNX operators, else 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx

Array = np.ndarray[Any, Any]
Function = Callable[[Array], Array]

#: Value of (x, alpha, beta), and the defaults of what it takes.
ACTIVATIONS: dict[str, tuple[Callable[..., Array], list[float]]] = {
    "Sigmoid": (lambda x: 1 / (1 + np.exp(-x)), []),
    "Tanh": (np.tanh, []),
    "Relu": (lambda x: np.maximum(x, 0), []),
    "Affine": (lambda x, a, b: a * x + b, [0.0, 0.0]),
    "LeakyRelu": (lambda x, a: np.where(x > 0, x, a * x), [0.01]),
    "ThresholdedRelu": (lambda x, a: np.where(x > a, x, 0), [0.0]),
    "ScaledTanh": (lambda x, a, b: a * np.tanh(b * x), [0.0, 0.0]),
    "HardSigmoid": (lambda x, a, b: np.clip(a * x + b, 0, 1), [0.2, 0.5]),
    "Elu": (lambda x, a: np.where(x > 0, x, a * (np.exp(x) - 1)), [1.0]),
    "Softsign": (lambda x: x / (1 + np.abs(x)), []),
    "Softplus": (lambda x: np.log1p(np.exp(x)), []),
}


def _activations(attrs: dict[str, Any], default: Sequence[str], directions: int) -> list[Function]:
    names = attrs.get("activations") or list(default) * directions
    given = list(attrs.get("activation_alpha", ())), list(attrs.get("activation_beta", ()))
    found = []
    for name in names:
        function, standard = ACTIVATIONS[name]
        values = [values.pop(0) if values else s for s, values in zip(standard, given, strict=False)]
        values = [float(np.float32(v)) for v in values]  # an attribute is a 32-bit float
        found.append(lambda x, function=function, values=values: function(x, *values))
    return found


def run(
    type_: str,
    attrs: dict[str, Any],
    x: Array,
    w: Array,
    r: Array,
    b: Array | None = None,
    lengths: Array | None = None,
    h0: Array | None = None,
    c0: Array | None = None,
    p: Array | None = None,
) -> list[Array]:
    """[Y, Y_h] or, of an LSTM, [Y, Y_h, Y_c]."""
    first = attrs.get("layout", 0)
    if first:
        x = x.transpose(1, 0, 2)
        h0, c0 = (None if s is None else s.transpose(1, 0, 2) for s in (h0, c0))
    steps, batch, _ = x.shape
    directions, _, hidden = r.shape
    lengths = np.full(batch, steps) if lengths is None else lengths
    default = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}[type_]
    functions = _activations(attrs, default, directions)
    y = np.zeros((steps, directions, batch, hidden), x.dtype)
    last = [np.zeros((directions, batch, hidden), x.dtype) for _ in range(2)]
    step = {"LSTM": _lstm, "GRU": _gru, "RNN": _rnn}[type_]
    for d in range(directions):
        chosen = functions[d * len(default) : (d + 1) * len(default)]
        backwards = d == 1 or attrs.get("direction") == "reverse"
        bias = np.zeros((2, w.shape[1]), x.dtype) if b is None else b[d].reshape(2, -1)
        hole = np.zeros(3 * hidden, x.dtype) if p is None else p[d]
        for n in range(batch):
            states = [np.zeros(hidden, x.dtype) if s is None else s[d, n] for s in (h0, c0)]
            times = range(int(lengths[n]))
            for t in reversed(times) if backwards else times:
                states = step(attrs, chosen, x[t, n], states, w[d], r[d], bias, hole)
                y[t, d, n] = states[0]
            if lengths[n]:  # of an empty sequence the last states are 0, not the initial ones
                last[0][d, n], last[1][d, n] = states
    outputs = [y, last[0], last[1]][: 3 if type_ == "LSTM" else 2]
    if first:
        outputs = [outputs[0].transpose(2, 0, 1, 3), *(s.transpose(1, 0, 2) for s in outputs[1:])]
    return outputs


def _clipped(attrs: dict[str, Any], value: Array) -> Array:
    clip = float(np.float32(attrs.get("clip", 0)))
    return np.clip(value, -clip, clip) if clip else value


def _lstm(
    attrs: dict[str, Any],
    functions: Sequence[Function],
    x: Array,
    states: list[Array],
    w: Array,
    r: Array,
    bias: Array,
    hole: Array,
) -> list[Array]:
    f, g, h = functions
    old, cell = states
    i, o, forget, c = np.split(w @ x + r @ old + bias.sum(0), 4)
    pi, po, pf = np.split(hole, 3)
    opened = f(_clipped(attrs, i + pi * cell))
    kept = 1 - opened if attrs.get("input_forget") else f(_clipped(attrs, forget + pf * cell))
    cell = kept * cell + opened * g(_clipped(attrs, c))
    return [f(_clipped(attrs, o + po * cell)) * h(cell), cell]


def _gru(
    attrs: dict[str, Any],
    functions: Sequence[Function],
    x: Array,
    states: list[Array],
    w: Array,
    r: Array,
    bias: Array,
    hole: Array,
) -> list[Array]:
    f, g = functions
    old = states[0]
    xz, xr, xh = np.split(w @ x + bias[0], 3)
    rz, rr, rh = np.split(r, 3)
    bz, br, bh = np.split(bias[1], 3)
    z, reset = f(_clipped(attrs, xz + rz @ old + bz)), f(_clipped(attrs, xr + rr @ old + br))
    linear = reset * (rh @ old + bh) if attrs.get("linear_before_reset") else rh @ (reset * old) + bh
    candidate = g(_clipped(attrs, xh + linear))
    return [(1 - z) * candidate + z * old, states[1]]


def _rnn(
    attrs: dict[str, Any],
    functions: Sequence[Function],
    x: Array,
    states: list[Array],
    w: Array,
    r: Array,
    bias: Array,
    hole: Array,
) -> list[Array]:
    return [functions[0](_clipped(attrs, w @ x + r @ states[0] + bias.sum(0))), states[1]]


def uneven(model: onnx.ModelProto) -> list[str]:
    """Splits and Concats of more than 32 tensors, or of tensors of different sizes."""
    graph = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True).graph
    sizes = {
        i.name: [d.dim_value for d in i.type.tensor_type.shape.dim]
        for i in (*graph.value_info, *graph.input, *graph.output)
    }
    sizes |= {t.name: list(t.dims) for t in graph.initializer}
    many = {"Split": lambda node: node.output, "Concat": lambda node: node.input}
    parts = [(node.name, many[node.op_type](node)) for node in graph.node if node.op_type in many]
    return [name for name, each in parts if len(each) > 32 or any(sizes[t] != sizes[each[0]] for t in each)]
