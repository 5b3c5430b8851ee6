"""Functions whose arguments mean something of their own in Paddle, against what Paddle was recorded to compute."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import ArgumentError
from amp_transpiler.nn import functional as F
from tests.helpers.where import oracle

CASES: dict[str, dict[str, Any]] = {case["name"]: case for case in oracle("functions_fp32.json")}


def _array(held: dict[str, Any]) -> np.ndarray[Any, Any]:
    found = np.array(held["data"]).reshape(held["shape"])
    return found if found.dtype.kind == "i" else found.astype(np.float32)


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_paddles(name: str) -> None:
    """The gradient is that of the sum of results times numbers from -1 to 1."""
    case = CASES[name]
    arrays = {key: _array(held) for key, held in case["inputs"].items()}
    expected = {"result": _array(case["result"])} | {key: _array(held) for key, held in case["gradients"].items()}
    numbers = np.linspace(-1, 1, expected["result"].size, dtype=np.float32).reshape(expected["result"].shape)
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        weights = amp.data("weights", list(numbers.shape), "float32")
        inputs = {
            key: amp.create_parameter(list(array.shape), "float32", name=key, initializer=array)
            if array.dtype.kind == "f"
            else amp.data(key, list(array.shape), "int64")
            for key, array in arrays.items()
        }
        called: Any = amp
        for part in case["call"].split("."):
            called = getattr(called, part)
        result = called(**inputs, **case["keywords"])
        pairs = {p.name: grad for p, grad in amp.append_backward(F.sum(result * weights))}
    assert result.shape == expected["result"].shape and pairs.keys() == case["gradients"].keys()
    executor, scope = amp.Executor(amp.CPUPlace()), amp.Scope()
    executor.run(startup, scope=scope)
    feed = {"weights": numbers} | {key: array for key, array in arrays.items() if array.dtype.kind == "i"}
    made = executor.run(main, feed, [result, *(pairs[key] for key in case["gradients"])], scope)
    for found, (what, wanted) in zip(made, expected.items(), strict=True):
        assert found.shape == wanted.shape, what
        assert np.abs(found - wanted).max() < 2e-6, what


# -- the same words, and other numbers: docs/coming_from.md ------------------------------------------------------------
SOFT_LABELLED: dict[str, Any] = {
    "cross_entropy": lambda x, label: F.cross_entropy(x, F.softmax(label), soft_label=True),
    "kl_div": lambda x, label: F.kl_div(F.log_softmax(x), F.softmax(label)),
    "binary_cross_entropy": lambda x, label: F.binary_cross_entropy(F.sigmoid(x), F.sigmoid(label)),
}


@pytest.mark.parametrize("name", SOFT_LABELLED)
def test_a_label_has_its_gradient_unless_it_stops_there(name: str) -> None:
    def learning(stops: bool) -> list[str]:
        with amp.program_guard(amp.Program()), amp.unique_name.guard():
            x, label = (amp.create_parameter([2, 3], "float32", name=each) for each in ("x", "label"))
            held = label * 2.0
            held.stop_gradient = stops
            return [p.name for p, _ in amp.append_backward(SOFT_LABELLED[name](x, held))]

    assert learning(stops=False) == ["x", "label"] and learning(stops=True) == ["x"]


def test_where_every_label_is_ignored_the_mean_is_nan_and_the_gradients_are_0() -> None:
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x = amp.create_parameter([2, 3], "float32", name="x")
        loss = F.cross_entropy(x, amp.data("label", [2], "int64"))
        ((_, grad),) = amp.append_backward(loss)
    executor, scope = amp.Executor(amp.CPUPlace()), amp.Scope()
    executor.run(startup, scope=scope)
    mean, grads = executor.run(main, {"label": np.array([-100, -100])}, [loss, grad], scope)
    assert np.isnan(mean) and not grads.any()


@pytest.mark.parametrize("function, bound", [(F.relu6, 0.0), (F.relu6, 6.0), (F.hardtanh, -1.0), (F.clip, 1.0)])
def test_the_gradient_is_1_up_to_the_bounds(function: Any, bound: float) -> None:
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x = amp.create_parameter([1], "float32", name="x", initializer=np.array([bound], np.float32))
        y = function(x, max=1.0) if function is F.clip else function(x)
        ((_, grad),) = amp.append_backward(F.sum(y))
    executor, scope = amp.Executor(amp.CPUPlace()), amp.Scope()
    executor.run(startup, scope=scope)
    assert executor.run(main, {}, [grad], scope)[0] == [1.0]


def test_what_cannot_be_repeated_or_inserted_is_named() -> None:
    with amp.program_guard(amp.Program()):
        table, places = amp.data("table", [None, 4], "float32"), amp.data("places", [1, 2], "int64")
        with pytest.raises(ArgumentError, match="take_along_axis: dimension 0 of table .* must be known"):
            F.take_along_axis(table, places, 1)
        with pytest.raises(ArgumentError, match=r"unsqueeze: axis 4 of \[4, 0\] is outside the 3 dimensions"):
            F.unsqueeze(table, [4, 0])


@pytest.mark.parametrize("shifts, axis", [(5, None), (-1, None), ([1, -2], [0, 2]), ([4], [1]), (2, [1])])
def test_roll_moves_along_several_dimensions_or_all_elements(shifts: Any, axis: Any) -> None:
    """``axis`` had no default, and lists were refused."""
    data = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    main = amp.Program()
    with amp.program_guard(main):
        found = F.roll(amp.data("x", [2, 3, 4]), shifts, axis)
    (value,) = amp.Executor(amp.CPUPlace()).run(main, feed={"x": data}, fetch_list=[found])
    np.testing.assert_array_equal(value, np.roll(data, shifts, axis))


def test_roll_wants_a_shift_for_each_dimension() -> None:
    with amp.program_guard(amp.Program()), pytest.raises(ArgumentError, match="roll: 1 shifts for 2 dimensions"):
        F.roll(amp.data("x", [2, 3]), [1], [0, 1])
