"""Static ranges: sound for every operator that has a rule, tight where it matters, and lazy."""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings, strategies as st

import amp_transpiler as amp
from amp_transpiler.errors import ArgumentError
from amp_transpiler.passes.numerics.ranges import Ranges

HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'
W8 = ", ".join(f"{v:.4f}" for v in np.random.default_rng(0).standard_normal(64))
C8 = ", ".join(f"{v:.4f}" for v in np.random.default_rng(1).uniform(0.5, 2, 8))
CONSTANTS = f"""<float[8,8] w = {{{W8}}}, float[8] s = {{{C8}}}, float[8] b = {{{C8}}}, float low = {{-0.5}}, float high = {{1.5}},
 float two = {{2}}, float three = {{3}}, float half = {{0.5}}, int64[1] last = {{-1}}, int64[2] twice = {{4, 8}},
 int64[4] pads = {{0, 1, 0, 1}}, float[8,4,3] k = {{{", ".join([f"{v:.3f}" for v in np.random.default_rng(2).standard_normal(96)])}}},
 int64[2] split = {{4, 4}}>"""

#: Operators on x [4, 8] in a declared range; each is one step of a random program.
STEPS = [
    "Relu(X)",
    "Sigmoid(X)",
    "HardSigmoid(X)",
    "Tanh(X)",
    "Softsign(X)",
    "Erf(X)",
    "Sin(X)",
    "Cos(X)",
    "Softmax(X)",
    "LogSoftmax(X)",
    "Hardmax(X)",
    "Exp(X)",
    "Abs(X)",
    "Neg(X)",
    "Floor(X)",
    "Ceil(X)",
    "Round(X)",
    "Softplus(X)",
    "LeakyRelu<alpha=0.3>(X)",
    "Elu(X)",
    "Selu(X)",
    "Gelu(X)",
    "HardSwish(X)",
    "Mish(X)",
    "ThresholdedRelu(X)",
    "PRelu(X, s)",
    "Clip(X, low, high)",
    "Clip(X, low)",
    "Clip(X, least, most)",
    "Clip(X, most, least)",
    "Add(X, Y)",
    "Sub(X, Y)",
    "Mul(X, Y)",
    "Mul(X, X)",
    "Max(X, Y)",
    "Min(X, Y, low)",
    "Mean(X, Y)",
    "Sum(X, Y, X)",
    "Pow(X, two)",
    "Pow(X, three)",
    "Div(X, s)",
    "Reciprocal(s)",
    "Identity(X)",
    "Trilu(X)",
    "Where(c, X, Y)",
    "MatMul(X, w)",
    "Gemm<transB=1, alpha=0.5, beta=2.0>(X, w, b)",
    "Expand(X, twice)",
    "LayerNormalization(X, s, b)",
    "ReduceMax<keepdims=1>(X, last)",
    "CumSum(X, zero)",
    "Sign(X)",
    "Sqrt(s)",
    "Log(s)",
    "Concat<axis=0>(X, Y)",
    "Transpose<perm=[0,1]>(X)",
]


@settings(max_examples=300, deadline=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6),
    ends=st.tuples(st.floats(-6, 6), st.floats(-6, 6)),
    seed=st.integers(0, 2**16),
)
def test_every_value_lies_in_its_interval(
    steps: list[tuple[str, int, int]], ends: tuple[float, float], seed: int
) -> None:
    low, high = sorted(float(end) + 0.0 for end in np.float32(ends))
    names, lines = ["x"], ["least = ReduceMin<keepdims=0>(x) most = ReduceMax<keepdims=0>(x)"]
    for number, (step, one, other) in enumerate(steps):
        x, y = names[one % len(names)], names[other % len(names)]
        lines.append(f"t{number} = {step.replace('X', x).replace('Y', y)}")
        if not step.startswith(("Concat", "Reciprocal", "Sqrt", "Log(s", "ReduceMax")):
            names.append(f"t{number}")
    outputs = ", ".join(f"float[N{n}] t{n}" for n in range(len(steps)))
    text = f"{HEAD}m (float[4,8] x, bool[4,8] c) => ({outputs}) {CONSTANTS.replace('<', '<int64 zero = {1}, ', 1)} {{ {' '.join(lines)} }}"
    model = onnx.parser.parse_model(text)
    for info in model.graph.output:
        info.type.tensor_type.ClearField("shape")
    program = amp.Program.from_onnx(model)
    for parameter in program.parameters:
        parameter.persistable = parameter.trainable = False
    ranges = Ranges(program, {"x": (low, high)})
    rng = np.random.default_rng(seed)
    x = rng.uniform(low, high, (4, 8)).astype(np.float32)
    x.flat[:2] = low, high
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for name, value in zip(
        [v.name for v in program.outputs], session.run(None, {"x": x, "c": rng.random((4, 8)) > 0.5}), strict=True
    ):
        bound = ranges.bound(program.var(name))
        if bound is not None:
            slack = 1e-4 * (
                1 + max(abs(end) for end in bound if math.isfinite(end)) if any(map(math.isfinite, bound)) else 0
            )
            kept = value[np.isfinite(value)]
            assert kept.size == 0 or (bound[0] - slack <= kept.min() and kept.max() <= bound[1] + slack), (
                name,
                bound,
                lines,
            )


#: Running sums of what is below 0, as the decays of Mamba 2 have them.
FALLING = """m (float[2,4] x) => (float[2,4] y) <int64[1] begin = {-1}, int64[1] end = {9}, int64[1] last = {1},
    int64[1] first = {0}, int64[1] two = {-2}, int64 at = {-1}> { a = Abs(x) n = Neg(a) s = CumSum(n, at) """
RISING, BACKWARDS = FALLING.replace("Neg(a)", "Abs(a)"), FALLING.replace("CumSum(", "CumSum<reverse = 1>(")


def bound(text: str, name: str, **input_ranges: tuple[float, float]) -> tuple[float, float] | None:
    program = amp.Program.from_onnx(onnx.parser.parse_model(HEAD + text))
    for parameter in program.parameters:
        parameter.persistable = parameter.trainable = False
    return Ranges(program, input_ranges).bound(program.var(name))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("m (float[2,4] x) => (float[2,4] y) { y = Softmax(x) }", (0, 1)),
        ("m (float[2,4] x) => (float[2,4] y) <float a = {-3}, float b = {5}> { y = Clip(x, a, b) }", (-3, 5)),
        ("m (float[2,4] x, float b) => (float[2,4] y) { a = Tanh(x) y = Clip(a, b) }", (-1, math.inf)),
        ("m (float[2,4] x, float b) => (float[2,4] y) { a = Tanh(x) y = Clip(a, , b) }", (-math.inf, 1)),
        ("m (float[2,4] x) => (float[2,4] y) { a = Tanh(x) y = Mul(a, a) }", (0, 1)),
        ("m (float[2,4] x) => (float[2,4] y) { y = Mul(x, x) }", (0, math.inf)),
        ("m (float[2,4] x) => (float[2,4] y) { a = Abs(x) y = Neg(a) }", (-math.inf, 0)),
        (
            """m (float[2,4] x, float[4,3] z) => (float[2,4,3] y) {
            a = Abs(x) b = Abs(z) c = Neg(b) d = Einsum<equation = "ij,jk -> ijk">(a, c) y = Exp(d) }""",
            (0, 1),
        ),
        (
            """m (float[2,4] x, float[4,3] z) => (float[2,3] y) {
            a = Tanh(x) c = Tanh(z) y = Einsum<equation = "ij,jk->ik">(a, c) }""",
            None,
        ),
        ("m (uint8[2,4] x) => (float[2,4] y) <float s = {255}> { a = Cast<to=1>(x) y = Div(a, s) }", (0, 1)),
        ("m (float[2,4] x) => (float[2,4] y) { y = Neg(x) }", None),
        (FALLING + "t = Slice(s, begin, end, last) d = Sub(t, s) y = Exp(d) }", (0, 1)),
        (FALLING + "t = Slice(s, begin, end, last) d = Sub(s, t) y = Exp(d) }", (0, math.inf)),  # each less the last
        (FALLING + "t = Slice(s, begin, end, first) d = Sub(t, s) y = Exp(d) }", (0, math.inf)),  # of another axis
        (FALLING + "t = Slice(s, two, begin, last) d = Sub(t, s) y = Exp(d) }", (0, math.inf)),  # the last but one
        (FALLING + "t = Slice(n, begin, end, last) d = Sub(t, s) y = Exp(d) }", (0, math.inf)),  # of what is summed
        (RISING + "t = Slice(s, begin, end, last) d = Sub(t, s) y = Exp(d) }", (0, math.inf)),
        (BACKWARDS + "t = Slice(s, begin, end, last) d = Sub(t, s) y = Exp(d) }", (0, math.inf)),
        (
            """m (float[2,4] x, bool[2,4] c) => (float[2,4] y) <float low = {-inf}> {
            a = Abs(x) n = Neg(a) last = Constant<value_int = 1>() s = CumSum(n, last) m = Where(c, s, low) y = Exp(m) }""",
            (0, 1),
        ),
        (
            """m (float[2,4] x, bool[2,4] c) => (float[2,4] y) <float low = {-inf}> {
            a = Abs(x) y = Where(c, a, low) }""",
            None,
        ),
        (
            "m (float[2,1] x, bool[2,4] c) => (float[2,4] y) <float[4] top = {1, inf, 2, 3}> { a = Sigmoid(x) y = Where(c, a, top) }",
            (0, math.inf),
        ),
        (
            "m (float[2,16] x, float[16] q) => (float[2,16] y) <float[16] s = {S}> { y = LayerNormalization(x, s) }",
            (-4, 4),
        ),
        (
            "m (float[2,4] x, float[4,3] q) => (float[2,3] y) <float[4,3] v = {V}> { p = Softmax(x) y = MatMul(p, v) }",
            (-1, 2),
        ),
        ("m (float[2,4] x) => (float[2,3] y) <float[4,3] v = {V}> { p = Sigmoid(x) y = MatMul(p, v) }", (-2, 4)),
        (
            "m (float[1,1,9] x) => (float[1,1,7] y) <float[1,1,3] k = {1, -2, 3}> { p = Sigmoid(x) y = Conv(p, k) }",
            (-2, 4),
        ),
        ("m (float[2,4] x) => (float[2,1] y) <int64[1] a = {-1}> { p = Sigmoid(x) y = ReduceSum(p, a) }", (0, 4)),
        ("m (float[1,1,9] x) => (float[1,1,1] y) { p = Tanh(x) y = GlobalLpPool(p) }", (0, 3)),
        ("m (float[2,4] x) => (float[2,4] y) { p = Tanh(x) y = LeakyRelu<alpha = -3.0>(p) }", None),
        ("m (float[2,4] x) => (float[2,4] y) { p = Tanh(x) y = Elu<alpha = -3.0>(p) }", None),
        ("m (float[2,4] x) => (float[2,4] y) { y = ThresholdedRelu<alpha = -5.0>(x) }", (-5, math.inf)),
        (
            "m (float[2,3] x) => (float[2,3] y) <float[3] s = {0.5, 3, -2}> { p = Tanh(x) y = PRelu(p, s) }",
            (-3, 2),
        ),
        ("m (float[2,3] x) => (float[2,3] y) <float[3] s = {0.5, 3, 2}> { p = Sigmoid(x) y = PRelu(p, s) }", (0, 1)),
    ],
)
def test_known_intervals(text: str, expected: tuple[float, float] | None) -> None:
    text = text.replace("{S}", "{" + ", ".join(["1"] * 16) + "}").replace(
        "{V}", "{2, 1, -1, 0, 1, -1, 2, 0, 0, 0, 1, 0}"
    )
    found = bound(text, "y")
    assert found == pytest.approx(expected) if expected is not None else found is None


def test_declared_input_ranges() -> None:
    text = "m (float[2,4] image) => (float[2,4] y) <float s = {0.5}> { y = Sub(image, s) }"
    assert bound(text, "y") is None and bound(text, "y", image=(0, 1)) == (-0.5, 0.5)
    with pytest.raises(ArgumentError, match="did you mean 'image'"):
        bound(text, "y", imag=(0.0, 1.0))


@pytest.mark.parametrize("name", ["a", "h", "y"])
def test_a_converted_program_has_the_same_intervals(name: str) -> None:
    text = (
        HEAD
        + f"m (float[4,8] x) => (float[4,8] y) {CONSTANTS} {{ a = Tanh(x) b = MatMul(a, w) y = LayerNormalization(b, s, b8) }}"
    )
    model = onnx.parser.parse_model(
        text.replace("b8", "b")
        .replace("b = MatMul(a, w)", "h = MatMul(a, w)")
        .replace("Normalization(b, s", "Normalization(h, s")
    )
    before, after = amp.Program.from_onnx(model), amp.convert(model)
    for parameter in before.parameters:
        parameter.persistable = parameter.trainable = False
    one, other = (Ranges(p).bound(p.var(name)) for p in (before, after))
    assert one is not None and one == pytest.approx(other, rel=2e-3)


class Unreadable:
    """Constant content that must not be looked at."""

    dtype, shape, size = np.dtype(np.float32), (64, 64), 4096

    def __array__(self, *args: object, **kwargs: object) -> np.ndarray:
        raise AssertionError("the weight was read")


def test_weights_behind_unbounded_data_are_not_read() -> None:
    program = amp.Program("main")
    x = program.add_input("x", "float32", (4, 64))
    w = program.add_variable("w", "float32", (64, 64))
    w.data = Unreadable()
    y, z = (program.add_variable(name, "float32", (4, 64)) for name in "yz")
    program.info.opsets[""] = 21
    program.add_operator("MatMul", [x, w], [y])
    assert Ranges(program).bound(y) is None
    program.add_operator("MatMul", [x, w], [z])
    with pytest.raises(AssertionError, match="was read"):
        Ranges(program, {"x": (0, 1)})


def test_what_is_proved_is_counted() -> None:
    program = amp.Program.from_onnx(
        onnx.parser.parse_model(HEAD + "m (float[2] x) => (float[2] y) { a = Neg(x) y = Tanh(a) }")
    )
    assert Ranges(program).proved("float16") == (1, 2)


def test_a_matrix_without_rows_is_a_matrix() -> None:
    model = onnx.parser.parse_model(HEAD + "m (float[2,3] x) => (float[0,3] y) { y = MatMul(none, x) }")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((0, 2), np.float32), "none"))
    program = amp.Program.from_onnx(model)
    assert Ranges(program, {"x": (0, 1)}).bound(program.var("y")) is not None
