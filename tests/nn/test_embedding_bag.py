"""Bags of rows: sums, means and largest elements beside numpy's, with empty bags and padding, in every precision, and their gradients."""

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
        if mode == "max":
            if bag:
                first = np.array(bag)[table[bag].argmax(0)]
                result += table[first, range(WIDTH)]
                np.add.at(gradient, (first, range(WIDTH)), 2 * result / found.size)
            continue
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
    check(offsets, mode, padding, precision)


@pytest.mark.parametrize("precision", ["fp32", "pure", "16-bit table"])
@pytest.mark.parametrize("offsets", [None, [0, 0, 0, 12]], ids=["rectangle", "two empty"])
def test_largest_elements(offsets: list[int] | None, precision: str) -> None:
    check(offsets, "max", 2, precision)


def test_of_equal_elements_the_first_has_the_gradient() -> None:
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x, begins = amp.data("x", [3], "int64"), amp.data("offsets", [2], "int64")
        table = amp.create_parameter([3, 1], "float32", "table", amp.nn.initializer.Constant(2.0))
        bags = F.embedding_bag(x, table, begins, "max"), F.embedding_bag(F.reshape(x, [1, 3]), table, mode="max")
        found = [amp.append_backward(F.sum(bag), no_grad_set=[])[0][1] for bag in bags]
    exe, scope = amp.Executor(amp.CPUPlace()), amp.Scope()
    exe.run(startup, scope=scope)
    feed = {"x": np.array([1, 2, 0]), "offsets": np.array([0, 3])}
    for gradient in exe.run(main, feed, found, scope):
        assert gradient.ravel().tolist() == [0, 1, 0]


def check(offsets: list[int] | None, mode: str, padding: int | None, precision: str) -> None:
    """A step of SGD on the mean square of the bags, beside numpy in float64."""
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
        with pytest.raises(amp.AmpError, match="mode is 'min'; expected one of sum, mean, max"):
            amp.nn.embedding_bag(flat, [4, 2], begins, "min")
        with pytest.raises(amp.AmpError, match="x 'x'"):
            amp.nn.embedding_bag(flat, [4, 2])
        with pytest.raises(amp.AmpError, match="offsets 'floats'"):
            amp.nn.embedding_bag(flat, [4, 2], amp.data("floats", [None], "float32"))
