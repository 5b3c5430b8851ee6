"""Training steps that run on WebGPU alone, beside the CPU lowering."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.nn import functional as F
from tests.helpers import benchmark_programs
from tests.helpers.programs import build

pytestmark = pytest.mark.webgpu

Array = np.ndarray[Any, Any]
CPU, WEBGPU = amp.CPUPlace(), amp.WebGPUPlace(0)
#: Small ones of the programs, and their integer feeds: the least, and what is beyond the largest.
SIZES: dict[str, dict[str, Any]] = {
    "mlp": {"batch": 8},
    "cnn": {"batch": 4},
    "lstm": {"batch": 4, "length": 4, "width": 32},
    "bert": {"batch": 2, "length": 16, "width": 64, "layers": 1, "words": 100},
    "resnet": {"batch": 4, "size": 32},
    "ctc": {"batch": 2, "length": 12},
}
NUMBERS = {"ids": (0, 100), "label": (1, 10), "start": (0, 16), "end": (0, 16), "mask": (0, 2)}
NUMBERS |= {"steps": (10, 13), "lengths": (1, 5)}
STEPS = 6


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Sessions of a test are gone when the next one comes."""
    yield
    gc.collect()


class Training:
    """A program on a place: ``training(feeds)`` is a step, and gives what is fetched."""

    def __init__(
        self, built: Callable[[], Any], place: Any, fetches: Callable[[amp.Program], list[Any]] = lambda main: []
    ):
        self.main, startup, loss, self.optimizer = built()
        self.exe, self.scope, self.loss = amp.Executor(place), amp.Scope(), loss
        self.exe.run(startup, scope=self.scope)
        if hasattr(self.optimizer, "amp_init"):
            self.optimizer.amp_init(place, scope=self.scope)
        self.fetches = [loss, *fetches(self.main)]

    def __call__(self, feeds: dict[str, Array]) -> list[Array]:
        return self.exe.run(self.main, feeds, self.fetches, scope=self.scope)

    def state(self) -> dict[str, Array]:
        return {name: self.scope.find_var(name) for name in self.scope.var_names()}

    def feeds(self, seed: int) -> dict[str, Array]:
        rng, found = np.random.default_rng(seed), {}
        for v in self.main.inputs:
            floats = v.dtype == "float32"
            drawn = rng.standard_normal(v.shape) if floats else rng.integers(*NUMBERS[v.name], v.shape)
            found[v.name] = drawn.astype(v.dtype)
        return found


def named(name: str, mode: str) -> Callable[[], Any]:
    return lambda: benchmark_programs.training(name, mode, **SIZES[name])


@pytest.mark.parametrize("mode", benchmark_programs.MODES)
@pytest.mark.parametrize("name", SIZES)
def test_losses_are_those_of_the_cpu_lowering(name: str, mode: str) -> None:
    cpu, device = (Training(named(name, mode), place) for place in (CPU, WEBGPU))
    for (
        variable,
        value,
    ) in cpu.state().items():  # logarithms of a device are less exact, and normal numbers made of them
        found = device.scope.find_var(variable)
        assert np.allclose(found, value, rtol=0, atol=1e-3 * np.abs(value).max(initial=0)), variable
        device.scope.set_var(variable, value)
    exact = Training(named(name, "fp32"), CPU) if mode != "fp32" else cpu
    allowed = 0.0
    for step in range(STEPS):
        feeds = cpu.feeds(step % 2)
        want, found = float(cpu(feeds)[0]), float(device(feeds)[0])
        if exact is not cpu:
            allowed = max(allowed, 2 * abs(want - float(exact(feeds)[0])))
        share = 1e-5 if exact is cpu else 1e-2
        assert abs(found - want) <= max(allowed, share * max(abs(want), 0.1)), (step, want, found)


def test_a_planted_overflow_is_skipped_and_training_recovers() -> None:
    def built() -> Any:
        net = build("use_case", "pure-fp16", decr_every_n_nan_or_inf=1, decr_ratio=0.5, incr_every_n_steps=2)
        return net.main, net.startup, net.loss, net.optimizer

    training = Training(built, WEBGPU)
    feeds = build("use_case", "pure-fp16").feeds
    scale = training.optimizer.get_loss_scaling().name

    def step(image: float | None = None) -> tuple[float, dict[str, Array], dict[str, Array]]:
        given, before = dict(feeds), training.state()
        if image is not None:
            given["image"] = given["image"].copy()
            given["image"][0, 0, 3, 3] = image
        return float(training(given)[0]), before, training.state()

    step()
    assert training.scope.find_var(scale) == 128
    for planted in (np.nan, np.inf, -np.inf):
        _, before, after = step(planted)
        assert after[scale] == before[scale] / 2
        changed = {name for name in before if not np.array_equal(before[name], after[name])}
        assert changed <= {scale, "num_good_steps_0", "num_bad_steps_0"}
    losses = [step()[0] for _ in range(4)]
    assert np.isfinite(losses).all() and losses[-1] < losses[0]
    assert training.scope.find_var(scale) == 64  # halved three times, and doubled twice


def test_a_norm_whose_gradient_is_zero_here_and_there_trains() -> None:
    """As that of positions that no loss reads. It normalises the gradient, which 16-bit kernels make NaN of zeros."""

    def built() -> Any:
        main, startup = amp.Program(), amp.Program("startup")
        with amp.program_guard(main, startup), amp.unique_name.guard():
            x, seen = amp.data("x", [4, 6, 8], "float32"), amp.data("seen", [4, 6, 1], "float32")
            h = amp.nn.layer_norm(amp.nn.fc(x, 16, num_flatten_dims=2), begin_norm_axis=2, epsilon=1e-12)
            loss = F.mean(F.square(h * seen - 1.0))
            sgd = amp.optimizer.SGD(0.1, multi_precision=True)
            optimizer = amp.decorate(sgd, use_pure_fp16=True, use_fp16_guard=False, init_loss_scaling=1.0)
            optimizer.minimize(loss, startup)
        return main, startup, loss, optimizer

    trained = [Training(built, place, lambda main: ["found_inf_0"]) for place in (CPU, WEBGPU)]
    for name, value in trained[0].state().items():
        trained[1].scope.set_var(name, value)
    rng = np.random.default_rng(0)
    for _ in range(3):
        seen = np.broadcast_to((np.arange(6) < 4)[:, None], (4, 6, 1)).astype(np.float32)
        feeds = {"x": rng.standard_normal((4, 6, 8)).astype(np.float32), "seen": seen}
        feeds["x"][:, 5] = 0  # of these the bias alone is normalised, which is zeros
        (want, _), (found, bad) = (each(feeds) for each in trained)
        assert not bad and abs(float(found) - float(want)) <= 2e-3 * float(want)


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("mode", ["mixed", "pure"])
def test_scores_of_attention_that_overflow_make_a_bad_step(mode: str, axis: int) -> None:
    """The kernel of Softmax makes zeros of them, behind which nothing is infinite."""

    def built() -> Any:
        main, startup = amp.Program(), amp.Program("startup")
        with amp.program_guard(main, startup), amp.unique_name.guard():
            h = amp.nn.fc(amp.data("x", [2, 3, 8], "float32"), 8, num_flatten_dims=2)
            weights = F.softmax(F.matmul(h, h, transpose_y=True), axis=axis)
            loss = F.mean(F.square(F.matmul(weights, h)) * 1e-4)
            sgd = amp.optimizer.SGD(0.1, multi_precision=mode == "pure")
            pure = mode == "pure"
            optimizer = amp.decorate(sgd, use_pure_fp16=pure, use_fp16_guard=False, init_loss_scaling=64.0)
            optimizer.minimize(loss, startup)
        return main, startup, loss, optimizer

    x = np.random.default_rng(0).standard_normal((2, 3, 8)).astype(np.float32)
    for place in (CPU, WEBGPU):
        training = Training(built, place, lambda main: ["found_inf_0"])
        (_, fine), (_, bad) = training({"x": x}), training({"x": 500 * x})
        assert not fine and bad, place


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_finite_check_sees_each_number_that_is_not(dtype: str) -> None:
    main = amp.Program("main")
    shapes = {"a": [1000], "b": [8, 33], "c": [3]}
    with amp.program_guard(main):
        gradients = [amp.data(name, shape, dtype) for name, shape in shapes.items()]
        fetches = amp.check_finite_and_unscale(gradients, amp.data("scale", [1], "float32"))
    exe = amp.Executor(WEBGPU)

    def found(scale: float = 1024.0, number: float | None = None, name: str = "a", at: int = 0) -> bool:
        rng = np.random.default_rng(0)
        feeds = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
        if number is not None:
            feeds[name].reshape(-1)[at] = number
        *unscaled, verdict = exe.run(main, feeds | {"scale": np.array([scale], np.float32)}, [*fetches[0], fetches[1]])
        for got, given in zip(unscaled, feeds.values(), strict=True):
            if np.isfinite(scale) and scale:
                assert np.array_equal(got, given.astype(np.float32) / np.float32(scale), equal_nan=True)
        return bool(verdict[0])

    assert not found()
    assert not found(number=6e4)
    assert all(
        found(number=n, name=name, at=at) for n in (np.nan, np.inf, -np.inf) for name in shapes for at in (0, -1)
    )
    assert found(scale=0.0) and found(scale=np.nan)


def test_masks_are_those_of_cpu_bit_for_bit() -> None:
    def built() -> Any:
        main, startup = amp.Program(), amp.Program("startup")
        startup.seed = main.seed = 11
        with amp.program_guard(main, startup), amp.unique_name.guard():
            x = amp.data("x", [16, 1025], "float32")
            y = F.dropout(F.dropout(x, 0.1), 0.5)
            loss = F.mean(amp.nn.fc(y, 3))
            optimizer = amp.optimizer.SGD(0.1)
            optimizer.minimize(loss, startup)
        return main, startup, loss, optimizer

    cpu, device = (
        Training(built, place, lambda main: [op.outputs[0] for op in main.operators if op.type == "Dropout"])
        for place in (CPU, WEBGPU)
    )
    for _ in range(3):
        feeds = {"x": np.ones((16, 1025), np.float32)}
        (_, *want), (_, *found) = cpu(feeds), device(feeds)
        assert len(want) == 2 and all(np.array_equal(a, b) for a, b in zip(want, found, strict=True))
        assert 0.35 < (want[1] != 0).mean() < 0.55


CLIPS = [
    None,
    amp.optimizer.ClipGradByGlobalNorm(0.1),
    amp.optimizer.ClipGradByNorm(0.1),
    amp.optimizer.ClipGradByValue(0.01),
]
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: amp.optimizer.SGD(0.1, weight_decay=0.01),
    "Momentum": lambda: amp.optimizer.Momentum(0.1, 0.9, use_nesterov=True, grad_clip=CLIPS[1]),
    "Lars": lambda: amp.optimizer.Lars(0.1, 0.9),
    "Adagrad": lambda: amp.optimizer.Adagrad(0.1, grad_clip=CLIPS[2]),
    "RMSProp": lambda: amp.optimizer.RMSProp(0.01, momentum=0.9, centered=True),
    "Adam": lambda: amp.optimizer.Adam(0.01, grad_clip=CLIPS[3]),
    "AdamW": lambda: amp.optimizer.AdamW(amp.optimizer.lr.NoamDecay(16, 10), weight_decay=0.1),
    "Lamb": lambda: amp.optimizer.Lamb(0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_those_of_cpu(name: str) -> None:
    def built() -> Any:
        main, startup = amp.Program(), amp.Program("startup")
        startup.seed = main.seed = 5
        with amp.program_guard(main, startup), amp.unique_name.guard():
            ids, label = amp.data("ids", [6, 4], "int64"), amp.data("label", [6, 1], "int64")
            x = amp.nn.embedding(ids, [50, 16], is_sparse=name in ("SGD", "Adam"))
            logits = amp.nn.fc(F.reshape(x, [6, 64]), 10)
            loss = F.cross_entropy(logits, label)
            optimizer = amp.decorate(OPTIMIZERS[name](), init_loss_scaling=64.0, use_fp16_guard=False)
            optimizer.minimize(loss, startup)
        return main, startup, loss, optimizer

    cpu, device = (Training(built, place) for place in (CPU, WEBGPU))
    before = cpu.state()
    for variable, value in before.items():
        device.scope.set_var(variable, value)
    rng = np.random.default_rng(0)
    for _ in range(3):
        feeds = {"ids": rng.integers(0, 50, (6, 4)), "label": rng.integers(0, 10, (6, 1))}
        want, found = float(cpu(feeds)[0]), float(device(feeds)[0])
        assert abs(found - want) <= 2e-3 * abs(want)
    after, state = cpu.state(), device.state()
    for variable, value in after.items():
        moved = np.linalg.norm(value.astype(np.float64) - before[variable])
        assert np.linalg.norm(state[variable].astype(np.float64) - value) <= 0.05 * moved + 1e-6, variable
