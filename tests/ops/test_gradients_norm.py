"""Gradient rules of normalisations."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, strategies as st

import amp_transpiler as amp
from amp_transpiler.errors import GradientError
from amp_transpiler.ir.weights import become_constants
from tests.helpers.gradcheck import check_gradient, few, normal, seeds
from tests.helpers.slopes import assert_slope, slope

pytestmark = pytest.mark.rules

#: At the operator set of training programs these operators have no bfloat16 in their schema.
FP16 = ("float16",)


@st.composite
def images(draw: st.DrawFn, min_rank: int = 0, divisible: int = 1) -> tuple[int, ...]:
    """At least 6 elements a channel: with fewer, the gradient through the statistics cancels almost to nothing."""
    spatial = draw(st.lists(st.integers(2, 4), min_size=min_rank, max_size=3))
    lengthened = [6, *spatial[1:]] if spatial else []
    return (draw(st.integers(2, 4)) if spatial else 8, divisible * draw(st.integers(1, 3)), *lengthened)


@pytest.mark.parametrize("mixed", [False, True], ids=["one-type", "fp32-statistics"])
@pytest.mark.parametrize("training", [0, 1], ids=["frozen", "training"])
@few
@given(shape=images(), epsilon=st.sampled_from([1e-3, 0.1]), seed=seeds)
def test_batch_normalization(training: int, mixed: bool, shape: tuple[int, ...], epsilon: float, seed: int) -> None:
    channels = (shape[1],)
    x, scale, bias, mean, var = normal(seed, shape, *[channels] * 4)
    check_gradient(
        "BatchNormalization",
        [x, scale, bias, mean, np.abs(var) + 0.2],
        attrs={"training_mode": training, "epsilon": epsilon},
        outputs=3 if training else 1,
        wrt=(0, 1, 2, 3, 4),  # statistics may be computed: of weights that are standardised
        keep_fp32=(1, 2, 3, 4) if mixed else (),
    )


@pytest.mark.parametrize("mixed", [False, True], ids=["one-type", "fp32-scale"])
@few
@given(shape=st.lists(st.integers(3, 5), min_size=1, max_size=4), bias=st.booleans(), data=st.data(), seed=seeds)
def test_layer_normalization(mixed: bool, shape: list[int], bias: bool, data: st.DataObject, seed: int) -> None:
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    tail = tuple(shape[axis:])
    inputs = normal(seed, tuple(shape), tail, tail)[: 3 if bias else 2]
    check_gradient(
        "LayerNormalization", inputs, attrs={"axis": axis, "epsilon": 1e-2}, keep_fp32=(1, 2) if mixed else ()
    )


@pytest.mark.parametrize("scale", [(), (1,), (4,), (3, 1), (1, 1, 4), (3, 4), (2, 1, 4), (2, 3, 1)], ids=str)
@pytest.mark.parametrize("axis", [1, -1])
def test_layer_normalization_with_a_scale_that_is_repeated_or_differs_between_rows(
    axis: int, scale: tuple[int, ...]
) -> None:
    check_gradient("LayerNormalization", normal(3, (2, 3, 4), scale, scale), attrs={"axis": axis, "epsilon": 1e-2})


def rms_normalization(axis: int, epsilon: float) -> Any:
    def forward(x: np.ndarray, scale: np.ndarray) -> list[np.ndarray]:
        axes = tuple(range(axis % x.ndim, x.ndim))
        return [x / np.sqrt((x**2).mean(axes, keepdims=True) + epsilon) * scale]

    return forward


@pytest.mark.parametrize("mixed", [False, True], ids=["one-type", "fp32-scale"])
@few
@given(shape=st.lists(st.integers(3, 5), min_size=1, max_size=4), data=st.data(), seed=seeds)
def test_rms_normalization(mixed: bool, shape: list[int], data: st.DataObject, seed: int) -> None:
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    check_gradient(
        "SimplifiedLayerNormalization",
        normal(seed, tuple(shape), tuple(shape[axis:])),
        attrs={"axis": axis, "epsilon": 1e-2},
        forward=rms_normalization(axis, 1e-2),
        keep_fp32=(1,) if mixed else (),
    )


@pytest.mark.parametrize("mixed", [False, True], ids=["one-type", "fp32-scale"])
@few
@given(shape=images(min_rank=1), seed=seeds)
def test_instance_normalization(mixed: bool, shape: tuple[int, ...], seed: int) -> None:
    x, scale, bias = normal(seed, shape, shape[1:2], shape[1:2])
    check_gradient(
        "InstanceNormalization", [x, scale, bias], attrs={"epsilon": 1e-3}, half=FP16, keep_fp32=(1, 2) if mixed else ()
    )


@pytest.mark.parametrize("scale", ["1", "3,4", "2,1,4"])
def test_a_root_mean_square_with_a_scale_of_other_axes_is_taken_apart(scale: str) -> None:
    head = f'<ir_version: 8, opset_import: ["" : 17]> g (float[2,3,4] x) => (float[2,3,4] y) <float[{scale}] s, float[4] o>'
    each, x = normal(0, tuple(map(int, scale.split(","))), (2, 3, 4))
    programs = []
    for body in ("y = SimplifiedLayerNormalization(x, s)", "n = SimplifiedLayerNormalization(x, o)  y = Mul(n, s)"):
        model = onnx.parser.parse_model(f"{head} {{ {body} }}")
        del model.graph.initializer[:]
        for name, array in {"s": each, "o": np.ones(4)}.items():
            model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
        programs.append(amp.Program.from_onnx(model))
        become_constants(programs[-1])
    assert_slope(programs[0], x.astype(np.float32), slope(programs[1], x.astype(np.float32)))


@pytest.mark.parametrize(
    "body",
    [
        "LayerNormalization(x, s, b)",
        "SimplifiedLayerNormalization(x, s)",
        "GroupNormalization<num_groups = 2>(x, s, b)",
    ],
)
def test_norms_of_float64_have_gradients_in_float64(body: str) -> None:
    found = {}
    for kind, dtype in {"float": np.float32, "double": np.float64}.items():
        given = f"{kind}[4] s = {{1, 2, 3, 4}}, {kind}[4] b = {{0, 1, 0, 1}}"
        text = f'<ir_version: 8, opset_import: ["" : 21]> g ({kind}[2,4,4] x) => ({kind}[2,4,4] y) <{given}> {{ y = {body} }}'
        program = amp.Program.from_onnx(onnx.parser.parse_model(text))
        become_constants(program)
        found[kind] = slope(program, normal(0, (2, 4, 4))[0].astype(dtype))
    for narrow, wide in zip(found["float"], found["double"], strict=True):
        assert wide.dtype == np.float64
        np.testing.assert_allclose(narrow, wide, rtol=1e-5, atol=1e-5)


def test_a_batch_normalization_of_one_axis_is_refused_by_name() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[6] x) => (float[6] y)
        <float[1] s = {2}, float[1] b = {0}, float[1] m = {0}, float[1] v = {1}> { y = BatchNormalization(x, s, b, m, v) }"""
    with pytest.raises(GradientError, match=r"has one axis; reshape it to \[N, 1\]"):
        slope(amp.Program.from_onnx(onnx.parser.parse_model(text)), np.ones(6, np.float32))


def test_instance_normalization_by_a_known_scale() -> None:
    """The same as by ones and a product: where the scale is known to be 1, it is left out."""
    head = '<ir_version: 8, opset_import: ["" : 17]> g (float[2,3,8] x) => (float[2,3,8] y) <float[3] one = {1, 1, 1}, '
    head += "float[3] scale = {2, 1, -3}, float[3,1] each = {2, 1, -3}, float[3] zero = {0, 0, 0}> "
    x = np.random.default_rng(0).standard_normal((2, 3, 8)).astype(np.float32)
    known, apart = (
        amp.Program.from_onnx(onnx.parser.parse_model(head + body))
        for body in (
            "{ y = InstanceNormalization(x, scale, zero) }",
            "{ n = InstanceNormalization(x, one, zero) y = Mul(n, each) }",
        )
    )
    for each in (known, apart):
        become_constants(each)
    assert_slope(known, x, slope(apart, x))


def group_normalization(groups: int, epsilon: float) -> Any:
    """GroupNormalization in float64; the operator's own function computes in fp32."""

    def forward(x: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> list[np.ndarray]:
        split = x.reshape(x.shape[0], groups, -1)
        centred = split - split.mean(2, keepdims=True)
        normal = (centred / np.sqrt((centred**2).mean(2, keepdims=True) + epsilon)).reshape(x.shape)
        column = (1, -1, *[1] * (x.ndim - 2))
        return [normal * scale.reshape(column) + bias.reshape(column)]

    return forward


@pytest.mark.parametrize("mixed", [False, True], ids=["one-type", "fp32-scale"])
@few
@given(shape=images(min_rank=1, divisible=2), groups=st.sampled_from([1, 2]), seed=seeds)
def test_group_normalization(mixed: bool, shape: tuple[int, ...], groups: int, seed: int) -> None:
    x, scale, bias = normal(seed, shape, shape[1:2], shape[1:2])
    check_gradient(
        "GroupNormalization",
        [x, scale, bias],
        attrs={"num_groups": groups, "epsilon": 1e-3},
        forward=group_normalization(groups, 1e-3),
        keep_fp32=(1, 2) if mixed else (),
    )
