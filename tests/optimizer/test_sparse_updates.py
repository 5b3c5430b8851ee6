"""Updates by sparse gradients: beside those by dense ones, bit for bit, and beside formulas of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import ArgumentError
from amp_transpiler.nn import functional as F
from amp_transpiler.passes.view.training_step import training_step
from amp_transpiler.warn import AmpWarning
from tests.helpers.tables import BATCH, IDS, ROWS, Recommender, looked_up, twice

MODES = ("fp32", "mixed", "pure", "bf16")
OPTIMIZERS: dict[str, Callable[[amp.Program], Any]] = {
    "sgd": lambda _: amp.optimizer.SGD(0.5, multi_precision=True),
    "sgd, decay": lambda _: amp.optimizer.SGD(0.5, weight_decay=0.1, multi_precision=True),
    "sgd, clipped": lambda _: amp.optimizer.SGD(
        0.5, grad_clip=amp.optimizer.ClipGradByGlobalNorm(0.01), multi_precision=True
    ),
    "momentum": lambda _: amp.optimizer.Momentum(0.1, multi_precision=True),
    "nesterov": lambda _: amp.optimizer.Momentum(0.1, use_nesterov=True, weight_decay=0.1, multi_precision=True),
    "adagrad": lambda _: amp.optimizer.Adagrad(0.1, multi_precision=True),
    "adagrad of rows": lambda _: amp.optimizer.Adagrad(
        0.1, row_wise=True, initial_accumulator_value=0.1, multi_precision=True
    ),
    "adam": lambda _: amp.optimizer.Adam(0.01, multi_precision=True),
    "adamw": lambda _: amp.optimizer.AdamW(0.01, multi_precision=True),
    "lamb": lambda _: amp.optimizer.Lamb(0.01, multi_precision=True),
}
#: Updates that touch some rows alone, whatever is asked.
OF_ROWS = {"sgd": "SparseSGD", "sgd, clipped": "SparseSGD", "adagrad": "SparseAdagrad"}


def updates(main: amp.Program) -> set[str]:
    """The operators that update the table."""
    table = main.var("table")
    return {op.type for op, _ in table.readers if any(v is main.updates[table] for v in op.outputs)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sparse_gradients_train_as_dense_ones(name: str, mode: str) -> None:
    sparse, dense = twice(OPTIMIZERS[name], mode)
    assert sparse.train() == dense.train()
    assert {**sparse.state(), "": b""} == {**dense.state(), "": b""}
    if name in OF_ROWS:
        assert updates(sparse.main) == {OF_ROWS[name]}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
def test_a_table_in_16_bit(name: str, mode: str) -> None:
    dtype = "bfloat16" if mode == "bf16" else "float16"
    sparse, dense = twice(OPTIMIZERS[name], mode, dtype=dtype)
    assert sparse.train() == dense.train()
    assert sparse.state() == dense.state()
    assert sparse.table().dtype.name == dtype
    lowered = sparse.main.lower(amp.CPUPlace(), feed_shapes={"ids": (BATCH, IDS), "label": (BATCH, 1)})
    casts = {node.input[0] for node in lowered.model.graph.node if node.op_type == "Cast"}
    assert name == "adam" or not casts & {"table", "table_fp32_master_0"}  # no row but those of the step is widened


def two_lookups(ids: amp.Variable, table: amp.Variable, sparse: bool) -> amp.Variable:
    return looked_up(ids, table, sparse) - F.max(F.embedding(ids, table, sparse=sparse), axis=1)


def padded(ids: amp.Variable, table: amp.Variable, sparse: bool) -> amp.Variable:
    return F.mean(F.embedding(ids, table, padding_idx=2, sparse=sparse), axis=1)


def with_product(ids: amp.Variable, table: amp.Variable, sparse: bool) -> amp.Variable:
    return F.matmul(looked_up(ids, table, sparse), F.transpose(table, [1, 0]))


@pytest.mark.parametrize("name", ["sgd", "adam", "adagrad"])
@pytest.mark.parametrize("forward", [two_lookups, padded, with_product])
def test_tables_that_are_read_otherwise(forward: Any, name: str) -> None:
    sparse, dense = twice(OPTIMIZERS[name], forward=forward)
    assert sparse.train() == dense.train()
    assert sparse.state() == dense.state()


@pytest.mark.parametrize(
    "ids",
    [
        [[0, 0, 0, 0, 0]],
        [[-1, ROWS - 1, -1, -ROWS, 0]],
        np.arange(ROWS).reshape(8, 5),
        [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]],
        np.zeros((0, 5), np.int64),
    ],
    ids=["one row", "from the end", "every row once", "some twice", "none"],
)
@pytest.mark.parametrize("name", ["sgd", "adagrad", "adagrad of rows"])
def test_ids(name: str, ids: Any) -> None:
    """As many ids as rows make a gradient of the shape of the table, which must not be taken for the whole."""
    sparse, dense = twice(OPTIMIZERS[name])
    for step in range(3):
        for net in (sparse, dense):
            net.run(net.feed(step, ids), fetch=net.main.updates[net.main.var("table")])
    assert sparse.state() == dense.state()


def test_an_id_out_of_range_is_named() -> None:
    net = Recommender(OPTIMIZERS["sgd"])
    before = net.state()
    with pytest.raises(amp.AmpError, match=rf"invalid index found, index = {ROWS}\b.*table's rows"):
        net.train(range(1), [[0, 1, 2, 3, ROWS]])
    assert net.state() == before


# -- lazily --------------------------------------------------------------------------------------------------
def lazy_adam(decay: float) -> Any:
    """Of rows alone: (Kingma and Ba, 2014) with decoupled decay, in float64."""

    def step(t: int, rows: Any, p: np.ndarray, g: np.ndarray, s: dict[str, np.ndarray]) -> None:
        lr, b1, b2, eps = 0.01, 0.9, 0.999, 1e-8
        s["m"][rows] = b1 * s["m"][rows] + (1 - b1) * g
        s["v"][rows] = b2 * s["v"][rows] + (1 - b2) * g * g
        p[rows] -= lr * decay * p[rows]
        p[rows] -= lr / (1 - b1**t) * s["m"][rows] / (np.sqrt(s["v"][rows] / (1 - b2**t)) + eps)

    return step


def lazy_momentum(t: int, rows: Any, p: np.ndarray, g: np.ndarray, s: dict[str, np.ndarray]) -> None:
    s["m"][rows] = 0.9 * s["m"][rows] + g
    p[rows] -= 0.1 * s["m"][rows]


def row_wise(t: int, rows: Any, p: np.ndarray, g: np.ndarray, s: dict[str, np.ndarray]) -> None:
    s["m"][rows] += np.mean(g * g, axis=1, keepdims=True)
    p[rows] -= 0.1 * g / (np.sqrt(s["m"][rows]) + 1e-6)


LAZY: dict[str, tuple[Callable[[amp.Program], Any], Any, str]] = {
    "Adam": (lambda _: amp.optimizer.Adam(0.01, lazy_mode=True), lazy_adam(0.0), "SparseAdam"),
    "AdamW": (lambda _: amp.optimizer.AdamW(0.01, lazy_mode=True), lazy_adam(0.01), "SparseAdamW"),
    "Momentum": (lambda _: amp.optimizer.Momentum(0.1, lazy_mode=True), lazy_momentum, "SparseMomentum"),
    "Adagrad": (lambda _: amp.optimizer.Adagrad(0.1, row_wise=True), row_wise, "SparseRowWiseAdagrad"),
}


@pytest.mark.parametrize("name", LAZY)
def test_only_rows_of_the_step_move(name: str) -> None:
    make, formula, type_ = LAZY[name]
    net = Recommender(make)
    assert updates(net.main) == {type_}
    p = net.table().astype(np.float64)
    state = {kind: np.zeros_like(p) for kind in "mv"}
    gradient = next(row.gradient for row in training_step(net.main).rows if row.parameter.name == "table")
    for step in range(6):
        feed = net.feed(step)
        rows, values = net.exe.run(net.main, feed=feed, fetch_list=[gradient.rows, gradient], scope=net.scope)
        touched = np.unique(feed["ids"])
        assert list(rows[: len(touched)]) == list(touched) and set(rows[len(touched) :]) <= {touched[-1]}
        assert not values[len(touched) :].any()
        before = p.copy()
        formula(step + 1, touched, p, values[: len(touched)].astype(np.float64), state)
        others = np.setdiff1d(np.arange(ROWS), touched)
        assert (before[others] == p[others]).all()
        np.testing.assert_allclose(net.table(), p, rtol=0, atol=2e-6)


# -- one verdict ---------------------------------------------------------------------------------------------
def overflowing(where: str) -> Callable[[amp.Variable, amp.Variable, bool], amp.Variable]:
    """A gradient that ``boost`` makes infinite or NaN, of the table alone or of the layers alone."""

    def forward(ids: amp.Variable, table: amp.Variable, sparse: bool) -> amp.Variable:
        boost = amp.data("boost", [1], "float32")
        h = looked_up(ids, table, sparse)
        if where == "dense":
            w = amp.create_parameter([1], "float32", "dense", amp.nn.initializer.Constant(1.0))
            return h + boost * w - boost  # no gradient of the table passes through the product
        extra = F.mean(F.embedding(ids, table, sparse=sparse), axis=1)
        return h + (extra * boost - extra * boost)

    return forward


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("where", ["dense", "sparse"])
@pytest.mark.parametrize("apart", ["one", "two", "two calls"])
def test_one_verdict_over_tables_and_the_rest(apart: str, where: str, value: float) -> None:
    """An overflow anywhere leaves every table, parameter and moment as it is, and moves the scale once."""

    def optimizers(main: amp.Program) -> Any:
        if apart == "one":
            return amp.optimizer.Adam(0.01, lazy_mode=True)
        tables, others = amp.split_embedding_parameters(main)
        assert [v.name for v in tables] == ["table"]
        return [
            amp.optimizer.Adagrad(0.1, parameter_list=tables, row_wise=True),
            amp.optimizer.Adam(0.01, parameter_list=others),
        ]

    options = {"init_loss_scaling": 64.0, "incr_every_n_steps": 3, "decr_every_n_nan_or_inf": 1, "decr_ratio": 0.5}

    def calls(main: amp.Program) -> list[set[str]]:
        return [{v.name for v in part} for part in amp.split_embedding_parameters(main)]

    apply = calls if apart == "two calls" else None
    net = Recommender(optimizers, "mixed", forward=overflowing(where), calls=apply, **options)
    scale = next(name for name in net.state() if name.startswith("loss_scaling"))
    counts = [name for name in net.state() if name.startswith(("num_good", "num_bad"))]

    def step(number: int, boost: float) -> None:
        net.run({**net.feed(number), "boost": np.array([boost], np.float32)})

    step(0, 0.5)
    step(1, 0.5)
    before = net.state()
    step(2, value)
    after = net.state()
    free = {scale, *counts, "@rng_step"}
    assert {name for name in before if before[name] != after[name]} <= free
    assert np.frombuffer(after[scale], np.float32)[0] == 32.0
    for number in (3, 4, 5):
        step(number, 0.5)
    assert np.frombuffer(net.state()[scale], np.float32)[0] == 64.0  # three good steps, counted once each
    assert net.state()["table"] != after["table"]


@pytest.mark.parametrize("mode", ["fp32", "mixed"])
def test_code_of_ones_own_on_gradients_of_rows(mode: str) -> None:
    def smaller(pairs: Any) -> Any:
        return [(p, F.clip(-0.5 * -g, -1.0, 1.0) / np.float32(2.0)) for p, g in pairs]

    sparse, dense = twice(OPTIMIZERS["sgd"], mode, code=smaller)
    assert sparse.train() == dense.train()
    assert {**sparse.state(), "": b""} == {**dense.state(), "": b""}
    assert updates(sparse.main) == {"SparseSGD"}


@pytest.mark.parametrize("code", [lambda g: g + 0.1, lambda g: g * F.sign(g), lambda g: F.clip(g, 0.5, 1.0)])
def test_code_that_loses_the_rows_is_refused(code: Callable[[amp.Variable], amp.Variable]) -> None:
    for mode in ("fp32", "mixed"):
        with pytest.raises(ArgumentError, match=r"'table'.*\((Add|Mul|Clip)\) computes it of 'table@GRAD"):
            Recommender(OPTIMIZERS["sgd"], mode, code=lambda pairs: [(p, code(g)) for p, g in pairs])


def test_a_dense_gradient_of_a_sparse_table() -> None:
    """As of code that computes one by itself: a table of rows drawn to 0."""
    net = Recommender(
        OPTIMIZERS["sgd"], code=lambda pairs: [(p, p * 0.5 if p.name == "table" else g) for p, g in pairs]
    )
    before = net.table().copy()
    net.train(range(1))
    assert np.array_equal(net.table(), before - 0.5 * (before * np.float32(0.5)))


def test_lazy_mode_of_sums_of_whole_tables_is_told() -> None:
    with pytest.warns(AmpWarning, match="Adam: lazy_mode makes no difference to 'table'.* accumulate_steps adds it"):
        Recommender(lambda _: amp.optimizer.Adam(0.01, lazy_mode=True), "mixed", accumulate_steps=2)
