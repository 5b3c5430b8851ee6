"""Black/white/gray: golden programs before and after, and the rules one by one."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import onnx
import onnxruntime
import pytest
from golden import assert_becomes, program, state

from amp_transpiler.errors import ArgumentError, GraphError, OrderError, PrecisionError
from amp_transpiler.ir.program import Program
from amp_transpiler.lists import AutoMixedPrecisionLists
from amp_transpiler.passes.rewrite import rewrite_program


def reasons(program: Program) -> dict[str, str]:
    """Reason by first output, without the casts that the pass inserted."""
    return {op.outputs[0].name: op.reason for op in program.walk() if not op.reason.startswith("cast: ")}


# ---------------------------------------------------------------- golden programs


def test_white_black_gray() -> None:
    p = program("""main (float[2,2] x) => (float[2,2] y)
    <float[2,2] w = {1, 2, 3, 4}>
    {
      m = MatMul(x, w)
      r = Relu(m)
      s = Softmax(r)
      y = MatMul(s, w)
    }""")
    rewrite_program(p)
    assert_becomes(p, """main (float[2,2] x) => (float[2,2] y)
    <float[2,2] w = {1, 2, 3, 4}>
    {
      "x.cast_fp16" = Cast<to = 10>(x)
      "w.cast_fp16" = Cast<to = 10>(w)
      m = MatMul("x.cast_fp16", "w.cast_fp16")
      r = Relu(m)
      "r.cast_fp32" = Cast<to = 1>(r)
      s = Softmax("r.cast_fp32")
      "s.cast_fp16" = Cast<to = 10>(s)
      "y.fp16" = MatMul("s.cast_fp16", "w.cast_fp16")
      y = Cast<to = 1>("y.fp16")
    }""")
    assert reasons(p) == {
        "m": "fp16: white list", "r": "fp16: follows MatMul -> m", "s": "fp32: black list",
        "y.fp16": "fp16: white list",
    }  # fmt: skip


@pytest.mark.parametrize("add", ["Add(m, e)", "Add(e, m)"])
def test_black_wins_over_white_in_either_slot(add: str) -> None:
    p = program(f"""main (float[2,2] x, float[2,2] w) => (float[2,2] y)
    {{
      m = MatMul(x, w)
      e = Exp(x)
      y = {add}
    }}""")
    rewrite_program(p)
    assert_becomes(p, f"""main (float[2,2] x, float[2,2] w) => (float[2,2] y)
    {{
      "x.cast_fp16" = Cast<to = 10>(x)
      "w.cast_fp16" = Cast<to = 10>(w)
      m = MatMul("x.cast_fp16", "w.cast_fp16")
      e = Exp(x)
      "m.cast_fp32" = Cast<to = 1>(m)
      y = {add.replace("m", '"m.cast_fp32"')}
    }}""")
    assert reasons(p)["y"] == "fp32: follows Exp -> e"


def test_gray_with_neither_producer_is_untouched() -> None:
    text = """main (float[2,2] x) => (float[2,2] y)
    <float[2,2] b = {1, 2, 3, 4}>
    {
      a = Add(x, b)
      y = Relu(a)
    }"""
    p = program(text)
    rewrite_program(p)
    assert_becomes(p, text)
    assert set(reasons(p).values()) == {"untouched: no 16-bit producer"}
    assert {op.precision for op in p.operators} == {"float32"}


def test_layer_norm_shares_one_type_and_batch_norm_does_not() -> None:
    p = program("""main (float[2,2] x, float[2,2] w) => (float[2,2] y)
    <float[2] scale = {1, 1}, float[2] bias = {0, 0}, float[2] mean = {0, 0}, float[2] var = {1, 1}>
    {
      m = MatMul(x, w)
      l = LayerNormalization(m, scale, bias)
      y = BatchNormalization(l, scale, bias, mean, var)
    }""")
    rewrite_program(p)
    assert_becomes(p, """main (float[2,2] x, float[2,2] w) => (float[2,2] y)
    <float[2] scale = {1, 1}, float[2] bias = {0, 0}, float[2] mean = {0, 0}, float[2] var = {1, 1}>
    {
      "x.cast_fp16" = Cast<to = 10>(x)
      "w.cast_fp16" = Cast<to = 10>(w)
      m = MatMul("x.cast_fp16", "w.cast_fp16")
      "scale.cast_fp16" = Cast<to = 10>(scale)
      "bias.cast_fp16" = Cast<to = 10>(bias)
      l = LayerNormalization(m, "scale.cast_fp16", "bias.cast_fp16")
      "y.fp16" = BatchNormalization(l, scale, bias, mean, var)
      y = Cast<to = 1>("y.fp16")
    }""")


def test_a_constant_is_converted_and_becomes_two_only_where_both_precisions_read_it() -> None:
    p = program("""main (float[2,2] x, float[2,2] w) => (float[2,2] y, float[2,2] z)
    <float half = {0.5}, float both = {0.1}>
    {
      node = Constant<value_float = 3.0>()
      m = MatMul(x, w)
      a = Mul(m, half)
      b = Add(a, both)
      y = Sub(b, node)
      e = Exp(x)
      z = Mul(e, both)
    }""")
    rewrite_program(p)
    assert_becomes(p, """main (float[2,2] x, float[2,2] w) => (float[2,2] y, float[2,2] z)
    <float16 half = {14336}, float both = {0.1}, float16 "both.cast_fp16" = {11878}>
    {
      node = Constant<value = float16 {16896}>()
      "x.cast_fp16" = Cast<to = 10>(x)
      "w.cast_fp16" = Cast<to = 10>(w)
      m = MatMul("x.cast_fp16", "w.cast_fp16")
      a = Mul(m, half)
      b = Add(a, "both.cast_fp16")
      "y.fp16" = Sub(b, node)
      e = Exp(x)
      z = Mul(e, both)
      y = Cast<to = 1>("y.fp16")
    }""")


def test_the_users_casts_keep_their_type_and_widening_pairs_are_bypassed() -> None:
    p = program("""main (float[2,2] x, float[2,2] w) => (float[2,2] y, float[2,2] z)
    {
      m = MatMul(x, w)
      up = Cast<to = 1>(m)
      r = Relu(up)
      y = Add(r, m)
      up2 = Cast<to = 1>(m)
      z = MatMul(up2, w)
    }""")
    rewrite_program(p)
    # up says "in fp32 from here on"; up2 would only be rounded again, which loses nothing of a 16-bit value
    assert_becomes(p, """main (float[2,2] x, float[2,2] w) => (float[2,2] y, float[2,2] z)
    {
      "x.cast_fp16" = Cast<to = 10>(x)
      "w.cast_fp16" = Cast<to = 10>(w)
      m = MatMul("x.cast_fp16", "w.cast_fp16")
      up = Cast<to = 1>(m)
      r = Relu(up)
      y = Add(r, up)
      "z.fp16" = MatMul(m, "w.cast_fp16")
      z = Cast<to = 1>("z.fp16")
    }""")


def test_a_narrowing_pair_stays_for_its_rounding_is_meant() -> None:
    text = """main (float[2,2] x) => (float[2,2] y)
    {
      down = Cast<to = 10>(x)
      up = Cast<to = 1>(down)
      y = Exp(up)
    }"""
    p = program(text)
    rewrite_program(p)
    assert_becomes(p, text)


def test_a_cast_of_integers_says_nothing_about_precision() -> None:
    p = program("""main (float[2,2] x, float[2,2] w, int64[2,2] mask) => (float[2,2] y)
    {
      m = MatMul(x, w)
      f = Cast<to = 1>(mask)
      y = Mul(m, f)
    }""")
    rewrite_program(p)
    assert reasons(p)["y.fp16"] == "fp16: follows MatMul -> m"


def test_nested_graphs_share_the_casts_of_the_outer_one() -> None:
    p = program("""main (bool c, float[2,2] x) => (float[2,2] y)
    <float[2,2] w = {1, 2, 3, 4}>
    {
      m = MatMul(x, w)
      y = If(c)<
        then_branch = yes () => (float[2,2] t) { a = MatMul(x, w) t = Relu(a) },
        else_branch = no () => (float[2,2] e) { e = Softmax(m) }
      >
    }""")
    rewrite_program(p)
    assert_becomes(p, """main (bool c, float[2,2] x) => (float[2,2] y)
    <float[2,2] w = {1, 2, 3, 4}>
    {
      "x.cast_fp16" = Cast<to = 10>(x)
      "w.cast_fp16" = Cast<to = 10>(w)
      m = MatMul("x.cast_fp16", "w.cast_fp16")
      "m.cast_fp32" = Cast<to = 1>(m)
      y = If(c)<
        then_branch = yes () => (float[2,2] t) {
          a = MatMul("x.cast_fp16", "w.cast_fp16") "t.fp16" = Relu(a) t = Cast<to = 1>("t.fp16") },
        else_branch = no () => (float[2,2] e) { e = Softmax("m.cast_fp32") }
      >
    }""")
    assert reasons(p)["y"] == "untouched: its nested graphs are rewritten inside"


def test_a_loop_casts_its_weight_outside_and_carries_its_declared_type() -> None:
    p = program("""main (int64 n, bool go, float[2,2] x) => (float[2,2] y)
    <float[2,2] w = {1, 2, 3, 4}>
    {
      m = MatMul(x, w)
      y = Loop(n, go, m)<
        body = step (int64 i, bool run, float[2,2] h) => (bool again, float[2,2] next) {
          again = Identity(run)
          a = MatMul(h, w)
          next = Tanh(a)
        }
      >
    }""")
    rewrite_program(p)
    assert_becomes(p, """main (int64 n, bool go, float[2,2] x) => (float[2,2] y)
    <float[2,2] w = {1, 2, 3, 4}>
    {
      "x.cast_fp16" = Cast<to = 10>(x)
      "w.cast_fp16" = Cast<to = 10>(w)
      m = MatMul("x.cast_fp16", "w.cast_fp16")
      "m.cast_fp32" = Cast<to = 1>(m)
      y = Loop(n, go, "m.cast_fp32")<
        body = step (int64 i, bool run, float[2,2] h) => (bool again, float[2,2] next) {
          again = Identity(run)
          "h.cast_fp16" = Cast<to = 10>(h)
          a = MatMul("h.cast_fp16", "w.cast_fp16")
          "next.fp16" = Tanh(a)
          next = Cast<to = 1>("next.fp16")
        }
      >
    }""")


def test_a_black_control_flow_operator_keeps_what_is_inside() -> None:
    p = program("""main (bool c, float[2,2] x) => (float[2,2] y)
    {
      [gate] y = If(c)<
        then_branch = yes () => (float[2,2] t) { t = MatMul(x, x) },
        else_branch = no () => (float[2,2] e) { e = Relu(x) }
      >
    }""")
    before = p.to_onnx().SerializeToString()
    rewrite_program(p, AutoMixedPrecisionLists(custom_black_list=["If"]))
    assert reasons(p)["t"] == "fp32: inside 'gate', black list"
    assert not any(op.type == "Cast" for op in p.walk())
    assert len(before) < len(p.to_onnx().SerializeToString())  # the reasons went out with it


# ---------------------------------------------------------------- rules

DEEP = """main (float[2,2] x, float[2,2] w, float[2,2] u, int64[2] ids) => (float[2,2] y, float[1,1] z, int64[2] n)
<float[2,2] table = {1, 2, 3, 4}, float[2] scale = {1, 1}>
{
  m = MatMul(x, w)
  g = Gather(table, ids)
  a = Add(m, u)
  b = Add(a, g)
  l = LayerNormalization(a, scale)
  s = Softmax(l)
  t = Transpose(l)
  c = Concat<axis = 0>(t, m)
  k = MatMul(s, t)
  y = Add(k, b)
  z = ReduceMean<keepdims = 1>(c)
  n = Shape(k)
}"""


def shuffled(p: Program, seed: int) -> Program:
    """The same program, its operators and variables added in another order."""
    rng, new = random.Random(seed), Program(p.name)
    new.info.opsets = dict(p.info.opsets)
    for v in p.inputs:
        new.add_input(v.name, v.dtype, v.shape)
    rest = [v for v in p.variables if not v.is_input]
    for v in rng.sample(rest, len(rest)):
        new.add_variable(v.name, v.dtype, v.shape, persistable=v.persistable, trainable=v.trainable, data=v.data)
    for op in rng.sample(p.operators, len(p.operators)):
        new.add_operator(op.type, [new.var(v.name) for v in op.inputs], [new.var(v.name) for v in op.outputs],
                         attrs=op.attrs.copy())  # fmt: skip
    new.outputs = [new.var(v.name) for v in p.outputs]
    return new


@pytest.mark.parametrize("seed", range(8))
def test_the_result_does_not_depend_on_the_order_of_insertion(seed: int) -> None:
    straight, mixed = program(DEEP), shuffled(program(DEEP), seed)
    assert [op.type for op in mixed.operators] != [op.type for op in straight.operators] or seed
    rewrite_program(straight)
    rewrite_program(mixed)
    assert sorted(map(str, state(mixed))) == sorted(map(str, state(straight)))


def test_a_second_run_changes_nothing() -> None:
    p = program(DEEP)
    rewrite_program(p)
    once = state(p)
    rewrite_program(p)
    assert state(p) == once
    again = Program.from_onnx(p.to_onnx())  # nor after a round trip through a file
    rewrite_program(again)
    assert state(again) == once


def test_every_operator_has_a_precision_and_a_reason() -> None:
    p = program(DEEP)
    rewrite_program(p)
    assert all(op.precision in ("float16", "float32") and op.reason for op in p.operators)
    assert reasons(p)["g"] == "fp32: Gather on the trainable table 'table'"
    assert reasons(p)["b"] == "fp32: follows Gather -> g"
    assert reasons(p)["n"] == "untouched: it reads only a shape"
    assert [v.dtype for v in p.parameters] == ["float32", "float32"]


def test_gather_on_a_frozen_table_is_gray() -> None:
    p = program("""main (int64[2] ids, float[2,2] x) => (float[2,2] y)
    <float[2,2] table = {1, 2, 3, 4}>
    {
      t = Gather(table, ids)
      m = MatMul(t, x)
      y = Add(m, t)
    }""")
    p.var("table").trainable = False
    rewrite_program(p)
    assert reasons(p)["t"] == "untouched: no 16-bit producer"
    assert reasons(p)["y.fp16"] == "fp16: follows MatMul -> m"


@pytest.mark.parametrize("name", ["m", "r"])
def test_black_varnames(name: str) -> None:
    p = program("""main (float[2,2] x) => (float[2,2] y)
    {
      m = MatMul(x, x)
      r = Relu(m)
      y = MatMul(r, r)
    }""")
    rewrite_program(p, AutoMixedPrecisionLists(custom_black_varnames=[name]))
    assert p.var(name).dtype == "float32"
    found = reasons(p)
    assert found["r"] == f"fp32: '{name}' is in custom_black_varnames"
    assert found["m"] == (f"fp32: '{name}' is in custom_black_varnames" if name == "m" else "fp16: white list")
    once = state(p)
    rewrite_program(p, AutoMixedPrecisionLists(custom_black_varnames=[name]))
    assert state(p) == once


def test_other_types_are_untouched() -> None:
    text = """main (double[2,2] d, int64[2,2] i, string[2] s) => (double[2,2] a, int64[2,2] b, string[2] t)
    {
      a = MatMul(d, d)
      b = MatMul(i, i)
      t = Identity(s)
    }"""
    p = program(text)
    rewrite_program(p)
    assert_becomes(p, text)
    assert reasons(p) == {
        "a": "untouched: it computes in float64", "b": "untouched: no floating-point tensor",
        "t": "untouched: no floating-point tensor",
    }  # fmt: skip


def test_foreign_operators_are_fp32() -> None:
    p = program("""main (float[2,2] x) => (float[2,2] y)
    {
      m = MatMul(x, x)
      f = acme.Blend(m)
      y = Relu(f)
    }""", domains=', "acme" : 1')  # fmt: skip
    p.var("f").dtype = "float32"
    rewrite_program(p)
    assert reasons(p)["f"] == "fp32: in no list"
    assert reasons(p)["y"] == "fp32: follows Blend -> f"
    assert [op.inputs[0].name for op in p.operators if op.type == "Blend"] == ["m.cast_fp32"]


def test_bfloat16() -> None:
    p = program("""main (float[1,1,4,4] x, float[1,1,1,1] w) => (float[1,1,2,2] y)
    {
      m = MatMul(x, x)
      p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(m)
      y = Relu(p)
    }""")
    rewrite_program(p, AutoMixedPrecisionLists(dtype="bfloat16"))
    found = reasons(p)
    assert found["m"] == "bf16: white list" and p.var("m").dtype == "bfloat16"
    assert found["p"].startswith("fp32: no CUDA kernel for MaxPool at bfloat16")
    assert found["y"] == "fp32: follows MaxPool -> p"
    assert {op.outputs[0].name for op in p.operators if op.type == "Cast"} == {"x.cast_bf16", "m.cast_fp32"}


def test_a_type_that_the_opset_does_not_admit_stays_fp32() -> None:
    p = program("main (float[2,2] x) => (float[2,2] y) { y = MatMul(x, x) }", opset=11)
    rewrite_program(p, AutoMixedPrecisionLists(dtype="bfloat16"))
    assert reasons(p) == {"y": "fp32: Cast does not know bfloat16 at opset 11"}
    text = "main (float[2,2] x, bool[2,2] c) => (float[2,2] y) { m = MatMul(x, x) y = Where(c, m, x) }"
    p = program(text, opset=13)
    rewrite_program(p, AutoMixedPrecisionLists(dtype="bfloat16"))
    assert reasons(p)["y"] == "fp32: Where does not take bfloat16 at opset 13"


def test_a_program_that_is_16_bit_already() -> None:
    p = program("""main (float16[2,2] x) => (float16[2,2] y, float[2,2] z)
    {
      m = MatMul(x, x)
      y = Softmax(m)
      r = Cast<to = 1>(m)
      z = Exp(r)
    }""")
    rewrite_program(p)
    assert_becomes(p, """main (float16[2,2] x) => (float16[2,2] y, float[2,2] z)
    {
      m = MatMul(x, x)
      r = Cast<to = 1>(m)
      "y.fp32" = Softmax(r)
      z = Exp(r)
      y = Cast<to = 10>("y.fp32")
    }""")


def test_state_updates_keep_their_type() -> None:
    p = Program()
    x = p.add_input("x", "float32", (2, 2))
    total = p.add_variable("total", "float32", (2, 2), persistable=True)
    m, new = p.add_variable("m", "float32"), p.add_variable("total@NEW", "float32")
    p.add_operator("MatMul", [x, x], [m])
    p.add_operator("Add", [m, total], [new])
    p.set_update(total, new)
    rewrite_program(p)
    assert (total.dtype, new.dtype) == ("float32", "float32")
    assert p.updates == {total: new} and new.producer.type == "Cast"


# ---------------------------------------------------------------- refusals


def test_an_untyped_variable_is_named() -> None:
    p = program("main (float[2,2] x) => (y) { m = MatMul(x, x) y = acme.Blend(m) }", domains=', "acme" : 1')
    before = state(p)
    with pytest.raises(GraphError, match=r"'y', made by 'Blend -> y' \(acme::Blend\) has no element type"):
        rewrite_program(p)
    assert state(p) == before


@pytest.mark.parametrize("dtype, value", [("float16", 70000.0), ("bfloat16", 3.4e38)])
def test_a_constant_beyond_the_range_is_named_before_anything_changes(dtype: str, value: float) -> None:
    p = program(f"""main (float[2,2] x) => (float[2,2] y)
    <float fine = {{2.0}}, float big = {{-{value}}}>
    {{
      m = MatMul(x, x)
      f = Mul(m, fine)
      y = Add(f, big)
    }}""")
    before, bytes_before = state(p), p.to_onnx().SerializeToString()
    with pytest.raises(PrecisionError, match=r"constant 'big' .* beyond the range of .*custom_black_varnames"):
        rewrite_program(p, AutoMixedPrecisionLists(dtype=dtype))
    assert state(p) == before and p.to_onnx().SerializeToString() == bytes_before
    rewrite_program(p, AutoMixedPrecisionLists(dtype=dtype, custom_black_varnames=["big"]))
    assert p.var("y").producer.precision == "float32"


def test_infinite_constants_are_no_overflow() -> None:
    p = program("main (float[2,2] x) => (float[2,2] y) { m = MatMul(x, x) y = Add(m, m) }")
    inf = p.add_constant("inf", np.array(-np.inf, np.float32))
    p.var("y").producer.set_input(1, inf)
    rewrite_program(p)
    assert inf.dtype == "float16"


def test_a_black_varname_that_is_not_there() -> None:
    p = program("main (float[2,2] x) => (float[2,2] y) { y = Relu(x) }")
    lists = AutoMixedPrecisionLists(custom_black_varnames=["yy"])
    with pytest.raises(ArgumentError, match=r"no variable 'yy'.*did you mean 'y'"):
        rewrite_program(p, lists)
    rewrite_program(p, lists, names_must_exist=False)


def test_after_the_backward_pass_it_is_too_late() -> None:
    p = program("main (float[2,2] x) => (float[2,2] y) { y = MatMul(x, x) }")
    p.operators[0].role = "backward"
    with pytest.raises(OrderError, match="before append_backward or minimize"):
        rewrite_program(p)


# ---------------------------------------------------------------- the same model, run before and after


def run(p: Program, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(p.to_onnx().SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def test_numbers_before_and_after() -> None:
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal((2, 2)).astype(np.float32) for name in "xwu"} | {"ids": np.array([1, 0])}
    before, p = run(program(DEEP), feeds), program(DEEP)
    rewrite_program(p)
    after = run(p, feeds)
    for old, new in zip(before, after, strict=True):
        assert old.dtype == new.dtype
        np.testing.assert_allclose(new, old, rtol=1e-2, atol=1e-2)
    assert any(not np.array_equal(old, new) for old, new in zip(before, after, strict=True))


def backend_models() -> Iterator[tuple[str, onnx.ModelProto]]:
    from onnx.backend.test.case.node import collect_testcases

    for case in collect_testcases(None)[::12]:
        yield case.name, case.model


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_onnx_backend_models_stay_valid(dtype: str) -> None:
    """Every twelfth node test of onnx: full check, types of inputs and outputs, a second run."""
    narrowed = 0
    for name, model in backend_models():
        p = Program.from_onnx(model)
        if p.untyped():
            continue
        rewrite_program(p, AutoMixedPrecisionLists(dtype=dtype))
        p.verify()
        once = state(p)
        rewrite_program(p, AutoMixedPrecisionLists(dtype=dtype))
        assert state(p) == once, name
        result = p.to_onnx()
        onnx.checker.check_model(result, full_check=True)
        assert [v.type for v in result.graph.output] == [v.type for v in model.graph.output], name
        assert [v.type for v in result.graph.input] == [v.type for v in model.graph.input], name
        narrowed += any(op.precision == dtype for op in p.walk())
    assert narrowed > 5
