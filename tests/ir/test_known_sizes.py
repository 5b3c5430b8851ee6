"""What is known of a tensor before the run says its size, where its operator does not."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime

import amp_transpiler as amp
from amp_transpiler.ir.infer import Shapes
from amp_transpiler.nn import functional as F
from tests.helpers.converting import faithful, filled

#: The first rows of x, as many as it has columns: the exporter's way to write arange.
RANGE = """<ir_version: 9, opset_import: ["" : 18]> net (float[n,m] x) => (float[k,m] y)
  <int64[1] one = {1}, int64[1] whole = {-1}, int64 first = {0}> {
    s = Shape (x)
    m = Gather (s, one)
    ones = ConstantOfShape <value = int64[1] {1}> (m)
    at = NonZero (ones)
    flat = Reshape (at, whole)
    rows = Gather <axis = 0> (x, flat)
    y = Mul (rows, rows)
  }"""


def test_the_places_of_ones_are_as_many() -> None:
    program = amp.Program.from_onnx(onnx.parser.parse_model(RANGE))
    shapes = Shapes(program, {"x": (7, 3)})
    assert shapes[program.var("at")] == ("int64", (1, 3))
    assert shapes.shape(program.var("y")) == (3, 3)


def test_a_gradient_through_them() -> None:
    program = amp.Program.from_onnx(onnx.parser.parse_model(RANGE))
    x = np.arange(21, dtype=np.float32).reshape(7, 3)
    with amp.program_guard(program, program.startup):
        ((_, gradient),) = amp.append_backward(F.sum(program.var("y")), ["x"])
    (found,) = amp.Executor(threads=1).run(program, feed={"x": x}, fetch_list=[gradient], scope=amp.Scope())
    np.testing.assert_array_equal(found, np.where(np.arange(7)[:, None] < 3, 2 * x, 0))


#: Frames of 16 samples, eight samples apart, and their energies in 4 bands: a transform that names no sides has one.
BANDS = """<ir_version: 10, opset_import: ["" : 17]> net (float[n,m] x) => (float[n,k,4] y)
  <int64 step = {8}, float[16] window, float[9,4] bands> {
    s = STFT (x, step, window)
    e = ReduceSumSquare <axes = [-1], keepdims = 0> (s)
    y = MatMul (e, bands)
  }"""


def test_a_transform_that_names_no_sides_has_one() -> None:
    model = filled(BANDS)
    program = amp.Program.from_onnx(model)
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 64
    assert amp.Program.from_onnx(model).var("s").shape == (None, 7, 9, 2)
    assert Shapes(program, {"x": (3, 64)}).shape(program.var("y")) == (3, 7, 4)
    x = np.random.default_rng(0).standard_normal((3, 64), np.float32)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    amp.Executor().run(program.startup)
    np.testing.assert_allclose(faithful(program, {"x": x})[0], session.run(None, {"x": x})[0], rtol=1e-5)
