"""What would need fp32 only for its form takes another one: magnitudes, tiny factors, sizes that are known but for one."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from tests.helpers.converting import faithful
from tests.helpers.sessions import session


def model(text: str, opset: int = 17) -> onnx.ModelProto:
    made: onnx.ModelProto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]> g {text}')
    return made


def converted(text: str, opset: int = 17, **options: object) -> amp.Program:
    program = amp.convert(model(text, opset), **options)  # type: ignore[arg-type]
    onnx.checker.check_model(program.to_onnx(), full_check=True)
    return program


def types(program: amp.Program) -> list[str]:
    return [op.type for op in program.walk() if op.type not in ("Cast", "Constant")]


def full(program: amp.Program) -> list[str]:
    """Operators that compute in fp32."""
    return [op.type for op in program.walk() if op.type != "Cast" and op.precision == "float32"]


# -- magnitudes ----------------------------------------------------------------------------------------------------
MAGNITUDE = """(float[2, 9] re, float[2, 9] im) => (float[2, 9, 1] y)
    <float two = {2}, float e = {1e-12}, int64[1] last = {-1}> {
        a = Pow(re, two)  b = Mul(im, im)  s = Add(a, b)  d = Add(s, e)  r = Sqrt(d)
        y = Reshape(r, to)
    }""".replace("int64[1] last = {-1}", "int64[3] to = {2, 9, 1}")


@pytest.mark.parametrize("opset", [10, 12, 13, 20])
def test_a_magnitude_is_a_norm_in_16_bit(opset: int) -> None:
    program = converted(MAGNITUDE, opset)
    assert not full(program) and "Pow" not in types(program) and "ReduceL2" in types(program)
    rng = np.random.default_rng(0)
    for size in (1e-4, 1.0, 2000.0, 20000.0):
        re, im = ((rng.standard_normal((2, 9)) * size).clip(-40000, 40000).astype(np.float16) for _ in range(2))
        (got,) = faithful(program, {"re": re.astype(np.float32), "im": im.astype(np.float32)})
        wanted = np.sqrt(re.astype(np.float64) ** 2 + im.astype(np.float64) ** 2 + 1e-12)[..., None]
        np.testing.assert_allclose(got, wanted, rtol=2.0**-11, atol=2.0**-24)
    zeros = np.zeros((2, 9), np.float32)
    np.testing.assert_allclose(faithful(program, {"re": zeros, "im": zeros})[0], 1e-6, rtol=0.02)


@pytest.mark.parametrize(
    ("then", "epsilon"),
    [
        ("y = Log(r)", "1e-12"),
        ("t = Identity(r)  y = Div(re, t)", "1e-12"),
        ("u = Transpose(r)  v = Reciprocal(u)  y = Transpose(v)", "1e-12"),
        ("y = Neg(r)", "1e-15"),
    ],
)
def test_a_magnitude_whose_digits_count_stays_fp32(then: str, epsilon: str) -> None:
    program = converted(f"""(float[2, 9] re, float[2, 9] im) => (float[2, 9] y) <float two = {{2}}, float e = {{{epsilon}}}> {{
        a = Pow(re, two)  b = Pow(im, two)  s = Add(a, b)  d = Add(s, e)  r = Sqrt(d)  {then}
    }}""")
    assert "Pow" in full(program) and "ReduceL2" not in types(program)


# -- factors -------------------------------------------------------------------------------------------------------
GAMMA = np.linspace(0.4e-6, 2e-6, 8).astype(np.float32)
WEIGHTS = np.random.default_rng(1).normal(size=(8, 8)).astype(np.float32)
BIAS = np.random.default_rng(2).normal(size=8).astype(np.float32)
LAYERS = {
    "linear": ("float[3, 8]", "h = MatMul(x, w)  b = Add(h, bias)", "b", (8,), ["MatMul", "Add", "Mul", "Add"]),
    "bias first": ("float[3, 8]", "h = MatMul(x, w)  b = Add(bias, h)", "b", (1, 8), ["MatMul", "Add", "Mul", "Add"]),
    "turned": (
        "float[2, 8, 3]",
        "t = Transpose<perm = [0, 2, 1]>(x)  h = MatMul(t, w)  b = Transpose<perm = [0, 2, 1]>(h)",
        "b",
        (8, 1),
        ["Transpose", "MatMul", "Transpose", "Mul", "Add"],
    ),
    "conv": ("float[2, 8, 3]", "b = Conv(x, k, bias)", "b", (1, 8, 1), ["Conv", "Mul", "Add"]),
    "no product": ("float[3, 8]", "b = Tanh(x)", "b", (8,), ["Tanh", "Mul", "Mul", "Add"]),
    "read twice": (
        "float[3, 8]",
        "h = MatMul(x, w)  c = Relu(h)  b = Add(h, bias)  d = Add(c, h)",
        "h",
        (8,),
        None,
    ),
}


def layer(name: str, then: str = "y = Add(x, p)") -> onnx.ModelProto:
    kind, before, read, shape, _ = LAYERS[name]
    end = "d = Identity(x)" if name != "read twice" else ""
    made = model(f"({kind} x) => ({kind} y) {{ {before}  p = Mul({read}, gamma)  {end}  {then} }}")
    arrays = {"w": WEIGHTS, "k": WEIGHTS[..., None], "bias": BIAS, "gamma": GAMMA.reshape(shape)}
    read_names = {name for node in made.graph.node for name in node.input}
    for key in sorted(arrays.keys() & read_names):
        made.graph.initializer.append(onnx.numpy_helper.from_array(arrays[key], key))
    return made


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_scale_below_float16_keeps_its_digits_without_casts(name: str) -> None:
    before = layer(name)
    program = amp.convert(before)
    wanted_types = LAYERS[name][-1]
    assert not full(program) and sum(op.type == "Cast" for op in program.walk()) == 2
    assert wanted_types is None or types(program) == wanted_types
    shape = [d.dim_value for d in before.graph.input[0].type.tensor_type.shape.dim]
    x = np.random.default_rng(0).normal(size=shape) * 1e-3  # small, so that the layer scale shows in the sum
    x = x.astype(np.float16).astype(np.float32)
    (got,), (exact,) = faithful(program, {"x": x}), session(before).run(None, {"x": x})
    step = 2.0 ** np.floor(np.log2(np.abs(exact))) * 2.0**-10
    assert (np.abs(got - exact) <= 0.6 * step + 2.0**-25 + 2e-3 * np.abs(exact - x)).all()


def test_a_layer_scale_is_one_where_its_result_is_turned_before_it_is_added() -> None:
    """As ConvNeXt is exported whose channels come last for its products alone."""
    before = layer("linear", "q = Transpose(p)  r = Transpose(x)  z = Add(q, r)  y = Transpose(z)")
    program = amp.convert(before)
    assert not full(program) and sum(op.type == "Cast" for op in program.walk()) == 2
    assert "Mul" in full(amp.convert(layer("linear", "q = Transpose(p)  z = Exp(q)  y = Transpose(z)")))


@pytest.mark.parametrize("then", ["y = Mul(p, x)", "q = Mul(p, x)  y = Add(q, x)", "y = Add(p, gamma)", "y = Neg(p)"])
def test_a_tiny_factor_of_what_is_not_added_to_a_tensor_stays_fp32(then: str) -> None:
    assert "Mul" in full(amp.convert(layer("linear", then)))


def test_what_the_user_names_is_not_rescaled() -> None:
    assert "Mul" in full(amp.convert(layer("linear"), black_varnames=["gamma"]))
    assert not full(amp.convert(layer("linear"), dtype="bfloat16")), "it has the range"


@pytest.mark.parametrize(
    ("name", "named"), [("linear", "bias"), ("bias first", "bias"), ("linear", "w"), ("conv", "k")]
)
def test_no_weight_that_the_user_names_takes_a_factor_in(name: str, named: str) -> None:
    program = amp.convert(layer(name), black_varnames=[named])
    readers = [op for op in program.operators if any(v is not None and v.name == named for v in op.inputs)]
    assert len(readers) == 1 and readers[0].precision == "float32" and named in readers[0].reason


# -- sizes ---------------------------------------------------------------------------------------------------------
def resized(piece: str, rest: str = "", declared: str = "N, 4, 6") -> list[str]:
    text = f"""(float[{declared}] x) => (float y) <int64 zero = {{0}}, int64 one = {{1}}, int64[1] ax = {{0}}, int64[1] f = {{24}}> {{
        s = Shape(x)  n = Gather(s, zero)  w = Gather(s, one)  nu = Unsqueeze(n, ax)  wu = Unsqueeze(w, ax)
        i = Cast<to = 6>(nu)  ni = Cast<to = 7>(i)  to = Concat<axis = 0>({piece})  r = Reshape(x, to)
        {rest or "y = ReduceMax<keepdims = 0>(r)"}
    }}"""
    program = converted(text)
    x = np.random.default_rng(0).standard_normal((3, 4, 6)).astype(np.float32)
    np.testing.assert_allclose(faithful(program, {"x": x})[0], session(model(text)).run(None, {"x": x})[0], rtol=1e-3)
    return types(program)


def test_one_open_size_is_inferred_and_its_arithmetic_goes() -> None:
    assert resized("ni, f") == ["Reshape", "ReduceMax"]
    assert resized("f, nu") == ["Reshape", "ReduceMax"]
    assert resized("ni, f", "e = Expand(r, to)  y = ReduceMax<keepdims = 0>(e)") == ["Reshape", "ReduceMax"]


def test_an_expand_to_sizes_that_are_fed_stays() -> None:
    """A 0 among them would mean another thing to each of the two."""
    text = """(float[N, 24] x, int64[1] n) => (float[a, b] y) <int64[1] f = {24}> {
        to = Concat<axis = 0>(n, f)  r = Reshape(x, to)  e = Expand(r, to)  y = Neg(e)
    }"""
    assert "Expand" in types(converted(text))


@pytest.mark.parametrize(
    ("piece", "declared"), [("nu, wu, six", "N, M, 6"), ("nu, minus", "N, 4, 6"), ("nu, four, nil", "N, 4, 6")]
)
def test_other_open_sizes_stay(piece: str, declared: str) -> None:
    text = f"""(float[{declared}] x) => (float y) <int64 zero = {{0}}, int64 one = {{1}}, int64[1] ax = {{0}},
        int64[1] six = {{6}}, int64[1] four = {{4}}, int64[1] minus = {{-1}}, int64[1] nil = {{0}}> {{
        s = Shape(x)  n = Gather(s, zero)  w = Gather(s, one)  nu = Unsqueeze(n, ax)  wu = Unsqueeze(w, ax)
        to = Concat<axis = 0>({piece})  r = Reshape(x, to)  y = ReduceMax<keepdims = 0>(r)
    }}"""
    assert "Concat" in types(converted(text))


FILL = """<ir_version: 10, opset_import: ["" : 20]> m (float[N,8] x) => (float[N,8] y) <float[8,8] w> {
    a = MatMul(x, w)  s = Shape(a)  f = ConstantOfShape<value = float[1] {0.3}>(s)  b = Add(a, f)  y = MatMul(b, w)
}"""


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_fill_is_written_in_the_type_of_its_readers(dtype: str) -> None:
    """A cast behind it read and wrote a tensor of one number; where fp32 reads it too, there are two fills."""
    model = onnx.parser.parse_model(FILL)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(8, dtype=np.float32), "w"))
    del model.graph.value_info[:]
    done = amp.convert(model, dtype=dtype)
    fills = [(op.precision, op.reason) for op in done.operators if op.type == "ConstantOfShape"]
    assert fills == [(dtype, f"{'fp16' if dtype == 'float16' else 'bf16'}: a constant")]
    assert sum(op.type == "Cast" for op in done.operators) == 2
    onnx.checker.check_model(done.to_onnx(), full_check=True)
    assert amp.convert(done.to_onnx(), dtype=dtype).to_onnx() == done.to_onnx()
    model.graph.output.add(name="f").type.CopyFrom(model.graph.output[0].type)
    both = amp.convert(model, dtype=dtype)
    assert {op.precision for op in both.operators if op.type == "ConstantOfShape"} == {"float32", dtype}
    assert sum(op.type == "Cast" for op in both.operators) == 2


# -- what the file says of what an output was, before its cast ------------------------------------------------------
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("y = Softmax(x)", None),  # anyone infers it
        (
            "h = Neg(x) y = Reshape(h, to)",
            [None, 4],
        ),  # the file alone says 4; 'n' might be held against the number that a reader finds
    ],
)
def test_an_output_before_its_cast_is_described_where_nobody_can_infer_it(
    body: str, expected: list[int | None]
) -> None:
    text = f"(float[n, 4] x, int64[2] to) => (float[n, 4] y) {{ {body} }}"
    once = converted(text).to_onnx()
    said = [
        [size.dim_value if size.HasField("dim_value") else size.dim_param or None for size in dims]
        for dims in (info.type.tensor_type.shape.dim for info in once.graph.value_info)
    ]
    assert said == ([] if expected is None else [expected])
    assert [size.dim_param for size in once.graph.output[0].type.tensor_type.shape.dim] == ["n", ""]
    assert amp.convert(once).to_onnx() == once


def test_a_cast_of_an_output_is_not_taken_for_the_operator_of_that_name() -> None:
    """MXNet and Keras call operators as their outputs, and runtimes a nameless operator after its output."""
    text = "(float[2, 4] x) => (float[2, 4] y, float[2, 4] z) { [y] a = Relu(x)  [y_cast] y = Sigmoid(a)  z = Tanh(a) }"
    names = [(node.name, node.output[0]) for node in converted(text).to_onnx().graph.node]
    known = [name or output for name, output in names]
    assert len(known) == len(set(known)) and ("y_cast_1", "y") in names and ("", "z") in names
