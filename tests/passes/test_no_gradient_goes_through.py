"""What stands for floats and has no gradient lies on a path of the loss: an error that names it, and no wrong gradient."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import amp_transpiler as amp
from amp_transpiler.errors import GradientError
from amp_transpiler.ir import opdef
from amp_transpiler.nn import functional as F

#: Paths beside a direct one, whose gradient alone would be wrong; and who reads what no gradient goes through.
BESIDE = {
    "optional": ("o = Optional(a)  b = OptionalGetElement(o)", "OptionalGetElement"),
    "sequence": ("s = SequenceConstruct(a, x)  b = SequenceAt(s, n)", "SequenceAt"),
    "joined": (
        "s = SequenceConstruct(a, x)  j = ConcatFromSequence <axis = 0> (s)  b = ReduceSum(j)",
        "ConcatFromSequence",
    ),
    "turned": ("q = QuantizeLinear(a, k, z)  t = Transpose(q)  b = DequantizeLinear(t, k, z)", "DequantizeLinear"),
    "by itself": ("q, l, m = DynamicQuantizeLinear(a)  b = DequantizeLinear(q, l, m)", "DequantizeLinear"),
    "small floats": ("f = Cast <to = 17> (a)  b = Cast <to = 1> (f)", "Cast"),
    "chosen": (
        """s = SequenceConstruct(a)  b = If(c) <then_branch = t () => (float[4, 4] p) { p = SequenceAt(s, z0) },
           else_branch = e () => (float[4, 4] r) { r = Identity(x) }>""",
        "If",
    ),
}


def _program(body: str, made: str = "y = Add(a, b)") -> amp.Program:
    text = f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[4, 4] x, bool c, int64 n) => (y) {{ a = MatMul(x, w)  {body}  {made} }}"""
    model = onnx.parser.parse_model(text)
    values = {
        "w": np.eye(4, dtype=np.float32),
        "v": np.ones((4, 4), np.float32),
        "k": np.float32(0.1),
        "z": np.int8(0),
        "z0": np.int64(0),
    }
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(v), name) for name, v in values.items() if name != "v" or "v)" in body
    )
    model.graph.output[0].type.tensor_type.elem_type = 1
    return amp.Program.from_onnx(model)


@pytest.mark.parametrize("made", ["y = Add(a, b)", "y = Identity(b)"], ids=["beside", "alone"])
@pytest.mark.parametrize("path", BESIDE)
def test_it_is_named(path: str, made: str) -> None:
    body, reader = BESIDE[path]
    program = _program(body, made)
    with pytest.raises(GradientError, match=rf"\({reader}.*lies on the path of the loss|through '.*\({reader}"):
        with amp.program_guard(program, program.startup):
            amp.append_backward(F.mean(program.outputs[0]))
    assert all(op.role == "forward" for op in program.operators)


@pytest.mark.parametrize(
    "path", ["q = Cast <to = 7> (a)  b = Cast <to = 1> (q)", "t = Shape(a)  u = Cast <to = 1> (t)  b = ReduceSum(u)"]
)
def test_what_counts_or_chooses_is_a_constant(path: str) -> None:
    program = _program(path)
    with amp.program_guard(program, program.startup):
        ((_, gradient),) = amp.append_backward(F.sum(program.outputs[0]))
    executor, scope = amp.Executor(), amp.Scope()
    executor.run(program.startup, scope=scope)
    feeds = {"x": np.ones((4, 4), np.float32), "c": np.array(True), "n": np.array(0)}
    used = {name: value for name, value in feeds.items() if name == "x"}
    (found,) = executor.run(program, used, [gradient], scope)
    np.testing.assert_array_equal(found, np.full((4, 4), 4.0))


def test_what_lies_before_it_may_be_frozen() -> None:
    program = _program(
        "q = QuantizeLinear(a, k, z)  t = Transpose(q)  d = DequantizeLinear(t, k, z)  b = MatMul(d, v)",
        "y = Identity(b)",
    )
    program.var("w").trainable = False
    with amp.program_guard(program, program.startup):
        pairs = amp.append_backward(F.mean(program.outputs[0]))
    assert [parameter.name for parameter, _ in pairs] == ["v"]


@pytest.mark.parametrize("made", ["y = Add(a, b)", "y = Identity(b)"], ids=["beside", "alone"])
def test_what_an_unknown_operator_makes_is_named(made: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for table in ("_TABLE", "_READS"):
        monkeypatch.setattr(opdef, table, dict(getattr(opdef, table)))
    text = f"""<ir_version: 10, opset_import: ["" : 21, "own" : 1]>
        g (float[4, 4] x) => (y) <float[4, 4] w = {{1,0,0,0,0,1,0,0,0,0,1,0,0,0,0,1}}> {{
          a = MatMul(x, w)  b = own.Unknown(a)  {made} }}"""
    model = onnx.parser.parse_model(text)
    model.graph.output[0].type.CopyFrom(onnx.helper.make_tensor_type_proto(1, [4, 4]))
    program = amp.Program.from_onnx(model)
    told = r"reads 'b', which 'Unknown -> b' \(own::Unknown\) makes, and of which nothing tells the element type"
    assert "nothing tells the element type of 'b', which 'Unknown -> b' (own::Unknown) makes" in str(
        amp.prepare_training(program)
    )

    def gradients() -> None:
        with amp.program_guard(program, program.startup):
            amp.append_backward(F.mean(program.outputs[0]))

    with pytest.raises(GradientError, match=told + r".*register_gradient\('own::Unknown', \.\.\.\); or freeze what"):
        gradients()
    amp.register_gradient("own::Unknown", reads="dy0")(lambda e, op, dy: [dy])
    with pytest.raises(GradientError, match=told + r".*\.shape = \(\.\.\.\); or freeze what lies before it"):
        gradients()
    program.var("b").dtype, program.var("b").shape = "float32", (4, 4)
    gradients()
    assert "own.UnknownGrad" in {op.type for op in program.operators}
