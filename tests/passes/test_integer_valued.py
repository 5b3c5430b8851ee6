"""Float arithmetic on shapes, lengths and positions is found, and nothing else is."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.passes.numerics.integer_valued import keep_integer_valued
from amp_transpiler.passes.view.flow import Flow
from tests.helpers.converting import faithful

HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'


def kept(text: str) -> dict[str, str]:
    """Reasons by the name of what the operator makes."""
    program = amp.Program.from_onnx(onnx.parser.parse_model(HEAD + text))
    for parameter in program.parameters:  # as in a conversion
        parameter.persistable = parameter.trainable = False
    constraints = Constraints()
    keep_integer_valued(Flow(program), constraints)
    return {getattr(op.outputs[0], "name", ""): str(reason) for op, reason in constraints.operators.items()}


CASES = {
    "frame count": (
        """m (float[1,N] audio) => (int64[1] frames) <float hop = {160}>
        { s = Shape(audio)  f = Cast<to=1>(s)  q = Div(f, hop)  c = Ceil(q)  frames0 = Cast<to=7>(c)
          ends = Constant<value_ints=[2]>() begins = Constant<value_ints=[1]>() frames = Slice(frames0, begins, ends) }""",
        {"q": "integer-valued", "c": "integer-valued"},
    ),
    "rotary embedding": (
        """m (int64[1,S] p, float[1,S,4] x) => (float[1,S,4] y) <float[4,1] inv = {1.0, 0.1, 0.01, 0.001}>
        { f = Cast<to=1>(p)  a = MatMul(inv, f)  t = Transpose<perm=[1,0]>(a)  c = Cos(t)  y = Mul(x, c) }""",
        {"a": "integer-valued", "t": "integer-valued", "c": "integer-valued"},
    ),
    "a length that is compared": (
        """m (int32[N] lengths, float[1,T] x) => (bool[N,T] keep) <float one = {1}, float zero = {0}, float far = {300}>
        { l = Cast<to=1>(lengths)  i = NonZero(x)  row = Squeeze(i)  r = Cast<to=1>(row)  keep0 = Less(r, l)
          same = Equal(r, far)  start = Equal(r, zero)  next = Add(l, one)  after = Greater(next, far)
          low = Less(zero, next)  some = Or(same, start)  more = Or(after, low)  all = And(some, more)
          keep = And(keep0, all) }""",
        {name: "integer-valued" for name in ("keep0", "same", "next", "after")},
    ),
    "length that becomes an index": (
        """m (float[4] length) => (int64[4] y) <float two = {2}>
        { h = Div(length, two)  f = Floor(h)  y = Cast<to=7>(f) }""",
        {"h": "becomes an integer", "f": "becomes an integer"},
    ),
    "the side of a square, left to compute": (
        """m () => (int64 y) <float count = {16}, float half = {0.5}> { s = Pow(count, half)  y = Cast<to=7>(s) }""",
        {"s": "becomes an integer"},
    ),
    "a duration that a network computes": (
        """m (float[4,8] x) => (int64[4,8] y) <float[8,8] w = {WEIGHTS}>
        { d = MatMul(x, w)  e = Exp(d)  r = Round(e)  y = Cast<to=7>(r) }""",
        {"r": "becomes an integer"},
    ),
    "a duration that is a sum of shares": (
        """m (float[4,8] x) => (int64[4] y) <int64[1] last = {1}, float speed = {1.1}>
        { p = Sigmoid(x)  s = ReduceSum<keepdims=0>(p, last)  q = Div(s, speed)  r = Round(q)  y = Cast<to=7>(r) }""",
        {"s": "becomes an integer", "q": "becomes an integer", "r": "becomes an integer"},
    ),
    "an image in bytes": (
        """m (uint8[1,3,4,4] image) => (float[1,3,4,4] y) <float scale = {255}>
        { f = Cast<to=1>(image)  y = Div(f, scale) }""",
        {},
    ),
    "bytes of a file as data": (
        """m (int32[4,8] bytes) => (float[4,8] y) <float[8,8] w = {WEIGHTS}>
        { f = Cast<to=1>(bytes)  y = MatMul(f, w) }""",
        {},
    ),
    "a network": (
        """m (float[4,8] x, int64[4] i) => (float[4,8] y) <float[8,8] w = {WEIGHTS}>
        { g = Gather(w, i)  h = MatMul(x, w)  a = Add(g, h)  y = Relu(a) }""",
        {},
    ),
    "quantised by a scale that is computed": (
        """m (float[4] x) => (uint8[4] y) <float top = {255}>
        { a = ReduceMax<keepdims=0>(x)  s = Div(a, top)  y = QuantizeLinear(x, s) }""",
        {"s": "becomes an integer", "a": "becomes an integer", "y": "becomes an integer"},
    ),
    "quantised by a constant": ("m (float[4] x) => (uint8[4] y) <float s = {0.1}> { y = QuantizeLinear(x, s) }", {}),
    "inside a loop": (
        """m (int64 n, bool c, float[2] x) => (float[2] y)
        { y = Loop(n, c, x) <body = b (int64 i, bool ci, float[2] s) => (bool co, float[2] so)
            <float step = {0.1}> { co = Identity(ci)  f = Cast<to=1>(i)  t = Mul(f, step)  so = Add(s, t) }> }""",
        {"t": "integer-valued"},
    ),
}


MOVERS = {
    "Compress": "moved = Compress(f, chosen)",
    "CenterCropPad": "moved = CenterCropPad<axes=[0]>(f, size)",
    "Concat": "moved = Concat<axis=0>(f, f)",
    "Dropout": "moved = Dropout(f)",
    "Expand": "moved = Expand(f, shape)",
    "GatherND": "moved = GatherND(f, index)",
    "Identity": "moved = Identity(f)",
    "ReverseSequence": "moved = ReverseSequence<batch_axis=1, time_axis=0>(f, size)",
    "ScatterND": "moved = ScatterND(zeros, index, f)",
    "Split": "moved, rest = Split<num_outputs=2>(f)",
    "Trilu": "moved = Trilu(f)",
    "Unsqueeze": "moved = Unsqueeze(f, size)",
}


@pytest.mark.parametrize("cast", ["Cast<to=1>(p)", "CastLike(p, half)"])
@pytest.mark.parametrize("mover", MOVERS)
def test_positions_that_are_moved_stay_positions(mover: str, cast: str) -> None:
    """As position ids that a model reverses, or writes into a buffer, before it computes with them."""
    found = kept(f"""m (int64[4,1] p) => (float[N] y)
      <float half = {{0.5}}, int64[1] size = {{1}}, int64[2] shape = {{4, 3}}, bool[1] chosen = {{1}},
       int64[4,1] index = {{3, 2, 1, 0}}, float[4,1] zeros = {{0, 0, 0, 0}}>
      {{ f = {cast}  {MOVERS[mover]}  m = Mul(moved, half)  y = Cos(m) }}""")
    assert set(found) == {"moved", "m", "y"}


@pytest.mark.parametrize("name", CASES)
def test_what_counts(name: str) -> None:
    text, expected = CASES[name]
    found = kept(text.replace("WEIGHTS", ", ".join(["0.5"] * 64)))
    assert {made: reason.split(" in ")[0].split(":")[0] for made, reason in found.items()} == expected


def test_a_converted_program_counts_the_same() -> None:
    text = HEAD + CASES["rotary embedding"][0]
    once = amp.convert(onnx.parser.parse_model(text), numeric_guards=False)
    constraints = Constraints()
    keep_integer_valued(Flow(once), constraints)
    assert [op.type for op in constraints.operators] == ["MatMul", "Transpose", "Cos"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_length_is_what_its_mask_adds_up_to(dtype: str) -> None:
    """Of odd numbers beyond 2048 float16 holds none, bfloat16 of those beyond 256."""
    text = """m (bool[2,2600] mask, float[2600,8] x) => (int64[2] length, float[2,8] y) <int64[1] last = {1}> {
      f = Cast<to = 1>(mask)  n = ReduceSum<keepdims = 0>(f, last)  length = Cast<to = 7>(n)  y = MatMul(f, x) }"""
    program = amp.convert(onnx.parser.parse_model(HEAD + text), dtype=dtype)
    lengths = np.array([2051, 307])
    feed = {"mask": np.arange(2600) < lengths[:, None], "x": np.ones((2600, 8), np.float32)}
    assert faithful(program, feed)[0].tolist() == lengths.tolist()


MASK = """m (int64[1,1,1,4] mask, float[1,2,4,4] x) => (float[1,2,4,4] y) <float one = {1}, float low = {-3.4028235e38}> {
  f = Cast<to = 1>(mask)  inverse = Sub(one, f)  hidden = Cast<to = 9>(inverse)  m = Where(hidden, low, inverse)
  z = Constant<value_ints = [0]>()  n = Constant<value_ints = [4]>()  d = Constant<value_ints = [3]>()
  a = Slice(m, z, n, d)  s = MatMul(x, x)  t = Add(s, a)  p = Softmax(t)
  b = Slice(m, z, n, d)  u = MatMul(p, x)  v = Add(u, b)  y = Softmax(v) }"""


def test_a_mask_that_leaves_of_its_integers_but_zeros_is_none() -> None:
    """As torch's masked_fill of an inverted mask; of other integers what is left counts on."""
    assert set(kept(MASK)) == {"inverse", "m"}
    other = MASK.replace("low, inverse)", "low, f)")
    assert set(kept(other)) == {"inverse", "m", "a", "b"}


def test_such_a_mask_is_cast_once_for_all_layers() -> None:
    model = onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 17]>' + MASK)
    program = amp.convert(model, keep_io=False)
    assert [op.inputs[0].name for op in program.operators if op.inserted and op.inputs[0] is not None] == ["m"]
    x = np.random.default_rng(0).standard_normal((1, 2, 4, 4)).astype(np.float16)
    feed = {"mask": np.array([1, 1, 0, 1]).reshape(1, 1, 1, 4), "x": x}
    (y,) = amp.Executor(amp.CPUPlace()).run(program, feed=feed, fetch_list=["y"])
    assert (y[..., 2] == 0).all() and np.allclose(y.sum(-1), 1, atol=2e-3)


def test_a_sum_of_integer_products_is_no_16_bit_number() -> None:
    """As in a quantised layer: 1,024 products of bytes are 66,585,600 before the scale."""
    model = onnx.parser.parse_model(
        HEAD
        + """m (uint8[1,1024] a, uint8[1024,1] w, float scale, int32[1] bias) => (float[1,1] y)
        { s = MatMulInteger(a, w)  b = Add(s, bias)  f = Cast<to=1>(b)  m = Mul(f, scale)  y = Neg(m) }"""
    )
    program = amp.convert(model)
    feeds = {"a": np.full((1, 1024), 255, np.uint8), "w": np.full((1024, 1), 255, np.uint8)}
    feeds |= {"scale": np.float32(1e-5), "bias": np.ones(1, np.int32)}
    (y,) = amp.Executor().run(program, feed=feeds, fetch_list=["y"], scope=amp.Scope())
    np.testing.assert_allclose(y, -665.856, rtol=1e-3)
    assert {op.type: op.precision for op in program.operators if op.type in ("Cast", "Mul")} == {
        "Cast": "float32",
        "Mul": "float32",
    }


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("weight", ["Sub(x, f)", "Sub(x, n)", "Sub(next, x)"])
def test_a_table_is_read_between_two_places(weight: str, dtype: str) -> None:
    """The fraction of a place in it is a weight: of 2000.4 float16 has left 0, and bfloat16 8 from the next integer."""
    size = 3000
    text = f"""m (float[50] x, float[{size}] table) => (float[50] y) <float one = {{1}}, int64 first = {{1}}> {{
        f = Floor(x)  i = Cast<to=7>(f)  n = Cast<to=1>(i)  j = Add(i, first)  next = Add(f, one)
        a = Gather(table, i)  b = Gather(table, j)  w = {weight}  v = Sub(one, w)
        p = Mul(a, {"w" if "next" in weight else "v"})  q = Mul(b, {"v" if "next" in weight else "w"})  y = Add(p, q) }}"""
    random = np.random.default_rng(0)
    x = (random.uniform(0, size - 2, 50)).astype(np.float32)
    table = random.standard_normal(size).astype(np.float32)
    program = amp.convert(onnx.parser.parse_model(HEAD + text), dtype=dtype)
    reasons = {op.outputs[0].name: op.reason for op in program.operators if op.outputs[0] is not None}
    assert reasons["w"] == "fp32: the fraction of what becomes an integer in 'i'"
    (got,) = amp.Executor(threads=1).run(program, feed={"x": x, "table": table}, fetch_list=["y"])
    np.testing.assert_allclose(got, np.interp(x, np.arange(size), table), atol=0.003 if dtype == "float16" else 0.03)
