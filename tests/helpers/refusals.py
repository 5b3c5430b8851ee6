"""A net, a step that trains it, and what must stay as it was when something is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.nn import functional as F

CPU = amp.CPUPlace()
RNG = np.random.default_rng(0)
IMAGES, LABELS = RNG.standard_normal((6, 8)).astype(np.float32), RNG.integers(0, 4, (6, 1))
BATCH = {"image": IMAGES, "label": LABELS}


class Net:
    """Two layers, and between them perhaps an operator that has no gradient."""

    def __init__(self, *, dead_end: bool = False, name: str = "main") -> None:
        self.main, self.startup = amp.Program(name), amp.Program("startup")
        self.main.seed = self.startup.seed = 3
        with amp.program_guard(self.main, self.startup), amp.unique_name.guard():
            image, label = amp.data("image", [None, 8]), amp.data("label", [None, 1], "int64")
            with amp.fp16_guard():
                hidden = amp.nn.fc(image, 16, act="relu")
                if dead_end:
                    made = self.main.add_variable("shrunk", "float32", hidden.shape)
                    self.main.add_operator("Shrink", [hidden], [made], domain="elsewhere")
                    hidden = made
                self.scores = amp.nn.fc(hidden, 4)
                self.loss = F.cross_entropy(self.scores, label)


def snapshot(program: amp.Program) -> tuple[Any, ...]:
    """Everything of a program that a pass may change."""
    return (
        program.version,
        program.to_onnx().SerializeToString(),
        program.startup,
        list(program.updates.items()),
        [(v, v.dtype, v.shape, v.producer, v.readers) for v in program.variables],
        [
            (op, op.type, list(op.inputs), list(op.outputs), op.captures, op.role, op.precision, op.reason, op.guard)
            for op in program.walk()
        ],
    )


def values(scope: amp.Scope) -> dict[str, tuple[str, bytes]]:
    return {name: (str((v := scope.find_var(name)).dtype), v.tobytes()) for name in scope.var_names()}


@contextmanager
def refused(
    kind: type[Exception], *words: str, programs: tuple[amp.Program, ...] = (), scope: amp.Scope | None = None
) -> Iterator[None]:
    """The block raises exactly ``kind``, its message holds ``words``, and programs and scope are as before."""
    before, held = [snapshot(p) for p in programs], values(scope or amp.Scope())
    with pytest.raises(kind) as caught:
        yield
    assert type(caught.value) is kind
    for word in words:
        assert word in str(caught.value), f"{word!r} is missing in: {caught.value}"
    assert [snapshot(p) for p in programs] == before
    assert values(scope or amp.Scope()) == held
    for program in programs:
        program.verify()


def plain(optimizer: Any) -> Any:
    return optimizer


def mixed(optimizer: Any) -> Any:
    return amp.decorate(optimizer)


def pure(optimizer: Any) -> Any:
    return amp.decorate(optimizer, use_pure_fp16=True)


MODES = pytest.mark.parametrize("mode", [plain, mixed, pure], ids=lambda mode: mode.__name__)


def trained(mode: Callable[..., Any] = pure, **options: Any) -> tuple[Net, Any, amp.Program, amp.Scope, amp.Executor]:
    net = Net()
    test = net.main.clone(for_test=True)
    optimizer = mode(amp.optimizer.Adam(0.01, multi_precision=True, **options))
    optimizer.minimize(net.loss)
    scope, executor = amp.Scope(), amp.Executor(CPU, threads=1)
    executor.run(net.startup, scope=scope)
    return net, optimizer, test, scope, executor
