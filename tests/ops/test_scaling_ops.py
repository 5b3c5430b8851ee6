"""The finite check, the scale's state machine and the gate, against Paddle's recorded results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from amp_transpiler import ops
from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.ir.nodes import OWN, Variable
from amp_transpiler.optimizer import check_finite_and_unscale, update_loss_scaling
from amp_transpiler.program import Program
from tests.helpers.steps import Steps, feed, state
from tests.helpers.where import oracle

LEVELS = ("OFF", "BASIC", "ALL")
assert ops


def bits(array: Any) -> bytes:
    return np.ascontiguousarray(array).tobytes()


# -- the state machine ---------------------------------------------------------------------------------------
def scaling_program(params: dict[str, Any], stop_update: bool = False) -> tuple[Program, list[Variable]]:
    program = Program()
    found = feed(program, "found", "bool", (1,))
    grads = [feed(program, "x", "float32", (3,))]
    scale = state(program, "scale", "float32", (1,))
    good, bad = (state(program, name, "int32", (1,)) for name in ("good", "bad"))
    zeroed, *_ = update_loss_scaling(
        grads,
        found,
        scale,
        good,
        bad,
        params["incr_every"],
        params["decr_every"],
        params["incr_ratio"],
        params["decr_ratio"],
        stop_update,
    )
    return program, zeroed


def start(steps: Steps, scale: float, good: int, bad: int) -> None:
    steps.state = {
        "scale": np.array([scale], np.float32),
        "good": np.array([good], np.int32),
        "bad": np.array([bad], np.int32),
    }


@pytest.mark.parametrize("level", ["OFF", "ALL"])
@pytest.mark.parametrize("case", oracle("update_loss_scaling_traces.json")["traces"], ids=lambda case: case["name"])
def test_scaling_traces_are_paddles_bit_for_bit(case: dict[str, Any], level: str) -> None:
    program, zeroed = scaling_program(case["params"])
    steps = Steps(program, level=level)
    start(steps, case["params"]["init_scale"], case["init_good_steps"], case["init_bad_steps"])
    grads = np.array([0.5, -0.0, np.inf], np.float32)
    for number, (found, _, expected, good, bad) in enumerate(case["trace"]):
        (after,) = steps({"found": np.array([bool(found)]), "x": grads}, zeroed)
        assert bits(after) == bits(np.zeros(3, np.float32) if found else grads)
        got = (
            int(steps.state["scale"].view(np.uint32)[0]),
            int(steps.state["good"][0]),
            int(steps.state["bad"][0]),
        )
        assert got == (int(expected, 16), good, bad), (case["name"], number)


def test_the_recorded_traces_are_long() -> None:
    assert sum(len(case["trace"]) for case in oracle("update_loss_scaling_traces.json")["traces"]) > 1000


@pytest.mark.parametrize("case", oracle("update_loss_scaling_traces.json")["stop_update_cases"])
def test_stop_update_zeroes_gradients_and_leaves_the_state(case: dict[str, Any]) -> None:
    program, zeroed = scaling_program(case["params"], stop_update=True)
    steps = Steps(program)
    before, after = case["before"], case["after"]
    start(steps, before["scale"], before["good"], before["bad"])
    x = np.array([*before["x"], 0], np.float32)
    (got,) = steps({"found": np.array([bool(case["found_inf"])]), "x": x}, zeroed)
    assert got[:2].tolist() == after["x"]
    assert [float(steps.state[k][0]) for k in ("scale", "good", "bad")] == [
        after["scale"],
        after["good"],
        after["bad"],
    ]


def test_wrong_kinds_are_refused() -> None:
    case = oracle("update_loss_scaling_traces.json")["stop_update_cases"][0]
    for wrong in ("no", 1, None):
        with pytest.raises(ArgumentTypeError, match=r"stop_update is .*; expected True or False"):
            scaling_program(case["params"], stop_update=wrong)  # type: ignore[arg-type]


@settings(max_examples=25, deadline=None)
@given(
    st.floats(2**-7, 2.0**127, width=32),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([1.0, 1.5, 2.0, 1e30]),
    st.sampled_from([0.3, 0.5, 0.8, 1.0]),
    st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_scaling_follows_its_description(
    scale: float, incr: int, decr: int, up: float, down: float, run: list[bool]
) -> None:
    """The pseudo code of Paddle's kernel, in numpy float32."""
    program, _ = scaling_program({"incr_every": incr, "decr_every": decr, "incr_ratio": up, "decr_ratio": down})
    steps = Steps(program)
    start(steps, scale, 0, 0)
    s, good, bad = np.float32(scale), 0, 0
    for found in run:
        steps({"found": np.array([found]), "x": np.zeros(3, np.float32)}, [])
        with np.errstate(over="ignore"):
            if found:
                good, bad = 0, bad + 1
                if bad == decr:
                    s, bad = max(s * np.float32(down), np.float32(1)), 0
            else:
                good, bad = good + 1, 0
                if good == incr:
                    grown = s * np.float32(up)
                    s, good = (grown if np.isfinite(grown) else s), 0
        assert (bits(steps.state["scale"][0]), steps.state["good"][0], steps.state["bad"][0]) == (bits(s), good, bad)


# -- the finite check ----------------------------------------------------------------------------------------
def check_program(shapes: list[tuple[int, ...]], dtypes: list[str] | None = None) -> tuple[Program, list[Variable]]:
    program = Program()
    scale = feed(program, "scale", "float32", (1,))
    grads = [feed(program, f"g{i}", (dtypes or ["float32"] * 9)[i], shape) for i, shape in enumerate(shapes)]
    unscaled, found = check_finite_and_unscale(grads, scale)
    return program, [found, *unscaled]


def run_check(xs: list[Any], scale: float, level: str = "BASIC") -> tuple[bool, list[Any]]:
    program, outputs = check_program([x.shape for x in xs], [x.dtype.name for x in xs])
    feeds = {"scale": np.array([scale], np.float32)} | {f"g{i}": x for i, x in enumerate(xs)}
    found, *unscaled = Steps(program, level=level)(feeds, outputs)
    assert found.shape == (1,)
    return bool(found[0]), unscaled


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("case", oracle("check_finite_and_unscale_cases.json")["cases"], ids=lambda case: case["name"])
def test_finite_check_cases_are_paddles(case: dict[str, Any], level: str) -> None:
    """Two cases differ by design: Paddle's CPU kernel tests the scaled value, we test the unscaled one."""
    xs = [np.array([float(v) for v in x], np.float32) for x in case["xs"]]
    found, unscaled = run_check(xs, float(case["scale"]), level)
    if case["name"] in ("scale_zero", "scale_nan"):
        assert found
        return
    assert found == case["found_inf"], case["name"]
    if not found:
        for got, expected in zip(unscaled, case["outs_cpu"], strict=True):
            assert bits(got) == bits(np.array(expected, np.float32)), case["name"]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_found_inf_sees_every_position_of_every_gradient(level: str, bad: float) -> None:
    shapes = [(7, 5), (), (2, 3, 33)]
    program, outputs = check_program(shapes)
    steps = Steps(program, level=level)
    rng = np.random.default_rng(0)
    grads = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    feeds = {"scale": np.array([8], np.float32)} | {f"g{i}": g for i, g in enumerate(grads)}
    assert not steps(feeds, outputs)[0][0]
    for number, grad in enumerate(grads):
        for place in {0, grad.size // 2, grad.size - 1}:
            broken = grad.copy()
            broken.reshape(-1)[place] = bad
            assert steps(feeds | {f"g{number}": broken}, outputs)[0][0], (number, place)


def test_infinities_of_both_signs_do_not_cancel() -> None:
    assert run_check([np.array([np.inf, 1], np.float32), np.array([-np.inf], np.float32)], 2.0)[0]


def test_overflow_made_by_unscaling_is_found() -> None:
    """Paddle's CPU kernel misses it, its GPU kernel finds it."""
    assert run_check([np.array([1e38], np.float32)], 0.01)[0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_gradients_are_unscaled_in_fp32(dtype: str) -> None:
    """The smallest float16 over 2^15 is far below float16; it must not vanish."""
    _, outputs = check_program([(2,)], [dtype])
    assert [v.dtype for v in outputs] == ["bool", "float32"]
    if dtype == "bfloat16":
        return  # numpy cannot feed it to a bare session
    found, (got,) = run_check([np.array([6e-8, 60000], np.float16)], 2.0**15)
    assert not found
    assert bits(got) == bits(np.array([6e-8, 60000], np.float16).astype(np.float32) * np.float32(2.0**-15))


# -- the gate ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 5)])
def test_gate_keeps_the_old_state_bit_for_bit(level: str, shape: tuple[int, ...]) -> None:
    program = Program()
    found = feed(program, "found", "bool", (1,))
    old, new = feed(program, "old", "float32", shape), feed(program, "new", "float32", shape)
    kept = program.add_variable("kept", "float32", shape)
    program.add_operator("GateState", [found, old, new], [kept], domain=OWN)
    steps = Steps(program, level=level)
    size = int(np.prod(shape))
    was = np.array([-0.0, 0.0, 1e-45, -np.inf, 3.5] * 2, np.float32)[:size].reshape(shape)
    is_ = np.array([1.0, np.nan, np.inf, -2.0, 7.0] * 2, np.float32)[:size].reshape(shape)
    (got,) = steps({"found": np.array([True]), "old": was, "new": is_}, [kept])
    assert bits(got) == bits(was)
    (got,) = steps({"found": np.array([False]), "old": was, "new": is_}, [kept])
    assert bits(got) == bits(is_)


# -- the public functions ------------------------------------------------------------------------------------
def test_wrong_arguments_are_refused() -> None:
    program = Program()
    g, i = feed(program, "g", "float32", (2,)), feed(program, "i", "int64", (2,))
    scale, wide = feed(program, "s", "float32", (1,)), feed(program, "wide", "float32", (2,))
    with pytest.raises(ArgumentTypeError, match="list of variables"):
        check_finite_and_unscale(g, scale)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="'i' is int64"):
        check_finite_and_unscale([g, i], scale)
    with pytest.raises(ArgumentError, match="empty"):
        check_finite_and_unscale([], scale)
    with pytest.raises(ArgumentError, match="one element"):
        check_finite_and_unscale([g], wide)
    with pytest.raises(ArgumentTypeError, match="float32"):
        check_finite_and_unscale([g], i)
    found, bad = feed(program, "f", "bool", (1,)), feed(program, "b", "int32", (1,))
    with pytest.raises(ArgumentTypeError, match="num_good_steps"):
        update_loss_scaling([g], found, scale, scale, bad, 1, 1, 2.0, 0.5)
    assert not program.operators


@pytest.mark.parametrize(
    "wrong, named",
    [
        ((0, 2, 2.0, 0.5), "incr_every"),
        ((1, 2.5, 2.0, 0.5), "decr_every"),
        ((1, 1, 0.5, 0.5), "incr_ratio"),
        ((1, 1, 2.0, 1.5), "decr_ratio"),
        ((1, 1, 2.0, 0.0), "decr_ratio"),
        ((1, 1, float("nan"), 0.5), "incr_ratio"),
    ],
)
def test_wrong_numbers_are_refused(wrong: tuple[Any, ...], named: str) -> None:
    program = Program()
    g, scale = feed(program, "g", "float32", (2,)), feed(program, "s", "float32", (1,))
    found, good, bad = (feed(program, n, t, (1,)) for n, t in (("f", "bool"), ("a", "int32"), ("b", "int32")))
    with pytest.raises(ArgumentError, match=named):
        update_loss_scaling([g], found, scale, good, bad, *wrong)
    assert not program.operators
