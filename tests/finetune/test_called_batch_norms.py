"""A batch norm that is called several times trains in each call, and its running statistics go on from call to call."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import ArgumentError
from amp_transpiler.nn import functional as F

CALLS, EPSILON = 3, 1e-5
BODY = (
    "h{i} = MatMul (x{i}, a) n{i} = BatchNormalization (h{i}, s, b, m, v) t{i} = Tanh (n{i}) x{j} = Add (x{i}, t{i}) "
)


@pytest.mark.parametrize("fresh", [True, False])
def test_each_call_takes_its_batch(fresh: bool) -> None:
    rng = np.random.default_rng(0)
    body = "".join(BODY.format(i=i, j=i + 1) for i in range(CALLS))
    model = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["" : 17]> net (float[8,4] x0) => (float[8,4] x{CALLS}) {{ {body} }}'
    )
    held = {"a": rng.normal(size=(4, 4)), "s": np.ones(4), "b": np.zeros(4), "m": np.zeros(4), "v": np.ones(4)}
    held = {n: (a if fresh or n == "a" else a + rng.random(4)).astype(np.float32) for n, a in held.items()}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in held.items())
    program = amp.Program.from_onnx(model)
    told = amp.prepare_training(program)
    assert f"{CALLS} BatchNormalization train with the statistics of the batch" in told.notes
    assert set(told.trainable) == {"a", "s", "b"}
    test = program.clone(for_test=True)
    with amp.program_guard(program, program.startup), amp.unique_name.guard():
        amp.optimizer.SGD(0.0).minimize(F.mean(program.outputs[0]))
    exe, scope, x = amp.Executor(amp.CPUPlace(), threads=1), amp.Scope(), rng.normal(size=(8, 4)).astype(np.float32)
    exe.run(program.startup, scope=scope)
    (batch,) = exe.run(program, {"x0": x}, [program.outputs[0]], scope)
    mean, variance = (held[name].astype(np.float64) for name in "mv")

    def layer(x: np.ndarray, mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
        return x + np.tanh((x @ held["a"] - mean) / np.sqrt(variance + EPSILON) * held["s"] + held["b"])

    y = x.astype(np.float64)
    for _ in range(CALLS):
        h = y @ held["a"]
        mean, variance = 0.9 * mean + 0.1 * h.mean(0), 0.9 * variance + 0.1 * h.var(0)
        y = layer(y, h.mean(0), h.var(0))
    np.testing.assert_allclose(batch, y, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(scope.find_var("m"), mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(scope.find_var("v"), variance, rtol=1e-5)
    y = x.astype(np.float64)
    for _ in range(CALLS):
        y = layer(y, mean, variance)
    np.testing.assert_allclose(exe.run(test, {"x0": x}, [test.outputs[0]], scope)[0], y, rtol=1e-4, atol=1e-5)


def test_norms_of_a_frozen_body_evaluate_beside_those_of_a_head_that_train() -> None:
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["" : 17]> net (float[8,4] x) => (float[8,4] y) {
            n = BatchNormalization (x, bs, bb, bm, bv)  t = Tanh (n)  y = BatchNormalization (t, hs, hb, hm, hv) }"""
    )
    names = {f"{one}{kind}": f"{module}.{kind}" for one, module in (("b", "body"), ("h", "head")) for kind in "sbmv"}
    for node in model.graph.node:
        node.input[1:] = [names.get(name, name) for name in node.input[1:]]
    held = {name: (rng.random(4) + 0.5).astype(np.float32) for name in names.values()}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in held.items())
    with pytest.raises(ArgumentError, match="batch_norm: pattern 'tail.*' matches no BatchNormalization of program"):
        amp.prepare_training(amp.Program.from_onnx(model), batch_norm={"tail.*": "frozen"})
    bare = amp.Program.from_onnx(
        onnx.parser.parse_model(
            '<ir_version: 9, opset_import: ["" : 17]> '
            "net (float[8,4] x) => (float[8,4] y) <float[4,4] w = {1,2,3,4,5,6,7,8,9,8,7,6,5,4,3,2}> { y = MatMul (x, w) }"
        )
    )
    with pytest.raises(ArgumentError, match="'tail.*' matches no BatchNormalization of program 'net'; there is none"):
        amp.prepare_training(bare, batch_norm={"*": "train", "tail.*": "frozen"})
    with pytest.raises(ArgumentError, match=r"batch_norm of 'body.\*'.*'evaluate'"):
        amp.prepare_training(amp.Program.from_onnx(model), batch_norm={"body.*": "evaluate"})
    program = amp.Program.from_onnx(model)
    told = amp.prepare_training(program, freeze=["body.*"], batch_norm={"*": "train", "body.*": "frozen"})
    assert "1 BatchNormalization train with the statistics of the batch" in told.notes
    with amp.program_guard(program, program.startup), amp.unique_name.guard():
        amp.optimizer.SGD(0.0).minimize(F.mean(program.outputs[0]))
    exe, scope, x = amp.Executor(amp.CPUPlace(), threads=1), amp.Scope(), rng.normal(size=(8, 4)).astype(np.float32)
    exe.run(program.startup, scope=scope)
    (found,) = exe.run(program, {"x": x}, [program.outputs[0]], scope)
    kept = {name: a.astype(np.float64) for name, a in held.items()}
    t = np.tanh((x - kept["body.m"]) / np.sqrt(kept["body.v"] + EPSILON) * kept["body.s"] + kept["body.b"])
    y = (t - t.mean(0)) / np.sqrt(t.var(0) + EPSILON) * kept["head.s"] + kept["head.b"]
    np.testing.assert_allclose(found, y, rtol=1e-4, atol=1e-5)
    assert np.array_equal(scope.find_var("body.m"), held["body.m"])
    np.testing.assert_allclose(scope.find_var("head.m"), 0.9 * kept["head.m"] + 0.1 * t.mean(0), rtol=1e-5)
