"""Tables marked sparse: the mark, what is made of it, where their rows lie, and what a place runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import StepError
from amp_transpiler.nn import functional as F
from amp_transpiler.passes.step_check.check_lowered import check_lowered
from tests.helpers.placement import needs_placement_tool, place
from tests.helpers.tables import BATCH, IDS, Recommender

SHAPES = {"ids": (BATCH, IDS), "label": (BATCH, 1)}


def imported(sparse: str | None) -> tuple[amp.Program, amp.Variable]:
    """A model from elsewhere, its table marked by a pattern, and its loss."""
    table = np.random.default_rng(1).normal(size=(30, 4)).astype(np.float32)
    graph = onnx.parser.parse_graph(
        "g (int64[2, 3] ids) => (float[2, 3, 4] y) { rows = Gather(table, ids) y = Mul(rows, other) }"
    )
    graph.initializer.append(onnx.numpy_helper.from_array(table, "table"))
    graph.initializer.append(onnx.numpy_helper.from_array(np.ones(4, np.float32), "other"))
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)])
    program = amp.Program.from_onnx(model)
    if sparse is not None:
        assert program.mark_sparse(sparse) == 1
    with amp.program_guard(program):
        y = program.var("y")
        loss = F.mean(y * y)
    return program, loss


def trained(program: amp.Program, loss: amp.Variable) -> tuple[Any, np.ndarray]:
    amp.optimizer.SGD(0.5).minimize(loss)
    scope, exe = amp.Scope(), amp.Executor(amp.CPUPlace())
    exe.run(program.startup, scope=scope)
    found = [exe.run(program, {"ids": np.array([[1, 1, 2], [29, 1, 0]])}, [loss], scope)[0].copy() for _ in range(3)]
    return np.array(found), np.array(scope.find_var("table"))


def test_a_table_of_an_imported_model() -> None:
    sparse, dense = imported("tab*"), imported(None)
    results = [trained(*net) for net in (sparse, dense)]
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)
    assert "SparseSGD" in {op.type for op in sparse[0].operators}
    assert "SparseSGD" not in {op.type for op in dense[0].operators}


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_how_rows_are_looked_up(kind: str) -> None:
    """On CPU by the kernel that does not wait for each row; in a dense table as the program says."""
    for pattern, on_cpu in (("table", "GatherND"), (None, "Gather")):
        program, _ = imported(pattern)
        lowered = program.lower(amp.CPUPlace() if kind == "cpu" else amp.CUDAPlace(0))
        found = [node.op_type for node in lowered.model.graph.node if "table" in node.input]
        assert found == [on_cpu if kind == "cpu" else "Gather"]


def test_marks_that_fit_nothing_are_errors() -> None:
    program, loss = imported(None)
    for patterns, said in (
        ((), "at least one pattern"),
        (("other",), "whose rows are looked up"),
        (("x*",), "'table'"),
    ):
        with pytest.raises(amp.AmpError, match=said):
            program.mark_sparse(*patterns)
    assert not program.var("table").sparse
    amp.optimizer.SGD(0.5).minimize(loss)
    with pytest.raises(amp.AmpError, match="before minimize"):
        program.mark_sparse("table")


def test_marks_and_rows_survive_files_and_copies(tmp_path: Path) -> None:
    program, _ = imported("table")
    program.to_onnx(tmp_path / "marked.onnx")
    assert amp.Program.from_onnx(tmp_path / "marked.onnx").var("table").sparse
    main = Recommender(lambda _: amp.optimizer.Adam(0.01, lazy_mode=True), "mixed").main
    main.to_onnx(tmp_path / "step.onnx")
    for copy in (main.clone(), amp.Program.from_onnx(tmp_path / "step.onnx")):
        assert copy.var("table").sparse
        rows = {v.name: v.rows.name for v in copy.variables if v.rows is not None}
        assert rows == {v.name: v.rows.name for v in main.variables if v.rows is not None} != {}
        amp.check_step(copy, amp.CPUPlace(), SHAPES)
    assert main.clone(for_test=True).var("table").sparse


def test_split_embedding_parameters() -> None:
    program, _ = imported(None)
    assert [[v.name for v in part] for part in amp.split_embedding_parameters(program)] == [["table"], ["other"]]
    with pytest.raises(amp.AmpError, match="no amp.Program"):
        amp.split_embedding_parameters("program")


@pytest.mark.parametrize("mode", ["fp32", "pure"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rows_are_written_where_the_table_lies(dtype: str, mode: str) -> None:
    """The table, its master and its moments never move, and nothing of their size is made."""
    rows = 5000
    net = Recommender(
        lambda _: amp.optimizer.Adam(0.01, lazy_mode=True, multi_precision=True), mode, dtype=dtype, rows=rows
    )
    net.train(range(1))
    large = [v.name for v in net.main.variables if v.persistable and v.shape and v.shape[0] == rows]
    assert len(large) == (4 if dtype == "float16" else 3)
    where = {name: net.scope.ort_values[name].data_ptr() for name in large}
    net.train(range(1, 4))
    assert where == {name: net.scope.ort_values[name].data_ptr() for name in large}
    graph = net.main.lower(amp.CPUPlace(), feed_shapes=SHAPES).model
    typed = onnx.shape_inference.infer_shapes(graph).graph
    sizes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in (*typed.value_info, *typed.output)}
    whole = [
        node.op_type for node in graph.graph.node if any(sizes.get(name, [0])[:1] == [rows] for name in node.output)
    ]
    assert whole == ["ScatterND"] * len(large)


@pytest.mark.parametrize("slot, said", [(1, "rows of another index"), (2, "rows that no gate keeps")])
def test_the_check_finds_rows_that_a_bad_step_would_change(slot: int, said: str) -> None:
    main = Recommender(lambda _: amp.optimizer.Adam(0.01, lazy_mode=True), "mixed").main
    lowered = main.lower(amp.CPUPlace(), feed_shapes=SHAPES)
    check_lowered(main, lowered)
    nodes = lowered.model.graph.node
    made = {name: node for node in nodes for name in node.output}
    written = made[next(port.tensor for port in lowered.updates if port.variable == "table")]
    assert written.op_type == "ScatterND" and written.input[0] == "table", said
    moment = made[next(port.tensor for port in lowered.updates if port.variable == "table_moment1_0")]
    other = next(node for node in nodes if node.op_type == "ScatterND" and node.input[1] != written.input[1])
    written.input[slot] = other.input[1] if slot == 1 else moment.input[2]
    with pytest.raises(StepError, match="state 'table' is written without a gate"):
        check_lowered(main, lowered)


@needs_placement_tool
@pytest.mark.parametrize("mode", ["fp32", "pure"])
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda _: amp.optimizer.Adam(0.01, lazy_mode=True, multi_precision=True),
        lambda _: amp.optimizer.Adam(0.01, multi_precision=True),
        lambda _: amp.optimizer.Adagrad(0.1, row_wise=True, multi_precision=True),
    ],
    ids=["lazy", "whole", "adagrad"],
)
def test_a_sparse_step_lands_on_cuda_and_can_be_captured(optimizer: Any, mode: str, tmp_path: Path) -> None:
    main = Recommender(optimizer, mode).main
    done = place(main.lower(amp.CUDAPlace(0), feed_shapes=SHAPES).model, tmp_path / "step.onnx")
    assert done.status == 0, done.said
