"""Places in an image are computed in fp32, and what only goes into them may be 16 bit."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

import amp_transpiler as amp
from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.passes.numerics.places import keep_places
from amp_transpiler.passes.view.flow import Flow

HEAD = '<ir_version: 10, opset_import: ["" : 22]>\n'
FLOW = "float[2,2,1,1] w = {0.1, 0.1, 0.1, 0.1}, float half = {0.5}"
AFFINE = "float[8,6] w = {" + ", ".join(["0.1"] * 48) + "}, int64[3] two_rows = {1, 2, 3}, int64[4] size = {1, 2, 9, 9}"


def kept(program: amp.Program) -> set[str]:
    """The first results of the operators that compute places or read there."""
    constraints = Constraints()
    keep_places(Flow(program), constraints)
    assert {str(why) for why in constraints.operators.values()} <= {"places in an image"}
    return {getattr(op.outputs[0], "name", "") for op in constraints.operators}


CASES = {
    "a flow that is added to a grid": (
        f"""m (float[1,2,9,9] x, float[1,9,9,2] base) => (float[1,2,9,9] y) <{FLOW}>
        {{ c = Conv(x, w)  t = Transpose<perm=[0,2,3,1]>(c)  h = Tanh(t)  s = Mul(h, half)  g = Add(base, s)
           n = Relu(x)  y = GridSample(n, g) }}""",
        {"t", "h", "s", "g", "y"},
    ),
    "places that a layer predicts": (
        f"""m (float[1,2,9,9] x) => (float[1,2,9,9] y) <{FLOW}>
        {{ n = Relu(x)  c = Conv(n, w)  g = Transpose<perm=[0,2,3,1]>(c)  y = GridSample(x, g) }}""",
        {"c", "g", "y"},
    ),
    "an affine grid": (
        f"""m (float[1,2,9,9] x, float[1,8] f) => (float[1,2,9,9] y) <{AFFINE}>
        {{ n = Relu(f)  p = MatMul(n, w)  t = Reshape(p, two_rows)  g = AffineGrid(t, size)  y = GridSample(x, g) }}""",
        {"p", "t", "g", "y"},
    ),
    "an affine grid that is written out": (
        f"""m (float[1,2,9,9] x, float[1,8] f, float[9,9,3] base) => (float[1,2,9,9] y) <{AFFINE}>
        {{ p = MatMul(f, w)  r = Reshape(p, two_rows)  t = Transpose<perm=[0,2,1]>(r)  g = MatMul(base, t)
           y = GridSample(x, g) }}""",
        {"p", "r", "t", "g", "y"},
    ),
    "regions": (
        f"""m (float[1,2,9,9] x, float[1,4] anchor, float[1,8] f, int64[1] of) => (float[1,2,3,3] y) <float[8,4] w = {{
          {", ".join(["0.1"] * 32)} }}>
        {{ d = MatMul(f, w)  a = Add(anchor, d)  y = RoiAlign<output_height=3, output_width=3>(x, a, of) }}""",
        {"a", "y"},
    ),
    "boxes that overlap": (
        """m (float[1,7,4] b, float[7] of, float[1,3,7] s) => (int64[N,3] y) <float apart = {640}, int64[1] one = {1}>
        { o = Mul(of, apart)  u = Unsqueeze(o, one)  a = Add(b, u)  r = Sigmoid(s)  y = NonMaxSuppression(a, r) }""",
        {"o", "u", "a", "y"},
    ),
    "an intersection over a union": (
        """m (float[7,4] a, float[7,4] b) => (float[7,1] y) <int64[1] axis = {1}, float zero = {0}> {
        a0, a1 = Split<axis=1, num_outputs=2>(a)  b0, b1 = Split<axis=1, num_outputs=2>(b)
        least = Min(a1, b1)  largest = Max(a0, b0)  both0 = Sub(least, largest)  both = Max(both0, zero)
        w, h = Split<axis=1, num_outputs=2>(both)  inter = Mul(w, h)
        sa = Sub(a1, a0)  wa, ha = Split<axis=1, num_outputs=2>(sa)  of_a = Mul(wa, ha)
        y = Div(inter, of_a) }""",
        {"a0", "b0", "least", "largest", "both0", "both", "w", "inter", "sa", "wa", "of_a", "y"},
    ),
    "a range": (
        """m (float[2] a, float[2] b, float[2] z) => (float[2] y)
        { least = Min(a, z)  largest = Max(b)  both = Sub(least, largest)  y = Tanh(both) }""",
        set(),
    ),
    "no image": ("m (float[2] x, float[2] z) => (float[2] y) { a = Add(x, z)  y = Tanh(a) }", set()),
}


@pytest.mark.parametrize("name", CASES)
def test_what_computes_places(name: str) -> None:
    text, expected = CASES[name]
    assert kept(amp.Program.from_onnx(onnx.parser.parse_model(HEAD + text))) == expected


def test_a_converted_program_has_the_same_places() -> None:
    text, expected = CASES["a flow that is added to a grid"]
    assert kept(amp.convert(onnx.parser.parse_model(HEAD + text), numeric_guards=False)) == expected


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_large_image_is_sampled_where_it_was(dtype: str) -> None:
    n, rng = 480, np.random.default_rng(0)
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 20]> m (float[1,1,{n},{n}] x, float[1,{n},{n},2] flow)
        => (float[1,1,{n},{n}] y) {{ g = Add(base, flow)  y = GridSample<padding_mode = "border">(x, g) }}"""
    )
    line = (np.arange(n) * 2 + 1) / n - 1
    base = np.stack(np.meshgrid(line, line), -1)[None].astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(base, "base"))
    feeds = {"x": rng.normal(size=(1, 1, n, n)), "flow": 0.01 * rng.normal(size=(1, n, n, 2))}
    feeds = {name: value.astype(np.float32) for name, value in feeds.items()}
    converted = amp.convert(model, dtype=dtype).to_onnx()
    y, exact = (
        onnxruntime.InferenceSession(each.SerializeToString()).run(None, feeds)[0] for each in (converted, model)
    )
    assert np.linalg.norm(y - exact) < 1e-3 * np.linalg.norm(exact)


def test_a_training_in_16_bit_keeps_places() -> None:
    text, expected = CASES["a flow that is added to a grid"]
    program = amp.Program.from_onnx(onnx.parser.parse_model(HEAD + text))
    amp.cast_model_to_fp16(program, use_fp16_guard=False, numeric_guards=True)
    precisions = {op.outputs[0].name: op.precision for op in program.operators if not op.inserted and op.outputs[0]}
    assert {name for name, precision in precisions.items() if precision == "float32"} == expected
