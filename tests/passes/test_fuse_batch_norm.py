"""Batch norms of a trained 16-bit model train with the statistics of the batch when it is read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.passes.canonicalize.fuse_batch_norm import fuse_batch_norms
from tests.helpers.saved_models import trained_and_saved

X = np.random.default_rng(0).normal(1, 2, size=(8, 3, 4)).astype(np.float32)
NAMES = ("scale", "bias", "mean", "variance")
HEAD = '<ir_version: 8, opset_import: ["" : 20]> g (float[8, 3, 4] x) => (float[8, 3, 4] y) '
HEAD += "<float[3] scale = {1, 2, 0.5}, float[3] bias = {0.5, -1, 2}, float[3] mean = {1, 0.5, 0}, "
HEAD += "float[3] variance = {4, 2, 1}, float small = {0.001}, float[3] ones = {1, 1, 1}, float[3] twos = {2, 2, 2}, "
HEAD += "int64[1] last = {1}> "
ROOT = "{ v = Add(small, variance)  r = Sqrt(v)  "
SLOPE = ROOT + "s = Div(scale, r)  "
NORM = "y = BatchNormalization <epsilon = 0.0> (x, s, bias, mean, ones)"
OTHERS = {
    "a variance of its own": SLOPE + NORM.replace("ones", "twos") + " }",
    "an epsilon of its own": SLOPE + NORM.replace("0.0", "0.001") + " }",
    "a slope that is a parameter": "{ " + NORM.replace("x, s,", "x, scale,") + " }",
    "the inverse": ROOT + "s = Div(r, scale)  " + NORM + " }",
    "a computed scale": ROOT + "t = Neg(scale)  s = Div(t, r)  " + NORM + " }",
    "a vector of epsilons": SLOPE.replace("small", "twos") + NORM + " }",
}


def program(body: str) -> amp.Program:
    model = onnx.parser.parse_model(HEAD + body)
    found = amp.Program.from_onnx(model)
    for variable in found.variables:
        variable.persistable = variable.name in NAMES
    return found


def run(main: amp.Program) -> np.ndarray:
    scope, executor = amp.Scope(), amp.Executor(amp.CPUPlace())
    executor.run(main.startup, scope=scope)
    return np.asarray(executor.run(main, {"x": X}, ["y"], scope=scope)[0])


def test_a_computed_slope() -> None:
    main, again = program(SLOPE + NORM + " }"), program(SLOPE + NORM + " }")
    assert len(fuse_batch_norms(main)) == 1 and fuse_batch_norms(main) == []
    (norm,) = main.operators
    assert [v.name for v in norm.inputs if v is not None] == ["x", *NAMES] and not main.has_var("s")
    assert norm.attrs["epsilon"] == np.float32(0.001)
    assert np.allclose(run(main), run(again), rtol=1e-6, atol=1e-6)


def test_a_slope_that_something_else_reads_stays() -> None:
    main = program(SLOPE + NORM.replace("y =", "z =") + "  c = Unsqueeze(s, last)  y = Mul(z, c) }")
    assert len(fuse_batch_norms(main)) == 1
    assert [op.type for op in main.operators] == ["Add", "Sqrt", "Div", "BatchNormalization", "Unsqueeze", "Mul"]


@pytest.mark.parametrize("body", OTHERS.values(), ids=list(OTHERS))
def test_others_stay(body: str) -> None:
    main = program(body)
    before = [op.type for op in main.operators]
    assert fuse_batch_norms(main) == [] and [op.type for op in main.operators] == before


def test_a_saved_model_trains_on_as_the_one_that_was_built(tmp_path: Path) -> None:
    """Parameters are rounded to 16 bit in the file; the gradients and statistics of one step are those of fp32."""
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        main.outputs = [amp.nn.batch_norm(amp.nn.conv1d(amp.data("x", [8, 3, 4]), 5, 3))]
    main.startup = startup
    model = trained_and_saved(main, X, "pure", tmp_path)
    read = amp.Program.from_onnx(model)
    report = amp.prepare_training(read)
    assert "1 BatchNormalization train with the statistics of the batch" in report.notes and not report.frozen
    scope, executor = amp.Scope(), amp.Executor(amp.CPUPlace())
    executor.run(read.startup, scope=scope)
    held: dict[str, Any] = {name: scope.find_var(name) for name in scope.var_names()}
    (shown,) = executor.run(read, {"x": X}, [read.outputs[0].name], scope=scope)
    assert np.allclose(shown.mean((0, 2)), held["batch_norm_0.b_0"], atol=2e-3)
    assert np.allclose(shown.std((0, 2)), np.abs(held["batch_norm_0.w_0"]), rtol=1e-2)
    assert not np.array_equal(scope.find_var("batch_norm_0.w_1"), held["batch_norm_0.w_1"])
