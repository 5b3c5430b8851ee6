"""Changes of a graph by hand: what cannot be is named at the call, and the graph stays as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import AmpError, ArgumentError, ArgumentTypeError, GraphError


class Built:
    def __init__(self) -> None:
        self.program = amp.Program("main")
        with amp.program_guard(self.program):
            self.x = amp.data("x", [2, 3])
            self.y = self.program.add_variable("y", "float32", (2, 3))
        self.op = self.program.add_operator("LeakyRelu", [self.x], [self.y], attrs={"alpha": 0.5})
        self.z = self.program.add_variable("z", "float32", (2, 3))
        self.made = self.program.add_variable("made", "float32", (2, 3))
        self.program.add_operator("Relu", [self.x], [self.made])

    def add(self, type_: Any = "Relu", inputs: Any = None, outputs: Any = None, **options: Any) -> Any:
        read, written = ([v] if given is None else given for v, given in ((self.x, inputs), (self.z, outputs)))
        return self.program.add_operator(type_, read, written, **options)


Case = tuple[Callable[[Built], object], type[Exception], str]
CASES: dict[str, Case] = {
    "a name": (lambda b: b.add(inputs=["x"]), ArgumentTypeError, "inputs of Relu hold 'x'; expected a list of variables"),
    "a name to write": (lambda b: b.add(outputs=["z"]), ArgumentTypeError, "outputs of Relu hold 'z'; expected"),
    "no list": (lambda b: b.add(inputs=b.x), ArgumentTypeError, r"inputs of Relu are <x: float32\[2x3\]>; expected a list"),
    "a number": (lambda b: b.add(inputs=3), ArgumentTypeError, "inputs of Relu are 3; expected a list"),
    "no type": (lambda b: b.add(None), ArgumentTypeError, "type is None; expected that of an operator, such as 'Relu'"),
    "no such role": (lambda b: b.add(role="zz"), ArgumentError, "role of Relu is 'zz'; expected one of forward, backward"),
    "no attributes": (lambda b: b.add(attrs=3), ArgumentTypeError, "attributes are 3; expected a mapping"),
    "no attribute": (lambda b: b.add(attrs={"a": object()}), ArgumentTypeError, "attribute 'a' is <object .*; expected a number"),
    "a constant": (lambda b: b.program.add_constant("c", [1, 2]), ArgumentTypeError, r"content of 'c' is \[1, 2\]; expected an array"),
    "an update": (lambda b: b.program.set_update("x", "y"), ArgumentTypeError, "'x' is no variable; program.var"),  # type: ignore[arg-type]
    "a variable": (lambda b: b.program.remove_variable("x"), ArgumentTypeError, "'x' is no variable; program.var"),  # type: ignore[arg-type]
    "an operator": (lambda b: b.program.remove_operator("Relu"), ArgumentTypeError, "'Relu' is no operator; program.op"),  # type: ignore[arg-type]
    "another's operator": (lambda b: b.program.remove_operator(Built().op), GraphError, "is not in program 'main': it was removed"),
    "uses of a name": (lambda b: b.program.replace_uses("x", "z"), ArgumentTypeError, "'x' is no variable; program.var"),  # type: ignore[arg-type]
    "uses by a name": (lambda b: b.program.replace_uses(b.x, "z"), ArgumentTypeError, "'z' is no variable; program.var"),  # type: ignore[arg-type]
    "a slot's name": (lambda b: b.op.input("X"), ArgumentError, r"'LeakyRelu -> y' .* has no input 'X'; slots .* 0: 'x'$"),  # type: ignore[arg-type]
    "a slot from the end": (lambda b: b.op.set_output(-1, b.z), ArgumentError, r"has no output -1; .* outputs are 0: 'y'$"),
    "a name to read": (lambda b: b.op.set_input(0, "z"), ArgumentTypeError, "'z' is no variable; program.var"),  # type: ignore[arg-type]
    "another's result": (lambda b: b.op.set_output(0, b.made), GraphError, "'made' would have two producers: 'Relu -> made'"),
    "a block": (lambda b: b.program.block(4), GraphError, "program 'main' has blocks 0 to 0, and no block 4"),
    "an attribute": (lambda b: b.op.attrs["beta"], KeyError, "^no attribute 'beta'; there are 'alpha'$"),
    "an attribute's end": (lambda b: b.op.attrs.__delitem__("beta"), KeyError, "^no attribute 'beta'; there are"),
    "no name": (lambda b: b.program.add_variable(["v"]), ArgumentTypeError, r"name is \['v'\]; expected a string"),  # type: ignore[arg-type]
    "no shape": (lambda b: b.program.add_variable("v", "float32", 3), ArgumentTypeError, "shape of 'v' is 3; expected a list"),  # type: ignore[arg-type]
    "a list for a name": (lambda b: b.program.var(["x"]), GraphError, r"has no variable '\['x'\]'"),  # type: ignore[arg-type]
    "a seed": (lambda b: setattr(b.program, "random_seed", 1.5), ArgumentTypeError, "seed is 1.5; expected a whole number"),
    "a large seed": (lambda b: setattr(b.program, "seed", 2**32), ArgumentError, "seed is 4294967296; .* 0 to 4294967295"),
    "a scope": (lambda b: b.program.to_onnx(scope=3), ArgumentTypeError, r"to_onnx: scope is 3; expected an amp.Scope\(\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_is_named(case: str) -> None:
    call, kind, said = CASES[case]
    built = Built()
    before, version = built.program.to_onnx(), built.program.version
    with pytest.raises(kind, match=said) as caught:
        call(built)
    assert isinstance(caught.value, AmpError)
    assert built.program.to_onnx() == before and built.program.version == version


def test_an_operator_goes_once() -> None:
    built = Built()
    built.program.remove_operator(built.op)
    with pytest.raises(GraphError, match=r"'LeakyRelu -> y' \(LeakyRelu\) is not in program 'main': it was removed"):
        built.program.remove_operator(built.op)


def test_what_was_taken_is_taken() -> None:
    built = Built()
    built.add(attrs={}, role="backward")
    built.program.add_constant("c", np.float32(1))
    assert built.program.operators[2].role == "backward" and built.program.var("c").shape == ()


@pytest.mark.parametrize(
    ("type_", "attrs", "said"),
    [
        ("LeakyRelu", {"beta": 1.0}, "has the attribute 'beta', and takes alpha"),
        ("Relu", {"alpha": 1.0}, "has the attribute 'alpha', and takes none"),
        ("LeakyRelu", {"alpha": "s"}, "attribute 'alpha' is of the type STRING; the operator takes FLOAT"),
        ("LeakyRelu", {"alpha": 1}, "attribute 'alpha' is of the type INT; the operator takes FLOAT"),
        ("Cast", {}, "lacks the attribute 'to'"),
    ],
)
def test_attributes_are_those_of_the_schema(type_: str, attrs: dict[str, Any], said: str) -> None:
    built = Built()
    built.program.verify()
    built.add(type_, attrs=attrs)
    with pytest.raises(GraphError, match=rf"operator '{type_} -> z' \({type_}\):? {said}"):
        built.program.verify()
