"""ONNX -> Program -> ONNX loses nothing, and gives the same outputs."""

import copy
import lzma
import pickle
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from amp_transpiler.errors import GraphError
from amp_transpiler.ir.nodes import OWN
from amp_transpiler.ir.tensors import as_array, tensor_array
from amp_transpiler.passes.canonicalize.inlining import inline_functions
from amp_transpiler.program import Program
from tests.helpers.node_tests import node_tests
from tests.helpers.onnx_goldens import CAPTURES, EVERYTHING, FUNCTIONS, canonical, everything, ir3, run, same, text
from tests.helpers.sessions import session
from tests.helpers.where import DATA, NO_DATA, TRAPS

BACKEND = Path(onnx.__file__).parent / "backend" / "test" / "data"
MODELS = sorted(BACKEND.rglob("*.onnx"))
TRAP_MODELS = sorted(TRAPS.glob("*.onnx"))


# -- the models of the onnx package -----------------------------------------------------------------
def test_onnx_ships_its_models():
    assert len(MODELS) > 100


@pytest.mark.parametrize("path", MODELS + TRAP_MODELS, ids=lambda path: "/".join(path.parts[-3:]))
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


def feeds_of(path, model):
    """The recorded inputs of a model of the onnx package, else random ones."""
    data = path.parent / "test_data_set_0"
    rng = np.random.default_rng(0)
    feeds = {}
    given = {initializer.name for initializer in model.graph.initializer}
    for number, value in enumerate(value for value in model.graph.input if value.name not in given):
        recorded = data / f"input_{number}.pb"
        tensor = value.type.tensor_type
        if recorded.exists() and value.type.HasField("tensor_type"):
            feeds[value.name] = numpy_helper.to_array(TensorProto.FromString(recorded.read_bytes()))
        elif recorded.exists():
            feeds[value.name] = numpy_helper.to_list(onnx.SequenceProto.FromString(recorded.read_bytes()))
        else:
            shape = [size.dim_value if size.HasField("dim_value") else 2 for size in tensor.shape.dim]
            feeds[value.name] = rng.random(shape).astype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    return feeds


def by_reference(path, feeds):
    return ReferenceEvaluator(path).run(None, feeds)


#: Nothing at hand computes the operator Gradient of these.
GRADIENTS = ("test_gradient_of_add", "test_gradient_of_add_and_mul")


@pytest.mark.parametrize(
    "path", [path for path in MODELS if path.parent.name not in GRADIENTS], ids=lambda path: "/".join(path.parts[-3:])
)
def test_gives_the_same_outputs(path, tmp_path):
    """In onnxruntime; where it has no kernel for the original, in ONNX's reference evaluator."""
    evaluate = run
    try:
        session(path, "DISABLE_ALL")
    except Exception:  # onnxruntime has no common base class for "this model does not load"
        evaluate = by_reference
    feeds = feeds_of(path, onnx.load(path))
    expected = evaluate(str(path), feeds)
    program = Program.from_onnx(path)
    program.info.extra.clear()  # from what the program itself knows, not from what it remembers of its file
    program.to_onnx(tmp_path / "out.onnx")
    assert same(evaluate(str(tmp_path / "out.onnx"), feeds), expected)


def test_node_tests_of_onnx_go_through():
    """Every operator of ONNX once, from the package's generated node tests."""
    cases = node_tests()
    assert len(cases) > 1000
    different = []
    for case in cases:
        model = case.model
        program = Program.from_onnx(model)
        program.verify()
        if program.to_onnx().SerializeToString(deterministic=True) != model.SerializeToString(deterministic=True):
            different.append(case.name)
    assert not different


@pytest.mark.skipif(not (DATA / "onnx_models").is_dir(), reason=NO_DATA)
@pytest.mark.parametrize("path", sorted((DATA / "onnx_models").glob("*.onnx.xz")), ids=lambda path: path.name)
def test_real_models_come_out_equal_and_typed(path):
    model = onnx.load_from_string(lzma.decompress(path.read_bytes()))
    program = Program.from_onnx(model)
    program.verify()
    assert canonical(program.to_onnx()) == canonical(model)
    assert canonical(program.clone().to_onnx()) == canonical(model)


# -- hand-made goldens ------------------------------------------------------------------------------
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
    model = helper.make_model(
        helper.make_graph(nodes, "types", [], outputs, arrays),
        opset_imports=[helper.make_opsetid("", onnx.defs.onnx_opset_version())],
    )
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


def test_a_constant_in_a_body_of_an_old_format():
    """A shape that became a constant there, say: no format before 4 has it beside the inputs of its graph."""
    model = text("""<ir_version: 3, opset_import: ["" : 11]> m (int64 n, bool c, float[2] x) => (float[2] y) {
        y = Loop (n, c, x) <body = b (int64 i, bool on, float[2] a) => (bool go, float[2] o) {
            go = Identity(on)  o = Add(a, a) }> }""")
    program = Program.from_onnx(model)
    body = program.operators[0].attrs.graphs["body"]
    body.operators[1].set_input(1, body.add_constant("k", np.ones(2, np.float32)))
    feed = {"n": np.array(3), "c": np.array(True), "x": np.zeros(2, np.float32)}
    assert same(run(program.to_onnx(), feed), [np.full(2, 3, np.float32)])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))], ids=["copy", "pickle"])
@pytest.mark.parametrize("external", [False, True], ids=["embedded", "external"])
@pytest.mark.parametrize("started", [False, True])
def test_an_imported_program_is_copied_and_pickled(copied, external, started, tmp_path):
    path = tmp_path / "model.onnx"
    Program.from_onnx(text(EVERYTHING)).to_onnx(path, external_data=external)
    program = Program.from_onnx(path)
    if started:
        assert program.startup.operators
    found = copied(program)
    (tmp_path / "model.onnx.data").unlink(missing_ok=True)
    assert found.to_onnx(external_data=False) == program.to_onnx(external_data=False)
    assert found.startup.to_onnx(external_data=False) == program.startup.to_onnx(external_data=False)


def test_nodes_out_of_order_are_put_in_order():
    model = text(
        EVERYTHING.replace("custom.Thing", "Relu")
        .replace("(mid, , one)", "(mid)")
        .replace('<alpha: float = 0.5, names: strings = ["a", "b"], empty: ints = []>', "")
    )
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


# -- functions --------------------------------------------------------------------------------------
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
    inlined, held = program.clone(), program.var("w")
    stale = inlined.var("w")
    assert inline_functions(inlined) and stale.program is not inlined
    inlined.verify()
    assert not inlined.info.functions and program.info.functions
    assert inlined.var("w").data is held.data and inlined.var("w").trainable
    marks = [(op.type, op.guard, op.scope, op.role) for op in inlined.operators]
    assert marks == [
        ("Constant", True, "head", "forward"),
        ("Mul", True, "head", "forward"),
        ("Add", True, "head", "forward"),
        ("Neg", True, "head", "forward"),
        ("Relu", False, "", "backward"),
        ("Constant", False, "", "forward"),
        ("Mul", False, "", "forward"),
        ("Add", False, "", "forward"),
        ("Neg", False, "", "forward"),
    ]
    feeds = {"x": np.array([0.5, -2], np.float32), "c": np.array(True)}
    feeds = {i.name: feeds[i.name] for i in session(model).get_inputs()}
    assert same(run(inlined.to_onnx(), feeds), run(model, feeds))
    plain = Program.from_onnx(text(EVERYTHING))
    version = plain.version
    assert not inline_functions(plain) and plain.version == version


def test_functions_of_another_operator_set_are_refused_not_changed():
    model = text(FUNCTIONS)
    inner = model.functions[1]
    inner.opset_import[0].version = 7
    inner.node.add(op_type="Squeeze", input=inner.input[:1], output=["squeezed"])  # written in another way from 13 on
    program = Program.from_onnx(model)
    assert program.to_onnx() == model
    with pytest.raises(GraphError, match="function 'inner' imports opset 7"):
        inline_functions(program)
    assert program.to_onnx() == model


def test_functions_may_import_another_version_of_their_own_domain():
    """jax2onnx lets a function import its domain at the opset of ai.onnx, and the model at 1."""
    model = text(FUNCTIONS)
    for function in model.functions:
        own = next((each for each in function.opset_import if each.domain == function.domain), None)
        own = function.opset_import.add(domain=function.domain) if own is None else own
        own.version = 23
    program = Program.from_onnx(model)
    assert inline_functions(program)
    program.verify()
    feeds = {"x": np.array([0.5, -2], np.float32), "c": np.array(True)}
    feeds = {i.name: feeds[i.name] for i in session(model).get_inputs()}
    assert same(run(program.to_onnx(), feeds), run(model, feeds))


# -- stability and cost -----------------------------------------------------------------------------
def chain(length):
    nodes = [helper.make_node("Relu" if i % 2 else "Neg", [f"v{i}"], [f"v{i + 1}"], f"n{i}") for i in range(length)]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N"]) for n in ("v0", f"v{length}")]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])


def test_cost_is_linear_and_bytes_repeat():
    """Counted in calls, python's and C's, which a busy machine does not change."""
    calls = {}
    for length in (1000, 4000):
        model = chain(length)
        count = 0

        def counted(frame, event, argument):
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(counted)
        try:
            program = Program.from_onnx(model)
            program.verify()
            out = program.clone().to_onnx()
        finally:
            sys.setprofile(None)
        calls[length] = count
        assert out.SerializeToString(deterministic=True) == model.SerializeToString(deterministic=True)
        assert out.SerializeToString() == program.to_onnx().SerializeToString()
    assert calls[4000] < 4.2 * calls[1000], calls
