"""What is known of many small constants at once is what one look at each gives, to the last bit."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.passes.numerics.extremes import extremes, small_row_sums
from amp_transpiler.passes.view.names import source

_ODD = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-42, -1e-7, 65504.0, 3e38]


def _program(arrays: dict[str, np.ndarray], type_: str) -> amp.Program:
    weights = [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()]
    nodes = [onnx.helper.make_node(type_, [f"x{name}", name], [f"y{name}"]) for name in arrays]
    infos = {p: [onnx.helper.make_tensor_value_info(f"{p}{n}", 1, None) for n in arrays] for p in "xy"}
    graph = onnx.helper.make_graph(nodes, "many", infos["x"], infos["y"], weights)
    return amp.Program.from_onnx(
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    )


@pytest.mark.parametrize("seed", range(5))
def test_extremes_are_those_of_each_constant(seed: int) -> None:
    rng = np.random.default_rng(seed)
    arrays = {f"w{i}": rng.standard_normal(rng.integers(1, 40)).astype(np.float32) for i in range(60)}
    for array in list(arrays.values())[::3]:
        array[rng.integers(array.size)] = rng.choice(_ODD)
    program = _program(arrays, "Mul")
    known = extremes(program)
    for name, array in arrays.items():
        found, above = known[program.var(name)], np.abs(array)[np.abs(array) > 0]
        assert np.array_equal([found.low, found.high], [array.min(), array.max()], equal_nan=True)
        assert (found.size, found.least) == (array.size, above.min(initial=np.inf))
        assert found.magnitude == np.abs(array).max() or np.isnan(array).any()


@pytest.mark.parametrize(
    ("type_", "shapes"),
    [
        ("MatMul", [(8, 8), (32, 8), (8, 32), (1, 7), (700, 1), (3, 5, 9)]),
        ("Conv", [(4, 3, 5, 5), (9, 1, 3), (6, 2, 3, 3)]),
    ],
)
def test_sums_of_rows_are_those_of_each_weight(type_: str, shapes: list[tuple[int, ...]]) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        f"w{i}.{k}": (rng.standard_normal(shape) * 10.0 ** rng.integers(-20, 20, shape)).astype(np.float32)
        for i, shape in enumerate(shapes)
        for k in range(3)
    }
    next(iter(arrays.values())).flat[1] = np.inf
    program = _program(arrays, type_)
    known = extremes(program)
    found = small_row_sums(program.operators, known, source)
    assert len(found) == len(arrays)
    for (weight, axes), sums in found.items():
        array = arrays[weight.name]
        total, size = (
            array.sum(axes, dtype=np.float64).reshape(-1),
            np.abs(array).sum(axes, dtype=np.float64).reshape(-1),
        )
        if sums is None:
            assert not np.isfinite(size).all()
            continue
        assert np.array_equal(sums[0], (size + total) / 2) and np.array_equal(sums[1], (size - total) / 2)
