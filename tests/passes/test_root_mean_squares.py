"""Written-out RMS norms, mean squares and variances in 16 bit: no overflow, as exact as a row's rounding lets."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from tests.helpers.converting import behind_weights, faithful

FORMS = {
    "quotient": "i = Identity(r)  n = Div(x, i)",
    "one over": "i = Div(one, r)  n = Mul(x, i)",
    "reciprocal": "i = Reciprocal(r)  n = Mul(i, x)",
}


def rms(form: str, epsilon: float, opset: int, weight: bool = True, reduction: str = "ReduceMean") -> onnx.ModelProto:
    axes_are_read = opset >= (18 if reduction == "ReduceMean" else 13)
    mean = f"m = {reduction}(s, ax)" if axes_are_read else f"m = {reduction}<axes = [-1]>(s)"
    last = "y = Mul(n, w)" if weight else "y = Identity(n)"
    values = ", ".join(map(str, np.linspace(0.5, 2, 64)))
    text = f"""<ir_version: 8, opset_import: ["" : {opset}]> g (float[N, 5, 64] x) => (float[N, 5, 64] y)
        <float two = {{2}}, float one = {{1}}, float e = {{{epsilon:g}}}, int64[1] ax = {{-1}}, float[64] w = {{{values}}}> {{
            s = Pow(x, two)  {mean}  d = Add(m, e)  r = Sqrt(d)  {FORMS[form]}  {last}
        }}"""
    made: onnx.ModelProto = onnx.parser.parse_model(text)
    return made


def exact(x: np.ndarray, epsilon: float, weight: bool = True) -> np.ndarray:
    wide = x.astype(np.float64)
    scale = np.linspace(0.5, 2, 64) if weight else 1.0
    made: np.ndarray = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + epsilon) * scale
    return made


@pytest.mark.parametrize("opset", [10, 13, 20])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("weight", [True, False])
def test_rms_norms(form: str, opset: int, weight: bool) -> None:
    program = amp.convert(rms(form, 1e-6, opset, weight))
    casts = [op for op in program.walk() if op.type == "Cast"]
    assert len(casts) == 2 and not any(op.type in ("Pow", "Sqrt", "Reciprocal") for op in program.walk())
    assert sum(op.type == "Mul" for op in program.walk()) == 1, "a weight takes the root of the count in"
    rng = np.random.default_rng(0)
    for size in (1.0, 1e-3, 1000.0, 8000.0):
        x = (rng.standard_normal((2, 5, 64)) * size).astype(np.float16).astype(np.float32)
        (got,) = faithful(program, {"x": x})
        wanted = exact(x, 1e-6, weight)
        assert np.median(np.abs(got - wanted) / np.abs(wanted)) < 5e-4, size
    x = np.zeros((1, 5, 64), np.float32)
    x[0, 1, 3], x[0, 2] = 60000, 65504 / 10
    (got,) = faithful(program, {"x": x})
    np.testing.assert_allclose(got, exact(x, 1e-6, weight), rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("opset", [10, 13, 20])
@pytest.mark.parametrize("form", FORMS)
def test_a_sum_of_squares_and_an_epsilon(form: str, opset: int) -> None:
    """As gated delta nets write the lengths of queries and keys."""
    program = amp.convert(rms(form, 1e-4, opset, weight=False, reduction="ReduceSum"))
    assert sum(op.type == "Cast" for op in program.walk()) == 2
    assert not any(op.type in ("Pow", "Sqrt", "Reciprocal") for op in program.walk())
    rng = np.random.default_rng(0)
    for size in (1.0, 1e-2, 1000.0):
        x = (rng.standard_normal((2, 5, 64)) * size).astype(np.float16).astype(np.float32)
        (got,) = faithful(program, {"x": x})
        wide = x.astype(np.float64)
        wanted = wide / np.sqrt((wide**2).sum(-1, keepdims=True) + 1e-4)
        assert np.median(np.abs(got - wanted) / np.abs(wanted)) < 5e-4, size


def test_the_magnitude_of_a_spectrum_is_none_of_them() -> None:
    text = """<ir_version: 8, opset_import: ["" : 18]> g (float[N, 5, 2] x) => (float[N, 5, 1] y)
        <float two = {2}, float e = {1e-4}, int64[1] ax = {-1}> {
            s = Pow(x, two)  m = ReduceSum(s, ax)  d = Add(m, e)  r = Sqrt(d)  y = Log(r)
        }"""
    program = amp.convert(onnx.parser.parse_model(text))
    assert any(op.type == "Pow" and op.precision == "float32" for op in program.walk())


def test_an_epsilon_that_float16_loses_keeps_the_norm_as_it_is() -> None:
    program = amp.convert(rms("quotient", 1e-15, 17))
    assert any(op.type == "Pow" and op.precision == "float32" for op in program.walk())


def test_bfloat16_keeps_the_digits_of_a_row() -> None:
    program = amp.convert(rms("quotient", 1e-6, 17), dtype="bfloat16")
    assert any(op.type == "Pow" and op.precision == "float32" for op in program.walk())


def test_mean_squares_without_a_root() -> None:
    text = """<ir_version: 8, opset_import: ["" : 13]> g (float[3, 40] x) => (float[3] y) <float[1] c = {0.5}> {
        s = Mul(x, x)  m = ReduceMean<axes = [1], keepdims = 0>(s)  y = Mul(m, c)
    }"""
    program = amp.convert(onnx.parser.parse_model(text))
    assert sum(op.type == "Cast" for op in program.walk()) == 2
    x = (np.random.default_rng(0).standard_normal((3, 40)) * [[0.1], [1], [200]]).astype(np.float16).astype(np.float32)
    (got,) = faithful(program, {"x": x})
    np.testing.assert_allclose(got, 0.5 * (x.astype(np.float64) ** 2).mean(1), rtol=3e-3)


@pytest.mark.parametrize(("body", "share"), [("Mul(m, n)  y = Div(k, less)", 40 / 39), ("Mul(n, m)  y = Neg(k)", -40)])
def test_numbers_that_multiply_a_mean_square_are_one(body: str, share: float) -> None:
    """Times 40 a mean of 100² leaves float16, of which torch's variance is a 39th."""
    text = f"""<ir_version: 8, opset_import: ["" : 13]> g (float[3, 40] x) => (float[3] y) <float n = {{40}}, float less = {{39}}> {{
        s = Mul(x, x)  m = ReduceMean<axes = [1], keepdims = 0>(s)  k = {body}
    }}"""
    program = amp.convert(onnx.parser.parse_model(text))
    assert sum(op.type == "Cast" for op in program.walk()) == 2
    size = 100 if share > 0 else 10
    x = (np.random.default_rng(0).standard_normal((3, 40)) * size).astype(np.float16).astype(np.float32)
    (got,) = faithful(program, {"x": x})
    np.testing.assert_allclose(got, share * (x.astype(np.float64) ** 2).mean(1), rtol=3e-3)


def test_a_mean_square_that_something_is_divided_by_stays() -> None:
    """Twice a variance of 300² is beyond float16; a quotient by it is not."""
    text = """<ir_version: 8, opset_import: ["" : 13]> g (float[3, 40] x, float[3, 1] z) => (float[3, 1] y) <float two = {2}> {
        s = Mul(x, x)  m = ReduceMean<axes = [1]>(s)  d = Mul(two, m)  y = Div(z, d)
    }"""
    x = (np.random.default_rng(0).standard_normal((3, 40)) * [[1], [100], [300]]).astype(np.float16).astype(np.float32)
    z = np.array([[1], [100], [30000]], np.float32)
    (got,) = faithful(amp.convert(onnx.parser.parse_model(text)), {"x": x, "z": z})
    np.testing.assert_allclose(got, z / (2 * (x.astype(np.float64) ** 2).mean(1, keepdims=True)), rtol=3e-3)


def test_mean_squares_have_no_rounded_factor() -> None:
    """The root of 1 / 40 is 1.5e-4 off in float16, and counts twice in a square."""
    text = """<ir_version: 8, opset_import: ["" : 13]> g (float[300, 40] x) => (float[300] y) <float[1] c = {0.5}> {
        s = Mul(x, x)  m = ReduceMean<axes = [1], keepdims = 0>(s)  y = Mul(m, c)
    }"""
    x = np.random.default_rng(0).standard_normal((300, 40)).astype(np.float16).astype(np.float32)
    (got,) = faithful(amp.convert(onnx.parser.parse_model(text)), {"x": x})
    exact = 0.5 * (x.astype(np.float64) ** 2).mean(1)
    assert abs(np.mean(got / exact - 1)) < 1e-4


@pytest.mark.parametrize("opset", [11, 17, 20])
def test_layer_norms_over_several_dimensions(opset: int) -> None:
    axes = "axes = [-2, -1]" if opset < 18 else ""
    mean, tail = f"ReduceMean<{axes}>" if axes else "ReduceMean", "" if axes else ", ax"
    ones = ", ".join("1.5" for _ in range(12))
    text = f"""<ir_version: 8, opset_import: ["" : {opset}]> g (float[N, 3, 4] x) => (float[N, 3, 4] y)
        <float two = {{2}}, float e = {{1e-5}}, int64[2] ax = {{-2, -1}}, float[3, 4] w = {{{ones}}}, float[3, 4] b = {{{ones}}}> {{
            m = {mean}(x{tail})  d = Sub(x, m)  s = Pow(d, two)  v = {mean}(s{tail})  a = Add(v, e)  r = Sqrt(a)
            n = Div(d, r)  p = Mul(n, w)  y = Add(p, b)
        }}"""
    behind, weights = behind_weights(onnx.parser.parse_model(text))
    program = amp.convert(behind)
    assert [op.type for op in program.walk()] == ["Cast", "Mul", "LayerNormalization", "Cast"]
    assert program.opset() == max(opset, 17)
    x = (np.random.default_rng(0).standard_normal((2, 3, 4)) * 3000).astype(np.float16).astype(np.float32)
    (got,) = faithful(program, {"fed": x / weights})
    wide = x.astype(np.float64)
    wanted = (wide - wide.mean((1, 2), keepdims=True)) / wide.std((1, 2), keepdims=True) * 1.5 + 1.5
    np.testing.assert_allclose(got, wanted, rtol=2e-3, atol=2e-3)


def test_the_mean_in_a_difference_of_squares() -> None:
    """The variance as TensorFlow writes it: E[x²] - E[x]², of a mean that is large beside the deviation."""
    text = """<ir_version: 10, opset_import: ["" : 17]>
    m (float[4,64] x) => (float[4,64] y) <float n = {0.015625}, float eps = {0.000001}, int64[1] axis = {-1}>
    { s = ReduceSum(x, axis) mean = Mul(s, n) q = Mul(x, x) sq = ReduceSum(q, axis) e = Mul(sq, n)
      m2 = Mul(mean, mean) v = Sub(e, m2) ve = Add(v, eps) d = Sqrt(ve) c = Sub(x, mean) y = Div(c, d) }"""
    model = onnx.parser.parse_model(text)
    x = (np.random.default_rng(0).standard_normal((4, 64)) + 30).astype(np.float32)
    program = amp.convert(model)
    kept = {op.outputs[0].name for op in program.operators if op.precision == "float32" and op.type != "Cast"}
    assert {"s", "mean", "q", "sq", "e", "m2", "v", "ve", "d"} <= kept
    got, want = (
        amp.Executor(amp.CPUPlace()).run(p, feed={"x": x}, fetch_list=["y"])[0]
        for p in (program, amp.Program.from_onnx(model))
    )
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < 0.02


#: Deviations as torch exports them: means without their dimension, which a Reshape puts back, times 64 and over 63.
DEVIATIONS = {
    "by one less": "v6 = Mul(v1, n)  v2 = Div(v6, less)  v = Reshape(v2, sizes)  r = Sqrt(v)  below = Add(r, e)",
    "by one less, at once": "v2 = Mul(more, v1)  v = Reshape(v2, sizes)  r = Sqrt(v)  below = Add(r, e)",
    "unsqueezed": "v2 = Mul(v1, more)  v = Unsqueeze(v2, ax)  r = Sqrt(v)  below = Add(r, e)",
    "by all": "v = Reshape(v1, sizes)  r = Sqrt(v)  below = Add(r, e)",
    "epsilon under the root": "v2 = Mul(v1, more)  v = Reshape(v2, sizes)  ve = Add(v, e)  below = Sqrt(ve)",
}


def deviation(form: str, epsilon: float = 1e-5) -> onnx.ModelProto:
    head = f"float n = {{64}}, float less = {{63}}, float more = {{{64 / 63}}}, float minus = {{-0.5}}, float e = {{{epsilon}}}"
    text = f"""<ir_version: 8, opset_import: ["" : 18]> g (float[2, 5, 64] x) => (float[2, 5, 64] y)
        <{head}, int64[1] ax = {{-1}}, int64[3] sizes = {{2, 5, 1}}> {{
            m = ReduceMean(x, ax)  d = Sub(x, m)  s = Mul(d, d)  v1 = ReduceMean <keepdims = 0> (s, ax)
            {form}  q = Div(d, below)  back = Mul(q, below)  y = Add(q, back)
        }}"""
    made: onnx.ModelProto = onnx.parser.parse_model(text)
    return made


@pytest.mark.parametrize("form", DEVIATIONS)
def test_deviations_by_which_is_divided_and_scaled_back(form: str) -> None:
    program = amp.convert(deviation(DEVIATIONS[form]))
    assert sum(op.type == "Cast" for op in program.walk()) == 3, "the score and the deviation, and the output"
    assert not any(op.type in ("Sqrt", "Reshape", "LayerNormalization") for op in program.walk())
    rng = np.random.default_rng(0)
    for size in (1.0, 1e-2, 500.0):
        x = (rng.standard_normal((2, 5, 64)) * size).astype(np.float16).astype(np.float32)
        wide = x.astype(np.float64)
        d = wide - wide.mean(-1, keepdims=True)
        variance = (d**2).sum(-1, keepdims=True) / (64 if form == "by all" else 63)
        under = form == "epsilon under the root"
        below = np.sqrt(variance + 1e-5) if under else np.sqrt(variance) + 1e-5
        (got,) = faithful(program, {"x": x})
        assert np.linalg.norm(got - d / below - d) < 2e-3 * np.linalg.norm(d / below + d), size


@pytest.mark.parametrize(
    "form",
    [
        "v2 = Mul(v1, minus)  v = Reshape(v2, sizes)  ve = Sub(e, v)  below = Sqrt(ve)",
        "v2 = Sub(more, v1)  v = Reshape(v2, sizes)  ve = Add(v, e)  below = Sqrt(ve)",
        "v2 = Div(more, v1)  v = Reshape(v2, sizes)  ve = Add(v, e)  below = Sqrt(ve)",
        "k = ReduceMax <keepdims = 0> (x, ax)  v2 = Mul(v1, k)  v = Reshape(v2, sizes)  ve = Add(v, e)  below = Sqrt(ve)",
        "v = Reshape(v1, sizes)  ve = Add(v, minus)  below = Sqrt(ve)",
        "v = Reshape(v1, sizes)  ve = Add(v, e)  w = Mul(ve, n)  below = Sqrt(w)",
    ],
)
def test_what_is_no_deviation_keeps_its_root(form: str) -> None:
    assert any(op.type == "Sqrt" for op in amp.convert(deviation(form)).walk())


@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("shape", ["N, 5, 4096", "N, 48, 16, 16"])
def test_a_row_may_be_long(shape: str, weight: bool) -> None:
    """The norm of 4096 numbers leaves float16 where their root mean square is 1023, and what it divided was 0."""
    axes, row = ("-1", (4096,)) if shape.endswith("4096") else ("1, 2, 3", (48, 16, 16))
    last = "y = Mul(n, w)" if weight else "y = Identity(n)"
    text = f"""<ir_version: 8, opset_import: ["" : 17]> g (float[{shape}] x) => (float[{shape}] y)
        <float two = {{2}}, float e = {{1e-6}}, float[1] w = {{1.5}}> {{
            s = Pow(x, two)  m = ReduceMean<axes = [{axes}]>(s)  d = Add(m, e)  r = Sqrt(d)  n = Div(x, r)  {last}
        }}"""
    program = amp.convert(onnx.parser.parse_model(text))
    assert sum(op.type == "Cast" for op in program.walk()) == 2
    rng = np.random.default_rng(0)
    for size in (1e-3, 1.0, 4000.0):
        x = rng.standard_normal((2, 5, *row) if len(row) == 1 else (2, *row)) * size
        x = x.astype(np.float16).astype(np.float32)
        (got,) = faithful(program, {"x": x})
        over = tuple(range(-len(row), 0))
        wanted = x / np.sqrt((x.astype(np.float64) ** 2).mean(over, keepdims=True) + 1e-6) * (1.5 if weight else 1)
        np.testing.assert_allclose(got, wanted, rtol=2e-3, atol=1e-5)


def test_a_mean_square_of_many_numbers() -> None:
    """Their norm leaves float16 before the mean does: that of 400,000 from a root mean square of 104 on."""
    text = """<ir_version: 8, opset_import: ["" : 13]> g (float[3, 400, 1000] x) => (float[3, 1, 1] y) <float c = {0.5}> {
        s = Mul(x, x)  m = ReduceMean<axes = [1, 2]>(s)  y = Mul(m, c)
    }"""
    program = amp.convert(onnx.parser.parse_model(text))
    assert not any(op.precision == "float32" for op in program.walk() if op.type == "ReduceL2")
    x = np.random.default_rng(0).uniform(-1, 1, (3, 400, 1000)) * [[[0.1]], [[10]], [[300]]]
    x = x.astype(np.float16).astype(np.float32)
    (got,) = faithful(program, {"x": x})
    np.testing.assert_allclose(got, 0.5 * (x.astype(np.float64) ** 2).mean((1, 2), keepdims=True), rtol=2e-3)
