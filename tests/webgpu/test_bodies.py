"""What stands for operators without a kernel, on WebGPU alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from tests.corpora.nested_bodies import TEXTS, nested
from tests.corpora.place_bodies import CASES, compared, model_of
from tests.corpora.rounded_sums import one_operator

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


@pytest.mark.parametrize("reduction", ["add", "mul", "max"])
def test_16_bit_rows_are_combined(reduction: str) -> None:
    rng = np.random.default_rng(0)
    x, rows = (rng.integers(1, 9, (n, 4)).astype(np.float16) for n in (3, 3))
    program = amp.Program.from_onnx(
        one_operator("ScatterND", {"x": x, "at": np.array([[1], [0], [1]]), "rows": rows}, reduction=reduction)
    )
    exe, wanted = amp.Executor(PLACE), x.copy()
    exe.run(program.startup)
    {"add": np.add, "mul": np.multiply, "max": np.maximum}[reduction].at(wanted, [1, 0, 1], rows)
    np.testing.assert_array_equal(exe.run(program, {"x": x, "rows": rows}, program.outputs)[0], wanted)


@pytest.mark.filterwarnings("ignore:.*on the CPU")
@pytest.mark.parametrize("name", TEXTS)
def test_nested_graphs_give_what_they_give(name: str) -> None:
    """Branches of an If run on the device alone, the bodies of a Loop and a Scan from the CPU."""
    exe = amp.Executor(PLACE, allow_cpu_fallback=name in ("a loop", "a scan"))
    for chosen in (True, False):
        model, feed, wanted, _ = nested(name, chosen)
        program = amp.Program.from_onnx(model)
        exe.run(program.startup)
        for got, want in zip(exe.run(program, feed, program.outputs), wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-6)
            assert got.dtype == want.dtype
