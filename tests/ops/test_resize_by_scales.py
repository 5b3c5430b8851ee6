"""Resize by scales whose products with sizes round: float32 in onnxruntime, float64 in ONNX's type inference."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.nn import functional as F
from amp_transpiler.passes.lowering.lowering import lower
from tests.helpers.cuda_kernels import without_cuda_kernel
from tests.helpers.sessions import session

#: 24 to 10 is one that ONNX's inference takes for 9.
SIZE, RESIZED = 24, 10
SCALE = float(np.float32(RESIZED / SIZE))


def model(tail: str, size: int | str = SIZE, opset: int = 15, axes: str = "") -> onnx.ModelProto:
    scales = f"{SCALE!r}, {SCALE!r}" if axes else f"1.0, 1.0, {SCALE!r}, {SCALE!r}"
    count = 2 if axes else 4
    return onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : {opset}]>
        net (float["B", 2, {size}, {size}] x) => (float["B", "C"] y)
            <float[3, 2, 1, 1] w = {{0.5, -1.0, 0.25, 2.0, 1.0, -0.5}}, float[{count}] s = {{{scales}}}> {{
            c = Conv(x, w)
            r = Resize<mode = "linear"{axes}>(c, , s)
            {tail} }}""")


MEAN = "y = ReduceMean<axes = [2, 3], keepdims = 0>(r)"
POOL = 'g = AveragePool<kernel_shape = [3, 3], strides = [2, 2], auto_pad = "SAME_UPPER">(r)  y = Flatten(g)'


@pytest.mark.parametrize("size", [SIZE, '"S"'])
@pytest.mark.parametrize("tail", [MEAN, POOL])
def test_gradients_are_those_of_the_sizes_that_are_computed(tail: str, size: Any) -> None:
    net = model(tail, size)
    x = np.random.default_rng(0).normal(size=(2, 2, SIZE, SIZE)).astype(np.float32)

    def loss(weights: np.ndarray) -> float:
        copy = model(tail, size)
        copy.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(weights, "w"))
        return float(np.square(session(copy).run(None, {"x": x})[0].astype(np.float64)).sum())

    main = amp.Program.from_onnx(net)
    amp.prepare_training(main)
    assert [v.shape[2:] for op in main.operators if op.type == "Resize" for v in op.outputs if v and v.shape][:1] == [
        (RESIZED, RESIZED) if size == SIZE else (None, None)
    ]
    with amp.program_guard(main, main.startup):
        value = F.sum(F.square(main.outputs[0]))
        amp.optimizer.SGD(1.0).minimize(value)
    executor, scope = amp.Executor(amp.CPUPlace()), amp.Scope()
    executor.run(main.startup, scope=scope)
    before = scope.find_var("w").copy()
    executor.run(main, feed={"x": x}, fetch_list=[value], scope=scope)
    found = before - scope.find_var("w")
    for at in ((0, 1, 0, 0), (2, 0, 0, 0)):
        step = np.zeros_like(before)
        step[at] = 0.25  # the loss is a square of what is linear in the weights
        assert found[at] == pytest.approx((loss(before + step) - loss(before - step)) / 0.5, rel=1e-4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("opset", "axes"), [(15, ""), (18, ", axes = [2, 3]")])
def test_what_reads_them_fits(dtype: str, opset: int, axes: str) -> None:
    """onnxruntime refused lowered models: it infers as ONNX does where sizes are fixed."""
    net = model("f = Flatten(r)  y = MatMul(f, v)", '"S"', opset, axes)
    inner = np.random.default_rng(1).normal(size=(3 * RESIZED * RESIZED, 4)).astype(np.float32) / 10
    net.graph.initializer.append(onnx.numpy_helper.from_array(inner, "v"))
    x = np.random.default_rng(0).normal(size=(2, 2, SIZE, SIZE)).astype(np.float32)
    (expected,) = session(net).run(None, {"x": x})
    lowered = amp.convert(net, mode="pure", dtype=dtype).lower(amp.CPUPlace(), {"x": x.shape})
    (found,) = session(lowered.model).run(None, {"x": x})
    assert np.abs(found - expected).max() < (0.01 if dtype == "float16" else 0.08) * np.abs(expected).max()


def test_sizes_behind_sizes_and_sizes_beyond_the_digits_of_float32() -> None:
    """The second one is settled by what the first one gives: 10 of 24, and 14 of 10; of 9 it would be 13. Where no scale gives the
    size in float64, inference ends all the same, and so it does with scales that no image has and axes that do not fit."""
    text = f"""<ir_version: 8, opset_import: ["" : 18]> net (float[1, 1, 24, SIZE] x) => (float["A", "B", "C", "D"] y)
        <float[4] s = {{1.0, 1.0, {SCALE!r}, FIRST}}, float[4] t = {{1.0, 1.0, {float(np.float32(13 / 9))!r}, 1.0}}> {{
            a = Resize(x, , s)  y = Resize<AXES>(a, , t) }}"""
    made = text.replace("AXES", "axes = [0, 1, 2, 3]")
    program = amp.Program.from_onnx(onnx.parser.parse_model(made.replace("SIZE", "24").replace("FIRST", repr(SCALE))))
    assert [program.var(name).shape for name in "ay"] == [(1, 1, 10, 10), (1, 1, 14, 10)]
    large = made.replace("SIZE", str(2**26 + 1)).replace("FIRST", "0.4444444")
    assert (amp.Program.from_onnx(onnx.parser.parse_model(large)).var("a").shape or ())[2] == 10
    for other, first in ((made, "1e38"), (text.replace("AXES", "axes = [0, 1, 2, 9]"), "0.5")):
        wrong = amp.Program.from_onnx(onnx.parser.parse_model(other.replace("SIZE", "24").replace("FIRST", first)))
        assert wrong.var("y").dtype == "float32"


def test_scales_may_be_numbers_of_a_constant() -> None:
    program = amp.Program.from_onnx(
        onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 15]>
            net (float["B", 2, {SIZE}, {SIZE}] x) => (float["B", "C"] y) {{
                s = Constant<value_floats = [1.0, 1.0, {SCALE!r}, {SCALE!r}]>()
                r = Resize<mode = "linear">(x, , s)  y = Flatten(r) }}""")
    )
    assert program.var("y").shape == ("B", 2 * RESIZED * RESIZED)


@pytest.mark.parametrize("scale", [2.0, SCALE])
def test_bfloat16_which_no_kernel_takes_stays_fp32(scale: float) -> None:
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        wide = amp.nn.fc(amp.data("x", [4, 8]), 6 * SIZE)
        loss = F.mean(F.square(F.interpolate(F.reshape(wide, [4, 1, 6, SIZE]), scale_factor=scale, mode="bilinear")))
        optimizer = amp.optimizer.SGD(0.1, multi_precision=True)
        amp.decorate(optimizer, use_pure_fp16=True, use_fp16_guard=False, dtype="bfloat16").minimize(loss, startup)
    assert [op.precision for op in main.operators if op.type == "Resize"] == ["float32"]
    assert not without_cuda_kernel(lower(main, "cuda", {}, [loss]).model)
