"""Slopes of 16-bit numbers that were widened to fp32 are looked up on CUDA, as those of 16-bit numbers are."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy import special

import amp_transpiler as amp
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.nn import functional as F
from amp_transpiler.passes.lowering.lowering import lower
from tests.helpers.node_by_node import node_by_node
from tests.helpers.ports import fed

X = np.concatenate([np.linspace(-9, 9, 4001), np.linspace(-0.2, 0.2, 801), [0.0, 300.0, -300.0, 65504.0, -65504.0]])
TANH, CUBIC = np.sqrt(2 / np.pi), 0.044715


def gelu_slope(x: np.ndarray) -> np.ndarray:
    return np.asarray(special.ndtr(x) + x * np.exp(-x * x / 2) / np.sqrt(2 * np.pi))


def gelu_tanh_slope(x: np.ndarray) -> np.ndarray:
    x = np.clip(x, -50, 50)
    t = np.tanh(TANH * (x + CUBIC * x**3))
    return np.asarray((1 + t) / 2 + x * (1 - t * t) / 2 * TANH * (1 + 3 * CUBIC * x * x))


def erf_slope(x: np.ndarray) -> np.ndarray:
    return np.asarray(2 / np.sqrt(np.pi) * np.exp(-x * x))


def mish_slope(x: np.ndarray) -> np.ndarray:
    t = np.tanh(np.logaddexp(0, x))
    return np.asarray(t + x * special.expit(x) * (1 - t * t))


def gelu_tanh(x: Variable) -> Variable:
    return F.gelu(x, approximate=True)


FUNCTIONS = [(F.gelu, gelu_slope), (gelu_tanh, gelu_tanh_slope), (F.erf, erf_slope), (F.mish, mish_slope)]


def gradient(function: Callable[[Variable], Variable], dtype: str, x: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """Of the sum of a function in fp32, by CUDA's lowering, and the kernels of both; X is of ``dtype``."""
    main, startup = amp.Program("main"), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        parameter = amp.create_parameter(x.shape, dtype, "x")
        ((_, grad),) = amp.append_backward(F.sum(function(F.cast(parameter, "float32"))))
    lowered = lower(main, "cuda", {}, [grad])
    found = node_by_node(lowered.model, fed(lowered.states, {"x": x}.get))
    return found[lowered.fetches[0].tensor].astype(np.float64), [node.op_type for node in lowered.model.graph.node]


@pytest.mark.parametrize(("function", "slope"), FUNCTIONS, ids=["gelu", "gelu, tanh", "erf", "mish"])
def test_a_widened_number_is_looked_up(
    function: Callable[[Variable], Variable], slope: Callable[..., np.ndarray]
) -> None:
    """In four passes, off by what rounding the gradient to 16 bit takes: close to 0 the table's steps add as much."""
    x = X.astype(np.float16)
    found, kernels = gradient(function, "float16", x)
    assert kernels.count("Gather") == 1 and not {"Exp", "Pow", "Sigmoid", "Tanh"} & {*kernels}
    wanted = slope(x.astype(np.float64))
    assert (np.abs(found - wanted) <= 2.0**-11 * (np.abs(wanted) + 0.6 * (np.abs(x) < 1 / 2)) + 1e-6).all()


def test_fp32_numbers_are_not() -> None:
    found, kernels = gradient(F.gelu, "float32", X.astype(np.float32))
    assert "Gather" not in kernels
    np.testing.assert_allclose(found, gelu_slope(X.astype(np.float32).astype(np.float64)), rtol=1e-5, atol=1e-6)
