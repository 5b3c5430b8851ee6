"""Programs converted under the numeric guards give right results where 16 bit is real; without them they do not."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.program import Program
from tests.helpers.constraints_of import convert, gather, kept, run_faithful, without_parameters
from tests.helpers.golden import program, run
from tests.helpers.where import TRAPS

TRAP_NAMES = ["p07_eps_1e-12_add", "p09_reducesum_overflow", "p21_batchnorm_large_var"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", TRAP_NAMES)
def test_traps_are_right(name: str, dtype: str) -> None:
    p = without_parameters(Program.from_onnx(onnx.load(TRAPS / f"{name}.onnx")))
    feeds = dict(np.load(TRAPS / f"{name}.npz"))
    expected = run(p, feeds)[0]
    got = run_faithful(convert(p, gather(p, dtype), dtype), feeds)[0]
    error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
    assert error < (4e-3 if dtype == "float16" else 3e-2)


def test_weights_beyond_any_trained_network() -> None:
    """Sums of large products overflow, and so do the products."""
    text = """main (float[4,8] x) => (float[4,8] y) <float[8,8] w, int64[1] last = {1}>
    { a = MatMul(x, w)  s = ReduceSum(a, last)  y = Div(a, s) }"""
    w = np.random.default_rng(0).uniform(0, 4000, (8, 8)).astype(np.float32)
    x = np.random.default_rng(1).uniform(0, 8, (4, 8)).astype(np.float32)
    w[3, 5] = 8000

    def built() -> Program:
        p = program(text.replace(" w,", " w = {" + ",".join(map(str, w.ravel().tolist())) + "},"))
        return without_parameters(p)

    p = built()
    expected = run(p, {"x": x})[0]
    found = kept(p, gather(p))
    norm = np.linalg.norm(w, axis=0).max()
    assert found["a"] == f"weights of norm {norm:.3g} take inputs of {65504 / norm:.2g} out of fp16"
    assert np.allclose(run_faithful(convert(p, gather(p)), {"x": x})[0], expected, rtol=2e-3)
    assert not np.isfinite(run_faithful(convert(built(), Constraints()), {"x": x})[0]).all()
    assert kept(built(), gather(built(), a=(0.0, 60000.0), s=(0.0, 60000.0))) == {}


@pytest.mark.parametrize(
    ("shape", "call"),
    [
        ("256,4", "y = MatMul(x, k)"),
        ("4,256", "y = Gemm<transB = 1>(x, k)"),
        ("256,4", "y = Gemm(x, k)"),
        ("4,256,1", "t = Unsqueeze(x, end)  c = Conv(t, k)  y = Squeeze(c, end)"),
        ("256,4,1", "t = Unsqueeze(x, end)  c = ConvTranspose(t, k)  y = Squeeze(c, end)"),
    ],
)
@pytest.mark.parametrize("element", [63.9, 64.1])
def test_the_norm_is_over_what_a_product_sums(shape: str, call: str, element: float) -> None:
    values = ",".join([str(element)] * 1024)
    p = without_parameters(
        program(f"""main (float[2,256] x) => (float[2,4] y)
    <float[{shape}] k = {{{values}}}, int64[1] end = {{2}}> {{ {call} }}""")
    )
    assert bool(kept(p, gather(p))) == (element > 64)


def test_a_norm_of_large_and_of_small_numbers_is_right() -> None:
    text = """main (float[2,64] x) => (float[2,64] y) <float two = {2}, float eps = {0.000000000001}, int64[1] last = {1}>
    { m = ReduceMean(x, last)  d = Sub(x, m)  p = Pow(d, two)  v = ReduceMean(p, last)  e = Add(v, eps)  s = Sqrt(e)
      y = Div(d, s) }"""
    x = np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32) * np.float32([[3000], [1e-4]])
    expected = run(program(text), {"x": x})[0]
    p = program(text)
    got = run_faithful(convert(p, gather(p)), {"x": x})[0]
    assert np.abs(got - expected).max() < 0.02
    p = program(text)
    bad = run_faithful(convert(p, Constraints()), {"x": x})[0]
    assert not np.allclose(bad, expected, atol=0.5)
