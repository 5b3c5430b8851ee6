"""Pure 16 bit: in which type parameters, tables and states are stored."""

from __future__ import annotations

import onnx
import pytest

from amp_transpiler.errors import PrecisionError
from amp_transpiler.lists import AutoMixedPrecisionLists
from amp_transpiler.passes.precision.pure import cast_model_to_fp16
from amp_transpiler.program import Program
from tests.helpers.golden import assert_becomes, program, reasons, state


def test_a_parameter_of_both_precisions_is_stored_16_bit() -> None:
    p = program("""main (float[2,2] x) => (float[2,2] y)
    <float[2,2] w = {1, 2, 3, 4}>
    {
      [in] m = MatMul(x, w)
      [out] y = MatMul(m, w)
    }""")
    p.mark_fp16("in")
    assert cast_model_to_fp16(p) == {"x", "w"}
    assert_becomes(
        p,
        """main (float[2,2] x) => (float[2,2] y)
    <float16[2,2] w = {15360, 16384, 16896, 17408}>
    {
      "x.cast_fp16" = Cast<to = 10>(x)
      m = MatMul("x.cast_fp16", w)
      "m.cast_fp32" = Cast<to = 1>(m)
      "w.cast_fp32" = Cast<to = 1>(w)
      y = MatMul("m.cast_fp32", "w.cast_fp32")
    }""",
    )


def test_norm_parameters_stay_fp32_even_where_a_16_bit_operator_reads_them_too() -> None:
    p = program("""main (float[2,2] x) => (float[2,2] y)
    <float[2] scale = {1, 1}, float[2] bias = {0, 0}, float[2] mean = {0, 0}, float[2] var = {1, 1}>
    {
      l = LayerNormalization(x, scale, bias)
      n = BatchNormalization(l, scale, bias, mean, var)
      y = Mul(n, scale)
    }""")
    assert cast_model_to_fp16(p, use_fp16_guard=False) == {"x", "scale"}
    assert_becomes(
        p,
        """main (float[2,2] x) => (float[2,2] y)
    <float[2] scale = {1, 1}, float[2] bias = {0, 0}, float[2] mean = {0, 0}, float[2] var = {1, 1}>
    {
      "x.cast_fp16" = Cast<to = 10>(x)
      "scale.cast_fp16" = Cast<to = 10>(scale)
      "bias.cast_fp16" = Cast<to = 10>(bias)
      l = LayerNormalization("x.cast_fp16", "scale.cast_fp16", "bias.cast_fp16")
      n = BatchNormalization(l, scale, bias, mean, var)
      "y.fp16" = Mul(n, "scale.cast_fp16")
      y = Cast<to = 1>("y.fp16")
    }""",
    )


def test_gather_on_a_trainable_table_is_fp32() -> None:
    p = program("""main (int64[2] ids, float[2,2] x) => (float[2,2] y)
    <float[2,2] table = {1, 2, 3, 4}>
    {
      g = Gather(table, ids)
      y = Add(g, x)
    }""")
    assert cast_model_to_fp16(p, use_fp16_guard=False) == {"g", "x"}
    assert p.var("table").dtype == "float32"
    assert reasons(p)["g"] == "fp32: Gather on the trainable table 'table'"


def test_gather_on_a_tied_table_moves_16_bit_rows_and_then_casts() -> None:
    p = program("""main (int64[2] ids, float[2,2] x) => (float[2,2] y, float[2,2] z)
    <float[2,2] table = {1, 2, 3, 4}>
    {
      g = Gather(table, ids)
      [low] y = MatMul(g, table)
      [high] z = Exp(g)
    }""")
    p.mark_fp16("low")
    assert cast_model_to_fp16(p) == {"table"}
    assert_becomes(
        p,
        """main (int64[2] ids, float[2,2] x) => (float[2,2] y, float[2,2] z)
    <float16[2,2] table = {15360, 16384, 16896, 17408}>
    {
      g = Gather(table, ids)
      "y.fp16" = MatMul(g, table)
      "g.cast_fp32" = Cast<to = 1>(g)
      z = Exp("g.cast_fp32")
      y = Cast<to = 1>("y.fp16")
    }""",
    )
    assert reasons(p)["g"] == "fp16: moves rows of the 16-bit table 'table'"


def test_the_rows_of_a_tied_table_keep_their_type_where_their_name_is_black() -> None:
    p = program("""main (int64[2] ids, float[2,2] x) => (float[2,2] y)
    <float[2,2] table = {1, 2, 3, 4}>
    {
      g = Gather(table, ids)
      e = Exp(g)
      y = MatMul(e, table)
    }""")
    lists = AutoMixedPrecisionLists(custom_black_varnames=["g"])
    assert cast_model_to_fp16(p, lists, use_fp16_guard=False) == {"e", "table"}
    assert (p.var("g").dtype, p.var("g.fp16").dtype, p.var("table").dtype) == ("float32", "float16", "float16")
    assert [v.name for v in p.operators[0].outputs if v is not None] == ["g.fp16"]


def test_a_parameter_that_only_a_nested_graph_reads() -> None:
    p = program("""main (bool c, float[2,2] x) => (float[2,2] y)
    <float[2,2] w = {1, 2, 3, 4}, float[2,2] v = {1, 2, 3, 4}>
    {
      [gate] y = If(c)<
        then_branch = yes () => (float[2,2] t) { t = MatMul(x, w) },
        else_branch = no () => (float[2,2] e) { k = Constant<value = float {2.0}>() e = Mul(x, k) }
      >
      u = Exp(v)
    }""")
    p.mark_fp16("gate")  # marks what is inside as well
    assert cast_model_to_fp16(p) == {"x", "w"}
    assert_becomes(
        p,
        """main (bool c, float[2,2] x) => (float[2,2] y)
    <float16[2,2] w = {15360, 16384, 16896, 17408}, float[2,2] v = {1, 2, 3, 4}>
    {
      "x.cast_fp16" = Cast<to = 10>(x)
      y = If(c)<
        then_branch = yes () => (float[2,2] t) { "t.fp16" = MatMul("x.cast_fp16", w) t = Cast<to = 1>("t.fp16") },
        else_branch = no () => (float[2,2] e) {
          k = Constant<value = float16 {16384}>() "e.fp16" = Mul("x.cast_fp16", k) e = Cast<to = 1>("e.fp16") }
      >
      u = Exp(v)
    }""",
    )


def test_frozen_parameters_become_16_bit_and_states_do_not() -> None:
    p = Program()
    x = p.add_input("x", "float32", (2, 2))
    frozen = p.add_variable("frozen", "float32", (2, 2), persistable=True)
    total = p.add_variable("total", "float32", (2, 2), persistable=True)
    m, new = p.add_variable("m", "float32"), p.add_variable("total@NEW", "float32")
    p.add_operator("MatMul", [x, frozen], [m])
    p.add_operator("Add", [m, total], [new])
    p.set_update(total, new)
    assert cast_model_to_fp16(p, use_fp16_guard=False) == {"x", "frozen", "total"}
    assert (frozen.dtype, total.dtype, new.dtype) == ("float16", "float32", "float32")


def test_a_state_that_an_operator_starts_itself_has_the_type_of_its_data() -> None:
    """Its type variable has no input where the first state is left out; ONNX's inference takes the data's then."""
    text = """main (float[1,2,4] q) => (float[1,2,4] y, float[1,1,4,4] state)
    {
      y, state = LinearAttention<q_num_heads = 1, kv_num_heads = 1, update_rule = "linear">(q, q, q)
    }"""
    p = program(text, opset=27)
    cast_model_to_fp16(p, use_fp16_guard=False)
    assert (p.var("y.fp16").dtype, p.var("state.fp16").dtype) == ("float16", "float16")
    onnx.checker.check_model(p.to_onnx(), full_check=True)


def test_a_parameter_beyond_the_range_is_named_before_anything_changes() -> None:
    p = program("""main (float[2,2] x) => (float[2,2] y)
    <float[2,2] v = {1, 2, 3, 4}, float[2,2] w = {1, 2, 70000, 4}>
    {
      m = MatMul(x, v)
      y = MatMul(m, w)
    }""")
    before, bytes_before = state(p), p.to_onnx().SerializeToString()
    with pytest.raises(PrecisionError, match=r"parameter 'w' of program 'main' holds 70000, beyond the range"):
        cast_model_to_fp16(p, use_fp16_guard=False)
    assert state(p) == before and p.to_onnx().SerializeToString() == bytes_before
    assert cast_model_to_fp16(p, AutoMixedPrecisionLists(dtype="bfloat16"), False) >= {"v", "w"}
