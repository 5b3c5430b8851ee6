"""What a rule gives is compared with what its operator makes: another number or shape trained on in silence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import AmpError, ArgumentTypeError, GraphError
from amp_transpiler.ir import opdef
from amp_transpiler.ir.opdef import lowering_rule, own

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
    for name in ("_TABLE", "_READS"):
        monkeypatch.setattr(opdef, name, dict(getattr(opdef, name)))
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
