"""decorate: whole training steps against Paddle's recorded runs, in every mode, and the errors at the call."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from amp_transpiler import nn, optimizer as optim
from amp_transpiler.errors import (
    OrderError,
    ScopeError,
)
from amp_transpiler.ir import context, unique_name
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.lists import AutoMixedPrecisionLists
from amp_transpiler.nn import functional as F
from amp_transpiler.optimizer import OptimizerWithMixedPrecision, decorate
from amp_transpiler.program import Program, program_guard
from amp_transpiler.runtime import CPUPlace, Executor, Scope
from tests.helpers.steps import Steps
from tests.helpers.where import PADDLE

Array = np.ndarray[Any, Any]


def floats(values: Any) -> Array:
    """Recorded numbers, in which infinities are strings."""
    return np.array([float(v) for v in values], np.float64)


class Regression:
    """``pred = x @ w + b; loss = factor * mean((pred - y)^2)``, minimised."""

    def __init__(self, optimizer: Any, w0: Any = None, b0: Any = None, factor: float = 1.0) -> None:
        self.main, self.startup = Program(), Program("startup")
        rng = np.random.default_rng(0)
        w0 = rng.standard_normal((3, 2)) if w0 is None else np.reshape(w0, (3, 2))
        b0 = rng.standard_normal(2) if b0 is None else b0
        with program_guard(self.main, self.startup), unique_name.guard():
            x, y = nn.data("x", [5, 3], "float32"), nn.data("y", [5, 2], "float32")
            w = nn.create_parameter([3, 2], name="w", initializer=np.array(w0, np.float32))
            b = nn.create_parameter([2], name="b", initializer=np.array(b0, np.float32))
            with context.fp16_guard():
                self.prediction = x @ w + b
            error = self.prediction - y
            self.loss = F.mean(error * error)
            if factor != 1:
                self.loss = self.loss * factor
            self.optimizer = optimizer
            self.updates, self.params_grads = optimizer.minimize(self.loss, self.startup)
        self.steps = Steps(self.main, self.startup)

    def step(self, x: Any, y: Any, *fetches: Variable) -> list[Array]:
        feeds = {"x": np.reshape(x, (5, 3)).astype(np.float32), "y": np.reshape(y, (5, 2)).astype(np.float32)}
        return self.steps(feeds, [self.loss, *fetches])

    def bytes(self) -> dict[str, bytes]:
        return {name: array.tobytes() for name, array in self.steps.state.items()}


DATA = np.random.default_rng(5)
X, Y = DATA.standard_normal((5, 3)), DATA.standard_normal((5, 2))


# -- Paddle's runs -------------------------------------------------------------------------------------------
def paddles(case: dict[str, Any]) -> OptimizerWithMixedPrecision:
    o = case["optimizer"]
    made: dict[str, Any] = {
        "sgd": lambda: optim.SGD(o["lr"]),
        "momentum": lambda: optim.Momentum(
            o["lr"], o["mu"], use_nesterov=o.get("nesterov", False), weight_decay=o.get("l2")
        ),
        "adam": lambda: optim.Adam(o["lr"], o["beta1"], o["beta2"], o["eps"]),
        "adamw": lambda: optim.AdamW(o["lr"], o["beta1"], o["beta2"], o["eps"], weight_decay=o["coeff"]),
        "lamb": lambda: optim.Lamb(o["lr"], o["weight_decay"], o["beta1"], o["beta2"], o["eps"]),
    }
    fp32 = AutoMixedPrecisionLists(custom_black_list=["MatMul"])
    return decorate(made[o["opt"]](), fp32, **case["amp"])


def e2e_cases() -> list[Any]:
    cases = json.loads((PADDLE / "e2e_loss_scaling_train.json").read_text())["cases"]
    return [pytest.param(case, id=case["name"]) for case in cases]


@pytest.mark.parametrize("case", e2e_cases())
def test_training_runs_are_paddles(case: dict[str, Any]) -> None:
    """Every operator fp32, as recorded. By design Momentum skips a bad step, which Paddle's does not."""
    net = Regression(paddles(case), case["w0"], case["b0"])
    unchecked = case["amp"]["init_loss_scaling"] == 1
    compared = 0
    for number, step in enumerate(case["steps"]):
        before = net.bytes()
        loss, scaled = net.step(floats(step["x"]), floats(step["y"]), net.optimizer.get_scaled_loss())
        bad = number in case["bad_steps"]
        if not unchecked:
            changed = {name for name, old in before.items() if net.bytes()[name] != old}
            assert not bad or changed <= {"loss_scaling_0", "num_good_steps_0", "num_bad_steps_0"}
            for name in ("loss_scaling_0", "num_good_steps_0", "num_bad_steps_0"):
                if name in step["state"]:
                    assert net.steps.state[name].tolist() == step["state"][name]
        elif bad:
            break  # scale 1 without dynamic scaling: nothing is checked, and the parameters are lost
        if bad and case["optimizer"]["opt"] == "momentum":
            break
        assert np.isclose(loss, float(step["loss"]), rtol=1e-5)
        assert np.isclose(scaled, float(step["scaled_loss"]), rtol=1e-5)
        for name in ("w", "b"):
            assert np.abs(net.steps.state[name].reshape(-1) - floats(step[name])).max() < 1e-5
        for name, values in step["state"].items():
            if name in net.steps.state:
                assert np.allclose(net.steps.state[name].reshape(-1), floats(values), rtol=1e-5, atol=1e-5), name
        compared += 1
    assert compared >= 3 and (compared == 12 or case["optimizer"]["opt"] == "momentum" or unchecked)


# -- modes ---------------------------------------------------------------------------------------------------
def test_list_mode_keeps_parameters_fp32_and_the_fetched_loss_unscaled() -> None:
    net = Regression(decorate(optim.Adam(0.1), init_loss_scaling=1024.0))
    assert {op.type: op.precision for op in net.main.operators}["MatMul"] == "float16"
    assert {v.dtype for v in net.main.variables if v.persistable} == {"float32", "int32"}
    losses = []
    for _ in range(20):
        loss, scaled = net.step(X, Y, net.optimizer.get_scaled_loss())
        assert scaled == np.float32(loss) * 1024
        losses.append(float(np.ravel(loss)[0]))
    assert losses[-1] < losses[0] / 2


def test_roles_tell_the_parts_of_a_step() -> None:
    net = Regression(decorate(optim.Momentum(0.1)))
    roles = {op.type: op.role for op in net.main.operators if op.domain == "amp_transpiler"}
    assert roles["CheckFiniteAndUnscale"] == roles["UpdateLossScaling"] == "loss_scaling"
    assert roles["Momentum"] == "update" and roles["MatMulGrad"] == "backward"


@pytest.mark.parametrize("dynamic", [True, False])
def test_pure_16_bit_trains_masters_and_skips_bad_steps(dynamic: bool) -> None:
    optimizer = decorate(
        optim.Adam(0.05, multi_precision=True),
        init_loss_scaling=128.0,
        use_pure_fp16=True,
        use_dynamic_loss_scaling=dynamic,
        decr_every_n_nan_or_inf=1,
    )
    net = Regression(optimizer)
    assert net.main.var("w").dtype == "float16" and net.startup.var("w").dtype == "float32"
    state = net.steps.state
    assert state["w_fp32_master_0"].tobytes() == state["w"].tobytes()
    for name in ("w", "b"):
        net.steps.state[name] = state[name].astype(np.float16)  # what amp_init does
    found = net.optimizer.get_found_inf()
    losses = []
    for number in range(20):
        if number == 3:
            before = net.bytes()
            (_, verdict) = net.step(np.full((5, 3), 6e4), Y, found)
            changed = {name for name, old in before.items() if net.bytes()[name] != old}
            assert verdict and changed == ({"loss_scaling_0", "num_good_steps_0"} if dynamic else set())
        loss, verdict = net.step(X, Y, found)
        assert not verdict
        losses.append(float(np.ravel(loss)[0]))
        for name in ("w", "b"):
            rounded = net.steps.state[f"{name}_fp32_master_0"].astype(np.float16)
            assert rounded.tobytes() == net.steps.state[name].tobytes()
    assert losses[-1] < losses[0] / 2


def test_tiny_gradients_are_learned_from_only_with_scaling() -> None:
    """Gradients near 1e-9 are zero in float16; times the scale they are not."""
    losses = {}
    for scale in (1.0, 2.0**15):
        optimizer = decorate(optim.SGD(1e7), init_loss_scaling=scale, use_dynamic_loss_scaling=False)
        net = Regression(optimizer, factor=1e-8)
        before = net.bytes()
        losses[scale] = [float(np.ravel(net.step(X, Y)[0])[0]) for _ in range(15)]
        assert (net.bytes() == before) == (scale == 1)
    assert losses[1.0][-1] == losses[1.0][0] == losses[2.0**15][0]
    assert losses[2.0**15][-1] < losses[1.0][0] / 2


def test_a_scale_far_too_high_comes_down() -> None:
    net = Regression(decorate(optim.SGD(0.05), init_loss_scaling=2.0**40, decr_every_n_nan_or_inf=1, decr_ratio=0.5))
    found = net.optimizer.get_found_inf()
    verdicts = [bool(net.step(X, Y, found)[1][0]) for _ in range(40)]
    first_good = verdicts.index(False)
    assert 10 < first_good < 35 and not any(verdicts[first_good:])
    assert net.steps.state["loss_scaling_0"][0] == 2.0 ** (40 - first_good)


@pytest.mark.parametrize("level", ["OFF", "BASIC", "ALL"])
def test_state_written_by_the_forward_pass_is_gated_but_not_the_randomness_counter(level: str) -> None:
    main, startup = Program(), Program("startup")
    with program_guard(main, startup), unique_name.guard():
        x = nn.data("x", [4, 3], "float32")
        h = nn.dropout(nn.batch_norm(nn.fc(x, 3)), 0.5)
        loss = F.mean(h * h)
        decorate(optim.SGD(0.1), init_loss_scaling=8.0).minimize(loss, startup)
    steps = Steps(main, startup, level)
    assert "@rng_step" in steps.state
    good = {"x": np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)}
    steps(good, [])
    before = {name: array.tobytes() for name, array in steps.state.items()}
    steps({"x": np.full((4, 3), np.inf, np.float32)}, [])
    changed = {name for name, old in before.items() if steps.state[name].tobytes() != old}
    assert changed == {"@rng_step", "num_good_steps_0", "num_bad_steps_0"}
    steps(good, [])
    assert all(steps.state[v.name].tobytes() != before[v.name] for v in main.updates if "batch_norm" in v.name)


# -- amp_init ------------------------------------------------------------------------------------------------
def pure(**options: Any) -> OptimizerWithMixedPrecision:
    return decorate(optim.Adam(0.05, multi_precision=True), init_loss_scaling=128.0, use_pure_fp16=True, **options)


def test_masters_start_from_unrounded_values() -> None:
    """Paddle's recorded bits: after startup all fp32 and equal; amp_init rounds the parameter, not the master."""
    case = json.loads((PADDLE / "master_weight_init.json").read_text())["rewrite_master_weight=False"]
    start = np.array(case["param_after_startup_f32"], np.float32)
    main, startup = Program(), Program("startup")
    with program_guard(main, startup), unique_name.guard():
        x = nn.data("x", [1, start.size], "float32")
        w = nn.create_parameter([start.size, 1], name="fc_0.w_0", initializer=start[:, None])
        optimizer = pure(use_fp16_guard=False)
        optimizer.minimize(F.mean(x @ w), startup)
    scope, place = Scope(), CPUPlace()
    with pytest.raises(ScopeError, match="startup"):
        optimizer.amp_init(place, scope)
    Executor(place).run(startup, scope=scope)
    assert scope.find_var("fc_0.w_0").dtype == scope.find_var("fc_0.w_0_fp32_master_0").dtype == np.float32
    assert scope.find_var("fc_0.w_0").tobytes() == scope.find_var("fc_0.w_0_fp32_master_0").tobytes() == start.tobytes()
    for _ in range(2):  # again changes nothing
        optimizer.amp_init(place, scope)
        assert scope.find_var("fc_0.w_0").view(np.uint16).reshape(-1).tolist() == case["param_bits_u16"]
        master = np.array(case["master_after_amp_init"], np.float32)
        assert scope.find_var("fc_0.w_0_fp32_master_0").tobytes() == master.tobytes()


def forward_program() -> tuple[Program, Variable]:
    test, startup = Program("test"), Program("test_startup")
    with program_guard(test, startup), unique_name.guard():
        x = nn.data("x", [5, 3], "float32")
        with context.fp16_guard():
            w, b = nn.create_parameter([3, 2], name="w"), nn.create_parameter([2], name="b")
            prediction = x @ w + b
    return test, prediction


@pytest.mark.parametrize(
    "is_pure, use_fp16_test, rewritten", [(True, False, True), (False, False, False), (False, True, True)]
)
def test_amp_init_rewrites_the_test_program(is_pure: bool, use_fp16_test: bool, rewritten: bool) -> None:
    net = Regression(pure() if is_pure else decorate(optim.SGD(0.1), init_loss_scaling=128.0))
    scope, place = Scope(), CPUPlace()
    executor = Executor(place)
    executor.run(net.startup, scope=scope)
    test, prediction = forward_program()
    net.optimizer.amp_init(place, scope, test, use_fp16_test)
    assert any(op.type == "Cast" for op in test.operators) == rewritten
    feeds = {"x": X.astype(np.float32), "y": Y.astype(np.float32)}
    loss, verdict = executor.run(net.main, feeds, [net.loss, net.optimizer.get_found_inf()], scope)
    (shown,) = executor.run(test, {"x": feeds["x"]}, [prediction], scope)
    expected = feeds["x"] @ scope.find_var("w").astype(np.float32) + scope.find_var("b").astype(np.float32)
    assert np.isfinite(loss) and not verdict
    assert np.allclose(shown.astype(np.float32), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_amp_init_lets_a_program_read_parameters_in_another_way(dtype: str) -> None:
    """One that training adds is looked up, and a table that it looks up, which stays fp32, is multiplied."""

    def parameters() -> tuple[Variable, Variable]:
        return nn.create_parameter([4, 3], name="places"), nn.create_parameter([5, 3], name="table")

    main, startup, step = Program(), Program("startup"), Program("step")
    with program_guard(main, startup), context.fp16_guard():
        places, table = parameters()
        read = F.embedding(nn.data("ids", [4], "int64"), table) + places
        optimizer = pure(dtype=dtype)
        optimizer.minimize(F.mean(F.square(read)))
    with program_guard(step, Program("startup of the step")), context.fp16_guard():
        places, table = parameters()
        row = F.embedding(nn.data("place", [1], "int64"), places)
        scores = F.matmul(row, table, transpose_y=True)
    scope, executor = Scope(), Executor(CPUPlace())
    executor.run(startup, scope=scope)
    optimizer.amp_init(CPUPlace(), scope, step)
    assert (places.dtype, table.dtype) == (main.var("places").dtype, main.var("table").dtype) == (dtype, "float32")
    (shown,) = executor.run(step, {"place": np.array([2])}, [scores], scope)
    narrow = scope.find_var("places").dtype
    expected = scope.find_var("places")[2:3].astype(np.float32) @ scope.find_var("table").astype(narrow).T.astype(
        np.float32
    )
    assert np.array_equal(shown, expected.astype(narrow).astype(np.float32))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_executor_skips_a_bad_step_and_goes_on(dtype: str) -> None:
    net = Regression(pure(decr_every_n_nan_or_inf=1, dtype=dtype))
    scope, place = Scope(), CPUPlace()
    executor = Executor(place)
    executor.run(net.startup, scope=scope)
    net.optimizer.amp_init(place, scope)
    found = net.optimizer.get_found_inf()
    losses = []
    for number in range(12):
        before = {name: scope.find_var(name).tobytes() for name in scope.var_names()}
        x = np.full((5, 3), 6e4 if dtype == "float16" else np.inf) if number == 4 else X
        feeds = {"x": x.astype(np.float32), "y": Y.astype(np.float32)}
        loss, verdict = executor.run(net.main, feeds, [net.loss, found], scope)
        changed = {name for name, old in before.items() if scope.find_var(name).tobytes() != old}
        assert bool(verdict[0]) == (number == 4)
        if number == 4:
            assert changed == {"loss_scaling_0", "num_good_steps_0"}
        else:
            assert {"w", "b", "w_fp32_master_0", "w_fp32_master_0_moment1_0", "adam_beta1_pow_acc_0"} <= changed
            losses.append(float(np.ravel(loss)[0]))
    assert losses[-1] < losses[0]


# -- bfloat16 ------------------------------------------------------------------------------------------------
def scale_of(optimizer: OptimizerWithMixedPrecision) -> tuple[float, bool, bool]:
    net = Regression(optimizer)
    types = [op.type for op in net.main.operators]
    start = float(net.steps.state[optimizer.get_loss_scaling().name][0])
    return start, "UpdateLossScaling" in types, "CheckFiniteAndUnscale" in types


def test_bfloat16_is_checked_but_not_scaled_unless_asked() -> None:
    assert scale_of(decorate(optim.SGD(), dtype="bfloat16")) == (1.0, False, True)
    assert scale_of(decorate(optim.SGD(), dtype="bfloat16", init_loss_scaling=64.0)) == (64.0, True, True)
    assert scale_of(decorate(optim.SGD(), dtype="bfloat16", use_dynamic_loss_scaling=False)) == (1.0, False, True)
    assert scale_of(decorate(optim.SGD())) == (32768.0, True, True)
    assert scale_of(decorate(optim.SGD(), init_loss_scaling=8.0, use_dynamic_loss_scaling=False)) == (8.0, False, True)
    assert scale_of(decorate(optim.SGD(), init_loss_scaling=1.0, use_dynamic_loss_scaling=False)) == (1.0, False, False)


def test_pure_mode_without_masters_warns() -> None:
    with pytest.warns(UserWarning, match="multi_precision") as warned:
        Regression(decorate(optim.SGD(), use_pure_fp16=True))
    assert len(warned) == 1


def test_calls_in_the_wrong_order() -> None:
    optimizer = decorate(optim.SGD())
    for call in (
        optimizer.get_loss_scaling,
        optimizer.get_scaled_loss,
        lambda: optimizer.amp_init(None),
        lambda: optimizer.apply_gradients([]),
    ):
        with pytest.raises(OrderError, match="minimize"):
            call()
    net = Regression(optimizer)
    with pytest.raises(OrderError, match="already"):
        optimizer.minimize(net.loss)
    with pytest.raises(OrderError, match="update already"):
        optimizer.apply_gradients(net.params_grads)


def test_attributes_of_the_wrapped_optimizer_read_through() -> None:
    optimizer = decorate(optim.Adam(0.25, beta1=0.5))
    assert optimizer.beta1 == 0.5 and optimizer.get_lr() == 0.25
    with pytest.raises(AttributeError, match="bet"):
        _ = optimizer.bet


@pytest.mark.parametrize("which", [optim.SGD, optim.Momentum, optim.Adam, optim.AdamW, optim.Lamb])
def test_all_state_of_a_step_is_updated_in_place(which: Any) -> None:
    net = Regression(decorate(which(0.1, multi_precision=True), use_pure_fp16=True))
    scope, place = Scope(), CPUPlace()
    executor = Executor(place)
    executor.run(net.startup, scope=scope)
    net.optimizer.amp_init(place, scope)
    executor.run(net.main, {"x": X.astype(np.float32), "y": Y.astype(np.float32)}, [net.loss], scope)
    report = executor.memory_report(net.main)
    assert not report.two_buffers and set(report.in_place) == {state.name for state in net.main.updates}


def test_the_only_gradient_may_end_in_what_changes_nothing() -> None:
    """onnxruntime loses a factor of 1 that is multiplied by 1 / x behind it."""
    main, startup = Program(), Program("startup")
    with program_guard(main, startup):
        loss = F.mean(F.square(nn.create_parameter([2], "float32", name="w") * 1.0))
        decorate(optim.SGD(0.25), init_loss_scaling=64.0, use_fp16_guard=False).minimize(loss, startup)
    exe, scope = Executor(CPUPlace()), Scope()
    exe.run(startup, scope=scope)
    scope.set_var("w", np.array([1, -2], np.float32))
    exe.run(main, {}, [loss], scope=scope)
    np.testing.assert_array_equal(scope.find_var("w"), np.array([0.75, -1.5], np.float32))
