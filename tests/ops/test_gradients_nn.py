"""Gradient rules of convolutions and pools."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import onnx
import pytest
from hypothesis import given, strategies as st

import amp_transpiler as amp
from amp_transpiler.errors import GraphError
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.nn import functional as F
from amp_transpiler.ops import kernel_gradient
from amp_transpiler.ops.window import Window
from tests.helpers.forwardcheck import check_forward
from tests.helpers.gradcheck import check_gradient, few, gradient_model, normal, seeds
from tests.helpers.rules import as_model, run_cpu, run_reference, tensor_info

pytestmark = pytest.mark.rules

#: At the operator set of training programs these operators have no bfloat16 in their schema.
FP16 = ("float16",)


def distinct(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Values that differ from each other by at least 1/8, all of which 16 bit holds: no ties."""
    size = int(np.prod(shape))
    return (np.random.default_rng(seed).permutation(size) - size // 2).reshape(shape) / 8


@dataclass(frozen=True)
class Sliding:
    """A window's attributes and an input size that it fits."""

    kernel: list[int]
    spatial: list[int]
    attrs: dict[str, Any]


@st.composite
def sliding(draw: st.DrawFn, rank: int, *, pools: bool = False, automatic: bool = True) -> Sliding:
    """Kernel, strides, dilations and padding of ``rank`` axes, and sizes that leave tails unread or not."""

    def each(low: int, high: int) -> list[int]:
        return draw(st.lists(st.integers(low, high), min_size=rank, max_size=rank))

    kernel, strides = each(1, 3), each(1, 3)
    dilations = draw(st.sampled_from([[1] * rank, each(1, 2)]))
    attrs: dict[str, Any] = {"strides": strides, "dilations": dilations}
    if automatic and draw(st.booleans()):
        attrs["auto_pad"] = draw(st.sampled_from(["SAME_UPPER", "SAME_LOWER", "VALID"]))
        if attrs["auto_pad"] != "VALID":  # onnxruntime's convolutions refuse it dilated, its pools pad by other rules
            attrs["dilations"] = dilations = [1] * rank
            attrs["strides"] = [min(s, k + 1) for s, k in zip(strides, kernel, strict=True)]
    else:
        limits = [k - 1 if pools else 2 for k in kernel]
        attrs["pads"] = [min(*pair) for pair in zip(each(0, 2) + each(0, 2), limits * 2, strict=True)]
    spatial = [(k - 1) * d + 1 + n for k, d, n in zip(kernel, dilations, each(0, 4), strict=True)]
    if pools:
        attrs["kernel_shape"] = kernel
        if "pads" in attrs:
            attrs["ceil_mode"] = draw(st.integers(0, 1))
    return Sliding(kernel, spatial, attrs)


# -- convolutions ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("rank", [1, 2, 3])
@few
@given(
    data=st.data(),
    groups=st.sampled_from([1, 1, 2, 3]),
    channels=st.integers(1, 3),
    outputs=st.integers(1, 3),
    bias=st.booleans(),
    seed=seeds,
)
def test_conv(rank: int, data: st.DataObject, groups: int, channels: int, outputs: int, bias: bool, seed: int) -> None:
    window = data.draw(sliding(rank))
    x, w, b = normal(
        seed, (2, groups * channels, *window.spatial), (groups * outputs, channels, *window.kernel), (groups * outputs,)
    )
    check_gradient("Conv", [x, w, b] if bias else [x, w], attrs={**window.attrs, "group": groups}, half=FP16)


@pytest.mark.parametrize(
    ("channels", "outputs", "kernel", "group"),
    [(16, 3, 3, 1), (3, 2, 1, 1), (2, 2, 6, 1), (4, 4, 3, 4), (4, 8, 6, 2)],
    ids=["gemms", "pointwise", "convolution", "depthwise", "convolution-groups"],
)
def test_conv_in_each_form_of_its_weight_gradient(channels: int, outputs: int, kernel: int, group: int) -> None:
    x, w = normal(1, (2, channels, 9, 8), (outputs, channels // group, kernel, kernel))
    check_gradient("Conv", [x, w], attrs={"group": group, "strides": [2, 1], "pads": [1, 0, 1, 2]}, half=FP16)


def in_parts(e: Emitter, x: Value, dy: Value, window: Window, group: int) -> Value:
    """As if no more than three positions of the kernel fitted, nor any constant."""
    most = 3 * math.prod((*x.shape[:2], *window.target))
    with mock.patch.multiple(kernel_gradient, _MOST_GATHERED=most, LONG=0):
        return kernel_gradient.by_gathering(e, x, dy, window, group)


def one_by_one(e: Emitter, x: Value, dy: Value, window: Window, group: int) -> Value:
    """As if one group fitted at once, and no constant."""
    with mock.patch.multiple(kernel_gradient, _MOST_GATHERED=1, LONG=0):
        return kernel_gradient.by_axis(e, x, dy, window, group)


FORMS = {
    "convolution": kernel_gradient.by_convolution,
    "gemms": lambda e, x, dy, window, group: kernel_gradient.by_gemms(e, x, dy, window),
    "gathering": kernel_gradient.by_gathering,
    "gathering in parts": in_parts,
    "grouped": kernel_gradient.by_grouped_gemms,
    "unfolding": lambda e, x, dy, window, group: kernel_gradient.by_unfolding(e, x, dy, window),
}


#: Those that take any group; the first is what the others are compared with.
OF_GROUPS = {
    "convolution": kernel_gradient.by_convolution,
    "grouped": kernel_gradient.by_grouped_gemms,
    "gathering": kernel_gradient.by_gathering,
    "by axis": kernel_gradient.by_axis,
    "by axis, one by one": one_by_one,
}


@few
@given(window=sliding(2, automatic=False), seed=seeds)
def test_every_form_of_the_weight_gradient_agrees(window: Sliding, seed: int) -> None:
    _agree(FORMS, window, seed, (2, 3), 1)


#: Those of a kernel of one position.
OF_ONE_POSITION = {
    "convolution": kernel_gradient.by_convolution,
    "one product": lambda e, x, dy, window, group: kernel_gradient.by_one_gemm(e, x, dy, window),
    "images": lambda e, x, dy, window, group: kernel_gradient.by_images(e, x, dy, window),
}


@few
@given(window=sliding(2, automatic=False), seed=seeds)
def test_every_form_of_one_position_agrees(window: Sliding, seed: int) -> None:
    pads = [pad * (sum(window.spatial) % 2) for pad in window.attrs["pads"]]
    one = Sliding([1, 1], window.spatial, window.attrs | {"pads": pads, "dilations": [1, 1]})
    _agree(OF_ONE_POSITION, one, seed, (3, 2), 1)


@pytest.mark.parametrize(("channels", "side", "form"), [(16, 14, "by_images"), (512, 2, "by_one_gemm")])
def test_products_of_images_are_added_up_where_images_are_larger(
    monkeypatch: pytest.MonkeyPatch, channels: int, side: int, form: str
) -> None:
    for name in ("by_images", "by_one_gemm"):
        monkeypatch.setattr(kernel_gradient, name, lambda *_, name=name: name)
    window = Window((1, 1), (1, 1), (1, 1), (0, 0), (side, side), (side, side))
    x, dy = (Value(name, "float32", (8, channels, side, side)) for name in ("x", "dy"))
    assert kernel_gradient.weight_gradient(Emitter("cpu"), x, dy, window, 1) == form


@pytest.mark.parametrize("rank", [2, 3])
@few
@given(data=st.data(), seed=seeds, channels=st.integers(1, 2), outputs=st.integers(1, 2), group=st.integers(1, 3))
def test_every_form_of_groups_agrees(
    rank: int, data: st.DataObject, seed: int, channels: int, outputs: int, group: int
) -> None:
    window = data.draw(sliding(rank, automatic=False))
    window.attrs["strides"][-1] = 1
    forms = OF_GROUPS if group > 1 else OF_GROUPS | {"by axis, of all": kernel_gradient.by_axis_of_all}
    _agree(forms, window, seed, (channels * group, outputs * group), group)


def _agree(forms: dict[str, Any], window: Sliding, seed: int, sizes: tuple[int, int], group: int) -> None:
    """Forms give what the first of them gives, of so many channels and outputs."""
    strides, dilations, pads = (window.attrs[name] for name in ("strides", "dilations", "pads"))
    rank = len(window.spatial)
    target = [
        (n + pads[i] + pads[rank + i] - (k - 1) * dilations[i] - 1) // strides[i] + 1
        for i, (n, k) in enumerate(zip(window.spatial, window.kernel, strict=True))
    ]
    geometry = Window(*map(tuple, (window.kernel, strides, dilations, pads[:rank], window.spatial, target)))
    x, dy = normal(seed, (2, sizes[0], *window.spatial), (2, sizes[1], *target))
    for dtype, tolerance in (("float64", 1e-12), ("float16", 2e-2)):
        results = list[Any]()
        for name, form in forms.items():
            e = Emitter("reference")
            e.reserve(["x", "dy"])
            dw = form(e, Value("x", dtype, x.shape), Value("dy", dtype, dy.shape), geometry, group)
            assert dw.shape == (sizes[1], sizes[0] // group, *window.kernel)
            infos = [tensor_info("x", dtype, x.shape), tensor_info("dy", dtype, dy.shape)]
            out = tensor_info(dw.name, dtype, dw.shape)
            model = as_model(onnx.helper.make_graph(e.nodes, name, infos, [out], list(e.initializers.values())))
            results.append(run_reference(model, {"x": x.astype(dtype), "dy": dy.astype(dtype)})[0])
            atol = tolerance * (np.abs(results[0]).max() + 1)
            np.testing.assert_allclose(results[-1], results[0], rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("rank", [1, 2, 3])
@few
@given(
    data=st.data(),
    groups=st.sampled_from([1, 2]),
    channels=st.integers(1, 3),
    outputs=st.integers(1, 2),
    bias=st.booleans(),
    seed=seeds,
)
def test_conv_transpose(
    rank: int, data: st.DataObject, groups: int, channels: int, outputs: int, bias: bool, seed: int
) -> None:
    strides, dilations = (data.draw(st.lists(st.integers(1, 3), min_size=rank, max_size=rank)) for _ in range(2))
    kernel, spatial = (data.draw(st.lists(st.integers(1, 3), min_size=rank, max_size=rank)) for _ in range(2))
    attrs: dict[str, Any] = {"strides": strides, "dilations": dilations, "group": groups}
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    form = data.draw(st.sampled_from(["pads", "output_padding", "auto_pad", "output_shape"]))
    extra = [data.draw(st.integers(0, max(s, d) - 1)) for s, d in zip(strides, dilations, strict=True)]
    if form == "pads":
        attrs["pads"] = [data.draw(st.integers(0, (k - 1) // 2)) for k in reach * 2]
    elif form == "output_padding":
        attrs["output_padding"] = extra
    elif all(k >= s for k, s in zip(reach, strides, strict=True)):  # otherwise SAME would need negative padding
        attrs["auto_pad"] = data.draw(st.sampled_from(["SAME_UPPER", "SAME_LOWER"]))
        if form == "output_shape":
            attrs["output_shape"] = [n * s for n, s in zip(spatial, strides, strict=True)]
    x, w, b = normal(seed, (2, groups * channels, *spatial), (groups * channels, outputs, *kernel), (groups * outputs,))
    check_gradient("ConvTranspose", [x, w, b] if bias else [x, w], attrs=attrs, half=FP16)


# -- pools ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rank", [1, 2, 3])
@few
@given(data=st.data(), channels=st.integers(1, 3), seed=seeds)
def test_max_pool(rank: int, data: st.DataObject, channels: int, seed: int) -> None:
    window = data.draw(sliding(rank, pools=True))
    check_gradient("MaxPool", [distinct(seed, (2, channels, *window.spatial))], attrs=window.attrs, half=FP16)


@pytest.mark.parametrize("kernel", [[2], [2, 2], [3, 3], [1, 2], [2, 1, 2], [4, 3]])
def test_max_pool_of_tiles(kernel: list[int]) -> None:
    shape = (2, 3, *(k * n for k, n in zip(kernel, (3, 2, 2), strict=False)))
    check_gradient("MaxPool", [distinct(2, shape)], attrs={"kernel_shape": kernel, "strides": kernel}, half=FP16)


def test_padded_windows_are_no_tiles_though_the_sizes_fit() -> None:
    attrs = {"kernel_shape": [2, 2], "strides": [2, 2], "pads": [1, 1, 0, 0]}
    check_gradient("MaxPool", [distinct(2, (2, 3, 4, 6))], attrs=attrs, half=FP16)


@pytest.mark.parametrize("place", ["cpu", "cuda", "reference"])
@pytest.mark.parametrize("strides", [[2, 2], [1, 2], [3, 3]])
def test_a_tie_goes_to_the_first_maximum(strides: list[int], place: str) -> None:
    rng = np.random.default_rng(3)
    x = np.maximum(rng.normal(size=(3, 4, 6, 6)) - 0.5, 0).astype(np.float32)  # most windows are all zero
    windows = np.lib.stride_tricks.sliding_window_view(x, (2, 2), (2, 3))[:, :, :: strides[0], :: strides[1]]
    dy = rng.normal(size=windows.shape[:4]).astype(np.float32)
    expected = np.zeros_like(x)
    for n, c, i, j in np.ndindex(*dy.shape):
        first = np.unravel_index(np.argmax(windows[n, c, i, j]), (2, 2))
        expected[n, c, i * strides[0] + first[0], j * strides[1] + first[1]] += dy[n, c, i, j]
    model = gradient_model("MaxPool", [x], "float32", place, kernel_shape=[2, 2], strides=strides)
    fed = {"x0": x, "y0": windows.max((4, 5)), "dy0": dy}
    run = run_reference if place == "reference" else run_cpu
    dx = run(model, {i.name: fed[i.name] for i in model.graph.input})[0]
    np.testing.assert_allclose(dx, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dx.sum((2, 3)), dy.sum((2, 3)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_pool_of_tiles_on_a_gpu_takes_no_positions_nor_zeros_and_drops_what_dead_units_get(dtype: str) -> None:
    """Relu, then MaxPool: both gradients by numpy, bit for bit, ties, -0.0 and huge ones included, in one selection."""
    main, shape = amp.Program(), (2, 3, 4, 6)
    with amp.program_guard(main, amp.Program()), amp.unique_name.guard():
        p = amp.create_parameter(list(shape), dtype, "p")
        h = F.relu(p)
        pooled = F.max_pool2d(h, [2, 3], [2, 3])
        loss = F.mean(F.cast(pooled * amp.data("w", [2, 3, 2, 2], dtype), "float32"))
        amp.append_backward(loss)
    rng = np.random.default_rng(0)
    fed = {"p": rng.integers(-3, 2, shape).astype(dtype), "w": rng.integers(-9, 9, (2, 3, 2, 2)).astype(dtype)}
    fed["p"][0, 0, :2], fed["w"][0, 0, 0] = -1, (-0.0, 60000)
    live = np.maximum(fed["p"], 0)
    tiles = live.reshape(2, 3, 2, 2, 2, 3).swapaxes(3, 4).reshape(2, 3, 2, 2, 6)
    dy = fed["w"] * np.asarray(1 / 24, dtype)
    expected = np.where(np.arange(6) == tiles.argmax(-1)[..., None], dy[..., None], 0).astype(dtype)
    expected = expected.reshape(2, 3, 2, 2, 2, 3).swapaxes(3, 4).reshape(shape)
    lowered = main.lower(amp.CUDAPlace(0), fetch_list=["p@GRAD"])
    kinds = [node.op_type for node in lowered.model.graph.node]
    assert "ScatterElements" not in kinds and kinds.count("Greater") == 1
    both = main.lower(amp.CUDAPlace(0), fetch_list=["p@GRAD", f"{h.name}@GRAD"])
    for found, wanted in (
        (run_reference(lowered.model, fed)[0], np.where(live > 0, expected, np.zeros_like(expected))),
        (run_reference(both.model, fed)[1], expected),
    ):
        np.testing.assert_array_equal(found, wanted)


def test_a_tile_with_nan_gets_no_gradient_on_a_gpu() -> None:
    x = np.array([[[[1, np.nan, 3, 2]]]], np.float32)
    model = gradient_model("MaxPool", [x], "float32", "cuda", kernel_shape=[1, 2], strides=[1, 2])
    fed = {"x0": x, "y0": np.array([[[[np.nan, 3]]]], np.float32), "dy0": np.ones((1, 1, 1, 2), np.float32)}
    dx = run_cpu(model, {i.name: fed[i.name] for i in model.graph.input})[0]
    np.testing.assert_array_equal(dx, [[[[0, 0, 1, 0]]]])


@pytest.mark.parametrize("rank", [1, 2, 3])
@few
@given(data=st.data(), include=st.booleans(), channels=st.integers(1, 3), seed=seeds)
def test_average_pool(rank: int, data: st.DataObject, include: bool, channels: int, seed: int) -> None:
    window = data.draw(sliding(rank, pools=True))
    x = normal(seed, (2, channels, *window.spatial))
    check_gradient("AveragePool", x, attrs={**window.attrs, "count_include_pad": int(include)}, half=FP16)


@pytest.mark.parametrize("unusual", [{"strides": [4]}, {"dilations": [2]}])
def test_average_pool_with_padding_that_the_runtime_defines_differently_is_an_error(
    unusual: dict[str, list[int]],
) -> None:
    attrs = {"kernel_shape": [2], "auto_pad": "SAME_UPPER", **unusual}
    with pytest.raises(GraphError, match="Give the padding as pads"):
        gradient_model("AveragePool", [np.zeros((1, 1, 9))], "float32", "cpu", **attrs)


def norms(x: np.ndarray, p: int) -> list[np.ndarray]:
    return [(np.abs(x) ** p).sum(tuple(range(2, x.ndim)), keepdims=True) ** (1 / p)]


@few
@given(spatial=st.lists(st.integers(1, 4), min_size=1, max_size=3), seed=seeds)
def test_global_pools(spatial: list[int], seed: int) -> None:
    shape = (2, 3, *spatial)
    check_gradient("GlobalAveragePool", normal(seed, shape), half=FP16)
    check_gradient("GlobalMaxPool", [distinct(seed, shape)], half=FP16)
    for p in (1, 2, 3):
        check_gradient("GlobalLpPool", normal(seed, shape), attrs={"p": p}, forward=partial(norms, p=p))


@pytest.mark.parametrize("p", [1, 2, 3])
def test_global_norms_are_of_powers_that_leave_float16(p: int) -> None:
    """Of places other than the CPU fp32 computes here; with ``--place`` the device does, in 16 bit too."""
    check_forward(
        "GlobalLpPool", [40 * np.abs(normal(7, (2, 3, 5, 5))[0])], attrs={"p": p}, forward=partial(norms, p=p)
    )


@pytest.mark.parametrize("type_", ["MaxPool", "AveragePool"])
@few
@given(data=st.data(), rank=st.integers(1, 3), include=st.booleans(), seed=seeds)
def test_the_pools_that_are_differentiated_are_those_of_onnxruntime(
    type_: str, data: st.DataObject, rank: int, include: bool, seed: int
) -> None:
    window = data.draw(sliding(rank, pools=True))
    attrs = dict(window.attrs) | ({"count_include_pad": int(include)} if type_ == "AveragePool" else {})
    _assert_same_forward(type_, [distinct(seed, (2, 2, *window.spatial))], attrs, 2 if type_ == "MaxPool" else 1)


def _assert_same_forward(type_: str, inputs: list[np.ndarray], attrs: dict[str, Any], outputs: int = 1) -> None:
    names = [f"x{i}" for i in range(len(inputs))]
    node = onnx.helper.make_node(type_, names, [f"y{i}" for i in range(outputs)], **attrs)
    fed = {n: a.astype(np.float32) for n, a in zip(names, inputs, strict=True)}
    infos = [tensor_info(n, "float32", a.shape) for n, a in fed.items()]
    outs = [onnx.helper.make_empty_tensor_value_info(name) for name in node.output]
    model = as_model(onnx.helper.make_graph([node], type_, infos, outs))
    for ours, theirs in zip(run_reference(model, fed), run_cpu(model, fed), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@few
@given(data=st.data(), groups=st.integers(1, 3), seed=seeds)
def test_the_transposed_convolution_that_is_differentiated_is_that_of_onnxruntime(
    data: st.DataObject, groups: int, seed: int
) -> None:
    window = data.draw(sliding(2, automatic=False))
    spatial = [n + 2 for n in window.spatial]
    pads = [min(p, (k - 1) // 2) for p, k in zip(window.attrs["pads"], window.kernel * 2, strict=True)]
    x, w = normal(seed, (2, groups * 2, *spatial), (groups * 2, 3, *window.kernel))
    _assert_same_forward("ConvTranspose", [x, w], {**window.attrs, "pads": pads, "group": groups})
