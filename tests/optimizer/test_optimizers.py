"""Optimizers against Paddle's recorded trajectories and the float64 formulas, with and without masters and gates."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler import optimizer as optim
from amp_transpiler.nn import functional as F
from amp_transpiler.optimizer.base import Optimizer
from amp_transpiler.runtime.scope import Scope
from tests.helpers.optimizing import Training
from tests.helpers.where import oracle

# -- float64 formulas ----------------------------------------------------------------------------------------
Reference = Callable[[dict[str, Any], dict[str, Any], Any], None]


def adam64(s: dict[str, Any], h: dict[str, Any], g: Any) -> None:
    b1, b2 = (float(np.float32(h[k])) for k in ("beta1", "beta2"))
    if h.get("with_decay"):
        s["p"] = s["p"] * (1 - h["lr"] * h["coeff"])
    s["t"] = s.get("t", 0) + 1
    s["m"] = b1 * s.get("m", 0) + (1 - b1) * g
    s["v"] = b2 * s.get("v", 0) + (1 - b2) * g * g
    s["p"] = s["p"] - h["lr"] / (1 - b1 ** s["t"]) * s["m"] / (np.sqrt(s["v"]) / math.sqrt(1 - b2 ** s["t"]) + h["eps"])


def lamb64(s: dict[str, Any], h: dict[str, Any], g: Any) -> None:
    b1, b2, decay = float(np.float32(h["beta1"])), float(np.float32(h["beta2"])), h["weight_decay"]
    s["t"] = s.get("t", 0) + 1
    s["m"] = b1 * s.get("m", 0) + (1 - b1) * g
    s["v"] = b2 * s.get("v", 0) + (1 - b2) * g * g
    d = s["m"] / (1 - b1 ** s["t"]) / (np.sqrt(s["v"] / (1 - b2 ** s["t"])) + h["epsilon"]) + decay * s["p"]
    adapts = decay > 0 or h["always_adapt"]
    s["p"] = s["p"] - h["lr"] * (np.linalg.norm(s["p"]) / np.linalg.norm(d) if adapts else 1) * d


def momentum64(s: dict[str, Any], h: dict[str, Any], g: Any) -> None:
    g = g + h["regularization_coeff"] * s["p"]
    s["v"] = h["mu"] * s.get("v", 0) + g
    s["p"] = s["p"] - h["lr"] * (g + h["mu"] * s["v"] if h["use_nesterov"] else s["v"])


def sgd64(s: dict[str, Any], h: dict[str, Any], g: Any) -> None:
    s["p"] = s["p"] - h["lr"] * g


def lars64(s: dict[str, Any], h: dict[str, Any], g: Any) -> None:
    g, size, decay = h["rescale_grad"] * g, np.linalg.norm(s["p"]), h["lars_weight_decay"]
    rate = h["lr"]
    if size > 0 and np.linalg.norm(g) > 0 and decay > 0:
        rate *= h["lars_coeff"] * size / (np.linalg.norm(g) + decay * size + h["epsilon"])
    s["v"] = h["mu"] * s.get("v", 0) + rate * (g + decay * s["p"])
    s["p"] = s["p"] - s["v"]


def rmsprop64(s: dict[str, Any], h: dict[str, Any], g: Any) -> None:
    g, rho = g + h["weight_decay"] * s["p"], float(np.float32(h["rho"]))
    s["s"] = rho * s.get("s", 0) + (1 - rho) * g * g
    s["m"] = rho * s.get("m", 0) + (1 - rho) * g
    spread = s["s"] - h["centered"] * s["m"] ** 2
    s["v"] = h["momentum"] * s.get("v", 0) + h["lr"] * g / np.sqrt(spread + h["epsilon"])
    s["p"] = s["p"] - s["v"]


def cases() -> list[tuple[Any, Optimizer, Reference, dict[str, str]]]:
    """Recorded case, our optimizer, its formula, and which recorded state is which of ours."""
    found: list[tuple[Any, Optimizer, Reference, dict[str, str]]] = []
    moments = {"moment1": "p0_moment1_0", "moment2": "p0_moment2_0"}
    powers = {"beta1_pow": "o_beta1_pow_acc_0", "beta2_pow": "o_beta2_pow_acc_0"}
    for case in oracle("adam_fp32.json")["cases"]:
        h = case["hyper"]
        found.append((case, optim.Adam(h["lr"], h["beta1"], h["beta2"], h["eps"], name="o"), adam64, moments | powers))
    for case in oracle("adamw_fp32.json")["cases"]:
        h = case["hyper"]
        if h["lr_ratio"] != 1:
            continue  # Paddle's CPU kernel applies it to the decay alone; we have no such argument
        optimizer = optim.AdamW(
            h["lr"],
            h["beta1"],
            h["beta2"],
            h["eps"],
            weight_decay=h["coeff"],
            name="o",
            apply_decay_param_fun=lambda name, decays=h["with_decay"]: decays,
        )
        found.append((case, optimizer, adam64, moments | powers))
    for case in oracle("momentum_fp32.json")["cases"]:
        h = case["hyper"]  # rescale_grad: Paddle's CPU kernel ignores it, so do we
        optimizer = optim.Momentum(
            h["lr"], h["mu"], use_nesterov=h["use_nesterov"], weight_decay=h["regularization_coeff"]
        )
        found.append((case, optimizer, momentum64, {"velocity": "p0_velocity_0"}))
    for case in oracle("rmsprop_fp32.json")["cases"]:
        h = case["hyper"]
        optimizer = optim.RMSProp(
            h["lr"], h["rho"], h["epsilon"], h["momentum"], h["centered"], weight_decay=h["weight_decay"]
        )
        recorded = {
            name: f"p0_{name}_0" for name in ("mean_square", "mean_grad", "momentum") if name in case["steps"][0]
        }
        found.append((case, optimizer, rmsprop64, recorded))
    for case in oracle("sgd_lamb_lars_fp32.json")["cases"]:
        h = case["hyper"]
        if case["op"] == "sgd":
            found.append((case, optim.SGD(h["lr"]), sgd64, {}))
        elif case["op"] == "lamb":
            optimizer = optim.Lamb(
                h["lr"],
                h["weight_decay"],
                h["beta1"],
                h["beta2"],
                h["epsilon"],
                name="o",
                always_adapt=h["always_adapt"],
            )
            found.append((case, optimizer, lamb64, moments | powers))
        else:
            optimizer = optim.Lars(
                h["lr"],
                h["mu"],
                h["lars_coeff"],
                h["lars_weight_decay"],
                epsilon=h["epsilon"],
                rescale_grad=h["rescale_grad"],
            )
            found.append((case, optimizer, lars64, {"velocity": "p0_velocity_0"}))
    return found


@pytest.mark.parametrize("level", ["BASIC", "ALL"])
@pytest.mark.parametrize(
    "gated, number",
    [
        pytest.param(gated, number, id=f"{type(optimizer).__name__}-{number}-{'gated' if gated else 'plain'}")
        for number, (case, optimizer, _, _) in enumerate(cases())
        for gated in (False, True)
        if gated or not any(step.get("skip_update") for step in case["steps"])
    ],
)
def test_trajectories_are_paddles_and_the_formulas(gated: bool, number: int, level: str) -> None:
    case, optimizer, formula, states = cases()[number]
    training = Training(optimizer, [np.array(case["param0"], np.float32)], gated=gated, level=level)
    exact: dict[str, Any] = {"p": np.array(case["param0"], np.float64)}
    for step in case["steps"]:
        g = np.array(step["grad"], np.float64)
        skip = bool(step.get("skip_update"))
        training.step(np.full_like(g, np.nan) if skip else g, found=skip)
        if not skip:
            formula(exact, case["hyper"], g)
        assert np.abs(training["p0"] - exact["p"]).max() < 1e-6
        assert np.abs(training["p0"] - np.array(step["param"])).max() < 1e-6
        for recorded, ours in states.items():
            expected = np.array(step[recorded])
            assert np.abs(training[ours] - expected).max() <= 1e-6 * max(1, np.abs(expected).max()), recorded


def test_trajectories_are_recorded_of_every_rule() -> None:
    assert len(cases()) >= 14


# -- groups, masters, gates ----------------------------------------------------------------------------------
def every_optimizer(**options: Any) -> list[Optimizer]:
    return [
        optim.SGD(0.1, weight_decay=0.1, **options),
        optim.Momentum(0.1, 0.9, weight_decay=0.1, **options),
        optim.Momentum(0.1, use_nesterov=True, **options),
        optim.Adam(0.1, weight_decay=0.1, **options),
        optim.AdamW(0.1, **options),
        optim.Lamb(0.1, **options),
        optim.Lars(1.0, lars_coeff=0.1, **options),
        optim.RMSProp(0.1, weight_decay=0.1, **options),
        optim.RMSProp(0.1, momentum=0.9, centered=True, **options),
    ]


NAMES = ["sgd", "momentum", "nesterov", "adam", "adamw", "lamb", "lars", "rmsprop", "centered rmsprop"]
ALL = pytest.mark.parametrize("which", range(len(NAMES)), ids=NAMES)


@ALL
def test_a_group_is_updated_as_its_members_alone(which: int) -> None:
    rng = np.random.default_rng(which)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in ((3, 4), (), (5,))]
    together = Training(every_optimizer()[which], arrays)
    alone = [Training(every_optimizer()[which], [a]) for a in arrays]
    assert len(together.ops) == 1
    for _ in range(3):
        grads = [rng.standard_normal(a.shape).astype(np.float32) for a in arrays]
        together.step(*grads)
        for one, grad in zip(alone, grads, strict=True):
            one.step(grad)
    for i, one in enumerate(alone):
        assert together[f"p{i}"].shape == arrays[i].shape
        assert together[f"p{i}"].tobytes() == one["p0"].tobytes()


@ALL
def test_masters_train_as_fp32_parameters_do(which: int) -> None:
    """A 16-bit parameter is its rounded master; the master follows the fp32 trajectory bit for bit."""
    rng = np.random.default_rng(which)
    array = rng.standard_normal((4, 3)).astype(np.float32)
    half = Training(every_optimizer(multi_precision=True)[which], [array], "float16")
    full = Training(every_optimizer()[which], [array])
    assert half["p0_fp32_master_0"].tobytes() == array.tobytes(), "the master starts unrounded"
    for _ in range(4):
        grad = rng.standard_normal(array.shape).astype(np.float32)
        half.step(grad)
        full.step(grad)
        assert half["p0_fp32_master_0"].tobytes() == full["p0"].tobytes()
        assert half["p0"].dtype == np.float16
        assert half["p0"].tobytes() == full["p0"].astype(np.float16).tobytes()
    accumulators = [name for name in half.steps.state if name.startswith("p0_fp32_master_0_")]
    assert all(half[name].dtype == np.float32 for name in accumulators)
    assert bool(accumulators) == (which > 0)


def test_without_masters_there_is_a_warning_and_accumulators_are_fp32() -> None:
    with pytest.warns(UserWarning, match="multi_precision"):
        training = Training(optim.Adam(1e-5), [np.ones(3, np.float32)], "float16")
    training.step(np.ones(3))
    assert training["p0"].tolist() == [1, 1, 1], "the update is below half of the last digit"
    assert training["p0_moment1_0"].dtype == np.float32
    assert not [name for name in training.steps.state if "master" in name]


def poisoned(training: Training) -> dict[str, bytes]:
    """Put −0.0 and odd values into every float state, and return all state as bytes."""
    for name, array in training.steps.state.items():
        if array.dtype.kind == "f" and array.size > 1:
            array = array.copy()
            array.reshape(-1)[:4] = [-0.0, 0.0, 65504.0, -6e-8]
            training.steps.state[name] = array
    return {name: array.tobytes() for name, array in training.steps.state.items()}


@ALL
@pytest.mark.parametrize("level", ["OFF", "BASIC", "ALL"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_bad_step_changes_no_bit(which: int, level: str, dtype: str) -> None:
    rng = np.random.default_rng(which)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in ((3, 4), (5,))]
    training = Training(every_optimizer(multi_precision=True)[which], arrays, dtype, gated=True, level=level)
    grads = [rng.standard_normal(a.shape).astype(np.float32) for a in arrays]
    training.step(*grads)
    before = poisoned(training)
    for bad in (np.nan, np.inf, 1e30):
        training.step(*[np.full_like(g, bad) for g in grads], found=True)
        assert {name: array.tobytes() for name, array in training.steps.state.items()} == before
    training.step(*grads)
    after = {name: array.tobytes() for name, array in training.steps.state.items()}
    assert {name for name in after if after[name] == before[name]} == {"learning_rate_0"}


def test_every_state_is_persistable_and_initialised() -> None:
    training = Training(optim.Adam(multi_precision=True, beta1=0.5), [np.ones((2, 2), np.float32)], "float16")
    expected = {
        "p0": "float16",
        "p0_fp32_master_0": "float32",
        "p0_fp32_master_0_moment1_0": "float32",
        "p0_fp32_master_0_moment2_0": "float32",
        "learning_rate_0": "float32",
        "adam_beta1_pow_acc_0": "float32",
        "adam_beta2_pow_acc_0": "float32",
    }
    assert {v.name: v.dtype for v in training.main.variables if v.persistable} == expected
    assert {v.name for v in training.main.updates} == set(expected) - {"learning_rate_0"}
    assert training["adam_beta1_pow_acc_0"] == np.float32(0.5)


# -- clipping ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "clip, expected",
    [
        (optim.ClipGradByGlobalNorm(1.0), [[3 / 13, 4 / 13], [12 / 13]]),
        (optim.ClipGradByNorm(1.0), [[0.6, 0.8], [1.0]]),
        (optim.ClipGradByValue(3.5), [[3, 3.5], [3.5]]),
        (optim.ClipGradByGlobalNorm(100.0), [[3, 4], [12]]),
        (optim.ClipGradByNorm(6.0), [[3, 4], [6]]),
        (optim.ClipGradByValue(5.0, min=4.0), [[4, 4], [5]]),
    ],
)
def test_clipping(clip: Any, expected: list[list[float]]) -> None:
    training = Training(optim.SGD(1.0, grad_clip=clip), [np.zeros(2, np.float32), np.zeros(1, np.float32)])
    training.step([3, 4], [12])
    for i, values in enumerate(expected):
        assert np.allclose(-training[f"p{i}"], values, rtol=1e-6)


def test_decay_comes_after_clipping() -> None:
    training = Training(
        optim.SGD(1.0, weight_decay=0.5, grad_clip=optim.ClipGradByValue(1.0)), [np.full(1, 8, np.float32)]
    )
    training.step([100.0])
    assert training["p0"][0] == 8 - (1 + 0.5 * 8)


# -- the learning rate ---------------------------------------------------------------------------------------
def test_learning_rate_can_be_changed() -> None:
    optimizer = optim.SGD(0.1)
    optimizer.set_lr(0.5)
    training = Training(optimizer, [np.zeros(1, np.float32)])
    scope = Scope()
    assert optimizer.get_lr(scope) == 0.5
    for name, array in training.steps.state.items():
        scope.set_var(name, array)
    optimizer.set_lr(0.25, scope)
    assert optimizer.get_lr(scope) == 0.25
    training.steps.state["learning_rate_0"] = scope.find_var("learning_rate_0")
    training.step([1.0])
    assert training["p0"][0] == -0.25


def test_a_running_variance_is_not_below_zero() -> None:
    """Of equal gradients it is 0, and rounded something below: Paddle's step is NaN there."""
    training = Training(optim.RMSProp(0.1, rho=0.6, centered=True), [np.zeros(64, np.float32)])
    for _ in range(60):
        training.step(np.linspace(300, 3000, 64, dtype=np.float32))
    mean, square = training["p0_mean_grad_0"].astype(np.float64), training["p0_mean_square_0"]
    assert (square - np.float32(mean) ** 2 < 0).any() and np.isfinite(training["p0"]).all()


@pytest.mark.parametrize(("value", "x", "expected"), [(0.0, 1.0, -0.1), (1.0, 0.0, 1.0)])
def test_lamb_trusts_where_a_norm_is_zero(value: float, x: float, expected: float) -> None:
    """A parameter of zeros moves by the rate, and one without a gradient stays: neither ratio is a number."""
    main = amp.Program()
    with amp.program_guard(main, main.startup), amp.unique_name.guard(), amp.scope_guard(Scope()):
        held = np.full((2, 2), value, np.float32)
        weight = amp.create_parameter([2, 2], "float32", name="w", initializer=held)
        loss = F.mean(amp.data("x", [1, 2], "float32") @ weight)
        optim.Lamb(0.1, lamb_weight_decay=0.0, always_adapt=True).minimize(loss)
        executor = amp.Executor(threads=1)
        executor.run(main.startup)
        executor.run(main, {"x": np.full((1, 2), x, np.float32)}, [loss])
        np.testing.assert_allclose(amp.global_scope().find_var("w"), expected, rtol=1e-4)
