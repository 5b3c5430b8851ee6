"""Models on which WebGPU's kernels fail, as text: what conversions for it are tried on."""

from __future__ import annotations

from tests.helpers.converting import HEAD, PIECES


def conv(channels: int, outputs: int, kernel: int = 3, attrs: str = "", opset: int = 17, more: str = "") -> str:
    k = ",".join([str(kernel)] * 2)
    return HEAD.replace("17", str(opset)) + (
        f"m (float[1,{channels},8,9] x) => (float[n,c,h,v] y) <float[{outputs},{channels},{k}] w>"
        f" {{ c = Conv{attrs}(x, w) {more or 'y = Relu(c)'} }}"
    )


#: Models that meet each of ``lists/faults.toml``, as they stand or in 16 bit.
MEET = {
    "Conv: channels by threes": [conv(6, 8)],
    "Conv: few products, a bias to six channels": [
        "m (float[1,4,8,9] x) => (float[n,o,h,v] y) <float[6,4,1,1] w, float[6] b> { y = Conv(x, w, b) }"
    ],
    "Conv: a matrix product, padded behind alone": [
        "m (float[1,4,8,9] x) => (float[n,o,h,v] y) <float[5,4,1,1] w> { y = Conv<pads=[0, 0, 1, 2]>(x, w) }",
        'm (float[1,4,2,2] x) => (float[n,o,h,v] y) <float[8,4,2,2] w> { y = Conv<auto_pad="SAME_UPPER">(x, w) }',
    ],
    "Conv: groups between the vectors of all channels": [
        "m (float[N,4,8,9] x) => (float[n,o,h,v] y) <float[12,2,3,3] w, float[12] b> { y = Conv<group=2>(x, w, b) }"
    ],
    "Conv: three axes, in groups": [
        "m (float[1,4,3,4,3] x) => (float[n,o,d,h,v] y) <float[4,2,2,2,2] w> { y = Conv<group=2>(x, w) }"
    ],
    "Conv: a bias left out by an empty name": [
        'm (float[1,4,8,9] x) => (float[n,o,h,v] y) <float[4,4,3,3] w> { y = Conv(x, w, "") }'
    ],
    "ConvTranspose: a bias left out by an empty name": [
        'm (float[1,4,8,9] x) => (float[n,o,h,v] y) <float[4,4,3,3] w> { y = ConvTranspose(x, w, "") }'
    ],
    "ConvTranspose: groups of an even number of channels to one": [
        "m (float[1,4,3,3] x) => (float[n,o,h,v] y) <float[4,1,2,2] w> { y = ConvTranspose<group=2>(x, w) }"
    ],
    "ConvTranspose: three axes": [
        "m (float[1,2,3,4,3] x) => (float[n,o,d,h,v] y) <float[2,3,2,2,2] w> { y = ConvTranspose(x, w) }"
    ],
    "BatchNormalization: 16-bit image, fp32 statistics": [
        "m (float16[N,4,5,5] x) => (float16[N,4,5,5] y) <float[4] s, float[4] b, float[4] a, float[4] v>"
        " { y = BatchNormalization(x, s, b, a, v) }"
    ],
    "Gemm: scalar added": ["m (float[N,4] x) => (float[N,1] y) <float[4,1] w, float[1] b> { y = Gemm(x, w, b) }"],
    "Gemm: integers times a fraction": [
        "m (int32[3,4] x, int32[4,2] w) => (int32[3,2] y) { y = Gemm<alpha=0.5>(x, w) }",
    ],
    "BatchNormalization: two axes": [
        "m (float[3,4] x) => (float[3,4] y) <float[4] w> { v = Abs(w) y = BatchNormalization(x, w, w, w, v) }"
    ],
    "Pow: a column beside rows of fours": [
        "m (float[3,8] x) => (float[n,o] y) <float[3,1] w> { a = Abs(x) y = Pow(a, w) }"
    ],
    **{
        f"{name}: no axes": [
            HEAD.replace("17", "18")
            + f"m (float[3,8] x) => (float[n,o] y) {{ a = Abs(x) y = {name}<noop_with_empty_axes=1>(a) }}"
        ]
        for name in ("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceSumSquare")
    },
    "MatMul: a vector": ["m (float[3,4] x) => (float[3] y) <float[4] w> { y = MatMul(x, w) }"],
    "MatMul: nothing to add up": ["m (float[3,0] x, float[0,2] w) => (float[3,2] y) { y = MatMul(x, w) }"],
    "Einsum: dots beside letters": [
        'm (float[2,3,4] x) => (float[n,o,p] y) <float[4,5] w> { y = Einsum<equation="...k,kj->...j">(x, w) }',
        'm (float[2,3,4] x) => (float[n,o,p] y) { y = Einsum<equation="i...->i...">(x) }',
    ],
    "Einsum: an axis repeated": [
        'm (float[3,1] x) => (float[n,o] y) <float[4,5] w> { y = Einsum<equation="ij,kj->ik">(x, w) }',
    ],
    "com.microsoft::MultiHeadAttention: several passes over the keys": [
        "m (float[N,5,8] q, float[N,M,8] k, float[N,M,8] v, int32[N,M] m) => (float[N,5,8] y)"
        ' { y = com.microsoft.MultiHeadAttention<num_heads=2>(q, k, v, "", m) }',
        "m (float[2,3,8] q, float[2,12,8] k, float[2,12,8] v) => (float[2,3,8] y) <float[24] b>"
        " { y = com.microsoft.MultiHeadAttention<num_heads=2>(q, k, v, b) }",
        "m (float[2,10,8] q, float[2,2,10,4] k, float[2,2,10,4] v) => (float[2,10,8] y)"
        " { y = com.microsoft.MultiHeadAttention<num_heads=2, unidirectional=1, scale=0.3>(q, k, v) }",
        "m (float[2,3,8] q, float[2,9,8] k, float[2,9,8] v, float[1,2,3,9] a) => (float[2,3,8] y)"
        ' { y = com.microsoft.MultiHeadAttention<num_heads=2>(q, k, v, "", "", a) }',
    ],
    "com.microsoft::MultiHeadAttention: a mask of keys": [
        "m (float[2,3,8] q, float[2,6,8] k, float[2,6,8] v, int32[2,6] m) => (float[2,3,8] y)"
        ' { y = com.microsoft.MultiHeadAttention<num_heads=2>(q, k, v, "", m) }',
    ],
    "com.microsoft::Attention: several passes over the rows": [
        "m (float[2,9,8] x) => (float[2,9,8] y) <float[8,24] w, float[24] b>"
        " { y = com.microsoft.Attention<num_heads=2>(x, w, b) }",
    ],
    "ScatterND: 16-bit numbers combined": [
        "m (float[5,3] x, int64[2,1] i, float[2,3] u) => (float[5,3] y)"
        ' { a = ScatterND(x, i, u) b = ScatterND<reduction="add">(a, i, u) y = ScatterND(b, i, u) }'
    ],
    **{
        f"{name}: {where}": texts
        for name, texts in {
            "LayerNormalization": [
                "m (float[3,8] x) => (float[n,o] y) <float[8] w> { y = LayerNormalization<epsilon=1e-12>(x, w) }"
            ],
            "InstanceNormalization": [
                "m (float[2,3,8] x) => (float[n,o,p] y) <float[3] w>"
                " { y = InstanceNormalization<epsilon=1e-12>(x, w, w) }"
            ],
            "com.microsoft::SkipLayerNormalization": [
                "m (float[2,3,8] x) => (float[n,o,p] y) <float[8] w>"
                " { y = com.microsoft.SkipLayerNormalization(x, x, w) }",
                "m (float[2,3,8] x) => (float[n,o,p] y, float[n,o,p] z) <float[8] w, float[8] b>"
                ' { y, "", "", z = com.microsoft.SkipLayerNormalization(x, x, w, b, b) }',
            ],
        }.items()
        for where in ("16-bit numbers", "numbers far from zero")
    },
    "SimplifiedLayerNormalization: 16-bit numbers, a small epsilon": [
        "m (float[3,8] x) => (float[n,o] y) <float[8] w> { y = SimplifiedLayerNormalization<epsilon=1e-12>(x, w) }"
    ],
    "com.microsoft::SkipSimplifiedLayerNormalization: 16-bit numbers, a small epsilon or none": [
        "m (float[2,3,8] x) => (float[n,o,p] y) <float[8] w>"
        " { y = com.microsoft.SkipSimplifiedLayerNormalization<epsilon=1e-12>(x, x, w) }"
    ],
    "ThresholdedRelu: 16-bit numbers": ["m (float[3,4] x) => (float[n,o] y) { y = ThresholdedRelu<alpha=0.5>(x) }"],
    "Resize: cubic, of other numbers than fp32": [
        "m (float[1,2,3,4] x) => (float[n,c,h,v] y) <float[4] s = {1.0, 1.0, 2.0, 2.0}>"
        ' { y = Resize<mode="cubic">(x, "", s) }'
    ],
    "MaxPool: indices wanted": [
        "m (float[1,2,4,4] x) => (float[n,c,h,v] y, int64[n,c,h,v] i) { y, i = MaxPool<kernel_shape=[2,2]>(x) }"
    ],
    "ReduceLogSumExp: floating-point numbers": [
        "m (float[3,4] x) => (float[n,o] y) { y = ReduceLogSumExp<axes=[1]>(x) }"
    ],
    "Where: truth values chosen": ["m (bool[3,4] x, bool[4] w) => (bool[3,4] y) { c = Not(x) y = Where(c, x, w) }"],
    "Split: more pieces than a kernel makes": [PIECES],
    **{
        f"{name}: another activation of a convolution": [conv(4, 5, opset=20, more=f"a = {first}(c) y = {name}(a)")]
        for name, first in {
            "Clip": "Sigmoid",
            "Elu": "LeakyRelu",
            "Gelu": "Tanh",
            "HardSigmoid": "Relu",
            "HardSwish": "Elu",
            "LeakyRelu": "Relu",
            "Softplus": "Relu",
            "Tanh": "Softplus",
            "ThresholdedRelu": "Sigmoid",
        }.items()
    },
    "Relu: another activation of a convolution": [
        conv(4, 5, more="b = Sigmoid(c) a = Mul(b, c) y = Relu(a)"),
        conv(4, 5, more="d = Add(c, c) a = Tanh(d) t = Transpose<perm=[0, 2, 3, 1]>(a) y = Relu(t)"),
    ],
    "Sigmoid: another activation of a convolution": [conv(4, 5, more="a = Relu(c) y = Sigmoid(a)")],
    "Slice: backwards from within": [
        "m (float[3,4] x) => (float[n,o] y) <int64[1] b = {-2}, int64[1] e = {-9}, int64[1] a = {1}>"
        " { y = Slice(x, b, e, a, b) }"
    ],
}
