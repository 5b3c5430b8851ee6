"""LinearAttention, CausalConvWithState and TensorScatter, taken apart: what they give and their gradients, beside the
recurrences in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import GraphError
from amp_transpiler.ir.decompose import decompose_operator
from amp_transpiler.nn import functional as F
from amp_transpiler.ops import state_space
from tests.corpora.fused_operators import MS
from tests.helpers.sessions import run

pytestmark = pytest.mark.rules

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(0)


def normal(*shape: int) -> Array:
    return RNG.normal(size=shape).astype(np.float32)


def attended(
    q: Array,
    k: Array,
    v: Array,
    past: Array | None = None,
    decay: Array | None = None,
    beta: Array | None = None,
    **a: Any,
) -> list[Array]:
    """LinearAttention place by place."""
    heads, shared, size = a["q_num_heads"], a["kv_num_heads"], q.shape[1]
    q, k, v, decay, beta = (
        None if x is None else x.reshape(*x.shape[:2], n or x.shape[2], -1).swapaxes(1, 2)
        for x, n in zip((q, k, v, decay, beta), (heads, shared, shared, shared, 0), strict=True)
    )
    state = np.zeros((len(q), shared, k.shape[3], v.shape[3])) if past is None else past
    made = []
    for t in range(size):
        state = state if decay is None else state * np.exp(decay[:, :, t, :, None])
        new = v[:, :, t, None]
        if beta is not None:
            new = beta[:, :, t, :, None] * (new - k[:, :, t, None] @ state)
        state = state + k[:, :, t, :, None] * new
        made.append(q[:, :, t, None] @ np.repeat(state, heads // shared, 1))
    y = np.concatenate(made, 2) * (a.get("scale") or q.shape[3] ** -0.5)
    return [y.swapaxes(1, 2).reshape(len(q), size, -1), state]


def convolved(x: Array, weight: Array, bias: Array | None = None, past: Array | None = None, **a: Any) -> list[Array]:
    taps = weight.shape[2]
    wide = np.concatenate([np.zeros((*x.shape[:2], taps - 1)) if past is None else past, x], 2)
    y = sum(wide[:, :, i : i + x.shape[2]] * weight[:, 0, i, None] for i in range(taps))
    y = y if bias is None else y + bias[:, None]
    return [y / (1 + np.exp(-y)) if a.get("activation") == "silu" else y, wide[:, :, x.shape[2] :]]


def written(past: Array, update: Array, begins: Array | None = None, **a: Any) -> list[Array]:
    axis, present = a.get("axis", -2) % past.ndim, past.copy()
    for batch, out in enumerate(np.moveaxis(present, axis, 1)):
        begin = 0 if begins is None else int(begins[batch])
        out[np.arange(begin, begin + update.shape[axis]) % past.shape[axis]] = np.moveaxis(update, axis, 1)[batch]
    return [present]


QKV = [normal(2, 6, 12), normal(2, 6, 6) / 2, normal(2, 6, 8)]
STATE, OF_HEADS, OF_KEYS = normal(2, 2, 3, 4), -3 * abs(normal(2, 6, 2)), -3 * abs(normal(2, 6, 6))
SHARE = 1 / (1 + np.exp(-normal(2, 6, 2)))
HEADS = {"q_num_heads": 4, "kv_num_heads": 2}
CASES: dict[str, tuple[str, list[Array | None], dict[str, Any], Callable[..., list[Array]]]] = {
    "linear": ("LinearAttention", [*QKV, STATE], {**HEADS, "update_rule": "linear"}, attended),
    "gated": ("LinearAttention", [*QKV, None, OF_HEADS], {**HEADS, "update_rule": "gated", "scale": 0.3}, attended),
    "gated by keys": ("LinearAttention", [*QKV, STATE, OF_KEYS], {**HEADS, "update_rule": "gated"}, attended),
    "delta": ("LinearAttention", [*QKV, STATE, None, SHARE[..., :1]], {**HEADS, "update_rule": "delta"}, attended),
    "gated delta": ("LinearAttention", [*QKV, STATE, OF_HEADS, SHARE], HEADS, attended),
    "gated delta by keys": ("LinearAttention", [*QKV, None, OF_KEYS, SHARE], HEADS, attended),
    "two chunks": ("LinearAttention", [*QKV, STATE, OF_KEYS, SHARE], HEADS, attended),
    "convolution": (
        "CausalConvWithState",
        [normal(2, 3, 5), normal(3, 1, 4), normal(3), normal(2, 3, 3)],
        {},
        convolved,
    ),
    "from nothing": ("CausalConvWithState", [normal(2, 3, 2), normal(3, 1, 4)], {"activation": "silu"}, convolved),
    "one tap": ("CausalConvWithState", [normal(2, 3, 2), normal(3, 1, 1)], {}, convolved),
    "cache": ("TensorScatter", [normal(2, 3, 8, 4), normal(2, 3, 3, 4), np.array([1, 5])], {}, written),
    "round cache": (
        "TensorScatter",
        [normal(2, 8, 4), normal(2, 3, 4), np.array([6, 11])],
        {"mode": "circular", "axis": 1},
        written,
    ),
    "cache at its end": ("TensorScatter", [normal(2, 3, 8), normal(2, 3, 3)], {"axis": -1}, written),
}


def model(name: str, domain: str = "") -> tuple[onnx.ModelProto, dict[str, Array]]:
    type_, inputs, attrs, forward = CASES[name]
    outputs = len(forward(*inputs, **attrs))
    given = {f"x{i}": a for i, a in enumerate(inputs) if a is not None}
    names = ["" if a is None else f"x{i}" for i, a in enumerate(inputs)]
    node = onnx.helper.make_node(type_, names, [f"y{i}" for i in range(outputs)], name="it", domain=domain, **attrs)
    kind = onnx.helper.np_dtype_to_tensor_dtype
    infos = [onnx.helper.make_tensor_value_info(n, kind(a.dtype), a.shape) for n, a in given.items()]
    results = [onnx.helper.make_empty_tensor_value_info(f"y{i}") for i in range(outputs)]
    opsets = [onnx.helper.make_opsetid("", 21 if domain else 27), onnx.helper.make_opsetid(MS, 1)]
    graph = onnx.helper.make_graph([node], "one", infos, results)
    return onnx.helper.make_model(graph, ir_version=11, opset_imports=opsets), given


@pytest.mark.parametrize("name", CASES)
def test_it_gives_what_it_says_and_has_its_gradient(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "two chunks":
        monkeypatch.setattr(state_space, "_CHUNK", 4)
    _, inputs, attrs, forward = CASES[name]
    program = amp.Program.from_onnx(model(name)[0])
    feeds = model(name)[1]
    expected = forward(*(a if a is None else a.astype(np.float64) for a in inputs), **attrs)
    weights = [RNG.normal(size=a.shape) for a in expected]
    with amp.program_guard(program), amp.unique_name.guard():
        made = list(program.outputs)
        wrt = [v for v in program.inputs if v.dtype == "float32"]
        for variable in wrt:
            variable.stop_gradient = False
        parts = [F.sum(y * program.add_constant("w", w.astype(np.float32))) for y, w in zip(made, weights, strict=True)]
        pairs = amp.append_backward(parts[0] if len(parts) == 1 or not weights[1].size else parts[0] + parts[1], wrt)
    executor, scope = amp.Executor(threads=1), amp.Scope()
    executor.run(program.startup, scope=scope)
    found = executor.run(program, feeds, [*made, *(gradient for _, gradient in pairs)], scope)
    for value, right in zip(found, expected, strict=False):
        np.testing.assert_allclose(value, right, rtol=1e-4, atol=1e-5)
    gradients = dict(zip((v.name for v, _ in pairs), found[len(made) :], strict=True))
    assert list(gradients) == [v.name for v in wrt]

    def loss(changed: str, step: Array) -> float:
        at = [
            a if a is None else a.astype(np.float64) + (step if f"x{i}" == changed else 0) if a.dtype.kind == "f" else a
            for i, a in enumerate(inputs)
        ]
        return sum(float((y * w).sum()) for y, w in zip(forward(*at, **attrs), weights, strict=True))

    for changed, gradient in gradients.items():
        way = RNG.normal(size=gradient.shape)
        way *= 1e-5 / np.linalg.norm(way)
        slope = (loss(changed, way) - loss(changed, -way)) / 2
        size = np.linalg.norm(gradient) * 1e-5
        np.testing.assert_allclose((gradient * way).sum(), slope, rtol=1e-3, atol=1e-4 * size, err_msg=changed)


@pytest.mark.parametrize("name", ["gated delta", "convolution"])
def test_onnxruntime_s_own_is_the_same(name: str) -> None:
    own, feeds = model(name, MS)
    program = amp.Program.from_onnx(own)
    decompose_operator(program.operators[0])
    assert not [op for op in program.operators if op.domain]
    for found, right in zip(run(program.to_onnx(), feeds), run(own, feeds), strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"update_rule": "delta"}, "'delta', and it has decay and beta"),
        ({"update_rule": "new"}, "'new', and it has decay and beta"),
        ({}, "length of 'x0' is not fixed .*feed_shapes"),
    ],
)
def test_forms_that_are_not_known_are_named(change: dict[str, Any], complaint: str) -> None:
    made, _ = model("gated delta")
    made.graph.node[0].attribute.extend(onnx.helper.make_attribute(*item) for item in change.items())
    if not change:
        for given in made.graph.input:
            given.type.tensor_type.shape.dim[1].dim_param = "places"
    program = amp.Program.from_onnx(made)
    with pytest.raises(GraphError, match=f"'it' .LinearAttention.*{complaint}"):
        decompose_operator(program.operators[0])
