"""What is known of a tensor before the run says its size, where its operator does not."""

from __future__ import annotations

import numpy as np
import onnx

import amp_transpiler as amp
from amp_transpiler.ir.infer import Shapes
from amp_transpiler.nn import functional as F

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
