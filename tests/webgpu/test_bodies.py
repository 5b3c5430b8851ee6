"""What stands for operators without a kernel, on WebGPU alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
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


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("type_", ["LayerNormalization", "InstanceNormalization", "SkipLayerNormalization"])
def test_norms_of_numbers_far_from_zero(type_: str, dtype: type) -> None:
    """Of rows of any mean, of which the first half are all alike."""
    rng = np.random.default_rng(0)
    apart = rng.standard_normal((4, 32, 21)) * (np.arange(32) > 16)[:, None]
    x = (np.geomspace(0.1, 1000, 32)[:, None] + apart).astype(dtype)
    scale = np.ones(32 if type_[0] == "I" else 21, dtype)
    inputs = {"I": [x, scale, 0 * scale], "L": [x, scale], "S": [x, x, scale]}[type_[0]]
    domain = "com.microsoft" if type_[0] == "S" else ""
    feeds = {f"x{i}": array for i, array in enumerate(inputs)}
    made = [onnx.helper.make_node(type_, [*feeds], ["y"], domain=domain, epsilon=1e-5)]
    kind = onnx.helper.np_dtype_to_tensor_dtype(x.dtype)
    given, result = (
        [onnx.helper.make_tensor_value_info(name, kind, array.shape) for name, array in arrays.items()]
        for arrays in (feeds, {"y": x})
    )
    opsets = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(onnx.helper.make_graph(made, "g", given, result), opset_imports=opsets)
    program = amp.Program.from_onnx(model)
    exe, rows = amp.Executor(PLACE), x.astype(np.float64) * (2 if domain else 1)
    exe.run(program.startup)
    rows -= rows.mean(-1, keepdims=True)
    wanted = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-5)
    (found,) = exe.run(program, feeds, program.outputs)
    np.testing.assert_allclose(found, wanted, atol=3 * float(np.finfo(dtype).eps) * np.abs(wanted).max())


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
