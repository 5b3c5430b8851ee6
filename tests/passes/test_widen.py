"""A 16-bit model becomes the fp32 one that it stands for, before it is trained."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.passes.precision.widen import widen
from tests.helpers.sessions import run

HALF = {onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}


def model_of(text: str, **weights: np.ndarray) -> onnx.ModelProto:
    """A model of ONNX text, in which a float16 number is written as its bits: 14336 is 0.5, 15360 1, 16384 2."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21, "other" : 1]>\n{text}')
    for name, array in weights.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def widened(model: onnx.ModelProto) -> onnx.ModelProto:
    program = amp.Program.from_onnx(model)
    assert widen(program)
    program.verify()
    return program.to_onnx()


def types_in(model: onnx.ModelProto) -> set[int]:
    """Element types of weights and of what casts make, attributes included."""
    found = {t.data_type for t in model.graph.initializer}
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name in ("to", "dtype"):
                found.add(attribute.i)
            if attribute.HasField("t"):
                found.add(attribute.t.data_type)
    return found


def test_weights_casts_and_constants_are_fp32() -> None:
    rng = np.random.default_rng(0)
    w, b = rng.normal(size=(4, 3)).astype(np.float16), rng.normal(size=3).astype(np.float16)
    model = model_of(
        """net (float[n, 4] x) => (float[n, 3] y) {
            xh = Cast <to = 10> (x)
            m = MatMul (xh, w)
            size = Constant <value_ints = [3]> ()
            ones = ConstantOfShape <value = float16[1] {15360}> (size)
            half = Constant <value = float16[1] {14336}> ()
            s = Add (m, b)
            t = Mul (s, half)
            u = Sub (t, ones)
            wide = Cast <to = 1> (u)
            soft = Softmax (wide)
            narrow = Cast <to = 10> (soft)
            z = Neg (narrow)
            y = Cast <to = 1> (z)
        }""",
        w=w,
        b=b,
    )
    after = widened(model)
    assert not types_in(after) & HALF
    assert "Cast" not in {n.op_type for n in after.graph.node}
    x = rng.normal(size=(5, 4)).astype(np.float32)
    logits = ((x @ w.astype(np.float32) + b.astype(np.float32)) * 0.5 - 1).astype(np.float64)
    expected = -np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(run(after, {"x": x})[0], expected, rtol=1e-5)


@pytest.mark.parametrize("half", [np.float16, ml_dtypes.bfloat16])
def test_inputs_and_outputs_keep_their_types(half: Any) -> None:
    name = "float16" if half is np.float16 else "bfloat16"
    w = np.arange(12).reshape(4, 3).astype(half)
    after = widened(model_of(f"net ({name}[2, 4] x) => ({name}[2, 3] y) {{ h = MatMul (x, w)\n y = Relu (h) }}", w=w))
    io = [v.type.tensor_type.elem_type for v in (*after.graph.input, *after.graph.output)]
    assert io == [onnx.TensorProto.FLOAT16 if half is np.float16 else onnx.TensorProto.BFLOAT16] * 2
    assert [t.data_type for t in after.graph.initializer] == [onnx.TensorProto.FLOAT]
    assert [n.op_type for n in after.graph.node] == ["Cast", "MatMul", "Relu", "Cast"]


def test_what_takes_no_fp32_stays_between_casts() -> None:
    after = widened(
        model_of(
            "net (float16[4] x) => (float16[4] y) <float16[4] b> { a = Mul (x, k)\n b = other.Odd (a, k)\n "
            "y = Add (b, k) }",
            k=np.ones(4, np.float16),
        )
    )
    odd = next(n for n in after.graph.node if n.op_type == "Odd")
    made = {n.output[0]: n for n in after.graph.node}
    assert [made[name].op_type for name in odd.input] == ["Cast", "Cast"], "it still reads float16"
    assert {made[name].attribute[0].i for name in odd.input} == {onnx.TensorProto.FLOAT16}
    assert [t.data_type for t in after.graph.initializer] == [onnx.TensorProto.FLOAT]


@pytest.mark.parametrize("flag, factor", [(True, 3), (False, 2)])
def test_nested_graphs_are_widened(flag: bool, factor: int) -> None:
    text = """net (bool flag, float[2] x) => (float[2] y) {
            h = Cast <to = 10> (x)
            r = If (flag) <
                then_branch = yes () => (float16[2] a) { a = Mul (h, k) },
                else_branch = no () => (float16[2] b) { c = Constant <value = float16[1] {16384}> ()\n b = Mul (h, c) }
            >
            y = Cast <to = 1> (r)
        }"""
    after = widened(model_of(text, k=np.full(2, 3, np.float16)))
    inner = next(n for n in after.graph.node if n.op_type == "If")
    outputs = {a.g.output[0].type.tensor_type.elem_type for a in inner.attribute}
    assert outputs == {onnx.TensorProto.FLOAT}
    x = np.array([1.0001, -5.5], np.float32)  # float16 holds neither 1.0001 nor its products
    np.testing.assert_array_equal(run(after, {"x": x, "flag": np.array(flag)})[0], x * np.float32(factor))


def test_a_copy_for_16_bit_readers_is_the_weight_again() -> None:
    text = """net (int64[n] ids) => (float[n, 8] y) {
            rows = Gather (table, ids)
            norm = Softmax (rows)
            y = MatMul (norm, table)
        }"""
    rng = np.random.default_rng(1)
    model = model_of(text, table=rng.normal(size=(8, 8)).astype(np.float32))
    converted = amp.convert(model, mode="mixed", black_list=["Gather"]).to_onnx()
    assert len(converted.graph.initializer) == 2, "one for each precision"
    after = widened(converted)
    assert [t.name for t in after.graph.initializer] == ["table"]
    ids = np.arange(8)
    np.testing.assert_allclose(run(after, {"ids": ids})[0], run(model, {"ids": ids})[0], rtol=1e-6)


def test_what_is_in_fp32_stays_as_it_is() -> None:
    program = amp.Program.from_onnx(
        model_of("net (float[4] x) => (float[4] y) { y = Mul (x, k) }", k=np.ones(4, np.float32))
    )
    before = program.version
    assert widen(program) == [] and program.version == before


@pytest.mark.parametrize("pure, dtype", list(itertools.product([False, True], ["float16", "bfloat16"])))
def test_a_16_bit_model_trains_from_fp32_masters(pure: bool, dtype: str) -> None:
    half = np.float16 if dtype == "float16" else ml_dtypes.bfloat16
    w = np.random.default_rng(2).normal(size=(4, 3)).astype(half)
    to = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(half))
    model = model_of(
        f"net (float[n, 4] x) => (float[n, 3] y) {{ h = Cast <to = {to}> (x)\n m = MatMul (h, w)\n "
        "y = Cast <to = 1> (m) }",
        w=w,
    )
    program = amp.Program.from_onnx(model)
    amp.prepare_training(program)
    assert [v.dtype for v in program.parameters] == ["float32"]
    with amp.program_guard(program, program.startup), amp.unique_name.guard():
        loss = amp.nn.functional.cross_entropy(program.outputs[0], amp.data("label", ["n"], "int64"))
        optimizer = amp.decorate(
            amp.optimizer.SGD(0.1, multi_precision=True), use_pure_fp16=pure, use_fp16_guard=False, dtype=dtype
        )
        optimizer.minimize(loss)
    executor, scope = amp.Executor(threads=1), amp.Scope()
    executor.run(program.startup, scope=scope)
    optimizer.amp_init(amp.CPUPlace(), scope=scope)
    master = "w_fp32_master_0" if pure else "w"
    np.testing.assert_array_equal(scope.find_var(master), w.astype(np.float32))
    feed = {"x": np.ones((2, 4), np.float32), "label": np.array([0, 2])}
    executor.run(program, feed=feed, fetch_list=[loss], scope=scope)
    after = scope.find_var(master)
    assert (after != after.astype(half).astype(np.float32)).any(), "it keeps digits that 16 bit has not"
