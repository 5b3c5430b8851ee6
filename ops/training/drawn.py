"""What an imported model draws at random, in training: of words that follow from seed and step (:mod:`.hashed_words`).

So a run repeats, and a resumed one goes on. An operator that no training has numbered, as in evaluation and in files,
draws from the generators of the runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.opdef import for_test, lowering_rule, no_gradient, traits
from amp_transpiler.ops.common import scaled_by, size_of
from amp_transpiler.ops.training.hashed_words import normal, uniform
from amp_transpiler.ops.training.random import MASK_ID, mask_stream

#: Operators that training numbers.
NUMBERED = ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli")
traits(*NUMBERED, "Multinomial", random=True)
no_gradient(*NUMBERED, "Multinomial")


def _numbered(op: Operator) -> bool:
    return MASK_ID in op.metadata


def _drawn(e: Emitter, op: Operator, like: Sequence[Value], of: Callable[..., Value]) -> Value:
    shape = size_of(like[0]) if like else op.attrs["shape"]
    return of(e, shape, e.scalar("seed"), e.scalar("step"), mask_stream(op))


def _scaled(e: Emitter, x: Value, factor: float, more: float) -> Value:
    """more + factor * x."""
    x = scaled_by(e, x, factor)
    return e.Add(x, e.like(more, x)) if more else x


@lowering_rule("RandomNormal", "RandomNormalLike", native=True, when=_numbered)
def random_normal(e: Emitter, op: Operator, *like: Value) -> list[Value]:
    """mean + scale * z, z standard normal, in the shape of what it is like."""
    return [_scaled(e, _drawn(e, op, like, normal), op.attrs.get("scale", 1.0), op.attrs.get("mean", 0.0))]


@lowering_rule("RandomUniform", "RandomUniformLike", native=True, when=_numbered)
def random_uniform(e: Emitter, op: Operator, *like: Value) -> list[Value]:
    """low + (high - low) * u, u uniform in [0, 1), in the shape of what it is like."""
    low, high = op.attrs.get("low", 0.0), op.attrs.get("high", 1.0)
    return [_scaled(e, _drawn(e, op, like, uniform), high - low, low)]


@lowering_rule("Bernoulli", native=True, when=_numbered)
def bernoulli(e: Emitter, op: Operator, x: Value) -> list[Value]:
    """1 with probability ``x``, else 0."""
    return [e.cast(e.Less(_drawn(e, op, [x], uniform), e.f32(x)), "float32")]


@for_test(*NUMBERED)
def _for_test(op: Operator) -> None:
    """Draw from the runtime."""
    op.metadata.pop(MASK_ID, None)
