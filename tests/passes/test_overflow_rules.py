"""Numeric guards: which operators stay fp32 in each pattern, and where that ends."""

from __future__ import annotations

import math
import sys

import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.ir.types import LIMITS
from amp_transpiler.passes.numerics.overflow_rules import FEW
from amp_transpiler.program import Program
from tests.helpers.constraints_of import convert, gather, kept, without_parameters
from tests.helpers.golden import program

SQUARES = "sums squares: x*x leaves fp16 beyond 255 and vanishes near 0"
OVER = {name: f"a quotient by '{name}', which may be 1e-05, " for name in ("m", "c")}
FLOORED = {
    "r": OVER["m"],
    "t": f"after Reciprocal -> r: {OVER['m']}",
    "i": OVER["c"],
    "u": f"after Div -> i: {OVER['c']}",
}
CONSTANTS = "float two = {2}, float three = {3}, float half = {0.5}, float one = {1}, float eps = {0.00001}"


def body(text: str, constants: str = "") -> Program:
    """A program of x [8, 512] and w [512, 512] whose result is y."""
    return without_parameters(
        program(f"""main (float[8,512] x, float[512,512] w) => (float[8,512] y)
    <{CONSTANTS}, int64[1] last = {{-1}}{constants}>
    {{ {text} }}""")
    )


# ---------------------------------------------------------------- squares

PATTERNS = {
    "variance": (
        """m = ReduceMean(x, last)  d = Sub(x, m)  p = Pow(d, two)  v = ReduceMean(p, last)
        e = Add(v, eps)  s = Sqrt(e)  n = Div(d, s)  y = MatMul(n, w)""",
        ["p", "v", "e", "s", "n"],
    ),
    "rms norm": (
        """p = Mul(x, x)  v = ReduceMean(p, last)  e = Add(v, eps)  s = Sqrt(e)  r = Reciprocal(s)
        n = Mul(x, r)  y = MatMul(n, w)""",
        ["p", "v", "e", "s", "r", "n"],
    ),
    "one over a root": (
        """p = Pow(x, two)  v = ReduceMean(p, last)  s = Pow(v, half)  r = Div(one, s)  g = Mul(r, three)
        n = Mul(g, x)  y = MatMul(n, w)""",
        ["p", "v", "s", "r", "g", "n"],
    ),
    "moments": (
        """p = Mul(x, x)  a = ReduceMean(p, last)  m = ReduceMean(x, last)  q = Mul(m, m)  v = Sub(a, q)
        s = Sqrt(v)  n = Div(x, s)  y = MatMul(n, w)""",
        ["p", "a", "m", "q", "v", "s", "n"],
    ),
    "L2 normalise": (
        """l = ReduceL2(x, last)  c = Clip(l, eps)  b = Expand(c, shape)  n = Div(x, b)  y = MatMul(n, w)""",
        ["l", "c", "b", "n"],
    ),
    "cosine similarity": (
        """l = ReduceL2(x, last)  z = Relu(x)  k = ReduceL2(z, last)  a = Mul(x, z)  m = Mul(l, k)  n = Div(a, m)
        y = MatMul(n, w)""",
        ["l", "k", "m", "n"],
    ),
    "distance": (
        "d = Sub(x, one)  p = Mul(d, d)  v = ReduceSum(p, last)  s = Sqrt(v)  n = Mul(s, x)  y = MatMul(n, w)",
        ["p", "v", "s"],
    ),
    "magnitude": (
        "r = Relu(x)  a = Pow(r, two)  b = Mul(x, x)  v = Add(a, b)  s = Sqrt(v)  y = MatMul(s, w)",
        ["a", "b", "v", "s"],
    ),
    "sum of squares": ("v = ReduceSumSquare(x, last)  s = Sqrt(v)  n = Mul(s, x)  y = MatMul(n, w)", ["v", "s"]),
    "LpNormalization": ("n = LpNormalization<p = 2>(x)  y = MatMul(n, w)", ["n"]),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_from_the_square_to_the_root_and_the_division(pattern: str, dtype: str) -> None:
    text, expected = PATTERNS[pattern]
    p = body(text, ", int64[2] shape = {8, 512}")
    assert sorted(kept(p, gather(p, dtype, guards=True))) == sorted(expected)


def test_reasons_name_the_pattern_and_where_it_began() -> None:
    p = body(PATTERNS["rms norm"][0])
    assert kept(p, gather(p)) == {
        "p": SQUARES,
        "v": f"after Mul -> p: {SQUARES}",
        "e": f"after Mul -> p: {SQUARES}",
        "s": f"after Mul -> p: {SQUARES}",
        "r": f"after Mul -> p: {SQUARES}",
        "n": f"after Mul -> p: {SQUARES}",
    }


FREE = {
    "a mean": "m = ReduceMean(x, last)  d = Sub(x, m)  y = MatMul(d, w)",
    "a square that nobody sums": "r = Relu(x)  p = Mul(r, r)  y = MatMul(p, w)",
    "softmax and its like": "s = Softmax(x)  l = LogSoftmax(s)  a = ReduceLogSumExp(l, last)  n = Sub(l, a)  y = MatMul(n, w)",
    "softmax written out": """t = ReduceMax(x, last)  d = Sub(x, t)  e = Exp(d)  s = ReduceSum(e, last)  n = Div(e, s)
        y = MatMul(n, w)""",
    "softmax by logarithms": "a = ReduceLogSumExp(x, last)  d = Sub(x, a)  e = Exp(d)  y = MatMul(e, w)",
    "norms": "n = LayerNormalization(x, g)  g = Relu(r)  r = Squeeze(q)  q = ReduceMax(x, first)  y = MatMul(n, w)",
    "roots": "a = Abs(x)  s = Sqrt(a)  h = Pow(s, half)  y = MatMul(h, w)",
}


@pytest.mark.parametrize("pattern", FREE)
def test_what_fits_is_free(pattern: str) -> None:
    p = body(
        FREE[pattern]
        .replace("g = Relu(r)  r = Squeeze(q)  q = ReduceMax(x, first)  ", "")
        .replace("(x, g)", "(x, scale)"),
        ", float[512] scale = {" + ",".join(["1"] * 512) + "}",
    )
    assert kept(p, gather(p)) == {}


# ---------------------------------------------------------------- powers, sums, exponentials: float16 alone

RANGE = {
    "a polynomial of either sign": (
        """c = Pow(x, three)  k = Mul(c, eps)  a = Sub(x, k)  b = Mul(a, half)  t = Tanh(b)  o = Add(t, one)
        h = Mul(x, half)  g = Mul(h, o)  y = MatMul(g, w)""",
        {
            "c": "raises to the power 3",
            "k": "after Pow -> c: raises to the power 3",
            "a": "after Pow -> c: raises to the power 3",
            "b": "after Pow -> c: raises to the power 3",
            "t": "after Pow -> c: raises to the power 3",
        },
    ),
    "a cube written out": (
        "q = Mul(x, x)  c = Mul(q, x)  t = Sigmoid(c)  y = MatMul(t, w)",
        {
            "q": "a square on the way to a higher power",
            "c": "multiplies a number by its square",
            "t": "after Mul -> c: multiplies a number by its square",
        },
    ),
    "a power of a tensor": (
        "p = Pow(x, x)  t = Sigmoid(p)  y = MatMul(t, w)",
        {"p": "raises to a power that is not constant", "t": "after Pow -> p: raises to a power that is not constant"},
    ),
    "a power over several numbers": (
        "p = Pow(x, three)  d = Div(p, several)  t = Tanh(d)  y = MatMul(t, w)",
        {
            "p": "raises to the power 3",
            "d": "after Pow -> p: raises to the power 3",
            "t": "after Pow -> p: raises to the power 3",
        },
    ),
    "a negative power": (
        "p = Pow(x, minus)  n = Mul(p, x)  y = MatMul(n, w)",
        {"p": "a negative power leaves fp16 near 0", "n": "after Pow -> p: a negative power leaves fp16 near 0"},
    ),
    "one over a floor": (
        "m = Max(x, eps)  r = Reciprocal(m)  t = Tanh(r)  c = Clip(x, eps)  i = Div(one, c)  u = Tanh(i)  y = Add(t, u)",
        {v: f"{words}leaves fp16" for v, words in FLOORED.items()},
    ),
    "a wide sum": (
        "s = ReduceSum(x, last)  n = Div(x, s)  y = MatMul(n, w)",
        {"s": "sums 512 elements", "n": "after ReduceSum -> s: sums 512 elements"},
    ),
    "a mean by division": (
        "s = ReduceSum(x, last)  m = Div(s, many)  d = Sub(x, m)  y = MatMul(d, w)",
        {"s": "sums 512 elements", "m": "after ReduceSum -> s: sums 512 elements"},
    ),
    "a mean by a factor": (
        "s = ReduceSum(x, last)  m = Mul(share, s)  d = Sub(x, m)  y = MatMul(d, w)",
        {"s": "sums 512 elements", "m": "after ReduceSum -> s: sums 512 elements"},
    ),
    "a running sum": (
        "s = CumSum(x, axis)  c = Clip(s, one, three)  y = MatMul(c, w)",
        {"s": "sums 512 elements", "c": "after CumSum -> s: sums 512 elements"},
    ),
    "a product": (
        "s = ReduceProd(x, last)  l = Log(s)  n = Mul(l, x)  y = MatMul(n, w)",
        {"s": "multiplies many elements", "l": "after ReduceProd -> s: multiplies many elements"},
    ),
    "a sigmoid written out": (
        "m = Neg(x)  e = Exp(m)  a = Add(e, one)  s = Div(one, a)  y = MatMul(s, w)",
        {
            "e": "an exponential leaves fp16 from 11.1 on",
            "a": "after Exp -> e: an exponential leaves fp16 from 11.1 on",
            "s": "after Exp -> e: an exponential leaves fp16 from 11.1 on",
        },
    ),
    # The product reads it in fp32; its result counts as an ordinary tensor again.
    "a wide operand of a product": (
        "e = Exp(x)  m = MatMul(e, w)  r = Relu(m)  y = MatMul(r, w)",
        {
            "e": "an exponential leaves fp16 from 11.1 on",
            "m": "after Exp -> e: an exponential leaves fp16 from 11.1 on",
        },
    ),
}
BOUNDS = {"one": (1.0, 1.0), "m": (1e-5, math.inf), "c": (1e-5, math.inf)}
MORE = ", float minus = {-0.5}, float many = {512}, float share = {0.001953125}, int64 axis = {1}"
MORE += ", float[8,1] several = {1, 2, 3, 4, 5, 6, 7, 8}"


@pytest.mark.parametrize("pattern", RANGE)
def test_what_leaves_float16_stays_fp32_until_it_is_back_in_range(pattern: str) -> None:
    text, expected = RANGE[pattern]
    p = body(text, MORE)
    assert kept(p, gather(p, **BOUNDS if "floor" in pattern else {})) == expected


@pytest.mark.parametrize("pattern", RANGE)
def test_bfloat16_has_the_range(pattern: str) -> None:
    p = body(RANGE[pattern][0], MORE)
    assert kept(p, gather(p, "bfloat16")) == {}


@pytest.mark.parametrize(("terms", "stays"), [(FEW, False), (FEW + 1, True), (None, True)])
def test_few_terms_are_no_more_than_as_many_additions(terms: int | None, stays: bool) -> None:
    size = terms or "N"
    p = program(f"""main (float[8,{size}] x) => (float[8,1] y) <int64[1] last = {{1}}>
    {{ r = Relu(x)  s = ReduceSum(r, last)  y = Neg(s) }}""")
    assert ("s" in kept(p, gather(p))) == stays


# ---------------------------------------------------------------- proofs

BOUNDED = [
    ("p = Pow(x, three)  y = MatMul(p, w)", {"p": (0.0, 8.0)}),
    ("p = Pow(x, x)  y = MatMul(p, w)", {"p": (0.0, 65504.0)}),
    ("s = ReduceSum(x, last)  n = Mul(s, x)  y = MatMul(n, w)", {"s": (-512.0, 512.0)}),
    ("e = Exp(x)  y = MatMul(e, w)", {"e": (0.0, 60000.0)}),
]


@pytest.mark.parametrize(("text", "intervals"), BOUNDED)
def test_a_proof_lifts_a_guard(text: str, intervals: dict[str, tuple[float, float]]) -> None:
    assert kept(body(text), gather(body(text), **intervals)) == {}
    name = next(iter(intervals))
    p = body(text)
    assert name in kept(p, gather(p, **{name: (0.0, 65505.0)}))


def test_a_proof_further_on_ends_what_is_wide() -> None:
    p = body("e = Exp(x)  c = Min(e, three)  n = Neg(c)  y = MatMul(n, w)")
    assert sorted(kept(p, gather(p, c=(0.0, 3.0)))) == ["c", "e"]
    assert sorted(kept(p, gather(p))) == ["c", "e", "n", "y"]


def test_a_proof_of_range_does_not_lift_the_guard_on_digits() -> None:
    p = body(PATTERNS["variance"][0])
    assert "p" in kept(p, gather(p, p=(0.0, 1.0), v=(0.0, 1.0)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_lies_wholly_beyond_the_format_stays_fp32(dtype: str) -> None:
    p = body("n = Neg(x)  a = Add(n, one)  t = Tanh(a)  y = MatMul(t, w)")
    limit = LIMITS[dtype].largest
    beyond = {"n": (1.01 * min(limit, 3.3e38), 3.4e38)} if dtype == "float16" else {"n": (3.395e38, 3.4e38)}
    short = {"float16": "fp16", "bfloat16": "bf16"}[dtype]
    found = kept(p, gather(p, dtype, **beyond))
    assert found["n"] == f"its values lie in [{beyond['n'][0]:g}, 3.4e+38], beyond {short}"
    assert sorted(found) == ["a", "n", "t"]


def test_a_declared_input_beyond_the_format_keeps_its_readers() -> None:
    p = body("m = Mul(x, eps)  c = Clip(m, one, three)  y = MatMul(c, w)")
    found = kept(p, gather(p, x=(1e5, 2e5)))
    assert found["m"] == "'x': its values lie in [100000, 200000], beyond fp16"
    assert sorted(found) == ["c", "m"]


# ---------------------------------------------------------------- nested graphs, converted programs

NESTED = """main (float[8,512] x, bool c, int64 n) => (float[8,512] y, float[8,1] z) <float two = {2}, int64[1] last = {1}>
{
  p = Pow(x, two)
  v = If (c) <
    then_branch = t () => (float[8,1] tv) { tv = ReduceSum(p, last) },
    else_branch = e () => (float[8,1] ev) { ev = ReduceMean(x, last) }
  >
  s = Sqrt(v)
  y = Div(x, s)
  z = Loop (n, , v) <
    body = b (int64 i, bool go, float[8,1] state) => (bool on, float[8,1] next)
    { on = Identity(go)  g = Neg(state)  k = Tanh(g)  next = Exp(k) }
  >
}"""


def test_nested_graphs() -> None:
    p = program(NESTED)
    found = kept(p, gather(p))
    assert found["p"] == SQUARES
    assert found["tv"] == found["s"] == f"after Pow -> p: {SQUARES}"
    # What the If gives is never stored in 16 bit, so the loop's state is not either; its exponential comes back in.
    assert set(found) == {"p", "v", "tv", "s", "y", "z", "g", "k", "next"}
    assert {"v", "state", "z"} <= {v.name for v in gather(p).tensors}


@pytest.mark.parametrize("text", [*(t for t, _ in PATTERNS.values()), *(t for t, _ in RANGE.values())])
def test_a_converted_program_gives_the_same_constraints(text: str) -> None:
    def once(p: Program) -> tuple[list[str], Program]:
        constraints = gather(p)
        labels = [f"{op.type} {constraints.on(op)}" for op in p.walk() if constraints.on(op)]
        return labels, convert(p, constraints)

    first, p = once(body(text, MORE + ", int64[2] shape = {8, 512}"))
    model = p.to_onnx()
    second, p = once(p)
    assert [line.split(" ")[0] for line in second] == [line.split(" ")[0] for line in first]
    assert p.to_onnx() == model


# ---------------------------------------------------------------- cost


def test_cost_is_linear() -> None:
    calls = {}
    for length in (250, 1000):
        steps = [
            f"a{i} = {('Exp', 'Neg', 'Identity')[i % 3]}(a{i - 1})  b{i} = Add(b{i - 1}, a{i})"
            for i in range(1, length)
        ]
        text = f"main (float[2] x) => (float[2] y) {{ a0 = Relu(x)  b0 = Mul(a0, a0) {' '.join(steps)} y = Sqrt(b{length - 1}) }}"
        p, count = program(text), 0

        def counted(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(counted)
        try:
            gather(p)
        finally:
            sys.setprofile(None)
        calls[length] = count
    assert calls[1000] < 4.2 * calls[250], calls


@pytest.mark.parametrize("mode", ["pure-fp16", "mixed", "auto"])
def test_a_matrix_product_with_a_single_number_is_no_traceback(mode: str) -> None:
    """ONNX forbids it, its shape inference does not see it."""
    text = '<ir_version: 10, opset_import: ["" : 21]> g (float[2,3] x) => (float[2,3] y) <float w = {2000}> { y = MatMul(x, w) }'
    program = amp.convert(onnx.parser.parse_model(text), mode=mode)
    assert [op.type for op in program.operators if op.type != "Cast"] == ["MatMul"]


@pytest.mark.parametrize(
    "magnitude",
    [
        "p = Mul(r, r)  m = ReduceSum<keepdims=0>(p, last)",
        "p = Pow(r, two)  s = ReduceSum<keepdims=0>(p, last)  t = Sqrt(s)  m = Mul(t, t)",
    ],
)
def test_a_spectrum_of_pairs_before_a_logarithm(magnitude: str) -> None:
    """Real and imaginary parts side by side, as constant-Q transforms have them: a rounded signal drowns its quiet bands."""
    text = f"c = MatMul(x, w)  r = Reshape(c, pairs)  {magnitude}  e = Add(m, eps)  y = Log(e)"
    spectrum = body(text, ", int64[3] pairs = {8, 256, 2}")
    assert {"c", "r", "p", "m"} <= set(kept(spectrum, gather(spectrum)))
