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
from amp_transpiler.nn.building import FLOATING, append, describe, fixed, layer_name, variable, whole
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
    with name_scope(name):
        q = _project(query, width, bias_attr, f"{name}.q_proj")
        q = append(call, "Mul", [q, np.array(math.sqrt(num_heads / width), numpy_dtype(str(q.dtype)))], prefix=name)
        q = _heads(call, q, width, num_heads, [0, 2, 1, 3], name)
        k = _heads(call, _project(key, width, bias_attr, f"{name}.k_proj"), width, num_heads, [0, 2, 3, 1], name)
        v = _heads(call, _project(value, width, bias_attr, f"{name}.v_proj"), width, num_heads, [0, 2, 1, 3], name)
        scores = _masked(call, append(call, "MatMul", [q, k], prefix=name), attn_mask, name)
        weights = append(call, "Softmax", [scores], attrs={"axis": -1}, prefix=name)
        mixed = append(call, "MatMul", [drop(weights, dropout, training), v], prefix=name)
        mixed = append(call, "Transpose", [mixed], attrs={"perm": [0, 2, 1, 3]}, prefix=name)
        merged = append(call, "Reshape", [mixed, np.array([0, 0, width], np.int64)], prefix=name)
        return _project(merged, width, bias_attr, f"{name}.out_proj")


def _project(x: Variable, width: int, bias_attr: Attr, name: str) -> Variable:
    return fc(x, width, num_flatten_dims=2, bias_attr=bias_attr, name=name)


def _heads(call: str, x: Variable, width: int, num_heads: int, perm: list[int], prefix: str) -> Variable:
    """[batch, length, width] as [batch, length, heads, width / heads], permuted."""
    split = np.array([0, 0, num_heads, width // num_heads], np.int64)
    x = append(call, "Reshape", [x, split], prefix=prefix)
    return append(call, "Transpose", [x], attrs={"perm": perm}, prefix=prefix)


def _masked(call: str, scores: Variable, mask: Variable | None, prefix: str) -> Variable:
    if mask is None:
        return scores
    variable(call, "attn_mask", mask, dtypes=("bool", str(scores.dtype)))
    if mask.dtype == "bool":
        mask = _as_numbers(call, mask, numpy_dtype(str(scores.dtype)), prefix)
    return append(call, "Add", [scores, mask], prefix=prefix)


def _as_numbers(call: str, mask: Variable, dtype: np.dtype[Any], prefix: str) -> Variable:
    """What a bool mask adds to scores, made once for all layers: neither they nor their gradient need a selection."""
    numbers = [np.array(number, dtype) for number in (0, MASKED)]
    for op, slot in mask.readers:
        if op.type == "Where" and slot == 0 and op.program is default_main_program():
            known = [None if v is None else constant_array(v) for v in op.inputs[1:]]
            (made,) = op.outputs
            if (
                made is not None
                and made.dtype == dtype
                and [a if a is None else a.tolist() for a in known] == [0, MASKED]
            ):
                return made
    return append(call, "Where", [mask, *numbers], prefix=prefix)
