"""Gradients in pure float16 on WebGPU, beside those of the CPU lowering: both against fp32 on the same numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.passes.lowering import arithmetic
from tests.helpers.benchmark_programs import PROGRAMS
from tests.helpers.programs import use_case_layers

pytestmark = pytest.mark.webgpu

Array = np.ndarray[Any, Any]
SCALE = 1024.0
SEEDS = (0, 1)


NETS: dict[str, Any] = {
    "use case": lambda: use_case_layers()[1],
    "mlp": lambda: PROGRAMS["mlp"](batch=64),
    "cnn": lambda: PROGRAMS["cnn"](batch=16),
    "transformer block": lambda: PROGRAMS["bert"](batch=2, length=32, width=64, layers=1, heads=2, words=100),
    "lstm": lambda: PROGRAMS["lstm"](batch=8, length=6, width=64),
}
_BELOW = {"ids": 100, "label": 10, "start": 32, "end": 32}


def _half(array: Array) -> Array:
    """The nearest numbers of float16."""
    return array.astype(np.float16).astype(np.float32)


def _feeds(main: amp.Program, seed: int) -> dict[str, Array]:
    rng, found = np.random.default_rng(seed), {}
    for v in main.inputs:
        shape = [size if isinstance(size, int) else 16 for size in v.shape]
        if v.dtype == "float32":
            found[v.name] = _half(rng.standard_normal(shape))
        else:
            found[v.name] = rng.integers(0, _BELOW[v.name], shape) if v.name in _BELOW else np.ones(shape, np.int64)
    return found


class _Gradients:
    """``gradients(seed)``: of every parameter, of a net on a place, pure or in fp32."""

    def __init__(self, name: str, place: Any = None) -> None:
        self.pure = place is not None
        self.main, self.startup = amp.Program(name), amp.Program("startup")
        with amp.program_guard(self.main, self.startup), amp.unique_name.guard():
            loss, optimizer = NETS[name](), amp.optimizer.SGD(1.0, multi_precision=True)
            if self.pure:
                wrapped = amp.decorate(
                    optimizer, use_pure_fp16=True, init_loss_scaling=SCALE, use_dynamic_loss_scaling=False
                )
                self.pairs = wrapped.backward(loss, self.startup)
            else:
                self.pairs = amp.append_backward(loss)
        self.exe, self.scope = amp.Executor(place), amp.Scope()
        amp.Executor().run(self.startup, scope=self.scope)
        for p, _ in self.pairs:
            self.scope.set_var(p.name, _half(np.asarray(self.scope.find_var(p.name))))
        if self.pure:
            wrapped.amp_init(amp.CPUPlace(), scope=self.scope)

    def __call__(self, seed: int) -> dict[str, Array]:
        fetches = [gradient for _, gradient in self.pairs]
        made = self.exe.run(self.main, _feeds(self.main, seed), fetches, scope=self.scope)
        scale = SCALE if self.pure else 1.0
        return {p.name: np.asarray(g, np.float64) / scale for (p, _), g in zip(self.pairs, made, strict=True)}


def _off(found: dict[str, Array], truth: dict[str, Array]) -> float:
    """The relative L2 distance of all gradients together."""
    apart = sum(np.square(found[name] - truth[name]).sum() for name in truth)
    return float(np.sqrt(apart / sum(np.square(each).sum() for each in truth.values())))


@pytest.mark.parametrize("name", NETS)
def test_gradients_are_no_further_off_than_twice_the_cpu_lowerings(name: str) -> None:
    truth, cpu, device = _Gradients(name), _Gradients(name, amp.CPUPlace()), _Gradients(name, amp.WebGPUPlace(0))
    for seed in SEEDS:
        exact = truth(seed)
        ours, theirs = _off(device(seed), exact), _off(cpu(seed), exact)
        print(f"{name}: {ours:.2e}, on CPU {theirs:.2e}")
        assert ours <= 2 * theirs


def test_without_widening_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "MOST", np.inf)
    truth, cpu, device = (_Gradients("cnn", place) for place in (None, amp.CPUPlace(), amp.WebGPUPlace(0)))
    exact = truth(0)
    assert _off(device(0), exact) > 2 * _off(cpu(0), exact)
