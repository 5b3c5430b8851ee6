"""Rows that come more than once are added whole, though onnxruntime's ScatterND loses addends in several threads."""

from __future__ import annotations

import numpy as np

import amp_transpiler as amp
from amp_transpiler.nn import functional as F


def test_gradients_of_repeated_rows_are_the_same_in_every_run() -> None:
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup):
        ids, factors = amp.data("ids", [None], "int64"), amp.data("factors", [None, 64], "float32")
        table = amp.create_parameter([20000, 64], "float32", "table", amp.nn.initializer.Constant(0.0))
        loss = F.sum(F.embedding(ids, table) * factors)
        amp.optimizer.SGD(1.0).minimize(loss, startup)
    exe, scope, rng = amp.Executor(amp.CPUPlace(), threads=4), amp.Scope(), np.random.default_rng(0)
    exe.run(startup, scope=scope)
    chosen = np.where(np.arange(4096) % 3, rng.integers(0, 300, 4096), 101)
    feed = {"ids": chosen, "factors": rng.integers(-8, 9, (4096, 64)).astype(np.float32)}  # sums are exact
    expected = np.zeros((20000, 64), np.float32)
    np.subtract.at(expected, chosen, feed["factors"])
    for run in range(1, 101):
        exe.run(main, feed=feed, fetch_list=[loss], scope=scope)
        np.testing.assert_array_equal(scope.find_var("table"), run * expected)
