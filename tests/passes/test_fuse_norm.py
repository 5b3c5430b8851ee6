"""Layer norms as TensorFlow writes them out: x s + (b - m s), where s is the scale by the deviation; as Flax does,
whose variance is the mean of x² less the square of the mean; and as jax2onnx does Equinox's, with a mean of squares in
float64 and 0 selected in rows of equal numbers."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import amp_transpiler as amp
from tests.helpers.converting import behind_weights, off

#: One of Keras 3 over a GlobalAveragePool, one of ``tf.nn.batch_normalization`` with operands swapped, one set of weights.
NORMS = """<ir_version: 8, opset_import: ["" : 17]>
net (float[2,4,6] x) => (float[2,4,6] y)
  <float[1,1,6] g = {0.5, 1.0, 1.5, 2.0, 0.7, 0.9}, float[1,1,6] b = {0.1, 0.2, 0.3, -0.1, -0.2, -0.3}, float eps = {1e-12}>
{
  m = GlobalAveragePool(x)
  neg = Neg(m)
  d = Sub(x, m)
  s = Mul(d, d)
  v = GlobalAveragePool(s)
  ve = Add(v, eps)
  r = Sqrt(ve)
  i = Reciprocal(r)
  k = Mul(i, g)
  xk = Mul(x, k)
  mk = Mul(neg, k)
  shift = Add(mk, b)
  o = Add(xk, shift)
  h = Relu(o)
  m2 = ReduceMean <axes = [2]> (h)
  d2 = Sub(h, m2)
  s2 = Mul(d2, d2)
  v2 = ReduceMean <axes = [2]> (s2)
  ve2 = Add(eps, v2)
  r2 = Sqrt(ve2)
  i2 = Reciprocal(r2)
  k2 = Mul(g, i2)
  mk2 = Mul(k2, m2)
  shift2 = Sub(b, mk2)
  xk2 = Mul(k2, h)
  y = Add(shift2, xk2)
}"""
#: The same with weights for each, as they are trained.
APART = NORMS.replace("k2 = Mul(g,", "k2 = Mul(g2,").replace("Sub(b,", "Sub(b2,")
APART = APART.replace(
    "float eps", "float[1,1,6] g2 = {1, 2, 3, 4, 5, 6}, float[1,1,6] b2 = {6, 5, 4, 3, 2, 1}, float eps"
)
FLAX = """<ir_version: 8, opset_import: ["" : 18]>
net (float[2,4,6] x) => (float[2,4,6] y)
  <float[6] g = {0.5, 1.0, 1.5, 2.0, 0.7, 0.9}, float[6] b = {0.1, 0.2, 0.3, -0.1, -0.2, -0.3}, float eps = {1e-6},
   float zero = {0}, int64[1] last = {-1}>
{
  m = ReduceMean(x, last)
  d = Sub(x, m)
  xx = Mul(x, x)
  second = ReduceMean(xx, last)
  mm = Mul(m, m)
  v = Sub(second, mm)
  floored = Max(v, zero)
  ve = Add(floored, eps)
  r = Sqrt(ve)
  n = Div(d, r)
  ng = Mul(n, g)
  y = Add(ng, b)
}"""
EQUINOX = """<ir_version: 8, opset_import: ["" : 18]>
net (float[2,4,6] x) => (float[2,4,6] y)
  <float[6] g = {0.5, 1.0, 1.5, 2.0, 0.7, 0.9}, float[6] b = {0.1, 0.2, 0.3, -0.1, -0.2, -0.3}, float eps = {1e-6},
   float zero = {0}, int64[1] last = {-1}, int64[1] middle = {1}>
{
  m = ReduceMean(x, last)
  d = Sub(x, m)
  least = ReduceMin(x, last)
  largest = ReduceMax(x, last)
  equal = Equal(least, largest)
  nothing = Sub(m, m)
  finite = Equal(nothing, zero)
  constant = And(equal, finite)
  stable = Where(constant, zero, d)
  s = Mul(stable, stable)
  wide = Cast <to = 11> (s)
  mean = ReduceMean(wide, last)
  v = Cast <to = 1> (mean)
  ve = Add(v, eps)
  r = Sqrt(ve)
  n = Div(stable, r)
  ng = Mul(n, g)
  y = Add(ng, b)
}"""
#: What leaves float16 when it is squared, around a mean that leaves x s and m s beyond what cancels out in it.
X = np.random.default_rng(0).normal(3000, 400, (2, 4, 6)).astype(np.float32)


def served(model: onnx.ModelProto) -> np.ndarray:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(["y"], {"x": X})[0])


def assert_one_layer_norm(model: onnx.ModelProto) -> None:
    """A conversion and a training find one, and the conversion computes what the model does."""
    converted = amp.convert(model)
    assert [op.type for op in converted.operators if op.type != "Cast"] == ["LayerNormalization"]
    assert off(served(converted.to_onnx()), served(model)) < 4e-3
    program = amp.Program.from_onnx(model)
    assert set(amp.prepare_training(program).trainable) == {"g", "b"}
    assert [op.type for op in program.operators] == ["LayerNormalization"]


def test_one_operator_in_a_conversion() -> None:
    model = onnx.parser.parse_model(NORMS)
    program = amp.convert(model)
    assert [op.type for op in program.operators if op.type != "Cast"] == [
        "LayerNormalization",
        "Relu",
        "LayerNormalization",
    ]
    converted = program.to_onnx()
    onnx.checker.check_model(converted, full_check=True)
    assert len(converted.graph.initializer) == 2 * 2, "a scale and a bias of one dimension for each"
    assert off(served(converted), served(model)) < 4e-3


def test_an_older_opset_is_raised_for_it() -> None:
    program = amp.convert(onnx.parser.parse_model(NORMS.replace('"" : 17', '"" : 13')))
    assert [op.type for op in program.operators if op.type != "Cast"] == [
        "LayerNormalization",
        "Relu",
        "LayerNormalization",
    ]


def test_one_operator_in_training() -> None:
    """Its weights keep the dimensions that TensorFlow puts before them, by which a checkpoint knows them."""
    program = amp.Program.from_onnx(onnx.parser.parse_model(APART))
    told = amp.prepare_training(program)
    program.verify()
    left = [op.type for op in program.operators if op.type != "Reshape"]
    assert left == ["LayerNormalization", "Relu", "LayerNormalization"]
    assert len(told.trainable) == 4 and all(v.shape == (1, 1, 6) for v in program.parameters)
    scope, executor = amp.Scope(), amp.Executor(threads=1)
    executor.run(program.startup, scope=scope)
    (found,) = executor.run(program, feed={"x": X}, fetch_list=["y"], scope=scope)
    np.testing.assert_allclose(found, served(onnx.parser.parse_model(APART)), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "change",
    [
        ("", ""),
        ("Max(v, zero)", "Max(zero, v)"),
        ("floored = Max(v, zero)\n  ve = Add(floored, eps)", "ve = Add(v, eps)"),
    ],
)
def test_a_variance_from_a_mean_of_squares(change: tuple[str, str]) -> None:
    assert change[0] in FLAX
    assert_one_layer_norm(onnx.parser.parse_model(FLAX.replace(*change)))


@pytest.mark.parametrize(
    "change",
    [
        ("mm = Mul(m, m)", "mm = Mul(m, second)"),
        ("mm = Mul(m, m)", "mm = Mul(second, second)"),
        ("v = Sub(second, mm)", "v = Sub(mm, second)"),
        ("xx = Mul(x, x)", "xx = Mul(d, d)"),
        ("xx = Mul(x, x)", "xx = Mul(x, g)"),
        ("second = ReduceMean(xx, last)", "second = ReduceSum(xx, last)"),
        ("zero = {0}", "zero = {1}"),
    ],
)
def test_another_variance_is_no_layer_norm(change: tuple[str, str]) -> None:
    assert change[0] in FLAX
    converted = amp.convert(onnx.parser.parse_model(FLAX.replace(*change)))
    assert not any(op.type == "LayerNormalization" for op in converted.operators)


def test_a_variance_in_float64() -> None:
    assert_one_layer_norm(onnx.parser.parse_model(EQUINOX))


@pytest.mark.parametrize(
    "change",
    [
        ("Where(constant, zero, d)", "Where(constant, eps, d)"),
        ("Where(constant, zero, d)", "Where(constant, zero, x)"),
        ("Where(constant, zero, d)", "Where(equal, zero, d)"),
        ("Where(constant, zero, d)", "Where(constant, d, zero)"),
        ("And(equal, finite)", "Or(equal, finite)"),
        ("ReduceMin(x, last)", "ReduceMin(x, middle)"),
        ("ReduceMin(x, last)", "ReduceMean(x, last)"),
        ("ReduceMax(x, last)", "ReduceMax(d, last)"),
        ("Equal(least, largest)", "Less(least, largest)"),
        ("Sub(m, m)", "Sub(m, least)"),
        ("Equal(nothing, zero)", "Equal(nothing, eps)"),
        ("Mul(stable, stable)", "Mul(stable, g)"),
    ],
)
def test_what_selects_otherwise_is_no_layer_norm(change: tuple[str, str]) -> None:
    assert change[0] in EQUINOX
    model = onnx.parser.parse_model(EQUINOX.replace(*change))
    converted = amp.convert(model)
    assert not any(op.type == "LayerNormalization" for op in converted.operators)
    assert off(served(converted.to_onnx()), served(model)) < 4e-3


@pytest.mark.parametrize("end", ["Add(xk, mk)", "Add(mk, xk)"])
def test_a_bias_of_zeros_may_be_left_out(end: str) -> None:
    """Keras's, before it is trained, of which the exporter folds the sum."""
    model = onnx.parser.parse_model(NORMS.replace("  shift = Add(mk, b)\n", "").replace("Add(xk, shift)", end))
    converted = amp.convert(model)
    assert sum(op.type == "LayerNormalization" for op in converted.operators) == 2
    assert off(served(converted.to_onnx()), served(model)) < 4e-3


@pytest.mark.parametrize(
    "change",
    [
        ("neg = Neg(m)", "neg = Neg(v)"),
        ("neg = Neg(m)", "neg = Abs(m)"),
        ("xk = Mul(x, k)", "xk = Mul(d, k)"),
        ("xk = Mul(x, k)", "xk = Mul(x, i)"),
        ("d = Sub(x, m)", "d = Sub(m, x)"),
        ("v = GlobalAveragePool(s)", "v = ReduceMean <axes = [1, 2]> (s)"),
        ("i = Reciprocal(r)", "i = Exp(r)"),
        ("float[1,1,6] g = {0.5, 1.0, 1.5, 2.0, 0.7, 0.9}", "float[1,4,1] g = {0.5, 1.0, 1.5, 2.0}"),
        ("y = Add(shift2, xk2)", "z = Add(shift2, xk2) y = Sub(z, mk)"),
    ],
)
def test_what_is_no_layer_norm_stays(change: tuple[str, str]) -> None:
    assert change[0] in APART
    text = APART.replace(*change)
    model = onnx.parser.parse_model(text)
    program = amp.Program.from_onnx(model)
    amp.prepare_training(program)
    program.verify()
    left = sum(op.type == "LayerNormalization" for op in program.operators)
    assert left == (2 if "mk" in change[1] else 1)
    scope, executor = amp.Scope(), amp.Executor(threads=1)
    executor.run(program.startup, scope=scope)
    (found,) = executor.run(program, feed={"x": X}, fetch_list=["y"], scope=scope)
    np.testing.assert_allclose(found, served(model), rtol=1e-3, atol=1e-3, equal_nan=True)


#: A layer norm in one branch, a root of a mean square in the other: as decoders that optimum merges, which share weights.
BRANCHES = """<ir_version: 8, opset_import: ["" : 18]>
net (float[2,4,6] x, bool c) => (float[2,4,6] y)
  <float[6] g = {0.5, 1.0, 1.5, 2.0, 0.7, 0.9}, float[6] b = {0.1, 0.2, 0.3, -0.1, -0.2, -0.3}>
{
  y = If(c) <then_branch = one () => (float[2,4,6] y1) {
    last = Constant <value_ints: ints = [-1]> ()  eps = Constant <value_float: float = 1e-6> ()
    m = ReduceMean(x, last)  d = Sub(x, m)  dd = Mul(d, d)  v = ReduceMean(dd, last)  ve = Add(v, eps)
    r = Sqrt(ve)  n = Div(d, r)  ng = Mul(n, g)  y1 = Add(ng, b)
  }, else_branch = two () => (float[2,4,6] y2) {
    last = Constant <value_ints: ints = [-1]> ()  eps = Constant <value_float: float = 1e-6> ()
    xx = Mul(x, x)  s = ReduceMean(xx, last)  ve = Add(s, eps)  r = Sqrt(ve)  n = Div(x, r)  y2 = Mul(n, g)
  }>
}"""


#: With numbers outside of the branches, as exporters put them.
CAPTURED = BRANCHES.replace(" eps = Constant <value_float: float = 1e-6> ()", "").replace(
    "0.3}>", "0.3}, float eps = {1e-6}>"
)


@pytest.mark.parametrize("text", [BRANCHES, CAPTURED], ids=["constants of its own", "constants from outside"])
def test_norms_in_branches_are_operators_too(text: str) -> None:
    model, _ = behind_weights(onnx.parser.parse_model(text))
    converted = amp.convert(model)
    one, two = next(op for op in converted.operators if op.type == "If").attrs.programs
    assert "LayerNormalization" in {op.type for op in one.operators}
    for each in (one, two):
        floats = [op for op in each.operators if op.type not in ("Cast", "Constant")]
        assert {op.precision for op in floats} == {"float16"} and not {"ReduceMean", "Sqrt"} & {
            op.type for op in floats
        }
    for branch in (True, False):
        found, wanted = (
            ort.InferenceSession(each.SerializeToString(), providers=["CPUExecutionProvider"]).run(
                None, {"fed": X, "c": np.array(branch)}
            )
            for each in (converted.to_onnx(), model)
        )
        assert off(found[0], wanted[0]) < 4e-3


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_norm_of_two_types_is_loaded(dtype: str) -> None:
    """onnxruntime makes a LayerNormalization of what is written out with a Pow, whatever the types of its parts."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
    net (float[2,4,6] x) => (float[2,4,6] y)
      <float[6] g = {0.5, 1.0, 1.5, 2.0, 0.7, 0.9}, float[6] b = {0.1, 0.2, 0.3, -0.1, -0.2, -0.3}, float eps = {1e-6}>
    {
      two = Constant <value_float: float = 2.0> ()
      m = ReduceMean <axes = [-1]>(x)  d = Sub(x, m)  [square] s = Pow(d, two)  v = ReduceMean <axes = [-1]>(s)
      ve = Add(v, eps)  r = Sqrt(ve)  n = Div(d, r)  ng = Mul(n, g)  y = Add(ng, b)
    }""")
    program = amp.convert(model, dtype=dtype, exclude=["square"])
    types = [(op.type, op.precision) for op in program.operators]
    assert ("Mul", dtype) in types and not {"LayerNormalization", "Pow", "Constant"} & {kind for kind, _ in types}
    if dtype == "float16":
        assert off(served(program.to_onnx()), served(model)) < 2e-3
