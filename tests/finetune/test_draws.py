"""What an imported model draws at random: in training it follows from seed and step, whatever runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.finetune.prepare import Preparation
from amp_transpiler.nn import functional as F
from tests.helpers.runners import bare, batches

DRAWS = {
    "RandomNormal": "RandomNormal<shape=[64,64], mean=1.0, scale=3.0>()",
    "RandomNormalLike": "RandomNormalLike(h)",
    "RandomUniform": "RandomUniform<shape=[64,64], low=2.0, high=5.0>()",
    "RandomUniformLike": "RandomUniformLike(h)",
    "Bernoulli": "Bernoulli(chance)",
}
#: Mean and variance of each.
MOMENTS = {
    "RandomNormal": (1, 9),
    "RandomNormalLike": (0, 1),
    "RandomUniform": (3.5, 0.75),
    "RandomUniformLike": (0.5, 1 / 12),
    "Bernoulli": (0.25, 0.1875),
}
FEED = {"x": np.random.default_rng(1).standard_normal((64, 8)).astype(np.float32)}


class Net:
    """A layer whose outputs are multiplied by what is drawn, with a step of SGD."""

    def __init__(self, draw: str, mode: str = "fp32", before: str = "") -> None:
        text = f"""<ir_version: 8, opset_import: ["" : 17]> net (float[64,8] x) => (float[64,64] y)
            <float[8,64] w> {{ h = MatMul(x, w) q = Constant<value_float=0.25>() s = Shape(h) chance = Expand(q, s)
            {before} r = {draw} y = Mul(h, r) }}"""
        model = onnx.parser.parse_model(text)
        weight = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
        self.main, self.mode = amp.Program.from_onnx(model), mode
        self.report: Preparation = amp.prepare_training(self.main)
        self.optimizer: Any = amp.optimizer.SGD(0.01, multi_precision=mode == "pure")
        if mode != "fp32":
            self.optimizer = amp.decorate(self.optimizer, use_pure_fp16=True, use_fp16_guard=False)
        with amp.program_guard(self.main, self.main.startup), amp.unique_name.guard():
            self.loss = F.mean(self.main.outputs[0] * self.main.outputs[0])
            self.test = self.main.clone(for_test=True)
            self.optimizer.minimize(self.loss)
        self.exe, self.scope = amp.Executor(threads=1), amp.Scope()
        self.exe.run(self.main.startup, scope=self.scope)
        if mode != "fp32":
            self.optimizer.amp_init(amp.CPUPlace(), scope=self.scope)

    def steps(self, count: int) -> list[np.ndarray]:
        return [self.exe.run(self.main, FEED, ["r"], scope=self.scope)[0] for _ in range(count)]


@pytest.mark.parametrize("name", DRAWS)
def test_a_training_repeats_what_it_draws(name: str) -> None:
    first, again = Net(DRAWS[name], "pure").steps(2), Net(DRAWS[name]).steps(2)
    for drawn, same in zip(first, again, strict=True):
        np.testing.assert_array_equal(drawn, same)
    mean, variance = MOMENTS[name]
    assert not np.array_equal(*first)
    for drawn in first:  # 4096 numbers: within four standard errors
        assert abs(drawn.mean() - mean) < 4 * np.sqrt(variance / drawn.size)
        assert abs(drawn.var() - variance) < 4 * variance * np.sqrt(2 / drawn.size)


def test_a_resumed_training_goes_on_as_it_would_have(tmp_path: Path) -> None:
    whole, part, rest = (Net(DRAWS["RandomNormalLike"]) for _ in range(3))
    expected = whole.steps(4)[2:]
    part.steps(2)
    amp.save_checkpoint(tmp_path, part.main, part.scope)
    amp.load_checkpoint(tmp_path, rest.main, rest.scope)
    np.testing.assert_array_equal(rest.steps(2), expected)
    np.testing.assert_array_equal(rest.scope.find_var("w"), whole.scope.find_var("w"))


def test_an_exported_step_draws_the_same(tmp_path: Path) -> None:
    net = Net(DRAWS["RandomNormalLike"])
    step = net.main.export_training(tmp_path / "step", amp.CPUPlace(), {"x": (64, 8)}, scope=net.scope)
    told = bare(step, batches(tmp_path / "data", [FEED] * 3), 3, tmp_path / "end")
    losses = [net.exe.run(net.main, FEED, [net.loss], scope=net.scope)[0].item() for _ in range(3)]
    np.testing.assert_allclose([each[net.loss.name] for each in told], losses, rtol=1e-7)


@pytest.mark.parametrize("place", [amp.CUDAPlace(0), amp.WebGPUPlace(0)], ids=lambda place: place.kind)
@pytest.mark.parametrize("name", DRAWS)
def test_no_place_needs_a_kernel_of_it(name: str, place: Any) -> None:
    net = Net(DRAWS[name], "pure")
    assert name in {op.type for op in net.main.operators}
    nodes = {node.op_type for node in net.main.lower(place, {"x": (64, 8)}).model.graph.node}
    assert not nodes.intersection(DRAWS)


def test_evaluation_draws_from_the_runtime() -> None:
    net = Net(DRAWS["RandomNormalLike"])
    nodes = [node.op_type for node in net.test.lower(amp.CPUPlace(), {"x": (64, 8)}).model.graph.node]
    assert nodes.count("RandomNormalLike") == 1


def test_what_a_nested_graph_draws_is_the_runtimes_and_told() -> None:
    """Every turn of a loop would draw the same."""
    draw = """If(late) <then_branch = then () => (float[64,64] a) { a = RandomNormalLike(h) },
                        else_branch = other () => (float[64,64] b) { b = Identity(h) }>"""
    net = Net(draw, before="z = ReduceSum<keepdims=0>(x) f = Sub(z, z) late = Cast<to=9>(f)")
    assert any("(RandomNormalLike) draws from onnxruntime" in note for note in net.report.notes)
    assert np.isfinite(net.steps(1)).all()
