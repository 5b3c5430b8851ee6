"""Values, states and sessions on WebGPU: what lies on the device stays there."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.ops.training.seeds import SEED
from amp_transpiler.runtime import device_tensors, providers
from amp_transpiler.runtime.providers import lies_on
from amp_transpiler.warn import AmpWarning
from tests.helpers.random_nets import random_net

pytestmark = pytest.mark.webgpu

PLACE = amp.WebGPUPlace(0)
CLASSES, BATCH, WIDTH = 10, 8, 16
SWIFTSHADER = Path("/usr/lib/chromium/vk_swiftshader_icd.json")


@pytest.fixture
def exe() -> amp.Executor:
    return amp.Executor(PLACE)


class _Net:
    """A small classifier with Adam, its test program and its data."""

    def __init__(self, mode: str = "pure") -> None:
        self.main, self.startup = amp.Program(), amp.Program()
        with amp.program_guard(self.main, self.startup), amp.unique_name.guard():
            x, y = amp.data("x", [BATCH, WIDTH], "float32"), amp.data("y", [BATCH, 1], "int64")
            hidden = amp.nn.fc(x, 12, act="relu")
            self.loss = amp.nn.functional.cross_entropy(amp.nn.fc(hidden, CLASSES), y)
            self.test = self.main.clone(for_test=True)
            self.optimizer: Any = amp.optimizer.Adam(0.02, multi_precision=mode == "pure")
            if mode != "fp32":
                self.optimizer = amp.decorate(
                    self.optimizer, init_loss_scaling=128.0, use_pure_fp16=mode == "pure", use_fp16_guard=False
                )
            self.optimizer.minimize(self.loss, self.startup)
        self.pure = mode == "pure"
        rng = np.random.default_rng(3)
        self.feed = {
            "x": rng.standard_normal((BATCH, WIDTH)).astype(np.float32),
            "y": rng.integers(0, CLASSES, (BATCH, 1)),
        }

    def start(self, exe: amp.Executor, scope: amp.Scope) -> None:
        exe.run(self.startup, scope=scope)
        if self.pure:
            self.optimizer.amp_init(exe.place, scope, test_program=self.test, use_fp16_test=True)

    def step(self, exe: amp.Executor, scope: amp.Scope) -> float:
        return float(exe.run(self.main, self.feed, [self.loss], scope=scope)[0])


def _on_device(scope: amp.Scope) -> dict[str, bool]:
    """Whether each variable lies there, but for the seed: these programs draw no numbers, so that no step takes it."""
    return {name: lies_on(scope.ort_value(name), PLACE) for name in scope.var_names() if name != SEED}


@pytest.mark.parametrize("mode", ["fp32", "mixed", "pure"])
def test_steps_leave_the_state_on_the_device(
    mode: str, exe: amp.Executor, scope: amp.Scope, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = _Net(mode)
    net.start(exe, scope)
    assert not any(_on_device(scope).values()), "a step puts it there"
    losses = [net.step(exe, scope), net.step(exe, scope)]
    copied: list[Any] = []
    monkeypatch.setattr(device_tensors, "copy", lambda source, target: copied.append(source))
    monkeypatch.setattr(device_tensors, "allocate", lambda *given: pytest.fail(f"memory for {given}"))
    losses += [net.step(exe, scope) for _ in range(8)]
    monkeypatch.undo()
    assert not copied
    assert all(_on_device(scope).values()), _on_device(scope)
    host, on_host = amp.Executor(amp.CPUPlace()), amp.Scope()
    net.start(host, on_host)
    expected = [net.step(host, on_host) for _ in losses]
    np.testing.assert_allclose(losses, expected, rtol=1e-4 if mode == "fp32" else 2e-2)
    assert losses[-1] < 0.8 * losses[0]


def test_updates_take_turns_of_two_buffers(exe: amp.Executor, scope: amp.Scope) -> None:
    net = _Net("fp32")
    net.start(exe, scope)
    net.step(exe, scope)
    assert not exe.memory_report(net.main).in_place
    name = net.main.parameters[0].name
    values = []
    for _ in range(4):
        net.step(exe, scope)
        values.append(scope.ort_value(name))
    assert values[0] is values[2] and values[1] is values[3] and values[0] is not values[1]


@pytest.mark.parametrize(
    "dtype", ["float32", "float16", "int64", "int32", "uint32", "bool", "float64", "uint8", "bfloat16"]
)
@pytest.mark.parametrize("shape", [(3,), (), (0,), (2, 5)])
def test_any_value_goes_up_and_comes_back(dtype: str, shape: tuple[int, ...]) -> None:
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    array = (np.arange(np.prod(shape, dtype=int)).reshape(shape) % 2).astype(kind)
    value = device_tensors.from_array(array, PLACE)
    assert lies_on(value, PLACE) and not lies_on(value, amp.CPUPlace())
    assert device_tensors.to_array(value).tobytes() == array.tobytes()
    twin = device_tensors.copy_to(value, PLACE)
    device_tensors.write(value, np.zeros_like(array))
    assert device_tensors.to_array(twin).tobytes() == array.tobytes()
    assert not device_tensors.to_array(value).any()
    back = device_tensors.copy_to(twin, amp.CPUPlace())
    assert back.device_name() == "cpu" and device_tensors.to_array(back).tobytes() == array.tobytes()


def test_what_a_scope_is_given_the_next_step_reads(exe: amp.Executor, scope: amp.Scope) -> None:
    net = _Net("fp32")
    net.start(exe, scope)
    first = net.step(exe, scope)
    name = net.main.parameters[0].name
    scope.set_var(name, np.zeros_like(scope.find_var(name)))
    net.step(exe, scope)
    assert _on_device(scope)[name]
    assert abs(scope.find_var(name)).max() < 0.05 and net.step(exe, scope) != first


def test_a_checkpoint_goes_on_where_the_device_stopped(exe: amp.Executor, scope: amp.Scope, tmp_path: Path) -> None:
    net = _Net("pure")
    net.start(exe, scope)
    for _ in range(3):
        net.step(exe, scope)
    amp.save_checkpoint(tmp_path / "kept", net.main, scope)
    expected = [net.step(exe, scope) for _ in range(3)]
    fresh = amp.Scope()
    amp.load_checkpoint(tmp_path / "kept", net.main, fresh)
    assert [net.step(exe, fresh) for _ in range(3)] == expected


def test_programs_share_what_lies_on_the_device(exe: amp.Executor, scope: amp.Scope) -> None:
    net = _Net("pure")
    net.start(exe, scope)
    before = float(exe.run(net.test, net.feed, [net.loss.name], scope=scope)[0])
    assert before == pytest.approx(net.step(exe, scope), rel=2e-2)
    for _ in range(10):
        net.step(exe, scope)
    (value,) = exe.run(net.test, net.feed, [net.loss.name], scope=scope, return_numpy=False)
    assert lies_on(value, PLACE) and float(device_tensors.to_array(value)) < before
    assert all(_on_device(scope).values())
    (fetched,) = amp.Executor().run(net.test, exe.stage(net.feed), [net.loss.name], scope=scope)
    assert float(fetched) == pytest.approx(float(device_tensors.to_array(value)), rel=2e-2), "the host takes it too"


def test_fetched_values_belong_to_the_caller(exe: amp.Executor, scope: amp.Scope) -> None:
    net = _Net("fp32")
    net.start(exe, scope)
    name = net.main.parameters[0].name
    kept = [exe.run(net.main, net.feed, [net.loss, name], scope=scope, return_numpy=False) for _ in range(3)]
    arrays = [[device_tensors.to_array(value) for value in values] for values in kept]
    net.step(exe, scope)
    exe.close()
    for values, found in zip(kept, arrays, strict=True):
        assert all(device_tensors.to_array(v).tobytes() == a.tobytes() for v, a in zip(values, found, strict=True))
    assert arrays[0][0] != arrays[1][0]


def test_feeds_are_staged_on_the_device(exe: amp.Executor, scope: amp.Scope) -> None:
    net = _Net("fp32")
    net.start(exe, scope)
    staged = exe.stage(net.feed)
    assert lies_on(staged["x"], PLACE)
    assert staged["y"].device_name() == "cpu"  # it goes up as 32-bit integers
    assert lies_on(exe.stage(staged)["x"], PLACE) and exe.stage(staged)["y"].device_name() == "cpu"
    with exe.prefetch([net.feed] * 12, ahead=2) as feeds:
        losses = [float(exe.run(net.main, feed, [net.loss], scope=scope)[0]) for feed in feeds]
    fresh = amp.Scope()
    net.start(exe, fresh)
    assert losses == [net.step(exe, fresh) for _ in losses]


def test_threads_wait_for_each_other(exe: amp.Executor) -> None:
    net, failed = _Net("fp32"), list[BaseException]()
    results: list[list[float]] = [[], [], []]

    def train(number: int) -> None:
        try:
            scope, own = amp.Scope(), amp.Executor(PLACE)
            net.start(own, scope)
            for _ in range(15):
                results[number].append(net.step(own, scope))
                scope.find_var(net.main.parameters[0].name)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=train, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert results[0] == results[1] == results[2]


def test_averages_and_windows_of_accumulation(exe: amp.Executor, scope: amp.Scope) -> None:
    main, startup = amp.Program(), amp.Program()
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x = amp.data("x", [4, 3], "float32")
        loss = amp.nn.functional.mean(amp.nn.fc(x, 1))
        amp.decorate(amp.optimizer.SGD(0.5), accumulate_steps=2).minimize(loss, startup)
        average = amp.optimizer.ExponentialMovingAverage(0.5)
        average.update()
    feed = {"x": np.ones((4, 3), np.float32)}
    exe.run(startup, scope=scope)
    losses = [float(exe.run(main, feed, [loss], scope=scope)[0]) for _ in range(6)]
    assert losses[0] == losses[1] > losses[2] == losses[3] > losses[4]
    host = {main.accumulation.counter.name} if main.accumulation is not None else set()
    assert all(there for name, there in _on_device(scope).items() if name not in host)
    name = main.parameters[0].name
    now = scope.find_var(name)
    with average.applied(scope):
        assert not np.array_equal(scope.find_var(name), now)
    assert np.array_equal(scope.find_var(name), now)


def test_what_falls_back_is_told_at_the_line_that_runs_it() -> None:
    text = '<ir_version: 10, opset_import: ["" : 21]> f (float[4] x) => (int64[1,n] y) { y = NonZero(x) }'
    exe, program = amp.Executor(PLACE, allow_cpu_fallback=True), amp.Program.from_onnx(onnx.parser.parse_model(text))
    with pytest.warns(AmpWarning, match=r"runs on WebGPUPlace\(0\) except NonZero .* on the CPU") as told:
        (found,) = exe.run(program, {"x": np.array([0, 1, 0, 2], np.float32)}, ["y"])
    assert told[0].filename == __file__ and found.tolist() == [[1, 3]]


def test_another_number_than_0_is_refused() -> None:
    with pytest.raises(
        amp.errors.PlaceError, match=r"WebGPUPlace\(1\) cannot be used: .*picks the GPU itself.*WebGPUPlace\(0\)"
    ):
        amp.Executor(amp.WebGPUPlace(1))


def test_a_program_in_fp16_is_refused_where_the_gpu_has_none(
    monkeypatch: pytest.MonkeyPatch, exe: amp.Executor, scope: amp.Scope
) -> None:
    from amp_transpiler.runtime import session

    monkeypatch.setattr(session, "_lacks", lambda place: frozenset({"float16"}))
    net = _Net("pure")
    net.start(exe, scope)
    with pytest.raises(amp.errors.PlaceError, match=r"computes in float16.*fp32.*CPUPlace\(\)"):
        net.step(exe, scope)
    plain, fresh = _Net("fp32"), amp.Scope()
    plain.start(exe, fresh)
    plain.step(exe, fresh)


def _cached(folder: Path, conv: bool) -> list[float]:
    """Losses of a training by an executor of its own."""
    main, startup = amp.Program(), amp.Program()
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x = amp.data("x", [2, 1, 6, 6], "float32")
        made = amp.nn.conv2d(x, 4, 3) if conv else x
        loss = amp.nn.functional.mean(amp.nn.fc(made, 3))
        amp.optimizer.Momentum(0.1, 0.9).minimize(loss, startup)
    scope, exe = amp.Scope(), amp.Executor(PLACE, cache_dir=folder)
    exe.run(startup, scope=scope)
    feed = {"x": np.ones((2, 1, 6, 6), np.float32)}
    return [float(exe.run(main, feed, [loss], scope=scope)[0]) for _ in range(3)]


def test_optimised_models_are_kept_where_they_load_again(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses = _cached(tmp_path, False)
        entries = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
        assert _cached(tmp_path, False) == losses and len(entries) > 1
        assert {path.name: path.stat().st_ino for path in tmp_path.iterdir()} == entries
    with pytest.warns(AmpWarning, match="laid out for WebGPU is not kept"):
        losses = _cached(tmp_path, True)
    with pytest.warns(AmpWarning, match="laid out for WebGPU is not kept"):
        assert _cached(tmp_path, True) == losses


def _refused(driver: str) -> str:
    """What a process with this driver alone says of a place and of a program in float16."""
    code = """
import amp_transpiler as amp, numpy as np
try:
    exe, main, startup = amp.Executor(amp.WebGPUPlace(0)), amp.Program(), amp.Program()
    with amp.program_guard(main, startup):
        x = amp.data("x", [2], "float16")
        y = x + x
    print(exe.run(main, {"x": np.ones(2, np.float16)}, [y]))
except amp.errors.PlaceError as error:
    print(error)
"""
    environment = {**os.environ, "VK_ICD_FILENAMES": driver, "VK_DRIVER_FILES": driver}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    return done.stdout


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Vulkan's loader is told what to load")
def test_a_machine_without_a_driver_says_what_to_install(tmp_path: Path) -> None:
    told = _refused(str(tmp_path / "none.json"))
    assert "no driver offers WebGPU a GPU (No supported adapters); install its driver" in told


@pytest.mark.skipif(not SWIFTSHADER.exists(), reason="Chromium is not here, whose software Vulkan has no float16")
def test_an_adapter_without_float16_refuses_a_program_that_needs_it() -> None:
    assert "computes in float16, for which the GPU" in _refused(str(SWIFTSHADER))


def test_the_provider_is_found_once() -> None:
    assert providers.built_in("webgpu") != bool(providers.plugin("webgpu").devices)


@pytest.mark.parametrize("seed", [90057, 90235])
def test_truth_values_are_not_turned_with_images(seed: int) -> None:
    """onnxruntime turns them behind its convolutions, with a kernel that it has not: such a model was refused."""
    losses = []
    for place in (PLACE, amp.CPUPlace()):
        net, there, scope = random_net(seed, "fp32"), amp.Executor(place), amp.Scope()
        there.run(net.startup, scope=scope)
        losses.append([there.run(net.main, net.feeds, [net.loss], scope=scope)[0] for _ in range(2)])
    np.testing.assert_allclose(*losses, rtol=1e-4)


def test_truth_values_are_not_turned_behind_a_transpose(exe: amp.Executor, scope: amp.Scope) -> None:
    """Where no image is: onnxruntime moves a Transpose behind the comparison of what it made."""
    text = """<ir_version: 10, opset_import: ["" : 21]> m (float[3,5,8] x, float[5,3,8] d) => (float[3,5,8] y)
        <float zero = {0.0}, float few = {0.5}> {
        t = Transpose<perm=[1, 0, 2]>(x)  above = Greater(t, zero)  some = Mul(d, few)
        kept = Where(above, d, some)  y = Transpose<perm=[1, 0, 2]>(kept) }"""
    program = amp.Program.from_onnx(onnx.parser.parse_model(text))
    exe.run(program.startup, scope=scope)
    x, d = (np.random.default_rng(0).standard_normal(s).astype(np.float32) for s in ((3, 5, 8), (5, 3, 8)))
    (found,) = exe.run(program, {"x": x, "d": d}, program.outputs, scope=scope)
    kept = d.swapaxes(0, 1)
    np.testing.assert_array_equal(found, np.where(x > 0, kept, kept / 2))
