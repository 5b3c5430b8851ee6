"""GELUs that exporters wrote out, in the orders in which they multiply, and what only looks like one."""

from __future__ import annotations

import math

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import GraphError
from amp_transpiler.passes.canonicalize.fuse_gelu import fuse_gelus
from tests.helpers.slopes import assert_stays

HEAD = '<ir_version: 8, opset_import: ["" : 20]> g (float[4, 5] x) => (float[4, 5] y) '
HEAD += "<float root = {1.41421354}, float half = {0.5}, float one = {1.0}, float inverse = {0.70710677}, float two = {2.0}, "
HEAD += "float scale = {0.7978846}, float cubic = {0.044715}, float other = {0.05}, float three = {3.0}> "
ERF = "{ s = Div(x, root)  f = Erf(s)  a = Add(f, one)  "
GELUS = {
    "product first": ERF + "p = Mul(x, a)  y = Mul(p, half) }",
    "divided by two": ERF + "p = Mul(x, a)  y = Div(p, two) }",
    "half of x first": ERF + "h = Mul(half, x)  y = Mul(h, a) }",
    "half of the sum first": ERF + "h = Mul(a, half)  y = Mul(x, h) }",
    "multiplied by the root's inverse": "{ s = Mul(inverse, x)  f = Erf(s)  a = Add(one, f)  p = Mul(a, x)  y = Mul(p, half) }",
}
CUBE = "{ c = Pow(x, three)  d = Mul(c, cubic)  s = Add(x, d)  u = Mul(s, scale)  t = Tanh(u)  a = Add(t, one)  "
LINE = "{ r = Mul(x, scale)  d = Mul(cubic, x)  q = Mul(d, x)  s = Add(one, q)  u = Mul(r, s)  t = Tanh(u)  a = Add(one, t)  "
BY_TANH = {
    "half of x first, of a power": CUBE + "h = Mul(x, half)  y = Mul(h, a) }",
    "of products": CUBE.replace("c = Pow(x, three)", "k = Mul(x, x)  c = Mul(x, k)")
    + "p = Mul(a, x)  y = Mul(half, p) }",
    "half of the sum first, of a line and a square": LINE + "h = Mul(half, a)  y = Mul(x, h) }",
}
OTHERS = {
    "another root": ERF.replace("root", "two") + "p = Mul(x, a)  y = Mul(p, half) }",
    "another factor": ERF + "p = Mul(x, a)  y = Mul(p, inverse) }",
    "another x": ERF + "t = Tanh(x)  p = Mul(t, a)  y = Mul(p, half) }",
    "the sum is read twice": ERF + "p = Mul(x, a)  q = Mul(p, half)  y = Add(q, a) }",
    "a square": ERF + "p = Mul(a, a)  y = Mul(p, half) }",
    "another cubic": CUBE.replace("Mul(c, cubic)", "Mul(c, other)") + "h = Mul(x, half)  y = Mul(h, a) }",
    "no cubic": CUBE.replace("Add(x, d)", "Add(x, x)") + "h = Mul(x, half)  y = Mul(h, a) }",
    "a power of tensors": CUBE.replace("Pow(x, three)", "Pow(x, x)") + "h = Mul(x, half)  y = Mul(h, a) }",
    "a sum of 1": CUBE.replace("Add(x, d)", "Add(one, d)") + "h = Mul(x, half)  y = Mul(h, a) }",
}


def program(body: str) -> amp.Program:
    return amp.Program.from_onnx(onnx.parser.parse_model(HEAD + body))


@pytest.mark.parametrize("name", GELUS)
def test_a_gelu_becomes_one_operator(name: str) -> None:
    found = program(GELUS[name])
    assert fuse_gelus(found) == ["1 GELUs that were written out are one operator each"]
    assert [op.type for op in found.operators if op.type != "Constant"] == ["Gelu"]
    x = np.linspace(-6, 6, 20, dtype=np.float32).reshape(4, 5)
    exact = [v / 2 * (1 + math.erf(v / math.sqrt(2))) for v in x.reshape(-1).tolist()]
    (y,) = amp.Executor(amp.CPUPlace()).run(found, feed={"x": x}, fetch_list=["y"])
    np.testing.assert_allclose(y.reshape(-1), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", BY_TANH)
def test_so_does_its_approximation(name: str) -> None:
    found = program(BY_TANH[name])
    assert fuse_gelus(found) == ["1 GELUs that were written out are one operator each"]
    (gelu,) = (op for op in found.operators if op.type != "Constant")
    assert gelu.type == "Gelu" and gelu.attrs["approximate"] == "tanh"
    x = np.linspace(-6, 6, 20, dtype=np.float32).reshape(4, 5)
    exact = x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x.astype(np.float64) ** 3)))
    (y,) = amp.Executor(amp.CPUPlace()).run(found, feed={"x": x}, fetch_list=["y"])
    np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OTHERS)
def test_what_only_looks_like_one_stays(name: str) -> None:
    assert_stays(program(OTHERS[name]), fuse_gelus)


def test_an_imported_model_is_trained_with_the_operator() -> None:
    weight = " w = {" + ", ".join(["0.1"] * 25) + "}, float"
    model = onnx.parser.parse_model(
        HEAD.replace("<float root", "<float[5, 5]" + weight + " root")
        + GELUS["product first"].replace("y =", "z =")[:-1]
        + " y = MatMul(z, w) }"
    )
    found = amp.Program.from_onnx(model)
    assert any("GELUs" in note for note in amp.prepare_training(found).notes)
    assert "Erf" not in [op.type for op in found.operators]


@pytest.mark.parametrize("text", ["fuse-gelus", "fuse-layer-norms"])
def test_no_operator_is_put_in_that_the_opset_does_not_have(text: str) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 16]> g (float[2] x) => (float[2] y) { y = Neg(x) }'
    )
    with pytest.raises(GraphError, match=f"{text} needs target opset"):
        amp.Pipeline(text).run(amp.Program.from_onnx(model))
    amp.Pipeline(f"opset,{text}").run(amp.Program.from_onnx(model))
