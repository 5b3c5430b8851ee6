"""Roots that are written as powers: one operator of a norm, and 16 bit in a conversion."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.ir.metadata import LENGTH
from amp_transpiler.nn import functional as F
from amp_transpiler.passes.canonicalize.fuse_rms import fuse_rms_norms
from amp_transpiler.passes.canonicalize.roots import mark_lengths, write_roots
from tests.helpers.sessions import run
from tests.helpers.slopes import assert_slope, slope

HEAD = '<ir_version: 8, opset_import: ["" : 18]> g (float[2, 3, 8] x) => (float[2, 3, 8] y) <int64[1] last = {-1}, '
HEAD += "float eps = {1e-3}, float below = {-1e-3}, float two = {2}, float half = {0.5}, float minus = {-0.5}, float third = {-0.3}> "
MEAN = "{ s = Pow(x, two)  m = ReduceMean(s, last)  e = Add(m, eps)  "
ROOTS = {
    "as Gemma writes it": MEAN + "r = Pow(e, minus)  y = Mul(x, r) }",
    "divided": MEAN + "r = Pow(e, half)  y = Div(x, r) }",
    "of a sum": MEAN.replace("ReduceMean", "ReduceSum") + "r = Pow(e, minus)  y = Mul(r, x) }",
    "without an epsilon": MEAN + "r = Pow(m, minus)  y = Mul(x, r) }",
}
OTHERS = {
    "another power": MEAN + "r = Pow(e, third)  y = Mul(x, r) }",
    "of what may be negative": "{ s = ReduceMean(x, last)  e = Add(s, eps)  a = Abs(e)  r = Pow(a, minus)  y = Mul(x, r) }",
    "less a number": MEAN.replace("Add(m, eps)", "Add(m, below)") + "a = Abs(e)  r = Pow(a, minus)  y = Mul(x, r) }",
}
X = np.random.default_rng(0).normal(size=(2, 3, 8)).astype(np.float32)


def program(body: str) -> amp.Program:
    return amp.Program.from_onnx(onnx.parser.parse_model(HEAD + body))


@pytest.mark.parametrize("name", ROOTS)
def test_it_is_a_root(name: str) -> None:
    expected = slope(program(ROOTS[name]), X)
    found = program(ROOTS[name])
    assert write_roots(found) == 1 and "Sqrt" in [op.type for op in found.operators]
    assert_slope(found, X, expected, 1e-4)
    norm = program(ROOTS[name])
    write_roots(norm)
    assert fuse_rms_norms(norm)
    assert_slope(norm, X, expected, 1e-4)


@pytest.mark.parametrize("name", OTHERS)
def test_what_only_looks_like_one_stays(name: str) -> None:
    assert write_roots(program(OTHERS[name])) == 0


@pytest.mark.parametrize("name", ROOTS)
def test_it_is_16_bit_in_a_conversion(name: str) -> None:
    source = onnx.parser.parse_model(HEAD + ROOTS[name])
    converted = amp.convert(source)
    assert {op.precision for op in converted.operators if op.type != "Cast"} == {"float16"}
    x = X * np.float32(3000)
    np.testing.assert_allclose(run(converted.to_onnx(), {"x": x})[0], run(source, {"x": x})[0], rtol=2e-3, atol=1e-3)


def test_what_the_user_names_stays() -> None:
    body = HEAD + ROOTS["as Gemma writes it"]
    for more in ({"black_varnames": ["r"]}, {"exclude": ["r"]}):
        assert "Pow" in [op.type for op in amp.convert(onnx.parser.parse_model(body), **more).operators]


NUMBERS = "float tiny = {1e-12}, float least = {1e-8}, int64[2] shape = {3, 8}, int64[1] end = {0}, float one = {1}, float six = {6}, float five = {5}, float near = {0.49999976}, float[8] w = {1, 1, 1, 1, 2, 2, 2, 2}, "
WEIGHED = HEAD.replace("float eps", NUMBERS + "float eps") + "{ v = Mul(x, w)  "
DEVIATION = "a = ReduceMean(v, last)  d = Sub(v, a)  s = Mul(d, d)  m = ReduceMean<keepdims = 0>(s, last)  "
LENGTHS = {
    "a standard deviation": DEVIATION + "f = Mul(m, six)  u = Div(f, five)  r = Sqrt(u)  y = Add(r, one) }",
    "its dimensions put back": DEVIATION + "u = Unsqueeze(m, last)  r = Sqrt(u)  y = Add(r, one) }",
    "a norm": "s = Mul(v, v)  m = ReduceSum(s, last)  r = Sqrt(m)  y = Add(r, one) }",
    "a sum of squares": "m = ReduceSumSquare(v, last)  r = Sqrt(m)  y = Add(r, one) }",
    "a distance": "s = Pow(v, two)  m = ReduceSum(s, last)  r = Pow(m, near)  y = Add(r, one) }",
    "a cosine": "s = Mul(v, v)  m = ReduceSum(s, last)  p = Mul(m, m)  r = Sqrt(p)  y = Add(r, one) }",
}


def slope_of_w(text: str, x: np.ndarray, dtype: str, pure: bool = True) -> np.ndarray:
    """The gradient of the sum of what is computed of ``x * w``, by ``w``, times a loss scale of 8 in 16 bit."""
    found = amp.Program.from_onnx(onnx.parser.parse_model(WEIGHED + text))
    amp.prepare_training(found)
    rule: Any = amp.optimizer.SGD(1.0, multi_precision=dtype != "float32")
    if dtype != "float32":
        lists = amp.AutoMixedPrecisionLists(custom_white_list=None if pure else ["Mul"], dtype=dtype)
        rule = amp.decorate(rule, lists, 8.0, use_pure_fp16=pure, use_fp16_guard=False, dtype=dtype)
    with amp.program_guard(found, found.startup), amp.unique_name.guard():
        ((_, slope),) = rule.backward(F.sum(found.outputs[0]))
    executor, scope = amp.Executor(amp.CPUPlace()), amp.Scope()
    executor.run(found.startup, scope=scope)
    if dtype != "float32":
        rule.amp_init(amp.CPUPlace(), scope)
    return np.asarray(executor.run(found, {"x": x}, [slope], scope)[0], np.float32)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", LENGTHS)
def test_where_a_length_is_0_its_slope_is(name: str, dtype: str) -> None:
    some = np.where(np.arange(3)[:, None] == 1, 0, X).astype(np.float32)
    without = slope_of_w(LENGTHS[name], some, dtype)
    assert np.isfinite(without).all() and np.abs(without).max() > 0
    moved = np.where(np.arange(3)[:, None] == 1, X * np.float32(2.0**-9), X).astype(np.float32)
    np.testing.assert_allclose(without, slope_of_w(LENGTHS[name], moved, dtype), rtol=0.1, atol=0.2)


FLOORS = {
    "F.normalize": "n = ReduceL2(v, last)  c = Clip(n, tiny)  t = Expand(c, shape)  y = Div(v, t) }",
    "F.normalize by sums": "n = ReduceL1(v, last)  c = Max(n, tiny)  y = Div(v, c) }",
    "a sum of magnitudes": "b = Abs(v)  n = ReduceSum(b, last)  c = Add(n, least)  y = Div(v, c) }",
    "a length and a number": "n = ReduceL2(v, last)  c = Add(least, n)  y = Div(v, c) }",
    "a root": "s = Mul(v, v)  m = ReduceSum(s, last)  n = Sqrt(m)  c = Clip(n, tiny)  y = Div(v, c) }",
    "F.cosine_similarity": """d = Mul(v, w)  a = ReduceSum<keepdims = 0>(d, last)  s = Mul(v, v)
        m = ReduceSum<keepdims = 0>(s, last)  q = Mul(w, w)  o = ReduceSum<keepdims = 0>(q, end)  p = Mul(m, o)
        n = Sqrt(p)  c = Max(n, tiny)  y = Div(a, c) }""",
}


@pytest.mark.parametrize("pure", [True, False], ids=["pure", "mixed"])
@pytest.mark.parametrize("name", FLOORS)
def test_float16_learns_beside_vectors_of_zeros(name: str, pure: bool) -> None:
    """A slope over 1e-12 is infinite there, and times what it does not count for it is NaN."""
    x = np.where(np.arange(3)[:, None] == 1, 0, X).astype(np.float32)
    found, right = (slope_of_w(FLOORS[name], x, dtype, pure) for dtype in ("float16", "float32"))
    np.testing.assert_allclose(found / 8, right, atol=5e-3 * np.abs(right).max())


def test_long_products_under_a_root_are_looked_through_once() -> None:
    main = amp.Program()
    with amp.program_guard(main, amp.Program("startup")):
        x = amp.data("x", [4], "float32")
        length = F.sum(x * x, axis=-1, keepdim=True)
        for _ in range(60):
            length = length * F.reshape(length, [1])
        for _ in range(2000):
            length = length * F.sum(x * x, axis=-1, keepdim=True)
        root = F.sqrt(length)
    mark_lengths(main)
    assert LENGTH in root.producer.metadata
