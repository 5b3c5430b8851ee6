"""What stands for operators without a kernel, on WebGPU alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from tests.corpora.place_bodies import CASES, compared, model_of

pytestmark = pytest.mark.webgpu

PLACE = amp.WebGPUPlace(0)


@pytest.mark.parametrize(("type_", "inputs", "attrs"), CASES, ids=[f"{n}-{c[0]}" for n, c in enumerate(CASES)])
def test_a_body_gives_what_the_operator_gives(type_: str, inputs: Sequence[np.ndarray], attrs: dict[str, Any]) -> None:
    model, feed, wanted = model_of(type_, inputs, attrs)
    program = amp.Program.from_onnx(model)
    exe, scope = amp.Executor(PLACE), amp.Scope()
    exe.run(program.startup, scope=scope)
    found = exe.run(program, feed, program.outputs, scope=scope)
    assert [v.dtype for v in found] == [v.dtype for v in wanted]
    compared(type_, found, wanted, 2e-6)
