"""Without a verdict on the gradients, updates wait for who reads their state: one buffer, and the same bits."""

from __future__ import annotations

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.passes.lowering import emission
from tests.helpers.places import change_place

OPTIMIZERS = {
    "sgd": lambda: amp.optimizer.SGD(0.1),
    "momentum": lambda: amp.optimizer.Momentum(0.1, 0.9),
    "adamw": lambda: amp.optimizer.AdamW(0.01, weight_decay=0.1),
}


def trained(optimizer: str) -> tuple[list[np.ndarray], amp.Executor, amp.Program, list[str]]:
    """Three steps of a convolution and two dense layers, and what the program's state is then."""
    main, startup, scope = amp.Program(), amp.Program(), amp.Scope()
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x = amp.data("x", [4, 3, 8, 8], "float32")
        h = amp.nn.conv2d(amp.nn.conv2d(x, 16, 3, padding=1, act="relu"), 32, 3, padding=1)
        loss = amp.nn.functional.mean(amp.nn.fc(amp.nn.fc(h, 64, act="relu"), 64) ** 2)
        OPTIMIZERS[optimizer]().minimize(loss)
    executor = amp.Executor(amp.CPUPlace())
    executor.run(startup, scope=scope)
    rng = np.random.default_rng(0)
    for name in sorted(v.name for v in main.parameters):
        held = scope.find_var(name)
        scope.set_var(name, (0.1 * rng.normal(size=held.shape)).astype(np.float32))
    feed = {"x": rng.normal(size=(4, 3, 8, 8)).astype(np.float32)}
    for _ in range(3):
        executor.run(main, feed=feed, fetch_list=[loss], scope=scope)
    names = sorted(v.name for v in main.variables if v.persistable)
    return [scope.find_var(name) for name in names], executor, main, names


@pytest.mark.parametrize("chunk", [2**18, 2**10])
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_large_weights_take_one_buffer_and_the_same_bits(
    optimizer: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_place(monkeypatch, "cpu", chunks=((0, 4 * chunk, chunk),))
    found, executor, main, names = trained(optimizer)
    two = executor.memory_report(main).two_buffers
    large = [v.name for v in main.parameters if np.prod(v.shape) >= 4096]
    assert len(large) == 3 and not set(large) & set(two), two
    monkeypatch.setattr(emission, "waiting", lambda e, emitted, rows: rows)
    before, executor, main, _ = trained(optimizer)
    assert set(executor.memory_report(main).two_buffers) >= set(large)
    for name, one, other in zip(names, found, before, strict=True):
        assert one.tobytes() == other.tobytes(), name
