"""Learning-rate schedules: recorded rates of torch and Paddle, the program's against the float64 rule, bad steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler import optimizer as optim
from amp_transpiler.errors import ArgumentError, ArgumentTypeError, OrderError
from amp_transpiler.ir import unique_name
from amp_transpiler.nn import functional as F
from amp_transpiler.nn.parameters import create_parameter
from amp_transpiler.optimizer import lr
from amp_transpiler.passes.lowering.lowering import lower
from amp_transpiler.program import Program, program_guard
from tests.helpers.cuda_kernels import without_cuda_kernel
from tests.helpers.steps import Steps, feed

#: Steps at which rates were recorded, from torch's schedulers in float64 with an initial rate of 0.1.
AT = [0, 1, 2, 3, 5, 7, 9, 10, 11, 15, 19, 20, 25, 29]
TORCH: list[tuple[str, lr.LRScheduler, list[float]]] = [
    (
        "CosineAnnealingLR(20, eta_min=0.01)",
        lr.CosineAnnealingDecay(0.1, 20, 0.01),
        [
            0.1,
            0.0994459753268,
            0.0977975432333,
            0.0950952935885,
            0.0868198051534,
            0.0754295724883,
            0.0620395509268,
            0.055,
            0.0479604490732,
            0.0231801948466,
            0.0105540246732,
            0.01,
            0.0231801948466,
            0.0479604490732,
        ],
    ),
    (
        "PolynomialLR(20, power=2)",
        lr.PolynomialDecay(0.1, 20, end_lr=0, power=2),
        [0.1, 0.09025, 0.081, 0.07225, 0.05625, 0.04225, 0.03025, 0.025, 0.02025, 0.00625, 0.00025, 0.0, 0.0, 0.0],
    ),
    (
        "MultiStepLR([5, 10, 20], 0.1)",
        lr.PiecewiseDecay([5, 10, 20], [0.1, 0.01, 0.001, 0.0001]),
        [0.1, 0.1, 0.1, 0.1, 0.01, 0.01, 0.01, 0.001, 0.001, 0.001, 0.001, 0.0001, 0.0001, 0.0001],
    ),
    (
        "OneCycleLR(0.1, 30, pct_start=0.3)",
        lr.OneCycleLR(0.1, 30),
        [
            0.004,
            0.00765378243946,
            0.018058874503,
            0.0336311952465,
            0.0703688047535,
            0.0963462175605,
            0.0994420997699,
            0.097780861649,
            0.0950533949517,
            0.075025,
            0.0463172318254,
            0.0389350793489,
            0.00877937322292,
            0.0001,
        ],
    ),
    (
        "OneCycleLR(three_phase, linear)",
        lr.OneCycleLR(0.1, 30, anneal_strategy="linear", three_phase=True),
        [0.004, 0.016, 0.028, 0.04, 0.064, 0.088, 0.088, 0.076, 0.064, 0.016, 0.0031, 0.0028, 0.0013, 0.0001],
    ),
    (
        "SequentialLR([LinearLR(0.1, 1, 10), CosineAnnealingLR(20)])",
        lr.LinearWarmup(lr.CosineAnnealingDecay(0.1, 20, 0.01), 10, 0.01, 0.1),
        [
            0.01,
            0.019,
            0.028,
            0.037,
            0.055,
            0.073,
            0.091,
            0.1,
            0.0994459753268,
            0.0868198051534,
            0.0620395509268,
            0.055,
            0.0231801948466,
            0.0105540246732,
        ],
    ),
    (
        "LambdaLR with the formula of Vaswani et al., 512, 10 steps",
        lr.NoamDecay(512, 10),
        [
            0.0,
            0.00139754248594,
            0.00279508497187,
            0.00419262745781,
            0.00698771242969,
            0.00978279740156,
            0.0125778823734,
            0.0139754248594,
            0.0133250447722,
            0.0114108866147,
            0.0101388388207,
            0.00988211768803,
            0.00883883476483,
            0.00820665205373,
        ],
    ),
]

#: Schedules as long as a short training run.
LONG: list[lr.LRScheduler] = [
    lr.Constant(0.3),
    lr.PiecewiseDecay([1, 500, 1500], [0.1, 0.5, 0.05, 0.001]),
    lr.LinearWarmup(0.1, 300, 0.0, 0.1),
    lr.CosineAnnealingDecay(0.1, 700, 1e-4),
    lr.PolynomialDecay(0.1, 1100),
    lr.PolynomialDecay(0.1, 600, power=0.5, cycle=True),
    lr.PolynomialDecay(0.1, 1600, end_lr=0.2, power=3.0),
    lr.NoamDecay(64, 400, 2.0),
    lr.OneCycleLR(0.1, 1800),
    lr.OneCycleLR(0.1, 1000, three_phase=True),
    lr.OneCycleLR(0.1, 999, phase_pct=0.21, anneal_strategy="linear"),
    lr.CosineAnnealingWarmRestarts(0.1, 300, eta_min=0.01),
    lr.CosineAnnealingWarmRestarts(0.1, 7, 2),
    lr.CyclicLR(0.01, 0.1, 70, 31),
    lr.CyclicLR(0.01, 0.1, 130, mode="triangular2"),
    lr.CyclicLR(0.01, 0.1, 100, mode="exp_range", exp_gamma=0.9991),
    lr.ExponentialDecay(0.1, 0.995),
    lr.NaturalExpDecay(0.1, 0.003),
    lr.InverseTimeDecay(0.1, 0.01),
    lr.StepDecay(0.1, 300, 0.5),
    lr.MultiStepDecay(0.1, [100, 900, 1700], 0.3),
    lr.LinearLR(0.1, 1500, 0.01, 2.0),
    lr.LinearWarmup(lr.LinearWarmup(lr.PiecewiseDecay([100], [0.1, 0.01]), 200, 0.2, 0.1), 300, 0.0, 0.2),
]
EVERY = pytest.mark.parametrize("schedule", LONG, ids=[f"{i}-{type(s).__name__}" for i, s in enumerate(LONG)])


def test_a_warm_up_is_advanced_as_what_follows_it() -> None:
    assert lr.LinearWarmup(lr.StepDecay(0.1, 1, 0.5).by_user(), 2, 0.0, 0.1).stepped_by_user
    assert not lr.LinearWarmup(lr.StepDecay(0.1, 1, 0.5), 2, 0.0, 0.1).stepped_by_user


@pytest.mark.parametrize("schedule, recorded", [case[1:] for case in TORCH], ids=[case[0] for case in TORCH])
def test_rates_are_torchs(schedule: lr.LRScheduler, recorded: list[float]) -> None:
    assert [schedule.value(step) for step in AT] == pytest.approx(recorded, rel=1e-10, abs=1e-15)


@pytest.mark.parametrize(
    "step, expected",
    [
        (0, 0.5),
        (1, 0.45),
        (9, 0.05),
        (10, 0.0),
        (11, 0.225),
        (19, 0.025),
        (20, 0.0),
        (21, 0.15),
        (30, 0.0),
    ],
)
def test_cycles_of_the_polynomial_decay_are_paddles(step: int, expected: float) -> None:
    """0.5 * (1 - step / (10 * ceil(step / 10))), by hand."""
    assert lr.PolynomialDecay(0.5, 10, end_lr=0, cycle=True).value(step) == pytest.approx(expected, abs=1e-15)


class Net:
    """One parameter whose gradient is 1, so that a step of SGD moves it by the rate."""

    def __init__(self, schedule: Any, gated: bool = False) -> None:
        self.main, self.startup = Program(), Program("startup")
        self.optimizer = optim.SGD(schedule)
        with program_guard(self.main, self.startup), unique_name.guard():
            w = create_parameter([1], "float32", "w", np.zeros(1, np.float32))
            grad = feed(self.main, "grad", "float32", (1,))
            found = feed(self.main, "found", "bool", (1,)) if gated else None
            (self.op,) = self.optimizer.append_updates([(w, grad)], self.startup, found)
        self.gated = gated
        self.steps = Steps(self.main, self.startup, "ALL")

    def step(self, found: bool = False) -> float:
        """Take a step; the rate that it reports, found to be the one that moved the parameter."""
        before = self.steps.state["w"]
        feeds = {"grad": np.ones(1, np.float32)} | ({"found": np.array([found])} if self.gated else {})
        (rate,) = self.steps(feeds, [self.main.var("learning_rate_0")])
        moved = before - (0 if found else 1) * rate.astype(np.float32)
        assert self.steps.state["w"].tobytes() == moved.tobytes()
        return float(rate)


def rates(schedule: lr.LRScheduler, count: int, ending: int | None = None) -> np.ndarray[Any, Any]:
    """What the program computes for steps 0 … count − 1, in one session run each."""
    net = Net(schedule)
    found = []
    for step in range(count):
        assert net.steps.state["lr_step_0"] == step
        found.append(net.step())
        net.steps.state["w"][:] = 0
    return np.array(found)


@EVERY
def test_the_program_follows_the_rule(schedule: lr.LRScheduler) -> None:
    exact = np.array([schedule.value(step) for step in range(2000)])
    assert np.abs(rates(schedule, 2000) - exact).max() < 1e-6 * exact.max()


@EVERY
def test_far_steps_are_exact_enough(schedule: lr.LRScheduler) -> None:
    net = Net(schedule)
    for step in (10_000, 1_234_567, 16_000_001):
        net.steps.state["lr_step_0"] = np.array(step, np.int32)
        assert net.step() == pytest.approx(schedule.value(step), rel=1e-5, abs=1e-7)
        assert net.steps.state["lr_step_0"] == step + 1


@pytest.mark.parametrize(
    "schedule",
    [lr.ExponentialDecay(0.1, 1.5), lr.StepDecay(0.1, 1, 1.5), lr.MultiStepDecay(0.1, [1, 2], 1e200)],
    ids=lambda schedule: type(schedule).__name__,
)
def test_a_rate_that_grows_beyond_all_numbers_is_infinite_there_as_in_the_program(schedule: lr.LRScheduler) -> None:
    net = Net(schedule)
    net.steps.state["lr_step_0"] = np.array(10**6, np.int32)
    assert net.step() == schedule.value(10**6) == np.inf


def test_a_rate_of_nothing_stays_nothing() -> None:
    net = Net(lr.ExponentialDecay(0.0, 1.5))
    net.steps.state["lr_step_0"] = np.array(10**6, np.int32)
    assert net.step() == lr.ExponentialDecay(0.0, 1.5).value(10**6) == 0


@EVERY
def test_every_operator_has_a_cuda_kernel(schedule: lr.LRScheduler) -> None:
    net = Net(schedule, gated=True)
    lowered = lower(net.main, "cuda", {"grad": (1,), "found": (1,)}, [net.main.var("learning_rate_0")])
    assert not without_cuda_kernel(lowered.model)


def test_a_bad_step_leaves_the_schedule_where_it_is() -> None:
    net = Net(lr.LinearWarmup(0.1, 4, 0.0, 0.1), gated=True)
    verdicts = [False, True, True, False, False, True, False]
    seen = []
    for bad in verdicts:
        before = {name: array.tobytes() for name, array in net.steps.state.items()}
        seen.append(net.step(bad))
        after = {name: array.tobytes() for name, array in net.steps.state.items()}
        assert (after == before) == bad
    good = [0, 1, 1, 1, 2, 3, 3]
    assert seen == pytest.approx([0.1 * min(step / 4, 1) for step in good], rel=1e-6)
    assert net.steps.state["lr_step_0"] == 4


def every_optimizer(rate: Any, **options: Any) -> list[optim.Optimizer]:
    return [
        optim.SGD(rate, **options),
        optim.Momentum(rate, **options),
        optim.Adam(rate, **options),
        optim.AdamW(rate, **options),
        optim.Lamb(rate, **options),
    ]


def trained(
    optimizer: Any, scope: amp.Scope, start: int = 0, stop: int = 6, mode: str = "fp32", bad: tuple[int, ...] = ()
) -> tuple[Any, Program]:
    """Steps ``start`` … ``stop`` of a small regression on the executor; bad ones are fed an infinity."""
    main, startup = amp.Program(), amp.Program("startup")
    main.seed = startup.seed = 3
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x = amp.data("x", [4, 3], "float32")
        with amp.fp16_guard():
            loss = F.mean(F.reshape(amp.nn.fc(amp.nn.fc(x, 5, act="relu"), 2), [-1]) * 3.0)
        if mode != "fp32":
            optimizer = amp.decorate(optimizer, use_pure_fp16=mode == "pure", init_loss_scaling=8.0)
        optimizer.minimize(loss, startup)
    exe = amp.Executor(amp.CPUPlace())
    if start == 0:
        exe.run(startup, scope=scope)
        if mode != "fp32":
            optimizer.amp_init(amp.CPUPlace(), scope)
    data = np.random.default_rng(0).standard_normal((stop, 4, 3)).astype(np.float32)
    for step in range(start, stop):
        fed = np.full((4, 3), np.inf, np.float32) if step in bad else data[step]
        exe.run(main, feed={"x": fed}, fetch_list=[loss], scope=scope)
    return optimizer, main


@pytest.mark.parametrize("mode", ["fp32", "amp", "pure"])
@pytest.mark.parametrize("which", range(5), ids=["sgd", "momentum", "adam", "adamw", "lamb"])
def test_resume_by_a_copy_of_the_scope_continues(which: int, mode: str) -> None:
    """Six steps equal three, a copy, and three by a new program; one step before and one after the copy is bad."""
    schedule = lr.LinearWarmup(lr.CosineAnnealingDecay(0.1, 5), 2, 0.0, 0.1)
    bad = (1, 4) if mode != "fp32" else ()

    def optimizer() -> Any:
        return every_optimizer(schedule, multi_precision=mode == "pure")[which]

    whole, first, second = amp.Scope(), amp.Scope(), amp.Scope()
    opt, main = trained(optimizer(), whole, mode=mode, bad=bad)
    trained(optimizer(), first, stop=3, mode=mode, bad=bad)
    for name in first.var_names():
        second.set_var(name, first.find_var(name))
    trained(optimizer(), second, start=3, mode=mode, bad=bad)
    for name in whole.var_names():
        assert whole.find_var(name).tobytes() == second.find_var(name).tobytes(), name
    assert whole.find_var("lr_step_0") == 6 - len(bad)
    assert opt.get_lr(whole) == schedule.value(6 - len(bad))
    if mode != "fp32":
        amp.check_step(main)


def test_the_schedule_cannot_be_set_by_hand_and_is_read_from_the_scope() -> None:
    schedule = lr.PolynomialDecay(0.5, 10)
    net = Net(schedule)
    with pytest.raises(OrderError, match=r"PolynomialDecay\(learning_rate=0.5, decay_steps=10"):
        net.optimizer.set_lr(0.1)
    scope = amp.Scope()
    assert net.optimizer.get_lr(scope) == 0.5
    scope.set_var("lr_step_0", np.array(4, np.int32))
    assert net.optimizer.get_lr(scope) == schedule.value(4)


def test_the_operator_holds_the_schedule_and_a_copied_program_follows_it() -> None:
    schedule = lr.LinearWarmup(lr.NoamDecay(8, 3), 2, 0.0, 0.1)
    net = Net(schedule)
    (op,) = [op for op in net.main.operators if op.type == "LearningRate"]
    held = json.loads(op.attrs["schedule"])
    assert held["type"] == "LinearWarmup" and held["learning_rate"]["type"] == "NoamDecay"
    assert op.role == "update" and op.outputs[0] is net.op.input(1)


def test_schedules_compare_by_what_they_describe() -> None:
    assert lr.NoamDecay(8, 3) == lr.NoamDecay(8, 3) != lr.NoamDecay(8, 4)
    assert len({lr.Constant(0.1), lr.Constant(0.1), lr.Constant(0.2)}) == 2
    assert repr(lr.CosineAnnealingDecay(0.1, 7)) == "CosineAnnealingDecay(learning_rate=0.1, T_max=7, eta_min=0.0)"


@pytest.mark.parametrize(
    "make, error, named",
    [
        (lambda: lr.Constant(-1.0), ArgumentError, "learning_rate"),
        (lambda: lr.Constant(float("nan")), ArgumentError, "learning_rate"),
        (lambda: lr.CosineAnnealingDecay(lr.Constant(1.0), 5), ArgumentTypeError, "LinearWarmup alone"),  # type: ignore[arg-type]
        (lambda: lr.CosineAnnealingDecay(0.1, 0), ArgumentError, "T_max"),
        (lambda: lr.CosineAnnealingDecay(0.1, 2.5), ArgumentError, "T_max"),  # type: ignore[arg-type]
        (lambda: lr.PiecewiseDecay([5, 5], [1, 2, 3]), ArgumentError, "ascending"),
        (lambda: lr.PiecewiseDecay([5], [1, 2, 3]), ArgumentError, "2 values"),
        (lambda: lr.PiecewiseDecay(5, [1, 2]), ArgumentTypeError, "boundaries"),  # type: ignore[arg-type]
        (lambda: lr.PolynomialDecay(0.1, 5, power=0), ArgumentError, "power"),
        (lambda: lr.PolynomialDecay(0.1, 5, cycle=1), ArgumentTypeError, "cycle"),  # type: ignore[arg-type]
        (lambda: lr.LinearWarmup("fast", 5, 0, 1), ArgumentError, "learning_rate"),  # type: ignore[arg-type]
        (lambda: lr.NoamDecay(0, 5), ArgumentError, "d_model"),
        (lambda: lr.OneCycleLR(0.1, 100, anneal_strategy="cosine"), ArgumentError, "anneal_strategy"),
        (lambda: lr.OneCycleLR(0.1, 10, phase_pct=0.1), ArgumentError, "phase_pct"),
        (lambda: lr.OneCycleLR(0.1, 10, phase_pct=1.0), ArgumentError, "phase_pct"),
        (lambda: lr.OneCycleLR(0.1, 100, phase_pct=0.6, three_phase=True), ArgumentError, "phase_pct"),
        (lambda: lr.Constant(0.1).value(-1), ArgumentError, "step is -1; .* 0 to 2147483647"),
        (lambda: lr.Constant(0.1).value(2**31), ArgumentError, "step is 2147483648; .* 0 to 2147483647"),
        (lambda: lr.Constant(0.1).value(True), ArgumentError, "step is True"),
    ],
)
def test_bad_arguments_are_named(make: Callable[[], Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        make()
