"""Functions that CUDA has no kernel of, as they are lowered there, beside numpy's in float64."""

from __future__ import annotations

import math

import numpy as np
import onnx
import pytest
from onnx import helper

import amp_transpiler as amp
from amp_transpiler.ir.types import ONNX_TYPES
from amp_transpiler.nn import functional as F
from tests.helpers import on_places
from tests.helpers.rules import Array

pytestmark = pytest.mark.rules

NUMPY = {
    "Tan": np.tan,
    "Sinh": np.sinh,
    "Cosh": np.cosh,
    "Asin": np.arcsin,
    "Acos": np.arccos,
    "Atan": np.arctan,
    "Asinh": np.arcsinh,
    "Acosh": np.arccosh,
    "Atanh": np.arctanh,
}
FINITE = {"Asin": 1.0, "Acos": 1.0, "Atanh": 1.0, "Sinh": 89.0, "Cosh": 89.0, "Tan": 300.0}
"""Up to where an argument is tried; the others take any number."""


def lowered(type_: str, dtype: str, count: int = 5, opset: int = 21, place: str = "cuda") -> onnx.ModelProto:
    kind = ONNX_TYPES[dtype]
    ends = [helper.make_tensor_value_info(name, kind, ["n"]) for name in "xy"]
    graph = helper.make_graph([helper.make_node(type_, ["x"], ["y"])], "one", ends[:1], ends[1:])
    given = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    return amp.Program.from_onnx(given).lower(place, feed_shapes={"x": (count,)}).model


def computed(type_: str, x: Array, opset: int = 21) -> Array:
    return np.asarray(on_places.run_on("cuda", lowered(type_, x.dtype.name, len(x), opset), {"x": x})[0])


def arguments(type_: str) -> Array:
    """Numbers of every size, both signs, and such as are near where the function has a zero or ends."""
    rng = np.random.default_rng(3)
    sizes = np.exp2(rng.uniform(-120, 120, 20000))
    edges = 1 - np.exp2(rng.uniform(-24, 0, 4000))
    x = np.concatenate([sizes, edges, 1 + np.exp2(rng.uniform(-23, 8, 4000)), rng.uniform(0, 12, 4000), [0, 1]])
    x = np.concatenate([x, -x]).astype(np.float32)
    limit = FINITE.get(type_, math.inf)
    return x[x >= 1] if type_ == "Acosh" else x[np.abs(x) <= limit]


@pytest.mark.parametrize("type_", NUMPY)
def test_it_is_within_some_roundings(type_: str) -> None:
    x = arguments(type_)
    with np.errstate(all="ignore"):
        expected = NUMPY[type_](x.astype(np.float64))
    found = computed(type_, x).astype(np.float64)
    fits = np.abs(expected) < np.finfo(np.float32).max
    assert fits.sum() > 10000 or type_ == "Acosh"
    last = np.maximum(np.abs(expected[fits]) * 2.0**-23, 2.0**-126)
    off = np.abs(found[fits] - expected[fits]) / last
    assert off.max() < 6, f"{type_}: {off.max():.1f} of the last place at {x[fits][off.argmax()]!r}"


@pytest.mark.parametrize("type_", NUMPY)
def test_float64_has_its_digits(type_: str) -> None:
    x = arguments(type_).astype(np.float64)
    x = x[np.abs(x) < 1e4]
    with np.errstate(all="ignore"):
        expected = NUMPY[type_](x)
    np.testing.assert_allclose(computed(type_, x), expected, rtol=1e-12)


@pytest.mark.parametrize("type_", NUMPY)
def test_ends_and_what_is_no_number(type_: str) -> None:
    """Infinities, NaN, and arguments beyond the function's."""
    x = np.array([-np.inf, np.inf, np.nan, -2, 2, -1, 1, 0], np.float32)
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(computed(type_, x), NUMPY[type_](x), rtol=1e-6)


@pytest.mark.parametrize("type_", NUMPY)
def test_each_node_has_a_kernel(type_: str) -> None:
    for dtype in ("float32", "float64", "float16"):
        on_places.check_kernels("cuda", lowered(type_, dtype), f"{type_}, {dtype}")


@pytest.mark.parametrize("mode", ["fp32", "float16", "bfloat16"])
def test_an_angular_margin_trains_on_cuda(mode: str) -> None:
    """ArcFace (Deng et al. 2019): the cosine of an angle that is a margin wider."""
    main, startup = amp.Program(), amp.Program()
    with amp.program_guard(main, startup):
        cosines = F.tanh(amp.nn.fc(amp.data("x", [None, 16], "float32"), size=4))
        wider = F.cos(F.add(F.acos(cosines), 0.5))
        optimizer = amp.optimizer.Adam(0.1, multi_precision=mode != "fp32")
        if mode != "fp32":
            optimizer = amp.decorate(optimizer, use_pure_fp16=True, use_fp16_guard=False, dtype=mode)
        optimizer.minimize(F.mean(wider))
    model = main.lower("cuda", feed_shapes={"x": (8, 16)}).model
    assert "Acos" not in [node.op_type for node in model.graph.node]
    on_places.check_kernels("cuda", model, mode)


@pytest.mark.parametrize("opset", [7, 13, 22, 24])
def test_at_any_opset(opset: int) -> None:
    """What is written has its form at the opset that the program is lowered to."""
    x = np.array([-3, -0.5, 0, 0.25, 8], np.float32)
    np.testing.assert_allclose(computed("Atan", x, opset), np.arctan(x), rtol=1e-6)
    on_places.check_kernels("cuda", lowered("Atan", "float32", opset=opset), f"opset {opset}")


@pytest.mark.parametrize("place", ["cpu", "webgpu"])
def test_places_with_a_kernel_keep_the_operator(place: str) -> None:
    assert [node.op_type for node in lowered("Atan", "float32", place=place).graph.node] == ["Atan"]
