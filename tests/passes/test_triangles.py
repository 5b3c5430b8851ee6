"""Triangular systems that were solved row by row are solved by products: the same numbers and slopes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import amp_transpiler as amp
from amp_transpiler.passes.canonicalize.triangles import invert_triangles
from tests.helpers.sessions import run
from tests.helpers.slopes import assert_slope, slope

SIZE = 12
MASKS = ("trilu", "where", "mul")


def unrolled(
    mask: str = "trilu", size: int = SIZE, change: Callable[[onnx.GraphProto], None] | None = None
) -> onnx.ModelProto:
    """What torch exports of the loop of a gated delta net::

    a = -(x.tril(-1))                       # or masked_fill, or a product with a mask
    for i in range(1, size):
        row, sub = a[..., i, :i].clone(), a[..., :i, :i].clone()
        a[..., i, :i] = row + (row.unsqueeze(-1) * sub).sum(-2)
    y = a + torch.eye(size)
    """
    nodes: list[onnx.NodeProto] = []
    held: dict[str, onnx.TensorProto] = {}

    def ints(*numbers: int) -> str:
        name = "i" + "_".join(map(str, numbers))
        held[name] = numpy_helper.from_array(np.array(numbers, np.int64), name)
        return name

    def add(type_: str, *inputs: str, **attrs: object) -> str:
        nodes.append(helper.make_node(type_, inputs, [f"{type_}{len(nodes)}"], **attrs))
        return nodes[-1].output[0]

    def constant(name: str, array: np.ndarray) -> str:
        held[name] = numpy_helper.from_array(array, name)
        return name

    lower = np.tril(np.ones((size, size), bool), -1)
    if mask == "trilu":
        a = add("Trilu", "x", constant("below", np.array(-1)), upper=0)
    elif mask == "where":
        a = add("Where", constant("above", ~lower), constant("nothing", np.zeros((), np.float32)), "x")
    else:
        a = add("Mul", "x", constant("lower", lower.astype(np.float32)))
    a = add("Neg", a)
    for i in range(1, size):
        row = add("Gather", a, constant(f"at{i}", np.array(i)), axis=2)
        head = add("Slice", row, ints(0), ints(i), ints(2), ints(1))
        sub = add("Slice", add("Slice", a, ints(0), ints(i), ints(2), ints(1)), ints(0), ints(i), ints(3), ints(1))
        summed = add("ReduceSum", add("Mul", add("Unsqueeze", head, ints(-1)), sub), ints(-2), keepdims=0)
        new = add("Transpose", add("Add", head, summed), perm=[2, 1, 0])
        places = constant(f"places{i}", np.arange(i)[:, None])
        new = add("ScatterND", add("Transpose", row, perm=[2, 1, 0]), places, new)
        new = add("Unsqueeze", add("Transpose", new, perm=[2, 1, 0]), ints(2))
        a = add("ScatterElements", a, constant(f"rows{i}", np.full((2, 3, 1, size), i)), new, axis=2)
    nodes.append(helper.make_node("Add", [a, constant("eye", np.eye(size, dtype=np.float32))], ["y"]))
    shape = [2, 3, size, size]
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name in "xy")
    graph = helper.make_graph(nodes, "g", [x], [y], list(held.values()))
    if change is not None:
        change(graph)
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 18)])


X = np.random.default_rng(0).normal(size=(2, 3, SIZE, SIZE)).astype(np.float32)


def exact(x: np.ndarray) -> np.ndarray:
    wide = np.tril(x.astype(np.float64), -1)
    return np.linalg.inv(np.eye(x.shape[-1]) + wide)


@pytest.mark.parametrize("mask", MASKS)
def test_the_loop_is_products(mask: str) -> None:
    model = unrolled(mask)
    expected = slope(amp.Program.from_onnx(model), X)
    program = amp.Program.from_onnx(model)
    assert invert_triangles(program) == ["1 inverses of triangular matrices, written out row by row, are products"]
    kinds = [op.type for op in program.operators]
    assert not {"ScatterElements", "ScatterND", "Gather", "Slice"} & {*kinds} and len(kinds) < 20
    np.testing.assert_allclose(run(program.to_onnx(), {"x": X})[0], exact(X), rtol=1e-4, atol=1e-4)
    assert_slope(program, X, expected, 1e-4)


@pytest.mark.parametrize("size", [4, 5, 8, 33])
@pytest.mark.parametrize("kind", ["equal keys", "growing", "small"])
def test_it_is_as_exact_as_the_loop(size: int, kind: str) -> None:
    """Powers of the matrix would cancel out where keys are alike."""
    rng = np.random.default_rng(1)
    x = {
        "equal keys": np.ones((2, 3, size, size)),
        "growing": -np.ones((2, 3, size, size)) + 0.1 * rng.normal(size=(2, 3, size, size)),
        "small": 0.1 * rng.normal(size=(2, 3, size, size)),
    }[kind].astype(np.float32)
    model = unrolled(size=size)
    program = amp.Program.from_onnx(model)
    assert invert_triangles(program)
    right = exact(x)
    ours, loops = (np.linalg.norm(run(m, {"x": x})[0] - right) for m in (program.to_onnx(), model))
    assert ours <= 2 * loops + 2e-7 * np.linalg.norm(right)


def node(graph: onnx.GraphProto, type_: str, last: int = -1) -> onnx.NodeProto:
    return [n for n in graph.node if n.op_type == type_][last]


def attribute(graph: onnx.GraphProto, type_: str, name: str, value: int) -> None:
    (found,) = (a for a in node(graph, type_, 0).attribute if a.name == name)
    found.i = value


OTHERS: dict[str, Callable[[onnx.GraphProto], None]] = {
    "the diagonal is left": lambda g: next(t for t in g.initializer if t.name == "below").CopyFrom(
        numpy_helper.from_array(np.array(0), "below")
    ),
    "the upper half": lambda g: attribute(g, "Trilu", "upper", 1),
    "a row twice": lambda g: next(t for t in g.initializer if t.name == "rows5").CopyFrom(
        numpy_helper.from_array(np.full((2, 3, 1, SIZE), 4), "rows5")
    ),
    "a row of another": lambda g: node(g, "Gather", 4).input.__setitem__(0, node(g, "ScatterElements", 2).output[0]),
    "a difference": lambda g: setattr(node(g, "Add", 4), "op_type", "Sub"),
    "a shorter head": lambda g: node(g, "Slice", 8).input.__setitem__(2, "i2"),
    "a step that others read": lambda g: g.output.append(
        helper.make_tensor_value_info(
            node(g, "ScatterElements", 4).output[0], onnx.TensorProto.FLOAT, [2, 3, SIZE, SIZE]
        )
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_only_looks_like_one_stays(name: str) -> None:
    assert invert_triangles(amp.Program.from_onnx(unrolled(change=OTHERS[name]))) == []


def test_conversion_finds_it() -> None:
    x = 0.2 * X
    converted = amp.convert(unrolled())
    assert "ScatterElements" not in [op.type for op in converted.operators]
    np.testing.assert_allclose(run(converted.to_onnx(), {"x": x})[0], exact(x), rtol=1e-2, atol=2e-3)
    assert "ScatterElements" in [op.type for op in amp.convert(unrolled(), black_varnames=["Add9"]).operators]


def test_training_finds_it() -> None:
    def weigh(graph: onnx.GraphProto) -> None:
        graph.node[-1].output[0] = "h"
        graph.node.append(helper.make_node("MatMul", ["h", "w"], ["y"]))
        graph.initializer.append(numpy_helper.from_array(np.eye(SIZE, dtype=np.float32), "w"))

    program = amp.Program.from_onnx(unrolled(change=weigh))
    assert any("triangular" in note for note in amp.prepare_training(program).notes)
