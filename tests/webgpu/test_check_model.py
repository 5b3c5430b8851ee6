"""The operator that ``amp.check_model`` names is the one at which the device first leaves fp32 on CPU."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

import amp_transpiler as amp
from amp_transpiler.passes.precision.widen import widen
from tests.corpora.leaving import CASES
from tests.helpers.webgpu_sessions import session

pytestmark = pytest.mark.webgpu


def with_all_outputs(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with every tensor that a node makes among its outputs."""
    found = onnx.shape_inference.infer_shapes(model)
    known = {value.name for value in found.graph.output}
    found.graph.output.extend(value for value in found.graph.value_info if value.name not in known)
    return found


def first_off(case: str, tolerance: float = 0.01) -> str:
    """The type of the first node of which the device's result is off; "" where the model's outputs are not."""
    model, feeds = CASES[case].model(), CASES[case].sample()
    twin, moved = amp.Program.from_onnx(model), dict[str, str]()
    widen(twin, moved)
    wide = onnxruntime.InferenceSession(
        with_all_outputs(twin.to_onnx()).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    device = session(with_all_outputs(model))
    exact = dict(zip([v.name for v in wide.get_outputs()], wide.run(None, feeds), strict=True))
    got = dict(zip([v.name for v in device.get_outputs()], device.run(None, feeds), strict=True))

    def off(name: str) -> bool:
        origin = name
        while origin in moved:
            origin = moved[origin]
        wanted = (exact[origin] if origin in exact else feeds[origin]).astype(np.float64)
        with np.errstate(invalid="ignore"):
            return not np.linalg.norm(got[name].astype(np.float64) - wanted) <= tolerance * np.linalg.norm(wanted)

    if not any(off(value.name) for value in model.graph.output):
        return ""
    # what is off may do no harm: on the way to an output that is off, through nothing but what is off
    wanted, first = {value.name for value in model.graph.output if off(value.name)}, ""
    for node in reversed(model.graph.node):
        if not wanted.isdisjoint(node.output):
            first = node.op_type
            wanted |= {name for name in node.input if name in got and off(name)}
    return first


# of "divisor" the replay names what makes zeros, before they divide
@pytest.mark.parametrize("case", [name for name in CASES if name != "divisor"])
def test_the_device_leaves_where_the_replay_does(case: str) -> None:
    named = amp.check_model(CASES[case].model(), "webgpu", data=CASES[case].sample()).leaving
    assert first_off(case) == (named.type if named is not None else "")


@pytest.mark.parametrize("case", ["sums", "mean", "norm"])
def test_outputs_are_as_far_off_as_the_replay_says(case: str) -> None:
    model, feeds = CASES[case].model(), CASES[case].sample()
    said = amp.check_model(model, "webgpu", data=feeds).outputs["y"]
    twin = amp.Program.from_onnx(model)
    widen(twin)
    (wanted,) = onnxruntime.InferenceSession(
        twin.to_onnx().SerializeToString(), providers=["CPUExecutionProvider"]
    ).run(None, feeds)
    (got,) = session(model).run(None, feeds)
    found = np.linalg.norm(got.astype(np.float64) - wanted.astype(np.float64)) / np.linalg.norm(
        wanted.astype(np.float64)
    )
    assert found == pytest.approx(said, rel=0.02) or (np.isinf(said) and not np.isfinite(found))
