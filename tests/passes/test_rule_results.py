"""What a rule gives is compared with what its operator makes: another number or shape trained on in silence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import AmpError, ArgumentError, ArgumentTypeError, GradientError, GraphError
from amp_transpiler.ir import opdef, user_rules
from amp_transpiler.ir.opdef import lowering_rule, own
from amp_transpiler.nn import functional as F

MODEL = """<ir_version: 10, opset_import: ["" : 21, "wrong" : 1]>
g (float[2,3,4] x) => (float y) <float[3,4] w = {1,1,1,1,1,1,1,1,1,1,1,1}> {
  s = wrong.Scale (x, w)
  y = ReduceMean <keepdims = 0> (s)
}
<domain: "wrong", opset_import: ["" : 21]>
Scale (a, v) => (c) { c = Mul (a, v) }"""
GAVE = r"the gradient rule of wrong::Scale, tests.passes.test_rule_results.*<lambda>, gave "
SHAPE = r" for 'w@GRAD'; expected one of shape \[3, 4\], that of 'w'"


@pytest.fixture(autouse=True)
def _table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(opdef, "_TABLE", {key: replace(found) for key, found in opdef._TABLE.items()})
    monkeypatch.setattr(opdef, "_READS", dict(opdef._READS))
    monkeypatch.setattr(user_rules, "_OF_USERS", set())
    yield


def minimized(rule: Callable[..., Any], **options: Any) -> amp.Program:
    amp.register_gradient("wrong::Scale", reads="x0 x1 dy0", **options)(rule)
    program = amp.Program.from_onnx(onnx.parser.parse_model(MODEL))
    amp.optimizer.SGD(0.1).minimize(program.outputs[0])
    return program


def right(e: Any, op: Any, x: Any, w: Any, dy: Any) -> Any:
    return e.ReduceSum(e.Mul(dy, x), e.ints(0), keepdims=0)


#: What a rule gives for its two inputs, and what is said of it.
WRONG: list[tuple[str, Callable[..., Any], str]] = [
    ("a known shape", lambda e, op, x, w, dy: [None, e.reshape(right(e, op, x, w, dy), (4, 3))], r"a tensor of shape \[4, 3\]" + SHAPE),
    ("a shape that broadcasts", lambda e, op, x, w, dy: [None, e.reduce_sum(e.Mul(dy, x), [0, 1])], r"a tensor of shape \[4\]" + SHAPE),
    ("one number", lambda e, op, x, w, dy: [None, e.ReduceSum(dy, keepdims=0)], r"a tensor of shape \[\]" + SHAPE),
    ("as read", lambda e, op, x, w, dy: [None, dy], r"a tensor of shape \[2, 3, 4\]" + SHAPE),
    ("integers", lambda e, op, x, w, dy: [None, e.cast(w, "int64")], "int64 for 'w@GRAD'; expected a tensor of floats of shape"),
    ("a number", lambda e, op, x, w, dy: [None, 1.0], "1.0 for 'w@GRAD'; expected a tensor of shape"),
    ("too few", lambda e, op, x, w, dy: [None], "nothing for 'w@GRAD'; expected a tensor of shape"),
    ("too many", lambda e, op, x, w, dy: [None, w, dy], "3 values; expected 2, one for each input of the operator"),
    ("a bare value", right, "a tensor; expected a list of 2, one for each input of the operator, None where"),
    ("nothing", lambda e, op, x, w, dy: None, "nothing; expected a list of 2, one for each input"),
]  # fmt: skip


@pytest.mark.parametrize("place", [amp.CPUPlace(), amp.CUDAPlace(0)], ids=str)
@pytest.mark.parametrize(("rule", "said"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_what_does_not_fit_is_named(rule: Callable[..., Any], said: str, place: amp.Place) -> None:
    with pytest.raises(GraphError, match="operator 'wrong.ScaleGrad -> w@GRAD': ") as caught:
        minimized(rule).lower(place)
    caught.match(GAVE.replace("<lambda>", "right") + said if rule is right else GAVE + said)


@pytest.mark.parametrize("native", [False, True])
def test_what_fits_is_taken(native: bool) -> None:
    def rule(*given: Any) -> Any:
        return (None, right(*given))

    assert minimized(rule, native=native).lower(amp.CPUPlace()).updates


def test_a_lowering_rule_is_asked_too() -> None:
    lowering_rule(own("Twofold"), infer=lambda op: [("float32", (2,))])(lambda e, op, x: e.Add(x, x))
    program = amp.Program()
    with amp.program_guard(program):
        x = amp.data("x", [2])
        program.add_operator("Twofold", [x], [program.add_variable("y", "float32", (2,))], domain="amp_transpiler")
    with pytest.raises(
        GraphError, match="the lowering rule of amp_transpiler::Twofold, .* gave a tensor; expected a list of 1"
    ):
        program.lower(amp.CPUPlace(), fetch_list=["y"])


def test_a_rule_of_this_package_is_replaced_where_that_is_asked_for_alone() -> None:
    """Tanh has a rule, and Round none that learns: here a straight-through estimate."""
    text = '<ir_version: 10, opset_import: ["" : 21]> net (float[2] x, float[2] w) => (float[2] y) { a = Mul(x, w) y = OP(a) }'
    feeds = {"x": np.array([2, 3], np.float32), "w": np.array([0.3, 0.4], np.float32)}

    def slope(type_: str) -> list[float] | None:
        program = amp.Program.from_onnx(onnx.parser.parse_model(text.replace("OP", type_)))
        with amp.program_guard(program):
            try:
                found = amp.append_backward(F.sum(program.outputs[0]), parameter_list=["w"])
            except GradientError:
                return None
        return amp.Executor().run(program, feed=feeds, fetch_list=[found[0][1]])[0].tolist()

    for type_, told in (("Tanh", "has a rule for Tanh"), ("Round", "takes the gradient of Round for zero")):
        before = slope(type_)
        assert (before is None) == (type_ == "Round")
        with pytest.raises(ArgumentError, match=f"register_gradient: this package {told}; give replace=True"):
            amp.register_gradient(type_, reads="dy0")
        assert slope(type_) == before
        amp.register_gradient(type_, reads="dy0", replace=True)(lambda e, op, dy: [dy])
        assert slope(type_) == [2, 3]
        amp.register_gradient(type_, reads="dy0")(lambda e, op, dy: [e.Neg(dy)])  # one's own again, as in a notebook
        assert slope(type_) == [-2, -3]


@pytest.mark.parametrize(
    ("type_", "reads", "rule", "said"),
    [
        ("wrong::Scale", ["x0"], right, r"gradient of wrong::Scale: reads is \['x0'\]; expected text, as in 'x0 dy0'"),
        (None, "x0", right, "an operator is named by its type, as in 'Tanh' or 'domain::Type'; got None"),
        ("wrong::Scale", "x0", 3, "gradient of wrong::Scale: 3 is no function"),
    ],
)
def test_what_cannot_be_registered_is_named(type_: Any, reads: Any, rule: Any, said: str) -> None:
    with pytest.raises(ArgumentTypeError, match=said) as caught:
        amp.register_gradient(type_, reads)(rule)
    assert isinstance(caught.value, AmpError)
