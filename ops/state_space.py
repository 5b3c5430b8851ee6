"""Layers of state-space and linear-attention models, decomposed: CausalConvWithState and LinearAttention.

Definitions: https://onnx.ai/onnx/operators/; onnxruntime's own operators of these names have the same forms.
A linear attention is a recurrence over places, S_t = e^{g_t} S_{t-1} + k_t u_t'. What it makes of a chunk of places is
products of all their rows: with G the sum of g up to a place, u_j has the share (q_t e^{G_t - G_j}) . k_j of y_t, and
what the delta rule takes off is a triangular system in u. Only the state goes on from chunk to chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from amp_transpiler.ir.contrib_types import DOMAIN
from amp_transpiler.ir.decompose import Parts, decomposition
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import traits
from amp_transpiler.ir.reasons import Kind
from amp_transpiler.ops.attention import MASKED, fixed_size, grouped, heads_apart, heads_together, scale_of
from amp_transpiler.ops.common import Maybe

#: Attributes of onnxruntime's CausalConvWithState, and what they are where it is that of ONNX.
_PLAIN = {"ndim": 1, "dilation": 1, "channels_last": 0, "state_window": 0}
#: What the update rules read besides the query, key and value.
_READS = {"linear": (), "gated": ("decay",), "delta": ("beta",), "gated_delta": ("decay", "beta")}
_CHUNK = 64


@decomposition("CausalConvWithState", f"{DOMAIN}::CausalConvWithState")
def causal_conv(
    d: Parts, op: Operator, x: Variable, weight: Variable, bias: Maybe = None, past: Maybe = None
) -> list[Variable]:
    """A convolution of each channel of X [B, C, T] behind the last k - 1 places of the past, which are 0 without."""
    for name, plain in _PLAIN.items():
        if d.whole(name, plain) != plain:
            raise d.error(f"its {name} is {d.whole(name, plain)}")
    held = fixed_size(d, weight, 2, "number of taps") - 1
    wide = d.Concat(past, x, axis=2) if past is not None else d.Pad(x, [0, 0, held, 0, 0, 0]) if held else x
    y = d.Conv(wide, weight, bias, group=fixed_size(d, weight, 0, "number of channels"))
    if op.attrs.get("activation", "none") != "none":
        y = d.Mul(y, d.Sigmoid(y))
    end = np.iinfo(np.int64).max
    return [y, d.Slice(wide, [-held if held else end], [end], [2])]


class _Rows(NamedTuple):
    """Places of all heads, [B, heads, T, size], in fp32; ``decay`` has one size, or that of keys."""

    q: Variable
    k: Variable
    v: Variable
    decay: Maybe
    beta: Maybe


@decomposition("LinearAttention", f"{DOMAIN}::LinearAttention")
def linear_attention(
    d: Parts,
    op: Operator,
    q: Variable,
    k: Variable,
    v: Variable,
    past: Maybe = None,
    decay: Maybe = None,
    beta: Maybe = None,
) -> list[Maybe]:
    """Q, K and V [B, T, heads * size], chunk by chunk, in fp32 as the kernels compute inside."""
    rule, given = op.attrs.get("update_rule", "gated_delta"), {"decay": decay, "beta": beta}
    if rule not in _READS or any((given[name] is not None) != (name in _READS[rule]) for name in given):
        has = " and ".join(name for name in given if given[name] is not None) or "neither decay nor beta"
        raise d.error(f"its update rule is '{rule}', and it has {has}")
    if d.whole("state_window", 0):
        raise d.error(f"its state_window is {d.whole('state_window', 0)}")
    length = d.size(q, 1)
    if length is None:
        raise d.open_size(f"the length of '{q.name}'")
    dtype, shared = q.dtype, d.whole("kv_num_heads", 0)
    with d.fp32(Kind.RECURRENT):
        heads = [d.whole("q_num_heads", 0), shared, shared, shared]
        heads += [] if beta is None else [fixed_size(d, beta, 2, "number of heads")]
        rows = [
            None if x is None else heads_apart(d, d.cast(x, "float32"), n)
            for x, n in zip((q, k, v, decay, beta), [*heads, 0][:5], strict=True)
        ]
        assert rows[0] is not None
        rows[0] = d.Mul(rows[0], scale_of(d, rows[0]))
        state = None if past is None else d.cast(past, "float32")
        made = []
        for part in _chunks(d, rows, length):
            y, state = _chunk(d, part, state)
            made.append(y)
        result = heads_together(d, d.Concat(*made, axis=2) if len(made) > 1 else made[0])
        last = op.output(1)
        return [d.cast(result, dtype), state if last is None or state is None else d.cast(state, last.dtype or dtype)]


def _chunks(d: Parts, rows: list[Maybe], length: int) -> Iterator[_Rows]:
    """The rows of each chunk."""
    sizes = [min(_CHUNK, length - start) for start in range(0, length, _CHUNK)]
    if len(sizes) == 1:
        yield _Rows(*rows)  # type: ignore[arg-type]  # of the first three there are always some
        return
    parts = [[None] * len(sizes) if x is None else d.Split(x, sizes, axis=2, outputs=len(sizes)) for x in rows]
    for part in zip(*parts, strict=True):
        yield _Rows(*part)


def _chunk(d: Parts, rows: _Rows, state: Maybe) -> tuple[Variable, Variable]:
    """What a chunk of places gives, and the state after it."""
    q, k, u, decay, beta = rows
    total = None if decay is None else d.CumSum(decay, d.const(2, "int64"))
    if beta is not None:
        if state is not None:
            u = d.Sub(u, d.MatMul(_decayed(d, k, total), state))
        taken = _shares(d, d.Mul(k, beta), k, total)
        u = d.MatMul(_inverse(d, taken), d.Mul(u, beta))
    key, value, of_query = (None if x is None else grouped(d, q, x) for x in (k, u, total))
    assert key is not None and value is not None
    own = d.Mul(d.ReduceSum(d.Mul(q, key), [-1], keepdims=1), value)
    y = d.Add(d.MatMul(_shares(d, q, key, of_query), value), own)
    if state is not None:
        y = d.Add(y, d.MatMul(_decayed(d, q, of_query), grouped(d, q, state)))
    if total is not None:
        end = d.Slice(total, [-1], [np.iinfo(np.int64).max], [2])
        k = d.Mul(k, d.Exp(d.Sub(end, total)))
        state = None if state is None else d.Mul(state, d.Exp(d.Transpose(end, perm=[0, 1, 3, 2])))
    new = d.MatMul(d.Transpose(k, perm=[0, 1, 3, 2]), u)
    return y, new if state is None else d.Add(state, new)


def _decayed(d: Parts, x: Variable, total: Maybe) -> Variable:
    """Rows as they meet the state before the chunk."""
    return x if total is None else d.Mul(x, d.Exp(total))


def _shares(d: Parts, x: Variable, y: Variable, total: Maybe) -> Variable:
    """x_t e^{G_t - G_j} . y_j for each place t and each j before it, else 0: [B, heads, T, T]."""
    size = fixed_size(d, x, 2, "length")
    before = np.tri(size, k=-1)
    turned = d.Transpose(y, perm=[0, 1, 3, 2])
    if total is None:
        return d.Mul(d.MatMul(x, turned), d.const(before, "float32"))
    if d.size(total, 3) == 1:
        apart = d.Sub(total, d.Transpose(total, perm=[0, 1, 3, 2]))
        share = d.Exp(d.Where(d.const(before > 0), apart, d.const(MASKED, "float32")))
        return d.Mul(d.MatMul(x, turned), share)
    found: Maybe = None
    for half, lower in _halves(size):  # both rows meet at the last place of the left half: neither exponent is large
        right = half[:, None] % 2 == 1
        rows = int(np.argmax(right)) if right.any() else size
        last = np.minimum((half // 2 * 2 + 1) * rows, size) - 1
        apart = d.Mul(d.Sub(total, d.Gather(total, d.const(last), axis=2)), d.const(np.where(right, 1, -1), "float32"))
        share = d.Exp(apart)
        part = d.MatMul(d.Mul(x, share), d.Transpose(d.Mul(y, share), perm=[0, 1, 3, 2]))
        part = d.Mul(part, d.const(lower, "float32"))
        found = part if found is None else d.Add(found, part)
    return d.Mul(d.MatMul(x, turned), d.const(before, "float32")) if found is None else found


def _inverse(d: Parts, lower: Variable) -> Variable:
    """(I + L)^-1 of strictly lower L: where T inverts the blocks on the diagonal, T - T (L ∘ M) T does those twice as
    large; M is 1 in the lower left quarter of each."""
    size = fixed_size(d, lower, 2, "length")
    inverse = d.const(np.eye(size), "float32")
    for half, quarters in _halves(size):
        part = d.Mul(lower, d.const(quarters, "float32"))
        if half[-1] < size - 1:
            part = d.MatMul(d.MatMul(inverse, part), inverse)
        inverse = d.Sub(inverse, part)
    return inverse


def _halves(size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For halves of 1, 2, 4, … places: the half of each place, and 1 where a row is of the right half of a pair and a
    column of its left."""
    rows = 1
    while rows < size:
        half = np.arange(size) // rows
        yield half, (half[:, None] % 2 == 1) & (half[:, None] == half + 1)
        rows *= 2


traits("LinearAttention")
traits("CausalConvWithState", f"{DOMAIN}::CausalConvWithState", weights=(1, 2), biases=(2,))
