"""Program.verify finds what is wrong, and Program.clone copies what is right."""

from dataclasses import replace

import numpy as np
import onnx.parser
import pytest

from amp_transpiler.errors import GraphError
from amp_transpiler.ir import opdef
from amp_transpiler.ir.nodes import CAPTURE, OWN
from amp_transpiler.program import Program

NESTED = """
<ir_version: 10, opset_import: ["" : 21]>
g (bool c, float[2] x) => (float[2] y)
<float[2] w = {1.0, 2.0}>
{
    [scale] s = Mul(x, w)
    [branch] y = If (c) <
        then_branch = a () => (float[2] t) { [plus] t = Add(s, w) },
        else_branch = b () => (float[2] e) { [minus] e = Neg(s) }
    >
}
"""


def nested():
    return Program.from_onnx(onnx.parser.parse_model(NESTED))


def named(program, name):
    return next(op for op in program.walk() if op.name == name)


def findings(program):
    with pytest.raises(GraphError) as caught:
        program.verify()
    return str(caught.value)


def test_a_good_program_passes():
    nested().verify()


def test_edges_and_slots():
    program = nested()
    scale = named(program, "scale")
    program.graph.remove_edge(program.var("x").key, scale.key, key=0)
    assert "input slots of operator 'scale'" in findings(program)
    program = nested()
    named(program, "scale").inputs[0] = program.var("w")  # type: ignore[index]
    assert "input slots of operator 'scale'" in findings(program)
    program = nested()
    program.var("s").producer = None
    assert "'scale' writes 's', which says that nothing writes it" in findings(program)


def test_producers_and_names():
    program = nested()
    program.graph.add_edge(named(program, "branch").key, program.var("s").key, key=7)
    assert "'s' has more than one producer" in findings(program)
    program = nested()
    program.var("s").name = "other"
    assert "'other' is filed as 's'" in findings(program)


def test_what_is_read_must_be_given():
    program = nested()
    program.var("w").data, program.var("w").persistable = None, False
    assert "operator 'scale' reads 'w', which is not written" in findings(program)
    program = nested()
    program.outputs.append(program.add_variable("lost", "float32", (2,)))
    assert "the program gives 'lost'" in findings(program)
    program = nested()
    foreign = Program("other").add_variable("z", "float32", ())
    program.outputs.append(foreign)
    assert "output 'z' of program 'g' is no variable of it" in findings(program)


def test_cycles():
    program = nested()
    named(program, "scale").set_input(0, program.var("y"))
    assert "cycle" in findings(program)


def test_captures():
    program = nested()
    branch = named(program, "branch")
    program.graph.remove_edge(program.var("s").key, branch.key, key=CAPTURE)
    assert "nested graph of operator 'branch' reads 's', but no capture edge" in findings(program)
    program = nested()
    named(program, "branch").add_capture(program.var("x"))
    assert "nested graph of operator 'branch' reads 'x', but none does" in findings(program)
    program = nested()
    then = named(program, "branch").attrs["then_branch"]
    then.var("s").outer = then.var("w")
    assert "stands for 'w' of another program" in findings(program)
    program = nested()
    then = named(program, "branch").attrs["then_branch"]
    program.rename_variable(program.var("s"), "t")
    assert "'t' in a nested graph of 'branch' hides the captured variable" in findings(program)
    program = nested()
    program.var("s").dtype = "float16"
    assert "'s' in a nested graph of 'branch' is float32, but stands for 's', which is float16" in findings(program)


def test_types():
    program = nested()
    program.var("x").dtype = "float16"
    text = findings(program)
    assert "operator 'scale' (Mul): 'x' is float16 and 'w' is float32; both must have one type" in text
    program = nested()
    named(program, "plus").outputs[0].dtype = "float16"
    assert "operator 'plus' (Add): 's' is float32 and 't' is float16" in findings(program)
    program = nested()
    program.var("c").dtype = "float32"
    assert "operator 'branch' (If): input 'c' is float32, which the operator does not take" in findings(program)
    program = nested()
    half = program.add_variable("half", "bfloat16", (2,))
    program.add_operator("Cast", [program.var("s")], [half], attrs={"to": 10}, name="cast")
    assert "operator 'cast' (Cast) casts to float16, but its output 'half' is bfloat16" in findings(program)
    program = nested()
    program.add_operator("Relu", [program.var("s")] * 2, [program.add_variable("r", "float32", (2,))], name="relu")
    assert "operator 'relu' (Relu) has 2 inputs; it takes 1" in findings(program)


def test_untyped_variables_are_named():
    program = nested()
    assert program.untyped() == []
    program.var("s").dtype = None
    named(program, "plus").outputs[0].dtype = None
    assert program.untyped() == ["s", "t"]
    assert "variable 't' of program 'a' has no element type" in findings(program)


def test_updates():
    def with_update(dtype, shape):
        program = nested()
        state = program.add_variable("state", "float32", (2,), persistable=True)
        new = program.add_variable("state@NEW", dtype, shape)
        program.add_operator("Keep", [state], [new], domain=OWN)
        program.updates[state] = new  # as a pass may leave it
        return program

    with_update("float32", (2,)).verify()
    with_update("float32", ("N",)).verify()
    assert "update of 'state' (float32) is 'state@NEW' (float16)" in findings(with_update("float16", (2,)))
    assert "update of 'state' [2] is 'state@NEW' [3]" in findings(with_update("float32", (3,)))
    program = with_update("float32", (2,))
    program.var("state").persistable = False
    assert "does not go from a variable of the program to a persistable one" in findings(program)


def test_only_the_first_ten_are_listed():
    program = nested()
    for number in range(30):
        program.add_variable(f"untyped_{number}")
    text = findings(program)
    assert text.count("\n- ") == 11 and text.endswith("and more")


# -- clone --------------------------------------------------------------------------------------------
def test_clone_is_equal_and_shares_nothing_mutable():
    program = nested()
    program.var("w").metadata["k"] = "v"
    copy = program.clone()
    copy.verify()
    before = program.to_onnx().SerializeToString(deterministic=True)
    assert copy.to_onnx().SerializeToString(deterministic=True) == before
    assert copy.startup is program.startup and copy.var("w").data is program.var("w").data
    assert copy.var("w").persistable and copy.var("w").trainable
    branch = named(copy, "branch")
    then = branch.attrs["then_branch"]
    assert then.parent is branch and then.var("s").outer is copy.var("s")
    # change everything that can be changed in the copy; the original stays
    copy.rename_variable(copy.var("s"), "other")
    copy.var("w").metadata["k"] = "changed"
    copy.info.metadata["a"] = "b"
    copy.info.opsets[""] = 20
    named(copy, "plus").type = "Sub"
    named(copy, "minus").attrs["new"] = 1
    named(copy, "scale").metadata["m"] = "n"
    copy.remove_operator(named(copy, "scale"))
    assert program.to_onnx().SerializeToString(deterministic=True) == before


def test_clone_keeps_marks_gradients_and_updates():
    program = training()
    copy = program.clone()
    for one, other in zip(program.operators, copy.operators, strict=True):
        for field in ("name", "type", "domain", "role", "guard", "scope", "precision", "reason", "doc", "overload"):
            assert getattr(one, field) == getattr(other, field)
    assert copy.var("w@GRAD").grad_of is copy.var("w")
    assert {s.name: n.name for s, n in copy.updates.items()} == {"w": "w@NEW", "mean": "mean@NEW", "count": "count@NEW"}
    assert all(s.program is copy and n.program is copy for s, n in copy.updates.items())
    assert copy.to_onnx() == program.to_onnx()


def training():
    """y = relu(x * w), a loss, an accuracy; a running mean and a counter; a gradient and an update of w."""
    program = Program("train", Program("startup"))
    x = program.add_input("x", "float32", (2,))
    label = program.add_input("label", "float32", (2,))
    state = {}
    for name, shape in (("w", (2,)), ("mean", (2,)), ("moment", (2,)), ("count", (1,))):
        state[name] = program.add_variable(
            name, "float32", shape, persistable=True, trainable=name == "w", data=np.ones(shape, np.float32)
        )

    def op(type_, inputs, output, shape=(2,), **more):
        made = program.add_variable(output, "float32", shape)
        program.add_operator(type_, inputs, [made], name=output, **more)
        return made

    y = op("Relu", [op("Mul", [x, state["w"]], "p")], "y")
    loss = op("Sub", [y, label], "loss")
    op("Neg", [loss], "accuracy")
    batch = op("Abs", [p := program.var("p")], "batch")
    program.set_update(state["mean"], op("Add", [state["mean"], batch], "mean@NEW"))
    program.set_update(state["count"], op("Neg", [state["count"]], "count@NEW", (1,)))
    grad = op("MulGrad", [loss, p], "w@GRAD", domain=OWN, role="backward")
    grad.grad_of = state["w"]
    program.set_update(state["w"], op("Step", [state["w"], grad, state["moment"]], "w@NEW", domain=OWN, role="update"))
    program.operators[0].guard, program.operators[0].reason = True, "asked"
    return program


def test_clone_for_test_keeps_the_forward_part():
    program = training()
    before = program.to_onnx().SerializeToString(deterministic=True)
    test = program.clone(for_test=True)
    test.verify()
    assert [op.name for op in test.operators] == ["p", "y", "loss", "accuracy"], "what served updates alone is gone"
    assert not test.updates and test.startup is program.startup
    assert {v.name for v in test.variables} == {"x", "label", "w", "p", "y", "loss", "accuracy"}
    assert [v.name for v in test.inputs] == ["x", "label"]
    assert program.to_onnx().SerializeToString(deterministic=True) == before


def test_clone_for_test_applies_the_rule_of_each_operator(monkeypatch):
    monkeypatch.setattr(opdef, "_TABLE", {key: replace(found) for key, found in opdef._TABLE.items()})
    seen = []

    @opdef.for_test("Neg")
    def neg(op):
        seen.append(op.name)
        op.type = "Identity"

    program = nested()
    test = program.clone(for_test=True)
    assert seen == ["minus"] and named(test, "minus").type == "Identity" and named(program, "minus").type == "Neg"
    assert program.clone().to_onnx() == program.to_onnx()


def test_clone_for_test_drops_a_capture_that_nothing_needs_any_more():
    program = nested()
    named(program, "minus").role = "backward"
    else_branch = named(program, "branch").attrs["else_branch"]
    else_branch.outputs = []
    test = program.clone(for_test=True)
    assert [v.name for v in named(test, "branch").attrs["else_branch"].variables] == []
    assert sorted(v.name for v in named(test, "branch").captures) == ["s", "w"]
