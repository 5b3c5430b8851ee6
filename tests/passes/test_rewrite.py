"""Black/white/gray: golden programs before and after, and the rules one by one."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from amp_transpiler.lists import AutoMixedPrecisionLists
from amp_transpiler.passes.precision.rewrite import rewrite_program
from amp_transpiler.program import Program
from tests.helpers.golden import DEEP, assert_becomes, backend_models, program, reasons, run, state

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
    assert_becomes(
        p,
        """main (float[2,2] x) => (float[2,2] y)
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
    }""",
    )
    assert reasons(p) == {
        "m": "fp16: white list",
        "r": "fp16: follows MatMul -> m",
        "s": "fp32: black list",
        "y.fp16": "fp16: white list",
    }


@pytest.mark.parametrize("add", ["Add(m, e)", "Add(e, m)"])
def test_black_wins_over_white_in_either_slot(add: str) -> None:
    p = program(f"""main (float[2,2] x, float[2,2] w) => (float[2,2] y)
    {{
      m = MatMul(x, w)
      e = Exp(x)
      y = {add}
    }}""")
    rewrite_program(p)
    assert_becomes(
        p,
        f"""main (float[2,2] x, float[2,2] w) => (float[2,2] y)
    {{
      "x.cast_fp16" = Cast<to = 10>(x)
      "w.cast_fp16" = Cast<to = 10>(w)
      m = MatMul("x.cast_fp16", "w.cast_fp16")
      e = Exp(x)
      "m.cast_fp32" = Cast<to = 1>(m)
      y = {add.replace("m", '"m.cast_fp32"')}
    }}""",
    )
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
    assert_becomes(
        p,
        """main (float[2,2] x, float[2,2] w) => (float[2,2] y)
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
    }""",
    )


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
    assert_becomes(
        p,
        """main (float[2,2] x, float[2,2] w) => (float[2,2] y, float[2,2] z)
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
    }""",
    )


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
    assert_becomes(
        p,
        """main (float[2,2] x, float[2,2] w) => (float[2,2] y, float[2,2] z)
    {
      "x.cast_fp16" = Cast<to = 10>(x)
      "w.cast_fp16" = Cast<to = 10>(w)
      m = MatMul("x.cast_fp16", "w.cast_fp16")
      up = Cast<to = 1>(m)
      r = Relu(up)
      y = Add(r, up)
      "z.fp16" = MatMul(m, "w.cast_fp16")
      z = Cast<to = 1>("z.fp16")
    }""",
    )


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
    assert_becomes(
        p,
        """main (bool c, float[2,2] x) => (float[2,2] y)
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
    }""",
    )
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
    assert_becomes(
        p,
        """main (int64 n, bool go, float[2,2] x) => (float[2,2] y)
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
    }""",
    )


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


# ---------------------------------------------------------------- the same model, run before and after


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
