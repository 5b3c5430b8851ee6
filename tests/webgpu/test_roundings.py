"""How the device rounds: the data of ``lists/roundings.toml``, the emulation on CPU, and what widening is worth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from scipy import special

import amp_transpiler as amp
from amp_transpiler.lists import roundings
from amp_transpiler.passes.lowering.arithmetic import MOST, Arithmetic
from amp_transpiler.passes.lowering.lowered import Lowered
from amp_transpiler.passes.lowering.lowering import lower
from tests.corpora.rounded_sums import CASES, fed, half, one_operator
from tests.helpers.rounding_kernels import KERNELS, SUMS, Sum, worth
from tests.helpers.sessions import run
from tests.helpers.webgpu_sessions import built_in, session
from tests.record.webgpu_roundings import order_of

pytestmark = pytest.mark.webgpu

Array = np.ndarray[Any, Any]
PLAIN = Arithmetic("webgpu", widens=False)
WRITTEN = roundings("webgpu", "float16")
assert WRITTEN is not None


def _on_device(model: onnx.ModelProto, feeds: dict[str, Array]) -> Array:
    return np.asarray(session(model, strict=True).run(None, feeds)[0])


def _feeds(lowered: Lowered, feeds: dict[str, Array]) -> dict[str, Array]:
    return fed(feeds) | {name: np.zeros((), np.float32) for name in lowered.scalars}


@pytest.mark.parametrize("case", SUMS, ids=lambda case: case.label)
def test_kernels_add_up_in_the_order_that_is_written(case: Sum) -> None:
    assert (case.where, order_of(case)) in WRITTEN.orders[case.operator]


@pytest.mark.parametrize("operator", KERNELS)
def test_the_error_of_kernels_is_as_large_as_is_written(operator: str) -> None:
    found = worth(operator)
    assert found < 1.5 * WRITTEN.inside.get(operator, 1.1)
    assert (round(found, 1) > MOST) == (WRITTEN.inside.get(operator, 1) > MOST)


@pytest.mark.parametrize(
    ("operator", "feeds", "attrs", "expected"), CASES, ids=[f"{n}-{case[0]}" for n, case in enumerate(CASES)]
)
def test_emulation_has_the_bits_of_the_device(
    operator: str, feeds: dict[str, Array], attrs: dict[str, Any], expected: Callable[..., Array]
) -> None:
    if operator == "Softmax" and not built_in():
        pytest.skip("the plugin's softmax adds up in another order; test_emulated_softmax_is_as_far_off")
    model = one_operator(operator, feeds, **attrs)
    on_device = _on_device(model, fed(feeds))
    np.testing.assert_array_equal(on_device, expected(*fed(feeds).values()))
    emulated = lower(amp.Program.from_onnx(model), "cpu", arithmetic=PLAIN)
    np.testing.assert_array_equal(run(emulated.model, _feeds(emulated, feeds))[0], on_device)


@pytest.mark.parametrize("count", [5, 64, 1000])
def test_emulated_softmax_is_as_far_off(count: int) -> None:
    feeds = {"x": half(400, count)}
    model, exact = one_operator("Softmax", feeds, axis=-1), special.softmax(feeds["x"].astype(np.float64), -1)
    emulated = lower(amp.Program.from_onnx(model), "cpu", arithmetic=PLAIN)
    ours, theirs = (
        np.sqrt(np.square(found.astype(np.float64) - exact).mean())
        for found in (run(emulated.model, _feeds(emulated, feeds))[0], _on_device(model, feeds))
    )
    assert theirs / 1.5 < ours < 1.5 * theirs


@pytest.mark.parametrize("count", [4, 6, 64, 4096])
def test_products_lose_no_more_than_storing_them_twice(count: int) -> None:
    feeds = {"a": half(16, count), "b": half(count, 16)}
    program = amp.Program.from_onnx(one_operator("MatMul", feeds))
    lowered, exact = lower(program, "webgpu"), feeds["a"].astype(np.float64) @ feeds["b"].astype(np.float64)
    off, stored = (
        np.sqrt(np.square(found.astype(np.float64) - exact).mean())
        for found in (_on_device(lowered.model, _feeds(lowered, feeds)), exact.astype(np.float16))
    )
    assert off < 1.25 * np.sqrt(MOST) * stored
