"""Pure 16 bit: golden programs before and after, and the rules one by one."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from amp_transpiler.errors import GraphError, OrderError, PrecisionError
from amp_transpiler.lists import AutoMixedPrecisionLists
from amp_transpiler.passes.precision.pure import cast_model_to_fp16
from amp_transpiler.passes.precision.rewrite import rewrite_program
from amp_transpiler.program import Program
from tests.helpers.golden import DEEP, assert_becomes, backend_models, program, reasons, run, shuffled, state

# ---------------------------------------------------------------- golden programs

USE_CASE = """main (float[1,1,6,6] image) => (float[1,4] prediction)
<float[1,1,3,3] conv_w = {1, 2, 3, 4, 5, 6, 7, 8, 9},
 float[4,4] fc_w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16},
 float[4] fc_b = {1, 2, 3, 4}, int64[2] flat = {1, 4}>
{
  [conv] c = Conv(image, conv_w)
  [head_relu] r = Relu(c)
  [head_pool] p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(r)
  [head_flat] f = Reshape(p, flat)
  [head_fc] m = MatMul(f, fc_w)
  [head_bias] a = Add(m, fc_b)
  [head_soft] prediction = Softmax(a)
}"""


def test_guard_and_custom_black_list() -> None:
    """The use case: what lies outside the guard stays fp32, and the pool runs in fp32 between casts."""
    p = program(USE_CASE)
    assert p.mark_fp16("head_*") == 6
    names = cast_model_to_fp16(p, AutoMixedPrecisionLists(custom_black_list=["pool2d"]))
    assert names == {"c", "p", "fc_w", "fc_b"}
    assert_becomes(
        p,
        """main (float[1,1,6,6] image) => (float[1,4] prediction)
    <float[1,1,3,3] conv_w = {1, 2, 3, 4, 5, 6, 7, 8, 9},
     float16[4,4] fc_w = {15360, 16384, 16896, 17408, 17664, 17920, 18176, 18432, 18560, 18688, 18816, 18944, 19072,
                          19200, 19328, 19456},
     float16[4] fc_b = {15360, 16384, 16896, 17408}, int64[2] flat = {1, 4}>
    {
      c = Conv(image, conv_w)
      "c.cast_fp16" = Cast<to = 10>(c)
      r = Relu("c.cast_fp16")
      "r.cast_fp32" = Cast<to = 1>(r)
      p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>("r.cast_fp32")
      "p.cast_fp16" = Cast<to = 10>(p)
      f = Reshape("p.cast_fp16", flat)
      m = MatMul(f, fc_w)
      a = Add(m, fc_b)
      "prediction.fp16" = Softmax(a)
      prediction = Cast<to = 1>("prediction.fp16")
    }""",
    )
    found = reasons(p)
    assert found["c"] == "fp32: outside fp16_guard"
    assert found["p"] == "fp32: custom black list"
    assert found["r"] == "fp16: inside fp16_guard"


def test_without_guard_the_feed_keeps_its_type() -> None:
    p = program("""main (float[2,2] x) => (float[2,2] y, float[2,2] z)
    <float[2,2] w = {1, 2, 3, 4}>
    {
      m = MatMul(x, w)
      y = Exp(m)
      z = Sub(x, y)
    }""")
    assert cast_model_to_fp16(p, use_fp16_guard=False) == {"x", "w"}
    assert_becomes(
        p,
        """main (float[2,2] x) => (float[2,2] y, float[2,2] z)
    <float16[2,2] w = {15360, 16384, 16896, 17408}>
    {
      "x.cast_fp16" = Cast<to = 10>(x)
      m = MatMul("x.cast_fp16", w)
      "y.fp16" = Exp(m)
      "z.fp16" = Sub("x.cast_fp16", "y.fp16")
      y = Cast<to = 1>("y.fp16")
      z = Cast<to = 1>("z.fp16")
    }""",
    )


def test_a_branch_that_gives_an_outer_variable_gives_its_declared_type() -> None:
    p = program("""main (bool c, float[2,2] x) => (float[2,2] y)
    {
      m = MatMul(x, x)
      y = If(c)<
        then_branch = yes () => (float[2,2] t) { t = Relu(m) },
        else_branch = no () => (float[2,2] e) { e = Identity(m) }
      >
    }""")
    no = p.var("y").producer.attrs["else_branch"]
    captured = next(v for v in no.variables if v.outer is not None)
    no.remove_operator(no.operators[0])
    no.outputs[0] = captured  # some exporters write it so
    cast_model_to_fp16(p, use_fp16_guard=False)
    assert [(v.name, v.dtype) for v in no.outputs] == [("m.cast_fp32", "float32")]
    assert no.outputs[0].outer is p.var("m.cast_fp32")
    assert {v.name for v in p.var("y").producer.captures} == {"m", "m.cast_fp32"}


# ---------------------------------------------------------------- rules


def test_custom_black_varnames_and_default_black_list() -> None:
    p = program("""main (float[2,2] x) => (float[2,2] y)
    <float[2,2] w = {1, 2, 3, 4}>
    {
      m = MatMul(x, w)
      s = Softmax(m)
      y = Relu(s)
    }""")
    names = cast_model_to_fp16(p, AutoMixedPrecisionLists(custom_black_varnames=["w"]), use_fp16_guard=False)
    found = reasons(p)
    assert names == {"m"} and p.var("w").dtype == "float32"
    assert found["m"] == "fp32: 'w' is in custom_black_varnames"
    assert found["s"] == "fp16: pure 16 bit"


def test_a_result_that_nothing_reads_is_fetched_in_its_declared_type() -> None:
    """A built program names no outputs: the loss is what nothing reads."""
    p = Program()
    x, label = p.add_input("x", "float32", (2, 2)), p.add_input("label", "int64", (2,))
    each, prob = p.add_variable("each", "float32"), p.add_variable("log_prob", "float32")
    loss = p.add_variable("loss", "float32")
    p.add_operator("SoftmaxCrossEntropyLoss", [x, label], [each, prob], attrs={"reduction": "none"})
    p.add_operator("ReduceMean", [each], [loss])
    cast_model_to_fp16(p, use_fp16_guard=False)
    assert loss.dtype == "float32" and loss.producer.type == "Cast"
    assert [v.name for v in loss.producer.inputs] == ["loss.fp16"]
    assert (each.dtype, prob.dtype) == ("float16", "float16")  # an optional output that nobody wants gets no cast


def test_dropout_keeps_its_ratio() -> None:
    p = program("""main (float[2,2] x) => (float[2,2] y)
    <float ratio = {0.1}, bool train = {1}>
    {
      y, mask = Dropout(x, ratio, train)
    }""")
    assert cast_model_to_fp16(p, use_fp16_guard=False) == {"x"}
    assert p.var("ratio").dtype == "float32" and p.var("y.fp16").dtype == "float16"


def test_types_that_an_attribute_sets_stay_and_are_cast_at_the_reader_but_for_fills() -> None:
    p = program("""main (float[2,2] x, int64[2] shape) => (float[2,2] y)
    {
      r = RandomNormalLike(x)
      c = ConstantOfShape<value = float[1] {0.5}>(shape)
      s = Add(r, c)
      y = Mul(x, s)
    }""")
    cast_model_to_fp16(p, use_fp16_guard=False)
    found = reasons(p)
    assert found["r"] == "untouched: an attribute sets its element type"
    assert found["c.cast_fp16"] == "fp16: a constant"
    assert {op.outputs[0].name for op in p.operators if op.type == "Cast"} == {
        "x.cast_fp16",
        "r.cast_fp16",
        "y",
    }


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_second_run_changes_nothing(dtype: str) -> None:
    p, lists = program(DEEP), AutoMixedPrecisionLists(dtype=dtype)
    first = cast_model_to_fp16(p, lists, use_fp16_guard=False)
    once, parameters = state(p), {v.name for v in p.parameters if v.dtype == dtype}
    assert parameters <= first
    assert cast_model_to_fp16(p, lists, use_fp16_guard=False) & {v.name for v in p.parameters} == parameters
    assert state(p) == once


@pytest.mark.parametrize("seed", range(4))
def test_the_result_does_not_depend_on_the_order_of_insertion(seed: int) -> None:
    straight, mixed = program(DEEP), shuffled(program(DEEP), seed)
    assert cast_model_to_fp16(straight, None, False) == cast_model_to_fp16(mixed, None, False)
    assert sorted(map(str, state(mixed))) == sorted(map(str, state(straight)))


# ---------------------------------------------------------------- refusals


def test_a_guard_that_marks_nothing() -> None:
    p = program(USE_CASE)
    before = state(p)
    with pytest.raises(PrecisionError) as error:
        cast_model_to_fp16(p)
    for way_out in ("fp16_guard", "mark_fp16", "use_fp16_guard=False"):
        assert way_out in str(error.value)
    assert state(p) == before


def test_other_refusals() -> None:
    p = program("main (float[2,2] x) => (float[2,2] y) { y = MatMul(x, x) }")
    p.operators[0].role = "backward"
    with pytest.raises(OrderError, match="cast_model_to_fp16"):
        cast_model_to_fp16(p, use_fp16_guard=False)
    p = program("main (float[2,2] x) => (y) { y = acme.Blend(x) }", domains=', "acme" : 1')
    with pytest.raises(GraphError, match="'y'"):
        cast_model_to_fp16(p, use_fp16_guard=False)


def test_operators_of_the_update_are_left_alone() -> None:
    p = Program()
    x = p.add_input("x", "float32", (2, 2))
    rate = p.add_variable("rate", "float32", (), persistable=True)
    m, lr = p.add_variable("m", "float32"), p.add_variable("lr", "float32")
    p.add_operator("MatMul", [x, x], [m])
    p.add_operator("Mul", [rate, rate], [lr], role="update")
    cast_model_to_fp16(p, use_fp16_guard=False)
    assert (rate.dtype, lr.dtype) == ("float32", "float32")
    assert lr.producer.reason == "untouched: an operator of role update"


# ---------------------------------------------------------------- the same model, run before and after


def test_numbers_before_and_after() -> None:
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal((2, 2)).astype(np.float32) for name in "xwu"} | {"ids": np.array([1, 0])}
    before, p = run(program(DEEP), feeds), program(DEEP)
    cast_model_to_fp16(p, use_fp16_guard=False)
    for old, new in zip(before, run(p, feeds), strict=True):
        assert old.dtype == new.dtype
        np.testing.assert_allclose(new, old, rtol=2e-2, atol=2e-2)


def test_pure_after_black_white_gray() -> None:
    """The passes may follow each other: parameters turn 16 bit, their casts of the first pass read them as they are."""
    p = program(DEEP)
    rewrite_program(p)
    cast_model_to_fp16(p, use_fp16_guard=False)
    p.verify()
    onnx.checker.check_model(p.to_onnx(), full_check=True)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_onnx_backend_models_stay_valid(dtype: str) -> None:
    """Every twelfth node test of onnx: full check, types of inputs and outputs, a second run."""
    narrowed, lists = 0, AutoMixedPrecisionLists(dtype=dtype)
    for name, model in backend_models():
        p = Program.from_onnx(model)
        if p.untyped():
            continue
        cast_model_to_fp16(p, lists, use_fp16_guard=False)
        p.verify()
        once = state(p)
        cast_model_to_fp16(p, lists, use_fp16_guard=False)
        assert state(p) == once, name
        result = p.to_onnx()
        onnx.checker.check_model(result, full_check=True)
        assert [v.type for v in result.graph.output] == [v.type for v in model.graph.output], name
        assert [v.type for v in result.graph.input] == [v.type for v in model.graph.input], name
        narrowed += any(op.precision == dtype for op in p.walk())
    assert narrowed > 20
