"""Operators of onnxruntime's own, as its optimisers and the builders of language models write them, run in 16 bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import amp_transpiler as amp
from amp_transpiler.lists import has_kernel
from amp_transpiler.passes.view.typing import Slots, narrowed
from tests.helpers.converting import filled, off

#: Tokens, those before them, positions of the tables of angles, width, heads.
S, PAST, PLACES, WIDTH, HEADS = 3, 2, 8, 32, 2
SIZE = WIDTH // HEADS
_RNG = np.random.default_rng(0)


def _weights() -> dict[str, np.ndarray]:
    angles = np.outer(np.arange(PLACES), 0.3 ** np.arange(SIZE // 2))
    found = {
        "cos": np.cos(angles),
        "sin": np.sin(angles),
        "norm": 1 + 0.1 * _RNG.normal(size=WIDTH),
        "norm2": 1 + 0.1 * _RNG.normal(size=WIDTH),
        "qkv_scales": 0.02 * (1 + _RNG.random((2 * WIDTH, 1))),
        "head": 0.2 * _RNG.normal(size=(WIDTH, 5)),
    }
    return {name: value.astype(np.float32) for name, value in found.items()} | {
        "qkv": _RNG.integers(0, 256, (2 * WIDTH, 1, 16), np.uint8),
        "lengths": np.array([S + PAST - 1], np.int32),
        "total": np.array(S + PAST, np.int32),
    }


def decoder() -> onnx.ModelProto:
    """A norm, a product with 4-bit weights, attention with a cache, a norm of a sum, and a head."""
    fused: dict[str, Any] = {"domain": "com.microsoft"}
    attention = ["qkv_y", "", "", "past_key", "past_value", "lengths", "total", "cos", "sin"]
    nodes = [
        helper.make_node("SimplifiedLayerNormalization", ["x", "norm"], ["n"], axis=-1, epsilon=1e-6),
        helper.make_node(
            "MatMulNBits", ["n", "qkv", "qkv_scales"], ["qkv_y"], K=WIDTH, N=2 * WIDTH, bits=4, block_size=32, **fused
        ),
        helper.make_node(
            "GroupQueryAttention",
            attention,
            ["a", "key", "value"],
            num_heads=HEADS,
            kv_num_heads=1,
            do_rotary=1,
            **fused,
        ),
        helper.make_node("SkipSimplifiedLayerNormalization", ["x", "a", "norm2"], ["m", "", "", "sum"], **fused),
        helper.make_node("MatMul", ["m", "head"], ["y"]),
    ]
    cache = [1, 1, None, SIZE]
    infos = (
        {"x": [1, None, WIDTH], "past_key": cache, "past_value": cache},
        {"y": [1, None, 5], "key": cache, "value": cache},
    )
    inputs, outputs = (
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in each.items()] for each in infos
    )
    weights = [numpy_helper.from_array(value, name) for name, value in _weights().items()]
    graph = helper.make_graph(nodes, "decoder", inputs, outputs, weights)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


FEEDS = {
    "x": _RNG.normal(size=(1, S, WIDTH)).astype(np.float32),
    "past_key": _RNG.normal(size=(1, 1, PAST, SIZE)).astype(np.float32),
    "past_value": _RNG.normal(size=(1, 1, PAST, SIZE)).astype(np.float32),
}


def served(model: onnx.ModelProto) -> list[np.ndarray]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return [np.asarray(value) for value in session.run(None, FEEDS)]


@pytest.mark.parametrize("mode", ["pure", "mixed", "auto"])
@pytest.mark.parametrize(("dtype", "allowed"), [("float16", 0.004), ("bfloat16", 0.03)])
def test_a_decoder_of_fused_operators(mode: str, dtype: str, allowed: float) -> None:
    model = decoder()
    converted = amp.convert(model, mode=mode, dtype=dtype, calibration=FEEDS, check=True)
    kinds = {op.type: op.precision for op in converted.operators if op.type != "Cast"}
    assert kinds == dict.fromkeys((node.op_type for node in model.graph.node), dtype)
    assert sum(op.type == "Cast" for op in converted.operators) == len(model.graph.input) + len(model.graph.output)
    assert max(converted.conversion.verdict.errors.values()) < allowed
    weights = {i.name: i.data_type for i in converted.to_onnx().graph.initializer}
    assert TensorProto.FLOAT not in weights.values() and weights["qkv"] == TensorProto.UINT8


def test_it_runs() -> None:
    model = decoder()
    found = served(amp.convert(model).to_onnx())
    assert all(off(value, wanted) < 0.004 for value, wanted in zip(found, served(model), strict=True))


def test_a_product_that_processors_may_round_to_8_bits_is_judged_by_what_it_means() -> None:
    model, coarse = decoder(), decoder()
    product = next(node for node in coarse.graph.node if node.op_type == "MatMulNBits")
    product.attribute.append(helper.make_attribute("accuracy_level", 4))
    assert max(map(off, served(coarse), served(model))) > 0.004  # it does round them
    errors = amp.convert(coarse, calibration=FEEDS, check=True).conversion.verdict.errors
    assert max(errors.values()) < 0.001


@pytest.mark.parametrize("mode", ["pure", "mixed"])
def test_experts_and_short_convolutions_run_in_16_bit(mode: str) -> None:
    """As builders of language models write them: experts hold most of the weights."""
    model = filled("""<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
      m (float[1,8,L] x, float[1,8,2] before) => (float[1,L,8] y, float[1,8,2] after)
        <float[8,1,3] w, float[8,4] r, float[4,16,8] up, float[4,8,16] down> {
        c, after = com.microsoft.CausalConvWithState<activation = "silu">(x, w, , before)
        t = Transpose<perm = [0, 2, 1]>(c)  s = MatMul(t, r)  flat = Constant<value_ints = [-1, 4]>()
        p = Reshape(s, flat)  m = com.microsoft.MoE<k = 2, activation_type = "silu">(t, p, up, , down)  y = Add(m, t) }""")
    program = amp.convert(model, mode=mode, keep_io=False, check=True)
    assert {op.type: op.precision for op in program.operators if op.type != "Constant"} == {
        name: "float16" for name in ("CausalConvWithState", "Transpose", "MatMul", "Reshape", "MoE", "Add")
    }
    assert program.conversion.verdict.met and max(program.conversion.verdict.errors.values()) < 0.005
    assert {i.data_type for i in program.to_onnx().graph.initializer} <= {TensorProto.FLOAT16, TensorProto.INT64}


@pytest.mark.parametrize("mode", ["pure", "mixed"])
def test_experts_of_4_bits_run_in_16_bit(mode: str) -> None:
    """Their scales are of the type of the data: CUDA has no kernel of them in fp32."""
    model = filled("""<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
      m (float[6,32] x) => (float[6,32] y) <float[32,4] r, float[4,64] us, float[4,64] ub, float[4,32] ds> {
        t = Tanh(x)  s = MatMul(t, r)
        m = com.microsoft.QMoE<k = 2, activation_type = "silu">(t, s, u, us, ub, d, ds)  y = Add(m, t) }""")
    for name, shape in (("u", (4, 64, 16)), ("d", (4, 32, 32))):
        model.graph.initializer.append(numpy_helper.from_array(_RNG.integers(0, 256, shape, np.uint8), name))
    program = amp.convert(model, mode=mode, keep_io=False, check=True)
    assert {op.precision for op in program.operators} == {"float16"}
    assert program.conversion.verdict.met
    assert {i.data_type for i in program.to_onnx().graph.initializer} == {TensorProto.FLOAT16, TensorProto.UINT8}


def test_what_optimisers_make_of_diffusion_models_runs_in_16_bit() -> None:
    """CUDA has the only kernels; its group norms read scale and bias in fp32. Each stood between two casts."""
    model = filled("""<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
      m (float[1,6,6,16] x) => (float[1,6,6,8] y) <float[16,3,3,16] w, float[16] b, float[16] g, float[8] h> {
        c = com.microsoft.NhwcConv<pads = [1,1,1,1]>(x, w, b)
        n = com.microsoft.GroupNorm<groups = 4, activation = 1, channels_last = 1>(c, g, b)
        m, s = com.microsoft.SkipGroupNorm<groups = 4, activation = 0, channels_last = 1>(n, g, b, c, b)
        l = Add(m, s)  a = com.microsoft.BiasSplitGelu(l, b)  y = com.microsoft.BiasAdd(a, h, a) }""")
    program = amp.convert(model)
    assert {op.precision for op in program.operators if op.type != "Cast"} == {"float16"}
    assert sum(op.type == "Cast" for op in program.operators) == 2
    kept = {i.name for i in program.to_onnx().graph.initializer if i.data_type == TensorProto.FLOAT}
    norms = [op for op in program.operators if op.type.endswith("GroupNorm")]
    assert kept == {op.input(slot).name for op in norms for slot in (1, 2)}


def test_what_is_float32_whatever_the_data_is_stays() -> None:
    """Statistics that a norm gives, and the scales of a quantised cache."""
    program = amp.Program.from_onnx(
        onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
        net (float[2,8] x, float[8] g) => (float[2,8] y, float[2,1] mean, float[2,1] inverse)
          { y, mean, inverse = com.microsoft.SkipLayerNormalization(x, x, g) }""")
    )
    narrow = narrowed(program.operators[0], "float16")
    assert narrow == Slots(["float16"] * 3, ["float16", "float32", "float32"])
    attention = next(op for op in amp.Program.from_onnx(decoder()).operators if op.type == "GroupQueryAttention")
    for slot in (12, 13):
        attention.set_input(slot, attention.program.add_variable(f"scale_{slot}", "float32", (1,)))
    narrow = narrowed(attention, "bfloat16")
    assert isinstance(narrow, Slots) and narrow.inputs[12:] == ["float32"] * 2
    assert {narrow.inputs[slot] for slot in (0, 3, 4, 7, 8)} == {"bfloat16"}


def test_a_quantised_table_has_kernels_for_what_it_gives() -> None:
    for dtype in ("float16", "bfloat16", "float32"):
        assert has_kernel("CUDAExecutionProvider", "GatherBlockQuantized", dtype, 21, "com.microsoft")


def test_where_kernels_round_inside_the_unmeasured_stay_float32() -> None:
    converted = amp.convert(decoder(), place="webgpu")
    kept = {op.type: str(op.reason) for op in converted.operators if op.precision == "float32" and op.type != "Cast"}
    assert {"MatMulNBits", "GroupQueryAttention"} <= set(kept)
    assert "unknown number of roundings" in kept["MatMulNBits"]


def optimised(opset: int, activation: str, **more: Any) -> onnx.ModelProto:
    """A convolution and a product as onnxruntime's optimisers save them for CPUs."""
    fused: dict[str, Any] = {"domain": "com.microsoft", "activation": activation}
    nodes = [
        helper.make_node("FusedConv", ["x", "w", "b"], ["c"], name="conv", pads=[1, 1, 1, 1], **fused, **more),
        helper.make_node("Flatten", ["c"], ["f"]),
        helper.make_node("FusedGemm", ["f", "g"], ["y"], name="head", domain="com.microsoft", activation="Relu"),
    ]
    shapes = {"w": (4, 3, 3, 3), "b": (4,), "g": (64, 5)}
    weights = {name: 0.2 * _RNG.normal(size=shape) for name, shape in shapes.items()}
    graph = helper.make_graph(
        nodes,
        "m",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, 3, 4, 4))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (1, 5))],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, ir_version=8, opset_imports=opsets)


@pytest.mark.parametrize("mode", ["pure", "mixed"])
def test_what_only_its_parts_have_kernels_of_is_taken_apart(mode: str) -> None:
    """The file stayed as large as it was, with a cast on each side of every convolution."""
    source = optimised(12, "Clip", activation_params=[0.0, 6.0])
    done = amp.convert(source, mode=mode, check=True)
    assert {op.type for op in done.operators} == {"Cast", "Conv", "Clip", "Flatten", "Gemm", "Relu"}
    assert {op.precision for op in done.operators if not op.inserted} == {"float16"}
    assert sum(op.inserted for op in done.operators) == 2
    assert done.conversion.verdict is not None and done.conversion.verdict.met
    assert done.to_onnx().ByteSize() < 0.9 * source.ByteSize()


def test_it_stays_whole_where_that_gains_nothing() -> None:
    source = optimised(12, "Relu")
    assert {op.type for op in amp.convert(source, dtype="bfloat16").operators} >= {"FusedConv"}  # nor has Conv one
    assert "FusedConv" in {op.type for op in amp.convert(source, exclude=["conv"]).operators}
    assert "FusedConv" in {op.type for op in amp.convert(source, place="webgpu").operators}
    clipped = optimised(7, "Clip", activation_params=[0.0, 6.0])  # whose Clip has its bounds as attributes
    assert {op.type for op in amp.convert(clipped).operators} >= {"FusedConv", "FusedGemm"}
