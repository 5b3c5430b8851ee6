"""Masks and other constants beyond 16 bit take the limit of the format where only their sign counts."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.passes.numerics.constraints import ConstantNote, Constraints
from amp_transpiler.program import Program
from tests.helpers.constraints_of import convert, gather, kept, of_constants, run_faithful, without_parameters
from tests.helpers.golden import program, run

FLT_MAX = 3.4028234663852886e38
TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def replaced(constraints: Constraints) -> dict[str, float]:
    return {v.name: limit for v, limit in constraints.replaced.items()}


HEAD = "main (float[2,4] x, bool[2,4] c, int64[2,4] seen, float[4,4] w) => (float[2,4] y)"
MASKS = {
    "where": "a = Where(c, x, low)  y = Softmax(a)",
    "where, then added": "a = Where(c, zero, low)  b = MatMul(x, w)  d = Add(b, a)  y = Softmax(d)",
    "one minus": "f = Cast<to = 1>(seen)  i = Sub(one, f)  m = Mul(i, low)  a = Add(x, m)  y = Softmax(a)",
    "truth times": "f = Cast<to = 1>(c)  m = Mul(low, f)  u = Expand(m, shape)  a = Add(u, x)  l = LogSoftmax(a)  y = Exp(l)",
    "subtracted": "f = Cast<to = 1>(c)  m = Mul(f, high)  a = Sub(x, m)  y = Softmax(a)",
    "scaled": "a = Where(c, x, low)  b = Div(a, eight)  y = Softmax(b)",
    "bounded": "a = Where(c, x, low)  b = Max(a, low)  y = Softmax(b)",
    "a maximum": "a = Where(c, x, low)  t = ReduceMax<keepdims = 1>(a, last)  y = Sigmoid(t)",
    "a minimum": "a = Where(c, x, high)  t = ReduceMin<keepdims = 1>(a, last)  n = Neg(t)  y = Sigmoid(n)",
    "the largest": "a = Where(c, x, low)  v, i = TopK(a, four)  y = Softmax(v)",
    "the smallest": "a = Where(c, x, high)  v, i = TopK<largest = 0>(a, four)  n = Neg(v)  y = Softmax(n)",
    "where the largest are": "a = Where(c, x, low)  v, i = TopK(a, four)  y = GatherElements<axis = -1>(x, i)",
    "told by a number that is near": "a = Where(c, x, low)  t, i = TopK(a, four)  k = Greater(t, low3)  y = Where(k, x, zero)",
    "a pooling border": "b = Unsqueeze(x, first)  a = Pad(b, pads, low)  d = MaxPool<kernel_shape = [3]>(a)  y = Squeeze(d, first)",
    "filled": "s = Shape(x)  a = ConstantOfShape<value = float[1] {-3.0e38}>(s)  t = Trilu(a)  b = Add(x, t)  y = Softmax(b)",
    "a softmax written out": """a = Where(c, x, low)  t = ReduceMax(a, last)  d = Sub(a, t)  e = Exp(d)
        s = ReduceSum(e, last)  y = Div(e, s)""",
    "inspected": "a = Where(c, x, low)  n = IsInf(a)  d = Where(n, zero, a)  y = Softmax(d)",
    "held in 32 bits by its author": "m = Where(c, zero, low)  f = Cast<to = 1>(m)  a = Add(x, f)  y = Softmax(a)",
    "out of a branch": """t = ReduceMax<keepdims = 0>(x)  k = Greater(t, one)
        m = If (k) <then_branch = t () => (float[2,4] tv) { tv = Where(c, zero, low) },
                    else_branch = e () => (float[2,4] ev) { ev = Identity(low2) }>
        a = Add(x, m)  y = Softmax(a)""",
}
#: Those to which something is added, and that share the range with it.
ADDED = frozenset({"where, then added", "one minus", "truth times", "subtracted", "filled", "a softmax written out"})
ADDED |= {"held in 32 bits by its author", "out of a branch"}
#: Those that no bfloat16 kernel reads, so that nothing of them is in bfloat16.
WIDE = frozenset(
    {"the largest", "the smallest", "where the largest are", "told by a number that is near", "a pooling border"}
)
CONSTANTS = """float low = {-3.4028235e38}, float high = {1e9}, float zero = {0}, float one = {1}, float eight = {8},
    int64[1] last = {-1}, int64[1] first = {0}, int64[1] four = {4}, int64[2] shape = {2, 4},
    float distant = {-5e4}, float low3 = {-99}, int64[6] pads = {0, 0, 2, 0, 0, 1}"""


def masked(text: str) -> Program:
    low2 = ", float[2,4] low2 = {0, -1e9, 0, 0, 0, 0, 0, -1e9}" if "low2" in text else ""
    return without_parameters(program(f"{HEAD}\n<{CONSTANTS}{low2}> {{ {text} }}"))


FEEDS = {
    "x": np.float32([[1, 2, 3, 4], [-1, 0, 1, -2]]),
    "c": np.array([[True, False, True, True], [False, True, False, False]]),
    "seen": np.array([[1, 1, 0, 0], [1, 0, 0, 1]]),
    "w": np.eye(4, dtype=np.float32),
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("pattern", MASKS)
def test_a_mask_takes_the_limit_of_the_format(pattern: str, dtype: str) -> None:
    p = masked(MASKS[pattern])
    expected = run(p, FEEDS)[0]
    constraints = of_constants(p, dtype)
    limit = (65504.0 if dtype == "float16" else 3.3895313892515355e38) / (2 if pattern in ADDED else 1)
    if dtype == "float16":
        assert constraints.replaced
        assert constraints.tensors == {}
    assert all(abs(value) == limit for value in constraints.replaced.values())
    assert len(constraints.constants) == len(constraints.replaced)
    for note in constraints.constants:
        assert note.action == f"takes {limit if note.worst > 0 else -limit:g} instead: it only masks"
    converted = convert(p, constraints, dtype)
    wide = pattern in WIDE and dtype == "bfloat16"
    if not wide:
        got = run_faithful(converted, FEEDS)[0]
        tolerance = 4e-3 if dtype == "float16" else 4e-2
        ordinary = np.abs(expected) < 1e4
        assert np.isfinite(got).all()
        assert np.allclose(got[ordinary], expected[ordinary], rtol=tolerance, atol=tolerance)
    left = of_constants(converted, dtype)
    assert left == Constraints() or (wide and left.replaced)  # the converted program has nothing left to say


def test_a_row_that_is_masked_throughout_is_no_nan() -> None:
    text = "b = MatMul(x, w)  a = Where(c, b, low)  y = Softmax(a)"
    p = masked(text)
    feeds = {**FEEDS, "c": np.array([[False] * 4, [True] * 4])}
    expected = run(p, feeds)[0]
    assert np.allclose(run_faithful(convert(p, of_constants(p)), feeds)[0], expected, atol=2e-3)
    assert np.allclose(expected[0], 0.25)


def test_a_row_that_is_masked_throughout_is_no_nan_below_scores_of_any_sign() -> None:
    p = masked("a = Where(c, zero, low)  b = MatMul(x, w)  d = Add(b, a)  y = Softmax(d)")
    feeds = {**FEEDS, "x": np.float32([[-300, -200, -400, -250]] * 2), "c": np.array([[False] * 4, [True] * 4])}
    expected = run(p, feeds)[0]
    assert np.allclose(expected[0], 0.25)  # -3.4e38 less 300 is -3.4e38
    got = run_faithful(convert(p, of_constants(p)), feeds)[0]
    assert np.isfinite(got).all() and np.allclose(got[1], expected[1], atol=2e-3)


COMPARED = {
    "to be told apart": """f = Cast<to = 1>(seen)  s = Add(corner, f)  e = Equal(s, zero)  a = Where(e, low, corner)
        b = Add(x, a)  y = Softmax(b)""",
    "greater": "k = Greater(corner, one)  n = Not(k)  a = Where(n, x, corner)  y = Softmax(a)",
    "below": "e = Less(corner, eight)  a = Where(e, corner, x)  y = Softmax(a)",
}


@pytest.mark.parametrize("pattern", COMPARED)
def test_a_mask_that_is_compared_with_a_number_is_one(pattern: str) -> None:
    """Decoders add what is padded to the mask of what is ahead, and look where 0 comes out."""
    held = "float[2,4] corner = {0, -3.4028235e38, 0, 0, 0, 0, -3.4028235e38, 0}"
    text = f"{HEAD}\n<{CONSTANTS}, {held}> {{ {COMPARED[pattern]} }}"
    p = without_parameters(program(text))
    expected, constraints = run(p, FEEDS)[0], of_constants(p)
    assert constraints.tensors == {} and "corner" in replaced(constraints)
    assert np.allclose(run_faithful(convert(p, constraints), FEEDS)[0], expected, atol=2e-3)


@pytest.mark.parametrize("other", ["x", "far"])
def test_a_mask_that_is_compared_with_what_may_be_as_far_is_none(other: str) -> None:
    held = "float[2,4] corner = {0, -3.4028235e38, 0, 0, 0, 0, -3.4028235e38, 0}, float far = {-1e37}"
    text = f"e = Less(corner, {other})  a = Where(e, corner, x)  y = Softmax(a)"
    p = without_parameters(program(f"{HEAD}\n<{CONSTANTS}, {held}> {{ {text} }}"))
    assert "corner" not in replaced(of_constants(p))


NO_MASKS = {
    "fetched": "y = Where(c, x, low)",
    "a maximum that is fetched": "a = Where(c, x, low)  y = ReduceMax<keepdims = 1>(a, last)",
    "a minimum that is fetched": "a = Where(c, x, high)  y = ReduceMin<keepdims = 1>(a, last)",
    "the largest, fetched": "a = Where(c, x, low)  y, i = TopK(a, four)",
    "the smallest, fetched": "a = Where(c, x, high)  y, i = TopK<largest = 0>(a, four)",
    "the largest, told by a number that is far": """a = Where(c, x, low)  v, i = TopK(a, four)  k = Greater(v, distant)
        y = Where(k, x, zero)""",
    "a maximum that is computed with": "a = Where(c, x, low)  t = ReduceMax<keepdims = 1>(a, last)  y = Mul(t, eight)",
    "a border as wide as the window": """b = Unsqueeze(x, first)  a = Pad(b, pads, low)
        d = MaxPool<kernel_shape = [2]>(a)  y = Squeeze(d, first)""",
    "a border and more in the window": """b = Unsqueeze(x, first)  a = Pad(b, pads, low)
        d = MaxPool<kernel_shape = [3], pads = [1, 0]>(a)  y = Squeeze(d, first)""",
    "multiplied": "a = Where(c, x, low)  y = MatMul(a, w)",
    "summed": "a = Where(c, x, low)  b = Softmax(a)  s = ReduceMin<keepdims = 1>(a, last)  y = Add(b, s)",
    "the smallest": "a = Where(c, x, low)  y = ReduceMin<keepdims = 1>(a, last)",
    "the wrong sign": "a = Where(c, x, high)  y = Softmax(a)",
    "enlarged": "a = Where(c, x, low)  b = Mul(a, eight)  y = Softmax(b)",
    "times a number": "m = Mul(x, low)  y = Softmax(m)",
    "out of a loop": """a = Where(c, x, low)  k = Cast<to = 9>(one)
        b = Loop (, k, a) <body = b (int64 i, bool go, float[2,4] s) => (bool on, float[2,4] n)
            { on = Not(go)  n = Neg(s) }>
        y = Softmax(b)""",
}


@pytest.mark.parametrize("pattern", NO_MASKS)
def test_what_may_be_more_than_a_mask_keeps_its_readers(pattern: str) -> None:
    p = masked(NO_MASKS[pattern])
    expected = run(p, FEEDS)[0]
    constraints = of_constants(p)
    assert constraints.replaced == {}
    name = "high" if "high" in NO_MASKS[pattern] else "low"
    assert [(n.name, n.problem, n.action) for n in constraints.constants] == [
        (name, "overflow", "what reads it stays fp32")
    ]
    first = next(op for op in p.operators if p.var(name) in op.inputs)
    assert str(constraints.on(first)) == f"constant '{name}' holds {constraints.constants[0].worst:g}, beyond fp16"
    converted = convert(p, constraints)
    assert np.allclose(run_faithful(converted, FEEDS)[0], expected, rtol=2e-3, atol=2e-3, equal_nan=True)


WIDE_MASKS = [
    ({}, -32752.0),
    ({"black_list": ["Where", "Softmax"], "white_list": ["Add"]}, -32752.0),  # a cast brings it into 16 bit
    ({"black_list": ["Where", "Softmax", "Add"]}, -FLT_MAX),
    ({"exclude": ["u", "v", "d"]}, -FLT_MAX),
]


@pytest.mark.parametrize(("kept", "value"), WIDE_MASKS)
def test_a_mask_that_stays_fp32_keeps_its_number(kept: dict[str, list[str]], value: float) -> None:
    text = "h = MatMul(x, w)  u = Where(c, zero, low)  v = Add(h, u)  d = Softmax(v)  y = MatMul(d, w)"
    done = amp.convert(masked(text).to_onnx(), **kept)  # type: ignore[arg-type]
    assert sum(op.precision == "float16" and op.type == "MatMul" for op in done.operators) == 2
    lowest = min(as_array(v.data).min() for v in done.variables if v.data is not None and "low" in v.name)
    assert lowest == value
    notes = [note.action for note in done.conversion.constants if note.name == "low"]
    assert notes == ([] if value == -FLT_MAX else ["takes -32752 instead: it only masks"])


def test_mixed_signs_are_no_mask() -> None:
    p = without_parameters(
        program("""main (float[2] x) => (float[2] y)
    <float[2] m = {-1e9, 1e9}> { a = Add(x, m)  y = Softmax(a) }""")
    )
    constraints = of_constants(p)
    assert constraints.replaced == {}
    assert set(kept(p, constraints)) == {"a", "y"}
    assert constraints.constants == [ConstantNote("m", "overflow", 2, 2, 1e9, "what reads it stays fp32")]


def test_check_constants_changes_nothing() -> None:
    p = masked(MASKS["where"])
    before = p.to_onnx().SerializeToString(deterministic=True)
    gather(p, guards=False)
    assert p.to_onnx().SerializeToString(deterministic=True) == before


TWO_MASKS = """main (float[2,4] x, bool[2,4] a, bool[2,4] b, float[4,4] w) => (float[2,4] y)
<float low = {-1000000000}, float zero = {0}>
{
  h = MatMul(x, w)
  m = Where(a, zero, low)
  n = Where(b, zero, low)
  both = Add(m, n)
  s = Add(h, both)
  y = Softmax(s)
}"""
MASKED = {
    "x": np.float32([[-30, -40, -20, -25], [1, 2, 3, 4]]),
    "w": np.eye(4, dtype=np.float32),
    "a": np.array([[False] * 4, [True, True, False, False]]),
    "b": np.array([[False] * 4, [True, False, True, False]]),
}


@pytest.mark.parametrize("beyond", [-1e9, -65504.0])
@pytest.mark.parametrize("sums", [1, 2, 3])
def test_masks_that_are_added_share_the_range(sums: int, beyond: float) -> None:
    """Up to four summands, the scores among them; what more of them make stays fp32 until the softmax."""
    more = "".join(f"  both{i} = Add(both{i - 1}, {'mn'[i % 2]})" for i in range(2, sums + 1))
    text = (
        TWO_MASKS.replace("-1000000000", f"{beyond:.0f}").replace("both", "both1").replace("h, both1", f"h, both{sums}")
    )
    p = without_parameters(program(text.replace("  s = ", f"{more}\n  s = ")))
    constraints = gather(p)
    assert {v.name: limit for v, limit in constraints.replaced.items()} == {"low": -16376.0}
    why = "adds masks in a sum of more than share the range of the format"
    assert kept(p, constraints) == ({"s": why, "y": f"after Add -> s: {why}"} if sums == 3 else {})
    expected = run(p, MASKED)[0]
    got = run_faithful(convert(p, constraints), MASKED)[0]
    assert np.isfinite(got).all()
    assert np.abs(got - expected)[1].max() < 2e-3  # a row that is masked throughout is arbitrary, but a number


def test_more_masks_than_share_the_range_stay_fp32_until_the_softmax() -> None:
    more = "  most = Sum(m, n, m, n, m)"
    p = without_parameters(program(TWO_MASKS.replace("  both = Add(m, n)", more).replace("h, both", "h, most")))
    constraints = gather(p)
    assert {v.name: limit for v, limit in constraints.replaced.items()} == {"low": -16376.0}
    why = "adds masks in a sum of more than share the range of the format"
    assert kept(p, constraints) == {"most": why, "s": why, "y": f"after Add -> s: {why}"}
    expected = run(p, MASKED)[0]
    got = run_faithful(convert(p, constraints), MASKED)[0]
    assert np.isfinite(got).all() and np.abs(got - expected)[1].max() < 2e-3
    unguarded = without_parameters(program(TWO_MASKS.replace("  both = Add(m, n)", more).replace("h, both", "h, most")))
    masks = Constraints(replaced=gather(unguarded).replaced)
    assert np.isnan(run_faithful(convert(unguarded, masks), MASKED)[0]).any()  # a row of minus infinity


@pytest.mark.parametrize(
    ("behind", "kept"),
    [
        ("y = LogSoftmax(a)", True),  # an output shows it
        ("l = LogSoftmax(a)  b = Add(l, m)  y = LogSoftmax(b)", True),
        ("l = LogSoftmax(a)  y = Exp(l)", False),
        ("l = LogSoftmax(a)  b = Add(l, m)  y = Softmax(b)", False),
    ],
)
def test_masks_go_on_behind_the_logarithm_of_a_softmax(behind: str, kept: bool) -> None:
    p = masked(f"f = Cast<to = 1>(c)  o = Sub(one, f)  m = Mul(o, low)  h = MatMul(x, w)  a = Add(h, m)  {behind}")
    expected = run(p, FEEDS)[0]
    done = amp.convert(p.to_onnx(), mode="pure")
    assert {op.precision for op in done.operators if op.type == "LogSoftmax"} == {"float32" if kept else "float16"}
    np.testing.assert_allclose(run_faithful(done, FEEDS)[0], expected, rtol=2e-3, atol=2e-3)
