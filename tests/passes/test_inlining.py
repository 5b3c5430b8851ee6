"""Functions inlined: the defaults of their attributes hold, wherever the call stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.passes.canonicalize import inlining
from amp_transpiler.passes.canonicalize.inlining import inline_functions
from tests.helpers.sessions import run

HEADER = '<ir_version: 9, opset_import: ["" : 17, "local" : 1]>\n'
LEAKY = """
<domain: "local", opset_import: ["" : 17]>
leaky <alpha: float = 0.25> (p) => (q) { q = LeakyRelu <alpha: float = @alpha> (p) }"""
CALLED = "g (float[4,4] x) => (float[4,4] y) { y = local.leaky(x) }"
GIVEN = "g (float[4,4] x) => (float[4,4] y) { y = local.leaky <alpha = 0.75> (x) }"
NESTED = """g (float[4,4] x) => (float[4,4] y) {
  sum = ReduceSum <keepdims = 0> (x)  zero = Constant <value_float = 0.0> ()  c = Less(sum, zero)
  y = If (c) <
    then_branch = a () => (float[4,4] u) { u = local.leaky(x) },
    else_branch = b () => (float[4,4] v) { w = local.leaky <alpha = 0.5> (x)  v = local.leaky(w) } >
}"""
#: A function that calls another, hands its own default on, and leaves the other's out in a branch.
OUTER = """
<domain: "local", opset_import: ["" : 17, "local" : 1]>
outer <beta: float = 0.6> (p) => (r) {
  s = local.leaky <alpha: float = @beta> (p)
  sum = ReduceSum <keepdims = 0> (p)  zero = Constant <value_float = 0.0> ()  c = Less(sum, zero)
  r = If (c) <
    then_branch = a () => (float[4,4] u) { u = local.leaky(s) },
    else_branch = b () => (float[4,4] v) { v = Neg(s) } >
}"""
CALLS = "g (float[4,4] x) => (float[4,4] y) { y = local.outer(x) }"
MODELS = {
    "called": CALLED + LEAKY,
    "given": GIVEN + LEAKY,
    "in branches": NESTED + LEAKY,
    "in a function": CALLS + LEAKY + OUTER,
}
X = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)


def parsed(source: str) -> onnx.ModelProto:
    model = onnx.parser.parse_model(HEADER + source)
    onnx.checker.check_model(model, full_check=True)
    return model


@pytest.mark.parametrize("source", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("sign", [1, -1])
def test_defaults_of_attributes_hold(source: str, sign: int) -> None:
    model = parsed(source)
    x = sign * np.abs(X.sum()) / X.sum() * X
    want = run(model, {"x": x})[0]
    program = amp.Program.from_onnx(model)
    assert program.to_onnx() == model
    lowered = program.lower(amp.CPUPlace()).model
    inlined = program.clone()
    assert inline_functions(inlined)
    half = amp.convert(model).to_onnx()
    for made, tolerance in ((inlined.to_onnx(), 0), (lowered, 0), (half, 2e-3)):
        assert not made.functions
        np.testing.assert_allclose(run(made, {"x": x})[0], want, rtol=tolerance, atol=tolerance)
    assert program.to_onnx() == model


#: What a function of an older opset than the model's has: in the same form, and in another.
OLDER = """g (float[4,4] x) => (float[4,4] y) { y = local.f(x) }
<domain: "local", opset_import: ["" : 12]> f (p) => (q) { r = Relu(p)  q = %s(r) }"""


def test_functions_of_another_opset_are_inlined_where_it_means_the_same() -> None:
    model = onnx.parser.parse_model(HEADER + OLDER % "Tanh")
    want = run(model, {"x": X})[0]
    program = amp.convert(model, check=True)
    assert [op.type for op in program.operators if not op.inserted] == ["Relu", "Tanh"]
    assert program.conversion is not None and program.conversion.verdict is not None and program.conversion.verdict.met
    np.testing.assert_allclose(run(program.to_onnx(), {"x": X})[0], want, atol=2e-3)


def test_functions_of_another_opset_that_means_something_else_are_named() -> None:
    model = onnx.parser.parse_model(HEADER + OLDER % "ReduceSum <axes = [0]>")
    program = amp.Program.from_onnx(model)
    with pytest.raises(amp.AmpError, match="'f' imports opset 12, program .* imports 17, and ReduceSum"):
        inline_functions(program)
    assert program.to_onnx() == model


def test_weights_of_a_real_size_stay_what_they_are() -> None:
    """The inliner sees them without their content."""
    source = "g (float[4,64] x) => (float[4,64] y) <float[64,64] w> { h = MatMul(x, w)  y = local.leaky(h) }"
    model = onnx.parser.parse_model(HEADER + source + LEAKY)
    w = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    program = amp.Program.from_onnx(model)
    assert inline_functions(program)
    assert program.var("w").trainable
    x = X.repeat(16, axis=1)
    np.testing.assert_array_equal(run(program.to_onnx(), {"x": x})[0], run(model, {"x": x})[0])


def test_training_starts_from_the_defaults() -> None:
    source = CALLED.replace("(x) }", "(h) h = MatMul(x, w) }").replace("y) {", "y) <float[4,4] w> {")
    model = onnx.parser.parse_model(HEADER + source + LEAKY)
    model.graph.initializer.append(onnx.numpy_helper.from_array(X.T.copy(), "w"))
    program = amp.Program.from_onnx(model)
    amp.prepare_training(program)
    with amp.program_guard(program, program.startup), amp.unique_name.guard():
        loss = amp.nn.functional.mean(program.outputs[0] * program.outputs[0])
        amp.optimizer.SGD(0.1).minimize(loss)
    scope, executor = amp.Scope(), amp.Executor(threads=1)
    executor.run(program.startup, scope=scope)
    fetched: Any = executor.run(program, feed={"x": X}, fetch_list=["y"], scope=scope)
    product = X @ X.T
    np.testing.assert_allclose(fetched[0], np.where(product < 0, 0.25 * product, product), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("feeds", [None, {"x": X}], ids=["synthetic", "calibration"])
@pytest.mark.parametrize("written", [True, False], ids=["file", "model"])
def test_a_check_goes_by_the_model_as_it_was_given(
    feeds: Any, written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What inlining gets wrong is wrong in the lowered original too."""
    monkeypatch.setattr(inlining, "_give_defaults", lambda model: None)
    model = parsed(CALLED + LEAKY)
    onnx.save(model, tmp_path / "m.onnx")
    program = amp.convert(tmp_path / "m.onnx" if written else model, calibration=feeds, check=True)
    assert program.conversion is not None and program.conversion.verdict is not None
    assert program.conversion.verdict.missed == ("y",)


@pytest.mark.parametrize(
    "body", ["q = Exp(p) dead = Sin(p)", "dead = Sin(p) q = Exp(p)", "q = local.leaky(p) dead = Sin(p)"]
)
def test_marks_of_a_call_reach_its_body_alone_whatever_that_computes_for_nobody(body: str) -> None:
    source = """g (float[4,4] x, bool c) => (float[4,4] y) { h = local.f(x)
      y = If (c) < then_branch = a () => (float[4,4] u) { u = Relu(h) }, else_branch = b () => (float[4,4] v) { v = Neg(h) } > }"""
    function = f"""
<domain: "local", opset_import: ["" : 17, "local" : 1]> f (p) => (q) {{ {body} }}"""
    model = parsed(source + function + LEAKY)
    program = amp.Program.from_onnx(model)
    program.operators[0].scope = "called"
    assert inline_functions(program)
    assert [(op.type, op.scope) for op in program.operators if op.type == "If" or op.scope != "called"] == [("If", "")]
    assert len(program.operators) == 3
    feed = {"x": X, "c": np.array(True)}
    np.testing.assert_array_equal(run(program.to_onnx(), feed)[0], run(model, feed)[0])
