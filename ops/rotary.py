"""Rotary positions (Su et al. 2021, https://arxiv.org/abs/2104.09864): pairs of a head's numbers, turned by angles.

Definitions: https://onnx.ai/onnx/operators/ (RotaryEmbedding), and onnxruntime's operator of that name, which is also
what those that an exporter wrote out are in training: it has a gradient, the turn back.
"""

from __future__ import annotations

from amp_transpiler.ir.contrib_types import DOMAIN
from amp_transpiler.ir.decompose import Parts, decomposition
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import gradient, traits
from amp_transpiler.ops.attention import fixed_size, heads_apart, heads_together, positions_of
from amp_transpiler.ops.common import Grads, Maybe, given_attributes, once, size_of

#: The operator as onnxruntime has it at every opset.
TYPE = f"{DOMAIN}::RotaryEmbedding"


@decomposition("RotaryEmbedding")
def rotary_embedding(
    d: Parts, op: Operator, x: Variable, cos: Variable, sin: Variable, positions: Maybe = None
) -> list[Variable]:
    """X is [B, heads, S, D], or [B, S, heads * D] with ``num_heads``; the caches are [B, S, D/2] or looked up."""
    if positions is not None:
        cos, sin = d.Gather(cos, positions), d.Gather(sin, positions)
    heads = d.whole("num_heads", 0)
    split = heads_apart(d, x, heads) if d.rank(x) == 3 else x
    turned = _rotate(d, split, d.Unsqueeze(cos, [1]), d.Unsqueeze(sin, [1]))
    return [heads_together(d, turned) if d.rank(x) == 3 else turned]


@decomposition(TYPE)
def rotary_embedding_of_onnxruntime(
    d: Parts, op: Operator, x: Variable, positions: Variable, cos: Variable, sin: Variable
) -> list[Variable]:
    """X [B, S, heads * D] or [B, heads, S, D]; ``positions`` [B, S], or [1]: the first of consecutive ones."""
    if reason := _unusual(op):
        raise d.error(reason)
    flat = d.rank(x) == 3
    if flat:
        half = d.size(cos, 1)
        width, heads, turning = d.size(x, 2), d.whole("num_heads", 0), d.whole("rotary_embedding_dim", 0)
        if not heads and (half is None or width is None or turning):
            raise d.error("its number of heads is not known")
        x = heads_apart(d, x, heads or width // (2 * half))  # type: ignore[operator]
    if d.rank(positions) == 1:
        positions = d.Unsqueeze(d.Add(positions_of(d, x, 2), positions), [0])
    angles = [d.Unsqueeze(d.Gather(table, positions), [1]) for table in (cos, sin)]
    turned = _rotate(d, x, *angles)
    return [heads_together(d, turned) if flat else turned]


def _rotate(d: Parts, x: Variable, cos: Variable, sin: Variable) -> Variable:
    """Pairs of the first elements of the last axis of X [B, heads, S, D], turned by angles that broadcast."""
    size = fixed_size(d, x, -1, "head size")
    turning = d.whole("rotary_embedding_dim", 0) or size
    rest = None
    if turning != size:
        x, rest = d.Split(x, [turning, size - turning], axis=-1, outputs=2)
        cos, sin = (d.Slice(c, [0], [turning // 2], [-1]) for c in (cos, sin))
    interleaved = d.whole("interleaved", 0)
    if interleaved:
        pairs = d.Reshape(x, [0, 0, -1, turning // 2, 2])
        first, second = (d.Squeeze(v, [-1]) for v in d.Split(pairs, axis=-1, num_outputs=2, outputs=2))
    else:
        first, second = d.Split(x, axis=-1, num_outputs=2, outputs=2)
    real = d.Sub(d.Mul(first, cos), d.Mul(second, sin))
    imaginary = d.Add(d.Mul(first, sin), d.Mul(second, cos))
    if interleaved:
        pairs = d.Concat(d.Unsqueeze(real, [-1]), d.Unsqueeze(imaginary, [-1]), axis=-1)
        turned = d.Reshape(pairs, [0, 0, -1, turning])
    else:
        turned = d.Concat(real, imaginary, axis=-1)
    return turned if rest is None else d.Concat(turned, rest, axis=-1)


def _unusual(op: Operator) -> str:
    """Why the definition here is not that of an operator; "" where it is."""
    if int(op.attrs.get("is_packed_batching", 0)) or float(op.attrs.get("scale", 1.0)) != 1:
        return "it scales, or packs sequences"
    return ""


def _without_gradient(op: Operator) -> str:
    """Why the turn back is not all of an operator's gradient; "" where it is."""
    if any(v is not None and v.is_parameter for v in op.inputs[2:]):
        return "its angles are trained"
    return _unusual(op)


@gradient(TYPE, "x1 x2 x3 dy0", inputs=(0,), native=True, refuse=_without_gradient)
def rotary_embedding_gradient(e: Emitter, op: Operator, positions: Value, cos: Value, sin: Value, dy: Value) -> Grads:
    """dX = dY turned by the negative angles."""
    back = once(e, f"{sin.name} turned back, {dy.dtype}", lambda: e.cast(e.Neg(sin), dy.dtype))
    cos = e.cast(cos, dy.dtype)
    attrs = given_attributes(op, *_ATTRIBUTES)
    return [e.op("RotaryEmbedding", dy, positions, cos, back, domain=DOMAIN, shape=size_of(dy), **attrs)]


_ATTRIBUTES = ("interleaved", "num_heads", "rotary_embedding_dim")

traits("RotaryEmbedding", TYPE, settings=(1, 2, 3))
