"""Rows that come more than once are added whole, though onnxruntime's ScatterND loses addends in several threads."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

import amp_transpiler as amp
from amp_transpiler.ir.control import nested_graphs
from amp_transpiler.nn import functional as F
from amp_transpiler.ops.row_sums import races
from amp_transpiler.passes.lowering.open_sizes import Sized

THREADS = 4


def scatters(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    found = [node for node in graph.node if node.op_type.startswith("Scatter")]
    return found + [each for node in graph.node for nested in nested_graphs(node) for each in scatters(nested)]


@pytest.mark.parametrize(
    ("rows", "number", "forms"),
    [
        pytest.param(20000, 3000, ["ScatterND"], id="few"),
        pytest.param(20000, 4096, ["ScatterND"] * 2, id="in turns"),
        pytest.param(4000, 1000, ["ScatterND"] * 4, id="in as many turns"),
        pytest.param(4000, 4096, ["ScatterND"] * 4, id="as more rows take"),
        pytest.param(80000, 4096, ["ScatterElements"], id="large table"),
        pytest.param(400000, 4096, ["ScatterElements"], id="few rows of a larger one"),
    ],
)
def test_gradients_of_repeated_rows_are_the_same_in_every_run(rows: int, number: int, forms: list[str]) -> None:
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup):
        ids, factors = amp.data("ids", [None], "int64"), amp.data("factors", [None, 64], "float32")
        table = amp.create_parameter([rows, 64], "float32", "table", amp.nn.initializer.Constant(0.0))
        loss = F.sum(F.embedding(ids, table) * factors)
        amp.optimizer.SGD(1.0).minimize(loss, startup)
    lowered = main.lower(amp.CPUPlace(), {"ids": (number,), "factors": (number, 64)})
    found = scatters(lowered.model.graph)
    assert [node.op_type for node in found] == forms
    assert not any(map(races, found))
    exe, scope, rng = amp.Executor(amp.CPUPlace(), threads=THREADS), amp.Scope(), np.random.default_rng(0)
    exe.run(startup, scope=scope)
    chosen = np.where(np.arange(number) % 3, rng.integers(-300, 300, number), 101)
    feed = {"ids": chosen, "factors": rng.integers(-8, 9, (number, 64)).astype(np.float32)}  # sums are exact
    expected = np.zeros((rows, 64), np.float32)
    np.subtract.at(expected, chosen, feed["factors"])
    for run in range(1, 101 if rows <= 20000 else 6):
        exe.run(main, feed=feed, fetch_list=[loss], scope=scope)
        if run % 5 == 0:
            np.testing.assert_array_equal(scope.find_var("table"), run * expected)


@pytest.mark.parametrize("number", [3400, 8192])
def test_rows_are_accumulated_whole_whatever_runs_the_step(number: int) -> None:
    """Steps leave for programs that choose their threads; what is repeated at the end are two thirds of 8,192 rows."""
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        ids, factors = amp.data("ids", [None], "int64"), amp.data("factors", [None, 64], "float32")
        table = amp.create_parameter([3000, 64], "float32", "table", amp.nn.initializer.Constant(0.0))
        loss = F.sum(F.embedding(ids, table, sparse=True) * factors)
        amp.decorate(amp.optimizer.SGD(1.0), accumulate_steps=2).minimize(loss, startup)
    lowered = [main.lower(amp.CPUPlace(), {"ids": (n,), "factors": (n, 64)}) for n in (2000, number)]
    assert not any(races(node) for each in lowered for node in scatters(each.model.graph))
    few, many = (Sized(each.model, each.given) for each in lowered)
    assert few.alike(many)
    exe, scope, rng = amp.Executor(amp.CPUPlace(), threads=THREADS), amp.Scope(), np.random.default_rng(0)
    exe.run(startup, scope=scope)
    expected = np.zeros((3000, 64), np.float32)
    for _ in range(2):
        feed = {"ids": rng.integers(0, 3000, number), "factors": rng.integers(-8, 9, (number, 64)).astype(np.float32)}
        np.subtract.at(expected, feed["ids"], feed["factors"] / 2)
        exe.run(main, feed=feed, fetch_list=[loss], scope=scope)
    np.testing.assert_array_equal(scope.find_var("table"), expected)


def _added(total: NDArray[np.float32], at: NDArray[np.int64], rows: NDArray[np.float32]) -> NDArray[np.float32]:
    found = total.copy()
    np.add.at(found, tuple(np.moveaxis(at, -1, 0)), rows)
    return found


@pytest.mark.parametrize("fixed", [True, False], ids=["fixed sizes", "any size"])
@pytest.mark.parametrize(
    ("shape", "places", "k"),
    [((300, 64), (4096,), 1), ((700,), (7, 60000), 1), ((20, 15, 40), (90, 80), 2), ((30, 9, 7), (500000,), 3)],
)
def test_a_programs_own_scatters_add_whole(
    shape: tuple[int, ...], places: tuple[int, ...], k: int, fixed: bool
) -> None:
    """In whatever number of dimensions, at places that count from the end too, sizes known or not."""
    rng, program = np.random.default_rng(1), amp.Program()
    lead: list[int | None] = [*places] if fixed else [None] * len(places)
    with amp.program_guard(program, amp.Program("startup")):
        total = amp.data("total", [*shape], "float32")
        at, rows = amp.data("at", [*lead, k], "int64"), amp.data("rows", [*lead, *shape[k:]], "float32")
        result = F.scatter_nd_add(total, at, rows) * amp.create_parameter([1], "float32", "one")
    at_ = np.stack([rng.integers(-size, size, places) for size in shape[:k]], axis=-1)
    feed = {
        "total": rng.normal(size=shape).astype(np.float32),
        "at": at_,
        "rows": rng.normal(size=(*places, *shape[k:])).astype(np.float32),
    }
    found = scatters(program.lower(amp.CPUPlace(), fetch_list=[result]).model.graph)
    assert any(map(races, found)) is not fixed
    exe, scope = amp.Executor(amp.CPUPlace(), threads=THREADS), amp.Scope()
    scope.set_var("one", np.ones(1, np.float32))
    expected = _added(feed["total"], at_, feed["rows"])  # in their order, so to the bit
    for _ in range(10):
        (got,) = exe.run(program, feed=feed, fetch_list=[result], scope=scope)
        np.testing.assert_array_equal(got, expected)
