"""Sums that kernels of a place round after each addition: emulated on CPU, and widened where the place runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import ArgumentError
from amp_transpiler.lists import roundings
from amp_transpiler.ops.rounded_sums import sum_rule
from amp_transpiler.passes.lowering.arithmetic import Arithmetic
from amp_transpiler.passes.lowering.lowered import Lowered
from amp_transpiler.passes.lowering.lowering import lower
from tests.corpora.rounded_sums import CASES, fed, half, one_operator
from tests.helpers import rounding_kernels
from tests.helpers.rounded_sums import in_turn, products
from tests.helpers.rounding_kernels import KERNELS, opset_of, worth
from tests.helpers.sessions import run

Array = np.ndarray[Any, Any]
PLAIN = Arithmetic("webgpu", widens=False)


def _program(operator: str, feeds: dict[str, Array], **attrs: Any) -> amp.Program:
    return amp.Program.from_onnx(one_operator(operator, feeds, **attrs))


def _run(lowered: Lowered, feeds: dict[str, Array]) -> Array:
    return run(lowered.model, fed(feeds) | {name: np.zeros((), np.float32) for name in lowered.scalars})[0]


@pytest.mark.parametrize(
    ("operator", "feeds", "attrs", "expected"), CASES, ids=[f"{n}-{c[0]}" for n, c in enumerate(CASES)]
)
def test_sums_are_rounded_as_in_numpy(
    operator: str, feeds: dict[str, Array], attrs: dict[str, Any], expected: Callable[..., Array]
) -> None:
    program = _program(operator, feeds, **attrs)
    want = expected(*fed(feeds).values())
    got = _run(lower(program, "cpu", arithmetic=PLAIN), feeds)
    np.testing.assert_array_equal(got, want)
    assert not np.array_equal(_run(lower(program, "cpu"), feeds), want), (
        "an fp32 sum is the same: the case shows nothing"
    )


def test_a_mean_does_not_count_what_rounding_up_adds() -> None:
    feeds, attrs = {"x": np.ones((1, 1, 5), np.float16)}, {"ceil_mode": 1, "count_include_pad": 1}
    program = _program("AveragePool", feeds, kernel_shape=[2], strides=[2], **attrs)
    np.testing.assert_array_equal(_run(lower(program, "cpu", arithmetic=PLAIN), feeds), np.ones((1, 1, 3)))


def test_a_sum_sticks_and_overflows() -> None:
    feeds = {"a": np.ones((1, 4096), np.float16), "b": np.ones((4096, 4), np.float16)}
    lowered = lower(_program("MatMul", feeds), "cpu", arithmetic=PLAIN)
    assert _run(lowered, feeds).tolist() == [[2048.0] * 4]
    feeds["a"][0, :3] = 60000, 60000, -60000
    assert np.isinf(_run(lowered, feeds)).all()


def test_a_sum_of_nothing_is_none_of_rounded_parts() -> None:
    feeds = {"a": np.ones((2, 0), np.float16), "b": np.ones((0, 3), np.float16)}
    assert _run(lower(_program("MatMul", feeds), "cpu", arithmetic=PLAIN), feeds).tolist() == [[0.0] * 3] * 2


def test_channels_that_a_kernel_reads_by_threes_are_padded() -> None:
    feeds = {"x": np.ones((1, 6, 8, 8), np.float16), "w": np.ones((8, 6, 3, 3), np.float16)}
    program = _program("Conv", feeds)
    types = {place: [node.op_type for node in lower(program, place).model.graph.node] for place in ("cuda", "webgpu")}
    assert types == {"cuda": ["Conv"], "webgpu": ["Pad", "Pad", "Cast", "Cast", "Conv", "Cast"]}
    np.testing.assert_array_equal(_run(lower(program, "webgpu"), feeds), np.full((1, 8, 6, 6), 54))


def test_16_bit_rows_are_not_left_to_a_kernel_that_adds_none() -> None:
    program = _program("ScatterND", {"x": half(3, 4), "at": np.array([[1], [1]]), "rows": half(2, 4)}, reduction="add")
    types = {place: {node.op_type for node in lower(program, place).model.graph.node} for place in ("cuda", "webgpu")}
    assert types == {"cuda": {"ScatterND"}, "webgpu": {"Expand", "Reshape", "ScatterElements"}}


@pytest.mark.parametrize(("count", "widens"), [(6, False), (7, True)])
def test_long_sums_are_widened(count: int, widens: bool) -> None:
    feeds = {"a": half(4, count), "b": half(count, 4)}
    program = _program("MatMul", feeds)
    types = [node.op_type for node in lower(program, "webgpu").model.graph.node]
    assert types == (["Cast", "Cast", "MatMul", "Cast"] if widens else ["MatMul"])
    assert [node.op_type for node in lower(program, "webgpu", arithmetic=PLAIN).model.graph.node] == ["MatMul"]
    assert [node.op_type for node in lower(program, "cuda").model.graph.node] == ["MatMul"]
    emulated = _run(program.lower(amp.CPUPlace(emulate="webgpu")), feeds)
    rounded_once = _run(lower(program, "cpu"), feeds)
    assert np.array_equal(emulated, rounded_once) is widens
    if not widens:
        np.testing.assert_array_equal(emulated, in_turn(products(feeds["a"], feeds["b"])))


@pytest.mark.parametrize(("operator", "axis"), [("ReduceMean", [1]), ("CumSum", 1)])
def test_what_may_overflow_on_the_way_or_has_who_knows_how_many_summands_is_widened(operator: str, axis: Any) -> None:
    feeds = {"x": half(4, 5), "axes": np.array(axis)}
    types = [node.op_type for node in lower(_program(operator, feeds), "webgpu").model.graph.node]
    assert types == ["Cast", operator, "Cast"]


@pytest.mark.parametrize(("operator", "widened"), [("Exp", True), ("Cosh", True), ("Sigmoid", False), ("Relu", False)])
def test_functions_are_widened_by_their_error(operator: str, widened: bool) -> None:
    types = [node.op_type for node in lower(_program(operator, {"x": half(4)}), "webgpu").model.graph.node]
    assert types == (["Cast", operator, "Cast"] if widened else [operator])


def test_programs_of_earlier_opsets_are_emulated() -> None:
    feeds = {"x": half(2, 8), "s": half(8)}
    programs = [amp.Program.from_onnx(one_operator("LayerNormalization", feeds, opset)) for opset in (17, 21)]
    models = [lower(program, "cpu", arithmetic=PLAIN) for program in programs]
    np.testing.assert_array_equal(*(_run(model, feeds) for model in models))
    assert not np.array_equal(_run(models[0], feeds), _run(lower(programs[0], "cpu"), feeds))


def test_an_executor_trains_with_the_arithmetic_of_a_place() -> None:
    with pytest.raises(ArgumentError, match="emulates one of cpu, cuda, webgpu"):
        amp.CPUPlace(emulate="metal")
    assert repr(amp.CPUPlace(emulate="webgpu")) == "CPUPlace(emulate='webgpu')"
    feeds = {"a": half(4, 6), "b": half(6, 4)}
    program = _program("MatMul", feeds)
    results = [
        amp.Executor(amp.CPUPlace(emulate=kind)).run(program, feed=feeds, fetch_list=["y"])[0]
        for kind in ("", "webgpu")
    ]
    np.testing.assert_array_equal(results[1], in_turn(products(feeds["a"], feeds["b"])))
    assert not np.array_equal(*results)
    plain, emulated = (program.cost_estimate(place) for place in (amp.CPUPlace(), amp.CPUPlace(emulate="webgpu")))
    assert emulated.kernels > plain.kernels and emulated.peak > plain.peak


@pytest.mark.parametrize("operator", [name for name in KERNELS if sum_rule(name) is not None])
def test_emulated_kernels_are_as_far_off_as_those_of_the_place(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def emulated(type_: str, feeds: dict[str, Array], /, domain: str = "", **attrs: Any) -> Array:
        first = next(iter(feeds.values()))
        model = one_operator(type_, feeds, opset_of(type_), first.shape, domain=domain, **attrs)
        return _run(lower(amp.Program.from_onnx(model), "cpu", arithmetic=PLAIN), feeds)

    monkeypatch.setattr(rounding_kernels, "run", emulated)
    written = roundings("webgpu", "float16")
    assert written is not None and written.inside[operator] / 1.5 < worth(operator) < 1.5 * written.inside[operator]
