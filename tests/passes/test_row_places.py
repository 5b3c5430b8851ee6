"""Places that exporters expand from rows to their elements are lowered as places of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.nn import functional as F
from tests.helpers.sessions import run

#: A layer that adds to each node what its neighbours send, as PyTorch Geometric's is exported.
SENDS = """<ir_version: 8, opset_import: ["" : 18]> g (float[50,64] x, int64[400] there, int64[400,1] here, int64[400,64] each)
  => (float[50,64] y) {
  a = MatMul(x, w)  sent = Gather(a, there)  like = Shape(sent)  expanded = Expand(here, like)
  y = ScatterElements<axis = 0, reduction = "add">(x, expanded, sent) }"""
#: The same where nobody knows of rows.
ELEMENTS = SENDS.replace("(x, expanded", "(x, each")
RNG = np.random.default_rng(0)
HERE, THERE = RNG.integers(-50, 50, (2, 400))  # several times, and from the end
FEED = {
    "x": RNG.normal(size=(50, 64)).astype(np.float32),
    "there": THERE,
    "here": HERE[:, None],
    "each": np.repeat(HERE[:, None], 64, 1),
}


def model(text: str) -> onnx.ModelProto:
    made = onnx.parser.parse_model(text)
    weight = (np.random.default_rng(1).normal(size=(64, 64)) / 8).astype(np.float32)
    made.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    return made


def step(text: str) -> tuple[amp.Program, Any, Any]:
    """A training step, its loss and the gradient of the weight."""
    program = amp.Program.from_onnx(model(text))
    with amp.program_guard(program, program.startup), amp.unique_name.guard():
        loss = F.mean(program.outputs[0] * program.outputs[0])
        _, ((_, gradient),) = amp.optimizer.SGD(0.1).minimize(loss)
    return program, loss, gradient


@pytest.mark.parametrize("axis", ["0", "-2"])
@pytest.mark.parametrize("place", [amp.CPUPlace(), amp.CUDAPlace(0), amp.WebGPUPlace(0)], ids=lambda place: place.kind)
def test_rows_are_added_as_rows(place: Any, axis: str) -> None:
    source = model(SENDS.replace("axis = 0", f"axis = {axis}"))
    lowered = amp.Program.from_onnx(source).lower(place)
    states = {port.tensor: onnx.numpy_helper.to_array(source.graph.initializer[0]) for port in lowered.states}
    feeds = {port.tensor: FEED[port.variable].astype(port.dtype) for port in lowered.feeds}
    zeros = dict.fromkeys(lowered.scalars, np.zeros((), np.float32))
    (found,) = run(lowered.model, {**feeds, **states, **zeros})
    np.testing.assert_allclose(found, run(source, FEED)[0], rtol=1e-5, atol=1e-5)


def test_gradients_are_those_of_elements() -> None:
    found = []
    for text in (SENDS, ELEMENTS):
        program, loss, gradient = step(text)
        scope, exe = amp.Scope(), amp.Executor(threads=1)
        exe.run(program.startup, scope=scope)
        found.append(exe.run(program, FEED, [loss, gradient], scope=scope))
    for rows, elements in zip(*found, strict=True):
        np.testing.assert_allclose(rows, elements, rtol=1e-5, atol=1e-6)


def test_a_step_on_cuda_moves_less() -> None:
    """Places of 64 bits, for each element, were two fifths of its bytes."""
    rows, elements = (
        program.cost_estimate(amp.CUDAPlace(0), fetch_list=[loss]).bytes_by_type
        for program, loss, _ in map(step, (SENDS, ELEMENTS))
    )
    places = 400 * 64
    assert elements["int64"] >= 2 * 8 * places  # into the sum, and back from it
    assert rows["int64"] < 8 * places and rows["int32"] - elements["int32"] < 2.1 * 4 * places


@pytest.mark.parametrize(
    "change",
    [
        ("float[50,64] x", "float[50,65] x"),
        ("int64[400,1] here", "int64[1,1] here"),
        ("int64[400,1] here", "int64[1,64] here"),
        ("axis = 0", "axis = 1"),
        ('reduction = "add"', 'reduction = "none"'),
    ],
    ids=["parts of rows", "one place for all", "places of columns", "columns", "no sum"],
)
def test_other_places_stay(change: tuple[str, str]) -> None:
    """What is sent are rows of the weight, and x may be wider."""
    text = SENDS.replace("a = MatMul(x, w)  sent = Gather(a, there)", "sent = Gather(w, there)").replace(*change)
    source = model(text)
    lowered = amp.Program.from_onnx(source).lower(amp.CPUPlace()).model
    assert "ScatterElements" in {node.op_type for node in lowered.graph.node}
