"""RMS norms that exporters wrote out are one operator in training, and written out in what is saved."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.passes.canonicalize.fuse_rms import fuse_rms_norms
from tests.helpers.saved_models import trained_and_saved
from tests.helpers.slopes import assert_slope, assert_stays, slope

HEAD = '<ir_version: 8, opset_import: ["" : 20]> g (float[2, 3, 8] x) => (float[2, 3, 8] y) '
HEAD += "<float[8] g = {1, 2, 3, 4, 5, 6, 7, 8}, float[3, 8] wide = {" + ", ".join(["0.5", "2"] * 12) + "}, "
HEAD += "int64[1] last = {-1}, int64[2] both = {1, 2}, float eps = {1e-3}, float one = {1}, float two = {2}> "
ROOT = "{ s = Pow(x, two)  m = ReduceMean(s, last)  e = Add(m, eps)  r = Sqrt(e)  "
NORMS = {
    "by the inverse": ROOT + "i = Reciprocal(r)  n = Mul(x, i)  y = Mul(g, n) }",
    "by one over the root": ROOT + "i = Div(one, r)  n = Mul(i, x)  y = Mul(n, g) }",
    "divided": ROOT.replace("Pow(x, two)", "Mul(x, x)") + "n = Div(x, r)  y = Mul(g, n) }",
    "over two dimensions": ROOT.replace("last", "both") + "n = Div(x, r)  y = Mul(wide, n) }",
    "without an epsilon": ROOT.replace("Sqrt(e)", "Sqrt(m)") + "y = Div(x, r) }",
    "without a scale": ROOT + "y = Div(x, r) }",
    "of which the scale is a sum": ROOT + "n = Div(x, r)  h = Add(g, one)  y = Mul(n, h) }",
    "whose quotient is read twice": ROOT + "n = Div(x, r)  p = Mul(g, n)  y = Add(p, n) }",
    "of a sum": ROOT.replace("ReduceMean", "ReduceSum") + "i = Reciprocal(r)  y = Mul(x, i) }",
    "of a sum, and a scale": ROOT.replace("ReduceMean", "ReduceSum") + "n = Div(x, r)  y = Mul(n, g) }",
    "of a sum over two dimensions": ROOT.replace("ReduceMean", "ReduceSum").replace("last", "both") + "y = Div(x, r) }",
    "with a scale of another size": ROOT + "n = Div(x, r)  y = Mul(wide, n) }",
}
OTHERS = {
    "of another": ROOT + "t = Neg(x)  y = Div(t, r) }",
    "over other dimensions": ROOT.replace("last", "one_").replace("{ s", "{ one_ = Constant <value_ints = [1]> ()  s")
    + "y = Div(x, r) }",
    "a cube": ROOT.replace("Pow(x, two)", "Pow(x, g)") + "y = Div(x, r) }",
    "the root's share": ROOT + "y = Div(r, x) }",
}
X = np.random.default_rng(0).normal(size=(2, 3, 8)).astype(np.float32)


def program(body: str) -> amp.Program:
    return amp.Program.from_onnx(onnx.parser.parse_model(HEAD + body))


@pytest.mark.parametrize("name", NORMS)
def test_it_is_one_operator(name: str) -> None:
    expected = slope(program(NORMS[name]), X)
    found = program(NORMS[name])
    assert fuse_rms_norms(found) == ["1 RMS norms that were written out are one operator each"]
    kinds = [op.type for op in found.operators]
    assert kinds.count("SimplifiedLayerNormalization") == 1 and "Sqrt" not in kinds
    assert_slope(found, X, expected, 1e-4)


@pytest.mark.parametrize("name", OTHERS)
def test_what_only_looks_like_one_stays(name: str) -> None:
    assert_stays(program(OTHERS[name]), fuse_rms_norms)


@pytest.mark.parametrize("mode", ["fp32", "pure"])
def test_it_is_trained_and_saved_written_out(mode: str, tmp_path: Path) -> None:
    """The saved model has operators of ONNX alone, and gives what the trained program gives."""
    numbers = ", ".join(f"{value:.3f}" for value in np.random.default_rng(1).normal(size=64))
    head = HEAD.replace("<float[8] g", f"<float[8, 8] w = {{{numbers}}}, float[8] g")
    body = NORMS["by the inverse"].replace("y = Mul(g, n)", "k = Mul(g, n)  y = MatMul(k, w)")
    main = amp.Program.from_onnx(onnx.parser.parse_model(head + body))
    assert any("RMS norms" in note for note in amp.prepare_training(main).notes)
    served = trained_and_saved(main, X, mode, tmp_path)
    assert "SimplifiedLayerNormalization" not in {node.op_type for node in served.graph.node}


@pytest.mark.parametrize("opset", [11, 17, 23])
def test_a_model_that_has_the_operator_runs_at_its_opset(opset: int) -> None:
    """And at any size; of one that is fixed the lowered model says it, since ONNX's inference does not know it."""
    text = f'<ir_version: 8, opset_import: ["" : {opset}]> g (float[batch, n, 8] x) => (float[batch, n, 8] y) '
    text += "<float[8] g = {1, 2, 3, 4, 5, 6, 7, 8}> { k = SimplifiedLayerNormalization <epsilon = 1e-3> (x, g)  y = Neg(k) }"
    source = amp.Program.from_onnx(onnx.parser.parse_model(text))
    executor, scope = amp.Executor(amp.CPUPlace()), amp.Scope()
    executor.run(source.startup, scope=scope)
    for x in (X, X[:, :2], X[:0]):
        (y,) = executor.run(source, {"x": x}, ["y"], scope)
        wanted = -x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-3) * np.arange(1, 9)
        np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-5)
    fixed = amp.Program.from_onnx(onnx.parser.parse_model(text.replace("batch, n", "2, 3")))
    lowered = fixed.lower(amp.CPUPlace())
    assert {o.domain: o.version for o in lowered.model.opset_import}[""] == opset
    assert "k" in {info.name for info in lowered.model.graph.value_info}
