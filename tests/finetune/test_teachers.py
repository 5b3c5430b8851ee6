"""Imported models that are frozen altogether: teachers, and what a head of one's own stands on."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

import amp_transpiler as amp
from amp_transpiler.nn import functional as F
from tests.helpers.exported import exported, samples


@pytest.mark.parametrize("mode", ["fp32", "mixed", "pure"])
def test_a_teacher_is_frozen_altogether(mode: str) -> None:
    """A student beside it learns; the teacher keeps every bit, and nobody is warned of it."""
    program = amp.Program.from_onnx(exported("cnn_dynamo"))
    told = str(amp.prepare_training(program, freeze=["*"], batch_norm="frozen"))
    assert told.startswith("0 parameters are trained") and not program.parameters
    with amp.program_guard(program, program.startup), amp.unique_name.guard(), warnings.catch_warnings():
        warnings.simplefilter("error")
        logits = amp.nn.fc(F.flatten(program.inputs[0], 1), 4, name="student")
        teacher = program.outputs[0]
        loss = F.kl_div(F.log_softmax(logits), F.softmax(teacher), reduction="batchmean")
        momentum: Any = amp.optimizer.Momentum(0.1, 0.9, multi_precision=mode != "fp32")
        if mode != "fp32":
            momentum = amp.decorate(momentum, use_pure_fp16=mode == "pure", use_fp16_guard=False)
        momentum.minimize(loss)
    scope, executor = amp.Scope(), amp.Executor(threads=1)
    executor.run(program.startup, scope=scope)
    if mode != "fp32":
        momentum.amp_init(amp.CPUPlace(), scope=scope)
    kept = [v.name for v in program.variables if v.persistable and v.data is not None]
    before = {name: scope.find_var(name).tobytes() for name in kept}
    feed = {"image": samples("cnn_dynamo", 16)["image"]}
    losses = [float(executor.run(program, feed=feed, fetch_list=[loss], scope=scope)[0]) for _ in range(8)]
    assert losses[-1] < losses[0] and len(kept) > 4
    assert {name: scope.find_var(name).tobytes() for name in kept} == before
    with pytest.raises(amp.errors.ArgumentError, match="fit: no parameter of program .* is left to train"):
        amp.fit(exported("cnn_dynamo"), "no.onnx", data=samples("cnn_dynamo", 40), freeze=["*"])
