"""Ten small models that have between them what models have: what the mutations begin with."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

_HEAD = '<ir_version: 10, opset_import: ["" : 21, "f" : 1]>\n'
_DATA = Path(onnx.__file__).parent / "backend" / "test" / "data"

MLP = """mlp (float[N,4] x) => (float[N,3] y) {
    [h] h = Gemm<transB = 0>(x, w0, b0)  [r] r = Relu(h)  [s] s = Softmax<axis = -1>(r)  [y] y = MatMul(s, w1) }"""
CNN = """cnn (float[N,1,8,8] image) => (float[N,3] y) {
    [conv] c = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(image, k0, b0)
    [norm] n = BatchNormalization<epsilon = 0.00001>(c, g, b, m, v)
    [relu] r = Relu(n)  [pool] p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(r)
    [mean] a = ReduceMean<keepdims = 0>(p, axes)  [fc] y = Gemm(a, w, b1) }"""
TRANSFORMER = """transformer (int64[B,S] ids, bool[B,S] keep) => (float[B,S,4] y) {
    [embed] e = Gather(table, ids)  [q] q = MatMul(e, wq)  [k] k = MatMul(e, wk)
    [t] t = Transpose<perm = [0, 2, 1]>(k)  [qk] a = MatMul(q, t)  [div] d = Div(a, root)
    [un] u = Unsqueeze(keep, one)  [mask] w = Where(u, d, low)  [soft] s = Softmax(w)
    [av] o = MatMul(s, e)  [add] r = Add(o, e)  [ln] l = LayerNormalization<axis = -1>(r, scale, bias)
    [gelu] g = Gelu(l)  [shape] n = Shape(g)  [reshape] y = Reshape(g, n) }"""
LSTM = """lstm (float[T,2,4] x) => (float[T,1,2,3] y, float[1,2,3] h) {
    [lstm] y, h = LSTM<hidden_size = 3>(x, w, r, b) }"""
CONTROL = """control (bool c, int64 n, float[4] x) => (float[4] y, float[K,4] all, float[3,4] scanned) {
    [if] i = If (c) <then_branch = t () => (float[4] p) { p = Mul(x, w) }, else_branch = e () => (float[4] q) {
        [inner] q = If (c) <then_branch = t2 () => (float[4] p2) { p2 = Neg(x) },
                            else_branch = e2 () => (float[4] q2) { q2 = Identity(w) }> }>
    [loop] y, all = Loop <body = b (int64 k, bool on, float[4] a) => (bool go, float[4] o, float[4] each) {
        go = Identity(on)  o = Add(a, x)  each = Neg(o) }>(three, , i)
    [scan] last, scanned = Scan<num_scan_inputs = 1, body = s (float[4] a2, float[4] v) => (float[4] o2, float[4] z) {
        o2 = Add(a2, v)  z = Relu(o2) }>(y, rows) }"""
SHAPES = """shapes (float[N,4] x) => (float[A,B] y, int64[C] r, float[D,4] p) {
    [shape] s = Shape(x)  [gather] g = Gather(s, zero)  [un] u = Unsqueeze(g, zero)
    [concat] c = Concat<axis = 0>(u, four)  [fill] f = ConstantOfShape<value = float[1] {2.0}>(c)
    [expand] e = Expand(x, c)  [add] y = Add(f, e)  [range] r = Range(start, g, step)
    [pad] p = Pad(x, pads)  [cast] k = Cast<to = 10>(p)  [back] b = Cast<to = 1>(k) }"""
FUNCTIONS = """functions (float[4] x) => (float[4] y) { [a] a = f.Swish<alpha = 2.0>(x)  [b] y = f.Twice(a) }
<domain: "f", opset_import: ["" : 21]> Swish <alpha> (v) => (w) {
    a = Constant<value_float : float = @alpha>()  m = Mul(v, a)  s = Sigmoid(m)  w = Mul(v, s) }
<domain: "f", opset_import: ["" : 21, "f" : 1]> Twice (v) => (w) { m = f.Swish<alpha = 1.0>(v)  w = f.Swish<alpha = 3.0>(m) }"""
MIXED = """mixed (float[4] x, string[2] words) => (float[4] y, string[2] same, seq(float) parts) {
    [q] q = QuantizeLinear(x, scale, zero)  [dq] d = DequantizeLinear(q, scale, zero)
    [sparse] m = Mul(d, sp)  [y] y = Clip(m, low, high)  [words] same = Identity(words)
    [split] parts = SplitToSequence(x)  [const] k = Constant<value_floats = [1.0, 2.0]>() }"""
_SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "mlp": {"w0": (4, 5), "b0": (5,), "w1": (5, 3)},
    "cnn": {"k0": (2, 1, 3, 3), "b0": (2,), "g": (2,), "b": (2,), "m": (2,), "v": (2,), "w": (2, 3), "b1": (3,)},
    "transformer": {"table": (7, 4), "wq": (4, 4), "wk": (4, 4), "scale": (4,), "bias": (4,)},
    "lstm": {"w": (1, 12, 4), "r": (1, 12, 3), "b": (1, 24)},
    "control": {"w": (4,), "rows": (3, 4)},
}
_FIXED: dict[str, dict[str, np.ndarray]] = {
    "cnn": {"axes": np.array([2, 3])},
    "transformer": {"root": np.float32(2), "low": np.float32(-1e9), "one": np.array([1])},
    "control": {"three": np.array(3)},
    "shapes": {
        "zero": np.array(0),
        "four": np.array([4]),
        "start": np.array(0),
        "step": np.array(1),
        "pads": np.array([0, 0, 1, 0]),
    },
    "mixed": {
        "scale": np.float32(0.5),
        "zero": np.array(3, np.uint8),
        "low": np.float32(-6),
        "high": np.float32(70000),
    },
}


def _made(text: str) -> onnx.ModelProto:
    model = onnx.parser.parse_model(_HEAD + text)
    name, rng = model.graph.name, np.random.default_rng(0)
    for weight, shape in _SHAPES.get(name, {}).items():
        array = np.abs(rng.standard_normal(shape)).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, weight))
    for constant, value in _FIXED.get(name, {}).items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), constant))
    if name == "mixed":
        sparse = helper.make_sparse_tensor(
            numpy_helper.from_array(np.ones(2, np.float32), "sp"), numpy_helper.from_array(np.array([0, 3]), "at"), [4]
        )
        model.graph.sparse_initializer.append(sparse)
    if name == "mlp":  # content as old exporters write it
        tensor = model.graph.initializer[1]
        array = numpy_helper.to_array(tensor)
        tensor.CopyFrom(helper.make_tensor("b0", TensorProto.FLOAT, [5], array.tolist()))
    return model


@cache
def models() -> dict[str, onnx.ModelProto]:
    """The models by name: eight made here, two of the onnx package's test data."""
    found = {m.graph.name: m for m in map(_made, (MLP, CNN, TRANSFORMER, LSTM, CONTROL, SHAPES, FUNCTIONS, MIXED))}
    for name in ("pytorch-converted/test_Conv2d_groups", "simple/test_sequence_model4"):
        found[name.partition("/test_")[2]] = onnx.load(_DATA / name / "model.onnx")
    return found
