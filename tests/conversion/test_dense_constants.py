"""Sparse constants: guards see their numbers, 16 bit stores them, and a program that is not converted keeps them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import amp_transpiler as amp
from amp_transpiler.conversion import dense_constants
from tests.helpers.sessions import run

X = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
KINDS = ("initializer", "coordinates", "constant", "branch")


def model(kind: str, largest: float = 2.5, size: int = 4) -> onnx.ModelProto:
    """x times a matrix of three numbers, which is sparse."""
    values = helper.make_tensor(
        "" if kind in ("constant", "branch") else "w", TensorProto.FLOAT, [3], [1.5, largest, 3.5]
    )
    places = [1, size + 2, 2 * size + 3] if kind != "coordinates" else [0, 1, 1, 2, 2, 3]
    indices = helper.make_tensor("", TensorProto.INT64, [3] if kind != "coordinates" else [3, 2], places)
    sparse = helper.make_sparse_tensor(values, indices, [size, size])
    nodes, more = [helper.make_node("MatMul", ["x", "w"], ["y"])], []
    if kind in ("constant", "branch"):
        nodes.insert(0, helper.make_node("Constant", [], ["w"], sparse_value=sparse))
    else:
        more = [sparse]
    given, made = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, size]) for name in "xy")
    condition = []
    if kind == "branch":
        condition = [helper.make_tensor_value_info("c", TensorProto.BOOL, [])]
        branches = {
            "then_branch": helper.make_graph(nodes, "then", [], [made]),
            "else_branch": helper.make_graph([helper.make_node("Neg", ["x"], ["z"])], "else", [], [made]),
        }
        branches["else_branch"].output[0].name = "z"
        nodes = [helper.make_node("If", ["c"], ["y"], **branches)]
    graph = helper.make_graph(nodes, "g", [*condition, given], [made], sparse_initializer=more)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def feeds(kind: str) -> dict[str, Any]:
    return {"x": X, **({"c": np.array(True)} if kind == "branch" else {})}


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_beyond_the_format_keep_their_readers_fp32(kind: str) -> None:
    given = model(kind, 1e6)
    program = amp.convert(given)
    assert {op.precision for op in program.walk() if op.type == "MatMul"} == {"float32"}
    assert [note.worst for note in program.conversion.constants] == [1e6]
    np.testing.assert_array_equal(run(program.to_onnx(), feeds(kind))[0], run(given, feeds(kind))[0])


@pytest.mark.parametrize("kind", KINDS)
def test_others_are_stored_in_16_bit(kind: str, tmp_path: Path) -> None:
    given = model(kind)
    program = amp.convert(given, check=True)
    assert program.conversion.verdict.met
    written = program.to_onnx(tmp_path / "half.onnx")
    onnx.checker.check_model(written, full_check=True)
    assert {op.precision for op in program.walk() if op.type == "MatMul"} == {"float16"}
    assert sum(op.type == "Cast" for op in program.walk()) == 2  # of x and y
    np.testing.assert_allclose(run(written, feeds(kind))[0], run(given, feeds(kind))[0], rtol=2e-3)
    assert amp.check_model(tmp_path / "half.onnx").ok


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_that_is_not_converted_keeps_them(kind: str) -> None:
    given = model(kind)
    assert amp.Program.from_onnx(given).to_onnx() == given


def test_too_large_ones_keep_their_readers_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_constants, "DENSE", 15)
    given = model("initializer", 1e6)
    program = amp.convert(given)
    assert program.to_onnx().graph.sparse_initializer == given.graph.sparse_initializer
    assert "sparse constant 'w' of 16 elements is too large" in program.conversion.notes[0]
    (product,) = program.operators
    assert product.precision == "float32" and "'w' is too large to be looked through" in product.reason
