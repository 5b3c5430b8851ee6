"""Whole converted models on CUDA: they are loaded, and nothing is on the CPU, or copied, that was not before."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from tests.helpers.converting import faithful, filled, off
from tests.helpers.placement import left_on_cpu, needs_placement_tool
from tests.helpers.sessions import run

pytestmark = needs_placement_tool

_21 = '<ir_version: 10, opset_import: ["" : 21]>\n'
#: An RMS norm over the last dimension as exporters write it, between names.
_RMS = """ {y}2 = Pow({x}, two) {y}m = ReduceMean({y}2, last) {y}e = Add({y}m, eps) {y}r = Sqrt({y}e)
{y}i = Div(one, {y}r) {y}n = Mul({x}, {y}i) {y} = Mul({scale}, {y}n) """
_NUMBERS = "float two = {2}, float one = {1}, float eps = {1e-5}, int64[1] last = {-1}"


def _rms(x: str, y: str, scale: str) -> str:
    return _RMS.format(x=x, y=y, scale=scale)


MODELS = {
    "batch norms, clips, pools": """m (float[2,8,8,8] x) => (float[2,10] z)
<float[8,8,1,1] w, float[8] s, float[8] b, float[8] mean, float[8] var, float low = {0}, float high = {6}, float[8,10] d>
{ h = Conv(x, w) r = Relu(h) n = BatchNormalization(r, s, b, mean, var) c = Clip(n, low, high)
  t = HardSigmoid(c) u = Mul(c, t) p = MaxPool<kernel_shape = [2, 2]>(u) g = GlobalAveragePool(p) f = Flatten(g) z = MatMul(f, d) }""",
    "RMS norms of heads, written out": _21
    + f"m (float[2,6,32] x) => (float[2,6,64] z) <float[32] s, float[8] q, float[32] t, float[32,32] v, float[32,32] o, float[32,64] w, {_NUMBERS}, int64[4] heads = {{2,6,4,8}}, int64[3] rows = {{2,6,32}}> {{"
    + _rms("x", "n", "s")
    + "h = MatMul(n, v) k = Reshape(h, heads)"
    + _rms("k", "a", "q")
    + "b = Transpose<perm = [0,2,1,3]>(a) c = Transpose<perm = [0,1,3,2]>(b) g = MatMul(b, c) p = Softmax(g) j = MatMul(p, b)"
    + "l = Transpose<perm = [0,2,1,3]>(j) i = Reshape(l, rows) u = MatMul(i, o) f = Add(x, u)"
    + _rms("f", "e", "t")
    + "z = MatMul(e, w) }",
    "an RMS norm that is an output": f"""{_21}m (float[2,6,32] x) => (float[2,6,32] z)
<float[32,32] w, float[32] s, {_NUMBERS}> {{ h = MatMul(x, w) {_rms("h", "z", "s")} }}""",
    "sums of exponentials": f"""{_21}m (float[2,6,32] x) => (float[2,6] z, float[2,6,32] y)
<float[32,32] w, int64[1] last = {{-1}}>
{{ h = MatMul(x, w) z = ReduceLogSumExp<keepdims = 0>(h, last) l = ReduceL2(h, last) d = Div(h, l) y = Softmax(d) }}""",
    "draws": """m (float[2,6,32] x) => (float[2,6,32] z) <float[32,32] w, float[32,32] v>
{ h = MatMul(x, w) e = RandomNormalLike<dtype = 1>(h) s = Mul(e, h) a = Add(s, h) z = MatMul(a, v) }""",
    "a recurrence": """m (float[5,2,16] x, float[2,16] a) => (float[2,16] y, float[5,2,16] z) <float[16,16] w, float[16,16] v>
{ y, z = Scan<num_scan_inputs = 1, body = step (float[2,16] h, float[2,16] u) => (float[2,16] n, float[2,16] o)
  { p = MatMul(h, w) q = MatMul(u, v) r = Add(p, q) n = Tanh(r) o = Sigmoid(n) }>(a, x) }""",
    "attention, masked": """m (float[2,4,6,8] x, bool[6,6] mask) => (float[2,4,6,8] z)
<float[8,8] w, float[8] s, float[8] b, float low = {-1e30}, float root = {2.8284}>
{ n = LayerNormalization(x, s, b) h = MatMul(n, w) t = Transpose<perm = [0,1,3,2]>(h) g = MatMul(h, t) d = Div(g, root)
  k = Where(mask, d, low) p = Softmax(k) j = MatMul(p, h) z = Add(x, j) }""",
    "attention, one operator": """<ir_version: 10, opset_import: ["" : 23]>
m (float[2,6,32] x) => (float[2,6,32] z) <float[32,32] w, float[32] s>
{ n = RMSNormalization(x, s) h = MatMul(n, w) a = Attention<q_num_heads = 4, kv_num_heads = 4>(h, h, h) z = Add(x, a) }""",
}
KINDS = [("pure", "float16"), ("mixed", "float16"), ("pure", "bfloat16"), ("mixed", "bfloat16")]


@pytest.mark.parametrize("name", MODELS)
def test_nothing_more_is_on_the_cpu(name: str, tmp_path: Path) -> None:
    model = filled(MODELS[name])
    before, more = left_on_cpu(model, tmp_path / "model.onnx"), dict[tuple[str, str], Counter[str]]()
    for mode, dtype in KINDS:
        converted = amp.convert(model, mode=mode, dtype=dtype)
        assert any(op.precision == dtype for op in converted.walk()), (mode, dtype)
        after = left_on_cpu(converted.to_onnx(), tmp_path / "converted.onnx")
        more[mode, dtype] = after - before
    assert not any(more.values()), more


@pytest.mark.parametrize(
    ("name", "fused"), [("RMS norms of heads, written out", 2), ("an RMS norm that is an output", 0)]
)
def test_norms_are_kept_from_a_fusion_without_kernel_and_no_others(name: str, fused: int) -> None:
    """A norm that reads and writes bfloat16, or fp32, keeps its power, which onnxruntime looks for."""
    model, feed = filled(MODELS[name]), {"x": np.random.default_rng(0).standard_normal((2, 6, 32), dtype=np.float32)}
    converted = amp.convert(model, dtype="bfloat16")
    counts = Counter(op.type for op in converted.operators)
    assert counts["Pow"] == fused and counts["ReduceMean"] == fused + 1
    assert off(faithful(converted, feed)[0], run(model, feed)[0]) < 1.2e-2


@pytest.mark.parametrize("name", [name for name in MODELS if "RMS" in name])
def test_evaluation_beside_training_is_on_cuda(name: str, tmp_path: Path) -> None:
    onnx.save(filled(MODELS[name]), tmp_path / "model.onnx")
    main = amp.Program.from_onnx(tmp_path / "model.onnx")
    with amp.program_guard(main, main.startup):
        loss = amp.nn.functional.mean(main.outputs[0])
        optimizer = amp.decorate(amp.optimizer.SGD(0.1), dtype="bfloat16")
        optimizer.minimize(loss, main.startup)
    for program in (main, main.clone(for_test=True)):
        program.lower(amp.CUDAPlace(0), feed_shapes={"x": (2, 6, 32)}).to_onnx(tmp_path / "lowered.onnx")
        assert not left_on_cpu(onnx.load(tmp_path / "lowered.onnx"), tmp_path / "placed.onnx")
