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
    twin = amp.Program.from_onnx(model)
    widen(twin)
    wide = onnxruntime.InferenceSession(
        with_all_outputs(twin.to_onnx()).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    device = session(with_all_outputs(model))
    exact = dict(zip([v.name for v in wide.get_outputs()], wide.run(None, feeds), strict=True))
    got = dict(zip([v.name for v in device.get_outputs()], device.run(None, feeds), strict=True))

    def off(name: str) -> bool:
        wanted = exact[f"{name}.fp32" if f"{name}.fp32" in exact else name].astype(np.float64)
        with np.errstate(invalid="ignore"):
            return not np.linalg.norm(got[name].astype(np.float64) - wanted) <= tolerance * np.linalg.norm(wanted)

    if not any(off(value.name) for value in model.graph.output):
        return ""
    # a cast of the file has no tensor of its own in fp32
    names = [
        (node, name) for node in model.graph.node for name in node.output if name in exact or f"{name}.fp32" in exact
    ]
    return next(node.op_type for node, name in names if off(name))


@pytest.mark.parametrize("case", [name for name in CASES if name != "cast"])
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
