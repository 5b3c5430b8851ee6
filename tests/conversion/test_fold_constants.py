"""What is known before the run is computed before it, within bounds, and the outputs stay what they were."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.conversion import fold_constants
from amp_transpiler.passes.canonicalize.simplify import remove_identities
from tests.helpers.sessions import run, session

HEAD = '<ir_version: 8, opset_import: ["" : 17]>'


def model(text: str) -> onnx.ModelProto:
    made: onnx.ModelProto = onnx.parser.parse_model(f"{HEAD} g {text}")
    return made


def converted(text: str, **options: object) -> onnx.ModelProto:
    """The conversion; its outputs on one input are those of the model, to fp16."""
    before = model(text)
    after = amp.convert(before, **options).to_onnx()  # type: ignore[arg-type]
    onnx.checker.check_model(after, full_check=True)
    rng = np.random.default_rng(0)
    feed = {
        i.name: rng.standard_normal([d.dim_value or 3 for d in i.type.tensor_type.shape.dim]).astype(np.float32)
        for i in before.graph.input
    }
    for wanted, got in zip(session(before).run(None, feed), session(after).run(None, feed), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=5e-3, atol=5e-3)
    return after


def types(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node if node.op_type not in ("Cast", "Constant")]


def test_shape_arithmetic_of_declared_sizes_goes_and_open_ones_are_inferred_where_they_can_be() -> None:
    text = """(float[N, 4, 6] x) => (float[N, 24] y, float[N, 6, 4] z)
        <int64 zero = {0}, int64 one = {1}, int64 two = {2}, int64[1] ax = {0}> {
            s = Shape(x)  n = Gather(s, zero)  c = Gather(s, one)  w = Gather(s, two)  m = Mul(c, w)
            nu = Unsqueeze(n, ax)  mu = Unsqueeze(m, ax)  to = Concat<axis = 0>(nu, mu)  y = Reshape(x, to)
            wu = Unsqueeze(w, ax)  cu = Unsqueeze(c, ax)  tz = Concat<axis = 0>(nu, wu, cu)  z = Reshape(x, tz)
        }"""
    assert types(converted(text)) == ["Reshape", "Reshape"], "the open size is inferred"
    filled = text.replace("y = Reshape(x, to)", "r = Reshape(x, to)  e = ConstantOfShape(to)  y = Add(r, e)")
    assert "Concat" in types(converted(filled)), "which nothing else can"


@pytest.mark.parametrize(("inputs", "sizes"), [("z, f, , t", [2, 4]), ("z, f, z, t", [2, 4]), ("f, z, , b", [5, 3])])
def test_the_steps_of_a_slice_hold_without_axes(inputs: str, sizes: list[int]) -> None:
    text = f"""(float[2, 3, 4, 5] x) => (float[a, b] y) <int64[1] z = {{0}}, int64[1] f = {{4}}, int64[1] t = {{2}},
        int64[1] b = {{-2}}, float one = {{1}}> {{
        s = Shape(x)  p = Slice({inputs})  e = Expand(one, p)  m = Neg(x)  t0 = ReduceSum <keepdims = 0> (m)  y = Add(e, t0)
    }}""".replace("Slice(", "Slice(s, ")
    (output,) = converted(text).graph.output
    (wanted,) = session(model(text)).run(None, {"x": np.zeros((2, 3, 4, 5), np.float32)})
    assert list(wanted.shape) == sizes and len(output.type.tensor_type.shape.dim) == 2


def test_a_shape_that_becomes_known_behind_a_reshape_is_known_there() -> None:
    text = """(float[2, 3, 4] x) => (float[a] y) <int64[1] z = {0}> {
        s = Shape(x)  n = Gather<axis = 0>(s, z)  rest = ReduceProd<keepdims = 1>(s)
        q = Div(rest, n)  to = Concat<axis = 0>(n, q)  t = Reshape(x, to)  u = Shape(t)  p = ReduceProd<keepdims = 1>(u)
        y = Reshape(t, p)
    }"""
    assert types(converted(text)) == ["Reshape", "Reshape"]


def test_sizes_that_folding_tells_are_known_when_precision_is_decided() -> None:
    """As Paddle writes the first state of a recurrent layer. They were known to a second conversion alone, which changed
    what the first had decided."""
    text = """(float[N, 6] x) => (float[4, M, 12] y)
        <float[1] none = {0.5}, int64[1] four = {4}, int64[1] twelve = {12}, int64[1] zero = {0}, int64[1] one = {1}> {
        s = Shape(x)  n = Slice(s, zero, one)  to = Concat<axis = 0>(four, n, twelve)  same = Identity(to)
        wide = Expand(none, same)  y = Sigmoid(wide)
    }"""
    program = amp.convert(model(text))
    shape = program.var("wide").shape
    assert shape is not None and (shape[0], shape[2]) == (4, 12)
    once = program.to_onnx()
    assert amp.convert(once).to_onnx().SerializeToString() == once.SerializeToString()


def test_the_branch_that_a_constant_takes_stands_for_the_if() -> None:
    text = """(float[2, 3] x) => (float[2, 3] y) <int64 two = {2}, int64 zero = {0}> {
        s = Shape(x)  n = Gather(s, zero)  c = Equal(n, two)
        t = If (c) <then_branch = a () => (float[2, 3] u) { u = Relu(x) }, else_branch = b () => (float[2, 3] v) { v = Neg(x) }>
        k = Identity(t)  y = Neg(k)
    }"""
    assert types(converted(text)) == ["Relu", "Neg"]


def test_names_of_inputs_and_outputs_stay_and_unread_weights_go() -> None:
    text = """(float[2] x, float[2] unread) => (float[2] y, float[1] k)
        <float[2] w = {1, 2}, float[2] lost = {1, 2}, float[1] c = {3}> {
        a = Add(w, w)  t = Mul(x, a)  dead = Exp(t)  y = Identity(t)  k = Identity(c)
    }"""
    after = converted(text)
    assert types(after) == ["Mul", "Identity"]
    assert [i.name for i in after.graph.input] == ["x", "unread"]
    assert [o.name for o in after.graph.output] == ["y", "k"]
    assert {i.name for i in after.graph.initializer} == {"a", "c"}


@pytest.mark.parametrize(
    ("line", "bytes_"),
    [
        ("b = Expand(one, to)", "[3] to = {900, 900, 40}"),
        ("v = ConstantOfShape(to)  b = Mul(v, one)", "[3] to = {900, 900, 40}"),
        ("z = Squeeze(to)  r = Range(zero, z, uno)  f = Cast<to = 1>(r)  b = Add(f, one)", "[1] to = {90000000}"),
    ],
)
def test_what_would_be_large_is_not_computed(line: str, bytes_: str) -> None:
    text = f"""(float[1] x) => (float y) <float one = {{1}}, int64{bytes_}, int64 zero = {{0}}, int64 uno = {{1}}> {{
        {line}  t = Mul(b, x)  y = ReduceMax<keepdims = 0>(t)
    }}"""
    after = amp.convert(model(text)).to_onnx()
    assert {"Expand", "ConstantOfShape", "Range"} & set(types(after)) and after.ByteSize() < 4000


@pytest.mark.parametrize(("most_of_all", "left"), [(1 << 20, 0), (3000, 2)], ids=["as its weights ask", "at most"])
def test_the_more_weights_the_more_is_computed(most_of_all: int, left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Standardised weights of a large model are weights; what a small model asks for is bounded."""
    monkeypatch.setattr(fold_constants, "MOST", 2500)
    monkeypatch.setattr(fold_constants, "MOST_OF_ALL", most_of_all)
    numbers = ", ".join(f"{value:.3f}" for value in np.random.default_rng(0).normal(size=256))
    text = f"""(float[N, 16] x) => (float[N, 16] y) <float[16, 16] w = {{{numbers}}}> {{
        m = ReduceMean<axes = [1]>(w)  c = Sub(w, m)  q = Mul(c, c)  v = ReduceMean<axes = [1]>(q)  d = Sqrt(v)  s = Div(c, d)
        t = Transpose(s)  y = MatMul(x, t) }}"""
    made = types(converted(text))
    assert len(made) == 1 + left, made


def test_a_file_does_not_grow() -> None:
    halves = ", ".join(["0.5"] * 64 * 64)
    text = f"""(float[64, 64] x) => (float[64, 64] y)
        <float one = {{1}}, int64[2] to = {{64, 64}}, float[64, 64] w = {{{halves}}}> {{
            e = Expand(one, to)  t = Transpose(w)  u = MatMul(x, t)  y = Mul(u, e)
        }}"""
    after = converted(text)
    assert types(after) == ["Expand", "MatMul", "Mul"], (
        "one takes the place of its transpose, the other would add 8 KiB"
    )


def test_lengths_of_rows_are_stored_beside_their_table() -> None:
    """As in a search for the nearest row: the lengths in fp32 would be computed in every run, of a second table."""
    rows = ", ".join(f"{value:.4f}" for value in np.random.default_rng(0).normal(0, 0.1, 512 * 64))
    text = f"""(float[4, 64] x) => (float[4, 512] y) <float[512, 64] table = {{{rows}}}> {{
        q = Mul(table, table)  n = ReduceMean<axes = [1], keepdims = 0>(q)
        t = Transpose(table)  p = MatMul(x, t)  y = Sub(n, p) }}"""
    after = converted(text)
    assert "ReduceMean" not in types(after)
    sizes = sorted(onnx.numpy_helper.to_array(each).size for each in after.graph.initializer)
    assert sizes[-2:] == [512, 512 * 64], "the table stands there once"


def test_a_constant_whose_shape_is_read_too_makes_room_for_its_result() -> None:
    """As scikit-learn's Gaussian processes have it, which kept their points and scaled them in every run."""
    halves = ", ".join(["0.5"] * 64 * 64)
    text = f"""(float[64, 64] x) => (float[64, 64] y) <float[64, 64] w = {{{halves}}}, float two = {{2}}> {{
            s = Shape(w)  d = Div(w, two)  u = MatMul(x, d)  y = Expand(u, s)
        }}"""
    after = converted(text)
    assert types(after) == ["MatMul"]


#: jax2onnx writes the epsilon of an RMS norm so.
LIKE = """(float[2, 4] x) => (float[2, 4] y, float[2, 4] z)
    <float[4] w = {1, 2, 3, 4}, float eps = {1e-6}, int64 two = {2}> {
        same = CastLike(x, w)  h = Mul(same, w)  e = CastLike(eps, x)  s = Mul(h, h)  m = ReduceMean<axes = [-1]>(s)
        a = Add(m, e)  r = Sqrt(a)  y = Div(h, r)
        t = CastLike(two, x)  i = Cast<to = 7>(h)  u = CastLike(i, x)  z = Mul(u, t)
    }"""


def test_casts_to_the_type_of_another_are_to_a_known_one() -> None:
    after = converted(LIKE)
    assert not any(node.op_type == "CastLike" for node in after.graph.node)
    assert types(after).count("ReduceL2") == 2, "a root of mean squares in 16 bit"
    assert any(node.op_type == "CastLike" for node in converted(LIKE, exclude=["*"]).graph.node)


def test_casts_to_the_type_of_another_are_known_in_training_too() -> None:
    program = amp.Program.from_onnx(model(LIKE))
    amp.prepare_training(program)
    program.verify()
    kinds = [op.type for op in program.operators]
    assert "SimplifiedLayerNormalization" in kinds and "CastLike" not in kinds


NUMBERS = "<float zero = {0}, float one = {1}, float[1] ones = {1}, float[1, 1] nil = {0}, float[2] two = {1, 1}> "


@pytest.mark.parametrize(
    "line",
    [
        "t = Mul(n, one)",
        "t = Mul(ones, n)",
        "t = Div(n, one)",
        "t = Add(zero, n)",
        "t = Sub(n, nil)",
        "t = Pow(n, one)",
        "a = Mul(n, one)  b = Identity(a)  t = Add(b, zero)",
        "k = Constant <value_float: float = 1.0> ()  t = Mul(n, k)",
    ],
)
def test_arithmetic_that_changes_nothing_goes(line: str) -> None:
    """Paddle's exporter scales so, by 1 or with nothing added."""
    text = f"(float[3, 2] x) => (float[3, 2] y) {NUMBERS} {{ n = Neg(x)  {line}  y = Exp(t) }}"
    assert types(converted(text)) == ["Neg", "Exp"]
    trained = text.replace("<float zero", "<float[2] w = {1, 2}, float zero").replace("Neg(x)", "Mul(x, w)")
    program = amp.Program.from_onnx(model(trained))
    told = amp.prepare_training(program)
    program.verify()
    assert [op.type for op in program.operators if op.type != "Constant"] == ["Mul", "Exp"]
    assert any("change nothing" in note for note in told.notes)


@pytest.mark.parametrize(
    ("line", "shape"),
    [
        ("t = Div(one, n)", "3, 2"),
        ("t = Sub(zero, n)", "3, 2"),
        ("t = Pow(one, n)", "3, 2"),
        ("t = Mul(n, two)", "3, 2"),
        ("t = Add(n, one)", "3, 2"),
        ("m = ReduceSum <keepdims = 0> (n)  t = Mul(m, ones)", "1"),
    ],
)
def test_arithmetic_that_changes_something_stays(line: str, shape: str) -> None:
    kinds = types(converted(f"(float[3, 2] x) => (float[{shape}] y) {NUMBERS} {{ n = Neg(x)  {line}  y = Exp(t) }}"))
    assert kinds[-2:] == [line.rpartition("= ")[2].split("(")[0], "Exp"]


@pytest.mark.parametrize(
    ("line", "kinds"),
    [
        ("t = Dropout(n)", []),
        ("t, m = Dropout(n)", []),
        ("t, m = Dropout(n, half, no)", []),
        ("t, m = Dropout(n)  k = Cast <to = 1> (m)  z = Neg(k)", ["Dropout", "Neg"]),
    ],
)
def test_a_dropout_that_drops_nothing_goes_where_nobody_reads_its_mask(line: str, kinds: list[str]) -> None:
    outputs = "float[3, 2] y, float[3, 2] z" if "z" in line else "float[3, 2] y"
    text = (
        f"(float[3, 2] x) => ({outputs}) <float half = {{0.5}}, bool no = {{0}}> {{ n = Neg(x)  {line}  y = Exp(t) }}"
    )
    assert types(converted(text)) == ["Neg", *kinds, "Exp"]


SIZES = "<int64[2] there = {3, 2}, int64[2] row = {1, 2}, int64[2] other = {2, 3}, int64[3] more = {1, 3, 2}> "


@pytest.mark.parametrize("line", ["t = Expand(n, there)", "t = Expand(n, row)", "t = Reshape(n, there)"])
def test_a_shape_that_is_there_is_given_once(line: str) -> None:
    text = f"(float[3, 2] x) => (float[3, 2] y) {SIZES} {{ n = Neg(x)  {line}  y = Exp(t) }}"
    assert types(converted(text)) == ["Neg", "Exp"]
    assert "Neg" in types(converted(text.replace("y = Exp(t)", "y = Identity(t)")))


@pytest.mark.parametrize(
    ("line", "given", "made"),
    [
        ("t = Reshape(n, other)", "3, 2", "2, 3"),
        ("t = Expand(n, more)", "3, 2", "1, 3, 2"),
        ("t = Expand(n, there)", "1, 2", "3, 2"),
        ("t = Expand(n, there)", "N, 2", "3, 2"),
    ],
)
def test_another_shape_is_given(line: str, given: str, made: str) -> None:
    text = f"(float[{given}] x) => (float[{made}] y) {SIZES} {{ n = Neg(x)  {line}  y = Exp(t) }}"
    assert line.rpartition("= ")[2].split("(")[0] in types(converted(text))


SOFTPLUS = "<float bound = {20}, float low = {19}, float[1, 1, 1] wide = {20}> "


@pytest.mark.parametrize("end", ["y = Exp(t)", "y = Identity(t)"])
def test_a_softplus_beyond_20_is_one(end: str) -> None:
    """torch exports x from there on, which it is to the last digit."""
    line = "s = Softplus(n)  g = Greater(n, bound)  t = Where(g, n, s)"
    text = f"(float[3, 2] x) => (float[3, 2] y) {SOFTPLUS} {{ n = Neg(x)  {line}  {end} }}"
    assert types(converted(text))[:2] == ["Neg", "Softplus"] and "Where" not in types(converted(text))
    x = -np.float32([[19.9, 20.1], [100, -100], [20, np.inf]])
    program = amp.Program.from_onnx(model(text))
    before = run(program.to_onnx(), {"x": x})[0]
    assert remove_identities(program, frozenset(), frozenset())
    assert run(program.to_onnx(), {"x": x})[0].tobytes() == before.tobytes()
    trained = text.replace("<float bound", "<float[2] w = {1, 2}, float bound").replace("Neg(x)", "Mul(x, w)")
    program = amp.Program.from_onnx(model(trained))
    amp.prepare_training(program)
    program.verify()
    assert not {"Where", "Greater"} & {op.type for op in program.operators}


@pytest.mark.parametrize(
    "line",
    [
        "s = Softplus(n)  g = Greater(n, low)  t = Where(g, n, s)",
        "s = Softplus(n)  g = Less(n, bound)  t = Where(g, n, s)",
        "s = Softplus(n)  g = Greater(n, bound)  t = Where(g, s, n)",
        "s = Softplus(n)  g = Greater(x, bound)  t = Where(g, n, s)",
        "s = Softplus(x)  g = Greater(n, bound)  t = Where(g, n, s)",
        "s = Softplus(n)  g = Greater(n, wide)  r = Where(g, n, s)  t = Squeeze(r)",
    ],
)
def test_other_selections_of_a_softplus_stay(line: str) -> None:
    assert "Where" in types(
        converted(f"(float[3, 2] x) => (float[3, 2] y) {SOFTPLUS} {{ n = Neg(x)  {line}  y = Exp(t) }}")
    )


def test_a_parameter_of_one_is_no_number() -> None:
    text = "(float[3, 2] x) => (float[3, 2] y) <float[1] w = {1}> { n = Exp(x)  y = Mul(n, w) }"
    program = amp.Program.from_onnx(model(text))
    amp.prepare_training(program, trainable=["w"])
    assert [op.type for op in program.operators] == ["Exp", "Mul"]


def test_what_the_user_names_stays() -> None:
    text = """(float[2] x) => (float[2] y) <float[2] w = {1, 2}> { a = Add(w, w)  t = Mul(x, a)  i = Identity(t)  y = Neg(i) }"""
    assert types(converted(text)) == ["Mul", "Neg"]
    assert types(converted(text, black_varnames=["a", "i"])) == ["Add", "Mul", "Identity", "Neg"]


def test_quantised_weights_and_random_numbers_are_not_folded() -> None:
    text = """(float[2] x) => (float[2] y) <int8[2] w = {1, 2}, float s = {0.5}, int8 z = {0}> {
        a = DequantizeLinear(w, s, z)  y = Add(x, a)
    }"""
    assert types(converted(text)) == ["DequantizeLinear", "Add"]
    text = """(float[2] x) => (float[2] y) { r = RandomUniform<shape = [2], high = 0.001>()  y = Add(x, r) }"""
    assert types(converted(text)) == ["RandomUniform", "Add"]


def test_sequences_of_known_length_become_tensors() -> None:
    text = """(float[4, 8] x) => (float[8, 4] y, float[8] z, int64 n) <int64 two = {2}> {
        sq = SplitToSequence<axis = 0, keepdims = 0>(x)  a = SequenceAt(sq, two)  more = SequenceInsert(sq, a)
        less = SequenceErase(more, two)  y = ConcatFromSequence<axis = -1, new_axis = 1>(less)
        z = SequenceAt(less, two)  n = SequenceLength(less)
    }"""
    after = converted(text)
    assert not any("Sequence" in kind for kind in types(after))
    assert not any(node.op_type == "Cast" for node in after.graph.node), "nothing computes"


def test_a_shape_that_the_file_says_of_a_copy_stays_known() -> None:
    """Nobody infers it: a second conversion would weigh the operators that follow by another size."""
    after = amp.convert(
        model(
            "(float[20] x, int64[R] to) => (float[n] y) <float[4, 5] c> { r = Reshape(x, to)  c = Identity(r)  y = Relu(c) }"
        )
    ).to_onnx()
    assert types(after) == ["Reshape", "Relu"]
    (info,) = (info for info in after.graph.value_info if info.name == "r")
    assert [d.dim_value for d in info.type.tensor_type.shape.dim] == [4, 5]


def test_a_number_that_was_copied_to_an_output_is_one() -> None:
    """It has a shape without sizes, where that of what it was copied from is not known."""
    before = model("(float[3] x, int64[k] axes) => (float y) { m = ReduceSum<keepdims = 0>(x, axes)  y = Identity(m) }")
    before.opset_import[0].version = 18
    after = amp.convert(before).to_onnx()
    assert types(after) == ["ReduceSum"] and after.graph.output[0].type.tensor_type.HasField("shape")


@pytest.mark.parametrize("mode", ["pure", "mixed"])
def test_a_branch_that_reads_a_copy_and_what_it_is_of(mode: str) -> None:
    """It captures one variable then, once."""
    after = converted(
        "(float[4,4] x, float[4,4] w, float[1] n) => (float[4,4] y, float[4,4] z) { t = Identity(x)  s = Squeeze(n)"
        "  c = Cast<to = 9>(s)  y = If(c) <then_branch = one () => (float[4,4] a) { k = MatMul(x, t)  a = Add(k, x) },"
        "  else_branch = two () => (float[4,4] b) { b = MatMul(t, w) }>  z = MatMul(x, w) }",
        mode=mode,
    )
    assert "Identity" not in types(after)
