"""Quantised models: what quantises and what undoes it follow their neighbours, and run."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from tests.helpers.sessions import run, session

QDQ = """<ir_version: 8, opset_import: ["" : {opset}]>
m (float[4,8] x) => (float[4,4] y) <float s = {{0.02}}, int8 z = {{3}}, float t = {{0.01}}, int8 o = {{0}}, int8[8,4] w> {{
  a = QuantizeLinear(x, s, z)  b = DequantizeLinear(a, s, z)  v = DequantizeLinear(w, t, o)  c = MatMul(b, v)
  d = QuantizeLinear(c, s, z)  e = DequantizeLinear(d, s, z)  f = Slice(e, from, to)  y = Relu(f)
}}"""


def quantized(opset: int) -> onnx.ModelProto:
    text = QDQ.format(opset=opset).replace("int8[8,4] w>", "int8[8,4] w, int64[1] from = {0}, int64[1] to = {4}>")
    model = onnx.parser.parse_model(text)
    w = np.random.default_rng(0).integers(-127, 128, (8, 4), np.int8)
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    del model.graph.value_info[:]
    return model


X = {"x": np.random.default_rng(1).normal(0, 0.5, (4, 8)).astype(np.float32)}


@pytest.mark.parametrize("opset", [13, 21])
def test_a_quantised_layer_runs_in_16_bit_without_casts_inside(opset: int) -> None:
    """Their scales are floats of the type of the data; the integers between them are what they were."""
    program = amp.convert(quantized(opset))
    of_scales = {(op.type, op.precision) for op in program.operators if "uantizeLinear" in op.type}
    assert of_scales == {("QuantizeLinear", "float16"), ("DequantizeLinear", "float16")}
    assert [op.type for op in program.operators].count("Cast") == 2
    verdict = amp.convert(quantized(opset), calibration=X, check=True, tolerance=0.05).conversion.verdict
    assert verdict is not None and verdict.met


@pytest.mark.parametrize("mode", ["pure", "mixed"])
def test_it_loads_where_its_source_does(mode: str) -> None:
    """From opset 21 on onnxruntime refuses int8 that is brought back and moved, on x86: the opset of scales suffices."""
    source = quantized(13)
    session(source)
    done = amp.convert(source, mode=mode)
    assert done.opset() == 19
    session(done.to_onnx())
    assert amp.convert(quantized(10), mode=mode, dtype="bfloat16").opset() == 13  # no later one has more kernels


def test_it_loads_with_bodies_of_a_place_in_it() -> None:
    """They are written at a later opset, for ReduceLogSumExp, whose kernel on WebGPU takes exponentials as they are."""
    source = quantized(13)
    source.graph.node[-1].CopyFrom(onnx.helper.make_node("ReduceLogSumExp", ["f"], ["y"], axes=[1]))
    source.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 1
    done = amp.convert(source, place="webgpu")
    assert done.opset() == 20 and "ReduceLogSumExp" not in {op.type for op in done.operators}
    found, expected = (session(model).run(None, X)[0] for model in (done.to_onnx(), source))
    np.testing.assert_allclose(found, expected, atol=0.03)  # one step of the quantiser


SCALED = ("QuantizeLinear", "DequantizeLinear")


def layers(count: int) -> onnx.ModelProto:
    """Layers quantised as onnxruntime's tools do it, 64 wide."""
    body, h = "", "x"
    for i in range(count):
        body += (
            f"q{i} = QuantizeLinear({h}, s, z)  d{i} = DequantizeLinear(q{i}, s, z)  v{i} = DequantizeLinear(w, t, o) "
        )
        body += f"m{i} = MatMul(d{i}, v{i})  r{i} = Relu(m{i})\n"
        h = f"r{i}"
    text = f"""<ir_version: 8, opset_import: ["" : 17]> m (float[64,64] x) => (float[64,64] y)
    <float s = {{0.02}}, int8 z = {{3}}, float t = {{0.01}}, int8 o = {{0}}, int8[64,64] w> {{ {body} y = Identity({h}) }}"""
    model = onnx.parser.parse_model(text)
    w = np.random.default_rng(0).integers(-127, 128, (64, 64), np.int8)
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    del model.graph.value_info[:]
    return model


def test_in_mixed_mode_what_quantises_is_where_its_neighbours_are() -> None:
    done = amp.convert(layers(3), mode="mixed")
    found = {(op.type, op.precision) for op in done.operators if op.type in SCALED}
    assert found == {(type_, "float16") for type_ in SCALED} | {("QuantizeLinear", "float32")}  # what x is quantised by
    assert sum(op.type == "Cast" for op in done.operators) <= 2
    assert done.conversion.notes == ("opset 17 raised to 19, at which 9 more operators can run in float16",)


BLACK = [{"black_list": ["QuantizeLinear", "DequantizeLinear"]}, {"numeric_guards": False}]


@pytest.mark.parametrize("asked", BLACK)
def test_lists_that_keep_it_fp32_raise_no_opset_and_what_casts_cost_is_said(asked: dict[str, Any]) -> None:
    done = amp.convert(layers(3), mode="mixed", white_list=["MatMul"], **asked)
    assert done.opset() == 17
    assert {op.precision for op in done.operators if "uantizeLinear" in op.type} == {"float32"}
    # Each product reads two tensors that are cast, at 4 + 2 bytes each element, and its result is cast back.
    casts = sum(op.type == "Cast" for op in done.operators)
    beyond = (casts * 6 - 3 * 3 * 2) * 64 * 64 - sum(2 * 2 * 64 * 64 for op in done.operators if op.type == "Relu")
    (note,) = done.conversion.notes
    assert note == (
        f"casts around what stays float32 cost more than float16 saves: about {beyond / 1024:.1f} KiB are moved beyond "
        "those of float32 throughout (open sizes of inputs taken as 128); other lists, or mode=pure, move fewer"
    )


WIDE = """<ir_version: 10, opset_import: ["" : 19, "com.microsoft" : 1]>
m (float[64,64] x) => (float[64,64] y) <float s = {0.001}, uint16 z = {32768}, float t = {0.01}, int8 o = {0}, int8[64,64] w> {
  a = com.microsoft.QuantizeLinear(x, s, z)  b = com.microsoft.DequantizeLinear(a, s, z)
  v = com.microsoft.DequantizeLinear(w, t, o)  c = MatMul(b, v)
  d = com.microsoft.QuantizeLinear(c, s, z)  y = com.microsoft.DequantizeLinear(d, s, z) }"""


@pytest.mark.parametrize("mode", ["pure", "mixed"])
def test_between_what_quantises_in_fp32_a_product_is_fp32(mode: str) -> None:
    """Activations of 16 bits for phones before opset 21, and bfloat16, in which nothing quantises: casts on both sides of
    each product moved more than fp32, and kept runtimes from computing it with the integers."""
    wide = onnx.parser.parse_model(WIDE)
    w = np.random.default_rng(0).integers(-127, 128, (64, 64), np.int8)
    wide.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    for model, dtype in ((wide, "float16"), (layers(2), "bfloat16")):
        done = amp.convert(model, mode=mode, dtype=dtype)
        assert {op.precision for op in done.operators} <= {"float32"}
        assert not any(op.type == "Cast" for op in done.operators)
    asked = amp.convert(wide, mode=mode, white_list=["MatMul"])
    assert {op.precision for op in asked.operators if op.type == "MatMul"} == {"float16"}


def test_in_mixed_mode_weights_that_are_quantised_in_the_file_are_16_bit() -> None:
    """As files for TensorRT have them: from float to integers and back. They stayed fp32, and the file as large."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 19]>
    m (float[64,64] x) => (float[64,64] y) <float s = {0.02}, int8 z = {0}, float t = {0.01}, float[64,64] w> {
      a = QuantizeLinear(x, s, z)  b = DequantizeLinear(a, s, z)  u = QuantizeLinear(w, t, z)  v = DequantizeLinear(u, t, z)
      c = MatMul(b, v)  y = Relu(c) }""")
    w = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    done = amp.convert(model, mode="mixed").to_onnx()
    assert next(i for i in done.graph.initializer if i.name == "w").data_type == onnx.TensorProto.FLOAT16
    session(done)


def test_a_scale_that_float16_does_not_hold_keeps_it_fp32() -> None:
    model = layers(1)
    next(each for each in model.graph.initializer if each.name == "t").CopyFrom(
        onnx.numpy_helper.from_array(np.float32(1e-9), "t")
    )
    done = amp.convert(model, mode="mixed")
    (kept,) = [op for op in done.operators if op.type == "DequantizeLinear" and op.precision == "float32"]
    assert kept.reason == "fp32: constant 't' holds 1e-09, which is 0 in fp16"


def test_where_a_quantised_model_is_off_it_is_said_how_far_it_moves_by_itself() -> None:
    """Numbers between two integers fall on the other side by the last rounding, whatever makes it."""
    model, rng = layers(1), np.random.default_rng(0)
    x = {"x": (0.02 * (rng.integers(-100, 100, (64, 64)) + 0.5)).astype(np.float32)}

    def said(tolerance: float) -> list[str]:
        notes = amp.convert(model, calibration=x, check=True, tolerance=tolerance).conversion.notes
        return [note for note in notes if "quantises" in note]

    exact, other = (  # not fused: onnxruntime's products of 8 bits saturate on processors without VNNI
        run(model, {"x": each}, "DISABLE_ALL")[0] for each in (x["x"], x["x"].astype(np.float16).astype(np.float32))
    )
    moved = np.linalg.norm(other - exact) / np.linalg.norm(exact)
    assert moved > 1e-3
    assert said(1e-4) == [
        "the model quantises what it computes: with that rounded to float16 before, and all else in float32, output 'y' "
        f"moves by {moved:.3g}"
    ]
    assert said(1.0) == []
