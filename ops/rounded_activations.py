"""Activations that kernels of some places compute in 16 bit, with their roundings: what emulates them on CPU.

Found as those of :mod:`.rounded_functions`, by comparing bits.
"""

from __future__ import annotations

from amp_transpiler.ir.contrib_types import DOMAIN
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ops.rounded_sums import Summed, rounded_sum


def _below(e: Emitter, x: Value, low: Value, rest: Value, shape: tuple[int, ...]) -> Value:
    """``low`` where x is below zero."""
    return e.Where(e.Less(x, e.like(0, x), shape=shape), low, rest, shape=shape)


@rounded_sum("LeakyRelu")
def _leaky_relu(e: Emitter, op: Summed, x: Value) -> Value:
    return _below(e, x, e.Mul(e.like(op.attrs.get("alpha", 0.01), x), x, shape=op.shape), x, op.shape)


@rounded_sum("HardSigmoid")
def _hard_sigmoid(e: Emitter, op: Summed, x: Value) -> Value:
    shape = op.shape
    alpha, beta = (e.like(op.attrs.get(name, usual), x) for name, usual in (("alpha", 0.2), ("beta", 0.5)))
    line = e.Add(e.Mul(alpha, x, shape=shape), beta, shape=shape)
    return e.Clip(line, e.like(0, x), e.like(1, x), shape=shape)


@rounded_sum("HardSwish")
def _hard_swish(e: Emitter, op: Summed, x: Value) -> Value:
    return e.Mul(x, e.HardSigmoid(x, alpha=1 / 6, beta=0.5, shape=op.shape), shape=op.shape)


@rounded_sum("Elu")
def _elu(e: Emitter, op: Summed, x: Value) -> Value:
    shape = op.shape
    low = e.Sub(e.Exp(x, shape=shape), e.like(1, x), shape=shape)
    return _below(e, x, e.Mul(low, e.like(op.attrs.get("alpha", 1.0), x), shape=shape), x, shape)


@rounded_sum("Selu")
def _selu(e: Emitter, op: Summed, x: Value) -> Value:
    shape = op.shape
    alpha = e.like(op.attrs.get("alpha", 1.6732632423543772), x)
    gamma = e.like(op.attrs.get("gamma", 1.0507009873554805), x)
    low = e.Sub(e.Mul(alpha, e.Exp(x, shape=shape), shape=shape), alpha, shape=shape)
    return _below(e, x, e.Mul(gamma, low, shape=shape), e.Mul(gamma, x, shape=shape), shape)


@rounded_sum("Softplus")
def _softplus(e: Emitter, op: Summed, x: Value) -> Value:
    shape = op.shape
    power = e.Exp(e.Neg(e.Abs(x, shape=shape), shape=shape), shape=shape)
    rest = e.Log(e.Add(e.like(1, x), power, shape=shape), shape=shape)
    return e.Add(e.Max(x, e.like(0, x), shape=shape), rest, shape=shape)


@rounded_sum("Softsign")
def _softsign(e: Emitter, op: Summed, x: Value) -> Value:
    shape = op.shape
    return e.Div(x, e.Add(e.like(1, x), e.Abs(x, shape=shape), shape=shape), shape=shape)


@rounded_sum("Mish")
def _mish(e: Emitter, op: Summed, x: Value) -> Value:
    shape = op.shape
    return e.Mul(x, e.Tanh(e.Softplus(x, shape=shape), shape=shape), shape=shape)


@rounded_sum(f"{DOMAIN}::QuickGelu")
def _quick_gelu(e: Emitter, op: Summed, x: Value) -> Value:
    """Of numbers below zero the sigmoid is taken from one."""
    shape = op.shape
    at, one = e.Mul(x, e.like(op.attrs.get("alpha", 1.702), x), shape=shape), e.like(1, x)
    power = e.Exp(e.Neg(e.Abs(at, shape=shape), shape=shape), shape=shape)
    share = e.Div(one, e.Add(one, power, shape=shape), shape=shape)
    return e.Mul(x, _below(e, at, e.Sub(one, share, shape=shape), share, shape), shape=shape)


def _shifted_gelu(type_: str, approximate: str) -> None:
    @rounded_sum(f"{DOMAIN}::{type_}")
    def rule(e: Emitter, op: Summed, x: Value, shift: Value | None = None) -> Value:
        x = x if shift is None else e.Add(x, shift, shape=op.shape)
        return e.Gelu(x, approximate=approximate, shape=op.shape)


_shifted_gelu("BiasGelu", "none")
_shifted_gelu("FastGelu", "tanh")
