"""Gradients on CPU of convolutions whose kernel has one position."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from tests.helpers.gradcheck import check_gradient, gradient_model
from tests.helpers.rules import as_model, run_cpu, tensor_info


def values(batch: int, channels: int, outputs: int, spatial: tuple[int, ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    sizes = {
        "x0": (batch, channels, *spatial),
        "x1": (outputs, channels, *[1] * len(spatial)),
        "dy0": (batch, outputs, *spatial),
    }
    return {name: rng.normal(size=size).astype(np.float32) for name, size in sizes.items()}


def transposed_conv(dy: np.ndarray, w: np.ndarray) -> np.ndarray:
    node = onnx.helper.make_node("ConvTranspose", ["dy", "w"], ["dx"])
    infos = [tensor_info("dy", "float32", dy.shape), tensor_info("w", "float32", w.shape)]
    graph = onnx.helper.make_graph([node], "dx", infos, [onnx.helper.make_empty_tensor_value_info("dx")])
    return run_cpu(as_model(graph), {"dy": dy, "w": w})[0]


@pytest.mark.parametrize(
    ("batch", "channels", "outputs", "spatial", "expected"),
    [
        (3, 40, 24, (14, 13), {"Conv", "MatMul", "ReduceSum"}),  # images are large: their products are added up
        (1, 64, 256, (28, 28), {"Conv", "MatMul", "ReduceSum"}),
        (2, 24, 40, (150,), {"Conv", "MatMul", "ReduceSum"}),
        (4, 96, 120, (4, 3), {"ConvTranspose", "MatMul"}),  # weights are: one product of all images
    ],
)
def test_gradients_take_the_form_that_moves_least(
    batch: int, channels: int, outputs: int, spatial: tuple[int, ...], expected: set[str]
) -> None:
    fed = values(batch, channels, outputs, spatial)
    model = gradient_model("Conv", [fed["x0"], fed["x1"]], "float32", "cpu")
    kinds = {node.op_type for node in model.graph.node}
    assert kinds & {"Conv", "ConvTranspose", "MatMul", "ReduceSum"} == expected
    dx, dw = run_cpu(model, {info.name: fed[info.name] for info in model.graph.input})
    np.testing.assert_array_equal(dx, transposed_conv(fed["dy0"], fed["x1"]))
    x, dy = (fed[name].astype(np.float64).reshape(*fed[name].shape[:2], -1) for name in ("x0", "dy0"))
    np.testing.assert_allclose(dw.reshape(outputs, channels), np.einsum("nop,nip->oi", dy, x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("positions", "apart"), [(8, False), (9, True)])
def test_products_of_images_are_half_of_what_they_read(positions: int, apart: bool) -> None:
    """Eight numbers of each of 8 + 8 channels are twice the 8 x 8 of a product."""
    fed = values(2, 8, 8, (positions,))
    model = gradient_model("Conv", [fed["x0"], fed["x1"]], "float32", "cpu")
    assert ("ReduceSum" in {node.op_type for node in model.graph.node}) == apart


@pytest.mark.parametrize("strides", [[1, 1], [2, 3]], ids=["every-position", "strides"])
@pytest.mark.parametrize("size", [(12, 11), (5, 4)], ids=["large", "small"])
def test_against_central_differences(size: tuple[int, int], strides: list[int]) -> None:
    fed = values(2, 3, 4, size)
    check_gradient("Conv", [fed["x0"], fed["x1"]], attrs={"strides": strides}, half=("float16",))


def test_16_bit_images_are_contracted_at_once() -> None:
    """Partial sums would be rounded."""
    fed = values(3, 8, 8, (14, 14))
    model = gradient_model("Conv", [fed["x0"], fed["x1"]], "float16", "cpu")
    assert "ReduceSum" not in {node.op_type for node in model.graph.node}
