"""What an import finds out besides the graph: marks, scopes, state and element types."""

import json
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime
import pytest

from amp_transpiler.errors import GraphError
from amp_transpiler.ir import kinds, onnx_in
from amp_transpiler.ir.contrib_types import contrib_types, pinned_slots
from amp_transpiler.ir.kinds import typed_by_kind
from amp_transpiler.ir.nodes import OWN
from amp_transpiler.lists import default_lists
from amp_transpiler.program import Program
from tests.helpers.onnx_goldens import (
    text,
)


def test_marks_go_out_and_come_back():
    model = text("""
    <ir_version: 10, opset_import: ["" : 21]>
    g (float[2] x) => (float[2] z) { y = Relu(x)
      [other] z = Neg(y) }""")
    model.graph.node[0].name = "/enc/layer.0/Relu"
    program = Program.from_onnx(model)
    relu, neg = program.operators
    assert (relu.scope, neg.scope) == ("enc/layer.0", "")
    assert program.mark_fp16("enc/*") == 1
    relu.precision, relu.reason = "float16", "fp16: white list"
    neg.role, neg.scope, neg.precision = "backward", "tail", "float32"
    out = program.to_onnx()
    assert {e.key: e.value for e in out.graph.node[0].metadata_props} == {
        "amp_transpiler.guard": "1",
        "amp_transpiler.reason": "fp16: white list",  # which says the precision as well
    }
    back = Program.from_onnx(out)
    for one, other in zip(program.operators, back.operators, strict=True):
        for name in ("role", "guard", "scope", "precision", "reason", "metadata"):
            assert getattr(one, name) == getattr(other, name), name
    assert back.to_onnx() == out
    relu.scope = ""
    assert Program.from_onnx(program.to_onnx()).operators[0].scope == "", "a scope that was cleared stays cleared"


def test_scopes_of_the_dynamo_exporter():
    model = text('<ir_version: 10, opset_import: ["" : 21]> g (float[2] x) => (float[2] y) { [n] y = Relu(x) }')
    scopes = ["", "encoder", "encoder.layer.0", "encoder.layer.0.attention", "relu_3"]
    model.graph.node[0].metadata_props.add(key="pkg.torch.onnx.name_scopes", value=repr(scopes))
    program = Program.from_onnx(model)
    assert program.operators[0].scope == "encoder/layer.0/attention"
    assert program.to_onnx() == model


def test_training_state_goes_out_and_comes_back():
    program = Program("train")
    x = program.add_input("x", "float32", (2,))
    w = program.add_variable("w", "float32", (2,), persistable=True, trainable=True, data=np.ones(2, np.float32))
    lr = program.add_variable("lr", "float32", (), persistable=True, data=np.float32(0.5))
    new = program.add_variable("w@NEW", "float32", (2,))
    program.add_operator("Step", [w, x, lr], [new], domain=OWN, role="update")
    program.set_update(w, new)
    back = Program.from_onnx(program.to_onnx())
    back.verify()
    assert {s.name: n.name for s, n in back.updates.items()} == {"w": "w@NEW"}
    assert back.var("lr").persistable and not back.var("lr").trainable and back.var("w").trainable
    assert back.info.opsets[OWN] == 1 and back.operators[0].role == "update"
    assert [v.name for v in back.inputs] == ["x"] and back.to_onnx() == program.to_onnx()


# -- element types ----------------------------------------------------------------------------------
def test_types_pass_through_contrib_operators():
    model = text("""
    <ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
    g (float16[2, 4] x, float16[4] b) => (float16[2, 4] y) {
        f = com.microsoft.BiasGelu(x, b)
        g = com.microsoft.SkipLayerNormalization(f, x, b)
        r = Relu(g)
        y = com.microsoft.FastGelu(r)
    }""")
    program = Program.from_onnx(model)
    assert [program.var(n).dtype for n in "fgr"] == ["float16"] * 3
    assert program.var("r").shape == (2, 4)
    assert program.to_onnx() == model


def test_types_pass_through_what_onnxruntime_writes_for_cpus_and_texts() -> None:
    model = text("""
    <ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1, "com.microsoft.nchwc" : 1]>
    g (float[1,8,4,4] x, float[8,8,1,1] w, string[N] s) => (float[1,8,4,4] y, string[N,M] t) {
      a = com.microsoft.nchwc.ReorderInput(x)  b = com.microsoft.nchwc.Conv(a, w)  c = com.microsoft.nchwc.ReorderOutput(b)
      y = Relu(c)  t = com.microsoft.Tokenizer(s)  l = StringNormalizer(s)  u = com.microsoft.Tokenizer(l)
    }""")
    program = Program.from_onnx(model)
    assert [program.var(name).dtype for name in "abcu"] == ["float32"] * 3 + ["string"]


def test_unknown_operators_pass_through_and_are_reported():
    model = text("""
    <ir_version: 10, opset_import: ["" : 21, "unknown" : 1]>
    g (float[2] x) => (float[2] y) { a = unknown.Op(x)
      b = Relu(a)
      y = unknown.Op(b) }""")
    program = Program.from_onnx(model)
    assert program.untyped() == ["a", "b"]
    with pytest.raises(GraphError, match="'a' of program 'g' has no element type"):
        program.verify()
    assert program.to_onnx() == model


def test_contrib_table_agrees_with_onnxruntime():
    """onnxruntime's own schemas, in a process of their own: that call has crashed in some builds."""
    code = """if True:
        import json
        import onnxruntime.capi.onnxruntime_pybind11_state as state
        newest = {}
        for s in state.get_all_operator_schema():
            if s.domain == "com.microsoft" and s.since_version >= newest.get(s.name, s).since_version:
                newest[s.name] = s
        table = {}
        for name, s in newest.items():
            types = {t.type_param_str: list(t.allowed_type_strs) for t in s.type_constraints}
            table[name] = [
                [i.typeStr for i in s.inputs], [o.typeStr for o in s.outputs], types,
            ]
        print(json.dumps(table))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        pytest.skip("this onnxruntime does not list its schemas")
    known = 0
    listed = default_lists().reasons
    for name, (inputs, outputs, types) in json.loads(done.stdout.splitlines()[-1]).items():
        if f"com.microsoft::{name}" in listed:
            fixed = [{i for i, t in enumerate(s) if types.get(t, [t]) == ["tensor(float)"]} for s in (inputs, outputs)]
            read_so = {1, 2} if name in ("GroupNorm", "SkipGroupNorm") else set()  # by the only kernels that there are
            assert list(pinned_slots(name, "com.microsoft")) == [fixed[0] | read_so, fixed[1]], name
        program = Program("one")
        dtypes = [
            "float32",
            "float16",
            "int32",
            "int64",
            "uint8",
            "int8",
            "bool",
            "float64",
            "bfloat16",
            "uint16",
            "int16",
            "uint32",
            "uint64",
            "complex64",
            "complex128",
            "string",
        ]
        by_name, given = {}, []
        for slot, type_str in enumerate(inputs):
            only = types.get(type_str, [type_str])
            told = {"tensor(float)": "float32", "tensor(double)": "float64"}.get(only[0], only[0][7:-1])
            by_name.setdefault(type_str, told if len(only) == 1 else dtypes[len(by_name) % len(dtypes)])
            given.append(program.add_variable(f"i{slot}", by_name[type_str]))
        outs = [program.add_variable(f"o{slot}") for slot in range(len(outputs))]
        found = contrib_types(program.add_operator(name, given, outs, domain="com.microsoft"))
        known += found is not None
        for (dtype, _), type_str in zip(found or [], outputs, strict=False):
            if dtype is None:
                continue
            if name == "QGemm":
                type_str = "TYZ"  # of its zero point, where it has one
            if type_str in by_name:
                assert dtype == by_name[type_str], (name, type_str)
            else:
                spelled = {"float32": "float", "float64": "double"}.get(dtype, dtype)
                assert types.get(type_str, [type_str]) == [f"tensor({spelled})"], (name, type_str)
    assert known > 100


def test_a_quantised_product_may_give_floats() -> None:
    model = text("""
    <ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
    g (uint8[2,3] a) => (float[2,4] y)
    <float s = {0.1}, uint8 z = {0}, uint8[3,4] b = {1,2,3,4,5,6,7,8,9,10,11,12}> {
      q = com.microsoft.QGemm<transB=0>(a, s, z, b, s, z, , s, z)  d = com.microsoft.QGemm(q, s, z, q, s, z)
      y = Neg(d) }""")
    program = Program.from_onnx(model)
    assert (program.var("q").dtype, program.var("d").dtype) == ("uint8", "float32")


ALIKE = """
<ir_version: 9, opset_import: ["" : 17]>
g (float[N, 4, 8] x, float[8] s, int64[4, 1] n) => (float[N, 8, 4] a, int64[N, 4, 1] b, float[N, 4] c)
<float[8, 8] w = {WEIGHTS}, float low = {0.0}>
{
    y = MatMul (x, w)
    z = MatMul (y, w)
    u = Add (z, s)
    r = Clip (u, low)
    t = Clip (u, , low)
    m = ReduceMean <axes = [-1]> (r)
    c = ReduceMean <axes = [-1], keepdims = 0> (t)
    v = Concat <axis = 1> (r, t)
    f = Softmax <axis = 1> (v)
    d = Cast <to = 7> (m)
    b = Add (d, n)
    a = Transpose <perm = [0, 2, 1]> (r)
    l, mean = LayerNormalization (f, s)
}
""".replace("WEIGHTS", ", ".join(["0.5"] * 64))


def types_of(model, monkeypatch, alike=typed_by_kind):
    """What a program says of its tensors, and whether that was found kind by kind."""
    found = []
    monkeypatch.setattr(kinds, "_ALIKE", 1)  # few are alike in a model of a few lines
    monkeypatch.setattr(onnx_in, "typed_by_kind", lambda *given: found.append(alike(*given)) or found[0])
    return {v.name: (v.dtype, v.shape) for v in Program.from_onnx(model).variables}, found[0] is not None


def test_types_that_follow_from_types_are_those_of_the_whole_model(monkeypatch):
    types, alike = types_of(text(ALIKE), monkeypatch)
    assert alike
    assert types == types_of(text(ALIKE), monkeypatch, lambda program, nodes: None)[0]
    assert types["l"] == ("float32", ("N", 8, 8)), "of an operator with two outputs"


def test_types_that_an_operator_does_not_take_are_found_where_each_kind_is_typed_once(monkeypatch):
    model = text('<ir_version: 9, opset_import: ["" : 17]> g (int64[2] x) => (int64[2] y) { y = Tanh (x) }')
    for alike in (typed_by_kind, lambda program, nodes: None):
        with pytest.raises(GraphError, match="Tanh.*input 'x' is int64, which the operator does not take"):
            types_of(model, monkeypatch, alike)


@pytest.mark.parametrize(
    "graph",
    [
        "(float[2, 3] x) => (float[A, B] y) <int64[2] to = {3, 2}> { y = Reshape (x, to) }",
        "(float[2, 3] x) => (float[A] y) <int64[1] axes = {1}> { y = ReduceSum <keepdims = 0> (x, axes) }",
        "(float[2, ?] x) => (float[2, B] y) { y = Relu (x) }",
        "(float[70000] x) => (float[70000] y) { y = Relu (x) }",
        "(float[2, 3] x) => (float[A, 3] y) { y = Relu (x) }",
        "(float[2] x) => (float[2] y) { y = Neg (z) z = Relu (x) }",
        "(float[2] x) => (float[2] y) { h = com.microsoft.Softmax (x) y = Relu (h) }",
        "(float[2] x, bool c) => (float[2] y) { y = If (c) <then_branch = t () => (float[2] o) { o = Neg (x) },"
        " else_branch = e () => (float[2] o) { o = Relu (x) }> }",
    ],
)
def test_what_types_alone_do_not_say_is_asked_of_the_whole_model(graph, monkeypatch):
    model = text(f'<ir_version: 9, opset_import: ["" : 17, "com.microsoft" : 1]> g {graph}')
    types, alike = types_of(model, monkeypatch)
    assert not alike
    assert types == types_of(model, monkeypatch, lambda program, nodes: None)[0]


@pytest.mark.parametrize("ir_version", [3, 4])
def test_initializers_that_are_inputs_are_typed_with_the_whole_model(ir_version, monkeypatch):
    model = text(
        f'<ir_version: {ir_version}, opset_import: ["" : 9]> '
        "g (float[2] x, float[A] w) => (float[2] y) <float[2] w = {1.0, 2.0}> { y = Add (x, w) }"
    )
    assert types_of(model, monkeypatch) == types_of(model, monkeypatch, lambda program, nodes: None)


@pytest.mark.parametrize("name", ["x", "w", "y"])
def test_what_a_converter_left_behind_is_passed_over(name: str) -> None:
    """Another element type for what says its own, as onnxconverter-common writes of outputs; onnxruntime takes it."""
    model = text("""
    <ir_version: 8, opset_import: ["" : 17]>
    m (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { y = Add(x, w) }""")
    model.graph.value_info.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT16, [2]))
    onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    program = Program.from_onnx(model)
    assert program.var(name).dtype == "float32"
    assert not program.to_onnx().graph.value_info


def test_branches_may_share_names():
    """As optimum merges two decoders: what is known of a shape in one branch is not taken for that in the other."""
    model = text("""
    <ir_version: 10, opset_import: ["" : 21]>
    g (bool c, int64[2] k, int64[1] j) => (float[N] y) {
        y = If(c) <
            then_branch = two () => (float[A] y1) {
                one = Constant <value_ints: ints = [1, 1]> ()
                n = Add(one, one)
                z = ConstantOfShape(n)
                t = Transpose <perm: ints = [1, 0]> (z)
                flat = Constant <value_ints: ints = [-1]> ()
                y1 = Reshape(t, flat)
            },
            else_branch = one () => (float[B] y2) {
                n = Abs(j)
                z = ConstantOfShape(n)
                t = Transpose <perm: ints = [0]> (z)
                y2 = Neg(t)
            }>
    }""")
    program = Program.from_onnx(model)
    then, other = program.operators[0].attrs.programs
    assert program.untyped() == [] and other.var("t").dtype == "float32"
    assert len(then.var("z").shape) == 2 and len(other.var("z").shape) == 1
