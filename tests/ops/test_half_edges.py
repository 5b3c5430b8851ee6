"""Gradient rules in float16 at the ends of its range, and what they store on a GPU place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from scipy import special

from tests.helpers.gradcheck import Array, Case, Gradient, gradient_model
from tests.helpers.rules import run_cpu, run_reference
from tests.passes.test_lowerings_agree import node_by_node

LARGEST, SUBNORMAL = 65504.0, 2.0**-24
WIDTH = 64
Forward = Callable[..., Sequence[Array]] | None


def compared(
    type_: str, inputs: list[Array], dy: Array, place: str, forward: Forward = None, **attrs: Any
) -> list[tuple[Array, Array]]:
    """(the float16 gradient by the lowering for a place, the float64 one) of each input.

    ``forward``: the operator in float64, where the reference evaluator has none.
    """
    inputs = [a.astype(np.float16).astype(np.float64) for a in inputs]
    domain, _, name = type_.rpartition("::")
    case = Case(name, inputs, attrs, wrt=range(len(inputs)), forward=forward, domain=domain)
    (y,) = case.run(inputs)
    values = {f"x{i}": a for i, a in enumerate(inputs)}
    values |= {"y0": y.astype(np.float16).astype(np.float64), "dy0": dy.astype(np.float16).astype(np.float64)}
    wide, half = (Gradient(case, dtype, values, case.wrt) for dtype in ("float64", "float16"))
    truth = wide.model("reference")
    model = half.model(place)
    feeds = half.feeds(model)
    if place == "cuda":
        known = node_by_node(model, feeds)
        found = [known[output.name] for output in model.graph.output]
    else:
        found = run_cpu(model, feeds)
    return list(zip(found, run_reference(truth, wide.feeds(truth)), strict=True))


def near(found: Array, truth: Array, units: float = 4.0, floor: float = 4.0) -> bool:
    """Each element within some units in the last place of the largest of its row, or some smallest numbers."""
    allowed = units * 2.0**-11 * np.abs(truth).max(axis=-1, keepdims=True) + floor * SUBNORMAL
    return bool((np.abs(found.astype(np.float64) - truth) <= allowed).all())


ENDS = np.array([0.0, -0.0, 1.0, -1.0, 3.0, -3.0, 6.9, -6.9, 300.0, -300.0, LARGEST, -LARGEST, SUBNORMAL, 1e-5, -1e-5])


@pytest.mark.parametrize("place", ["cpu", "cuda"])
@pytest.mark.parametrize("type_", ["Erf", "HardSwish", "LeakyRelu", "Sigmoid", "Softplus", "Softsign", "Tanh"])
def test_functions_of_one_number(type_: str, place: str) -> None:
    for dy in (1.0, -50000.0, 1e-6):
        ((dx, truth),) = compared(type_, [ENDS[:, None]], np.full((len(ENDS), 1), dy), place)
        floor = (
            4.0 if type_ != "Tanh" else 4.0 + abs(dy) * 2.0**-11 / SUBNORMAL
        )  # what 1 - y² loses by the rounding of y
        assert near(dx, truth, floor=floor), (dy, dx.ravel(), truth.ravel())


def slope_of_mish(x: Array) -> Array:
    t: Array = np.tanh(np.log1p(np.exp(x)))
    return t + x * special.expit(x) * (1 - t**2)


@pytest.mark.parametrize("place", ["cpu", "cuda"])
@pytest.mark.parametrize(("type_", "slope"), [("Mish", slope_of_mish), ("Tanh", lambda x: 1 - np.tanh(x) ** 2)])
def test_slopes_lose_less_than_four_roundings_do(type_: str, slope: Callable[[Array], Array], place: str) -> None:
    """Each of which is 1.7e-4 off (root mean square)."""
    rng = np.random.default_rng(0)
    x = (rng.choice([-1, 1], (64, 64)) * np.exp(rng.uniform(np.log(1e-4), np.log(60), (64, 64)))).astype(np.float16)
    dy = rng.normal(size=x.shape).astype(np.float16)
    ((dx, _),) = compared(type_, [x.astype(np.float64)], dy, place)
    wanted = slope(x.astype(np.float64)) * dy
    assert np.linalg.norm(dx - wanted) < 3.5e-4 * np.linalg.norm(wanted)


@pytest.mark.parametrize("place", ["cpu", "cuda"])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu(approximate: str, place: str) -> None:
    """Far right of 0 the slope is 1, far left 0; between, every number of fp16 has its own."""
    x = np.concatenate([ENDS, np.linspace(-8, 8, 4001), np.linspace(-0.01, 0.01, 201)])[:, None]
    ((dx, truth),) = compared("Gelu", [x], np.ones_like(x), place, approximate=approximate)
    floor = 4.0 if approximate == "none" else 64.0  # left of -4 the formula itself cancels in fp32
    assert near(dx, truth, floor=floor), np.abs(dx - truth).max()


@pytest.mark.parametrize("place", ["cpu", "cuda"])
@pytest.mark.parametrize("alpha", [1.0, 1.702])
def test_quick_gelu(alpha: float, place: str) -> None:
    """Far right of 0 the slope is 1, far left 0, also where alpha times the number leaves fp16."""

    def forward(x: Array) -> list[Array]:
        return [x * special.expit(alpha * x)]

    x = np.concatenate([ENDS, np.linspace(-16, 16, 4001), np.linspace(-0.01, 0.01, 201)])[:, None]
    for dy in (1.0, -30000.0, 1e-3):
        given = {} if alpha > 1 else {"alpha": alpha}
        ((dx, truth),) = compared("com.microsoft::QuickGelu", [x], np.full_like(x, dy), place, forward, **given)
        assert np.abs(dx - truth).max() <= 2.0**-9 * abs(dy) + 4 * SUBNORMAL, dy
        steep = np.abs(truth) > 0.1 * abs(dy)
        assert near(dx[steep][:, None], truth[steep][:, None], units=4 * alpha), dy


@pytest.mark.parametrize("place", ["cpu", "cuda"])
@pytest.mark.parametrize("type_", ["Softmax", "LogSoftmax"])
def test_rows_of_scores(type_: str, place: str) -> None:
    """Equal scores, one that is far above the others, scores that differ little, gradients at both ends."""
    rng = np.random.default_rng(0)
    rows = [np.zeros(WIDTH), np.full(WIDTH, LARGEST), np.eye(WIDTH)[3] * 1000, rng.normal(size=WIDTH)]
    dy = rng.normal(size=(len(rows), WIDTH))
    for scale in (1.0, 10000.0 if type_ == "Softmax" else 300.0, 1e-6, 0.0):  # the sum of a row has to fit
        ((dx, truth),) = compared(type_, [np.stack(rows)], dy * scale, place, axis=-1)
        largest = np.abs(dy * scale).max(axis=-1, keepdims=True)
        assert (np.abs(dx - truth) <= 2.0**-8 * largest + 4 * SUBNORMAL).all(), scale
        if type_ == "Softmax":
            assert near(dx, truth, units=8), scale


@pytest.mark.parametrize("place", ["cpu", "cuda"])
@pytest.mark.parametrize("epsilon", [1e-5, 1e-12])
def test_layer_normalization(epsilon: float, place: str) -> None:
    """One huge element, a large mean, tiny numbers; a row of equal values without a gradient gives none."""
    rng = np.random.default_rng(1)
    rows = [rng.normal(size=WIDTH), rng.normal(size=WIDTH) + 200, np.eye(WIDTH)[5] * LARGEST, rng.normal(size=WIDTH)]
    rows += [np.full(WIDTH, 0.1), np.zeros(WIDTH)]
    dy = rng.normal(size=(len(rows), WIDTH))
    dy[4:] = 0.0
    scale, bias = rng.uniform(0.5, 1.5, (2, WIDTH))
    for size in (1.0, 1000.0, 1e-5):
        (dx, truth), *vectors = compared(
            "LayerNormalization", [np.stack(rows), scale, bias], dy * size, place, epsilon=epsilon
        )
        assert near(dx, truth, units=8), size
        assert not dx[4:].any()
        for found, wanted in vectors:
            assert near(found, wanted, units=8), size


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_instance_normalization(place: str) -> None:
    """Large means, of a gradient too; tiny numbers; equal values without a gradient give none."""
    rng = np.random.default_rng(1)
    x, dy = rng.normal(size=(2, 2, 5, WIDTH))
    x[:, 1] += 200
    x[:, 4], dy[:, 4] = 0.1, 0.0
    dy[:, 2] += 50
    scale, bias = rng.uniform(0.5, 1.5, (2, 5))
    for size in (1.0, 8.0, 1e-5):
        (dx, truth), *vectors = compared("InstanceNormalization", [x, scale, bias], dy * size, place)
        assert near(dx, truth, units=8), size
        assert not dx[:, 4].any()
        for found, wanted in vectors:
            assert near(found, wanted, units=8), size


@pytest.mark.parametrize("place", ["cpu", "cuda"])
@pytest.mark.parametrize("epsilon", [1e-5, 1e-12])
def test_rms_normalization(epsilon: float, place: str) -> None:
    """One huge element, large and tiny numbers; a row of zeros without a gradient gives none."""
    rng = np.random.default_rng(1)
    rows = [rng.normal(size=WIDTH), rng.normal(size=WIDTH) * 9000, np.eye(WIDTH)[5] * LARGEST, rng.normal(size=WIDTH)]
    rows += [rng.normal(size=WIDTH) * 1e-4, np.zeros(WIDTH)]
    dy = rng.normal(size=(len(rows), WIDTH))
    dy[5:] = 0.0
    scale = rng.uniform(0.5, 1.5, WIDTH)

    def forward(x: Array, scale: Array) -> list[Array]:
        return [x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * scale]

    for size in (1.0, 50.0) if epsilon < 1e-5 else (1.0, 1000.0, 1e-5):
        (dx, truth), (found, wanted) = compared(
            "SimplifiedLayerNormalization", [np.stack(rows), scale], dy * size, place, forward, epsilon=epsilon
        )
        fits = np.abs(truth).max(axis=-1) < LARGEST
        assert fits.sum() >= 5 and near(dx[fits], truth[fits], units=8), size
        assert not dx[5:].any()
        assert near(found, wanted, units=8), size


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_small_gradients_of_roots(place: str) -> None:
    """Half of dy is too small for fp16, the result is not."""
    x = np.array([[3e-6, 1e-5, 4e-5, 0.3]])
    ((dx, truth),) = compared("Sqrt", [x], np.full_like(x, 1.2e-6), place)
    assert near(dx, truth, floor=0.5), (dx, truth)


@pytest.mark.parametrize("place", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("type_", "shapes", "attrs"),
    [
        ("Gelu", [(0, 4)], {}),
        ("Gelu", [(3, 0)], {"approximate": "tanh"}),
        ("Softmax", [(0, 4)], {}),
        ("Div", [(0, 4), (4,)], {}),
        ("LayerNormalization", [(0, 4), (4,), (4,)], {}),
        ("InstanceNormalization", [(0, 4, 8), (4,), (4,)], {}),
        ("SimplifiedLayerNormalization", [(0, 4), (4,)], {}),
        ("Conv", [(0, 4, 5, 5), (4, 2, 3, 3), (4,)], {"group": 2}),
        ("AveragePool", [(1, 2, 3, 3)], {"kernel_shape": [4, 1]}),
    ],
)
def test_nothing_in_nothing_out(type_: str, shapes: list[tuple[int, ...]], attrs: dict[str, Any], place: str) -> None:
    """An empty batch has empty gradients, and leaves those of parameters zero; so do windows larger than an image."""
    inputs = [np.zeros(shape) for shape in shapes]
    size = {"Conv": (0, 4, 3, 3), "AveragePool": (1, 2, 0, 3)}.get(type_, shapes[0])
    case = Case(type_, inputs, attrs, wrt=range(len(inputs)))
    values = {f"x{i}": a for i, a in enumerate(inputs)} | {"y0": np.zeros(size), "dy0": np.zeros(size)}
    half = Gradient(case, "float16", values, case.wrt)
    model = half.model(place)
    feeds = half.feeds(model)
    known = node_by_node(model, feeds) if place == "cuda" else {}
    found = [known[o.name] for o in model.graph.output] if known else run_cpu(model, feeds)
    assert [a.shape for a in found] == shapes
    assert not any(a.any() for a in found)


STORED = {
    "Gelu": (1, {}),
    "Erf": (1, {}),
    "Tanh": (1, {}),
    "Sigmoid": (1, {}),
    "Softplus": (1, {}),
    "LeakyRelu": (1, {}),
    "HardSwish": (1, {}),
    "Elu": (1, {}),
    "Sqrt": (1, {}),
    "Softmax": (1, {}),
    "LogSoftmax": (1, {}),
    "Mul": (2, {}),
    "Div": (2, {}),
    "Add": (2, {}),
    "MatMul": (2, {}),
    "Gemm": (2, {"transB": 1}),
}


@pytest.mark.parametrize("type_", [*STORED, "LayerNormalization", "InstanceNormalization", "GroupNormalization"])
def test_nothing_large_is_stored_in_fp32(type_: str) -> None:
    """Nor is a tensor transposed for a product."""
    rng = np.random.default_rng(0)
    x = rng.uniform(0.5, 1.5, (4, 8, 64))
    if type_ in STORED:
        count, attrs = STORED[type_]
        inputs = [x] if count == 1 else [x, x.swapaxes(1, 2) if type_ == "MatMul" else x[0, 0]]
        if type_ == "Gemm":
            inputs = [x[0], x[1]]
    else:
        inputs = [x, np.ones(64), np.zeros(64)] if type_ == "LayerNormalization" else [x, np.ones(8), np.zeros(8)]
        attrs = {"num_groups": 4} if type_ == "GroupNormalization" else {}
    model = onnx.shape_inference.infer_shapes(gradient_model(type_, inputs, "float16", "cuda", **attrs))
    sizes = {
        v.name: int(np.prod([d.dim_value for d in v.type.tensor_type.shape.dim]))
        for v in model.graph.value_info
        if v.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    }
    assert all(size <= 64 for size in sizes.values()), sizes
    assert "Transpose" not in {node.op_type for node in model.graph.node}


def test_ones_that_long_rows_are_normalised_with_are_made_once() -> None:
    """Of x and of its gradient."""
    inputs = [np.zeros((1, 4, 70_000)), np.ones(4), np.zeros(4)]
    model = gradient_model("InstanceNormalization", inputs, "float16", "cuda")
    assert [node.op_type for node in model.graph.node].count("Expand") == 1
