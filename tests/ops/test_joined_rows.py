"""Rows that are joined and taken apart in trees: a kernel of CUDA takes so many tensors and no more."""

from __future__ import annotations

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.nn import functional as F
from amp_transpiler.ops.training import rows
from amp_transpiler.passes.lowering import flat_layout


def deep(layers: int) -> tuple[amp.Program, amp.Program, list[amp.Variable]]:
    """A step of layers whose sizes differ, each with a weight and a bias; its loss and unscaled gradients."""
    main, startup = amp.Program("deep"), amp.Program("startup")
    main.random_seed = startup.random_seed = 7
    with amp.program_guard(main, startup), amp.unique_name.guard():
        h = amp.data("x", [4, 3])
        for width in range(layers):
            h = amp.nn.fc(h, 2 + width % 4, act="tanh")
        loss = F.mean(h * h)
        amp.decorate(amp.optimizer.Adam(0.01)).minimize(loss, startup)
    (check,) = (op for op in main.operators if op.type == "CheckFiniteAndUnscale")
    return main, startup, [loss, *(v for v in check.outputs if v is not None and v.shape)]


def test_no_kernel_on_cuda_takes_more_than_it_can() -> None:
    """34 layers, 68 parameters; beyond 32 tensors it makes a table as long as the row, in every step."""
    main, _, fetched = deep(34)
    nodes = main.lower(amp.CUDAPlace(0), fetches=fetched).model.graph.node
    for kind in ("Concat", "Split"):
        sizes = [max(len(node.input), len(node.output)) for node in nodes if node.op_type == kind]
        assert rows.MOST["cuda"] == 32 and 20 < max(sizes) <= 32


def test_trees_are_the_single_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, also three levels deep."""
    monkeypatch.setitem(flat_layout.WORTH, "cpu", flat_layout.Worth(fewest=2))
    found = []
    for most in (1000, 32, 3):
        monkeypatch.setitem(rows.MOST, "cpu", most)
        main, startup, fetched = deep(14)
        scope, exe = amp.Scope(), amp.Executor(threads=1, optimization_level="basic")
        exe.run(startup, scope=scope)
        steps = [exe.run(main, {"x": np.full((4, 3), n + 1, np.float32)}, fetched, scope) for n in range(3)]
        state = {name: scope.find_var(name).tobytes() for name in scope.var_names()}
        found.append((state, [array.tobytes() for step in steps for array in step]))
    assert found[0] == found[1] == found[2]
