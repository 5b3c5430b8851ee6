"""Lowering rules of the normalisations: against the operator's definition and onnxruntime's own CPU kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, strategies as st

import amp_transpiler.ops  # noqa: F401  (fills the operator table)
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.opdef import lookup, lowering_rule_of
from amp_transpiler.ir.types import numpy_dtype
from amp_transpiler.passes.lowering.lowering import lower
from amp_transpiler.program import Program
from tests.helpers.cuda_kernels import without_cuda_kernel
from tests.helpers.gradcheck import few, seeds
from tests.helpers.rules import as_model, emit, run_cpu, run_reference, tensor_info

HALF = ["float16", "bfloat16"]


def operator(
    type_: str, data: str, inputs: list[np.ndarray], attrs: dict[str, Any], outputs: list[str], scale: str = "float32"
) -> Operator:
    """The operator with its first input and output of type ``data``, everything else of type ``scale``."""
    program = Program()
    xs = [program.add_input(f"x{i}", scale if i else data, a.shape) for i, a in enumerate(inputs)]
    shapes = {"Y": inputs[0].shape, "running": inputs[-1].shape, "row": None}
    ys = [program.add_variable(f"y{i}", scale if i else data, shapes[kind]) for i, kind in enumerate(outputs)]
    return program.add_operator(type_, xs, ys, attrs=attrs)


def run_body(op: Operator, place: str, inputs: list[np.ndarray], on_cpu: bool = True) -> list[np.ndarray]:
    rule = lookup(op)
    assert rule is not None and lowering_rule_of(op) is not None
    model = emit(op, rule, place, {f"x{i}": a.shape for i, a in enumerate(inputs)}, {})
    if place == "cuda":
        assert not without_cuda_kernel(model)
    kinds = {i.name: onnx.helper.tensor_dtype_to_np_dtype(i.type.tensor_type.elem_type) for i in model.graph.input}
    fed = {f"x{i}": a.astype(kinds[f"x{i}"]) for i, a in enumerate(inputs) if f"x{i}" in kinds}
    return run_cpu(model, fed) if on_cpu else run_reference(model, fed)


def run_operator(
    type_: str, inputs: list[np.ndarray], attrs: dict[str, Any], outputs: int, reference: bool
) -> list[np.ndarray]:
    """The operator itself, in the reference evaluator or by onnxruntime's kernel."""
    names = [f"x{i}" for i in range(len(inputs))]
    node = onnx.helper.make_node(type_, names, [f"y{i}" for i in range(outputs)], **attrs)
    infos = [tensor_info(n, a.dtype.name, a.shape) for n, a in zip(names, inputs, strict=True)]
    outs = [onnx.helper.make_empty_tensor_value_info(name) for name in node.output]
    run = run_reference if reference else run_cpu
    return run(as_model(onnx.helper.make_graph([node], type_, infos, outs)), dict(zip(names, inputs, strict=True)))


def batch(seed: int, shape: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    scale, bias, mean, var = (rng.normal(size=shape[1]) for _ in range(4))
    return [rng.normal(rng.normal(), 1, shape), scale, bias, mean, np.abs(var) + 0.1]


shapes = st.lists(st.integers(2, 5), min_size=2, max_size=5).map(tuple)
TRAINING = ["Y", "running", "running"]


# -- BatchNormalization ---------------------------------------------------------------------------------
@few
@given(shape=shapes, momentum=st.sampled_from([0.9, 0.1]), epsilon=st.sampled_from([1e-5, 0.1]), seed=seeds)
def test_training_batch_normalization_is_the_operators(
    shape: tuple[int, ...], momentum: float, epsilon: float, seed: int
) -> None:
    inputs = batch(seed, shape)
    attrs = {"training_mode": 1, "momentum": momentum, "epsilon": epsilon}
    expected = run_operator("BatchNormalization", inputs, attrs, 3, reference=True)
    op = operator("BatchNormalization", "float64", inputs, attrs, TRAINING, scale="float64")
    for ours, theirs in zip(run_body(op, "reference", inputs, on_cpu=False), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)  # epsilon and momentum are fp32 attributes
    narrow = [a.astype(np.float32) for a in inputs]
    kernel = run_operator("BatchNormalization", narrow, attrs, 3, reference=False)
    op = operator("BatchNormalization", "float32", inputs, attrs, TRAINING)
    for place in ("cpu", "cuda"):
        for ours, theirs in zip(run_body(op, place, narrow), kernel, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6, err_msg=place)


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_statistics_survive_a_mean_far_from_zero(place: str) -> None:
    x, *rest = batch(0, (16, 3, 8, 8))
    inputs = [(x + 300).astype(np.float32), *(a.astype(np.float32) for a in rest)]
    attrs = {"training_mode": 1}
    op = operator("BatchNormalization", "float32", inputs, attrs, TRAINING)
    expected = run_operator("BatchNormalization", [a.astype(np.float64) for a in inputs], attrs, 3, reference=True)
    for ours, theirs in zip(run_body(op, place, inputs), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("training", [0, 1], ids=["frozen", "training"])
def test_batch_normalization_of_16_bit_data_rounds_its_output_alone(training: int, dtype: str) -> None:
    inputs = batch(1, (8, 4, 5, 5))
    inputs[0] = (inputs[0] * 100).astype(numpy_dtype(dtype)).astype(np.float32)  # squares overflow fp16
    inputs[1:] = [a.astype(np.float32) for a in inputs[1:]]
    attrs = {"training_mode": training}
    outputs = TRAINING if training else ["Y"]
    expected = run_operator("BatchNormalization", inputs, attrs, len(outputs), reference=False)
    op = operator("BatchNormalization", dtype, inputs, attrs, outputs)
    y, *running = run_body(op, "cpu", inputs)
    np.testing.assert_array_equal(y, expected[0].astype(numpy_dtype(dtype)).astype(np.float32))
    for ours, theirs in zip(running, expected[1:], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    if dtype == "float16":  # onnxruntime computes no bf16 on CPU
        y, *running = run_body(op, "cuda", inputs)
        # A GPU stores the normalised values too, of up to four: half a unit more before the bias.
        np.testing.assert_allclose(y.astype(np.float32), expected[0], rtol=2**-10, atol=2**-10)
        for ours, theirs in zip(running, expected[1:], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_batch_normalization_for_inference_of_one_type_stands_as_it_is() -> None:
    op = operator("BatchNormalization", "float32", batch(0, (2, 3, 4)), {}, ["Y"])
    assert lowering_rule_of(op) is None
    assert lowering_rule_of(operator("BatchNormalization", "float16", batch(0, (2, 3, 4)), {}, ["Y"])) is not None


# -- LayerNormalization and InstanceNormalization ----------------------------------------------------------
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("type_", ["LayerNormalization", "InstanceNormalization"])
def test_a_scale_kept_in_fp32_is_rounded_where_the_operator_reads_it(type_: str, dtype: str) -> None:
    rng = np.random.default_rng(2)
    x = rng.normal(size=(4, 6, 5)).astype(numpy_dtype(dtype)).astype(np.float32)
    size = 5 if type_ == "LayerNormalization" else 6
    inputs = [x, *(rng.normal(size=size).astype(np.float32) for _ in range(2))]
    rounded = [x, *(a.astype(numpy_dtype(dtype)).astype(np.float32) for a in inputs[1:])]
    expected = run_operator(type_, rounded, {}, 1, reference=False)[0]
    op = operator(type_, dtype, inputs, {}, ["Y"])
    y = run_body(op, "cpu", inputs)[0]
    np.testing.assert_array_equal(y, expected.astype(numpy_dtype(dtype)).astype(np.float32))
    if dtype == "float16":
        y = run_body(op, "cuda", inputs)[0]
        assert y.dtype == np.float16
        np.testing.assert_allclose(y.astype(np.float32), expected, rtol=2**-10, atol=1e-3)
    assert lowering_rule_of(operator(type_, "float32", inputs, {}, ["Y"])) is None


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_layer_normalization_gives_its_statistics_in_fp32(place: str) -> None:
    rng = np.random.default_rng(3)
    inputs = [rng.normal(size=(3, 4, 5)).astype(np.float16).astype(np.float32), np.ones(20, np.float32).reshape(4, 5)]
    op = operator("LayerNormalization", "float16", inputs, {"axis": 1}, ["Y", "row", "row"])
    _, mean, inverse = run_body(op, place, inputs)
    assert mean.dtype == inverse.dtype == np.float32
    assert mean.shape == inverse.shape == (3, 1, 1)
    np.testing.assert_allclose(mean[:, 0, 0], inputs[0].mean((1, 2)), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(inverse[:, 0, 0], 1 / np.sqrt(inputs[0].var((1, 2)) + 1e-5), rtol=1e-4)


def test_a_16_bit_layer_normalization_with_fp32_scale_lowers_for_both_places() -> None:
    rng = np.random.default_rng(4)
    inputs = [rng.normal(size=(3, 5)), rng.normal(size=5), rng.normal(size=5)]
    program = operator("LayerNormalization", "float16", inputs, {}, ["Y"]).program
    y = program.var("y0")
    y.dtype, y.shape = "float16", (3, 5)
    fed = {"x0": inputs[0].astype(np.float16), "x1": inputs[1].astype(np.float32), "x2": inputs[2].astype(np.float32)}
    results = [run_cpu(lower(program, place, fetches=[y]).model, fed)[0] for place in ("cpu", "cuda")]
    np.testing.assert_allclose(results[0].astype(np.float32), results[1].astype(np.float32), rtol=2**-9, atol=1e-3)


# -- GroupNormalization --------------------------------------------------------------------------------------
@few
@given(shape=st.lists(st.integers(2, 4), min_size=1, max_size=3), groups=st.sampled_from([1, 2, 4]), seed=seeds)
def test_group_normalization_is_the_operators(shape: list[int], groups: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    inputs = [a.astype(np.float32) for a in (rng.normal(size=(2, 4, *shape)), rng.normal(size=4), rng.normal(size=4))]
    attrs = {"num_groups": groups, "epsilon": 1e-3}
    expected = run_operator("GroupNormalization", inputs, attrs, 1, reference=True)[0]
    function = run_operator("GroupNormalization", inputs, attrs, 1, reference=False)[0]
    np.testing.assert_allclose(function, expected, rtol=1e-4, atol=1e-5)
    for place in ("cpu", "cuda"):
        op = operator("GroupNormalization", "float32", inputs, attrs, ["Y"])
        np.testing.assert_allclose(run_body(op, place, inputs)[0], expected, rtol=1e-4, atol=1e-5)
    x = inputs[0].astype(np.float16).astype(np.float32)
    truth = run_operator("GroupNormalization", [x, *inputs[1:]], attrs, 1, reference=True)[0]
    for place in ("cpu", "cuda"):
        op = operator("GroupNormalization", "float16", inputs, attrs, ["Y"])
        y = run_body(op, place, [x, *inputs[1:]])[0].astype(np.float32)
        np.testing.assert_allclose(y, truth, rtol=2**-10, atol=2**-10)


def test_batch_normalization_of_five_outputs_is_tested_with_running_statistics() -> None:
    """Before opset 14 one that has them trains: each sample of a test would depend on the others."""
    text = """<ir_version: 7, opset_import: ["" : 11]>
        net (float[n,2] x, float[2] scale, float[2] bias, float[2] mean, float[2] var) => (float[n,2] y)
        { y, new_mean, new_var, saved_mean, saved_var = BatchNormalization (x, scale, bias, mean, var) }"""
    program = Program.from_onnx(onnx.parser.parse_model(text)).clone(for_test=True)
    (op,) = program.operators
    assert [v.name for v in op.outputs if v is not None] == ["y"] and not program.has_var("saved_var")
    rng = np.random.default_rng(0)
    x, scale, bias, mean, var = (rng.uniform(1, 2, s).astype(np.float32) for s in ((4, 2), 2, 2, 2, 2))
    feeds = {"x": x, "scale": scale, "bias": bias, "mean": mean, "var": var}
    (y,) = run_cpu(lower(program, "cpu").model, feeds)
    np.testing.assert_allclose(y, (x - mean) / np.sqrt(var + 1e-5) * scale + bias, rtol=1e-5)
