"""onnxruntime's GroupQueryAttention, which decoders that are exported to generate text have, decomposed.

Definition: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md. The past is as long as its
shape says, which in training is nothing as a rule; in generation it may be a buffer that is longer.
"""

from __future__ import annotations

from amp_transpiler.ir.contrib_types import DOMAIN
from amp_transpiler.ir.decompose import Parts, decomposition
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import traits
from amp_transpiler.ops.attention import (
    MASKED,
    capped,
    fixed_size,
    heads_apart,
    heads_together,
    length,
    positions_of,
    scores,
    weigh,
)
from amp_transpiler.ops.common import Maybe

_TYPE = f"{DOMAIN}::GroupQueryAttention"
#: Attributes with another meaning than that of the definition here, and what leaves them without.
_USUAL = {
    "smooth_softmax": (0, -1),
    "qk_output": (0,),
    "k_quant_type": ("NONE", b"NONE"),
    "v_quant_type": ("NONE", b"NONE"),
}


@decomposition(_TYPE)
def group_query_attention(
    d: Parts,
    op: Operator,
    q: Variable,
    k: Maybe,
    v: Maybe,
    past_key: Maybe,
    past_value: Maybe,
    last: Variable,
    total: Variable,
    cos: Maybe = None,
    sin: Maybe = None,
    positions: Maybe = None,
    bias: Maybe = None,
    *others: Maybe,
) -> list[Maybe]:
    """Q [B, S, heads * D] with K and V alike, or packed side by side; ``last`` [B]: the last valid place of each."""
    more = any(v is not None for v in others) or op.output(3) is not None
    if more or any(op.attrs.get(name, usual[0]) not in usual for name, usual in _USUAL.items()):
        raise d.error("it has sinks, a smooth softmax, a quantised cache or norms, or gives its scores")
    heads, groups = d.whole("num_heads", 0), d.whole("kv_num_heads", 0)
    if k is None or v is None:
        size = fixed_size(d, q, 2, "width") // (heads + 2 * groups)
        q, k, v = d.Split(q, [heads * size, groups * size, groups * size], axis=2, outputs=3)
    q, k, v = heads_apart(d, q, heads), heads_apart(d, k, groups), heads_apart(d, v, groups)
    start = d.const([0]) if past_key is None else length(d, past_key)
    if d.whole("do_rotary", 0):
        q, k = (_turned(d, x, start if positions is None else positions, cos, sin) for x in (q, k))
    if past_key is not None and past_value is not None:
        k, v = d.Concat(past_key, k, axis=2), d.Concat(past_value, v, axis=2)
    found = capped(d, scores(d, q, k))
    if bias is not None:
        found = d.Add(found, d.Clip(bias, MASKED))
    return [heads_together(d, weigh(d, found, v, _allowed(d, q, k, start, last))[0]), k, v]


def _allowed(d: Parts, q: Variable, k: Variable, start: Variable, last: Variable) -> Variable:
    """Which of the keys each query looks at: those up to it, as many as the window has, but no padding."""
    column = positions_of(d, k, 2)
    row = d.Unsqueeze(d.Add(positions_of(d, q, 2), start), [1])
    allowed = d.And(
        d.GreaterOrEqual(row, column), d.LessOrEqual(column, d.Reshape(d.cast(last, "int64"), [-1, 1, 1, 1]))
    )
    window = d.whole("local_window_size", -1)
    if window <= 0:
        return allowed
    return d.And(allowed, d.Greater(column, d.Sub(row, d.const(window, "int64"))))


def _turned(d: Parts, x: Variable, positions: Variable, cos: Maybe, sin: Maybe) -> Variable:
    """X [B, heads, S, D] by positions [B, S], or consecutive ones from that of [1] on."""
    if cos is None or sin is None:
        raise d.error("its angles are not given")
    half, size = d.size(cos, 1), d.size(x, 3)
    if half is None or size is None:
        raise d.error("the size of its heads or angles is not fixed")
    turns = d.whole("rotary_interleaved", 0)
    part, heads = (None, None) if 2 * half == size else (2 * half, d.size(x, 1))
    return d.RotaryEmbedding(
        x, positions, cos, sin, domain=DOMAIN, interleaved=turns, rotary_embedding_dim=part, num_heads=heads
    )


traits(_TYPE, settings=(5, 6, 7, 8, 9))
