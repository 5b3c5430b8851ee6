"""Few fp32 products beside many 16-bit convolutions are computed in float64 on CUDA, so that these get tensor cores."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.nn import functional as F
from amp_transpiler.passes.lowering.cost_estimate import count_kernels
from tests.helpers.placement import needs_placement_tool, place
from tests.passes.test_lowerings_agree import agree

IMAGES = np.random.default_rng(0).normal(size=(2, 3, 24, 24)).astype(np.float32)
PRODUCTS = ("MatMul", "Gemm", "FusedMatMul")


def net(size: int = 24, classes: int = 3, pure: bool = True) -> Any:
    """Convolutions under the guard, and a head outside it."""
    main, startup = amp.Program(), amp.Program()
    main.random_seed = startup.random_seed = 1
    with amp.program_guard(main, startup), amp.unique_name.guard():
        image, label = amp.data("image", [2, 3, size, size], "float32"), amp.data("label", [2, 1], "int64")
        with amp.fp16_guard():
            hidden = amp.nn.conv2d(amp.nn.conv2d(image, 16, 3, act="relu"), 16, 3, stride=2, act="relu")
            pooled = F.mean(hidden, axis=[2, 3])
        scores = amp.nn.fc(amp.nn.fc(pooled, 4, act="tanh"), classes)
        loss = F.mean(F.softmax_with_cross_entropy(scores, label))
        optimizer: Any = amp.optimizer.Momentum(0.1, 0.9, multi_precision=True)
        if pure:
            optimizer = amp.decorate(optimizer, use_pure_fp16=True, init_loss_scaling=128.0)
        optimizer.minimize(loss, startup)
    feeds = {"image": IMAGES[:, :, :size, :size], "label": np.array([[0], [1]], np.int64)}
    return SimpleNamespace(main=main, startup=startup, loss=loss, optimizer=optimizer, feeds=feeds)


def types_of_products(made: Any) -> set[str]:
    """The types of what products read in the step for CUDA."""
    counted = count_kernels("test", made.main, amp.CUDAPlace(0), None, [made.loss])
    return {kernel.dtype for kernel in counted.kernels if kernel.type in PRODUCTS}


def test_a_head_outside_the_guard_is_computed_in_float64() -> None:
    made = net()
    lowered = made.main.lower(amp.CUDAPlace(0), fetch_list=[made.loss])
    onnx.checker.check_model(lowered.model)
    assert types_of_products(made) <= {"float64", "float16"} and "float64" in types_of_products(made)
    assert lowered.tensor_cores
    names = [name for node in lowered.model.graph.node for name in node.output if name]
    assert len(names) == len(set(names)) and len(lowered.origins) <= len(lowered.model.graph.node)
    casts = [
        node for node in lowered.model.graph.node if node.op_type == "Cast" and node.output[0].endswith("/float64")
    ]
    assert len({node.input[0] for node in casts}) == len(casts), "each is cast once"


def test_it_gives_what_the_step_on_cpu_gives() -> None:
    agree(net(), "pure", "cuda", 2e-2, 2e-2, 1e-3)


@needs_placement_tool
def test_it_is_on_cuda_and_can_be_captured(tmp_path: Path) -> None:
    done = place(net().main.lower(amp.CUDAPlace(0)).model, tmp_path / "step.onnx")
    assert done.status == 0, done.said


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({"pure": False}, {"float32"}),  # convolutions in fp32
        ({"classes": 2000}, {"float32", "float16"}),  # much in fp32
        ({"size": 8}, {"float32", "float16"}),  # little in float16
    ],
)
def test_elsewhere_products_stay_fp32(options: dict[str, Any], kinds: set[str]) -> None:
    made = net(**options)
    assert types_of_products(made) <= kinds and "float32" in types_of_products(made)
    assert not made.main.lower(amp.CUDAPlace(0), fetch_list=[made.loss]).tensor_cores


def test_on_cpu_nothing_is_float64() -> None:
    graph = net().main.lower(amp.CPUPlace()).model.graph
    assert not [node for node in graph.node if any(name.endswith("/float64") for name in node.output)]


@pytest.mark.gpu
def test_on_cuda_it_trains_as_on_cpu() -> None:
    losses = []
    for at in (amp.CPUPlace(), amp.CUDAPlace(0)):
        made, scope, exe = net(), amp.Scope(), amp.Executor(at)
        amp.Executor(amp.CPUPlace()).run(made.startup, scope=scope)
        made.optimizer.amp_init(at, scope)
        losses.append([float(exe.run(made.main, made.feeds, [made.loss], scope)[0]) for _ in range(5)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-2)
