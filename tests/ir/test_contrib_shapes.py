"""Shapes of what onnxruntime's own operators make are those that onnxruntime gives."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from tests.helpers.sessions import run

HEAD = '<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>\n'
RULES = {
    "a product of batches": "m (float[3,1,4,5] x, float[2,6,4] w) => (float z) { y = com.microsoft.FusedMatMul<transA = 1, transB = 1>(x, w)  z = Neg(y) }",
    "a vector": "m (float[3,4] x, float[4] w) => (float z) { y = com.microsoft.FusedMatMul(x, w)  z = Neg(y) }",
    "a batch between": "m (float[4,3,5] x, float[3,5,6] w) => (float z) { y = com.microsoft.FusedMatMul<transBatchA = 1>(x, w)  z = Neg(y) }",
    "a product with more in it": "m (float[4,3] x, float[5,4] w) => (float z)"
    ' { y = com.microsoft.FusedGemm<transA = 1, transB = 1, activation = "Relu">(x, w)  z = Neg(y) }',
    "a convolution": "m (float[1,2,9,8] x, float[4,1,3,2] w) => (float z)"
    " { y = com.microsoft.FusedConv<group = 2, pads = [1,0,2,1], strides = [2,1], dilations = [1,3],"
    ' activation = "Relu">(x, w)  z = Neg(y) }',
    "a convolution that pads itself": "m (float[1,2,9,8] x, float[4,2,3,2] w) => (float z)"
    ' { y = com.microsoft.FusedConv<auto_pad = "SAME_UPPER", strides = [2,3], activation = "Relu">(x, w)  z = Neg(y) }',
    "embeddings": "m (int32[2,3] x, int32[2,3] s, float[5,8] a, float[4,8] b, float[2,8] c, float[8] g, float[8] h)"
    " => (float z) { y, i = com.microsoft.EmbedLayerNormalization(x, s, a, b, c, g, h)  z = Neg(y) }",
    "packed attention": "m (float[2,3,8] x, float[8,24] w, float[24] b) => (float z)"
    " { y = com.microsoft.Attention<num_heads = 2>(x, w, b)  z = Neg(y) }",
    "packed attention with narrow values": "m (float[2,3,8] x, float[8,20] w, float[20] b) => (float z)"
    " { y = com.microsoft.Attention<num_heads = 2, qkv_hidden_sizes = [8,8,4]>(x, w, b)  z = Neg(y) }",
    "rows for a quantised matrix": "m (float[2,3,32] x, uint8[8,1,16] w, float[8] s) => (float z)"
    " { y = com.microsoft.MatMulNBits<K = 32, N = 8, bits = 4, block_size = 32>(x, w, s)  z = Neg(y) }",
    "rows of a quantised table": "m (uint8[3,2,32] w, int64[2,3] x, float[3,2,2] s) => (float z)"
    " { y = com.microsoft.GatherBlockQuantized<block_size = 32, quantize_axis = 2>(w, x, s)  z = Neg(y) }",
    "rows of bytes": "m (uint8[3,64] w, int64[2,3] x, float[3,2] s) => (float z)"
    " { y = com.microsoft.GatherBlockQuantized<block_size = 32, quantize_axis = 1, bits = 8>(w, x, s)  z = Neg(y) }",
    "what a norm adds up": "m (float[2,3,8] x, float[2,3,8] s, float[8] g) => (float z)"
    " { n, a, b, y = com.microsoft.SkipLayerNormalization(x, s, g)  z = Neg(y) }",
    "a value that is wider": "m (float[2,3,8] q, float[2,5,8] k, float[2,5,12] v) => (float z)"
    " { y = com.microsoft.MultiHeadAttention<num_heads = 2>(q, k, v)  z = Neg(y) }",
    "few heads of keys": "m (float[1,3,32] q, float[1,3,16] k, float[1,3,16] v, int32[1] n, int32 t) => (float z)"
    " { y, p, r = com.microsoft.GroupQueryAttention<num_heads = 4, kv_num_heads = 2>(q, k, v, , , n, t)  z = Neg(y) }",
    "a choice": "m (bool[3,1] c, uint8[2,1,4] x, uint8[3,4] w, float s, uint8 o) => (uint8 z)"
    " { y = com.microsoft.QLinearWhere(c, x, s, o, w, s, o, s, o)  z = Identity(y) }",
    "quantised tensors side by side": "m (uint8[2,3,4] x, uint8[2,5,4] w, float s, uint8 o) => (uint8 z)"
    " { y = com.microsoft.QLinearConcat<axis = -2>(s, o, x, s, o, w, s, o)  z = Identity(y) }",
    "a quantised pool": "m (uint8[2,3,9,8] x, float s, uint8 o) => (uint8 z) { y = com.microsoft.QLinearAveragePool"
    "<kernel_shape = [3,2], strides = [2,3], pads = [1,0,1,1]>(x, s, o, s, o)  z = Identity(y) }",
    "a quantised pool that counts parts": "m (uint8[2,3,9,8] x, float s, uint8 o) => (uint8 z) {"
    " y = com.microsoft.QLinearAveragePool<kernel_shape = [2,3], strides = [2,4], ceil_mode = 1>(x, s, o, s, o)"
    " z = Identity(y) }",
    "a quantised pool of all": "m (uint8[2,3,9,8] x, float s, uint8 o) => (uint8 z)"
    " { y = com.microsoft.QLinearGlobalAveragePool(x, s, o, s, o)  z = Identity(y) }",
    "a quantised pool of all, channels last": "m (uint8[2,9,8,3] x, float s, uint8 o) => (uint8 z)"
    " { y = com.microsoft.QLinearGlobalAveragePool<channels_last = 1>(x, s, o, s, o)  z = Identity(y) }",
    "a quantised product": "m (uint8[3,2] x, float s, uint8 o, uint8[4,3] w) => (float z)"
    " { y = com.microsoft.QGemm<transA = 1, transB = 1>(x, s, o, w, s, o)  z = Neg(y) }",
    "quantised embeddings": "m (int32[2,3] x, uint8[5,8] a, uint8[4,8] b, uint8[8] g, uint8[8] h, float s, uint8 o)"
    " => (float z) { y, i = com.microsoft.QEmbedLayerNormalization(x, , a, b, , g, h, , s, s, , s, s, o, o, , o, o)"
    " z = Neg(y) }",
    "quantised attention": "m (uint8[2,3,8] x, uint8[8,24] w, float[24] b, float s, uint8 o) => (float z)"
    " { y = com.microsoft.QAttention<num_heads = 2>(x, w, b, s, s, , o, o)  z = Neg(y) }",
    "a quantised recurrence": "m (float[3,2,4] x, int8[2,4,16] w, int8[2,4,16] r, float[2] s, int8[2] o) => (float z)"
    ' { y = com.microsoft.DynamicQuantizeLSTM<hidden_size = 4, direction = "bidirectional">(x, w, r, , , , , , s, o, s, o)'
    " z = Neg(y) }",
    "the state of a quantised recurrence": "m (float[3,2,4] x, int8[1,4,16] w, int8[1,4,16] r, float[1] s, int8[1] o)"
    " => (float z) { a, y = com.microsoft.DynamicQuantizeLSTM<hidden_size = 4>(x, w, r, , , , , , s, o, s, o)  z = Neg(y) }",
}
UNKNOWN = ("a vector",)


def fed(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    feeds = {}
    for put in model.graph.input:
        shape = [size.dim_value for size in put.type.tensor_type.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(put.type.tensor_type.elem_type)
        feeds[put.name] = np.full(shape, 2 if put.name == "n" else 3 if put.name == "t" else 1, dtype)
    return feeds


@pytest.mark.parametrize("name", RULES)
def test_a_shape_is_what_onnxruntime_gives(name: str) -> None:
    model = onnx.parser.parse_model(HEAD + RULES[name])
    model.graph.output[0].type.tensor_type.ClearField("shape")
    found = amp.Program.from_onnx(model).var("y").shape
    (z,) = run(model, fed(model))
    assert found == (None if name in UNKNOWN else z.shape)


#: What the kernels of CUDA alone make.
ON_CUDA = {
    "a convolution of channels that come last": (
        "m (float[2,9,8,3] x, float[6,3,2,3] w) => (float z)"
        " { y = com.microsoft.NhwcConv<pads = [1,0,2,1], strides = [2,1], dilations = [1,3]>(x, w)  z = Neg(y) }",
        (2, 5, 6, 6),
    ),
    "a gate": (
        "m (float[2,5,16] x, float[16] w) => (float z) { y = com.microsoft.BiasSplitGelu(x, w)  z = Neg(y) }",
        (2, 5, 8),
    ),
    "the sum before a group norm": (
        "m (float[2,3,3,8] x, float[8] g, float[2,3,3,8] s) => (float z)"
        " { n, y = com.microsoft.SkipGroupNorm<groups = 2, activation = 1>(x, g, g, s)  z = Neg(y) }",
        (2, 3, 3, 8),
    ),
    "statistics of a norm": (
        "m (float[2,3,8] x, float[8] g) => (float z) { n, y = com.microsoft.SkipLayerNormalization(x, x, g)  z = Neg(y) }",
        (2, 3, 1),
    ),
}


@pytest.mark.parametrize("name", ON_CUDA)
def test_a_shape_of_what_runs_on_cuda_alone(name: str) -> None:
    text, wanted = ON_CUDA[name]
    assert amp.Program.from_onnx(onnx.parser.parse_model(HEAD + text)).var("y").shape == wanted


def test_an_output_of_such_an_operator_can_be_counted() -> None:
    text = "m (float[N,4] x, float[4,4] w) => (float[N,4] y) { y = com.microsoft.FusedMatMul(x, w) }"
    program = amp.Program.from_onnx(onnx.parser.parse_model(HEAD + text))
    assert program.cost_estimate(amp.CUDAPlace(0), {"x": (8, 4)}).kernels == 1
