"""Rotary positions as onnxruntime's operator: its gradient, and what it stands for, in all its forms."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.ir.decompose import decompose, decompose_operator
from amp_transpiler.nn import functional as F
from tests.corpora.fused_operators import MS, of_one
from tests.helpers.gradcheck import check_gradient

pytestmark = pytest.mark.rules
TYPE = "RotaryEmbedding"
#: Shape of X, positions, sizes of the tables, attributes.
FORMS: dict[str, tuple[tuple[int, ...], Any, tuple[int, int], dict[str, int]]] = {
    "heads before places": ((2, 3, 5, 8), [0], (5, 4), {}),
    "from a later place on": ((2, 3, 5, 8), [2], (9, 4), {}),
    "a place of each": ((2, 3, 5, 8), [[3, 1, 4, 1, 5], [0, 2, 6, 5, 3]], (7, 4), {}),
    "heads behind places": ((2, 5, 24), [0], (5, 4), {}),
    "heads behind places, counted": ((2, 5, 24), [0], (5, 4), {"num_heads": 3}),
    "neighbours": ((2, 3, 5, 8), [0], (5, 4), {"interleaved": 1}),
    "a part of the heads": ((2, 5, 24), [0], (5, 2), {"num_heads": 3, "rotary_embedding_dim": 4}),
}


def inputs(name: str) -> list[np.ndarray]:
    shape, positions, sizes, _ = FORMS[name]
    random = np.random.default_rng(0)
    x, angles = random.normal(size=shape), random.normal(size=sizes)
    return [
        a.astype(np.float32) if a.dtype.kind == "f" else a
        for a in (x, np.array(positions), np.cos(angles), np.sin(angles))
    ]


@pytest.mark.parametrize("name", FORMS)
def test_gradient(name: str) -> None:
    check_gradient(TYPE, inputs(name), attrs=FORMS[name][3], domain=MS, wrt=(0,))


@pytest.mark.parametrize("name", FORMS)
def test_what_it_stands_for(name: str) -> None:
    """Written out in operators of ONNX it gives what onnxruntime gives."""
    arrays = inputs(name)
    program = amp.Program.from_onnx(of_one(TYPE, arrays, FORMS[name][3], "1", MS, False))
    feeds = {f"x{i}": a for i, a in enumerate(arrays)}
    executor, scope = amp.Executor(amp.CPUPlace()), amp.Scope()
    (whole,) = executor.run(program, feeds, [program.outputs[0]], scope)
    assert not decompose(program)
    decompose_operator(program.operators[0])
    assert not any(op.domain for op in program.operators)
    (written,) = executor.run(program, feeds, [program.outputs[0]], scope)
    np.testing.assert_allclose(written, whole, atol=1e-6)


def test_trained_angles_have_a_gradient_too() -> None:
    """By what the operator stands for."""
    arrays = inputs("heads before places")
    model = of_one(TYPE, arrays, {}, "1", MS, False)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, f"x{i}") for i, a in enumerate(arrays) if i)
    del model.graph.input[1:]
    program = amp.Program.from_onnx(model)
    amp.prepare_training(program, trainable=["x2", "x3"])
    with amp.program_guard(program, program.startup):
        y = program.outputs[0]
        pairs = amp.append_backward(F.sum(y * y))
    assert {parameter.name for parameter, _ in pairs} == {"x2", "x3"}
    executor, scope = amp.Executor(amp.CPUPlace()), amp.Scope()
    executor.run(program.startup, scope=scope)
    dcos, dsin = executor.run(program, {"x0": arrays[0]}, [gradient for _, gradient in pairs], scope)
    squares = (np.split(arrays[0], 2, -1)[0] ** 2 + np.split(arrays[0], 2, -1)[1] ** 2).sum((0, 1))
    for found, table in ((dcos, arrays[2]), (dsin, arrays[3])):
        np.testing.assert_allclose(found, 2 * table * squares, rtol=1e-4, atol=1e-4)
