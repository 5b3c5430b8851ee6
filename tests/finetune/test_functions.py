"""Models whose weights lie in functions of their own, as jax2onnx writes modules, train."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.nn import functional as F

#: The function imports its domain at the opset of ai.onnx, and the model at 1.
MODULE = """<ir_version: 8, opset_import: ["" : 17, "module" : 1]>
net (float[2,4] x) => (float[2,4] y) { h = module.Dense(x) y = Tanh(h) }
<domain: "module", opset_import: ["" : 17, "module" : 17]>
Dense (p) => (q) {
  w = Constant <value = float[4,4] {1, 0.5, -0.5, 0.2, 0.1, 1.5, -1, 0.3, 0.7, -0.2, 0.4, 0.6, -0.9, 0.8, 0.25, -0.3}> ()
  q = MatMul(p, w)
}"""


def test_weights_in_functions_are_trained() -> None:
    program = amp.Program.from_onnx(onnx.parser.parse_model(MODULE))
    told = amp.prepare_training(program)
    assert len(told.trainable) == 1 and "the model's functions are inlined" in told.notes
    with amp.program_guard(program, program.startup), amp.unique_name.guard():
        loss = F.mean(program.outputs[0] * program.outputs[0])
        amp.optimizer.SGD(0.1).minimize(loss)
    scope, executor = amp.Scope(), amp.Executor(threads=1)
    executor.run(program.startup, scope=scope)
    feed = {"x": np.random.default_rng(1).normal(size=(2, 4)).astype(np.float32)}
    fetched = [executor.run(program, feed=feed, fetch_list=[loss, "y"], scope=scope) for _ in range(5)]
    losses = [float(np.ravel(value)[0]) for value, _ in fetched]
    weight = np.array(onnx.numpy_helper.to_array(onnx.parser.parse_model(MODULE).functions[0].node[0].attribute[0].t))
    np.testing.assert_allclose(fetched[0][1], np.tanh(feed["x"] @ weight), rtol=1e-5)
    assert losses[-1] < 0.95 * losses[0]


def test_a_refused_preparation_leaves_functions_as_they_were() -> None:
    model = onnx.parser.parse_model(MODULE)
    program = amp.Program.from_onnx(model)
    with pytest.raises(amp.AmpError, match="left to train"):
        amp.prepare_training(program, trainable=[], freeze=[])
    assert program.to_onnx() == model
