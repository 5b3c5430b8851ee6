"""Updates of large tables of which a step looks up few rows: no gradient of the whole table, and the same numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.ir.control import every_node
from amp_transpiler.nn import functional as F
from amp_transpiler.ops.training import few_rows, scaling, update_nodes
from tests.helpers.places import change_place

ROWS, WIDTH, IDS = 60, 7, 6
RNG = np.random.default_rng(2)
#: Rows that come twice, from the end, across the border of two chunks, in the last chunk; one row alone.
STEPS = [
    np.array(ids) for ids in ([3, 17, 3, -1, 40, 17], [0, 0, 0, 0, 0, 0], [59, 58, 2, 1, 0, -60], [8, 9, 10, 11, 12, 8])
]
OPTIMIZERS = {
    "Adam": lambda: amp.optimizer.Adam(0.01),
    "with a penalty": lambda: amp.optimizer.Adam(0.01, weight_decay=amp.regularizer.L2Decay(0.1)),
    "a small beta": lambda: amp.optimizer.Adam(0.01, beta1=0.3),
    "AdamW": lambda: amp.optimizer.AdamW(0.01, weight_decay=0.1),
    "Momentum": lambda: amp.optimizer.Momentum(0.01, momentum=0.9, use_nesterov=True),
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of this test count as large: 420 elements in 21 chunks of 20."""
    change_place(monkeypatch, "cpu", chunks=((0, 50, 20),))
    monkeypatch.setattr(few_rows, "_FEW", 1)


def built(optimizer: Any, count: int = IDS, sparse: bool = False) -> tuple[Any, Any, Any]:
    main, startup = amp.Program(), amp.Program("startup")
    main.seed = startup.seed = 3
    with amp.program_guard(main, startup), amp.unique_name.guard():
        ids, y = amp.data("ids", [count], "int64"), amp.data("y", [count, 3], "float32")
        if sparse:
            rows = amp.nn.embedding(ids, [ROWS, WIDTH], is_sparse=True, param_attr="table")
        else:
            table = amp.nn.create_parameter([ROWS, WIDTH], "float32", name="table")
            rows = F.gather(table, ids)
        error = amp.nn.fc(rows.reshape([count, WIDTH]), 3) - y
        loss = F.mean(error * error)
        optimizer.minimize(loss, startup)
    return main, startup, loss


def trained(optimizer: Any, steps: list[np.ndarray], sparse: bool = False, bad: int = -1) -> dict[str, bytes]:
    main, startup, loss = built(optimizer, len(steps[0]), sparse)
    scope, exe = amp.Scope(), amp.Executor(amp.CPUPlace(), threads=1)
    exe.run(startup, scope=scope)
    if hasattr(optimizer, "amp_init"):
        optimizer.amp_init(amp.CPUPlace(), scope=scope)
    for number, ids in enumerate(steps):
        y = np.random.default_rng(number).normal(size=(len(ids), 3)).astype(np.float32)
        if number == bad:
            y[1] = np.nan
        exe.run(main, feed={"ids": ids % ROWS if sparse else ids, "y": y}, fetch_list=[loss], scope=scope)
    assert {"table", *(n for n in scope.var_names() if n.startswith("table_"))} <= {*exe.memory_report(main).in_place}
    return {name: scope.find_var(name).tobytes() for name in scope.var_names()}


def whole(monkeypatch: pytest.MonkeyPatch, *args: Any, **options: Any) -> dict[str, bytes]:
    with monkeypatch.context() as changes:
        for reader in (scaling, update_nodes):
            changes.setattr(reader, "few_rows", lambda e, gradient, chunks: None)
        return trained(*args, **options)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_that_of_the_whole_gradient(name: str, sparse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for steps in (STEPS, [ids[:1] for ids in STEPS]):
        found = trained(OPTIMIZERS[name](), steps, sparse)
        assert found == whole(monkeypatch, OPTIMIZERS[name](), steps, sparse)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("pure", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_checked_step_too(name: str, pure: bool, sparse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled() -> Any:
        made = OPTIMIZERS[name]()
        made.multi_precision = True
        return amp.decorate(made, use_pure_fp16=pure, use_fp16_guard=False, init_loss_scaling=128.0)

    for steps, bad in ((STEPS, 1), ([ids[:1] for ids in STEPS], -1)):
        assert trained(scaled(), steps, sparse, bad) == whole(monkeypatch, scaled(), steps, sparse, bad)


def test_what_is_not_finite_stays_in_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    found = trained(amp.optimizer.Adam(0.01), STEPS[:2], bad=0)
    assert found == whole(monkeypatch, amp.optimizer.Adam(0.01), STEPS[:2], bad=0)
    table = np.frombuffer(found["table"], np.float32).reshape(ROWS, WIDTH)
    assert np.isfinite(table[5]).all()


def sizes(main: Any) -> list[int]:
    """Elements of what is made outside of nested graphs."""
    graph = onnx.shape_inference.infer_shapes(main.lower(amp.CPUPlace()).model).graph
    made = {name for node in graph.node if node.op_type not in ("Scan", "Reshape") for name in node.output}
    return [np.prod([d.dim_value for d in v.type.tensor_type.shape.dim]) for v in graph.value_info if v.name in made]


@pytest.mark.parametrize("pure", [False, True])
def test_nor_where_it_is_checked(pure: bool) -> None:
    made = amp.decorate(amp.optimizer.Adam(0.01, multi_precision=True), use_pure_fp16=pure, use_fp16_guard=False)
    main, _, _ = built(made)
    assert max(sizes(main)) < ROWS * WIDTH


def test_no_gradient_of_the_whole_table_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    main, _, _ = built(amp.optimizer.Adam(0.01))
    assert max(sizes(main)) < ROWS * WIDTH
    kinds = [node.op_type for node in every_node(main.lower(amp.CPUPlace()).model.graph.node)]
    assert kinds.count("If") == 1
    monkeypatch.setattr(few_rows, "_FEW", 16)  # six of sixty are not few
    main, _, _ = built(amp.optimizer.Adam(0.01))
    assert max(sizes(main)) == ROWS * WIDTH
