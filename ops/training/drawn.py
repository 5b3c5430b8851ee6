"""What an imported model draws at random, in training: of words that follow from seed and step (:mod:`.hashed_words`).

So a run repeats, and a resumed one goes on. An operator that no training has numbered, as in evaluation and in files,
draws from the generators of the runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.opdef import for_test, lowering_rule, no_gradient, traits
from amp_transpiler.ops.common import size_of
from amp_transpiler.ops.training.hashed_words import normal, uniform
from amp_transpiler.ops.training.random import MASK_ID, mask_stream

#: Operators that training numbers.
NUMBERED = ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli")
traits(*NUMBERED, "Multinomial", random=True)
no_gradient(*NUMBERED, "Multinomial")


def _numbered(op: Operator) -> bool:
    return MASK_ID in op.metadata


def _drawn(e: Emitter, op: Operator, shape: Sequence[int], of: Callable[..., Value]) -> Value:
    return of(e, shape, e.scalar("seed"), e.scalar("step"), mask_stream(op))


def _scaled(e: Emitter, x: Value, factor: float, more: float) -> Value:
    """more + factor * x."""
    x = x if factor == 1 else e.Mul(x, e.like(factor, x))
    return e.Add(x, e.like(more, x)) if more else x


def _normal(e: Emitter, op: Operator, shape: Sequence[int]) -> list[Value]:
    drawn = _drawn(e, op, shape, normal)
    return [_scaled(e, drawn, op.attrs.get("scale", 1.0), op.attrs.get("mean", 0.0))]


def _uniform(e: Emitter, op: Operator, shape: Sequence[int]) -> list[Value]:
    low, high = op.attrs.get("low", 0.0), op.attrs.get("high", 1.0)
    return [_scaled(e, _drawn(e, op, shape, uniform), high - low, low)]


@lowering_rule("RandomNormal", native=True, when=_numbered)
def random_normal(e: Emitter, op: Operator) -> list[Value]:
    """mean + scale * z, z standard normal."""
    return _normal(e, op, op.attrs["shape"])


@lowering_rule("RandomNormalLike", native=True, when=_numbered)
def random_normal_like(e: Emitter, op: Operator, x: Value) -> list[Value]:
    """mean + scale * z, z standard normal, in the shape of ``x``."""
    return _normal(e, op, size_of(x))


@lowering_rule("RandomUniform", native=True, when=_numbered)
def random_uniform(e: Emitter, op: Operator) -> list[Value]:
    """low + (high - low) * u, u uniform in [0, 1)."""
    return _uniform(e, op, op.attrs["shape"])


@lowering_rule("RandomUniformLike", native=True, when=_numbered)
def random_uniform_like(e: Emitter, op: Operator, x: Value) -> list[Value]:
    """low + (high - low) * u, u uniform in [0, 1), in the shape of ``x``."""
    return _uniform(e, op, size_of(x))


@lowering_rule("Bernoulli", native=True, when=_numbered)
def bernoulli(e: Emitter, op: Operator, x: Value) -> list[Value]:
    """1 with probability ``x``, else 0."""
    return [e.cast(e.Less(_drawn(e, op, size_of(x), uniform), e.f32(x)), "float32")]


def _for_test(op: Operator) -> None:
    """Draw from the runtime."""
    op.metadata.pop(MASK_ID, None)


for _type in NUMBERED:
    for_test(_type)(_for_test)
