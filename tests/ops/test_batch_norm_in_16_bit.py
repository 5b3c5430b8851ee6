"""BatchNormalization on GPU places, forward and backward in 16 bit, node by node, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from amp_transpiler.ir.opdef import lookup
from amp_transpiler.ir.types import HALF, NAMES
from amp_transpiler.ops import norm_parts
from amp_transpiler.program import Program
from tests.helpers.cuda_kernels import without_cuda_kernel
from tests.helpers.node_by_node import node_by_node
from tests.helpers.rules import Array, emit

EPSILON, MOMENTUM = 1e-5, 0.9
VECTORS = ("scale", "bias", "mean", "var")


def _models(shape: tuple[int, ...], dtype: str = "float16") -> list[Any]:
    """The forward operator and its gradient, for CUDA."""
    program = Program()
    attrs = {"training_mode": 1, "epsilon": EPSILON, "momentum": MOMENTUM}
    x, dy, y, dx = (
        program.add_input("x", dtype, shape),
        program.add_input("dy", dtype, shape),
        program.add_variable("y", dtype, shape),
        program.add_variable("dx", dtype, shape),
    )
    scale, bias, mean, var = (program.add_input(n, "float32", shape[1:2]) for n in VECTORS)
    new = [program.add_variable(n, "float32", shape[1:2]) for n in ("new_mean", "new_var", "d_scale", "d_bias")]
    forward = program.add_operator("BatchNormalization", [x, scale, bias, mean, var], [y, *new[:2]], attrs=attrs)
    backward = program.add_operator(
        "BatchNormalizationGrad",
        [x, scale, mean, var, dy],
        [dx, *new[2:], None, None],
        attrs=attrs,
        domain="amp_transpiler",
    )
    sizes = {n: shape[1:2] for n in VECTORS} | {"x": shape, "dy": shape}
    return [emit(op, lookup(op), "cuda", sizes, {}) for op in (forward, backward)]


def _computed(values: dict[str, Array]) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for model in _models(values["x"].shape):
        zero = {i.name: np.zeros((), np.float32) for i in model.graph.input if i.name not in values}
        given = {i.name: values[i.name] for i in model.graph.input if i.name in values}
        known = node_by_node(model, given | zero)
        found |= {o.name: known[o.name] for o in model.graph.output}
    return found


def _truth(values: dict[str, Array]) -> dict[str, Array]:
    """In float64, from the same 16-bit inputs."""
    x, dy, scale, bias, mean, var = (values[n].astype(np.float64) for n in ("x", "dy", *VECTORS))
    axes = (0, *range(2, x.ndim))
    column = (1, -1, *[1] * (x.ndim - 2))
    count = x.size / x.shape[1]
    m, v = x.mean(axes), x.var(axes)
    r = 1 / np.sqrt(v + np.float32(EPSILON))
    xhat = (x - m.reshape(column)) * r.reshape(column)
    d_bias, d_scale = dy.sum(axes), (dy * xhat).sum(axes)
    inner = dy - (d_bias.reshape(column) + xhat * d_scale.reshape(column)) / count
    return {
        "y": xhat * scale.reshape(column) + bias.reshape(column),
        "new_mean": MOMENTUM * mean + (1 - MOMENTUM) * m,
        "new_var": MOMENTUM * var + (1 - MOMENTUM) * v,
        "dx": inner * (scale * r).reshape(column),
        "d_scale": d_scale,
        "d_bias": d_bias,
    }


def _values(shape: tuple[int, ...], offset: float = 0.0, size: float = 1.0, seed: int = 0) -> dict[str, Array]:
    """Random inputs: x of the deviation ``size`` around ``offset`` deviations."""
    rng = np.random.default_rng(seed)
    scale, bias, mean, var = (rng.normal(size=shape[1]).astype(np.float32) for _ in VECTORS)
    x, dy = rng.normal(offset, 1, shape) * size, rng.normal(size=shape)
    return {
        "x": x.astype(np.float16),
        "dy": dy.astype(np.float16),
        "scale": np.abs(scale) + 0.3,
        "bias": bias,
        "mean": mean,
        "var": np.abs(var),
    }


#: Shapes whose rows have no parts of seven numbers or more.
_WHOLE = {(1, 6, 15, 9), (257, 4)}


def _error(found: Array, truth: Array) -> float:
    """The median relative error, of numbers that are not far below the rest."""
    kept = np.abs(truth) > 1e-2 * np.abs(truth).mean()
    return float(np.median(np.abs(found.astype(np.float64) - truth)[kept] / np.abs(truth)[kept]))


@pytest.mark.parametrize(
    ("shape", "offset", "size"),
    [
        ((8, 5, 14, 14), 0, 1),
        ((8, 5, 14, 14), 3, 1e-2),
        ((4, 3, 33, 7), 1, 700),  # squares and sums of squares overflow
        ((1, 6, 15, 9), 1, 1),
        ((257, 4), -1, 1),
        ((64, 24, 1, 1), 1, 1),
        ((6, 3, 11), 0, 1),
        ((16, 2, 16, 16), 30, 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("in_parts", [False, True], ids=["whole", "parts"])
def test_no_more_than_twice_the_error_of_one_rounding(
    shape: tuple[int, ...], offset: float, size: float, in_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of rows too, where they are as short as these are: their gradient is rounded once more."""
    if in_parts:
        for name, number in {"_LONG": 1, "_MANY": 1, "_SHORTEST": 7, "_EVEN": 1}.items():
            monkeypatch.setattr(norm_parts, name, number)
        norms = sum(node.op_type == "LayerNormalization" for node in _models(shape)[0].graph.node)
        assert norms == (1 if shape in _WHOLE else 2)  # the other is of what stands for the parts
    values = _values(shape, offset, size)
    found, truth = _computed(values), _truth(values)
    for name in ("y", "dx"):
        once = _error(truth[name].astype(np.float16), truth[name])
        assert found[name].dtype == np.float16
        assert 0 < _error(found[name], truth[name]) <= (2.25 if in_parts else 2) * once, name
    for name in ("new_mean", "new_var", "d_bias"):
        np.testing.assert_allclose(found[name], truth[name], rtol=2e-5, atol=1e-5 * np.abs(truth[name]).max() + 1e-6)
    assert found["d_scale"].dtype == np.float32
    np.testing.assert_allclose(found["d_scale"], truth["d_scale"], rtol=1e-3, atol=1e-3 * np.sqrt(values["x"].size))


def test_a_mean_of_fifty_deviations() -> None:
    values = _values((16, 4, 12, 12), 50)
    found, truth = _computed(values), _truth(values)
    for name in ("y", "dx"):
        once = _error(truth[name].astype(np.float16), truth[name])
        assert _error(found[name], truth[name]) <= 2 * once, name
    np.testing.assert_allclose(found["new_var"], truth["new_var"], rtol=1e-5)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, 333.25, 65504.0])
def test_channels_of_equal_values_give_their_bias_and_no_gradient_of_the_scale(value: float) -> None:
    values = _values((4, 2, 5, 5))
    values["x"][:, 0] = value
    found, truth = _computed(values), _truth(values)
    for name in ("y", "dx", "d_bias", "new_mean", "new_var"):
        # The CPU kernel that computes y here subtracts the mean from x after it multiplied both by 1 / sqrt(epsilon).
        near = 4e-3 + (value * 2**-23 / np.sqrt(EPSILON) if name == "y" else 0)
        np.testing.assert_allclose(found[name].astype(np.float64), truth[name], rtol=4e-3, atol=near, err_msg=name)
    assert abs(found["d_scale"][0]) < 0.1


@pytest.mark.parametrize("value", [65504.0, 2.0**-24, 2.0**-15])
def test_gradients_of_any_size(value: float) -> None:
    values = _values((4, 2, 8, 8))
    values["dy"] = (np.sign(values["dy"].astype(np.float32)) * value).astype(np.float16)
    values["dy"][:, 1] = value  # equal in a channel: nothing comes through
    found, truth = _computed(values), _truth(values)
    np.testing.assert_allclose(found["d_bias"], truth["d_bias"], rtol=1e-5, atol=1e-5 * value)
    np.testing.assert_allclose(found["d_scale"][0], truth["d_scale"][0], rtol=5e-3, atol=1e-3 * value)
    fits = np.abs(truth["dx"]) < 65000
    unit = max(2.0**-24, 3e-3 * value)
    np.testing.assert_allclose(found["dx"][fits].astype(np.float64), truth["dx"][fits], rtol=4e-3, atol=unit)
    assert np.isfinite(found["d_scale"]).all()


def test_one_huge_element() -> None:
    values = _values((4, 2, 8, 8))
    values["x"][1, 0, 2, 3] = 65504
    values["dy"][2, 1, 5, 5] = 65504
    found, truth = _computed(values), _truth(values)
    for name in ("y", "dx", "d_bias", "d_scale", "new_mean", "new_var"):
        a, b = found[name].astype(np.float64), truth[name]
        assert np.linalg.norm(a - b) <= 2e-3 * np.linalg.norm(b), name


@pytest.mark.parametrize("dtype", [*sorted(HALF), "float32"])
@pytest.mark.parametrize("shape", [(4, 3, 6, 6), (1, 3, 5), (7, 3)], ids=str)
def test_no_full_size_tensor_is_wider_than_the_data(shape: tuple[int, ...], dtype: str) -> None:

    for model in _models(shape, dtype):
        assert not without_cuda_kernel(model)

        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
        for info in inferred.value_info:
            sizes = [d.dim_value for d in info.type.tensor_type.shape.dim]
            if np.prod(sizes) == np.prod(shape):
                assert NAMES[info.type.tensor_type.elem_type] == dtype, info.name
