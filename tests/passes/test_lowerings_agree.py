"""Both lowerings mean the same: the CUDA one, with real 16-bit operators, run node by node on the CPU.

Run alone, an fp16 operator of onnxruntime's CPU provider computes in fp32 and rounds its result once, as a GPU does;
so walking the CUDA model node by node shows, without a GPU, that it rounds where the CPU lowering rounds.
"""

from __future__ import annotations

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.passes.lowering.lowering import lower
from tests.helpers.node_by_node import node_by_node
from tests.helpers.ports import fed, taken
from tests.helpers.programs import LAYERS, build
from tests.helpers.sessions import session


@pytest.mark.parametrize("mode", ["fp32", "amp", "pure-fp16"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_lowerings_agree(name: str, mode: str) -> None:
    net = build(name, mode, batch=2)
    executor, scope = amp.Executor(amp.CPUPlace()), amp.Scope()
    executor.run(net.startup, scope=scope)
    if mode != "fp32":
        net.optimizer.amp_init(amp.CPUPlace(), scope=scope)
    shapes = {k: v.shape for k, v in net.feeds.items()}
    gradients = [v for v in net.main.variables if v.name.endswith("@GRAD") and v.producer is not None]
    masks = [op.outputs[1] for op in net.main.operators if op.type == "Dropout"]
    fetches = [net.loss, *gradients, *(m for m in masks if m is not None)]
    results = []
    for place in ("cpu", "cuda"):
        lowered = lower(net.main, place, shapes, fetches)
        values = fed(lowered.states, scope.find_var)
        values |= {p.tensor: net.feeds[p.variable] for p in lowered.feeds}
        values |= {s: np.zeros((), np.float32) for s in lowered.scalars}
        if place == "cuda":
            known = node_by_node(lowered.model, values)
        else:
            running = session(lowered.model)
            names = [o.name for o in running.get_outputs()]
            known = dict(zip(names, running.run(names, values), strict=True)) | values
        results.append(taken([*lowered.fetches, *lowered.updates], known))
    cpu, cuda = results
    assert cpu.keys() == cuda.keys()
    floor = max(float(np.abs(cpu[g.name].astype(np.float32)).max()) for g in gradients)
    #: A bias before a normalisation has a gradient of zero; Adam divides its rounding noise by its own size.
    noise = tuple(p.name for p in net.main.parameters if np.abs(cpu[f"{p.name}@GRAD"]).max() < 1e-4 * floor)
    for variable, value in cpu.items():
        other = cuda[variable]
        assert value.dtype == other.dtype and value.shape == other.shape, variable
        if value.dtype.kind not in "fV":
            assert np.array_equal(value, other), variable
            continue
        if variable.startswith(noise) and not variable.endswith("@GRAD"):
            continue
        a, b = value.astype(np.float64), other.astype(np.float64)
        # The gradient of a bias before a normalisation is the sum of numbers whose sum is 0: of their roundings.
        tolerance, least = (1e-4, 1e-3) if mode == "fp32" else (4e-3, 1e-2)
        scale = np.linalg.norm(a) + least * floor * np.sqrt(a.size) * variable.endswith("@GRAD")
        assert np.linalg.norm(a - b) <= tolerance * scale + 1e-6, (variable, np.linalg.norm(a - b) / max(scale, 1e-12))
