"""Attention of opset 23 in pure 16 bit: what is stored, and its error beside the same steps in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.ir.types import HALF, numpy_dtype
from amp_transpiler.nn import functional as F

Array = np.ndarray[Any, Any]
B, H, S, D = 2, 3, 24, 8
MASKS = ["bool", "float", "causal", "none"]


def mask_of(kind: str) -> Array | None:
    """True where a key is seen, or what is added to the scores: biases, and three ways to hide keys."""
    draws = np.random.default_rng(5)
    if kind == "bool":
        seen = draws.random((B, 1, S, S)) < 0.7
        seen[0, 0, 3] = False
        return seen
    if kind == "float":
        bias = draws.standard_normal((B, 1, S, S)).astype(np.float32)
        for hidden in (-np.inf, -1e9, -65504.0):
            bias[draws.random(bias.shape) < 0.1] = hidden
        return bias
    return None


def trained(kind: str, dtype: str) -> tuple[amp.Program, list[Array]]:
    """The program of a step in pure 16 bit; the weighted sums, and the gradients of Q, K and V, with dY = W."""
    draws, mask = np.random.default_rng(4), mask_of(kind)
    kinds = {"bool": "bool", "float": "float"}
    given = f"{kinds[kind]}[{B},1,{S},{S}] m" if mask is not None else "float[1] unused"
    model = onnx.parser.parse_model(
        f"""<ir_version: 11, opset_import: ["" : 23]> net ({given}) => (float[{B},{H},{S},{D}] y)
        {{ y = Attention <is_causal = {int(kind == "causal")}> (q, k, v{", m" if mask is not None else ""}) }}"""
    )
    for name in "qkv":
        array = draws.standard_normal((B, H, S, D)).astype(numpy_dtype(dtype)).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    main = amp.Program.from_onnx(model)
    with amp.program_guard(main, main.startup):
        weight = main.add_constant("weight", weights(dtype))
        loss = F.sum(F.cast(main.var("y"), "float32") * weight)
        optimizer = amp.decorate(
            amp.optimizer.SGD(1.0, multi_precision=True),
            use_pure_fp16=True,
            use_fp16_guard=False,
            init_loss_scaling=1.0,
            use_dynamic_loss_scaling=False,
            dtype=dtype,
        )
        _, pairs = optimizer.minimize(loss, main.startup)
    executor, scope = amp.Executor(amp.CPUPlace(), threads=1), amp.Scope()
    executor.run(main.startup, scope=scope)
    optimizer.amp_init(amp.CPUPlace(), scope=scope)
    of = {parameter.name: gradient.name for parameter, gradient in pairs}
    feed = {} if mask is None else {"m": mask}
    return main, executor.run(main, feed=feed, fetch_list=["y", *(of[name] for name in "qkv")], scope=scope)


def weights(dtype: str) -> Array:
    drawn = np.random.default_rng(6).standard_normal((B, H, S, D)).astype(numpy_dtype(dtype))
    return drawn.astype(np.float32)


def steps(kind: str, dtype: str, stored: Any) -> list[Array]:
    """Y, dQ, dK and dV in numpy, in float64 between the tensors that are stored."""

    def keep(a: Array) -> Array:
        with np.errstate(over="ignore"):
            return a.astype(stored).astype(np.float64)

    draws, mask = np.random.default_rng(4), mask_of(kind)
    q, k, v = (draws.standard_normal((B, H, S, D)).astype(numpy_dtype(dtype)).astype(np.float64) for _ in "qkv")
    scale, dy = float(keep(np.array(D**-0.5))), weights(dtype).astype(np.float64)
    scaled = keep(q * scale)
    scores = keep(scaled @ k.swapaxes(2, 3))
    allowed = np.ones((B, 1, S, S), bool)
    if kind == "float":
        assert mask is not None
        allowed = mask > -60000
        scores = keep(scores + keep(np.where(allowed, mask, 0)))
    elif kind == "bool":
        assert mask is not None
        allowed = mask
    elif kind == "causal":
        allowed = np.tril(allowed)
    top = np.where(allowed, scores, -np.inf).max(axis=3, keepdims=True)
    weighed = np.where(allowed, np.exp(scores - np.where(np.isfinite(top), top, 0)), 0)
    p = keep(weighed / np.maximum(weighed.sum(axis=3, keepdims=True), 1e-300))
    dp = keep(dy @ v.swapaxes(2, 3))
    ds = keep(p * (dp - (p * dp).sum(axis=3, keepdims=True)))
    dk = keep(ds.swapaxes(2, 3) @ scaled)
    return [keep(p @ v), keep(keep(ds @ k) * scale), dk, keep(p.swapaxes(2, 3) @ dy)]


@pytest.mark.parametrize("dtype", sorted(HALF))
@pytest.mark.parametrize("kind", MASKS)
def test_accuracy(kind: str, dtype: str) -> None:
    """Median error against float64 at most one and a half times that of every tensor rounded where torch stores it."""
    _, found = trained(kind, dtype)
    exact, peer = steps(kind, dtype, np.float64), steps(kind, dtype, numpy_dtype(dtype))
    for name, ours, theirs, true in zip(["y", "q", "k", "v"], found, peer, exact, strict=True):
        large = np.abs(true) > 1e-3
        errors = [np.median(np.abs(a.astype(np.float64) - true)[large] / np.abs(true)[large]) for a in (ours, theirs)]
        assert errors[0] <= 1.5 * errors[1], (name, errors)


def test_a_query_that_sees_nothing_gives_zero_and_gets_no_gradient() -> None:
    _, (y, dq, *_) = trained("bool", "float16")
    assert not y[0, :, 3].any() and not dq[0, :, 3].any() and y[0, :, 4].any()


@pytest.mark.parametrize("kind", MASKS)
def test_scores_are_stored_in_16_bit(kind: str) -> None:
    """No float of the size of the scores is wider, forward or backward."""
    main, _ = trained(kind, "float16")
    floats = [v for v in main.variables if v.shape == (B, H, S, S) and v.dtype not in ("bool", "int64")]
    assert len(floats) >= 4 and {v.dtype for v in floats} == {"float16"}
