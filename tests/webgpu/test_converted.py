"""Conversions for WebGPU run there, and kernels that are known to fail still do."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import amp_transpiler as amp
from tests.helpers.converting import PIECES, filled
from tests.helpers.webgpu_sessions import built_in, session

pytestmark = pytest.mark.webgpu

CONV = "m (float[1,CHANNELS,8,9] x) => (float[n,o,h,v] y) <float[8,CHANNELS,3,3] w> { y = Conv(x, w) }"
NORMED = (
    "m (float[1,8,6,6] x) => (float[n,o,h,v] z) <float[8,8,1,1] w, float[8] s, float[8] b, float[8] mean, float[8] var>"
    " { c = Conv(x, w) n = Neg(c) y = BatchNormalization(n, s, b, mean, var) z = Relu(y) }"
)


def off(model: onnx.ModelProto, written: onnx.ModelProto | amp.Program, level: str = "DISABLE_ALL") -> float:
    """How far ``written``, a file or a program, is off on the device from ``model`` on CPU."""
    random = np.random.default_rng(1)
    feeds: dict[str, Any] = {}
    for value in model.graph.input:
        shape = [size.dim_value for size in value.type.tensor_type.shape.dim]
        feeds[value.name] = random.standard_normal(shape, np.float32)
    exact = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    if isinstance(written, amp.Program):
        exe, scope = amp.Executor(amp.WebGPUPlace(0)), amp.Scope()
        exe.run(written.startup, scope=scope)
        got = exe.run(written, feeds, written.outputs, scope=scope)[0]
    else:
        got = session(written, level=level).run(None, feeds)[0]
    wanted = exact.run(None, feeds)[0]
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("channels", [6, 9])
def test_a_convolution_that_is_wrong_as_it_stands(channels: int) -> None:
    model = filled(CONV.replace("CHANNELS", str(channels)))
    assert off(model, model) > 0.1  # the fault is there still: when this fails, lists/faults.toml has one row too many
    assert off(model, amp.convert(model, place="webgpu").to_onnx()) < 5e-3


SIX = "m (float[1,4,8,9] x) => (float[n,o,h,v] y) <float[6,4,1,1] w, float[6] b> { y = Conv(x, w, b) }"
BEHIND = "m (float[1,4,8,9] x) => (float[n,o,h,v] y) <float[5,4,1,1] w> { y = Conv<pads=[0, 0, 1, 2]>(x, w) }"
HEADS = (
    "m (float[2,32,16] q, float[2,40,16] k, float[2,40,16] v) => (float[2,32,16] y)"
    " { y = com.microsoft.MultiHeadAttention<num_heads=2>(q, k, v) }"
)
GROUPS = "m (float[1,4,8,9] x) => (float[n,o,h,v] y) <float[10,2,3,3] w> { y = Conv<group=2>(x, w) }"


@pytest.mark.parametrize(
    "text",
    [pytest.param(SIX, marks=pytest.mark.skipif(not built_in(), reason="right in the plugin")), BEHIND, GROUPS, HEADS],
)
def test_programs_are_lowered_around_kernels_that_are_wrong(text: str) -> None:
    model = filled(text)
    assert off(model, model) > 0.05
    assert off(model, amp.Program.from_onnx(model)) < 1e-6
    assert off(model, amp.convert(model, place="webgpu").to_onnx(), "ENABLE_ALL") < 5e-3  # nothing is fused to it again


@pytest.mark.parametrize(
    "text", ["{ y = Gemm(x, w, b) }", "{ a = Flatten(x) v = Relu(b) c = Gemm(a, w, v) y = Neg(c) }"]
)
def test_a_scalar_that_ends_the_process_is_added_by_itself(text: str) -> None:
    model = filled(f"m (float[3,4] x) => (float[n,o] y) <float[4,1] w, float[1] b> {text}")
    assert off(model, amp.convert(model, place="webgpu").to_onnx(), "ENABLE_ALL") < 5e-3


ACTIVATED = "m (float[1,4,8,9] x) => (float[n,o,h,v] y) <float[5,4,3,3] w> { c = Conv(x, w) MORE }"


@pytest.mark.parametrize(
    "more",
    [
        "a = Relu(c) y = Sigmoid(a)",
        "a = Tanh(c) t = Transpose<perm=[0, 2, 3, 1]>(a) r = Relu(t) y = Transpose<perm=[0, 3, 1, 2]>(r)",
        pytest.param(
            "s = Sigmoid(c) a = Mul(c, s) y = Relu(a)", marks=pytest.mark.skipif(built_in(), reason="right in 1.27")
        ),
    ],
)
def test_an_activation_behind_another_is_not_written_over_it(more: str) -> None:
    model = filled(ACTIVATED.replace("MORE", more))
    assert (
        off(model, model, "ENABLE_ALL") > 0.05
    )  # onnxruntime writes the first into the convolution, and the next there
    assert off(model, amp.Program.from_onnx(model)) < 1e-6
    assert off(model, amp.convert(model, place="webgpu").to_onnx(), "ENABLE_ALL") < 5e-3


def test_a_long_sum_loses_what_storage_does() -> None:
    model = filled(
        "m (float[1,2048] x) => (float[n,o] y) <float[2048,64] w> { a = Abs(x) b = MatMul(a, w) y = Neg(b) }"
    )
    assert off(model, amp.convert(model).to_onnx()) > 1e-3
    assert off(model, amp.convert(model, place="webgpu").to_onnx()) < 4e-4


END_THE_RUN = {
    "BatchNormalization": NORMED,
    "ThresholdedRelu": "m (float[3,4] x) => (float[n,o] y) { a = Neg(x) b = ThresholdedRelu<alpha=0.5>(a) y = Neg(b) }",
    "Resize": "m (float[1,2,3,4] x) => (float[n,c,h,v] y) <float[4] s = {1.0, 1.0, 2.0, 2.0}>"
    ' { a = Neg(x) b = Resize<mode="cubic">(a, "", s) y = Neg(b) }',
    "ScatterND": "m (float[5,3] x, float[2,3] u) => (float[n,o] y) <int64[2,1] i = {3, 3}>"
    ' { a = Relu(x) b = ScatterND<reduction="add">(a, i, u) y = Neg(b) }',
    "Split": PIECES,
    "Einsum": 'm (float[2,3,4] x) => (float[n,o,p] y) <float[4,5] w> { y = Einsum<equation="...k,kj->...j">(x, w) }',
}


def with_fp32_statistics(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model as others write it, with batch norms' parameters in fp32."""
    read = {name for node in model.graph.node if node.op_type == "BatchNormalization" for name in node.input[1:]}
    for tensor in model.graph.initializer:
        if tensor.name in read:
            array = onnx.numpy_helper.to_array(tensor).astype(np.float32)
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    return model


@pytest.mark.parametrize("type_", END_THE_RUN)
def test_a_kernel_that_ends_the_run(type_: str) -> None:
    model = filled(END_THE_RUN[type_])
    plain = with_fp32_statistics(amp.convert(model, numeric_guards=False).to_onnx())
    for given in (model, plain):
        program = amp.convert(given, place="webgpu", numeric_guards=False)
        assert off(model, program.to_onnx()) < 5e-3
        assert not amp.check_model(program.to_onnx(), "webgpu").faults
    assert off(model, amp.Program.from_onnx(plain)) < 5e-3  # lowered, it stays in 16 bit
    assert amp.check_model(plain, "webgpu").faults
    with pytest.raises(Exception, match=type_):
        off(model, plain)


def test_gradients_of_a_convolution_that_reads_by_threes() -> None:
    main, startup = amp.Program(), amp.Program()
    startup.seed = 1
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x = amp.data(
            "x", [6, 9, 8, 8], "float32"
        )  # a batch of six: the weights' gradient sums over it as over channels
        y = amp.nn.conv2d(amp.nn.functional.relu(amp.nn.conv2d(x, 12, 3, padding=1)), 8, 3)
        pairs = amp.append_backward(amp.nn.functional.mean(y * y))
    feed = {"x": np.random.default_rng(2).standard_normal((6, 9, 8, 8), np.float32)}
    found = []
    for place in (amp.CPUPlace(), amp.WebGPUPlace(0)):
        exe, scope = amp.Executor(place), amp.Scope()
        exe.run(startup, scope=scope)
        found.append(exe.run(main, feed=feed, fetch_list=[y, *(grad for _, grad in pairs)], scope=scope))
    for wanted, got in zip(*found, strict=True):
        assert np.linalg.norm(got - wanted) < 1e-5 * np.linalg.norm(wanted)
