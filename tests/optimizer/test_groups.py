"""Parameter groups, decay exclusion, clipping of and over groups, gradients that are None."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler import optimizer as optim
from amp_transpiler.errors import ArgumentError, ArgumentTypeError, GradientError
from amp_transpiler.ir import unique_name
from amp_transpiler.nn import functional as F
from amp_transpiler.nn.parameters import create_parameter
from amp_transpiler.passes.lowering.lowering import lower
from amp_transpiler.passes.step_check.check_lowered import check_lowered
from amp_transpiler.passes.view.training_step import training_step
from amp_transpiler.program import Program, program_guard
from tests.helpers.cuda_kernels import without_cuda_kernel
from tests.helpers.on_places import needs
from tests.helpers.steps import Steps, feed

Array = np.ndarray[Any, Any]
KINDS: dict[str, Callable[..., optim.Optimizer]] = {
    "sgd": optim.SGD,
    "momentum": optim.Momentum,
    "adam": optim.Adam,
    "adamw": optim.AdamW,
    "lamb": lambda rate, weight_decay=0.01, **more: optim.Lamb(rate, weight_decay, **more),
}
EVERY = pytest.mark.parametrize("kind", KINDS)
SHAPES = {"w_0": (3, 2), "b_0": (4,), "norm_w": (2, 2)}
#: 1, 2, 3, … times ± half the number of the parameter: what torch's clip_grad_norm_ was recorded with.
GRADS = {
    name: np.arange(1, 1 + np.prod(shape)).reshape(shape) * (-1) ** i * (i + 1) / 2
    for i, (name, shape) in enumerate(SHAPES.items())
}


class Net:
    """Three parameters whose gradients are fed, under one optimizer."""

    def __init__(self, optimizer: optim.Optimizer, only: tuple[str, ...] = tuple(SHAPES), gated: bool = False) -> None:
        self.main, self.startup = Program(), Program("startup")
        rng = np.random.default_rng(1)
        self.initial = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
        with program_guard(self.main, self.startup), unique_name.guard():
            made = [create_parameter(a.shape, "float32", name, a) for name, a in self.initial.items()]
            grads = {p.name: feed(self.main, f"{p.name}@GRAD", "float32", SHAPES[p.name]) for p in made}
            found = feed(self.main, "found", "bool", (1,)) if gated else None
            self.ops = optimizer.append_updates(
                [(p, grads[p.name]) for p in made if p.name in only], self.startup, found
            )
        self.steps = Steps(self.main, self.startup)

    def step(self, factor: float = 1.0, **more: Array) -> None:
        feeds = {f"{name}@GRAD": (factor * grad).astype(np.float32) for name, grad in GRADS.items()}
        self.steps({n: a for n, a in feeds.items() if self.main.var(n).readers} | more, [])

    def __getitem__(self, name: str) -> Array:
        return self.steps.state[name]


# -- groups --------------------------------------------------------------------------------------------------
@EVERY
def test_a_group_is_an_optimizer_of_its_own_settings(kind: str) -> None:
    """Three groups with their own rate factor and decay move as three optimizers with those settings."""
    groups = [
        {"params": ["w_*"], "learning_rate": 0.5},
        {"params": ["b_0"], "weight_decay": 0.25},
        {"params": ["norm_w"], "learning_rate": 2.0, "weight_decay": 0.0},
    ]
    together = Net(KINDS[kind](0.1, weight_decay=0.5, parameter_list=groups))
    alone = {
        "w_0": KINDS[kind](0.05, weight_decay=0.5),
        "b_0": KINDS[kind](0.1, weight_decay=0.25),
        "norm_w": KINDS[kind](0.2, weight_decay=0.0),
    }
    assert len(together.ops) == 3 and len({op.input(1) for op in together.ops}) == 1
    singles = {name: Net(optimizer, (name,)) for name, optimizer in alone.items()}
    for factor in (1.0, -0.5, 2.0):
        together.step(factor)
        for name, single in singles.items():
            single.step(factor)
            assert np.allclose(together[name], single[name], rtol=1e-6, atol=1e-7), name
            assert not np.array_equal(together[name], together.initial[name])


def test_groups_of_equal_settings_share_an_operator() -> None:
    groups = [{"params": ["w_0"]}, {"params": ["b_0"], "learning_rate": 0.1}, {"params": ["norm_w"]}]
    net = Net(optim.Adam(0.1, parameter_list=groups))
    assert sorted(op.attrs["n"] for op in net.ops) == [1, 2]
    assert sorted(op.attrs.get("lr_factor", 1.0) for op in net.ops) == pytest.approx([0.1, 1.0])
    assert len(Net(optim.Adam(0.1, parameter_list=["w_*", "b_0", "norm_w"])).ops) == 1


def test_a_factor_follows_the_schedule() -> None:
    schedule = optim.lr.PiecewiseDecay([1], [1.0, 0.5])
    net = Net(
        optim.SGD(schedule, parameter_list=[{"params": ["w_0", "norm_w"]}, {"params": ["b_0"], "learning_rate": 0.25}])
    )
    net.step()
    net.step()
    assert np.allclose(net.initial["b_0"] - net["b_0"], 0.25 * 1.5 * GRADS["b_0"], rtol=1e-6)
    assert np.allclose(net.initial["w_0"] - net["w_0"], 1.5 * GRADS["w_0"], rtol=1e-5)


def test_parameters_of_no_group_are_not_trained_and_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "amp_transpiler"):
        net = Net(optim.Adam(0.1, parameter_list=[{"params": ["w_0"]}]))
    assert "2 parameters" in caplog.text and "'b_0', 'norm_w'" in caplog.text
    net.step()
    assert [name for name in SHAPES if np.array_equal(net[name], net.initial[name])] == ["b_0", "norm_w"]
    assert not [name for name in net.steps.state if name.startswith("b_0_")], "it has no state either"


@pytest.mark.parametrize(
    "groups, error, said",
    [
        (
            [{"params": ["w_0", "b_*"]}, {"params": ["*_0"]}],
            ArgumentError,
            r"'w_0' is in two groups, parameter_list\[0\] \('w_0', 'b_\*'\) and parameter_list\[1\] \('\*_0'\)",
        ),
        ([{"params": ["nothing*"]}], ArgumentError, r"parameter_list\[0\].*'nothing\*' matches no trainable parameter"),
        ([{"params": ["w_1"]}], Exception, "no variable 'w_1'; did you mean 'w_0'"),
    ],
)
def test_groups_that_do_not_fit_the_program(groups: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        Net(optim.Adam(0.1, parameter_list=groups))


@pytest.mark.parametrize(
    "groups, error, said",
    [
        ([{"params": ["w"]}, "b"], ArgumentTypeError, r"parameter_list\[1\] is 'b'"),
        ([{"parameters": ["w"]}], ArgumentError, r"parameter_list\[0\] has the key 'parameters'; a group has 'params'"),
        ([{"learning_rate": 1.0}], ArgumentError, "has no 'params'"),
        ([{"params": []}], ArgumentTypeError, "params is"),
        ([{"params": 3}], ArgumentTypeError, "params is 3"),
        ([{"params": ["w"], "learning_rate": -1}], ArgumentError, r"parameter_list\[0\]: learning_rate is -1"),
        ([{"params": ["w"], "weight_decay": "much"}], ArgumentError, "weight_decay is 'much'"),
        ([{"params": ["w"], "grad_clip": 1.0}], ArgumentTypeError, "grad_clip is 1.0"),
        ({"params": ["w"]}, ArgumentTypeError, "expected a list of parameters, or of groups"),
    ],
)
def test_wrong_groups_are_refused_at_the_call(groups: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        optim.Momentum(0.1, parameter_list=groups)


# -- decay exclusion -----------------------------------------------------------------------------------------
@EVERY
def test_excluded_parameters_do_not_decay(kind: str) -> None:
    some = Net(KINDS[kind](0.1, weight_decay=0.5, weight_decay_exclude=["*norm*", "b_?"]))
    decayed, free = Net(KINDS[kind](0.1, weight_decay=0.5)), Net(KINDS[kind](0.1, weight_decay=0.0))
    assert len(some.ops) == 1
    for net in (some, decayed, free):
        net.step()
    for name, same in (("w_0", decayed), ("b_0", free), ("norm_w", free)):
        assert some[name].tobytes() == same[name].tobytes(), name
        assert decayed[name].tobytes() != free[name].tobytes()


@pytest.mark.parametrize(
    "optimizer",
    [
        optim.AdamW(0.1, apply_decay_param_fun=lambda name: name != "b_0", weight_decay_exclude=["norm*"]),
        optim.Lamb(0.1, exclude_from_weight_decay_fn=lambda name: name == "b_0", weight_decay_exclude=["norm*"]),
    ],
)
def test_exclusion_stands_beside_the_functions_of_adamw_and_lamb(optimizer: optim.Optimizer) -> None:
    (op,) = Net(optimizer).ops
    row = {v.name: i for i, v in enumerate(op.inputs[4::5]) if v is not None}
    assert [op.attrs["with_decay"][row[name]] for name in SHAPES] == [1, 0, 0]


def test_exclusion_patterns_are_checked() -> None:
    with pytest.raises(ArgumentTypeError, match="weight_decay_exclude"):
        optim.SGD(0.1, weight_decay_exclude="*.b_0")
    with pytest.raises(ArgumentTypeError, match="weight_decay_exclude"):
        optim.SGD(0.1, weight_decay_exclude=[3])  # type: ignore[list-item]
    with pytest.raises(ArgumentTypeError, match="Lars: exclude_from_weight_decay is 'p0'"):
        optim.Lars(0.1, exclude_from_weight_decay="p0")
    with pytest.raises(ArgumentError, match=r"weight_decay_exclude: pattern '\*.bias' matches no parameter"):
        Net(optim.AdamW(0.1, weight_decay_exclude=["*.bias"]))


# -- clipping ------------------------------------------------------------------------------------------------
def clipped_grads(optimizer: optim.Optimizer, factor: float = 1.0) -> dict[str, Array]:
    net = Net(optimizer)
    net.step(factor)
    return {name: net.initial[name].astype(np.float64) - net[name] for name in SHAPES}


def directions(factors: dict[str, float]) -> dict[str, Array]:
    return {name: GRADS[name] * factor for name, factor in factors.items()}


#: The norm of all gradients, and what torch.nn.utils.clip_grad_norm_ (2.13, float64) makes of their first elements.
NORM = 10.965856099730654


@pytest.mark.parametrize(
    "limit, firsts",
    [
        (1.0, [0.0455960711, -0.0911921422, 0.136788213]),
        (10.0, [0.455960711, -0.911921422, 1.36788213]),
        (1000.0, [0.5, -1.0, 1.5]),
    ],
)
def test_the_global_norm_is_torchs(limit: float, firsts: list[float]) -> None:
    """Recorded for the first elements; all elements of a gradient have one factor."""
    found = clipped_grads(optim.SGD(1.0, grad_clip=optim.ClipGradByGlobalNorm(limit)))
    for first, name in zip(firsts, SHAPES, strict=True):
        assert np.allclose(found[name], GRADS[name] * (first / GRADS[name].flat[0]), rtol=2e-6, atol=3e-7)


def test_one_clip_of_the_optimizer_is_over_all_groups() -> None:
    groups = [
        {"params": ["w_0"], "weight_decay": 0.0},
        {"params": ["b_0"], "learning_rate": 1.0},
        {"params": ["norm_w"], "learning_rate": 0.5},
    ]
    optimizer = optim.SGD(1.0, parameter_list=groups, grad_clip=optim.ClipGradByGlobalNorm(2.0))
    found = clipped_grads(optimizer)
    for name, wanted in directions({"w_0": 2 / NORM, "b_0": 2 / NORM, "norm_w": 1 / NORM}).items():
        assert np.allclose(found[name], wanted, rtol=2e-6, atol=3e-7), name


def test_a_group_with_its_own_clip_is_clipped_by_itself() -> None:
    """Norms of the groups as torch gives them for each alone; an explicit None is no clipping."""
    groups = [
        {"params": ["w_0"], "grad_clip": optim.ClipGradByGlobalNorm(2.0)},
        {"params": ["b_0"], "grad_clip": None},
        {"params": ["norm_w"]},
    ]
    found = clipped_grads(optim.SGD(1.0, parameter_list=groups, grad_clip=optim.ClipGradByGlobalNorm(2.0)))
    for name, first in (("w_0", 0.209656923), ("b_0", -1.0), ("norm_w", 0.365148327)):
        assert np.allclose(found[name], GRADS[name] * (first / GRADS[name].flat[0]), rtol=2e-6, atol=3e-7), name


def test_two_groups_share_the_clip_that_they_inherit() -> None:
    groups = [
        {"params": ["w_0"]},
        {"params": ["b_0"], "learning_rate": 0.5},
        {"params": ["norm_w"], "grad_clip": optim.ClipGradByValue(0.5)},
    ]
    found = clipped_grads(optim.SGD(1.0, parameter_list=groups, grad_clip=optim.ClipGradByGlobalNorm(2.0)))
    for name, first in (("w_0", 0.137685659), ("b_0", -0.275371318 / 2)):
        assert np.allclose(found[name], GRADS[name] * (first / GRADS[name].flat[0]), rtol=2e-6, atol=3e-7), name
    assert np.allclose(found["norm_w"], 0.5, rtol=1e-6)


# -- whole programs, every optimizer and mode ------------------------------------------------------------------
def grouped(kind: str, mode: str, **more: Any) -> tuple[Program, Program, Any, Any]:
    """Two layers and a layer norm in three groups, with a schedule, decay, exclusion and clipping."""
    main, startup = amp.Program(), amp.Program("startup")
    main.seed = startup.seed = 3
    groups = [
        {"params": ["fc_0.*"], "learning_rate": 0.5},
        {"params": ["fc_1.*"], "weight_decay": 0.1},
        {"params": ["layer_norm_0.*"], "grad_clip": optim.ClipGradByNorm(0.5)},
    ]
    schedule = optim.lr.LinearWarmup(optim.lr.CosineAnnealingDecay(0.05, 20), 3, 0.01, 0.05)
    opt: Any = KINDS[kind](
        schedule,
        parameter_list=groups,
        weight_decay=0.01,
        weight_decay_exclude=["*.b_0"],
        grad_clip=optim.ClipGradByGlobalNorm(1.0),
        multi_precision=mode.startswith("pure"),
    )
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x, y = amp.data("x", [4, 3], "float32"), amp.data("y", [4, 2], "float32")
        with amp.fp16_guard():
            out = amp.nn.fc(amp.nn.layer_norm(amp.nn.fc(x, 5, act="relu")), 2)
        loss = F.mean((out - y) * (out - y))
        if mode != "fp32":
            opt = amp.decorate(
                opt,
                use_pure_fp16=mode.startswith("pure"),
                init_loss_scaling=8.0,
                decr_every_n_nan_or_inf=1,
                dtype="bfloat16" if mode.endswith("bf16") else "float16",
            )
        opt.minimize(loss, startup)
    return main, startup, loss, opt


@pytest.mark.parametrize("mode", ["fp32", "amp", "pure", "pure-bf16"])
@EVERY
def test_groups_train_in_every_mode_and_a_bad_step_changes_nothing(kind: str, mode: str, exe: amp.Executor) -> None:
    needs(exe.place, "bfloat16" if mode == "pure-bf16" else "float16")
    main, startup, loss, opt = grouped(kind, mode)
    updates = training_step(main).updates
    assert len(updates) == 3
    if mode != "fp32":
        amp.check_step(main)
        assert len({update.found_inf for update in updates}) == 1, "one verdict gates every group"
    lowered = lower(main, "cuda", {"x": (4, 3), "y": (4, 2)}, [loss])
    check_lowered(main, lowered)
    assert not without_cuda_kernel(lowered.model)
    scope = amp.Scope()
    exe.run(startup, scope=scope)
    if mode != "fp32":
        opt.amp_init(exe.place, scope)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 3)).astype(np.float32)
    feeds = {"x": x, "y": x[:, :2] * 0.5}
    losses = [float(exe.run(main, feed=feeds, fetch_list=[loss], scope=scope)[0]) for _ in range(12)]
    assert losses[-1] < losses[0] and all(np.isfinite(losses))
    if mode == "fp32":
        return
    before = {name: scope.find_var(name).tobytes() for name in scope.var_names()}
    exe.run(main, feed=feeds | {"x": np.full_like(x, np.inf)}, scope=scope)
    changed = {name for name, old in before.items() if scope.find_var(name).tobytes() != old}
    assert changed == {"loss_scaling_0", "num_good_steps_0"}


# -- patterns of a plain list ----------------------------------------------------------------------------------
def test_a_pattern_takes_what_the_loss_depends_on() -> None:
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x = amp.data("x", [4, 3], "float32")
        loss = F.mean(amp.nn.fc(x, 2))
        F.mean(amp.nn.fc(x, 2))  # another head
        with pytest.raises(GradientError, match=r"fc_1\.w_0"):
            optim.SGD(parameter_list=["fc_0.w_0", "fc_1.w_0"]).minimize(loss, startup)
        _, pairs = optim.SGD(parameter_list=["*.w_0"]).minimize(loss, startup)
    assert [parameter.name for parameter, _ in pairs] == ["fc_0.w_0"]


# -- None gradients --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("decorated", [False, True])
def test_none_gradients_are_dropped_with_one_warning(decorated: bool) -> None:
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        loss = F.mean(amp.nn.fc(amp.data("x", [4, 3], "float32"), 2))
        opt: Any = amp.decorate(optim.Adam(0.1)) if decorated else optim.Adam(0.1)
        pairs = opt.backward(loss, startup)
        main.startup = startup
        lost = [(parameter, None) for parameter, _ in pairs]
        with pytest.raises(ArgumentError, match=r"every gradient is None \('fc_0.w_0', 'fc_0.b_0'\)"):
            opt.apply_gradients(lost)
        assert not main.updates
        with pytest.warns(UserWarning, match=r"without a gradient \(None\) are not updated: 'fc_0.b_0'") as caught:
            (update,) = opt.apply_gradients([pairs[0], lost[1]])
    assert len(caught) == 1 and update.attrs["n"] == 1
    assert main.var("fc_0.b_0") not in main.updates
