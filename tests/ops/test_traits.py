"""What the operator table says of operators, held to the lists and to the node tests of ONNX."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from amp_transpiler import ops
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.opdef import entry, moves, traits_of
from amp_transpiler.ir.parameter_names import names_of_parameter
from amp_transpiler.lists import AutoMixedPrecisionLists
from amp_transpiler.program import Program
from tests.helpers.node_tests import node_tests

LISTS = AutoMixedPrecisionLists()
LISTED = LISTS.white_list | LISTS.black_list | LISTS.gray_list
OPS = Path(ops.__file__).parent
#: What moves elements, and rounds them: its numbers are not only those of its inputs.
BESIDES = {"Cast", "CastLike"}
#: What the node tests show with numbers that happen to be among the inputs, and why it is declared as computing.
COMPUTES = {
    "Clip": "bounds may stand in attributes",
    "OneHot": "its two values are numbers that it writes, as a fill does",
    "OptionalGetElement": "what it hands on may be a sequence",
    "Sign": "the test has 0 and 1 among its inputs",
    "Upsample": "linear modes interpolate",
}
Array = np.ndarray[Any, Any]
Case = tuple[onnx.NodeProto, list[Array], list[Array]]


@cache
def cases() -> list[Case]:
    """Node, inputs and outputs of every node test of one standard operator on tensors."""
    found = []
    for case in node_tests():
        if case.model is None or not case.data_sets:
            continue
        nodes = case.model.graph.node
        if len(nodes) != 1 or nodes[0].domain:
            continue
        inputs, outputs = case.data_sets[0]
        if all(isinstance(v, np.ndarray | np.generic) for v in (*inputs, *outputs)):
            found.append((nodes[0], [np.asarray(v) for v in inputs], [np.asarray(v) for v in outputs]))
    return found


def given(node: onnx.NodeProto, inputs: list[Array]) -> dict[int, Array]:
    """The inputs by slot."""
    return dict(zip([slot for slot, name in enumerate(node.input) if name], inputs, strict=True))


def adds(node: onnx.NodeProto) -> bool:
    return any(a.name == "reduction" and a.s not in (b"", b"none") for a in node.attribute)


@pytest.mark.parametrize("name", sorted(LISTED))
def test_every_operator_of_the_lists_says_what_it_does(name: str) -> None:
    assert entry(name).traits is not None, f"traits({name!r}, ...) belongs in the file of ops/ that has its family"


#: Operators that two files name.
TWICE = dict.fromkeys(("GRU", "LSTM", "RNN"), "the way there and the way back fill a file each")
TWICE |= dict.fromkeys(("Sigmoid", "Tanh"), "recurrent layers compute with them unless they say otherwise")

#: Files of what is true of kernels, not of operators: what stands for one that a place lacks, and how one rounds.
OF_KERNELS = {f"place_{name}.py" for name in ("bodies", "gaps", "indices", "norms", "shapes", "windows")}
OF_KERNELS |= {f"rounded_{name}.py" for name in ("activations", "functions", "sums")}


def declarations(path: Path) -> set[str]:
    """The operator types of ai.onnx that the top level of a file of ops/ declares something of, by the strings in it."""
    found: set[str] = set()
    pending: list[ast.AST] = list(ast.parse(path.read_text()).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and LISTED.issuperset(node.value.split()):
            found.update(node.value.split())
        elif isinstance(node, ast.FunctionDef):
            pending += node.decorator_list
        elif isinstance(node, ast.Dict):
            pending += node.values
        elif not isinstance(node, ast.BinOp):  # which makes a name of another domain
            pending += ast.iter_child_nodes(node)
    return found


def test_all_that_is_known_of_an_operator_stands_in_one_file() -> None:
    places: dict[str, set[str]] = {}
    for path in (path for path in OPS.rglob("*.py") if path.name not in OF_KERNELS):
        for name in declarations(path):
            places.setdefault(name, set()).add(path.name)
    assert {name for name, files in places.items() if len(files) > 1} == set(TWICE)
    assert len(places) >= 185


@pytest.mark.parametrize(
    ("type_", "dtype", "shape"),
    [
        ("BitShift", "uint32", (4, 3)),
        ("Greater", "bool", (4, 3)),
        ("Softmax", "float32", (4, 1)),
        ("Where", "float32", (4, 3)),
    ],
)
def test_emitted_values_know_their_type_and_shape(type_: str, dtype: str, shape: tuple[int, ...]) -> None:
    e = Emitter()
    read = {"BitShift": "uint32"}.get(type_, "float32")
    x, row = Value("x", read, (4, 1)), Value("row", read, (3,))
    inputs = {"Softmax": [x], "Where": [Value("c", "bool", (3,)), x, row]}.get(type_, [x, row])
    made = e.op(type_, *inputs)
    assert (made.dtype, made.shape) == (dtype, shape)


def test_what_moves_elements_makes_none() -> None:
    checked = set()
    for node, inputs, outputs in cases():
        slots = traits_of(node.op_type).moves
        if slots == () or node.op_type in BESIDES or adds(node) or (node.op_type == "Dropout" and len(inputs) > 2):
            continue
        read = [array for slot, array in given(node, inputs).items() if slots is None or slot in slots]
        made = outputs[:1] if node.op_type == "Dropout" else outputs
        for array in made:
            known = np.concatenate([each.reshape(-1) for each in read] + [np.zeros(1, read[0].dtype)])
            assert np.isin(array, known).all(), node
        checked.add(node.op_type)
    assert len(checked) >= 25 and {"Pad", "Where", "Concat", "ScatterND", "TensorScatter", "Trilu"} <= checked


def test_a_view_keeps_every_element_in_its_place() -> None:
    checked = set()
    for node, inputs, outputs in cases():
        if traits_of(node.op_type).view:
            np.testing.assert_array_equal(outputs[0].reshape(-1), inputs[0].reshape(-1))
            checked.add(node.op_type)
    assert checked == {"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity"}


def test_whatever_only_holds_elements_of_its_inputs_is_declared() -> None:
    """Found by the numbers: an operator none of whose node tests makes a number that it was not given."""
    only: dict[str, bool] = {}
    for node, inputs, outputs in cases():
        floats = [array.reshape(-1) for array in inputs if array.dtype.kind == "f"]
        if floats and outputs[0].dtype.kind == "f" and outputs[0].size > 1 and not adds(node):
            known = np.concatenate([*floats, np.zeros(1, floats[0].dtype)])
            only[node.op_type] = only.get(node.op_type, True) and bool(np.isin(outputs[0], known).all())
    found = {name for name, holds in only.items() if holds}
    assert len(found) >= 20
    assert {name for name in found if traits_of(name).moves == () and not traits_of(name).exact} == set(COMPUTES)


def test_slots_are_asked_one_by_one() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
      m (bool[2] c, float[2] x, float[2] z) => (float[2] y, float[2] s)
      { y = Where(c, x, z)  s = Add(x, z) }"""
    where, add = Program.from_onnx(onnx.parser.parse_model(text)).operators
    assert [moves(where, slot) for slot in range(3)] == [False, True, True] and moves(where)
    assert not moves(add) and not moves(add, 0)


@pytest.mark.parametrize(
    "view", ["Reshape(w, shape)", "Squeeze(w, one)", "Unsqueeze(w, one)", "Flatten(w)", "Transpose(w)"]
)
def test_a_parameter_has_the_name_of_the_layer_that_reads_it_as_a_view(view: str) -> None:
    text = f"""<ir_version: 10, opset_import: ["" : 21]>
      m (float[4] x) => (float[N] y) <float[4,1] w = {{1, 2, 3, 4}}, int64[1] shape = {{4}}, int64[1] one = {{1}}>
      {{ v = {view}  y = Mul(v, x) }}"""
    model = onnx.parser.parse_model(text)
    model.graph.node[1].name = "encoder.scale"
    program = Program.from_onnx(model)
    assert "encoder.scale" in names_of_parameter(program.var("w"))
