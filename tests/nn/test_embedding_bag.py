"""Bags of rows: sums and means beside numpy's, with empty bags and padding, in every precision, and their gradients."""

from __future__ import annotations

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.nn import functional as F

ROWS, WIDTH, IDS = 9, 6, 12
OFFSETS = [None, [0, 3, 3, 7], [0, 0, 0, 12], [0]]


def bags(ids: np.ndarray, offsets: list[int] | None, padding: int | None) -> list[list[int]]:
    each = ids if offsets is None else [ids[a:b] for a, b in zip(offsets, [*offsets[1:], len(ids)], strict=True)]
    return [[int(i) for i in bag if i != padding] for bag in each]


def expected(table: np.ndarray, rows: list[list[int]], mode: str) -> tuple[np.ndarray, np.ndarray]:
    """The bags, and the gradient of the table for the mean of their squares, in float64."""
    found, gradient = np.zeros((len(rows), WIDTH)), np.zeros_like(table)
    for bag, result in zip(rows, found, strict=True):
        share = 1 / max(len(bag), 1) if mode == "mean" else 1.0
        result += share * table[bag].sum(0)
        for row in bag:
            gradient[row] += 2 * share * result / found.size
    return found, gradient


@pytest.mark.parametrize("precision", ["fp32", "pure", "16-bit table"])
@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("offsets", OFFSETS, ids=["rectangle", "one empty", "two empty", "one bag"])
def test_sums_and_means(offsets: list[int] | None, mode: str, padding: int | None, precision: str) -> None:
    ids = np.random.default_rng(3).integers(0, ROWS, IDS if offsets is not None else (3, 4))
    main, startup = amp.Program(), amp.Program("startup")
    dtype = "float16" if precision == "16-bit table" else "float32"
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x = amp.data("x", [None] if offsets is not None else [None, 4], "int64")
        begins = None if offsets is None else amp.data("offsets", [None], "int32")
        result = amp.nn.embedding_bag(
            x, [ROWS, WIDTH], begins, mode, dtype=dtype, padding_idx=padding, is_sparse=True, name="bag"
        )
        wide = F.cast(result, "float32")
        loss = F.mean(wide * wide)
        optimizer = amp.decorate(
            amp.optimizer.SGD(1.0, multi_precision=True),
            init_loss_scaling=8.0,
            use_pure_fp16=precision == "pure",
            use_fp16_guard=False,
        )
        optimizer.minimize(loss, startup)
    exe, scope = amp.Executor(amp.CPUPlace()), amp.Scope()
    exe.run(startup, scope=scope)
    optimizer.amp_init(amp.CPUPlace(), scope=scope)
    before = np.array(scope.find_var("bag.w_0"), np.float64)
    feed = {"x": ids} if offsets is None else {"x": ids, "offsets": np.array(offsets, np.int32)}
    (found,) = exe.run(main, feed=feed, fetch_list=[result], scope=scope)
    wanted, gradient = expected(before, bags(ids, offsets, padding), mode)
    close = 1e-6 if precision == "fp32" else 2e-3
    np.testing.assert_allclose(found, wanted, rtol=close, atol=close)
    np.testing.assert_allclose(np.array(scope.find_var("bag.w_0")), before - gradient, rtol=0, atol=close)


def test_many_rows_are_added_up_in_fp32() -> None:
    """4,096 times 1 + 1/1024: in 16 bit the sum would stop at 2,048 or lose the fraction."""
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x, begins = amp.data("x", [4096], "int64"), amp.data("offsets", [1], "int64")
        value = amp.nn.initializer.Constant(1 + 1 / 1024)
        table = amp.create_parameter([2, 1], "float16", "table", value)
        total = F.embedding_bag(x, table, begins, "sum")
    amp.cast_model_to_fp16(main, use_fp16_guard=False)
    exe, scope = amp.Executor(amp.CPUPlace()), amp.Scope()
    exe.run(startup, scope=scope)
    feed = {"x": np.zeros(4096, np.int64), "offsets": np.zeros(1, np.int64)}
    assert exe.run(main, feed=feed, fetch_list=[total], scope=scope)[0] == 4100


def test_wrong_arguments_are_named() -> None:
    with amp.program_guard(amp.Program(), amp.Program("startup")):
        flat, begins = amp.data("x", [None], "int64"), amp.data("offsets", [None], "int64")
        with pytest.raises(amp.AmpError, match="mode is 'max'; expected one of sum, mean"):
            amp.nn.embedding_bag(flat, [4, 2], begins, "max")
        with pytest.raises(amp.AmpError, match="x 'x'"):
            amp.nn.embedding_bag(flat, [4, 2])
        with pytest.raises(amp.AmpError, match="offsets 'floats'"):
            amp.nn.embedding_bag(flat, [4, 2], amp.data("floats", [None], "float32"))
