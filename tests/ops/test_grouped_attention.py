"""GroupQueryAttention, taken apart for training, computes what onnxruntime's kernel computes, and has a gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import GradientError
from amp_transpiler.ir.decompose import decompose_operator
from amp_transpiler.nn import functional as F
from tests.helpers.sessions import run

Array = np.ndarray[Any, Any]
H, S, D = 4, 5, 16


def attention(
    *,
    batch: int = 2,
    groups: int = 2,
    packed: bool = True,
    past: int = 0,
    padded: bool = False,
    size: int = D,
    rotary: int = 0,
    positions: bool = False,
    bias: bool = False,
    **attrs: Any,
) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """A model of one, and what it is fed; ``rotary``: the elements of a head that turn."""
    values = np.random.default_rng(0)
    total = past + S

    def drawn(*shape: int) -> Array:
        return values.normal(size=shape).astype(np.float32)

    angles = np.outer(np.arange(total), 1 / 10 ** (np.arange(rotary // 2) / size)).astype(np.float32)
    fed: list[Array | None] = [
        drawn(batch, S, (H + 2 * groups * packed) * size),
        *(None if packed else drawn(batch, S, groups * size) for _ in range(2)),
        *(drawn(batch, groups, past, size) for _ in range(2)),
        np.full(batch, total - 1, np.int32) - padded * np.arange(batch, dtype=np.int32),
        np.array(total, np.int32),
        *((np.cos(angles), np.sin(angles)) if rotary else (None, None)),
        np.tile(np.arange(past, total), (batch, 1)) if positions else None,
        drawn(1, 1, S, total) if bias else None,
    ]
    feeds = {f"x{slot}": array for slot, array in enumerate(fed) if array is not None}
    node = onnx.helper.make_node(
        "GroupQueryAttention",
        ["" if array is None else f"x{slot}" for slot, array in enumerate(fed)],
        ["y", "key", "value"],
        domain="com.microsoft",
        **{"num_heads": H, "kv_num_heads": groups, "do_rotary": int(rotary > 0), **attrs},
    )
    made = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [node],
        "one",
        [made(name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape) for name, array in feeds.items()],
        [made(name, 1, shape) for name, shape in (("y", (batch, S, H * size)), ("key", None), ("value", None))],
    )
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10), feeds


FORMS: list[dict[str, Any]] = [
    {},
    {"packed": False, "groups": 1},
    {"groups": 4, "scale": 0.3},
    {"rotary": D},
    {"rotary": D, "rotary_interleaved": 1, "positions": True},
    {"rotary": D, "padded": True},
    {"rotary": D, "size": 2 * D},
    {"rotary": D, "past": 3, "batch": 1},
    {"local_window_size": 2, "past": 3, "batch": 1},
    {"local_window_size": 1},
    {"softcap": 2.0},
    {"bias": True},
]


@pytest.mark.rules
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_it_computes_what_the_kernel_computes(form: dict[str, Any]) -> None:
    """But for places that are padding, where nothing is defined."""
    model, feeds = attention(**form)
    program = amp.Program.from_onnx(model)
    decompose_operator(program.operators[0])
    program.verify()
    want, got = run(model, feeds, "DISABLE_ALL"), run(program.to_onnx(), feeds, "DISABLE_ALL")
    past = feeds["x3"].shape[2]
    for row, last in enumerate(feeds["x5"]):
        np.testing.assert_allclose(got[0][row, : last + 1 - past], want[0][row, : last + 1 - past], atol=2e-6)
        for cache in (1, 2):
            np.testing.assert_allclose(got[cache][row, :, : last + 1], want[cache][row, :, : last + 1], atol=2e-6)


def loss_of(program: amp.Program, weights: Array) -> amp.Variable:
    with amp.program_guard(program, amp.Program("startup")):
        return F.sum(program.var("y") * program.add_constant("weights", weights))


def test_its_gradient_is_the_slope_of_the_kernel() -> None:
    """A decoder of onnxruntime-genai had none: nothing before its last attention could be trained."""
    model, feeds = attention(rotary=D, local_window_size=3)
    values = np.random.default_rng(1)
    weights, way = values.normal(size=(2, S, H * D)).astype(np.float32), values.normal(size=feeds["x0"].shape)
    program = amp.Program.from_onnx(model)
    loss = loss_of(program, weights)
    ((_, gradient),) = amp.append_backward(loss, parameter_list=["x0"])
    with amp.scope_guard(amp.Scope()):
        (found,) = amp.Executor(amp.CPUPlace()).run(program, feed=feeds, fetch_list=[gradient])
    ahead, behind = (
        float(
            (run(model, {**feeds, "x0": (feeds["x0"] + step * way).astype(np.float32)})[0] * weights).sum(
                dtype=np.float64
            )
        )
        for step in (1e-2, -1e-2)
    )
    assert (ahead - behind) / 2e-2 == pytest.approx(float((found * way).sum()), rel=2e-3)


def test_a_form_that_is_not_known_is_named() -> None:
    model, _ = attention(smooth_softmax=1)
    program = amp.Program.from_onnx(model)
    loss = loss_of(program, np.ones((2, S, H * D), np.float32))
    with pytest.raises(GradientError, match="GroupQueryAttention.*a smooth softmax"):
        amp.append_backward(loss, parameter_list=["x0"])


def test_a_trained_decoder_keeps_it_and_its_caches(tmp_path: Any) -> None:
    """Angles are not trained; the file serves as before."""
    model, feeds = attention(rotary=D)
    constants = {name: feeds.pop(name) for name in ("x5", "x6", "x7", "x8")}
    for slot in range(len(model.graph.input) - 1, -1, -1):
        if model.graph.input[slot].name in constants:
            del model.graph.input[slot]
    head = np.random.default_rng(2).normal(size=(feeds["x0"].shape[-1],) * 2).astype(np.float32)
    for name, array in {**constants, "w": head}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    model.graph.node.insert(0, onnx.helper.make_node("MatMul", ["x", "w"], ["x0"]))
    model.graph.input[0].name = "x"
    data = {("x" if name == "x0" else name): array for name, array in feeds.items()}
    data["label"] = np.zeros((2, S, H * D), np.float32)
    out = tmp_path / "out.onnx"
    amp.fit(model, out, data=data, loss="mse", batch_size=2, mode="fp32", target="y", lr=1e-2)
    saved = onnx.load(out)
    assert [node.op_type for node in saved.graph.node if node.domain] == ["GroupQueryAttention"]
    assert [each.name for each in saved.graph.output] == ["y", "key", "value"]
    after = {each.name: onnx.numpy_helper.to_array(each) for each in saved.graph.initializer}
    assert np.abs(after["w"] - head).max() > 1e-3
    np.testing.assert_array_equal(after["x7"], constants["x7"])
