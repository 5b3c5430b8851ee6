"""Activations that kernels of some places compute in 16 bit, with their roundings: what emulates them on CPU.

Found as those of :mod:`.rounded_functions`, by comparing bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from amp_transpiler.ir.contrib_types import DOMAIN
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ops.rounded_sums import rounded_sum

#: ``function(e, attributes, x, its shape)``
_Function = Callable[[Emitter, Mapping[str, Any], Value, tuple[int, ...]], Value]


def _activation(type_: str) -> Callable[[_Function], _Function]:
    def register(function: _Function) -> _Function:
        @rounded_sum(type_)
        def rule(
            e: Emitter, order: str, attrs: Mapping[str, Any], inputs: Sequence[Value | None], shape: tuple[int, ...]
        ) -> Value:
            assert inputs[0] is not None
            return function(e, attrs, inputs[0], shape)

        return function

    return register


def _below(e: Emitter, x: Value, low: Value, rest: Value, shape: tuple[int, ...]) -> Value:
    """``low`` where x is below zero."""
    return e.Where(e.Less(x, e.like(0, x), shape=shape), low, rest, shape=shape)


@_activation("LeakyRelu")
def _leaky_relu(e: Emitter, attrs: Mapping[str, Any], x: Value, shape: tuple[int, ...]) -> Value:
    return _below(e, x, e.Mul(e.like(attrs.get("alpha", 0.01), x), x, shape=shape), x, shape)


@_activation("HardSigmoid")
def _hard_sigmoid(e: Emitter, attrs: Mapping[str, Any], x: Value, shape: tuple[int, ...]) -> Value:
    alpha, beta = (e.like(attrs.get(name, usual), x) for name, usual in (("alpha", 0.2), ("beta", 0.5)))
    line = e.Add(e.Mul(alpha, x, shape=shape), beta, shape=shape)
    return e.Clip(line, e.like(0, x), e.like(1, x), shape=shape)


@_activation("HardSwish")
def _hard_swish(e: Emitter, attrs: Mapping[str, Any], x: Value, shape: tuple[int, ...]) -> Value:
    return e.Mul(x, e.HardSigmoid(x, alpha=1 / 6, beta=0.5, shape=shape), shape=shape)


@_activation("Elu")
def _elu(e: Emitter, attrs: Mapping[str, Any], x: Value, shape: tuple[int, ...]) -> Value:
    low = e.Sub(e.Exp(x, shape=shape), e.like(1, x), shape=shape)
    return _below(e, x, e.Mul(low, e.like(attrs.get("alpha", 1.0), x), shape=shape), x, shape)


@_activation("Selu")
def _selu(e: Emitter, attrs: Mapping[str, Any], x: Value, shape: tuple[int, ...]) -> Value:
    alpha = e.like(attrs.get("alpha", 1.6732632423543772), x)
    gamma = e.like(attrs.get("gamma", 1.0507009873554805), x)
    low = e.Sub(e.Mul(alpha, e.Exp(x, shape=shape), shape=shape), alpha, shape=shape)
    return _below(e, x, e.Mul(gamma, low, shape=shape), e.Mul(gamma, x, shape=shape), shape)


@_activation("Softplus")
def _softplus(e: Emitter, attrs: Mapping[str, Any], x: Value, shape: tuple[int, ...]) -> Value:
    power = e.Exp(e.Neg(e.Abs(x, shape=shape), shape=shape), shape=shape)
    rest = e.Log(e.Add(e.like(1, x), power, shape=shape), shape=shape)
    return e.Add(e.Max(x, e.like(0, x), shape=shape), rest, shape=shape)


@_activation("Softsign")
def _softsign(e: Emitter, attrs: Mapping[str, Any], x: Value, shape: tuple[int, ...]) -> Value:
    return e.Div(x, e.Add(e.like(1, x), e.Abs(x, shape=shape), shape=shape), shape=shape)


@_activation("Mish")
def _mish(e: Emitter, attrs: Mapping[str, Any], x: Value, shape: tuple[int, ...]) -> Value:
    return e.Mul(x, e.Tanh(e.Softplus(x, shape=shape), shape=shape), shape=shape)


@_activation(f"{DOMAIN}::QuickGelu")
def _quick_gelu(e: Emitter, attrs: Mapping[str, Any], x: Value, shape: tuple[int, ...]) -> Value:
    """Of numbers below zero the sigmoid is taken from one."""
    at, one = e.Mul(x, e.like(attrs.get("alpha", 1.702), x), shape=shape), e.like(1, x)
    power = e.Exp(e.Neg(e.Abs(at, shape=shape), shape=shape), shape=shape)
    share = e.Div(one, e.Add(one, power, shape=shape), shape=shape)
    return e.Mul(x, _below(e, at, e.Sub(one, share, shape=shape), share, shape), shape=shape)


def _shifted_gelu(type_: str, approximate: str) -> None:
    @rounded_sum(f"{DOMAIN}::{type_}")
    def rule(
        e: Emitter, order: str, attrs: Mapping[str, Any], inputs: Sequence[Value | None], shape: tuple[int, ...]
    ) -> Value:
        x, shift = (*inputs, None)[:2]
        assert x is not None
        x = x if shift is None else e.Add(x, shift, shape=shape)
        return e.Gelu(x, approximate=approximate, shape=shape)


_shifted_gelu("BiasGelu", "none")
_shifted_gelu("FastGelu", "tanh")
