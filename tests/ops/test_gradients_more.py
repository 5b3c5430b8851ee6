"""Gradient rules of Resize, padding by copies, scatters, Einsum with an ellipsis, LRN, and the rarer functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import GradientError
from amp_transpiler.nn import functional as F
from tests.helpers.forwardcheck import check_forward
from tests.helpers.gradcheck import Case, Gradient, check_gradient, gradient_model, gradient_values
from tests.helpers.rules import as_model, run_reference, tensor_info
from tests.helpers.sessions import session

pytestmark = pytest.mark.rules


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


# -- functions -----------------------------------------------------------------------------------------
FUNCTIONS: dict[str, np.ndarray] = {
    **dict.fromkeys(("Tan", "Asin", "Acos", "Atanh"), np.linspace(-0.9, 0.9, 12)),
    **dict.fromkeys(("Atan", "Sinh", "Cosh", "Asinh"), np.linspace(-3, 3, 13)),
    "Acosh": np.linspace(1.1, 5, 10),
}


@pytest.mark.parametrize("type_", FUNCTIONS)
def test_function(type_: str) -> None:
    check_gradient(type_, [FUNCTIONS[type_].reshape(2, -1) if FUNCTIONS[type_].size % 2 == 0 else FUNCTIONS[type_]])


def test_slopes_at_zero_are_exact() -> None:
    (dx,) = gradient_values("Cosh", [np.array([0.0, 1e-9])])
    np.testing.assert_allclose(dx, [0, 1e-9], rtol=1e-12)


def test_mod() -> None:
    a = np.array([[5.3, -5.3, 7.1], [0.4, 9.9, -2.2]])
    b = np.array([[2.0], [-1.5]])
    check_gradient("Mod", [a, b], attrs={"fmod": 1})
    (da, db) = gradient_values("Mod", [a, b], fmod=1)
    np.testing.assert_array_equal(da, np.ones((2, 3)))
    np.testing.assert_array_equal(db, -np.trunc(a / b).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("attrs", [{"lambd": 0.4, "bias": 0.1}, {}])
def test_shrink(attrs: dict[str, Any]) -> None:
    check_gradient("Shrink", [np.linspace(-1.93, 2.1, 16).reshape(4, 4)], attrs=attrs)


def test_cast_like() -> None:
    check_gradient("CastLike", [normal(2, 3), normal(4)], wrt=[0])


@pytest.mark.parametrize("axes", [{}, {"batch_axis": 0, "time_axis": 1}])
def test_reverse_sequence(axes: dict[str, int]) -> None:
    lengths = ints(1, 4, 2) if axes else ints(1, 3, 2, 2)
    check_gradient("ReverseSequence", [normal(3, 4, 2), lengths], attrs=axes, feeds=[1])


def test_max_unpool() -> None:
    attrs = {"kernel_shape": [2, 2], "strides": [2, 2]}
    at = np.stack([ints(1, 6), ints(10, 13)]).reshape(1, 2, 2, 1)

    def unpool(x: np.ndarray, *_: Any) -> list[np.ndarray]:
        y = np.zeros(16)
        y[at.reshape(-1)] = x.reshape(-1)
        return [y.reshape(1, 2, 4, 2)]

    check_gradient("MaxUnpool", [normal(1, 2, 2, 1), at], attrs=attrs, feeds=[1], forward=unpool)
    check_forward("MaxUnpool", [normal(1, 2, 2, 1), at], attrs=attrs, feeds=[1], forward=unpool)


@pytest.mark.parametrize(
    "columns,image,block,attrs",
    [
        ((2, 18, 16), (7, 9), (3, 3), {"strides": [2, 2], "pads": [1, 0, 1, 0]}),
        ((1, 12, 25), (8, 6), (2, 3), {"strides": [2, 1], "dilations": [1, 2], "pads": [1, 1, 2, 2]}),
        ((1, 6, 3), (7,), (3,), {"strides": [2]}),
    ],
)
def test_col2im(
    columns: tuple[int, ...], image: tuple[int, ...], block: tuple[int, ...], attrs: dict[str, Any]
) -> None:
    inputs = [normal(*columns), ints(*image), ints(*block)]
    check_gradient("Col2Im", inputs, attrs=attrs)
    check_forward("Col2Im", inputs, attrs=attrs)


# -- padding -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["reflect", "edge", "wrap"])
@pytest.mark.parametrize("widths", [(0, 2, 1, 3, 1, 0), (1, 0, 3, 0, 2, 2), (0, 5, 4, 0, 7, 9), (0, 0, 0, 0, 0, 0)])
def test_pad_by_copies(mode: str, widths: tuple[int, ...]) -> None:
    check_gradient("Pad", [normal(2, 3, 5), ints(*widths)], attrs={"mode": mode})


@pytest.mark.parametrize("mode", ["reflect", "edge", "wrap"])
def test_pad_by_copies_of_named_axes_and_with_cropping(mode: str) -> None:
    check_gradient("Pad", [normal(4, 5), ints(2, 3), None, ints(-1)], attrs={"mode": mode})

    def cropped(x: np.ndarray, *_: Any) -> list[np.ndarray]:
        return [np.pad(x[1:], ((0, 2), (0, 0)), mode={"wrap": "wrap"}.get(mode, mode))]  # type: ignore[call-overload]

    check_gradient("Pad", [normal(5, 2), ints(-1, 0, 2, 0)], attrs={"mode": mode}, forward=cropped)


# -- scatters ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("reduction", ["none", "add"])
def test_scatter_elements(reduction: str) -> None:
    data, updates = normal(4, 5), normal(2, 3)
    at = ints(1, 0, -1, 3, 2, 4).reshape(2, 3)
    attrs = {"axis": 1, "reduction": reduction}
    check_gradient("ScatterElements", [data, at, updates], attrs=attrs, feeds=[1])
    if reduction == "add":
        check_gradient("ScatterElements", [data, ints(1, 1, 1, 2, 2, 4).reshape(2, 3), updates], attrs=attrs)


@pytest.mark.parametrize("reduction", ["none", "add"])
def test_scatter_nd(reduction: str) -> None:
    attrs = {"reduction": reduction}
    check_gradient("ScatterND", [normal(4, 3), ints(2, 0).reshape(2, 1), normal(2, 3)], attrs=attrs, feeds=[1])
    pairs = ints(2, 0, 1, 2, 3, 1).reshape(3, 2)
    check_gradient("ScatterND", [normal(4, 3, 2), pairs, normal(3, 2)], attrs=attrs, feeds=[1])
    if reduction == "add":
        check_gradient("ScatterND", [normal(4, 3), ints(1, 1).reshape(2, 1), normal(2, 3)], attrs=attrs)


@pytest.mark.parametrize("reduction", ["max", "min"])
def test_scatters_of_the_largest_and_smallest(reduction: str) -> None:
    attrs = {"reduction": reduction}
    data, updates = normal(4, 5), normal(2, 3)
    at = ints(1, 1, -1, 2, 2, 4).reshape(2, 3)
    check_gradient("ScatterElements", [data, at, updates], attrs={"axis": 1, **attrs}, feeds=[1])
    pairs = ints(2, 0, 1, 2, 2, 0).reshape(3, 2)
    check_gradient("ScatterND", [normal(4, 3, 2), pairs, normal(3, 2)], attrs=attrs, feeds=[1])


def test_places_whose_number_nothing_tells_are_as_many_as_what_is_put_there() -> None:
    """As regions are put together that were read from several levels of a pyramid."""
    text = """<ir_version: 8, opset_import: ["" : 18]>
    net (float[4,3] x, int64[2,1] at, bool[1] some) => (float[5,3] y)
      <float[3,3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9}, int64[2] sizes = {5, 3}, int64[2] first = {0, 1}>
    {
      h = MatMul(x, w)  u = Gather(h, first)  shape = Shape(u)  like = Where(some, shape, shape)
      places = Expand(at, like)  zeros = ConstantOfShape(sizes)
      y = ScatterElements(zeros, places, u)
    }"""
    program = amp.Program.from_onnx(onnx.parser.parse_model(text))
    with amp.program_guard(program, program.startup):
        ((_, gradient),) = amp.append_backward(F.sum(program.outputs[0]), parameter_list=["w"])
    executor, scope = amp.Executor(), amp.Scope()
    executor.run(program.startup, scope=scope)
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    feed = {"x": x, "at": np.array([[3], [1]]), "some": np.array([True])}
    (dw,) = executor.run(program, feed, [gradient], scope=scope)
    np.testing.assert_allclose(dw, np.repeat(x[:2].sum(0)[:, None], 3, axis=1))


@pytest.mark.parametrize("type_", ["ScatterElements", "ScatterND"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_equal_largest_numbers_share_a_gradient(type_: str, sign: float) -> None:
    """torch.tensor([3., 5, 1, 7]).scatter_reduce(0, torch.tensor([0, 0, 1, 3, 3]), torch.tensor([3., 3, 5, 2, 8]), "amax")
    has these gradients of a sum of results times 1, 2, 3, 4."""
    main = amp.Program()
    with amp.program_guard(main, amp.Program("startup")), amp.unique_name.guard():
        data = amp.create_parameter([4], "float32", name="data")
        updates = amp.create_parameter([5], "float32", name="updates")
        y = main.add_variable("y", "float32", (4,))
        places = ints(0, 0, 1, 3, 3)
        at = main.add_constant("at", places if type_ == "ScatterElements" else places.reshape(5, 1))
        attrs = {"reduction": "max" if sign > 0 else "min"}
        main.add_operator(type_, [data, at, updates], [y], attrs=attrs)
        loss = F.sum(y * amp.data("factor", [4], "float32"))
    pairs = amp.append_backward(loss)
    scope, executor = amp.Scope(), amp.Executor(threads=1)
    scope.set_var("data", sign * np.array([3, 5, 1, 7], np.float32))
    scope.set_var("updates", sign * np.array([3, 3, 5, 2, 8], np.float32))
    found = executor.run(
        main, feed={"factor": np.array([1, 2, 3, 4], np.float32)}, fetch_list=[g for _, g in pairs], scope=scope
    )
    held = {weight.name: np.asarray(g) for (weight, _), g in zip(pairs, found, strict=True)}
    np.testing.assert_allclose(held["data"], [1 / 3, 1, 3, 0], rtol=1e-6)
    np.testing.assert_allclose(held["updates"], [1 / 3, 1 / 3, 1, 0, 4], rtol=1e-6)


def test_a_scatter_that_multiplies_says_what_to_do() -> None:
    main = amp.Program()
    with amp.program_guard(main, amp.Program("startup")), amp.unique_name.guard():
        data = amp.create_parameter([3], "float32", name="data")
        y = main.add_variable("y", "float32", (3,))
        at, updates = main.add_constant("at", ints(1)), main.add_constant("updates", np.ones(1, np.float32))
        main.add_operator("ScatterElements", [data, at, updates], [y], attrs={"reduction": "mul"}, name="put")
        loss = F.mean(y)
    complaint = "'put' .*'none', 'add', 'max' and 'min', not for 'mul'. Gather them.*Freeze.*register_gradient"
    with pytest.raises(GradientError, match=complaint):
        amp.append_backward(loss)


# -- normalisation -------------------------------------------------------------------------------------
@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("axis", [0, -1])
def test_lp_normalization(p: int, axis: int) -> None:
    x = normal(3, 4)
    check_gradient(
        "LpNormalization",
        [x],
        attrs={"p": p, "axis": axis},
        forward=lambda x: [x / np.linalg.norm(x, p, axis, keepdims=True)],
        half=("float16",),
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the reference evaluator divides 0 by 0
def test_a_vector_of_zeros_has_no_direction() -> None:
    x = np.array([[0.0, 0.0], [3.0, 4.0]])
    (dx,) = gradient_values("LpNormalization", [x], p=2)
    np.testing.assert_allclose(dx, [[0, 0], [0.2 - 0.6 * 1.4 / 5, 0.2 - 0.8 * 1.4 / 5]])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
def test_lrn(size: int) -> None:
    def lrn(x: np.ndarray) -> list[np.ndarray]:
        squares = np.stack(
            [(x[:, max(0, c - (size - 1) // 2) : c + size // 2 + 1] ** 2).sum(axis=1) for c in range(x.shape[1])],
            axis=1,
        )
        return [x / (0.5 + 0.3 / size * squares) ** 0.6]

    attrs = {"size": size, "alpha": 0.3, "beta": 0.6, "bias": 0.5}
    check_gradient("LRN", [normal(2, 5, 3, 2)], attrs=attrs, forward=lrn)


# -- Einsum --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "equation, shapes",
    [
        ("...ij,...jk->...ik", [(2, 3, 4), (2, 4, 5)]),
        ("...ij,jk->...ik", [(2, 3, 4), (4, 5)]),
        ("b...,b->...", [(3, 2, 4), (3,)]),
        ("...i,...i", [(2, 1, 3), (1, 4, 3)]),
        ("...ij->...ji", [(2, 3, 4)]),
        ("ij,jk->ik", [(2, 1), (3, 4)]),
        ("ii->i", [(3, 3)]),
        ("ii,i->", [(3, 3), (3,)]),
        ("bii,bij->bj", [(2, 3, 3), (2, 3, 4)]),
        ("iij,k->jk", [(3, 3, 2), (4,)]),
        ("...ii->...", [(2, 3, 3)]),
    ],
)
def test_einsum(equation: str, shapes: list[tuple[int, ...]]) -> None:
    xs = [normal(*shape) for shape in shapes]
    check_gradient("Einsum", xs, attrs={"equation": equation}, forward=lambda *xs: [_einsum(equation, xs)])


def _einsum(equation: str, xs: Any) -> np.ndarray:
    return np.asarray(np.einsum(equation, *xs))


# -- Resize --------------------------------------------------------------------------------------------
Array = np.ndarray[Any, Any]
COORDINATES = (
    "half_pixel",
    "asymmetric",
    "align_corners",
    "pytorch_half_pixel",
    "half_pixel_symmetric",
    "tf_crop_and_resize",
)
ROUNDINGS = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
REGION = np.array([0, 0, 0.1, 0.2, 1, 1, 0.8, 1.1], np.float32)
#: The [1, 1, 6, 7] input becomes this: by scales (float) or sizes (int).
TARGETS = ([1, 1, 2.0, 2], [1, 1, 0.6, 0.8], [1, 1, 2.5, 1.3], [1, 1, 3, 5], [1, 1, 7, 11], [1, 1, 1, 1], [1, 1, 18, 7])
MODES = [
    *({"mode": "nearest", "nearest_mode": rounding} for rounding in ROUNDINGS),
    *({"mode": "linear", "antialias": a, "exclude_outside": x} for a, x in ((0, 0), (1, 0), (1, 1))),
    *({"mode": "cubic", "antialias": a, "exclude_outside": x} for a in (0, 1) for x in (0, 1)),
    {"mode": "cubic", "cubic_coeff_a": -0.5},
]


def resize_inputs(x: Array, target: Sequence[float], attrs: dict[str, Any]) -> list[Array | None]:
    region = REGION if attrs.get("coordinate_transformation_mode") == "tf_crop_and_resize" else None
    if any(isinstance(t, float) for t in target):
        return [x, region, np.array(target, np.float32)]
    return [x, region, None, np.array(target, np.int64)]


def by_onnxruntime(type_: str, inputs: Sequence[Array | None], attrs: dict[str, Any]) -> Callable[..., list[Array]]:
    """The operator in onnxruntime, in fp32, as a function of its first input."""
    names = ["" if a is None else f"x{i}" for i, a in enumerate(inputs)]
    node = onnx.helper.make_node(type_, names, ["y"], **attrs)
    rest = [onnx.numpy_helper.from_array(a, n) for n, a in zip(names[1:], inputs[1:], strict=True) if a is not None]
    assert inputs[0] is not None
    infos = [tensor_info("x0", "float32", inputs[0].shape)]
    graph = onnx.helper.make_graph([node], "g", infos, [onnx.helper.make_empty_tensor_value_info("y")], rest)
    run = session(as_model(graph)).run
    return lambda x, *_: [np.asarray(run(None, {"x0": x.astype(np.float32)})[0], np.float64)]


@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("target", TARGETS)
def test_resize_is_the_transpose_of_what_onnxruntime_does(mode: dict[str, Any], target: Any, coordinates: str) -> None:
    """<dx, x> = <dy, y(x) - y(0)> for random x and dy, in every mode."""
    rng = np.random.default_rng(0)
    attrs = {**mode, "coordinate_transformation_mode": coordinates}
    x = rng.normal(size=(1, 1, 6, 7))
    inputs = resize_inputs(x, target, attrs)
    run = by_onnxruntime("Resize", inputs, attrs)
    difference = run(x)[0] - run(np.zeros_like(x))[0]
    dy = rng.normal(size=difference.shape)
    case = Case("Resize", inputs, attrs, wrt=[0], fixed=[1, 2])
    values = {f"x{i}": a for i, a in enumerate(inputs) if a is not None} | {"y0": dy, "dy0": dy}
    gradient = Gradient(case, "float64", values, [0])
    model = gradient.model("reference")
    (dx,) = run_reference(model, gradient.feeds(model))
    error = np.sum(dx * x) - np.sum(dy * difference)
    assert abs(error) < 2e-6 * np.linalg.norm(dx) * np.linalg.norm(x), (attrs, target)


@pytest.mark.parametrize(
    "attrs, target",
    [
        ({"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}, [1, 1, 2.0, 3]),
        ({"mode": "nearest"}, [1, 1, 5, 10]),
        ({"mode": "linear"}, [1, 1, 2.0, 2]),
        ({"mode": "linear", "coordinate_transformation_mode": "align_corners"}, [1, 1, 9, 4]),
        ({"mode": "cubic", "antialias": 1}, [1, 1, 3, 4]),
        ({"mode": "linear", "axes": [3, 2]}, [11, 3]),
        ({"mode": "linear", "axes": [-2]}, [9]),
        ({"mode": "linear", "axes": [2], "keep_aspect_ratio_policy": "not_larger"}, [9]),
        ({"mode": "linear", "axes": [2, 3], "keep_aspect_ratio_policy": "not_smaller"}, [10, 10]),
        ({"mode": "nearest"}, [1, 1, 6, 7]),
    ],
)
def test_resize(attrs: dict[str, Any], target: list[float]) -> None:
    shape = (2, 3, 6, 7) if len(target) < 4 or "axes" in attrs else (1, 1, 6, 7)
    inputs = resize_inputs(normal(*shape), target, attrs)
    run = by_onnxruntime("Resize", inputs, attrs)
    check_gradient("Resize", inputs, attrs=attrs, fixed=[2], forward=run, step=1.0)


def test_resize_by_whole_factors_sums_and_multiplies_nothing() -> None:
    attrs = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    model = gradient_model("Resize", [normal(1, 2, 3, 4), None, None, ints(1, 2, 6, 12)], "float32", "cuda", **attrs)
    assert [n.op_type for n in model.graph.node] == ["Reshape", "ReduceSum", "Reshape", "Identity"]


def test_scales_computed_in_the_run_are_refused() -> None:
    x = normal(1, 1, 4, 4)
    inputs = [x, None, np.array([1, 1, 2, 2], np.float32)]
    case = Case("Resize", inputs, {}, wrt=[0])
    values = {"x0": x, "x2": inputs[2], "y0": normal(1, 1, 8, 8), "dy0": normal(1, 1, 8, 8)}
    with pytest.raises(GradientError, match="scales of Resize.*x2.*give sizes"):
        Gradient(case, "float32", values, [0]).model("cpu")
