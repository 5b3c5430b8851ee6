"""``x[...]`` on variables against numpy, its gradient, and the keys that it refuses."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.nn import functional as F
from amp_transpiler.passes.lowering.lowering import lower
from tests.helpers.cuda_kernels import without_cuda_kernel

X = np.arange(2 * 5 * 6, dtype=np.float32).reshape(2, 5, 6)
#: Keys, as python writes them.
KEYS: list[Any] = [
    np.s_[0],
    np.s_[-1],
    np.s_[1, 2],
    np.s_[0, 1, -2],
    np.s_[:],
    np.s_[...],
    np.s_[1:],
    np.s_[:, 1:4],
    np.s_[:, :-1],
    np.s_[:, ::2],
    np.s_[:, ::-1],
    np.s_[:, -1:0:-2, 1:100:3],
    np.s_[..., 0],
    np.s_[0, ...],
    np.s_[0, ..., 1:3],
    np.s_[:, 4:-9:-3],
    np.s_[None],
    np.s_[:, None],
    np.s_[..., None],
    np.s_[0, None, :, None, 2],
    np.s_[None, 1, ..., -1, None],
    np.s_[:, [3, 0, 3]],
    np.s_[[1, 1]],
    np.s_[..., np.array([5, -1])],
    np.s_[1:2, :, np.array([0, 2])],
    np.s_[np.int64(1)],
    np.s_[:, np.int32(-2)],
    np.s_[np.array([False, True])],
    np.s_[1:, [True, False, False, True, True], None],
]


@pytest.mark.parametrize("unknown", [False, True], ids=["known", "unknown"])
@pytest.mark.parametrize("key", KEYS, ids=str)
def test_as_numpy(key: Any, unknown: bool) -> None:
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x = amp.data("x", [None, 5, None] if unknown else X.shape, "float32")
        w = amp.create_parameter([1], "float32", name="w", initializer=np.ones(1))
        y = (x * w)[key]
        ((_, grad),) = amp.append_backward(F.sum(y * y))
    scope, exe = amp.Scope(), amp.Executor(threads=1)
    exe.run(startup, scope=scope)
    found, dw = exe.run(main, feed={"x": X}, fetch_list=[y, grad], scope=scope)
    np.testing.assert_array_equal(found, X[key])
    np.testing.assert_allclose(dw, 2 * (X[key].astype(np.float64) ** 2).sum(), rtol=1e-6)
    assert y.shape is not None and len(y.shape) == X[key].ndim
    assert unknown or tuple(y.shape) == X[key].shape
    assert without_cuda_kernel(lower(main, "cuda", {"x": X.shape}, [y, grad]).model) == []


@pytest.mark.parametrize("key", [np.s_[:, -6:-9:-2], np.s_[-(10**30) :: -1], np.s_[:, -7:-6:-1]], ids=str)
def test_backwards_from_before_the_first_element_is_nothing(key: Any) -> None:
    with amp.program_guard(amp.Program(), amp.Program()), amp.unique_name.guard():
        y = F.assign(X)[key]
        assert tuple(y.shape or ()) == X[key].shape
        axis = 1 if isinstance(key, tuple) else 0
        given = key[axis] if isinstance(key, tuple) else key
        bounds = [max(each, -100) if each is not None else -100 for each in (given.start, given.stop)]
        z = F.slice(F.assign(X), [axis], bounds[:1], bounds[1:], [given.step])
        found = amp.Executor(threads=1).run(fetch_list=[y, z])
    assert [each.shape for each in found] == [X[key].shape] * 2


def test_a_variable_as_index() -> None:
    main = amp.Program()
    with amp.program_guard(main, amp.Program()), amp.unique_name.guard():
        x, i = amp.data("x", [None, 5, 6], "float32"), amp.data("i", [None], "int64")
        y = x[:, i, 1]
    index = np.array([4, 0, 4])
    (found,) = amp.Executor(threads=1).run(main, feed={"x": X, "i": index}, fetch_list=[y], scope=amp.Scope())
    np.testing.assert_array_equal(found, X[:, index][:, :, 1])


MASK = np.array([[1, 0, 0, 1, 1], [0, 0, 1, 0, 0]], bool)


@pytest.mark.parametrize("none", [False, True], ids=["some", "none"])
def test_a_mask_as_index(none: bool) -> None:
    """Data decide how many places there are; gradients go to these."""
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x, mask = amp.data("x", [2, 5, 6], "float32"), amp.data("mask", [2, 5], "bool")
        w = amp.create_parameter([2, 5, 6], "float32", name="w", initializer=X)
        y, along = (x * w)[mask], (x * w)[:, mask[1], 2]
        single = F.masked_select(x * w, F.greater_than(x, 20.0))
        places, (rows, columns) = F.nonzero(mask), F.nonzero(mask, as_tuple=True)
        ((_, grad),) = amp.append_backward(F.sum(y) + F.sum(along * along) + F.sum(single))
    scope, exe = amp.Scope(), amp.Executor(threads=1)
    exe.run(startup, scope=scope)
    chosen = MASK & (not none)
    wanted = np.where(chosen[:, :, None], X, 0) + np.where(X > 20, X, 0)
    wanted[:, chosen[1], 2] += 2 * (X**3)[:, chosen[1], 2]
    fetches = [y, along, single, places, rows, columns, grad]
    found = exe.run(main, feed={"x": X, "mask": chosen}, fetch_list=fetches, scope=scope)
    square = X * X
    indices = np.argwhere(chosen)
    expected = (
        square[chosen],
        square[:, chosen[1], 2],
        square[X > 20],
        indices,
        indices[:, :1],
        indices[:, 1:],
        wanted,
    )
    for value, right in zip(found, expected, strict=True):
        np.testing.assert_array_equal(value, right)
    assert y.shape == (None, 6) and along.shape == (2, None) and places.shape == (None, 2)


def test_a_mask_has_the_first_sizes() -> None:
    with amp.program_guard(amp.Program(), amp.Program()), amp.unique_name.guard():
        x, mask = amp.data("x", [2, 5, 6], "float32"), amp.data("mask", [5, 2], "bool")
        with pytest.raises(ArgumentError, match="getitem: 'mask' .* is no mask of the first dimensions of 'x'"):
            x[mask]
        with pytest.raises(ArgumentError, match="masked_select: 'mask' .* has another shape than 'x'"):
            F.masked_select(x, mask)
        with pytest.raises(ArgumentTypeError, match="nonzero: x"):
            F.nonzero(True)


def test_one_slice_serves_all_bounds() -> None:
    main = amp.Program()
    with amp.program_guard(main, amp.Program()), amp.unique_name.guard():
        amp.data("x", [2, 5, 6], "float32")[1, None, 1:3, -1]
    assert [op.type for op in main.operators] == ["Slice", "Squeeze", "Unsqueeze"]


@pytest.mark.parametrize(
    "key, error, said",
    [
        ((0, 0, 0, 0), ArgumentError, r"4 indices for the 3 dimensions of 'x'"),
        (2, ArgumentError, r"index 2 is outside dimension 0 of 'x'"),
        ((0, -6), ArgumentError, r"index -6 is outside dimension 1"),
        ((..., 0, ...), ArgumentError, r"'\.\.\.' can stand in an index once"),
        (slice(None, None, 0), ArgumentError, "a step of 0 does not move"),
        (slice(0.5, None), ArgumentTypeError, "bounds and the step of a slice are integers, not 0.5"),
        ("a", ArgumentTypeError, "an index is an integer, a slice, .* not 'a'"),
        (True, ArgumentTypeError, "not True"),
        (1.0, ArgumentTypeError, "not 1.0"),
        (np.ones(3, bool), ArgumentError, "3 bools are no mask of dimension 0 of 'x'"),
        (np.ones((2, 5), bool), ArgumentTypeError, "a vector of integers or bools, not array"),
        (([0], [0]), ArgumentError, "one vector of integers can index 'x'"),
    ],
    ids=str,
)
def test_what_is_no_index(key: Any, error: type[Exception], said: str) -> None:
    with amp.program_guard(amp.Program(), amp.Program()), amp.unique_name.guard():
        x = amp.data("x", [2, 5, 6], "float32")
        with pytest.raises(error, match=f"getitem: .*{said}"):
            x[key]


def test_iteration_ends_in_an_error_and_not_in_a_hang() -> None:
    with amp.program_guard(amp.Program(), amp.Program()), amp.unique_name.guard():
        x = amp.data("x", [None, 5], "float32")
        with pytest.raises(ArgumentTypeError, match="'x' cannot be iterated over; F.unstack"):
            list(x)
        with pytest.raises(TypeError):
            _, _ = x


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", "int64", "bool"])
def test_unique_elements_and_slices_are_numpys(dtype: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2 if dtype == "bool" else 5, (6, 4))
    x[3] = x[1]
    program = amp.Program()
    with amp.program_guard(program, amp.Program("startup")):
        given = amp.data("x", [None, 4], dtype)
        found = [*F.unique(given, True, True, True), *F.unique(given, axis=0, return_inverse=True, dtype="int32")]
        only, sizes = F.unique(given), F.shape(given)
    held = x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    results = amp.Executor().run(program, {"x": held}, [*found, only, sizes])
    flat = np.unique(x, return_index=True, return_inverse=True, return_counts=True)
    rows = np.unique(x, axis=0, return_inverse=True)
    for result, wanted in zip(results, [*flat, *rows, flat[0], x.shape], strict=True):
        np.testing.assert_array_equal(np.asarray(result, np.int64), np.reshape(wanted, result.shape))
    kinds = [dtype, "int64", "int64", "int64", dtype, "int32", dtype, "int64"]
    assert [str(result.dtype) for result in results] == kinds


@pytest.mark.parametrize("pure", [False, True])
def test_the_first_of_equal_elements_has_the_gradient(pure: bool) -> None:
    start = np.array([3, 1, 3, 2, 1, 7], np.float32)
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        found = F.unique(amp.create_parameter([6], "float32", "w", start))
        sgd = amp.optimizer.SGD(1.0, multi_precision=True)
        optimizer = amp.decorate(sgd, init_loss_scaling=8.0, use_pure_fp16=pure, use_fp16_guard=False)
        optimizer.minimize(F.sum(found * found), startup)
    executor, scope = amp.Executor(), amp.Scope()
    executor.run(startup, scope=scope)
    optimizer.amp_init(amp.CPUPlace(), scope=scope)
    executor.run(main, scope=scope)
    assert scope.find_var("w").tolist() == [-3, -1, 3, -2, 1, -7]
