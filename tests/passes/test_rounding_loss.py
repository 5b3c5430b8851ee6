"""Constants that do not survive in 16 bit: what is found, what happens to it, and that nothing is lost in silence."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as arrays
from onnx.reference import ReferenceEvaluator

from amp_transpiler.passes.numerics.constraints import ConstantNote, Constraints
from amp_transpiler.passes.numerics.masks import HIGH, LOW
from amp_transpiler.passes.numerics.rounding_loss import (
    CHUNK,
    TOLERANCE,
    error_bound,
    losses,
    relative_error,
)
from amp_transpiler.passes.view import constants
from amp_transpiler.program import Program
from tests.helpers.constraints_of import convert, kept, of_constants, run_faithful, without_parameters
from tests.helpers.golden import program, run

FLT_MAX = 3.4028234663852886e38
TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def replaced(constraints: Constraints) -> dict[str, float]:
    return {v.name: limit for v, limit in constraints.replaced.items()}


# ---------------------------------------------------------------- counting

FLOATS = arrays.arrays(
    np.float32,
    st.integers(1, 40),
    elements=st.one_of(
        st.floats(width=32),
        st.sampled_from(
            [
                65504.0,
                65519.0,
                65520.0,
                -65520.0,
                2.0**-24,
                2.0**-25,
                2.0**-25 + 2.0**-40,
                0.0,
                -0.0,
                FLT_MAX,
                3.3895313892515355e38,
                3.39e38,
                2.0**-133,
                2.0**-134,
            ]
        ).map(lambda value: float(np.float32(value))),  # numpy 1.26 compares float32 with the double that it came from
    ),
)


@pytest.mark.parametrize("dtype", TYPES)
@settings(deadline=None)
@given(array=FLOATS)
def test_losses_are_those_of_rounding(dtype: str, array: np.ndarray) -> None:
    found = losses(array, dtype)
    with np.errstate(over="ignore"):
        rounded = array.astype(TYPES[dtype])
    beyond = np.isfinite(array) & ~np.isfinite(rounded.astype(np.float32))
    gone = (rounded == 0) & (array != 0)
    assert (found.size, found.beyond, found.vanishing) == (array.size, beyond.sum(), gone.sum())
    assert found.signs == (LOW if (array[beyond] < 0).any() else 0) | (HIGH if (array[beyond] > 0).any() else 0)
    assert found.largest == np.abs(array[np.isfinite(array)]).max(initial=0)
    if gone.any():
        assert found.smallest == np.abs(array[gone]).min()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("exponent", [-40, -24, -20, -14, -8, 0, 14])
def test_the_bound_on_the_relative_error_holds(dtype: str, exponent: int) -> None:
    array = (np.random.default_rng(0).standard_normal(1000) * 2.0**exponent).astype(np.float32)
    exact = array.astype(np.float64)
    expected = np.linalg.norm(array.astype(TYPES[dtype]).astype(np.float64) - exact) / np.linalg.norm(exact)
    assert relative_error(array, dtype) == pytest.approx(expected, rel=1e-9)
    assert expected <= error_bound(losses(array, dtype), dtype)


def test_chunks_are_put_together() -> None:
    array = np.ones(2 * CHUNK + 5, np.float32)
    array[[3, CHUNK + 1, -1]] = [1e-9, -1e6, 1e-12]
    found = losses(array.reshape(1, -1), "float16")
    assert (found.beyond, found.vanishing, found.signs, found.largest) == (1, 2, LOW, 1e6)
    assert found.smallest == np.float32(1e-12)


def test_what_is_beyond_stays_fp32_until_a_product() -> None:
    p = without_parameters(
        program("""main (float[2,2] x, float[2,2] w) => (float[2,2] y)
    <float big = {1000000}, float small = {0.00001}>
    { a = Mul(x, big)  b = Neg(a)  m = MatMul(b, w)  d = Mul(m, small)  y = Tanh(d) }""")
    )
    found = kept(p, of_constants(p))
    assert set(found) == {"a", "b", "m"}
    assert set(found.values()) == {"constant 'big' holds 1e+06, beyond fp16"}


def test_infinities_and_nan_are_what_they_are_in_any_format() -> None:
    p = without_parameters(
        program("""main (float[3] x, bool[3] c) => (float[3] y)
    <float[3] odd = {1, 2, 3}> { a = Where(c, x, odd)  y = Neg(a) }""")
    )
    constants.replace(p.var("odd"), np.float32([-np.inf, np.nan, np.inf]))
    assert of_constants(p) == Constraints()


def test_weights_beyond_the_format_make_wide_products() -> None:
    p = factor("1, 1e6, 2, 3", "m = MatMul(x, w)  r = Relu(m)  t = Tanh(r)  y = Neg(t)")
    assert set(kept(p, of_constants(p))) == {"m", "r", "t"}


# ---------------------------------------------------------------- what vanishes

EPS = [
    ("a = Add(x, eps)  s = Sqrt(a)  y = Div(x, s)", {"a", "s", "y"}),
    ("a = Add(x, eps)  y = Log(a)", {"a", "y"}),
    ("a = Add(eps, x)  i = Identity(a)  r = Reciprocal(i)  n = Mul(x, r)  y = Relu(n)", {"a", "i", "r", "n"}),
    ("a = Max(x, eps)  t = Transpose(a)  u = Transpose(t)  y = Div(x, u)", {"a", "t", "u", "y"}),
    ("a = Clip(x, eps)  p = Pow(a, minus)  n = Mul(p, x)  y = Relu(n)", {"a", "p", "n"}),
    ("e = Expand(eps, shape)  a = Add(x, e)  y = Div(x, a)", {"e", "a", "y"}),
    ("a = Add(x, eps)  y = Relu(a)", {"a"}),  # nothing divides by it
    ("m = Mul(x, eps)  n = Neg(m)  y = Add(x, n)", {"m", "n"}),
    ("m = Div(x, eps)  t = Tanh(m)  y = Relu(t)", {"m", "t"}),
]


@pytest.mark.parametrize(("text", "expected"), EPS)
def test_an_eps_that_would_vanish_keeps_fp32_until_the_division(text: str, expected: set[str]) -> None:
    def built() -> Program:
        return without_parameters(
            program(f"""main (float[2,2] x) => (float[2,2] y)
        <float eps = {{0.000000000001}}, float minus = {{-0.5}}, int64[2] shape = {{2, 2}}> {{ {text} }}""")
        )

    p = built()
    constraints = of_constants(p)
    found = kept(p, constraints)
    assert set(found) == expected
    assert set(found.values()) == {"constant 'eps' holds 1e-12, which is 0 in fp16"}
    assert [(n.name, n.problem, n.count, n.size) for n in constraints.constants] == [("eps", "underflow", 1, 1)]
    assert of_constants(built(), "bfloat16") == Constraints()
    feeds = {"x": np.float32([[0, 1], [2, 3]])}
    wanted = run(built(), feeds)[0]
    finite = np.isfinite(wanted) & (np.abs(wanted) < 6e4)
    assert np.allclose(run_faithful(convert(p, constraints), feeds)[0][finite], wanted[finite], rtol=2e-3)


@pytest.mark.parametrize("kind", ["bfloat16", "double"])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a = Add(h, eps)  s = Cast<to = 1>(a)  y = Log(s)", {"y"}),
        ("a = Add(h, eps)  b = Reshape(a, shape)  s = Cast<to = 1>(b)  t = Transpose(s)  y = Div(x, t)", {"t", "y"}),
        ("a = Add(h, eps)  d = Relu(a)  s = Cast<to = 1>(d)  y = Relu(s)", set()),
        ("c = Cast<to = 1>(eps)  a = Add(x, c)  y = Log(a)", {"a", "y"}),
        ("a = Add(h, large)  s = Cast<to = 1>(a)  y = Tanh(s)", {"y"}),
    ],
)
def test_a_constant_of_a_third_type_is_followed_to_where_16_bit_begins(
    text: str, expected: set[str], kind: str
) -> None:
    """What computes in bfloat16 or in double stays so; what it is cast to does not sink to zero on the way to float16."""
    p = without_parameters(Program.from_onnx(third_type(text, kind)))
    constraints = of_constants(p)
    converted = convert(p, constraints)
    assert {op.outputs[0].name for op in converted.operators if op.reason.startswith("fp32: constant")} == expected
    typed = {op.outputs[0].name: op.precision for op in converted.operators if op.type in ("Add", "Relu", "Reshape")}
    wide = {"bfloat16": "bfloat16", "double": "float64"}[kind]
    assert typed["a"] == (wide if "h" in text else "float32")
    feeds = {"x": np.float32([[0, 1], [2, 3]])}
    with np.errstate(divide="ignore"):
        wanted = ReferenceEvaluator(third_type(text, kind)).run(None, feeds)[0]
    assert np.allclose(run_faithful(converted, feeds)[0], wanted, rtol=2e-2, equal_nan=True)


def third_type(text: str, kind: str) -> onnx.ModelProto:
    """A model whose constants ``eps`` (1e-12) and ``large`` (1e6) are of this type, as is ``h``, its input cast."""
    code, dtype = {"bfloat16": (16, ml_dtypes.bfloat16), "double": (11, np.float64)}[kind]
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 21]>
        main (float[2,2] x) => (float[2,2] y) <int64[2] shape = {{2, 2}}> {{ h = Cast<to = {code}>(x)  {text} }}""")
    for name, value in (("eps", 1e-12), ("large", 1e6)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value, dtype), name))
    return model


def factor(values: str, call: str = "y = MatMul(x, w)", shape: str = "2,2") -> Program:
    return without_parameters(
        program(f"""main (float[2,2] x) => (float[2,2] y)
    <float[{shape}] w = {{{values}}}> {{ {call} }}""")
    )


def test_single_elements_of_a_weight_may_vanish() -> None:
    p = factor("1e-9, 2, -1e-12, 4")
    constraints = of_constants(p)
    assert kept(p, constraints) == {}
    smallest = float(np.float32(1e-12))
    assert constraints.constants == [
        ConstantNote(
            "w", "underflow", 2, 4, smallest, "its smallest elements become 0, the tensor as a whole keeps its values"
        )
    ]


def test_a_weight_whose_digits_vanish_keeps_its_readers() -> None:
    """No element becomes zero, but few bits are left of each."""
    p = factor("1.1e-6, 2.3e-6, 0.7e-6, 3.3e-6")
    constraints = of_constants(p)
    array = np.float32([1.1e-6, 2.3e-6, 0.7e-6, 3.3e-6])
    off = np.linalg.norm(array.astype(np.float16) - array.astype(np.float64)) / np.linalg.norm(array)
    assert off > TOLERANCE
    assert kept(p, constraints) == {"y": f"constant 'w' is {off:.2g} off in fp16 (relative error)"}
    assert constraints.constants[0].count == 0


def test_a_bias_vanishes_beside_its_sum() -> None:
    p = factor("1e-9, 1e-12", "k = Relu(x)  y = Gemm(x, k, w)", "2")
    constraints = of_constants(p)
    assert kept(p, constraints) == {}
    assert [n.action for n in constraints.constants] == ["becomes 0 beside a sum"]


def test_constant_operators_and_nested_graphs() -> None:
    p = without_parameters(
        program("""main (float[2] x, bool c) => (float[2] y)
    <float outer = {0.000000000001}>
    {
      node = Constant<value_float = 100000.0>()
      y = If (c) <
        then_branch = t () => (float[2] tv) { a = Add(x, outer)  tv = Div(x, a) },
        else_branch = e () => (float[2] ev) <float inner = {0.000000000001}> { b = Mul(x, node)  d = Add(b, inner)  ev = Log(d) }
      >
    }""")
    )
    constraints = of_constants(p)
    found = kept(p, constraints)
    assert {n.name for n in constraints.constants} == {"outer", "node", "inner"}
    assert found["a"] == found["tv"] == "constant 'outer' holds 1e-12, which is 0 in fp16"
    assert found["b"] == "constant 'node' holds 100000, beyond fp16"
    assert {"d", "ev"} <= set(found)


# ---------------------------------------------------------------- only what would be read in 16 bit


def test_slots_that_stay_fp32_are_not_concerned() -> None:
    text = """main (float[2,2,4] x) => (float[2,2,4] y) <float[2] s = {1, 1}, float[2] v = {1e6, 1e-12}>
    { y = BatchNormalization(x, s, s, s, v) }"""
    assert of_constants(program(text, 17)) == Constraints()
    p = without_parameters(program(text, 9))  # here the variance has the type of the data
    assert kept(p, of_constants(p)) == {"y": "constant 'v' holds 1e+06, beyond fp16"}


def test_scales_of_resize_are_not_concerned() -> None:
    p = program("""main (float[1,1,2] x) => (float[1,1,N] y) <float[3] scales = {1, 1, 100000}>
    { y = Resize(x, , scales) }""")
    assert of_constants(p) == Constraints()


def test_converted_constants_have_nothing_left_to_say() -> None:
    p = factor("1e-9, 2, -1e-12, 4")
    converted = convert(p, of_constants(p))
    assert of_constants(converted) == Constraints()


def test_external_data_is_read_where_it_lies(tmp_path: Path) -> None:
    w = np.ones((600, 700), np.float32)
    w[5, 7], w[300, 1] = 1e6, 1e-9
    node = onnx.helper.make_node("MatMul", ["x", "w"], ["y"])
    info = onnx.helper.make_tensor_value_info
    model = onnx.helper.make_model(
        onnx.helper.make_graph(
            [node], "g", [info("x", 1, [2, 600])], [info("y", 1, [2, 700])], [onnx.numpy_helper.from_array(w, "w")]
        ),
        opset_imports=[onnx.helper.make_opsetid("", 21)],
    )
    path = tmp_path / "m.onnx"
    onnx.save(model, path, save_as_external_data=True, location="w.bin")
    constraints = of_constants(Program.from_onnx(path))
    assert [(n.problem, n.count, n.size, n.worst) for n in constraints.constants] == [
        ("overflow", 1, 420000, 1e6),
        ("underflow", 1, 420000, float(np.float32(1e-9))),
    ]
