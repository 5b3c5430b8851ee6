"""Gradients of a softmax in 16 bit whose rows have much in common, beside float64: as far off as what is read, no more."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.nn import functional as F
from amp_transpiler.passes.lowering.lowering import lower
from tests.helpers.node_by_node import node_by_node
from tests.helpers.ports import fed

HEADS, WIDTH = 2, 16
PLACES = [("float16", "cpu"), ("float16", "cuda"), ("bfloat16", "cpu")]


def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    return array.astype(np.float32).astype(dtype).astype(np.float32)


def slope(
    made: Callable[[Variable], Variable], x: np.ndarray, dtype: str, place: str, pure: bool = True
) -> tuple[np.ndarray, list[str]]:
    """The gradient of the sum of what is made of a parameter, and the operators of the lowered program."""
    startup = amp.Program("startup")
    main = amp.Program("main", startup)
    main.seed = startup.seed = 3
    sgd = amp.optimizer.SGD(1.0, multi_precision=True)
    if dtype != "float32":
        lists = amp.AutoMixedPrecisionLists(dtype=dtype)
        sgd = amp.decorate(sgd, lists, 1.0, use_pure_fp16=pure, use_fp16_guard=False, dtype=dtype)
    with amp.program_guard(main, startup), amp.unique_name.guard():
        parameter = amp.create_parameter(x.shape, "float32", "x", amp.nn.initializer.Assign(x))
        ((_, grad),) = sgd.backward(F.sum(made(parameter)))
    scope, executor = amp.Scope(), amp.Executor()
    executor.run(startup, scope=scope)
    if dtype != "float32":
        sgd.amp_init(amp.CPUPlace(), scope=scope)
    lowered = lower(main, place, {}, [grad])
    kinds = [node.op_type for node in lowered.model.graph.node]
    if place == "cpu":
        return np.asarray(executor.run(main, fetch_list=[grad], scope=scope)[0], np.float64), kinds
    values = fed(lowered.states, lambda name: np.asarray(scope.find_var(name)))
    known = node_by_node(lowered.model, values | {name: np.zeros((), np.float32) for name in lowered.scalars})
    return known[lowered.fetches[0].tensor].astype(np.float64), kinds


def softmax(scores: np.ndarray, axis: int) -> np.ndarray:
    power = np.exp(scores - scores.max(axis, keepdims=True))
    return power / power.sum(axis, keepdims=True)


def passed(scores: np.ndarray, dy: np.ndarray, axis: int) -> np.ndarray:
    y = softmax(scores, axis)
    return y * (dy - (y * dy).sum(axis, keepdims=True))


def attention(length: int, dtype: str, rate: float) -> tuple[np.ndarray, Callable[[Variable], Variable], np.ndarray]:
    """Queries, and sums of values that they weigh: keys and values have three times their spread in common. And what
    the queries' gradient is without dropout, in float64."""
    rng = np.random.default_rng(0)
    size = (1, HEADS, length, WIDTH)
    q, k, v, do = (
        rounded(rng.normal(0, 1, size) * scale + common * rng.normal(0, 1, (1, HEADS, 1, WIDTH)), dtype)
        for scale, common in ((0.1, 0), (1, 3), (1, 3), (1, 0))
    )
    constants = {"k": k.swapaxes(-1, -2), "v": v, "do": do}

    def made(x: Variable) -> Variable:
        keys, values, slopes = (x.program.add_constant(name, array) for name, array in constants.items())
        weights = F.softmax(F.matmul(x, keys), axis=-1)
        return F.matmul(F.dropout(weights, rate) if rate else weights, values) * slopes

    q64, k64, v64, do64 = (array.astype(np.float64) for array in (q, k, v, do))
    return q, made, passed(q64 @ k64.swapaxes(-1, -2), do64 @ v64.swapaxes(-1, -2), -1) @ k64


@pytest.mark.parametrize("pure", [True, False], ids=["pure", "mixed"])
@pytest.mark.parametrize("length", [40, 80])  # of so many places, the sums that are weighed are much shorter
@pytest.mark.parametrize(("dtype", "place"), PLACES)
def test_queries_learn_of_keys_and_values_that_are_alike(dtype: str, place: str, length: int, pure: bool) -> None:
    q, made, right = attention(length, dtype, 0)
    found, kinds = slope(made, q, dtype, place, pure)
    epsilon = float(ml_dtypes.finfo(dtype).eps)
    assert np.linalg.norm(found - right) < 4 * epsilon * np.linalg.norm(right)
    sums = place == "cuda"  # of rows, a product with ones each; or of rows of values, which are computed for it
    short = length > (4 if pure else 2) * WIDTH
    assert sum(kind in ("MatMul", "FusedMatMul", "Gemm") for kind in kinds) == 3 + sums + (sums and short)


@pytest.mark.parametrize("pure", [True, False], ids=["pure", "mixed"])
@pytest.mark.parametrize("length", [40, 80])
@pytest.mark.parametrize(("dtype", "place"), PLACES)
def test_so_they_do_with_dropout(dtype: str, place: str, length: int, pure: bool) -> None:
    """Of what values have in common it keeps more in one place than in another; what a row is off by is alike."""
    q, made, _ = attention(length, dtype, 0.1)
    found, _ = slope(made, q, dtype, place, pure)
    right, _ = slope(made, q, "float32", "cpu")
    epsilon = float(ml_dtypes.finfo(dtype).eps)
    assert np.linalg.norm(found - right) < 2 * epsilon * np.linalg.norm(right)


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize(("dtype", "place"), PLACES)
def test_a_mean_is_taken_with_weights_of_what_is_alike(dtype: str, place: str, axis: int) -> None:
    """Pooling by attention: of the gradient a sum along the axis is small beside its parts."""
    rng = np.random.default_rng(1)
    x, v = (rounded(rng.normal(0, 1, (4, 40, 40)) * s + c, dtype) for s, c in ((0.1, 0), (1, 5)))
    found, _ = slope(lambda p: F.softmax(p, axis=axis) * p.program.add_constant("v", v), x, dtype, place)
    right = passed(x.astype(np.float64), v.astype(np.float64), axis)
    epsilon = float(ml_dtypes.finfo(dtype).eps)
    assert np.linalg.norm(found - right) < 2 * epsilon * np.linalg.norm(right)
    assert np.abs(found.sum(axis)).max() < epsilon * np.abs(right).sum(axis).max()
