"""A number of more dimensions than what it is joined with gives these to the result: no rewriting loses them.

The oracle is onnx's reference evaluator: onnxruntime (1.31) loses them where it fuses a norm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

import amp_transpiler as amp
from amp_transpiler.passes.canonicalize.fuse_norm import fuse_layer_norms
from amp_transpiler.passes.canonicalize.fuse_rms import fuse_rms_norms
from amp_transpiler.passes.canonicalize.nan_rows import free_nan_rows
from amp_transpiler.passes.canonicalize.roots import write_roots

HEAD = '<ir_version: 8, opset_import: ["" : 17]> g (float[4, 8] x, float[4, 8] z) => (float[a, b, c] y) '
HEAD += (
    "<float[1, 1, 1] wide = {NUMBER}, float two = {2}, float small = {1e-3}, float none = {0}, int64[1] last = {-1}, "
)
HEAD += "float[8] w = {1, 2, 3, 4, 5, 6, 7, 8}> "
SQUARES = "s = Mul(x, x)  m = ReduceMean <axes = [-1]> (s)  "
#: By what is written out: the number, and the operators.
WRITTEN = {
    "an RMS norm": (1e-3, SQUARES + "e = Add(m, wide)  r = Sqrt(e)  n = Div(x, r)  y = Mul(n, w)"),
    "one by a square": (
        2,
        SQUARES.replace("Mul(x, x)", "Pow(x, wide)") + "e = Add(m, small)  r = Sqrt(e)  y = Div(x, r)",
    ),
    "one by an inverse": (1, SQUARES + "e = Add(m, small)  r = Sqrt(e)  i = Div(wide, r)  y = Mul(x, i)"),
    "one by a power": (-0.5, SQUARES + "e = Add(m, small)  r = Pow(e, wide)  y = Mul(x, r)"),
    "a layer norm": (
        1e-3,
        "u = ReduceMean <axes = [-1]> (x)  d = Sub(x, u)  s = Mul(d, d)  m = ReduceMean <axes = [-1]> (s)  "
        "e = Add(m, wide)  r = Sqrt(e)  n = Div(d, r)  y = Mul(n, w)",
    ),
    "a unit vector": (1e-6, "s = Mul(x, x)  t = ReduceSum(s, last)  r = Sqrt(t)  f = Max(r, wide)  y = Div(x, f)"),
    "a magnitude": (1e-3, "s = Mul(x, x)  t = Mul(z, z)  u = Add(s, t)  e = Add(u, wide)  r = Sqrt(e)  y = Relu(r)"),
    "shares": (1e-20, "p = Sigmoid(x)  t = ReduceSum(p, last)  e = Add(t, wide)  y = Div(p, e)"),
    "rows without NaN": (0, "t = Transpose(z)  k = MatMul(x, t)  p = Softmax(k)  n = IsNaN(p)  y = Where(n, wide, p)"),
}
FEED = {name: np.random.default_rng(seed).normal(size=(4, 8)).astype(np.float32) for seed, name in enumerate("xz")}


def written(name: str) -> onnx.ModelProto:
    number, body = WRITTEN[name]
    model: onnx.ModelProto = onnx.parser.parse_model(HEAD.replace("NUMBER", str(number)) + f"{{ {body} }}")
    onnx.checker.check_model(model, full_check=True)
    return model


def assert_equal(program: amp.Program, model: onnx.ModelProto, tolerance: float) -> None:
    after = program.to_onnx()
    onnx.checker.check_model(after, full_check=True)
    wanted: Any = ReferenceEvaluator(model).run(None, FEED)[0]
    found: Any = ReferenceEvaluator(after).run(None, FEED)[0]
    assert found.shape == wanted.shape and wanted.ndim == 3
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("mode", ["pure", "mixed"])
@pytest.mark.parametrize("name", WRITTEN)
def test_a_conversion_keeps_them(name: str, mode: str) -> None:
    assert_equal(amp.convert(written(name), mode=mode), written(name), 2e-2)


@pytest.mark.parametrize("rewrite", [fuse_layer_norms, fuse_rms_norms, write_roots, free_nan_rows])
@pytest.mark.parametrize("name", WRITTEN)
def test_so_do_the_rewritings_before_training(name: str, rewrite: Callable[[amp.Program], object]) -> None:
    program = amp.Program.from_onnx(written(name))
    rewrite(program)
    assert_equal(program, written(name), 1e-5)
