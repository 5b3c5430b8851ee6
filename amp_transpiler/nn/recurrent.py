"""Recurrent layers: LSTM and GRU, stacked, in one or both directions."""

from __future__ import annotations

import math

import numpy as np

from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.ir.types import ONNX_TYPES
from amp_transpiler.lists.paddle import paddle_arguments
from amp_transpiler.nn.building import (
    FLOATING,
    INTEGER,
    Builder,
    describe,
    fixed,
    layer_name,
    variable,
    whole,
)
from amp_transpiler.nn.initializer import Uniform
from amp_transpiler.nn.parameters import Attr, ParamAttr, parameter, required
from amp_transpiler.ops.rnn.gates import GATES
from amp_transpiler.option_checks import choice

_DIRECTIONS = ("forward", "reverse", "bidirectional")


@paddle_arguments("nn.input", "nn.weights")
def lstm(
    x: Variable,
    hidden_size: int,
    num_layers: int = 1,
    direction: str = "forward",
    time_major: bool = False,
    initial_states: tuple[Variable, Variable] | None = None,
    sequence_length: Variable | None = None,
    param_attr: Attr = None,
    bias_attr: Attr = None,
    name: str | None = None,
) -> tuple[Variable, Variable, Variable]:
    """Long short-term memory (Hochreiter & Schmidhuber 1997, with forget gates), ``num_layers`` deep.

    ``x``: float [batch, steps, width], or [steps, batch, width] with ``time_major``; the width is known.
    ``direction``: "forward", "reverse" or "bidirectional" (D = 2 directions, else 1). ``initial_states``: h and c, each
    [num_layers * D, batch, hidden_size]; zeros by default. ``sequence_length``: int32 [batch]; steps behind a
    sequence's end give 0 and leave its states alone.

    Returns y, in the layout of ``x`` with D * hidden_size features, and the last h and c, each
    [num_layers * D, batch, hidden_size].

    Layer i has w_<2i> [D, 4 * hidden_size, width], w_<2i+1> [D, 4 * hidden_size, hidden_size] and the bias b_<i>
    [D, 8 * hidden_size], with the gates in ONNX's order (input, output, forget, cell); all start uniform within
    1 / sqrt(hidden_size), as Paddle's and torch's. ``param_attr`` is for all weights and ``bias_attr`` for all biases;
    ``bias_attr=False`` leaves them out. ArgumentError: an unknown direction, width or number of directions that do
    not fit.
    """
    states = _pair("lstm", initial_states)
    y, last = _stack(
        "LSTM", x, hidden_size, num_layers, direction, time_major, states, sequence_length, param_attr, bias_attr, name
    )
    return y, last[0], last[1]


@paddle_arguments("nn.input", "nn.weights")
def gru(
    x: Variable,
    hidden_size: int,
    num_layers: int = 1,
    direction: str = "forward",
    time_major: bool = False,
    initial_states: Variable | None = None,
    sequence_length: Variable | None = None,
    param_attr: Attr = None,
    bias_attr: Attr = None,
    name: str | None = None,
) -> tuple[Variable, Variable]:
    """Gated recurrent unit (Cho et al. 2014), its reset gate applied after the product, as in Paddle and torch.

    As :func:`lstm`, with one state: returns y and the last h. The weights of layer i are w_<2i>
    [D, 3 * hidden_size, width], w_<2i+1> [D, 3 * hidden_size, hidden_size] and b_<i> [D, 6 * hidden_size], with the
    gates in ONNX's order (update, reset, candidate).
    """
    y, last = _stack(
        "GRU",
        x,
        hidden_size,
        num_layers,
        direction,
        time_major,
        [initial_states],
        sequence_length,
        param_attr,
        bias_attr,
        name,
    )
    return y, last[0]


def _pair(call: str, states: tuple[Variable, Variable] | None) -> list[Variable | None]:
    if states is None:
        return [None, None]
    if not isinstance(states, (tuple, list)) or len(states) != 2:
        raise ArgumentTypeError(f"{call}: initial_states must be two variables, h and c, not {states!r}")
    return list(states)


def _stack(
    type_: str,
    x: Variable,
    hidden: int,
    layers: int,
    direction: str,
    time_major: bool,
    states: list[Variable | None],
    lengths: Variable | None,
    param_attr: Attr,
    bias_attr: Attr,
    name: str | None,
) -> tuple[Variable, list[Variable]]:
    call = type_.lower()
    variable(call, "x", x, dtypes=FLOATING, rank=3)
    hidden, layers = whole(call, "hidden_size", hidden), whole(call, "num_layers", layers)
    choice(f"{call}: direction", direction, _DIRECTIONS)
    required(call, "param_attr", param_attr)
    for argument, attr, count in (("param_attr", param_attr, 2 * layers), ("bias_attr", bias_attr, layers)):
        named = isinstance(attr, (str, Variable)) or (isinstance(attr, ParamAttr) and attr.name is not None)
        if named and count > 1:
            raise ArgumentError(
                f"{call}: {argument} names one parameter, and the layer has {count} that it is for; "
                "name the layer by name=: its parameters are <name>.w_0, <name>.w_1, …"
            )
    fixed(call, "x", x, 2)
    directions = 2 if direction == "bidirectional" else 1
    for state in states:
        _check_state(call, state, layers * directions, hidden)
    if lengths is not None:
        variable(call, "sequence_length", lengths, dtypes=INTEGER, rank=1)
    name = layer_name(call, name)
    put = Builder(call, name)
    if lengths is not None and lengths.dtype != "int32":
        lengths = put("Cast", lengths, to=ONNX_TYPES["int32"])
    y = x if time_major else put("Transpose", x, perm=[1, 0, 2])
    parts = [_layers_of(put, state, layers, directions) for state in states]
    last = []
    for layer in range(layers):
        attrs = {"hidden_size": hidden, "direction": direction}
        if type_ == "GRU":
            attrs["linear_before_reset"] = 1
        weights = _weights(call, type_, y, hidden, directions, layer, param_attr, bias_attr, name)
        inputs = [y, *weights, lengths, *(part[layer] for part in parts)]
        y, *ends = put.several(1 + len(states), type_, *inputs, **attrs)
        last.append(ends)
        y = _merged(put, y, directions, hidden)
    if not time_major:
        y = put("Transpose", y, perm=[1, 0, 2])
    return y, [_joined(put, list(column)) for column in zip(*last, strict=True)]


def _check_state(call: str, state: Variable | None, count: int, hidden: int) -> None:
    if state is None:
        return
    variable(call, "initial_states", state, dtypes=FLOATING, rank=3)
    assert state.shape is not None
    for axis, size in ((0, count), (2, hidden)):
        if isinstance(state.shape[axis], int) and state.shape[axis] != size:
            raise ArgumentError(f"{call}: initial_states {describe(state)} must be [{count}, batch, {hidden}]")


def _layers_of(put: Builder, state: Variable | None, layers: int, directions: int) -> list[Variable | None]:
    """The part of an initial state that belongs to each layer."""
    if state is None or layers == 1:
        return [state] * layers
    sizes = np.full(layers, directions, np.int64)
    return [*put.several(layers, "Split", state, sizes, axis=0)]


def _weights(
    call: str,
    type_: str,
    x: Variable,
    hidden: int,
    directions: int,
    layer: int,
    param_attr: Attr,
    bias_attr: Attr,
    name: str,
) -> list[Variable | None]:
    rows, width = GATES[type_] * hidden, fixed(call, "x", x, 2)
    start = Uniform(-1 / math.sqrt(hidden), 1 / math.sqrt(hidden))
    first = parameter(call, f"{name}.w_{2 * layer}", [directions, rows, width], x.dtype, param_attr, start)
    second = parameter(call, f"{name}.w_{2 * layer + 1}", [directions, rows, hidden], x.dtype, param_attr, start)
    if bias_attr is False:
        return [first, second, None]
    return [first, second, parameter(call, f"{name}.b_{layer}", [directions, 2 * rows], x.dtype, bias_attr, start)]


def _merged(put: Builder, y: Variable, directions: int, hidden: int) -> Variable:
    """[steps, directions, batch, hidden] as [steps, batch, directions * hidden]."""
    if directions == 1:
        return put("Squeeze", y, np.array([1], np.int64))
    y = put("Transpose", y, perm=[0, 2, 1, 3])
    return put("Reshape", y, np.array([0, 0, directions * hidden], np.int64))


def _joined(put: Builder, states: list[Variable]) -> Variable:
    if len(states) == 1:
        return states[0]
    return put("Concat", *states, axis=0)
