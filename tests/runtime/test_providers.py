"""Where the provider of a place comes from, and what is said where it is not there."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import onnxruntime
import pytest

import amp_transpiler as amp
from amp_transpiler.lists import _places
from amp_transpiler.runtime import missing, session
from amp_transpiler.runtime.providers import Plugin, built_in
from amp_transpiler.warn import AmpWarning
from tests.helpers.places import change_place

without = pytest.mark.skipif(built_in("webgpu"), reason="onnxruntime has WebGPU built in")


def _missing(monkeypatch: pytest.MonkeyPatch, found: Plugin, number: int = 0, fault: str = "") -> str:
    def probe(_: Any) -> None:
        if fault:
            raise RuntimeError(fault)

    monkeypatch.setattr(missing, "built_in", lambda _: False)
    monkeypatch.setattr(missing, "plugin", lambda _: found)
    monkeypatch.setattr(missing, "probe", probe)
    return str(missing.webgpu_missing.__wrapped__(number))


def test_what_is_missing_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Plugin((object(),))
    assert "install onnxruntime-ep-webgpu" in _missing(monkeypatch, Plugin(fault=ImportError("no module")))
    assert "does not load its WebGPU plugin: libvulkan.so.1" in _missing(
        monkeypatch, Plugin(fault=RuntimeError("libvulkan.so.1"))
    )
    assert "finds no GPU; install its driver" in _missing(monkeypatch, Plugin())
    assert "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER=1" in _missing(monkeypatch, Plugin())
    assert "write WebGPUPlace(0)" in _missing(monkeypatch, there, 1)
    no_adapter = "/a/b/webgpu_context.cc:136 x::Initialize() Failed to get a WebGPU adapter: No supported adapters\n"
    text = _missing(monkeypatch, there, fault=no_adapter)
    assert text.startswith("no driver offers WebGPU a GPU (No supported adapters); install its driver")
    assert "cannot use device 0: of another kind" in _missing(monkeypatch, there, fault="of another kind")
    assert _missing(monkeypatch, there) == "None"


@without
def test_the_plugin_that_is_not_installed_is_named() -> None:
    with pytest.raises(amp.errors.PlaceError, match=r"WebGPUPlace\(0\) cannot be used: .*onnxruntime-ep-webgpu"):
        amp.Executor(amp.WebGPUPlace(0))
    with pytest.warns(AmpWarning, match=r"onnxruntime-ep-webgpu\. Running on CPUPlace\(\)$") as told:
        assert amp.Executor(amp.WebGPUPlace(0), allow_cpu_fallback=True).place == amp.CPUPlace()
    assert told[0].filename == __file__


def test_a_place_without_a_plugin_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where somebody has loaded CUDA's library as one, it would have none of its options."""
    monkeypatch.setattr(session, "built_in", lambda _: False)
    monkeypatch.setattr(onnxruntime, "InferenceSession", lambda *_, providers, **__: providers)
    (asked,) = session._session(b"", amp.CUDAPlace(1), session.Settings(tf32=True))
    assert asked[0] == "CUDAExecutionProvider" and (asked[1]["device_id"], asked[1]["use_tf32"]) == ("1", "1")


def _trained(decorated: bool = False) -> tuple[amp.Program, amp.Program, Any]:
    main, startup = amp.Program(), amp.Program()
    with amp.program_guard(main, startup), amp.unique_name.guard():
        loss = amp.nn.functional.mean(amp.nn.fc(amp.data("x", [4, 3], "float32"), 2))
        optimizer: Any = amp.optimizer.SGD(0.5)
        (amp.decorate(optimizer, use_fp16_guard=False) if decorated else optimizer).minimize(loss, startup)
    return main, startup, loss


def test_updates_take_turns_where_no_kernel_writes_what_it_reads(
    monkeypatch: pytest.MonkeyPatch, scope: amp.Scope
) -> None:
    change_place(monkeypatch, "cpu", in_place=False)
    main, startup, loss = _trained()
    exe, feed = amp.Executor(), {"x": np.ones((4, 3), np.float32)}
    exe.run(startup, scope=scope)
    losses = [float(exe.run(main, feed, [loss], scope=scope)[0]) for _ in range(4)]
    steps = [a - b for a, b in itertools.pairwise(losses)]
    assert steps[0] > 0 and np.allclose(steps, steps[0], rtol=1e-3)
    report = exe.memory_report(main)
    assert not report.in_place and "cannot write the buffer that it reads" in next(iter(report.two_buffers.values()))


def test_a_float_type_that_a_device_lacks_is_refused(monkeypatch: pytest.MonkeyPatch, scope: amp.Scope) -> None:
    change_place(monkeypatch, "cpu", optional=("float16",))
    real = session.probe

    def probe(place: amp.CPUPlace, dtype: str = "float32") -> Any:
        if dtype == "float16":
            raise RuntimeError("requires f16 but the device does not support it")
        return real(place, dtype)

    monkeypatch.setattr(session, "probe", probe)
    session._lacks.cache_clear()
    feed = {"x": np.ones((4, 3), np.float32)}
    try:
        exe = amp.Executor()
        for decorated in (False, True):
            main, startup, loss = _trained(decorated)
            exe.run(startup, scope=scope)
            if decorated:
                with pytest.raises(amp.errors.PlaceError, match=r"computes in float16, .*fp32 there, or run it on CPU"):
                    exe.run(main, feed, [loss], scope=scope)
            else:
                exe.run(main, feed, [loss], scope=scope)
    finally:
        session._lacks.cache_clear()


def test_runs_of_a_place_that_serves_one_thread_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    change_place(monkeypatch, "cpu", one_thread=True)
    main, startup, loss = _trained()
    exe, inside, most = amp.Executor(threads=1), 0, 0
    plain = onnxruntime.InferenceSession.run_with_iobinding
    together, pause = threading.Barrier(3), threading.Event()

    def counted(*given: Any) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        plain(*given)
        pause.wait(0.02)
        inside -= 1

    monkeypatch.setattr(onnxruntime.InferenceSession, "run_with_iobinding", counted)

    def train() -> None:
        scope = amp.Scope()
        exe.run(startup, scope=scope)
        together.wait()
        for _ in range(2):
            exe.run(main, {"x": np.ones((4, 3), np.float32)}, [loss], scope=scope)

    threads = [threading.Thread(target=train) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


@pytest.mark.parametrize(
    ("version", "there"), [("1.27.0", False), ("1.31.1", True), ("1.32.0.dev1", True), ("2.0", True)]
)
def test_an_older_onnxruntime_lowers_without_the_kernel_that_it_lacks(
    version: str, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnxruntime, "__version__", version)
    assert _places._table.__wrapped__()["cpu"].gated_add is there
