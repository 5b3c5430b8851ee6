"""Hard swishes that exporters wrote out are one operator in training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.passes.canonicalize.fuse_hard_swish import fuse_hard_swishes
from tests.helpers.saved_models import trained_and_saved
from tests.helpers.slopes import assert_slope, assert_stays, slope

HEAD = '<ir_version: 8, opset_import: ["" : 20]> g (float[batch, 8] x) => (float[batch, 8] y) '
HEAD += "<float three = {3}, float zero = {0}, float six = {6}, float sixth = {0.16666667}, float[1, 1] wide = {3}, "
HEAD += "float[1, 1, 1] deep = {3}, int64[1] first = {0}, "
HEAD += "float rough = {0.1667}, float[8] each = {6, 6, 6, 6, 6, 6, 6, 3}> "
GATE = "{ a = Add(x, three)  c = Clip(a, zero, six)  "
SWISHES = {
    "a sixth of the product": GATE + "p = Mul(x, c)  y = Div(p, six) }",
    "the product with a sixth": GATE + "s = Div(c, six)  y = Mul(x, s) }",
    "by a factor": GATE + "s = Mul(sixth, c)  y = Mul(s, x) }",
    "a factor of the product": GATE.replace("x, three", "wide, x") + "p = Mul(c, x)  y = Mul(p, sixth) }",
    "by a hard sigmoid": "{ s = HardSigmoid <alpha = 0.16666667> (x)  y = Mul(s, x) }",
}
OTHERS = {
    "of another tensor": GATE + "n = Neg(x)  p = Mul(n, c)  y = Div(p, six) }",
    "of which the gate is read": GATE + "s = Div(c, six)  p = Mul(x, s)  y = Add(p, s) }",
    "of which the product is read": GATE + "p = Mul(x, c)  q = Div(p, six)  y = Add(p, q) }",
    "a number for each place": GATE + "p = Mul(x, c)  y = Div(p, each) }",
    "another share": GATE + "p = Mul(x, c)  y = Mul(p, rough) }",
    "six times": GATE + "p = Mul(x, c)  y = Mul(p, six) }",
    "the inverse": GATE + "s = Div(six, c)  y = Mul(x, s) }",
    "moved otherwise": GATE.replace("three", "six") + "p = Mul(x, c)  y = Div(p, six) }",
    "bounded otherwise": GATE.replace("Clip(a, zero, six)", "Clip(a, zero, three)")
    + "p = Mul(x, c)  y = Div(p, six) }",
    "with a dimension more": GATE.replace("Add(x, three)", "Add(x, deep)") + "p = Mul(x, c)  z = Div(p, six)  "
    "y = ReduceSum <keepdims = 0> (z, first) }",
    "its square": GATE + "s = Div(c, six)  y = Mul(s, s) }",
    "by a steeper hard sigmoid": "{ s = HardSigmoid <alpha = 0.2> (x)  y = Mul(s, x) }",
    "by a hard sigmoid beside it": "{ s = HardSigmoid <alpha = 0.16666667, beta = 0.4> (x)  y = Mul(s, x) }",
}
X = (np.random.default_rng(0).normal(size=(3, 8)) * 3).astype(np.float32)


def program(body: str) -> amp.Program:
    return amp.Program.from_onnx(onnx.parser.parse_model(HEAD + body))


@pytest.mark.parametrize("name", SWISHES)
def test_it_is_one_operator(name: str) -> None:
    expected = slope(program(SWISHES[name]), X)
    found = program(SWISHES[name])
    assert fuse_hard_swishes(found) == ["1 hard swishes that were written out are one operator each"]
    assert [op.type for op in found.operators] == ["HardSwish"]
    assert_slope(found, X, expected)


@pytest.mark.parametrize("name", OTHERS)
def test_what_only_looks_like_one_stays(name: str) -> None:
    assert_stays(program(OTHERS[name]), fuse_hard_swishes)


@pytest.mark.parametrize("mode", ["fp32", "mixed", "pure"])
def test_it_is_trained_and_saved(mode: str, tmp_path: Path) -> None:
    """The saved model gives what the trained program gives."""
    numbers = "{" + ", ".join(f"{value:.3f}" for value in np.random.default_rng(1).normal(size=64)) + "}"
    body = SWISHES["by a factor"].replace("{ a = Add(x, three)", "{ k = MatMul(x, w)  a = Add(k, three)")
    text = HEAD.replace("<float three", f"<float[8, 8] w = {numbers}, float three") + body.replace(
        "Mul(s, x)", "Mul(s, k)"
    )
    main = amp.Program.from_onnx(onnx.parser.parse_model(text))
    assert any("hard swishes" in note for note in amp.prepare_training(main).notes)
    trained_and_saved(main, X, mode, tmp_path)


def test_its_slope_in_16_bit_takes_no_tensor_in_fp32() -> None:
    """Forward 5 passes over the tensor, backward a lookup and a product, 13, where the parts took 30; and the table."""
    numbers = "{" + ", ".join(["0.1"] * 64) + "}"
    bytes_ = {}
    for body in ("y = HardSwish(k)", "y = Identity(k)"):
        text = (
            HEAD.replace("<float three", f"<float[8, 8] w = {numbers}, float three") + f"{{ k = MatMul(x, w)  {body} }}"
        )
        main = amp.Program.from_onnx(onnx.parser.parse_model(text))
        amp.prepare_training(main)
        with amp.program_guard(main, main.startup):
            loss = amp.nn.functional.mean(amp.nn.functional.cast(main.outputs[0], "float32"))
            optimizer = amp.decorate(
                amp.optimizer.SGD(0.1, multi_precision=True), use_pure_fp16=True, use_fp16_guard=False
            )
            optimizer.minimize(loss, main.startup)
        cost = main.cost_estimate(amp.CUDAPlace(0), {"x": (1 << 16, 8)})
        bytes_[body] = cost.bytes
    passes, table = (5 + 13) * 2 * 8 * (1 << 16), 2 * (1 << 16)
    assert bytes_["y = HardSwish(k)"] - bytes_["y = Identity(k)"] <= passes + table + 1024
