"""All lowerings mean the same: those with real 16-bit operators, for CUDA and WebGPU, run node by node on the CPU.

Run alone, an fp16 operator of onnxruntime's CPU provider computes in fp32 and rounds its result once, as a GPU does;
so walking such a model node by node shows, without a GPU, that it rounds where the CPU lowering rounds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.passes.lowering.lowering import lower
from tests.helpers.node_by_node import node_by_node
from tests.helpers.ports import fed, taken
from tests.helpers.programs import LAYERS, build
from tests.helpers.random_nets import random_net
from tests.helpers.sessions import session

MODES = ("fp32", "amp", "pure-fp16")
CASES = [(name, mode, "cuda") for name in LAYERS for mode in MODES]
#: Few: training steps share its bodies.
CASES += [("use_case", "pure-fp16", "webgpu"), ("transformer", "amp", "webgpu")]


@pytest.mark.parametrize(("name", "mode", "other"), CASES)
def test_the_lowerings_agree(name: str, mode: str, other: str) -> None:
    # The gradient of a bias before a normalisation is the sum of numbers whose sum is 0: of their roundings.
    # On a GPU they are rounded three times, on the CPU once.
    tolerance, least = (1e-4, 1e-3) if mode == "fp32" else (8e-3, 1e-2)
    agree(build(name, mode, batch=2), mode, other, tolerance, least, 1e-4)


@pytest.mark.parametrize("seed", range(30))
def test_they_agree_on_nets_drawn_at_random(seed: int) -> None:
    for mode in ("fp32", "pure"):
        net = random_net(seed, mode)
        try:
            agree(net, mode, "cuda", *((1e-4, 1e-3) if mode == "fp32" else (4e-2, 2e-2)), 1e-3)
        except Exception as error:
            error.add_note(f"{mode}: {', '.join(net.layers)}")
            raise


def agree(net: Any, mode: str, other: str, tolerance: float, least: float, noisy: float) -> None:
    """Both give the same loss, gradients, masks and new state, up to a ``tolerance`` of a tensor and, for gradients,
    ``least`` of the largest one. Below ``noisy`` of that a parameter's gradient is noise, and its update is not asked."""
    executor, scope = amp.Executor(amp.CPUPlace()), amp.Scope()
    executor.run(net.startup, scope=scope)
    if mode != "fp32":
        net.optimizer.amp_init(amp.CPUPlace(), scope=scope)
    shapes = {k: v.shape for k, v in net.feeds.items()}
    gradients = [v for v in net.main.variables if v.name.endswith("@GRAD") and v.producer is not None]
    masks = [op.outputs[1] for op in net.main.operators if op.type == "Dropout"]
    fetches = [net.loss, *gradients, *(m for m in masks if m is not None)]
    results = []
    for place in ("cpu", other):
        lowered = lower(net.main, place, shapes, fetches)
        values = fed(lowered.states, scope.find_var)
        values |= {p.tensor: net.feeds[p.variable].astype(p.dtype) for p in lowered.feeds}
        values |= {s: np.zeros((), np.float32) for s in lowered.scalars}
        if place == other:
            known = node_by_node(lowered.model, values)
        else:
            running = session(lowered.model)
            names = [o.name for o in running.get_outputs()]
            known = dict(zip(names, running.run(names, values), strict=True)) | values
        results.append(taken([*lowered.fetches, *lowered.updates], known))
    cpu, device = results
    assert cpu.keys() == device.keys()
    floor = max(float(np.abs(cpu[g.name].astype(np.float32)).max()) for g in gradients)
    #: A bias before a normalisation has a gradient of zero; Adam divides its rounding noise by its own size.
    noise = tuple(p.name for p in net.main.parameters if np.abs(cpu[f"{p.name}@GRAD"]).max() < noisy * floor)
    for variable, value in cpu.items():
        found = device[variable]
        assert value.dtype == found.dtype and value.shape == found.shape, variable
        if value.dtype.kind not in "fV":
            assert np.array_equal(value, found), variable
            continue
        if variable.startswith(noise) and not variable.endswith("@GRAD"):
            continue
        a, b = value.astype(np.float64), found.astype(np.float64)
        scale = np.linalg.norm(a) + least * floor * np.sqrt(a.size) * variable.endswith("@GRAD")
        assert np.linalg.norm(a - b) <= tolerance * scale + 1e-6, (variable, np.linalg.norm(a - b) / max(scale, 1e-12))
