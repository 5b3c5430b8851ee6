"""The rules of black/white/gray rewriting, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from amp_transpiler.errors import ArgumentError, GraphError, OrderError, PrecisionError
from amp_transpiler.lists import AutoMixedPrecisionLists
from amp_transpiler.passes.precision.rewrite import rewrite_program
from amp_transpiler.program import Program
from tests.helpers.golden import DEEP, assert_becomes, program, reasons, shuffled, state

# ---------------------------------------------------------------- rules


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
        "a": "untouched: it computes in float64",
        "b": "untouched: no floating-point tensor",
        "t": "untouched: no floating-point tensor",
    }


def test_foreign_operators_are_fp32() -> None:
    p = program(
        """main (float[2,2] x) => (float[2,2] y)
    {
      m = MatMul(x, x)
      f = acme.Blend(m)
      y = Relu(f)
    }""",
        domains=', "acme" : 1',
    )
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
    assert_becomes(
        p,
        """main (float16[2,2] x) => (float16[2,2] y, float[2,2] z)
    {
      m = MatMul(x, x)
      r = Cast<to = 1>(m)
      "y.fp32" = Softmax(r)
      z = Exp(r)
      y = Cast<to = 10>("y.fp32")
    }""",
    )


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
    with pytest.raises(GraphError, match=r"'y', made by 'Blend -> y' \(acme::Blend\) has no element type.*value_info"):
        rewrite_program(p)
    assert state(p) == before


def test_an_operator_that_onnx_does_not_have_is_named_as_that() -> None:
    """Exporters leave in a model what they cannot write in operators of ONNX (tf2onnx: Erfc, Expm1, Bucketize)."""
    p = program("main (float[2,2] x) => (y) { m = MatMul(x, x) t = Erfc(m) y = Neg(t) }")
    with pytest.raises(GraphError, match=r"'Erfc -> t' \(Erfc\) is none of ai.onnx"):
        rewrite_program(p)


def test_an_operator_of_a_later_opset_is_named() -> None:
    """An exporter that was asked for an opset beyond its own wrote later operators and declared its own."""
    p = program("main (float[2,2] x) => (float[2,2] y) <float[2,2] m> { m = MatMul(x, x) y = Swish(m) }")
    with pytest.raises(GraphError, match=r"'Swish -> y' \(Swish\) came with opset 24, and the model declares opset 21"):
        rewrite_program(p)


def test_an_operator_that_does_not_fit_is_no_untyped_variable() -> None:
    p = program("main (float x, float[2,2] w) => (float y) { m = MatMul(x, w) y = Softmax(m) }")
    with pytest.raises(GraphError, match=r"'MatMul -> m' \(MatMul\) does not fit its inputs: .*wrong rank"):
        rewrite_program(p)


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
