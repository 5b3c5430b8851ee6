"""ONNX -> Program -> ONNX loses nothing, and gives the same outputs."""

import copy
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from amp_transpiler.errors import (
    ArgumentError,
    ArgumentTypeError,
    GraphError,
    ModelFileError,
    ModelFileNotFoundError,
    ModelFileWriteError,
)
from amp_transpiler.ir import external, files
from amp_transpiler.ir.contrib import contrib_types
from amp_transpiler.ir.inline import inline_functions
from amp_transpiler.ir.program import OWN, Program
from amp_transpiler.ir.tensors import ExternalTensor, as_array, tensor_array

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"
BACKEND = Path(onnx.__file__).parent / "backend" / "test" / "data"
MODELS = sorted(BACKEND.rglob("*.onnx"))
TRAPS = sorted((SHARED / "oracle" / "traps").glob("*.onnx"))

ort.set_default_logger_severity(4)


def canonical(model):
    """The bytes of a model whose nodes are put into an order of their own."""
    model = copy.deepcopy(model)

    def sort(graph):
        for node in graph.node:
            for attribute in node.attribute:
                for nested in [attribute.g, *attribute.graphs]:
                    sort(nested)
        nodes = sorted(graph.node, key=lambda node: node.SerializeToString(deterministic=True))
        del graph.node[:]
        graph.node.extend(nodes)

    sort(model.graph)
    return model.SerializeToString(deterministic=True)


def session(model):
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    content = model if isinstance(model, str) else model.SerializeToString()
    return ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def run(model, feeds):
    return session(model).run(None, feeds)


def text(source):
    return onnx.parser.parse_model(source)


def same(one, other):
    if isinstance(one, list):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return np.array_equal(one, other, equal_nan=np.asarray(one).dtype.kind == "f")


# -- the models of the onnx package -----------------------------------------------------------------
def test_onnx_ships_its_models():
    assert len(MODELS) > 100


@pytest.mark.parametrize("path", MODELS + TRAPS, ids=lambda path: "/".join(path.parts[-3:]))
def test_goes_in_and_comes_out_equal(path, tmp_path):
    model = onnx.load(path)
    before = model.SerializeToString(deterministic=True)
    from_file = Program.from_onnx(path)
    from_model = Program.from_onnx(model)
    assert model.SerializeToString(deterministic=True) == before, "the import changed its input"
    for program in (from_file, from_model, from_file.clone()):
        program.verify()
        assert canonical(program.to_onnx()) == canonical(model)
    out = tmp_path / "out.onnx"
    from_file.to_onnx(out)
    assert out.read_bytes() == Program.from_onnx(out).to_onnx().SerializeToString(deterministic=True)


def feeds_of(path, loaded):
    """The recorded inputs of a model of the onnx package, else random ones."""
    data = path.parent / "test_data_set_0"
    rng = np.random.default_rng(0)
    feeds = {}
    for number, value in enumerate(loaded.get_inputs()):
        recorded = data / f"input_{number}.pb"
        if recorded.exists() and value.type.startswith("tensor"):
            feeds[value.name] = numpy_helper.to_array(TensorProto.FromString(recorded.read_bytes()))
        elif recorded.exists():
            feeds[value.name] = numpy_helper.to_list(onnx.SequenceProto.FromString(recorded.read_bytes()))
        else:
            shape = [size if isinstance(size, int) else 2 for size in value.shape]
            feeds[value.name] = rng.random(shape).astype({"tensor(float)": np.float32, "tensor(int64)": np.int64,
                                                          "tensor(bool)": np.bool_}[value.type])  # fmt: skip
    return feeds


@pytest.mark.parametrize("path", MODELS, ids=lambda path: "/".join(path.parts[-3:]))
def test_gives_the_same_outputs(path, tmp_path):
    try:
        loaded = session(str(path))
    except Exception as error:  # onnxruntime has no common base class for "this model does not load"
        pytest.skip(f"onnxruntime does not load the original: {str(error)[:80]}")
    feeds = feeds_of(path, loaded)
    expected = loaded.run(None, feeds)
    program = Program.from_onnx(path)
    program.info.extra.clear()  # from what the program itself knows, not from what it remembers of its file
    program.to_onnx(tmp_path / "out.onnx")
    assert same(run(str(tmp_path / "out.onnx"), feeds), expected)


def test_node_tests_of_onnx_go_through():
    """Every operator of ONNX once, from the package's generated node tests."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        cases = collect_testcases(None)
    assert len(cases) > 1000
    different = []
    for case in cases:
        model = case.model
        program = Program.from_onnx(model)
        program.verify()
        if program.to_onnx().SerializeToString(deterministic=True) != model.SerializeToString(deterministic=True):
            different.append(case.name)
    assert not different


@pytest.mark.skipif(not (SHARED / "data" / "onnx_models").is_dir(), reason="no real models beside the checkout")
def test_real_models_come_out_equal_and_typed():
    import lzma

    for path in sorted((SHARED / "data" / "onnx_models").glob("*.onnx.xz")):
        model = onnx.load_from_string(lzma.decompress(path.read_bytes()))
        program = Program.from_onnx(model)
        program.verify()
        assert canonical(program.to_onnx()) == canonical(model), path
        assert canonical(program.clone().to_onnx()) == canonical(model), path


# -- hand-made goldens ------------------------------------------------------------------------------
CAPTURES = """
<ir_version: 10, opset_import: ["" : 21]>
outer (bool c, float[N] x) => (float[N] y)
<float[2] w = {1.0, 2.0}>
{
    s = Mul(x, w)
    [if_0] y = If (c) <
        then_branch = then_g () => (float[N] t) {
            c2 = Not(c)
            t = If (c2) <
                then_branch = deep_a () => (float[N] a) { a = Add(s, w) },
                else_branch = deep_b () => (float[N] b) { b = Sub(s, x) }
            >
        },
        else_branch = else_g () => (float[N] e) { e = Neg(x) }
    >
}
"""


def test_captures_over_two_levels():
    model = text(CAPTURES)
    program = Program.from_onnx(model)
    program.verify()
    outer = next(op for op in program.operators if op.type == "If")
    assert sorted(v.name for v in outer.captures) == ["c", "s", "w", "x"]
    then = outer.attrs["then_branch"]
    assert then.parent is outer and isinstance(then, Program)
    inner = next(op for op in then.operators if op.type == "If")
    deep = inner.attrs["then_branch"]
    assert [v.name for v in inner.captures] == ["s", "w", "x"]
    assert deep.var("s").outer is then.var("s") and then.var("s").outer is program.var("s")
    assert deep.var("a").dtype == "float32" and then.opset() == 21
    assert canonical(program.to_onnx()) == canonical(model)
    for condition in (True, False):
        feeds = {"c": np.array(condition), "x": np.array([3, 4], np.float32)}
        assert same(run(program.to_onnx(), feeds), run(model, feeds))


def test_renaming_and_replacing_a_captured_variable_reaches_the_nested_graph():
    program = Program.from_onnx(text(CAPTURES))
    program.rename_variable(program.var("s"), "renamed")
    program.verify()
    feeds = {"c": np.array(False), "x": np.array([3, 4], np.float32)}
    expected = run(text(CAPTURES), feeds)
    assert same(run(program.to_onnx(), feeds), expected)
    s = program.var("renamed")
    same_again = program.add_variable("same", s.dtype, s.shape)
    identity = program.add_operator("Identity", [s], [same_again])
    program.replace_uses(s, same_again, where=lambda op: op is not identity)
    program.verify()
    assert same(run(program.to_onnx(), feeds), expected)


EVERYTHING = """
<ir_version: 10, opset_import: ["" : 21, "custom" : 3], producer_name: "p", producer_version: "1", domain: "d",
 model_version: 7, doc_string: "model doc", metadata_props: ["k": "v", "k2": ""]>
g (float[N, 2] x) => (float[N, 2] y, float[N, 2] z)
<float[2] w = {1.0, 2.0}, int64[1] i = {3}, float one = {1.0}, float[N, 2] mid>
{
    mid = Add(x, w)
    [named] y = custom.Thing <alpha: float = 0.5, names: strings = ["a", "b"], empty: ints = []> (mid, , one)
    z = Mul(mid, one)
}
"""


def everything():
    model = text(EVERYTHING)
    graph = model.graph
    graph.doc_string = "graph doc"
    graph.metadata_props.add(key="gk", value="gv")
    graph.node[0].doc_string = "node doc"
    graph.node[0].metadata_props.add(key="nk", value="nv")
    graph.node[0].metadata_props.add(key="empty", value="")
    graph.node[0].attribute.add(name="extra", type=onnx.AttributeProto.INT, i=1, doc_string="attribute doc")
    graph.node[2].domain = "ai.onnx"
    graph.node[2].name = ""
    graph.node[2].device_configurations.add(configuration_id="c")
    graph.input[0].doc_string = "input doc"
    graph.input[0].metadata_props.add(key="ik", value="iv")
    graph.input[0].type.denotation = "IMAGE"
    graph.input[0].type.tensor_type.shape.dim[0].denotation = "DATA_BATCH"
    graph.initializer[0].doc_string = "weight doc"
    graph.initializer[0].metadata_props.add(key="wk", value="wv")
    stale = graph.value_info.add(name="stale", doc_string="names nothing")
    stale.type.sequence_type.elem_type.tensor_type.elem_type = TensorProto.FLOAT
    annotation = graph.quantization_annotation.add(tensor_name="mid")
    annotation.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="one")
    values = helper.make_tensor("sparse", TensorProto.FLOAT, [2], [1.0, 2.0])
    indices = helper.make_tensor("sparse_i", TensorProto.INT64, [2], [0, 3])
    graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [2, 2]))
    training = model.training_info.add()
    training.algorithm.name = "step"
    training.update_binding.add(key="w", value="w_new")
    model.configuration.add(name="c", num_devices=2)
    return model


def test_every_field_of_a_model_survives():
    model = everything()
    program = Program.from_onnx(model)
    assert program.to_onnx().SerializeToString(deterministic=True) == model.SerializeToString(deterministic=True)
    assert program.clone().to_onnx() == model
    thing = program.operators[1]
    assert thing.full_type == "custom::Thing" and thing.inputs[1] is None and thing.attrs["names"] == ["a", "b"]
    assert program.operators[2].domain == "" and program.operators[2].name == ""
    assert program.operators[0].metadata == {"nk": "nv", "empty": ""}
    assert np.array_equal(tensor_array(program.var("sparse")), [[1, 0], [0, 2]])
    assert program.info.doc == "model doc" and program.info.opsets == {"": 21, "custom": 3}


def test_a_change_is_written_and_the_rest_stays():
    program = Program.from_onnx(everything())
    program.info.producer_name = "me"
    program.info.opsets["custom"] = 4
    program.operators[0].metadata["nk"] = "other"
    program.var("mid").dtype = "float16"
    program.var("x").shape = (5, 2)
    model = program.to_onnx()
    assert model.producer_name == "me" and model.producer_version == "1"
    assert {o.domain: o.version for o in model.opset_import} == {"": 21, "custom": 4}
    assert [(e.key, e.value) for e in model.graph.node[0].metadata_props] == [("nk", "other"), ("empty", "")]
    assert model.graph.value_info[0].type.tensor_type.elem_type == TensorProto.FLOAT16
    assert model.graph.value_info[0].type.tensor_type.shape.dim[0].dim_param == "N"
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_value == 5
    assert model.graph.input[0].doc_string == "input doc"


def test_every_element_type():
    arrays = []
    for name, number in TensorProto.DataType.items():
        if name == "UNDEFINED":
            continue
        if name == "STRING":
            arrays.append(helper.make_tensor(name, number, [2], [b"a", "ü".encode()]))
            continue
        values = [1, 1, 1] if name == "FLOAT8E8M0" else [0, 1, 1]  # that one has no zero
        array = np.array(values, helper.tensor_dtype_to_np_dtype(number))
        arrays.append(numpy_helper.from_array(array, name))
    copied = [t for t in arrays if not t.name.startswith("FLOAT6")]  # no operator takes those yet
    nodes = [helper.make_node("Identity", [t.name], [f"{t.name}_out"]) for t in copied]
    outputs = [helper.make_tensor_value_info(f"{t.name}_out", t.data_type, list(t.dims)) for t in copied]
    model = helper.make_model(helper.make_graph(nodes, "types", [], outputs, arrays),
                              opset_imports=[helper.make_opsetid("", onnx.defs.onnx_opset_version())])  # fmt: skip
    program = Program.from_onnx(model)
    assert program.to_onnx().SerializeToString(deterministic=True) == model.SerializeToString(deterministic=True)
    assert not program.untyped()
    trainable = {v.name for v in program.parameters}
    assert trainable == {"FLOAT", "DOUBLE", "FLOAT16", "BFLOAT16"}
    assert {v.name for v in program.startup.variables} == trainable
    for tensor in arrays:
        variable = program.var(tensor.name)
        assert np.array_equal(as_array(variable.data), numpy_helper.to_array(tensor))
        variable.data = as_array(variable.data)  # numpy content is written as well
    again = Program.from_onnx(program.to_onnx())
    for tensor in arrays:
        assert np.array_equal(tensor_array(again.var(tensor.name)), numpy_helper.to_array(tensor)), tensor.name


def test_parameters_and_startup():
    program = Program.from_onnx(text(EVERYTHING))
    assert [v.name for v in program.parameters] == ["w"]
    assert program.var("one").is_constant and program.var("i").is_constant and not program.var("one").persistable
    (op,) = program.startup.operators
    assert op.full_type == f"{OWN}::ArrayInitializer" and op.outputs[0].name == "w" and op.outputs[0].persistable
    assert op.outputs[0].data is program.var("w").data, "the startup program shares the content"
    back = Program.from_onnx(program.startup.to_onnx())
    assert back.operators[0].outputs[0].persistable
    assert np.array_equal(tensor_array(back.var("w")), [1, 2])


IR3 = """
<ir_version: 3, opset_import: ["" : 8]>
g (float[2] w, float[2] x, float[2] v) => (float[2] y)
<float[2] v = {1.0, 2.0}, float[2] w = {3.0, 4.0}>
{ t = Mul(x, w)
  y = Add(t, v) }
"""


def ir3():
    model = text(IR3.replace("<float[2] v = {1.0, 2.0}, float[2] w = {3.0, 4.0}>", ""))
    for name, values in (("v", [1, 2]), ("w", [3, 4])):
        model.graph.initializer.append(numpy_helper.from_array(np.array(values, np.float32), name))
    return model


def test_initializers_that_are_inputs():
    model = ir3()
    program = Program.from_onnx(model)
    assert [v.name for v in program.inputs] == ["x"]
    assert {v.name for v in program.parameters} == {"v", "w"}
    assert program.to_onnx() == model
    constant = program.add_constant("k", np.ones(2, np.float32))
    program.operators[1].set_input(1, constant)
    changed = program.to_onnx()
    assert changed.ir_version == 4, "before format version 4 every initializer has to be an input"
    assert same(run(changed, {"x": np.ones(2, np.float32)}), [np.array([4, 5], np.float32)])


def test_nodes_out_of_order_are_put_in_order():
    model = text(EVERYTHING.replace("custom.Thing", "Relu").replace("(mid, , one)", "(mid)").replace(
        "<alpha: float = 0.5, names: strings = [\"a\", \"b\"], empty: ints = []>", ""))  # fmt: skip
    shuffled = copy.deepcopy(model)
    nodes = list(shuffled.graph.node)[::-1]
    del shuffled.graph.node[:]
    shuffled.graph.node.extend(nodes)
    program = Program.from_onnx(shuffled)
    assert program.var("mid").dtype == "float32"
    out = program.to_onnx()
    onnx.checker.check_model(out)
    assert canonical(out) == canonical(model)


def test_sequences_maps_and_optionals_keep_their_types():
    model = text("""
    <ir_version: 10, opset_import: ["" : 21, "ai.onnx.ml" : 3]>
    g (seq(float[N]) s, float[2, 2] p, optional(float[N]) o) => (seq(float[N]) s2, seq(map(int64, float)) m, bool h) {
        n = SequenceLength(s)
        e = SequenceAt(s, n)
        s2 = SequenceInsert(s, e)
        m = ai.onnx.ml.ZipMap <classlabels_int64s: ints = [1, 2]> (p)
        h = OptionalHasElement(o)
    }""")
    program = Program.from_onnx(model)
    program.verify()
    assert program.var("s").dtype is None and program.var("s").type_proto.HasField("sequence_type")
    assert program.var("e").dtype == "float32"
    assert program.to_onnx() == model and program.clone().to_onnx() == model


# -- marks and scopes ------------------------------------------------------------------------------
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
        "amp_transpiler.guard": "1", "amp_transpiler.precision": "float16", "amp_transpiler.reason": "fp16: white list",
    }  # fmt: skip
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
    import json

    known = 0
    for name, (inputs, outputs, types) in json.loads(done.stdout.splitlines()[-1]).items():
        program = Program("one")
        dtypes = ["float32", "float16", "int32", "int64", "uint8", "int8", "bool", "float64", "bfloat16", "uint16",
                  "int16", "uint32", "uint64", "complex64", "complex128", "string"]  # fmt: skip
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
            if type_str in by_name:
                assert dtype == by_name[type_str], (name, type_str)
            else:
                spelled = {"float32": "float", "float64": "double"}.get(dtype, dtype)
                assert types.get(type_str, [type_str]) == [f"tensor({spelled})"], (name, type_str)
    assert known > 100


# -- functions --------------------------------------------------------------------------------------
FUNCTIONS = """
<ir_version: 10, opset_import: ["" : 21, "local" : 1]>
g (bool c, float[2] x) => (float[2] y)
<float[2] w = {1.0, 2.0}>
{
    [first] a = local.outer <alpha = 2.0> (x, w)
    b = Relu(a)
    [second] y = local.outer <alpha = 3.0> (b, w)
}
<domain: "local", opset_import: ["" : 21, "local" : 1]>
outer <alpha> (p, q) => (r) {
    k = Constant <value_float: float = @alpha> ()
    t = Mul(p, k)
    r = local.inner(t, q)
}
<domain: "local", opset_import: ["" : 21]>
inner (p, q) => (r) { s = Add(p, q)
  r = Neg(s) }
"""


def test_functions_survive_and_type_their_calls():
    model = text(FUNCTIONS)
    program = Program.from_onnx(model)
    assert program.to_onnx() == model and program.clone().to_onnx() == model
    assert program.var("a").dtype == "float32" and not program.untyped()


def test_inlined_functions_compute_the_same_and_keep_marks():
    model = text(FUNCTIONS)
    program = Program.from_onnx(model)
    program.operators[0].guard, program.operators[0].scope, program.operators[0].reason = True, "head", "asked"
    program.operators[1].role = "backward"
    inlined = inline_functions(program)
    inlined.verify()
    assert not inlined.info.functions and program.info.functions
    assert inlined.var("w").data is program.var("w").data and inlined.var("w").trainable
    marks = [(op.type, op.guard, op.scope, op.role) for op in inlined.operators]
    assert marks == [("Constant", True, "head", "forward"), ("Mul", True, "head", "forward"),
                     ("Add", True, "head", "forward"), ("Neg", True, "head", "forward"),
                     ("Relu", False, "", "backward"), ("Constant", False, "", "forward"),
                     ("Mul", False, "", "forward"), ("Add", False, "", "forward"), ("Neg", False, "", "forward")]  # fmt: skip
    feeds = {"x": np.array([0.5, -2], np.float32), "c": np.array(True)}
    feeds = {i.name: feeds[i.name] for i in session(model).get_inputs()}
    assert same(run(inlined.to_onnx(), feeds), run(model, feeds))
    plain = Program.from_onnx(text(EVERYTHING))
    assert inline_functions(plain) is plain


# -- external data ------------------------------------------------------------------------------------
def external_model(folder, name="m.onnx", data="weights/m.data"):
    """A model with two external weights, one of them bfloat16, and an external int4 constant."""
    rng = np.random.default_rng(0)
    arrays = {"w": rng.random((64, 32)).astype(np.float32), "b": rng.random(64).astype(ml_dtypes.bfloat16),
              "q": np.arange(16).astype(ml_dtypes.uint4)}  # fmt: skip
    (folder / data).parent.mkdir(parents=True, exist_ok=True)
    tensors, content = [], b""
    for key, array in arrays.items():
        tensor = numpy_helper.from_array(array, key)
        raw = tensor.raw_data
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for k, v in (("location", data), ("offset", str(len(content))), ("length", str(len(raw)))):
            tensor.external_data.add(key=k, value=v)
        content += raw + b"\0" * 64
        tensors.append(tensor)
    (folder / data).write_bytes(content)
    graph = text("""
    <ir_version: 10, opset_import: ["" : 21]>
    g (float[N, 64] x) => (float[N, 32] y, float[64] c, int32[16] i) {
        y = MatMul(x, w)
        c = Cast <to = 1> (b)
        i = Cast <to = 6> (q)
    }""")
    graph.graph.initializer.extend(tensors)
    onnx.save_model(graph, folder / name)
    return folder / name, graph, arrays


def test_external_data_is_mapped_and_comes_out_equal(tmp_path):
    path, model, arrays = external_model(tmp_path)
    program = Program.from_onnx(path)
    for name, array in arrays.items():
        data = program.var(name).data
        assert isinstance(data, ExternalTensor) and data.shape == array.shape and data.dtype == array.dtype
        assert np.array_equal(np.asarray(data), array)
    base = np.asarray(program.var("w").data)
    while base.base is not None and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap), "the content is mapped, not read"
    assert program.to_onnx() == model
    x = {"x": np.ones((1, 64), np.float32)}
    expected = run(str(path), x)

    other = tmp_path / "elsewhere"
    other.mkdir()
    program.to_onnx(other / "copy.onnx")
    assert onnx.load(other / "copy.onnx", load_external_data=False) == model
    assert same(run(str(other / "copy.onnx"), x), expected)
    program.to_onnx(tmp_path / "beside.onnx")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["beside.onnx", "elsewhere", "m.onnx", "weights"]
    assert same(run(str(tmp_path / "beside.onnx"), x), expected)
    assert Program.from_onnx(model, external_data_dir=tmp_path).to_onnx() == model
    assert program.clone().to_onnx() == model


def test_external_data_can_be_embedded_and_put_outside(tmp_path):
    path, _, arrays = external_model(tmp_path)
    x = {"x": np.ones((1, 64), np.float32)}
    expected = run(str(path), x)
    out = tmp_path / "out"
    out.mkdir()
    Program.from_onnx(path).to_onnx(out / "inside.onnx", external_data=False)
    assert [p.name for p in out.iterdir()] == ["inside.onnx"]
    inside = Program.from_onnx(out / "inside.onnx")
    for name, array in arrays.items():
        assert np.array_equal(tensor_array(inside.var(name)), array)
    for choice, name in ((True, "a.onnx.data"), ("b.bin", "b.bin")):
        target = out / f"{name[0]}.onnx"
        inside.to_onnx(target, external_data=choice)
        assert (out / name).stat().st_size == 64 * 32 * 4, "tensors under 1 KiB stay inside"
        assert same(run(str(target), x), expected)
        onnx.checker.check_model(str(target))


def test_beyond_the_size_limit_weights_go_outside(tmp_path, monkeypatch):
    path, _, _ = external_model(tmp_path)
    Program.from_onnx(path).to_onnx(tmp_path / "inside.onnx", external_data=False)
    program = Program.from_onnx(tmp_path / "inside.onnx")
    monkeypatch.setattr(files, "LIMIT", 4096)
    out = tmp_path / "out"
    out.mkdir()
    program.to_onnx(out / "big.onnx")
    assert sorted(p.name for p in out.iterdir()) == ["big.onnx", "big.onnx.data"]
    x = {"x": np.ones((1, 64), np.float32)}
    assert same(run(str(out / "big.onnx"), x), run(str(path), x))


class Values(dict):
    def find_var(self, name):
        return self.get(name)


def test_values_from_a_scope(tmp_path):
    path, _, arrays = external_model(tmp_path)
    program = Program.from_onnx(path)
    w = np.full((64, 32), 2, np.float32)
    model = program.to_onnx(scope=Values(w=w))
    assert np.array_equal(numpy_helper.to_array(model.graph.initializer[0]), w)
    assert model.graph.initializer[1].data_location == TensorProto.EXTERNAL
    program.to_onnx(path, scope=Values(w=w))  # over the very file that is mapped
    back = Program.from_onnx(path)
    assert np.array_equal(tensor_array(back.var("w")), w) and np.array_equal(tensor_array(back.var("b")), arrays["b"])
    assert np.array_equal(tensor_array(program.var("w")), arrays["w"]), "the mapped content is not the new file's"
    with pytest.raises(GraphError, match=r"'w' as float16\[64, 32\].*float32\[64, 32\]"):
        program.to_onnx(scope=Values(w=w.astype(np.float16)))


def test_a_persistable_variable_without_a_value_is_an_input():
    program = Program("p")
    x = program.add_input("x", "float32", (2,))
    state = program.add_variable("state", "float32", (2,), persistable=True)
    y = program.add_variable("y", "float32", (2,))
    program.add_operator("Add", [x, state], [y])
    program.outputs = [y]
    assert [i.name for i in program.to_onnx().graph.input] == ["x", "state"]
    model = program.to_onnx(scope=Values(state=np.array([1, 2], np.float32)))
    assert [i.name for i in model.graph.input] == ["x"]
    assert same(run(model, {"x": np.zeros(2, np.float32)}), [np.array([1, 2], np.float32)])


# -- stability and cost -----------------------------------------------------------------------------
def chain(length):
    nodes = [helper.make_node("Relu" if i % 2 else "Neg", [f"v{i}"], [f"v{i + 1}"], f"n{i}") for i in range(length)]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N"]) for n in ("v0", f"v{length}")]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])


def test_cost_is_linear_and_bytes_repeat():
    times = {}
    for length in (5000, 20000):
        model = chain(length)
        start = time.process_time()
        program = Program.from_onnx(model)
        program.verify()
        out = program.clone().to_onnx()
        times[length] = time.process_time() - start
        assert out.SerializeToString(deterministic=True) == model.SerializeToString(deterministic=True)
        assert out.SerializeToString() == program.to_onnx().SerializeToString()
    assert times[20000] < 9 * times[5000], times  # 4 where it is linear, 16 where it is quadratic


# -- bad files ----------------------------------------------------------------------------------------
def test_files_that_are_no_models(tmp_path):
    good = text(EVERYTHING).SerializeToString()
    for name, content, expected in (
        ("empty", b"", "is empty"),
        ("text", b"this is no model\n" * 20, "is not an ONNX model"),
        ("json", b'{"irVersion": "8"}', "is not an ONNX model"),
        ("pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
        ("half", good[: len(good) // 2], "cut short"),
        ("header", onnx.ModelProto(ir_version=8).SerializeToString(), "cut short"),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(ModelFileError, match=expected) as caught:
            Program.from_onnx(path)
        assert str(path) in str(caught.value)
    with pytest.raises(ModelFileNotFoundError, match=r"nowhere\.onnx"):
        Program.from_onnx(tmp_path / "nowhere.onnx")
    with pytest.raises(ModelFileError, match="cannot be read"):
        Program.from_onnx(tmp_path)
    with pytest.raises(ArgumentTypeError, match="int"):
        Program.from_onnx(3)


def test_a_file_that_is_cut_anywhere_loses_nothing_of_its_graph(tmp_path):
    model = everything()
    content = model.SerializeToString()
    path = tmp_path / "cut.onnx"
    accepted = 0
    for length in range(len(content)):
        path.write_bytes(content[:length])
        try:
            program = Program.from_onnx(path)
        except (ModelFileError, GraphError):
            continue
        accepted += 1
        assert program.to_onnx().graph == model.graph, length
    assert accepted < 10, "only where a field behind the graph ends can a cut go unnoticed"


def bad(source, tmp_path):
    path = tmp_path / "bad.onnx"
    onnx.save_model(text(source) if isinstance(source, str) else source, path)
    with pytest.raises((GraphError, ModelFileError)) as caught:
        Program.from_onnx(path)
    assert "bad.onnx" in str(caught.value)
    return str(caught.value)


HEAD = '<ir_version: 10, opset_import: ["" : 21]> g (float[2] x, float16[2] h) => (float[2] y)'


def test_malformed_graphs_are_refused(tmp_path):
    message = bad(HEAD + "{ [one] a = Add(x, b)\n [two] b = Relu(a)\n y = Neg(b) }", tmp_path)
    assert "cycle" in message and "'one'" in message and "'two'" in message
    message = bad(HEAD + "{ [reader] y = Add(x, ghost) }", tmp_path)
    assert "'reader' (Add)" in message and "'ghost'" in message
    message = bad(HEAD + "{ [one] y = Relu(x)\n [two] y = Neg(x) }", tmp_path)
    assert "'two' (Neg)" in message and "'y'" in message
    message = bad(HEAD + "{ [writer] x = Relu(h)\n y = Neg(x) }", tmp_path)
    assert "'writer' (Relu)" in message
    message = bad(HEAD + "{ z = Relu(x) }", tmp_path)
    assert "output 'y'" in message
    message = bad(HEAD + "{ [clash] y = Add(x, h) }", tmp_path)
    assert "'clash' (Add)" in message and "float32" in message and "float16" in message
    message = bad(HEAD + "{ [many] y = Relu(x, x) }", tmp_path)
    assert "'many' (Relu)" in message
    message = bad(HEAD.replace("21", "99") + "{ y = Relu(x) }", tmp_path)
    assert "operator set ai.onnx 99" in message
    message = bad(HEAD.replace("10", "99") + "{ y = Relu(x) }", tmp_path)
    assert "format version 99" in message


def test_duplicate_initializers_and_short_tensors_are_refused(tmp_path):
    model = ir3()
    model.graph.initializer.append(model.graph.initializer[0])
    assert "'v'" in bad(model, tmp_path)
    model = ir3()
    model.graph.initializer[0].dims[0] = 200
    assert "'v'" in bad(model, tmp_path)


@pytest.mark.parametrize(
    ("damage", "expected", "kind"),
    [
        (lambda folder: (folder / "weights/m.data").unlink(), "is missing", ModelFileNotFoundError),
        (lambda folder: os.truncate(folder / "weights/m.data", 100), "too short", ModelFileError),
        (lambda folder: os.truncate(folder / "weights/m.data", 0), "too short", ModelFileError),
    ],
    ids=["missing", "short", "empty"],
)
def test_damaged_external_data(tmp_path, damage, expected, kind):
    path, _, _ = external_model(tmp_path)
    damage(tmp_path)
    with pytest.raises(kind, match=expected) as caught:
        Program.from_onnx(path)
    assert "'w'" in str(caught.value) and "m.onnx" in str(caught.value) and "m.data" in str(caught.value)


@pytest.mark.parametrize("key, value, expected", [
    ("location", "../m.data", "does not lie in"), ("location", "/etc/passwd", "does not lie in"),
    ("location", "", "does not lie in"), ("length", "7", "refers to 7 bytes"), ("offset", "-4", "offset -4"),
    ("offset", "many", "no number"),
])  # fmt: skip
def test_external_references_that_cannot_be(tmp_path, key, value, expected):
    path, model, _ = external_model(tmp_path)
    for entry in model.graph.initializer[0].external_data:
        entry.value = value if entry.key == key else entry.value
    onnx.save_model(model, path)
    with pytest.raises(ModelFileError, match=expected):
        Program.from_onnx(path)
    with pytest.raises(ModelFileError, match="external_data_dir"):
        Program.from_onnx(external_model(tmp_path)[1])


# -- writing whole or not at all --------------------------------------------------------------------
def test_a_failed_write_leaves_everything_as_it_was(tmp_path, monkeypatch):
    path, _, _ = external_model(tmp_path)
    program = Program.from_onnx(path)
    target = tmp_path / "out"
    target.mkdir()
    program.to_onnx(target / "m.onnx", external_data=True)
    before = {p.name: p.read_bytes() for p in target.iterdir()}

    def full(self, stream):
        stream.write(b"something")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(external.Layout, "_write_data", full)
    with pytest.raises(ModelFileWriteError, match="No space left"):
        program.to_onnx(target / "m.onnx", external_data=True)
    with pytest.raises(ModelFileWriteError, match="No space left"):
        program.to_onnx(target / "new.onnx", external_data=True)
    assert {p.name: p.read_bytes() for p in target.iterdir()} == before


def test_a_full_disk_while_the_model_is_written(tmp_path, monkeypatch):
    program = Program.from_onnx(text(FUNCTIONS))

    def full(content, stream):
        stream.write(content[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "put", full)
    with pytest.raises(ModelFileWriteError, match=r"m\.onnx"):
        program.to_onnx(tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


def test_paths_that_cannot_be_written(tmp_path):
    program = Program.from_onnx(text(FUNCTIONS))
    with pytest.raises(ModelFileWriteError, match=r"nowhere"):
        program.to_onnx(tmp_path / "nowhere" / "m.onnx")
    with pytest.raises(ModelFileWriteError, match="folder"):
        program.to_onnx(tmp_path)
    assert not list(tmp_path.iterdir())
    for choice in ("a/b", "", "m.onnx"):
        with pytest.raises(ArgumentError):
            program.to_onnx(tmp_path / "m.onnx", external_data=choice)
    with pytest.raises(ArgumentError, match="path"):
        program.to_onnx(external_data=True)


@pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")
def test_written_files_have_ordinary_permissions(tmp_path):
    program = Program.from_onnx(text(FUNCTIONS))
    program.to_onnx(tmp_path / "m.onnx")
    (tmp_path / "plain").write_bytes(b"")
    mode = stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    assert stat.S_IMODE((tmp_path / "m.onnx").stat().st_mode) == mode
    (tmp_path / "m.onnx").chmod(0o600)
    program.to_onnx(tmp_path / "m.onnx")
    assert stat.S_IMODE((tmp_path / "m.onnx").stat().st_mode) == 0o600


def test_a_malformed_program_is_not_written(tmp_path):
    program = Program.from_onnx(text(FUNCTIONS))
    lost = program.add_variable("lost", "float32", (2,))
    program.operators[1].set_input(0, lost)
    with pytest.raises(GraphError, match="reads 'lost'"):
        program.to_onnx(tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


