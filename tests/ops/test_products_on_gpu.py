"""Which products a GPU place computes what others add up by, and that they are right."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ops import kernel_gradient
from amp_transpiler.ops.gpu_kernels import product_of_rows
from amp_transpiler.ops.norm_parts import correlation
from amp_transpiler.ops.window import Window
from tests.helpers.gradcheck import check_gradient, gradient_model
from tests.helpers.rules import as_model, run_cpu, tensor_info

pytestmark = pytest.mark.rules


@pytest.mark.parametrize(
    ("size", "kernel", "attrs", "form"),
    [
        ((28, 28), (3, 3), {"pads": [1, 1, 1, 1]}, "Conv"),
        ((34, 34), (3, 3), {"dilations": [2, 1]}, "Conv"),
        ((9, 36), (3, 3), {}, "Gather"),  # dY is a kernel of 34 positions
        ((28, 28), (3, 3), {"strides": [1, 2]}, "Gather"),  # dY is a dilated one
        ((8, 8), (3, 3), {"group": 2}, "Gather"),
        ((40,), (5,), {}, "Gather"),
        ((9, 36), (1, 1), {}, "Gemm"),
        ((9, 36), (1, 1), {"strides": [2, 2]}, "Gemm"),
    ],
)
def test_how_the_gradient_of_weights_is_computed(size, kernel, attrs, form) -> None:
    x, w = np.zeros((2, 4, *size)), np.zeros((6, 4 // attrs.get("group", 1), *kernel))
    model = gradient_model("Conv", [x, w], "float32", "cuda", wrt=[1], **attrs)
    kinds = [node.op_type for node in model.graph.node]
    assert [kind for kind in ("Conv", "Gather") if kind in kinds] == [form] * (form != "Gemm")
    assert ({"Gemm", "FusedMatMul"} & set(kinds) != set()) == (form != "Conv")


@pytest.mark.parametrize(
    ("images", "channels", "outputs", "kernel", "side", "group", "form"),
    [
        (64, 96, 96, (7, 7), 56, 96, "by_axis"),
        (64, 96, 96, (3, 4), 56, 96, "by_axis"),  # 0.65 of the elements
        (64, 96, 96, (3, 3), 56, 96, "by_gathering"),  # 0.73 of them: not less by far
        (1, 96, 96, (7, 7), 14, 96, "by_gathering"),  # nor where these are few
        (8, 64, 3, (9, 9), 96, 1, "by_axis_of_all"),
        (8, 3, 64, (9, 9), 96, 1, "by_gathering"),
        (64, 64, 3, (9, 9), 256, 1, "by_gathering"),  # too much at once
    ],
)
def test_what_windows_read_is_gathered_along_axes_where_that_is_less(
    monkeypatch: pytest.MonkeyPatch,
    images: int,
    channels: int,
    outputs: int,
    kernel: tuple[int, int],
    side: int,
    group: int,
    form: str,
) -> None:
    for name in ("by_axis", "by_axis_of_all", "by_gathering"):
        monkeypatch.setattr(kernel_gradient, name, lambda *_, name=name: name)
    source = tuple(side + taps - 1 for taps in kernel)
    window = Window(kernel, (1, 1), (1, 1), (0, 0), source, (side, side))
    x, dy = (Value("x", "float16", (images, channels, *source)), Value("dy", "float16", (images, outputs, side, side)))
    assert kernel_gradient.weight_gradient(Emitter("cuda"), x, dy, window, group) == form


@pytest.mark.parametrize("kernel", [(7, 7), (1, 3), (3, 1)])
def test_gradient_of_weights_with_padding_and_strides(kernel: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 3, 15, 14)), rng.normal(size=(4, 3, *kernel))
    check_gradient("Conv", [x, w], attrs={"strides": [2, 2], "pads": [3, 1, 2, 0]}, half=("float16",))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("count", "blocks"), [(4096, 64), (3136, 8), (1160, 1), (512, 1)])
def test_rows_are_multiplied_in_blocks(count: int, blocks: int, dtype: str) -> None:
    rng = np.random.default_rng(count)
    a = rng.normal(size=(3, count))
    b = np.array([[1.0], [0.0], [0.01]]) * a + rng.normal(size=(3, count))
    a, b = (((v - v.mean(1, keepdims=True)) / v.std(1, keepdims=True)).astype(dtype) for v in (a, b))
    e = Emitter("cuda")
    e.reserve(["a", "b"])
    minus = correlation(e, Value("a", dtype, a.shape), Value("b", dtype, b.shape))
    assert minus.shape == (3,) and minus.dtype == dtype
    infos = [tensor_info(name, dtype, a.shape) for name in ("a", "b")]
    out = tensor_info(minus.name, minus.dtype, minus.shape)
    graph = onnx.helper.make_graph(e.nodes, "blocks", infos, [out], list(e.initializers.values()))
    model = as_model(graph)
    assert [node.op_type for node in e.nodes].count("MatMul") == (blocks > 1)
    assert any(list(t.dims) == [blocks * blocks, 1] for t in e.initializers.values()) == (blocks > 1)
    expected = -(a.astype(np.float64) * b.astype(np.float64)).mean(1)
    np.testing.assert_allclose(
        run_cpu(model, {"a": a, "b": b})[0], expected, rtol=0, atol=1e-6 if dtype == "float32" else 1e-3
    )


@pytest.mark.parametrize(("rows", "others", "turned"), [(8, 5, True), (5, 8, False), (5, 3, False), (16, 8, False)])
def test_tensor_cores_write_a_multiple_of_eight(rows: int, others: int, turned: bool) -> None:
    rng = np.random.default_rng(rows)
    a, b = (rng.normal(size=(n, 40)).astype(np.float16) for n in (rows, others))
    e = Emitter("cuda")
    e.reserve(["a", "b"])
    made = product_of_rows(e, Value("a", "float16", a.shape), Value("b", "float16", b.shape))
    assert made.shape == (rows, others)
    assert [node.op_type for node in e.nodes] == ["Gemm", *["Transpose"] * turned]
    infos = [tensor_info(name, "float16", v.shape) for name, v in (("a", a), ("b", b), (made.name, a @ b.T))]
    graph = onnx.helper.make_graph(e.nodes, "products", infos[:2], infos[2:], list(e.initializers.values()))
    np.testing.assert_allclose(run_cpu(as_model(graph), {"a": a, "b": b})[0], a @ b.T, rtol=2e-3, atol=2e-2)


@pytest.mark.parametrize("shape", [(2, 3, 24, 32), (4, 2, 28, 28)])
def test_batch_normalization_of_long_rows(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    vectors = [rng.normal(size=shape[1]) for _ in range(3)] + [rng.uniform(0.5, 2, size=shape[1])]
    check_gradient(
        "BatchNormalization", [rng.normal(size=shape), *vectors], attrs={"training_mode": 1}, outputs=3, wrt=(0, 1, 2)
    )


@pytest.mark.parametrize(("dtype", "kind"), [("float32", "ReduceSum"), ("float16", "Gemm"), ("bfloat16", "Gemm")])
@pytest.mark.parametrize("bias", [(5,), (1, 1, 5)], ids=str)
def test_sums_over_leading_axes(bias: tuple[int, ...], dtype: str, kind: str) -> None:
    """In 16 bit a product with ones; of axes that do not lead, the sum itself."""
    x, b, column = np.zeros((2, 3, 5)), np.zeros(bias), np.zeros((2, 3, 1))
    for other, expected in ((b, kind), (column, "ReduceSum")):
        model = gradient_model("Add", [x, other], dtype, "cuda", wrt=[1])
        kinds = {node.op_type for node in model.graph.node}
        assert expected in kinds and len(kinds & {"Gemm", "ReduceSum"}) == 1


def test_sums_over_leading_axes_are_right() -> None:
    rng = np.random.default_rng(2)
    check_gradient("Add", [rng.normal(size=(4, 3, 5)), rng.normal(size=(1, 5))])


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("type_", ["Softmax", "LogSoftmax"])
def test_rows_of_a_softmax_are_added_up(type_: str, axis: int) -> None:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(3, 4, 6))
    for dtype, sums in (("float16", "Gemm"), ("float32", "ReduceSum")):
        kinds = [node.op_type for node in gradient_model(type_, [x], dtype, "cuda", axis=axis).graph.node]
        assert ("GatedAdd" in kinds) == (axis == -1) and (sums if axis == -1 else "ReduceSum") in kinds
        assert "HyperConnectionPostMix" not in kinds
    check_gradient(type_, [x], attrs={"axis": axis})
    check_gradient(type_, [rng.normal(size=7)])


@pytest.mark.parametrize(("width", "kind"), [(40, "ScatterElements"), (4, "ScatterND")])
def test_wide_rows_are_added_element_by_element(width: int, kind: str) -> None:
    """A row that is looked up twice, and one from the end."""
    rng = np.random.default_rng(4)
    table, at = rng.normal(size=(6, width)), np.array([[1, 4, 1], [-1, 0, 4]])
    model = gradient_model("Gather", [table, at], "float16", "cuda")
    assert {node.op_type for node in model.graph.node} & {"ScatterElements", "ScatterND"} == {kind}
    check_gradient("Gather", [table, at])
