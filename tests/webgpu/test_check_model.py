"""The operator that ``amp.check_model`` names is the one at which the device first leaves fp32 on CPU."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

import amp_transpiler as amp
from amp_transpiler.conversion.calibration.measure import Runner
from amp_transpiler.ir.weights import become_constants
from amp_transpiler.passes.lowering.arithmetic import Arithmetic
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


NET = """m (float16[2,4,9,9] x) => (float16[n,k] y) <float16[8,4,3,3] k, float16[8] s, float16[8] b, float16[8] m,
  float16[8] v, float16[8,10] w, float16[10] o, int64[1] last = {-1}, int64 axis = {1}> {
    a = Conv<pads=[1, 1, 1, 1]>(x, k)  c = Abs(v)  d = BatchNormalization(a, s, b, m, c)  e = HardSwish(d)
    f = InstanceNormalization(e, s, b)  g = Elu(f)  h = AveragePool<kernel_shape=[3, 3]>(g)  i = Softplus(h)
    j = GlobalAveragePool(i)  l = Flatten(j)  n = Gemm(l, w, o)  p = LogSoftmax(n)  q = CumSum<reverse=1>(p, axis)
    r = Einsum<equation="ij,kj->ik">(q, w)  t = LeakyRelu(r)  u = ReduceMean(t)  y = Div(t, u) }"""


def test_all_tensors_of_a_net_are_replayed_with_the_bits_of_the_device() -> None:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]>\n{NET}')
    random = np.random.default_rng(0)
    for value in model.graph.value_info:
        array = random.standard_normal([d.dim_value for d in value.type.tensor_type.shape.dim]).astype(np.float16)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, value.name))
    del model.graph.value_info[:]
    feeds = {"x": random.standard_normal((2, 4, 9, 9)).astype(np.float16)}
    device = session(with_all_outputs(model))
    names = [value.name for value in device.get_outputs()]
    program = amp.Program.from_onnx(model)
    become_constants(program)
    replayed = Runner(program, names, arithmetic=Arithmetic("webgpu", widens=False)).run(feeds)
    assert len(names) == 17
    for name, got, wanted in zip(names, replayed, device.run(None, feeds), strict=True):
        np.testing.assert_array_equal(got, wanted, err_msg=name)
