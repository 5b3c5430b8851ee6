"""A tensor times its sigmoid is one operator in training, and written out in what is saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.nn import functional as F
from amp_transpiler.passes.canonicalize.fuse_swish import fuse_swishes
from tests.helpers.saved_models import trained_and_saved
from tests.helpers.slopes import assert_slope, assert_stays, slope

HEAD = '<ir_version: 8, opset_import: ["" : 20]> g (float[batch, 8] x) => (float[batch, 8] y) '
HEAD += "<float quick = {1.702}, float one = {1}, float[8] each = {1, 2, 3, 4, 5, 6, 7, 8}, float back = {-1}> "
SWISHES = {
    "silu": "{ s = Sigmoid(x)  y = Mul(x, s) }",
    "silu, the other way round": "{ s = Sigmoid(x)  y = Mul(s, x) }",
    "quick gelu": "{ z = Mul(x, quick)  s = Sigmoid(z)  y = Mul(x, s) }",
    "quick gelu, the other way round": "{ z = Mul(quick, x)  s = Sigmoid(z)  y = Mul(s, x) }",
    "of what is read elsewhere": "{ z = Mul(quick, x)  s = Sigmoid(z)  p = Mul(s, x)  y = Sub(p, z) }",
}
OTHERS = {
    "of another tensor": "{ z = Neg(x)  s = Sigmoid(z)  y = Mul(x, s) }",
    "of which the sigmoid is read": "{ s = Sigmoid(x)  p = Mul(x, s)  y = Add(p, s) }",
    "a number for each place": "{ z = Mul(x, each)  s = Sigmoid(z)  y = Mul(x, s) }",
    "backwards": "{ z = Mul(x, back)  s = Sigmoid(z)  y = Mul(x, s) }",
    "its square": "{ s = Sigmoid(x)  y = Mul(s, s) }",
}
WEIGHTS = "{" + ", ".join(f"{value:.3f}" for value in np.random.default_rng(1).normal(size=64)) + "}"
WITH_WEIGHTS = HEAD.replace("<float quick", f"<float[8, 8] w = {WEIGHTS}, float quick")
X = (np.random.default_rng(0).normal(size=(3, 8)) * 3).astype(np.float32)


def program(body: str) -> amp.Program:
    return amp.Program.from_onnx(onnx.parser.parse_model(HEAD + body))


@pytest.mark.parametrize("name", SWISHES)
def test_it_is_one_operator(name: str) -> None:
    expected = slope(program(SWISHES[name]), X)
    found = program(SWISHES[name])
    assert fuse_swishes(found) == ["1 products of a tensor and its sigmoid are one operator each"]
    kinds = [op.type for op in found.operators]
    assert kinds.count("QuickGelu") == 1 and "Sigmoid" not in kinds
    assert_slope(found, X, expected)


@pytest.mark.parametrize("name", OTHERS)
def test_what_only_looks_like_one_stays(name: str) -> None:
    assert_stays(program(OTHERS[name]), fuse_swishes)


def test_a_number_that_is_trained_stays() -> None:
    main = program(SWISHES["quick gelu"])
    told = amp.prepare_training(main, trainable=["quick"])
    assert told.trainable == ("quick",) and [op.type for op in main.operators] == ["Mul", "Sigmoid", "Mul"]


@pytest.mark.parametrize("mode", ["fp32", "mixed", "pure"])
def test_it_is_trained_and_saved_written_out(mode: str, tmp_path: Path) -> None:
    """The saved model has operators of ONNX alone, and gives what the trained program gives."""
    body = "{ k = MatMul(x, w)  s = Sigmoid(k)  y = Mul(k, s) }"
    main = amp.Program.from_onnx(onnx.parser.parse_model(WITH_WEIGHTS + body))
    assert any("sigmoid" in note for note in amp.prepare_training(main).notes)
    served = trained_and_saved(main, X, mode, tmp_path)
    assert {"Sigmoid", "Mul"} <= {node.op_type for node in served.graph.node}


def test_the_operator_of_onnxruntime_is_trained_so_too(tmp_path: Path) -> None:
    """And saved as others can read it; where nobody prepared it, it is taken apart to be trained."""
    text = WITH_WEIGHTS.replace('"" : 20]', '"" : 20, "com.microsoft" : 1]')
    body = "{ k = MatMul(x, w)  y = com.microsoft.QuickGelu(k) }"
    main, plain = (amp.Program.from_onnx(onnx.parser.parse_model(text + body)) for _ in range(2))
    amp.prepare_training(main)
    assert [op.type for op in main.operators] == ["MatMul", "QuickGelu"]
    served = trained_and_saved(main, X, "pure", tmp_path)
    assert "QuickGelu" not in {node.op_type for node in served.graph.node}
    with amp.program_guard(plain, plain.startup):
        amp.append_backward(F.sum(plain.outputs[0]))
    kinds = {op.type for op in plain.operators}
    assert "SigmoidGrad" in kinds and "QuickGelu" not in kinds


@pytest.mark.parametrize("name", ["silu", "swish", "Sigmoid", "com.microsoft::QuickGelu"])
def test_it_stays_fp32_where_a_list_says_so(name: str) -> None:
    """Of what it stands for, too."""
    main = amp.Program.from_onnx(
        onnx.parser.parse_model(WITH_WEIGHTS + "{ k = MatMul(x, w)  s = Sigmoid(k)  y = Mul(k, s) }")
    )
    amp.prepare_training(main)
    lists = amp.CustomOpLists(custom_black_list=[name])
    optimizer = amp.decorate(
        amp.optimizer.Adam(0.1, multi_precision=True), lists, use_pure_fp16=True, use_fp16_guard=False
    )
    with amp.program_guard(main, main.startup):
        optimizer.minimize(F.mean(F.cast(main.outputs[0], "float32")), main.startup)
    (op,) = (op for op in main.operators if op.type == "QuickGelu")
    assert op.precision == "float32" and str(op.reason) == "fp32: custom black list"


@pytest.mark.parametrize("written", [F.silu, lambda x: x * F.sigmoid(x)])
def test_programs_that_are_built_have_a_slope_where_dy_x_does_not_fit(written: Callable[[Any], Any]) -> None:
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        given = amp.nn.initializer.Assign(np.float32([1, 20, 100, 1000]))
        x = amp.create_parameter([4], "float32", "x", default_initializer=given)
        loss = F.sum(F.cast(written(x), "float32"))
        optimizer = amp.decorate(
            amp.optimizer.SGD(0.0, multi_precision=True),
            use_pure_fp16=True,
            use_fp16_guard=False,
            init_loss_scaling=4096.0,
        )
        _, ((_, gradient),) = optimizer.minimize(loss, startup)
    scope, exe = amp.Scope(), amp.Executor()
    exe.run(startup, scope=scope)
    optimizer.amp_init(amp.CPUPlace(), scope)
    (slope,) = exe.run(main, fetch_list=[gradient], scope=scope)
    np.testing.assert_allclose(slope.astype(np.float32) / 4096, [0.92767, 1, 1, 1], rtol=2e-3)
