"""Sums of gradients that the product of one of them adds in."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.nn import functional as F
from amp_transpiler.passes.lowering.lowering import lower
from tests.helpers.sessions import run
from tests.passes.test_lowerings_agree import agree

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


PLACES, WIDTH = 400, 8
IDS = np.array([[3, 7, 3, 3, 0, 399], [7, -1, 11, 3, -400, 5]], np.int64)


def tied(mode: str) -> SimpleNamespace:
    """A table that is looked up, and multiplied with at the end."""
    main, startup = amp.Program("tied"), amp.Program("startup")
    main.random_seed = startup.random_seed = 5
    with amp.program_guard(main, startup), amp.unique_name.guard():
        ids = amp.data("ids", [None, 6], "int64")
        table = amp.create_parameter([PLACES, WIDTH], "float32", name="table")
        rows = F.gather(table, F.reshape(ids, [-1]))
        scores = F.matmul(F.tanh(amp.nn.fc(rows, WIDTH)), table, transpose_y=True)
        loss = F.mean(F.cast(scores * scores, "float32"))
        optimizer = amp.optimizer.Momentum(0.1, 0.9, multi_precision=mode != "fp32")
        if mode != "fp32":
            dtype = "bfloat16" if mode == "bf16" else "float16"
            optimizer = amp.decorate(optimizer, use_pure_fp16=mode != "mixed", use_fp16_guard=False, dtype=dtype)
        optimizer.minimize(loss, startup)
    return SimpleNamespace(main=main, startup=startup, loss=loss, optimizer=optimizer, feeds={"ids": IDS})


@pytest.mark.parametrize("mode", ["fp32", "mixed", "pure", "bf16"])
def test_rows_of_a_table_are_added_to_its_other_gradient(mode: str) -> None:
    """Also where tokens are the same, and counted from the end: no zeros of all others are made on CUDA."""
    net = tied(mode)
    lowered = lower(net.main, "cuda", {"ids": IDS.shape}, [net.loss])
    scatters = [node for node in lowered.model.graph.node if node.op_type == "ScatterND"]
    makers = {name: node.op_type for node in lowered.model.graph.node for name in node.output}
    assert [makers[node.input[0]] for node in scatters] == ["Cast" if mode == "mixed" else "Gemm"]
    if mode != "bf16":  # which onnxruntime's kernels on CPU do not take
        tolerance = 1e-5 if mode == "fp32" else 4e-3
        agree(net, mode, "cuda", tolerance, tolerance, 1e-3)


def test_many_tokens_are_added_to_zeros_first() -> None:
    """Telling which of them meet would take more than the table."""
    net = tied("pure")
    kinds = [n.op_type for n in lower(net.main, "cuda", {"ids": (200, 6)}, [net.loss]).model.graph.node]
    assert "Mod" not in kinds and kinds.count("ScatterND") == 1
