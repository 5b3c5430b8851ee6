"""Multi-head attention."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from amp_transpiler.errors import ArgumentError
from amp_transpiler.ir.constant_data import constant_array
from amp_transpiler.ir.context import name_scope
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.ir.types import numpy_dtype
from amp_transpiler.nn.building import FLOATING, Builder, describe, fixed, layer_name, variable, whole
from amp_transpiler.nn.elementwise_functions import dropout as drop
from amp_transpiler.nn.layers import fc
from amp_transpiler.nn.parameters import Attr
from amp_transpiler.ops.attention import MASKED
from amp_transpiler.program import default_main_program


def multi_head_attention(
    query: Variable,
    key: Variable | None = None,
    value: Variable | None = None,
    *,
    num_heads: int,
    attn_mask: Variable | None = None,
    dropout: float = 0.0,
    training: bool = True,
    bias_attr: Attr = None,
    name: str | None = None,
) -> Variable:
    """Scaled dot-product attention with several heads (Vaswani et al. 2017).

    ``query``: float [batch, length, width], width known and divisible by ``num_heads``. ``key`` [batch, source
    length, any width] defaults to ``query``, ``value`` to ``key``. ``attn_mask``, broadcast to [batch, heads, length,
    source length]: bool, True where a place is seen (elsewhere -30,000 is added), or float, added to the scores.
    ``dropout``: probability with which a weight is dropped; ``training=False`` leaves that out.

    Result: [batch, length, width]. Parameters are those of four fc layers: ``<name>.q_proj.w_0`` and so on for
    k_proj, v_proj, out_proj; the operators carry the name as their scope.
    """
    call = "multi_head_attention"
    key = query if key is None else key
    value = key if value is None else value
    for argument, given in (("query", query), ("key", key), ("value", value)):
        variable(call, argument, given, dtypes=FLOATING, rank=3)
    num_heads, width = whole(call, "num_heads", num_heads), fixed(call, "query", query, 2)
    if width % num_heads:
        raise ArgumentError(f"{call}: num_heads={num_heads} does not divide the width {width} of {describe(query)}")
    name = layer_name(call, name)
    put = Builder(call, name)
    with name_scope(name):
        q = _project(query, width, bias_attr, f"{name}.q_proj")
        q = put("Mul", q, np.array(math.sqrt(num_heads / width), numpy_dtype(str(q.dtype))))
        q = _heads(put, q, width, num_heads, [0, 2, 1, 3])
        k = _heads(put, _project(key, width, bias_attr, f"{name}.k_proj"), width, num_heads, [0, 2, 3, 1])
        v = _heads(put, _project(value, width, bias_attr, f"{name}.v_proj"), width, num_heads, [0, 2, 1, 3])
        scores = _masked(put, put("MatMul", q, k), attn_mask)
        weights = put("Softmax", scores, axis=-1)
        mixed = put("MatMul", drop(weights, dropout, training), v)
        mixed = put("Transpose", mixed, perm=[0, 2, 1, 3])
        merged = put("Reshape", mixed, np.array([0, 0, width], np.int64))
        return _project(merged, width, bias_attr, f"{name}.out_proj")


def _project(x: Variable, width: int, bias_attr: Attr, name: str) -> Variable:
    return fc(x, width, num_flatten_dims=2, bias_attr=bias_attr, name=name)


def _heads(put: Builder, x: Variable, width: int, num_heads: int, perm: list[int]) -> Variable:
    """[batch, length, width] as [batch, length, heads, width / heads], permuted."""
    split = np.array([0, 0, num_heads, width // num_heads], np.int64)
    x = put("Reshape", x, split)
    return put("Transpose", x, perm=perm)


def _masked(put: Builder, scores: Variable, mask: Variable | None) -> Variable:
    if mask is None:
        return scores
    variable(put.call, "attn_mask", mask, dtypes=("bool", str(scores.dtype)))
    if mask.dtype == "bool":
        mask = _as_numbers(put, mask, numpy_dtype(str(scores.dtype)))
    return put("Add", scores, mask)


def _as_numbers(put: Builder, mask: Variable, dtype: np.dtype[Any]) -> Variable:
    """What a bool mask adds to scores, made once for all layers: neither they nor their gradient need a selection."""
    numbers = [np.array(number, dtype) for number in (0, MASKED)]
    for op, slot in mask.readers:
        if op.type == "Where" and slot == 0 and op.program is default_main_program():
            known = [constant_array(v) for v in op.inputs[1:]]
            (made,) = op.outputs
            if (
                made is not None
                and made.dtype == dtype
                and [a if a is None else a.tolist() for a in known] == [0, MASKED]
            ):
                return made
    return put("Where", mask, *numbers)
