"""Gradient rules of data movement, reductions and losses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import assume, given, settings, strategies as st

import amp_transpiler as amp
from amp_transpiler.errors import ExecutionError, GradientError
from tests.helpers.forwardcheck import check_forward
from tests.helpers.gradcheck import check_gradient, few, gradient_model, gradient_values, seeds
from tests.helpers.rules import run_cpu

pytestmark = pytest.mark.rules

Shape = tuple[int, ...]


@st.composite
def shapes(draw: st.DrawFn, min_rank: int = 0, max_rank: int = 3) -> Shape:
    return tuple(draw(st.lists(st.integers(1, 4), min_size=min_rank, max_size=max_rank)))


def normal(seed: int, shape: Shape) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


# -- shapes -------------------------------------------------------------------------------------------
@few
@given(shape=shapes(), seed=seeds, data=st.data())
def test_reshape(shape: Shape, seed: int, data: st.DataObject) -> None:
    x = normal(seed, shape)
    check_gradient("Reshape", [x, ints(*data.draw(st.permutations(shape)))])
    check_gradient("Reshape", [x, ints(-1)])


@few
@given(shape=shapes(), seed=seeds, data=st.data())
def test_flatten(shape: Shape, seed: int, data: st.DataObject) -> None:
    axis = data.draw(st.integers(-len(shape), len(shape)))
    check_gradient("Flatten", [normal(seed, shape)], attrs={"axis": axis})


@few
@given(shape=shapes(min_rank=1), seed=seeds, data=st.data())
def test_squeeze_and_unsqueeze(shape: Shape, seed: int, data: st.DataObject) -> None:
    axis = data.draw(st.integers(0, len(shape)))
    check_gradient("Unsqueeze", [normal(seed, shape), ints(axis)])
    longer = (*shape[:axis], 1, *shape[axis:])
    check_gradient("Squeeze", [normal(seed, longer), ints(axis - len(longer))])
    check_gradient("Squeeze", [normal(seed, longer)])


@few
@given(shape=shapes(max_rank=4), seed=seeds, data=st.data())
def test_transpose(shape: Shape, seed: int, data: st.DataObject) -> None:
    perm = data.draw(st.none() | st.permutations(range(len(shape))))
    check_gradient("Transpose", [normal(seed, shape)], attrs={"perm": perm} if perm else {})


# -- pieces -------------------------------------------------------------------------------------------
@few
@given(shape=shapes(min_rank=1), count=st.integers(1, 4), seed=seeds, data=st.data())
def test_concat(shape: Shape, count: int, seed: int, data: st.DataObject) -> None:
    axis = data.draw(st.integers(0, len(shape) - 1))
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=count, max_size=count))
    xs = [normal(seed + i, (*shape[:axis], size, *shape[axis + 1 :])) for i, size in enumerate(sizes)]
    wrt = data.draw(st.sampled_from([list(range(count)), [count - 1], list(range(0, count, 2))]))
    check_gradient("Concat", xs, attrs={"axis": axis - data.draw(st.sampled_from([0, len(shape)]))}, wrt=wrt)


@few
@given(shape=shapes(min_rank=1), seed=seeds, data=st.data())
def test_split(shape: Shape, seed: int, data: st.DataObject) -> None:
    axis = data.draw(st.integers(0, len(shape) - 1))
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    x = normal(seed, (*shape[:axis], sum(sizes), *shape[axis + 1 :]))
    through = sorted(data.draw(st.sets(st.integers(0, len(sizes) - 1), min_size=1)))
    check_gradient("Split", [x, ints(*sizes)], attrs={"axis": axis}, outputs=len(sizes), through=through)


@pytest.mark.parametrize("size, parts", [(4, 2), (7, 3), (3, 1)])
def test_split_in_equal_parts(size: int, parts: int) -> None:
    attrs = {"axis": -1, "num_outputs": parts}
    check_gradient("Split", [normal(0, (2, size))], attrs=attrs, outputs=parts, through=range(parts))


@settings(few, max_examples=40)
@given(shape=shapes(min_rank=1), seed=seeds, data=st.data())
def test_slice(shape: Shape, seed: int, data: st.DataObject) -> None:
    shape = tuple(d + 2 for d in shape)
    axes = data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1).map(sorted))
    bound = st.integers(-8, 8) | st.sampled_from([-(2**63) + 1, 2**63 - 1])
    taken = [(data.draw(bound), data.draw(bound), data.draw(st.sampled_from([1, 1, 2, 3, -1, -2]))) for _ in axes]
    starts, ends, steps = zip(*taken, strict=True)
    named = [axis - data.draw(st.sampled_from([0, len(shape)])) for axis in axes]
    if any(not range(*slice(*t).indices(shape[a])) for a, t in zip(axes, taken, strict=True)):
        return  # an empty result has no gradient to compare
    check_gradient("Slice", [normal(seed, shape), ints(*starts), ints(*ends), ints(*named), ints(*steps)])


def test_slice_without_axes_and_of_nothing() -> None:
    check_gradient("Slice", [normal(0, (4, 3)), ints(1, 0), ints(3, 2)])
    (dx,) = gradient_values("Slice", [normal(0, (4, 3)), ints(2), ints(2)])
    np.testing.assert_array_equal(dx, np.zeros((4, 3)))


@few
@given(shape=shapes(min_rank=1), seed=seeds, data=st.data())
def test_pad(shape: Shape, seed: int, data: st.DataObject) -> None:
    shape = tuple(d + 1 for d in shape)
    widths = ints(*(data.draw(st.integers(0, 2)) for _ in range(2 * len(shape))))
    check_gradient("Pad", [normal(seed, shape), widths, np.array(0.5)], wrt=[0])
    axis = data.draw(st.integers(0, len(shape) - 1))
    check_gradient("Pad", [normal(seed, shape), ints(1, 2), None, ints(axis - len(shape))])


def test_pad_that_crops() -> None:
    x = normal(0, (4, 3))
    check_gradient("Pad", [x, ints(-1, 2, 0, -1)], forward=lambda x, *_: [np.pad(x, ((0, 0), (2, 0)))[1:, :-1]])


# -- repeats ------------------------------------------------------------------------------------------
@few
@given(shape=shapes(), lead=shapes(max_rank=2), seed=seeds)
def test_expand(shape: Shape, lead: Shape, seed: int) -> None:
    rng = np.random.default_rng(seed)
    source = tuple(1 if rng.random() < 0.5 else d for d in shape)
    target = tuple(1 if rng.random() < 0.3 else d for d in shape)  # a 1 here keeps the size of the input
    check_gradient("Expand", [normal(seed, source), ints(*lead, *target)])


@few
@given(shape=shapes(min_rank=1), seed=seeds)
def test_tile(shape: Shape, seed: int) -> None:
    check_gradient("Tile", [normal(seed, shape), np.random.default_rng(seed).integers(1, 4, len(shape))])


# -- indices ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("known", [True, False])
@few
@given(shape=shapes(min_rank=1), at=shapes(max_rank=2), seed=seeds, data=st.data())
def test_gather(known: bool, shape: Shape, at: Shape, seed: int, data: st.DataObject) -> None:
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    kind = data.draw(st.sampled_from([np.int64, np.int32]))
    indices = np.asarray(np.random.default_rng(seed).integers(-shape[axis], shape[axis], at)).astype(kind)
    check_gradient("Gather", [normal(seed, shape), indices], attrs={"axis": axis}, feeds=() if known else (1,))


def test_gather_along_the_last_of_three_axes() -> None:
    check_gradient("Gather", [normal(0, (2, 3, 4)), ints(3, -4, 3, 1, 0)], attrs={"axis": 2}, feeds=[1])


def test_gather_adds_up_duplicates() -> None:
    (dx,) = gradient_values("Gather", [np.zeros((3, 1)), ints(1, -2, 1, 0)])
    np.testing.assert_array_equal(dx, [[1], [3], [0]])


@pytest.mark.parametrize("type_", ["Gather", "GatherND"])
@pytest.mark.parametrize(
    ("places", "follow"),
    [([2], True), ([-1], True), ([1, 2], True), ([-2, -1], True), ([[0, 1], [2, 3]], True)]
    + [([-1, 0], False), ([0, 2], False), ([1, 0], False), ([3, 3], False)],
)
def test_known_places_that_follow_each_other_are_padded(places: list[Any], follow: bool, type_: str) -> None:
    """As the last token, or one of the heads: no scatter, which adds up in fp32."""
    indices = np.array(places)[..., None] if type_ == "GatherND" else np.array(places)
    x = normal(0, (4, 2, 3))
    check_gradient(type_, [x, indices])
    for place in ("cpu", "cuda"):
        model = gradient_model(type_, [x, indices], "float16", place, wrt=[0])
        assert bool({"ScatterND", "ScatterElements"} & {node.op_type for node in model.graph.node}) != follow


@pytest.mark.parametrize(("rows", "type_"), [(400, "ScatterElements"), (200, "ScatterND")])
def test_few_rows_of_a_table_are_added_to_zeros_where_they_lie_on_cpu(rows: int, type_: str) -> None:
    ids = ints(rows - 1, 3, -1, 0, 3, 3)
    model = gradient_model("Gather", [normal(0, (rows, 5)), ids], "float32", "cpu", wrt=[0])
    assert {type_} == {node.op_type for node in model.graph.node} & {"ScatterElements", "ScatterND"}
    dy = normal(1, (6, 5)).astype(np.float32)
    expected = np.zeros((rows, 5), np.float32)
    np.add.at(expected, ids, dy)
    given = {"x1": ids, "dy0": dy}
    (dx,) = run_cpu(model, {info.name: given[info.name] for info in model.graph.input if info.name in given})
    assert dx.tobytes() == expected.tobytes()


@few
@given(shape=shapes(min_rank=1), seed=seeds, data=st.data())
def test_gather_elements(shape: Shape, seed: int, data: st.DataObject) -> None:
    axis = data.draw(st.integers(0, len(shape) - 1))
    picks = tuple(data.draw(st.integers(1, 4)) if i == axis else d for i, d in enumerate(shape))
    indices = np.random.default_rng(seed).integers(-shape[axis], shape[axis], picks)
    along = [lambda x, i: [np.take_along_axis(x, i, axis)]]
    check_gradient("GatherElements", [normal(seed, shape), indices], attrs={"axis": axis}, feeds=[1], forward=along[0])


@few
@given(shape=shapes(min_rank=2), lead=shapes(max_rank=1), seed=seeds, data=st.data())
def test_gather_nd(shape: Shape, lead: Shape, seed: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    batch = data.draw(st.integers(0, len(shape) - 1))
    depth = data.draw(st.integers(1, len(shape) - batch))
    rows = (*shape[:batch], *lead)
    indices = np.stack([rng.integers(0, shape[batch + i], rows) for i in range(depth)], axis=-1)
    check_gradient("GatherND", [normal(seed, shape), indices], attrs={"batch_dims": batch}, feeds=[1])


@few
@given(shape=shapes(min_rank=1), seed=seeds, data=st.data())
def test_top_k(shape: Shape, seed: int, data: st.DataObject) -> None:
    axis = data.draw(st.integers(0, len(shape) - 1))
    x = (np.random.default_rng(seed).permutation(math.prod(shape)).reshape(shape) - 3) / 4
    k = ints(data.draw(st.integers(1, shape[axis])))
    check_gradient("TopK", [x, k], attrs={"axis": axis}, outputs=2)


@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_the_two_numbers_of_a_one_hot(axis: int) -> None:
    values = normal(0, (2,))
    check_gradient("OneHot", [np.array([[0, 2, -1], [7, 1, 1]]), np.array(3), values], attrs={"axis": axis}, feeds=[0])


def test_start_and_step_of_a_range() -> None:
    numbers = [np.array(number) for number in (0.5, 3.0, 0.75)]
    check_gradient("Range", numbers, wrt=(0, 2), half=())  # no place makes one in 16 bit


@pytest.mark.parametrize("upper", [0, 1])
@pytest.mark.parametrize("diagonal", [None, -1, 2])
def test_trilu(upper: int, diagonal: int | None) -> None:
    inputs = [normal(0, (2, 3, 4)), *([] if diagonal is None else [np.array(diagonal)])]
    check_gradient("Trilu", inputs, attrs={"upper": upper})


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
def test_depth_to_space(mode: str) -> None:
    check_gradient("DepthToSpace", [normal(0, (2, 12, 2, 3))], attrs={"blocksize": 2, "mode": mode})


def test_space_to_depth() -> None:
    check_gradient("SpaceToDepth", [normal(0, (2, 3, 4, 6))], attrs={"blocksize": 2})


# -- reductions ---------------------------------------------------------------------------------------
def _signed(seed: int, shape: Shape) -> np.ndarray:
    return normal(seed, shape) + np.sign(normal(seed + 1, shape)) * 0.2


REDUCTIONS: dict[str, Any] = {
    "ReduceSum": normal,
    "ReduceMean": normal,
    "ReduceSumSquare": normal,
    "ReduceLogSumExp": normal,
    "ReduceL1": lambda seed, shape: np.sign(normal(seed, shape)) * (0.2 + np.abs(normal(seed + 1, shape))),
    "ReduceL2": lambda seed, shape: 0.5 + np.abs(normal(seed, shape)),
    "ReduceLogSum": lambda seed, shape: 0.5 + np.abs(normal(seed, shape)),
    "ReduceProd": lambda seed, shape: np.random.default_rng(seed).uniform(0.5, 1.5, shape),
    "ReduceMax": lambda seed, shape: np.random.default_rng(seed).permutation(math.prod(shape)).reshape(shape) / 8,
    "ReduceMin": lambda seed, shape: np.random.default_rng(seed).permutation(math.prod(shape)).reshape(shape) / 8,
}


@pytest.mark.parametrize("type_", REDUCTIONS)
@few
@given(shape=shapes(min_rank=1), seed=seeds, keepdims=st.booleans(), data=st.data())
def test_reduction(type_: str, shape: Shape, seed: int, keepdims: bool, data: st.DataObject) -> None:
    x = REDUCTIONS[type_](seed, shape)
    axes = data.draw(st.none() | st.sets(st.integers(0, len(shape) - 1), min_size=1).map(sorted))
    inputs = [x] if axes is None else [x, ints(*(a - data.draw(st.sampled_from([0, len(shape)])) for a in axes))]
    attrs = {"keepdims": int(keepdims)}
    check_gradient(type_, inputs, attrs=attrs)
    if type_ in ("ReduceSumSquare", "ReduceLogSumExp", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceProd"):
        check_forward(type_, inputs, attrs=attrs)


@pytest.mark.parametrize("type_", ["ReduceSum", "ReduceMean", "ReduceMax", "ReduceLogSumExp", "ReduceProd"])
def test_reduction_of_no_axes(type_: str) -> None:
    check_gradient(type_, [_signed(0, (2, 3)), ints()], attrs={"noop_with_empty_axes": 1}, forward=lambda x, _: [x])
    check_gradient(type_, [REDUCTIONS[type_](0, (2, 3)), ints()])


def test_equal_extremes_share_the_gradient() -> None:
    (dx,) = gradient_values("ReduceMax", [np.array([[1.0, 3.0, 3.0], [2.0, 1.0, 0.0]]), ints(1)])
    np.testing.assert_array_equal(dx, [[0, 0.5, 0.5], [1, 0, 0]])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the unselected branch
def test_norm_of_zero_has_no_slope() -> None:
    (dx,) = gradient_values("ReduceL2", [np.array([[0.0, 0.0], [3.0, 4.0]]), ints(1)])
    np.testing.assert_allclose(dx, np.array([[0.0, 0.0], [0.6, 0.8]]))


@pytest.mark.parametrize("row, expected", [([2, 0, 3], [0, 6, 0]), ([0, 0, 3], [0, 0, 0]), ([2, 5, 3], [15, 6, 10])])
def test_product_with_zeros(row: list[int], expected: list[int]) -> None:
    (dx,) = gradient_values("ReduceProd", [np.array(row, np.float64)])
    np.testing.assert_allclose(dx, np.array(expected))


@pytest.mark.parametrize("reverse", [0, 1])
@pytest.mark.parametrize("exclusive", [0, 1])
def test_cum_sum(reverse: int, exclusive: int) -> None:
    attrs = {"reverse": reverse, "exclusive": exclusive}
    check_gradient("CumSum", [normal(0, (3, 4)), np.array(1)], attrs=attrs)


def test_axes_computed_in_the_run_are_refused() -> None:
    from tests.helpers.gradcheck import Case, Gradient

    values = {"x0": normal(0, (2, 3)), "y0": normal(0, (2,)), "x1": ints(1), "dy0": normal(0, (2,))}
    case = Case("ReduceSum", [values["x0"], values["x1"]], {"keepdims": 0}, wrt=[0], feeds=[1])
    with pytest.raises(GradientError, match="axes of a reduction.*x1"):
        Gradient(case, "float64", values, [0]).model("cpu")


# -- losses -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("type_", ["SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@few
@given(
    extra=shapes(max_rank=2),
    weighted=st.booleans(),
    ignore=st.sampled_from([None, -100, -1, 0, 2]),
    kind=st.sampled_from([np.int64, np.int32]),
    seed=seeds,
)
def test_loss(
    type_: str, reduction: str, extra: Shape, weighted: bool, ignore: int | None, kind: Any, seed: int
) -> None:
    # onnx.reference takes an unweighted mean over all labels where this index is -1, over those that count elsewhere.
    assume(not (type_.startswith("Neg") and ignore == -1 and not weighted))
    rng = np.random.default_rng(seed)
    rows, classes = int(rng.integers(1, 5)), int(rng.integers(3, 6))
    labels = np.asarray(rng.integers(0, classes, (rows, *extra))).astype(kind)
    if ignore is not None:
        labels = np.where(rng.random(labels.shape) < 0.4, kind(ignore), labels)
        labels[(0,) * labels.ndim] = 1  # the mean over no label at all is not a number
    weights = [rng.uniform(0.5, 2, classes)] if weighted else []
    attrs: dict[str, Any] = {"reduction": reduction} | ({} if ignore is None else {"ignore_index": ignore})
    inputs = [rng.normal(size=(rows, classes, *extra)) * 2, labels, *weights]
    half = ("float16", "bfloat16") if type_.startswith("Soft") else ("float16",)
    check_gradient(type_, inputs, attrs=attrs, wrt=[0], feeds=[1], half=half)
    check_forward(type_, inputs, attrs=attrs, feeds=[1], half=half)
    if type_.startswith("Soft"):
        for through in ([1], [0, 1]):
            check_gradient(type_, inputs, attrs=attrs, wrt=[0], feeds=[1], outputs=2, through=through, half=half)
        check_forward(type_, inputs, attrs=attrs, feeds=[1], outputs=2, half=half)


#: Of the first row a class is masked out with -inf, of the second every one; both are ignored.
MASKED = np.array([[-np.inf, 1.0, 2.0], [-np.inf] * 3, [0.5, 1.0, -1.0]])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the unselected branch
def test_loss_ignores_rows_with_masked_classes() -> None:
    """They add nothing, and no NaN."""
    (dx,) = gradient_values("SoftmaxCrossEntropyLoss", [MASKED, np.array([-1, -1, 1])], ignore_index=-1)
    np.testing.assert_array_equal(dx[:2], 0)
    assert np.isfinite(dx).all() and dx[2, 1] < 0


#: The loss of three rows, -1 ignored.
IGNORING = """<ir_version: 10, opset_import: ["" : 21]> m (float[3,3] x, int64[3] label) => (float loss)
  { loss = SoftmaxCrossEntropyLoss<ignore_index = -1>(x, label) }"""


def test_ignored_rows_with_masked_classes_have_no_loss() -> None:
    program = amp.Program.from_onnx(onnx.parser.parse_model(IGNORING))
    feed = {"x": MASKED.astype(np.float32), "label": np.array([-1, -1, 1])}
    (loss,) = amp.Executor(threads=1).run(program, feed=feed, fetch_list=["loss"])
    assert loss == pytest.approx(np.log(np.exp(MASKED[2]).sum()) - MASKED[2, 1])


@pytest.mark.parametrize("label", [-2, 3])
def test_a_label_of_no_class_is_an_error(label: int) -> None:
    """onnxruntime by itself counts -2 from the last class."""
    program = amp.Program.from_onnx(onnx.parser.parse_model(IGNORING))
    feed = {"x": np.zeros((3, 3), np.float32), "label": np.array([0, -1, label])}
    with pytest.raises(ExecutionError, match="label or index is below 0"):
        amp.Executor(threads=1).run(program, feed=feed, fetch_list=["loss"])
