"""The activations of recurrent operators and their slopes.

Formulas: https://onnx.ai/onnx/operators/onnx__LSTM.html. Where alpha or beta are not given, onnxruntime's defaults
hold, as it computes the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from amp_transpiler.errors import GraphError
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ops.common import scaled_by, size_of


def _shifted(e: Emitter, x: Value, number: float) -> Value:
    return x if number == 0 else e.Add(x, e.like(number, x))


def _one_minus(e: Emitter, x: Value) -> Value:
    return e.Sub(e.like(1, x), x)


def _squared(e: Emitter, x: Value) -> Value:
    return e.Mul(x, x)


def _where(e: Emitter, condition: Value, x: float | Value, y: float | Value, like: Value) -> Value:
    first, second = (v if isinstance(v, Value) else e.like(v, like) for v in (x, y))
    return e.Where(condition, first, second, shape=condition.shape)


def _positive(e: Emitter, x: Value) -> Value:
    return e.Greater(x, e.like(0, x))


def _hard(e: Emitter, x: Value, a: float, b: float) -> Value:
    line = _shifted(e, scaled_by(e, x, a), b)
    return e.Max(e.Min(line, e.like(1, x)), e.like(0, x))


def _softplus(e: Emitter, x: Value) -> Value:
    """log(1 + exp(x)) without overflow."""
    tail = e.Log(_shifted(e, e.Exp(e.Neg(e.Abs(x))), 1))
    return e.Add(e.Max(x, e.like(0, x)), tail)


@dataclass(frozen=True)
class _Kind:
    """``value(e, x, alpha, beta)``, ``slope(e, x, y, alpha, beta)`` and the defaults of what it takes."""

    value: Callable[[Emitter, Value, float, float], Value]
    slope: Callable[[Emitter, Value, Value, float, float], Value]
    alpha: float | None = None
    beta: float | None = None


_KINDS: dict[str, _Kind] = {
    "sigmoid": _Kind(lambda e, x, a, b: e.Sigmoid(x), lambda e, x, y, a, b: e.Mul(y, _one_minus(e, y))),
    "tanh": _Kind(lambda e, x, a, b: e.Tanh(x), lambda e, x, y, a, b: _one_minus(e, _squared(e, y))),
    "relu": _Kind(lambda e, x, a, b: e.Relu(x), lambda e, x, y, a, b: _where(e, _positive(e, x), 1, 0, x)),
    "affine": _Kind(
        lambda e, x, a, b: _shifted(e, scaled_by(e, x, a), b),
        lambda e, x, y, a, b: e.Expand(e.like(a, x), e.ints(*size_of(x)), shape=x.shape),
        0.0,
        0.0,
    ),
    "leakyrelu": _Kind(
        lambda e, x, a, b: e.Where(_positive(e, x), x, e.Mul(x, e.like(a, x))),
        lambda e, x, y, a, b: _where(e, _positive(e, x), 1, a, x),
        0.01,
    ),
    "thresholdedrelu": _Kind(
        lambda e, x, a, b: e.Where(e.Greater(x, e.like(a, x)), x, e.like(0, x)),
        lambda e, x, y, a, b: _where(e, e.Greater(x, e.like(a, x)), 1, 0, x),
        0.0,
    ),
    "scaledtanh": _Kind(
        lambda e, x, a, b: scaled_by(e, e.Tanh(scaled_by(e, x, b)), a),
        lambda e, x, y, a, b: scaled_by(e, _one_minus(e, _squared(e, e.Tanh(scaled_by(e, x, b)))), a * b),
        0.0,
        0.0,
    ),
    "hardsigmoid": _Kind(
        _hard,
        lambda e, x, y, a, b: _where(e, e.And(_positive(e, y), e.Less(y, e.like(1, y))), a, 0, x),
        0.2,
        0.5,
    ),
    "elu": _Kind(
        lambda e, x, a, b: e.Where(_positive(e, x), x, e.Mul(_shifted(e, e.Exp(x), -1), e.like(a, x))),
        lambda e, x, y, a, b: _where(e, _positive(e, x), 1, _shifted(e, y, a), x),
        1.0,
    ),
    "softsign": _Kind(
        lambda e, x, a, b: e.Div(x, _shifted(e, e.Abs(x), 1)),
        lambda e, x, y, a, b: _squared(e, _one_minus(e, e.Abs(y))),
    ),
    "softplus": _Kind(lambda e, x, a, b: _softplus(e, x), lambda e, x, y, a, b: e.Sigmoid(x)),
}


@dataclass(frozen=True)
class Activation:
    """One activation of one direction, with the clipping of what goes into it (0: none)."""

    kind: _Kind
    alpha: float
    beta: float
    clip: float

    def __call__(self, e: Emitter, x: Value) -> tuple[Value, Value]:
        """Its value and its slope at ``x``; the slope is 0 where ``x`` is clipped."""
        bounded = self._bounded(e, x)
        y = self.kind.value(e, bounded, self.alpha, self.beta)
        slope = self.kind.slope(e, bounded, y, self.alpha, self.beta)
        if not self.clip:
            return y, slope
        return y, e.Where(e.Greater(e.Abs(x), e.like(self.clip, x)), e.like(0, x), slope, shape=x.shape)

    def value(self, e: Emitter, x: Value) -> Value:
        """Its value at ``x``."""
        return self.kind.value(e, self._bounded(e, x), self.alpha, self.beta)

    def _bounded(self, e: Emitter, x: Value) -> Value:
        return e.Max(e.Min(x, e.like(self.clip, x)), e.like(-self.clip, x)) if self.clip else x


#: Rows of the weights for each unit of the state.
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
_DEFAULTS = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}


def defaults(op: Operator) -> tuple[str, ...]:
    """The activations of one direction where the operator, or the one whose gradient it is, names none."""
    return _DEFAULTS[op.type.removesuffix("Grad")]


def adds_both_biases(op: Operator) -> bool:
    """Whether it is recurrent and of its two biases only the sum counts: a GRU may reset the state's alone."""
    return op.full_type in GATES and not (op.type == "GRU" and op.attrs.get("linear_before_reset", 0))


def unknown(op: Operator) -> str:
    """What is wrong with the activations that an operator names; "" where nothing is."""
    names = op.attrs.get("activations") or []
    for name in names:
        if name.lower() not in _KINDS:
            return f"its activation {name!r} is none of {', '.join(_KINDS)}"
    expected = len(defaults(op)) * (2 if op.attrs.get("direction") == "bidirectional" else 1)
    if names and len(names) != expected:
        return f"it names {len(names)} activations where its directions take {expected}"
    return ""


def activations(op: Operator, directions: int) -> list[list[Activation]]:
    """Per direction, the activations of an operator. GraphError where they are not known."""
    wrong = unknown(op)
    if wrong:
        raise GraphError(f"operator '{op.label}' ({op.full_type}) cannot be computed: {wrong}")
    default = defaults(op)
    alphas, betas = (list(op.attrs.get(f"activation_{which}") or ()) for which in ("alpha", "beta"))
    # onnxruntime does not clip what goes into the activation of the cell state.
    clips = [float(op.attrs.get("clip", 0.0))] * 2 + [0.0]
    found = []
    for index, name in enumerate(op.attrs.get("activations") or default * directions):
        kind = _KINDS[name.lower()]
        alpha, beta = (  # they are given in order, for the activations that take them
            0.0 if standard is None else float(given.pop(0)) if given else standard
            for standard, given in ((kind.alpha, alphas), (kind.beta, betas))
        )
        found.append(Activation(kind, alpha, beta, clips[index % len(default)]))
    return [found[i : i + len(default)] for i in range(0, len(found), len(default))]
