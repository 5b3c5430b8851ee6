"""Moving averages of weights: the formula, bad steps, evaluation with them in every mode, checkpoints by scope copy."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler import optimizer as optim
from amp_transpiler.errors import ArgumentError, ArgumentTypeError, OrderError, ScopeError, StepError
from amp_transpiler.ir.types import numpy_dtype
from amp_transpiler.nn import functional as F
from amp_transpiler.optimizer import ExponentialMovingAverage
from amp_transpiler.passes.lowering.lowering import lower
from amp_transpiler.passes.step_check.check_lowered import check_lowered
from amp_transpiler.warn import AmpWarning
from tests.helpers.cuda_kernels import without_cuda_kernel

Array = np.ndarray[Any, Any]
CHECKED = [
    pytest.param("amp", "float16", id="amp"),
    pytest.param("pure", "float16", id="pure"),
    pytest.param("pure", "bfloat16", id="pure-bf16"),
    pytest.param("bare", "float16", id="pure-without-masters"),
]
MODES = pytest.mark.parametrize("mode, dtype", [pytest.param("fp32", "float16", id="fp32"), *CHECKED])
PARAMETERS = ["fc_0.w_0", "fc_0.b_0", "fc_1.w_0", "fc_1.b_0"]
DATA = np.random.default_rng(0).standard_normal((20, 4, 3)).astype(np.float32)


class Net:
    """Two layers, an optimizer and averages, in one of the modes; "bare" is pure 16 bit without masters."""

    def __init__(
        self,
        mode: str = "fp32",
        dtype: str = "float16",
        decay: float = 0.75,
        warmup: bool = False,
        exe: amp.Executor | None = None,
    ) -> None:
        self.main, self.startup = amp.Program(), amp.Program("startup")
        self.main.seed = self.startup.seed = 5
        self.ema = ExponentialMovingAverage(decay, warmup)
        self.mode = mode
        opt: Any = optim.Momentum(0.1, multi_precision=mode == "pure")
        with amp.program_guard(self.main, self.startup), amp.unique_name.guard():
            x = amp.data("x", [4, 3], "float32")
            with amp.fp16_guard():
                self.out = amp.nn.fc(amp.nn.fc(x, 5, act="relu"), 2)
            self.loss = F.mean(self.out * self.out)
            self.test = self.main.clone(for_test=True)
            if mode != "fp32":
                scaling = {"decr_every_n_nan_or_inf": 1} | ({"init_loss_scaling": 8.0} if dtype == "float16" else {})
                opt = amp.decorate(opt, use_pure_fp16=mode != "amp", dtype=dtype, **scaling)
            opt.minimize(self.loss, self.startup)
            self.op = self.ema.update(self.main, self.startup)
        self.exe, self.scope = exe or amp.Executor(amp.CPUPlace()), amp.Scope()
        self.exe.run(self.startup, scope=self.scope)
        self.initial = {name: self[name] for name in PARAMETERS}
        if mode != "fp32":
            opt.amp_init(self.exe.place, self.scope, self.test, use_fp16_test=True)

    def step(self, x: Array) -> None:
        self.exe.run(self.main, feed={"x": x}, fetch_list=[], scope=self.scope)

    def evaluate(self) -> Array:
        (out,) = self.exe.run(self.test, feed={"x": DATA[0]}, fetch_list=[self.out.name], scope=self.scope)
        return np.asarray(out)

    def __getitem__(self, name: str) -> Array:
        return self.scope.find_var(name)

    def master(self, name: str) -> Array:
        """The value that is averaged."""
        held = f"{name}_fp32_master_0"
        return self[held if self.scope.has_var(held) else name]

    def bytes(self) -> dict[str, bytes]:
        return {name: self[name].tobytes() for name in self.scope.var_names()}


@pytest.mark.filterwarnings("ignore:.*multi_precision")
@MODES
@pytest.mark.parametrize("warmup", [False, True])
def test_averages_follow_the_formula(mode: str, dtype: str, warmup: bool) -> None:
    net = Net(mode, dtype, warmup=warmup)
    exact = {name: array.astype(np.float64) for name, array in net.initial.items()}
    for name, array in net.initial.items():
        assert net[f"{name}_ema_0"].dtype == np.float32
        assert net[f"{name}_ema_0"].tobytes() == array.tobytes(), "it starts unrounded"
    for step in range(8):
        net.step(DATA[step])
        decay = min(0.75, (1 + step) / (10 + step)) if warmup else 0.75
        for name, old in exact.items():
            exact[name] = decay * old + (1 - decay) * net.master(name).astype(np.float64)
            assert np.abs(net[f"{name}_ema_0"] - exact[name]).max() < 1e-6
    assert any(not np.array_equal(net.master(name), net[f"{name}_ema_0"]) for name in exact)
    assert not warmup or net["ema_step_0"] == 8


@pytest.mark.filterwarnings("ignore:.*multi_precision")
@pytest.mark.parametrize("mode, dtype", CHECKED)
def test_a_bad_step_changes_no_average(mode: str, dtype: str) -> None:
    net = Net(mode, dtype, warmup=True)
    amp.check_step(net.main)
    net.step(DATA[0])
    before = net.bytes()
    net.step(np.full((4, 3), np.inf, np.float32))
    assert {name for name, old in before.items() if net.bytes()[name] != old} <= {"loss_scaling_0", "num_good_steps_0"}
    net.step(DATA[1])
    assert net["ema_step_0"] == 2 and net.bytes()["fc_1.w_0_ema_0"] != before["fc_1.w_0_ema_0"]


@pytest.mark.filterwarnings("ignore:.*multi_precision")
@MODES
def test_evaluation_with_the_averages(mode: str, dtype: str) -> None:
    """Inside, the test program computes what it computes with the rounded averages put there by hand; then all is back."""
    net = Net(mode, dtype)
    for x in DATA[:6]:
        net.step(x)
    before, plain = net.bytes(), net.evaluate()
    with net.ema.applied(net.scope) as scope:
        assert scope is net.scope
        averaged = net.evaluate()
        for name in PARAMETERS:
            assert net[name].tobytes() == net[f"{name}_ema_0"].astype(net[name].dtype).tobytes()
        assert net["fc_0.w_0"].dtype == (np.float32 if mode in ("fp32", "amp") else numpy_dtype(dtype))
    assert net.bytes() == before and net.evaluate().tobytes() == plain.tobytes()
    assert averaged.tobytes() != plain.tobytes()
    by_hand = Net(mode, dtype)
    for name in PARAMETERS:
        by_hand.scope.set_var(name, net[f"{name}_ema_0"].astype(net[name].dtype))
    assert by_hand.evaluate().tobytes() == averaged.tobytes()


def test_training_goes_on_as_if_nothing_had_been_evaluated() -> None:
    with_it, without = Net("pure"), Net("pure")
    for x in DATA[:8]:
        with_it.step(x)
        without.step(x)
        with with_it.ema.applied(with_it.scope):
            with_it.evaluate()
    assert with_it.bytes() == without.bytes()


@pytest.mark.parametrize("mode", ["fp32", "amp", "pure"])
def test_every_place_averages_and_evaluates_alike(exe: amp.Executor, mode: str) -> None:
    net, cpu = Net(mode, warmup=True, exe=exe), Net(mode, warmup=True)
    for x in (*DATA[:5], np.full((4, 3), np.inf, np.float32) if mode != "fp32" else DATA[5]):
        net.step(x)
        cpu.step(x)
    close = {"rtol": 1e-5, "atol": 1e-5} if mode == "fp32" else {"rtol": 1e-2, "atol": 1e-2}
    for name in PARAMETERS:
        assert np.allclose(net[f"{name}_ema_0"], cpu[f"{name}_ema_0"], **close)
    assert net["ema_step_0"] == cpu["ema_step_0"]
    before = net.bytes()
    with net.ema.applied(net.scope), cpu.ema.applied(cpu.scope):
        assert np.allclose(net.evaluate(), cpu.evaluate(), **close)
    assert net.bytes() == before


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_the_parameters_come_back_after_an_error(error: type[BaseException]) -> None:
    net = Net("pure")
    net.step(DATA[0])
    before = net.bytes()
    with pytest.raises(error), net.ema.applied(net.scope):
        assert net.bytes() != before
        raise error
    assert net.bytes() == before


@pytest.mark.parametrize("first", [True, False])
def test_threads_side_by_side_have_averages_until_each_leaves(first: bool) -> None:
    net = Net()
    for x in DATA[:3]:
        net.step(x)
    before, entered, left = net.bytes(), threading.Event(), threading.Event()

    def beside() -> None:
        with net.ema.applied(net.scope):
            entered.set()
            left.wait()

    with net.ema.applied(net.scope):
        averages = net.bytes()
    other = threading.Thread(target=beside)
    if first:
        other.start()
        entered.wait()
    with net.ema.applied(net.scope):
        if not first:
            other.start()
            entered.wait()
        left.set()
        other.join()
        assert net.bytes() == averages != before
    assert net.bytes() == before


@pytest.mark.parametrize("mode", ["fp32", "pure"])
def test_copy_to_is_for_good(mode: str) -> None:
    net = Net(mode)
    for x in DATA[:3]:
        net.step(x)
    with net.ema.applied(net.scope):
        averaged = net.evaluate()
    net.ema.copy_to(net.scope)
    assert net.evaluate().tobytes() == averaged.tobytes()
    for name in PARAMETERS:
        assert net.master(name).tobytes() == net[f"{name}_ema_0"].tobytes()
    net.step(DATA[3])  # training goes on from there


def test_a_copied_scope_continues() -> None:
    net, other = Net("pure", warmup=True), Net("pure", warmup=True)
    for x in DATA[:4]:
        net.step(x)
    for name in net.scope.var_names():
        other.scope.set_var(name, net[name])
    for x in DATA[4:8]:
        net.step(x)
        other.step(x)
    assert net.bytes() == other.bytes()


@pytest.mark.parametrize("mode", ["fp32", "amp", "pure"])
def test_the_lowered_step_is_gated_and_has_cuda_kernels(mode: str) -> None:
    net = Net(mode, warmup=True)
    lowered = lower(net.main, "cuda", {"x": (4, 3)}, [net.loss])
    check_lowered(net.main, lowered)
    assert not without_cuda_kernel(lowered.model)


def test_an_ungated_average_is_found() -> None:
    net = Net("amp")
    net.op.set_input(0, None)
    with pytest.raises(StepError, match=r"\(ExponentialAverage\) is gated by nothing"):
        amp.check_step(net.main)


def test_order_and_arguments() -> None:
    for decay in (1.0, -0.1, "much"):
        with pytest.raises(ArgumentError, match="decay"):
            ExponentialMovingAverage(decay)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="warmup"):
        ExponentialMovingAverage(0.9, warmup=3)  # type: ignore[arg-type]
    ema = ExponentialMovingAverage()
    with pytest.raises(OrderError, match="updates no parameter yet; minimize it first"):
        ema.update(amp.Program(startup=amp.Program("startup")))
    with pytest.raises(OrderError, match=r"call update\(program\) first"), ema.applied(amp.Scope()):
        pass
    net = Net()
    with pytest.raises(OrderError, match="follows program"):
        net.ema.update(net.main)
    with pytest.raises(ScopeError, match="startup program"), net.ema.applied(amp.Scope()):
        pass


def test_parameters_that_are_updated_later_are_said_to_have_no_average() -> None:
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        out = amp.nn.fc(amp.nn.fc(amp.data("x", [4, 3]), 5), 2)
        momentum = optim.Momentum(0.1)
        first, second, *rest = momentum.backward(F.mean(out * out))
        momentum.apply_gradients([first])
        ExponentialMovingAverage().update()
        with pytest.warns(AmpWarning, match=f"no average: '{second[0].name}'. Call it after the last"):
            momentum.apply_gradients([second])
        ExponentialMovingAverage().update()
        with pytest.warns(AmpWarning, match=f"no average: '{rest[0][0].name}', '{rest[1][0].name}'"):
            momentum.apply_gradients(rest)
    assert not [v.name for v in main.updates if v.name.startswith("fc_1") and "ema" in v.name]


@pytest.mark.parametrize("source, target", [("fp32", "pure"), ("pure", "fp32"), ("pure", "pure"), ("amp", "pure")])
def test_a_checkpoint_carries_averages_into_another_mode(source: str, target: str, tmp_path: Path) -> None:
    old, new = Net(source, warmup=True), Net(target, warmup=True)
    for x in DATA[:4]:
        old.step(x)
    amp.save_checkpoint(tmp_path, old.main, old.scope)
    loaded = amp.load_checkpoint(tmp_path, new.main, new.scope)
    assert loaded.missing == loaded.unused == ()
    for name in PARAMETERS:
        assert new[f"{name}_ema_0"].tobytes() == old[f"{name}_ema_0"].tobytes()
    assert new["ema_step_0"] == 4


@pytest.mark.parametrize("pure", [False, True])
def test_several_optimizers_and_windows_share_the_verdict(pure: bool) -> None:
    """Two optimizers with schedules and groups, two micro-batches to a step: all counters move with good steps alone."""
    lr, main, startup = optim.lr, amp.Program(), amp.Program("startup")
    groups = [{"params": ["fc_1.w_0"], "learning_rate": 0.5}, {"params": ["fc_1.b_0"]}]
    first = optim.Adam(lr.NoamDecay(4, 3), parameter_list=["fc_0*"], multi_precision=pure)
    second = optim.SGD(lr.LinearWarmup(0.1, 4, 0.01, 0.1), parameter_list=groups, multi_precision=pure)
    ema = ExponentialMovingAverage(0.5, warmup=True)
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x = amp.data("x", [4, 3], "float32")
        with amp.fp16_guard():
            loss = F.mean(amp.nn.fc(amp.nn.fc(x, 5, act="relu"), 2))
        opt = amp.decorate([first, second], use_pure_fp16=pure, accumulate_steps=2, init_loss_scaling=8.0)
        opt.minimize(loss, startup)
        ema.update(main, startup)
    exe, scope = amp.Executor(amp.CPUPlace()), amp.Scope()
    exe.run(startup, scope=scope)
    opt.amp_init(amp.CPUPlace(), scope)

    def state() -> dict[str, bytes]:
        return {name: scope.find_var(name).tobytes() for name in scope.var_names()}

    good = 0
    for run in range(8):
        bad_window = run // 2 == 1
        before = state()
        fed = np.full((4, 3), np.inf, np.float32) if run == 2 else DATA[run]
        exe.run(main, feed={"x": fed}, fetch_list=[loss], scope=scope)
        good += run % 2 == 1 and not bad_window
        assert {int(scope.find_var(name)) for name in ("lr_step_0", "lr_step_1", "ema_step_0")} == {good}
        moved = {name for name, old in before.items() if state()[name] != old}
        assert any("ema" in name for name in moved) == (run % 2 == 1 and not bad_window)
    assert good == 3 and first.get_lr(scope) == first.learning_rate.value(3)  # type: ignore[union-attr]


@pytest.mark.parametrize("mode", ["fp32", "amp", "pure", "bare"])
def test_averages_begin_with_weights_that_are_loaded(mode: str, tmp_path: Path) -> None:
    """Those of the startup program would be in them for a thousand steps; what a step has moved stays."""
    net = Net(mode)
    loaded = {name: (array + 0.25).astype(np.float32) for name, array in net.initial.items()}
    np.savez(tmp_path / "weights.npz", **loaded)
    amp.load_weights(tmp_path / "weights.npz", net.main, net.scope)
    for name, array in loaded.items():
        kept = array.astype(net[name].dtype).astype(np.float32) if mode == "bare" else array
        np.testing.assert_array_equal(net[f"{name}_ema_0"], kept)
    net.step(DATA[1])
    moved = {name: net[f"{name}_ema_0"] for name in loaded}
    amp.load_weights(tmp_path / "weights.npz", net.main, net.scope)
    for name, array in moved.items():
        np.testing.assert_array_equal(net[f"{name}_ema_0"], array)


@pytest.mark.parametrize("mode", ["fp32", "pure"])
def test_a_checkpoint_is_of_what_is_trained(mode: str, tmp_path: Path) -> None:
    """Inside it would have averages as parameters beside masters that are none."""
    net = Net(mode)
    net.step(DATA[1])
    with net.ema.applied(net.scope) as scope:
        with pytest.raises(amp.errors.OrderError, match="inside ExponentialMovingAverage.applied"):
            amp.save_checkpoint(tmp_path / "state", net.main, scope)
        amp.save_inference_model(tmp_path / "averages.onnx", ["x"], [net.out], net.exe, net.main, scope=scope)
    assert [path.name for path in tmp_path.iterdir()] == ["averages.onnx"]
    amp.save_checkpoint(tmp_path / "state", net.main, net.scope, step=np.int64(1))
    assert amp.load_checkpoint(tmp_path / "state", net.main, net.scope).step == 1


def test_averages_begin_with_a_checkpoint_that_has_none(tmp_path: Path) -> None:
    net, other = Net("pure"), Net("pure")
    amp.save_checkpoint(tmp_path / "state", net.main, net.scope)
    tensors = tmp_path / "weights.npz"
    np.savez(tensors, **{name: array + 1 for name, array in net.initial.items()})
    amp.load_weights(tensors, other.main, other.scope)
    plain = Net("fp32", decay=0.0)
    main = plain.test  # without averages
    amp.load_weights(tensors, main, plain.scope)
    amp.save_checkpoint(tmp_path / "plain", main, plain.scope)
    amp.load_checkpoint(tmp_path / "plain", net.main, net.scope, strict=False)
    for name in PARAMETERS:
        np.testing.assert_array_equal(net[f"{name}_ema_0"], net.initial[name] + 1)
