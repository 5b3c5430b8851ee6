"""Sums of gradients that the product of one of them adds in."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.nn import functional as F
from amp_transpiler.passes.lowering.lowering import lower
from tests.helpers.sessions import run

X = np.random.default_rng(0).normal(size=(2, 8, 6, 6)).astype(np.float32)


def block(kernel: int = 1, stride: int = 1, groups: int = 1) -> tuple[amp.Program, amp.Program, amp.Variable]:
    """A residual block whose first convolution is of this kind, behind one that makes what goes around it."""
    main, startup = amp.Program("block"), amp.Program("startup")
    main.random_seed = startup.random_seed = 5
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x = amp.nn.batch_norm(amp.nn.conv2d(amp.data("x", X.shape), 8, 1), act="relu")
        h = amp.nn.batch_norm(
            amp.nn.conv2d(x, 8, kernel, stride=stride, padding=kernel // 2, groups=groups), act="relu"
        )
        h = F.mean(h * h) if stride > 1 else h + x
        loss = F.mean(h * h) + (F.mean(x * x) if stride > 1 else 0)
        amp.optimizer.SGD(0.1).minimize(loss, startup)
    return main, startup, loss


def sums(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == "Gemm" and len(node.input) == 3 and node.input[2]]


@pytest.mark.parametrize(
    ("settings", "inside"),
    [({}, True), ({"kernel": 3}, False), ({"stride": 2}, True), ({"groups": 2}, False)],
    ids=["pointwise", "3x3", "strided", "groups"],
)
def test_a_pointwise_convolution_adds_what_goes_around_it(settings: dict[str, int], inside: bool) -> None:
    main, _, loss = block(**settings)
    shapes = {"x": X.shape}
    of_gradients = [node for node in sums(main.lower(amp.CUDAPlace(0), shapes, [loss]).model) if "GRAD" in node.name]
    assert bool(of_gradients) == inside
    assert not [node for node in sums(main.lower(amp.CPUPlace(), shapes, [loss]).model) if "GRAD" in node.name]


@pytest.mark.parametrize("settings", [{}, {"kernel": 3}, {"stride": 2}, {"groups": 2}])
def test_the_sum_is_right(settings: dict[str, int]) -> None:
    """Gradients of the program for CUDA, run on CPU, are those of the program for CPU."""
    main, startup, loss = block(**settings)
    scope = amp.Scope()
    amp.Executor(threads=1).run(startup, scope=scope)
    wanted = [loss, *(v for v in main.variables if v.name.endswith("w_0@GRAD"))]
    assert len(wanted) == 5
    found = []
    for place in ("cpu", "cuda"):
        lowered = lower(main, place, {"x": X.shape}, wanted, updates=False)
        feeds = {"x": X} | {port.tensor: scope.find_var(port.variable) for port in lowered.states}
        feeds |= {name: np.zeros((), np.float32) for name in lowered.scalars}
        results = run(lowered.model, feeds)
        found.append(dict(zip([info.name for info in lowered.model.graph.output], results, strict=True)))
    for name, value in found[0].items():
        np.testing.assert_allclose(found[1][name], value, rtol=1e-4, atol=1e-5, err_msg=name)
