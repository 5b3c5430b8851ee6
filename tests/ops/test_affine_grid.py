"""AffineGrid in training: what onnx's reference computes, and the gradient of a spatial transformer by differences."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

import amp_transpiler as amp
from amp_transpiler.errors import GradientError
from amp_transpiler.nn import functional as F
from tests.helpers.linear_operators import check_linear


def model(sizes: list[int], corners: int) -> onnx.ModelProto:
    """Places by x w [N, rank, rank + 1]."""
    rank, batch = len(sizes) - 2, sizes[0]
    return onnx.parser.parse_model(f"""
        <ir_version: 9, opset_import: ["" : 20]>
        net (float[{batch},{rank},{rank + 1}] x) => (float[{", ".join(map(str, [batch, *sizes[2:], rank]))}] y)
        <int64[{len(sizes)}] size = {{{", ".join(map(str, sizes))}}}, float[{rank},{rank + 1}] w = {{{
        ", ".join(["1"] * rank * (rank + 1))
    }}}>
        {{ theta = Mul (x, w) y = AffineGrid <align_corners = {corners}> (theta, size) }}""")


@pytest.mark.parametrize("corners", [0, 1])
@pytest.mark.parametrize("sizes", [[2, 3, 4, 5], [2, 1, 3, 4, 5]], ids=["image", "volume"])
def test_values_and_gradients(sizes: list[int], corners: int) -> None:
    made, rng = model(sizes, corners), np.random.default_rng(0)
    rank, by_onnx = len(sizes) - 2, ReferenceEvaluator(made)
    x, u = (rng.standard_normal((n, rank, rank + 1), np.float32) for n in (sizes[0], 1))
    check_linear(made, x, u[0], lambda values: by_onnx.run(None, {"x": values})[0])


def test_in_16_bit_places_stay_fp32() -> None:
    program = amp.Program.from_onnx(model([2, 3, 4, 5], 0))
    amp.prepare_training(program)
    with amp.program_guard(program, program.startup), amp.unique_name.guard():
        optimizer = amp.decorate(amp.optimizer.SGD(0.1, multi_precision=True), use_pure_fp16=True, use_fp16_guard=False)
        optimizer.minimize(F.mean(program.outputs[0]))
    assert {op.reason for op in program.operators if op.type == "MatMul"} == {"fp32: places in an image"}


def test_a_size_that_is_computed_is_named() -> None:
    text = """<ir_version: 9, opset_import: ["" : 20]>
        net (float[2,2,3] x, int64[4] size) => (float[n,h,w,2] y) <float[2,3] w = {1, 1, 1, 1, 1, 1}>
        { theta = Mul (x, w) y = AffineGrid (theta, size) }"""
    program = amp.Program.from_onnx(onnx.parser.parse_model(text))
    amp.prepare_training(program)
    with amp.program_guard(program, program.startup), pytest.raises(GradientError, match="grid is not fixed.*register"):
        amp.append_backward(F.mean(program.outputs[0]))
