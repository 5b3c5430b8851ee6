"""BatchNormalization in 16 bit: all its parameters in 16 bit, also where float16 does not hold a variance."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.ir.reasons import Kind
from amp_transpiler.nn import functional as F
from tests.helpers.converting import faithful, off
from tests.helpers.placement import needs_placement_tool, place
from tests.helpers.sessions import run

_TEXT = """<ir_version: 8, opset_import: ["" : 17]>
m (float[2,16,8,8] x) => (float[2,16,8,8] y) <float[16,16,1,1] w, float[16] s, float[16] b, float[16] mean, float[16] var>
{ k = Conv(x, w) h = Neg(k) y = BatchNormalization<epsilon = %g>(h, s, b, mean, var) }
"""
_X = np.random.default_rng(1).standard_normal((2, 16, 8, 8)).astype(np.float32)
#: Scale, variance and epsilon, and whether parameters that are only rounded would do.
PARAMETERS = {
    "usual": (1.0, 0.8, 1e-5, True),
    "a variance that float16 rounds away": (1e-4, 1e-8, 1e-12, False),
    "a variance that float16 keeps few digits of": (1e-2, 3e-7, 1e-12, False),
    "a variance beyond float16": (100.0, 1e6, 1e-5, False),
    "a slope below the normal numbers": (1e-3, 1e5, 1e-5, False),
}


def _model(scale: float, variance: float, epsilon: float, bias: float = 0.1) -> onnx.ModelProto:
    model = onnx.parser.parse_model(_TEXT % epsilon)
    random, one = np.random.default_rng(0), min(np.sqrt(variance) / 4, 8.0)
    values: dict[str, Any] = {
        "w": one * random.standard_normal((16, 16, 1, 1)),
        "s": scale * random.uniform(0.5, 1.5, 16),
        "b": bias * random.standard_normal(16),
        "mean": one * random.standard_normal(16),
        "var": variance * random.uniform(0.5, 1.5, 16),
    }
    for name, value in values.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(value.astype(np.float32), name))
    return model


def _types(program: amp.Program) -> set[str | None]:
    (norm,) = (op for op in program.operators if op.type == "BatchNormalization")
    return {v.dtype for v in norm.inputs if v is not None}


@pytest.mark.parametrize("name", PARAMETERS)
def test_all_parameters_are_16_bit_and_the_slope_is_right(name: str) -> None:
    scale, variance, epsilon, as_they_are = PARAMETERS[name]
    model = _model(scale, variance, epsilon)
    (exact,) = run(model, {"x": _X})
    converted = amp.convert(model)
    assert _types(converted) == {"float16"}
    assert off(faithful(converted, {"x": _X})[0], exact) < 1.5e-3
    (norm,) = (op for op in converted.operators if op.type == "BatchNormalization")
    assert (norm.attrs["epsilon"] > 0) == as_they_are
    assert [v.name for v in norm.inputs[1:] if v is not None] == ["s", "b", "mean", "var"]


def test_what_float16_does_not_hold_stays_fp32() -> None:
    converted = amp.convert(_model(1.0, 0.8, 1e-5, bias=1e6))
    (norm,) = (op for op in converted.operators if op.type == "BatchNormalization")
    assert _types(converted) == {"float32"} and norm.why is not None and norm.why.kind is Kind.ONE_TYPE


def test_computed_statistics_stay_fp32() -> None:
    model = _model(1.0, 0.8, 1e-5)
    model.graph.node.insert(0, onnx.helper.make_node("Abs", ["var"], ["computed"]))
    model.graph.node[-1].input[4] = "computed"
    model.graph.node[0].input[0] = "given"
    model.graph.input.append(onnx.helper.make_tensor_value_info("given", onnx.TensorProto.FLOAT, [16]))
    converted = amp.convert(model)
    (norm,) = (op for op in converted.operators if op.type == "BatchNormalization")
    assert len(_types(converted)) == 1 and norm.why is not None and "computed" in str(norm.why)


def test_two_norms_share_parameters_one_of_them_in_a_branch() -> None:
    model = _model(1.0, 0.8, 1e-5)
    graph = model.graph
    inner = onnx.helper.make_node("BatchNormalization", ["y", "s", "b", "mean", "var"], ["inside"])
    other = onnx.helper.make_node("Relu", ["y"], ["instead"])
    made = {name: onnx.helper.make_tensor_value_info(name, 1, [2, 16, 8, 8]) for name in ("inside", "instead", "z")}
    branches = {
        f"{which}_branch": onnx.helper.make_graph([node], which, [], [made[node.output[0]]])
        for which, node in (("then", inner), ("else", other))
    }
    graph.input.append(onnx.helper.make_tensor_value_info("c", onnx.TensorProto.BOOL, []))
    graph.node.append(onnx.helper.make_node("If", ["c"], ["z"], **branches))
    graph.output.append(made["z"])
    feed = {"x": _X, "c": np.array(True)}
    exact = run(model, feed)
    converted = amp.convert(model)
    norms = [op for op in converted.walk() if op.type == "BatchNormalization"]
    assert [{v.dtype for v in norm.inputs if v is not None} for norm in norms] == [{"float16"}] * 2
    assert max(off(one, other) for one, other in zip(faithful(converted, feed), exact, strict=True)) < 1.5e-3


def test_parameters_that_only_a_branch_reads_are_stored_once() -> None:
    model = _model(1.0, 0.8, 1e-5)
    norm, value = model.graph.node[-1], onnx.helper.make_tensor_value_info("y", 1, [2, 16, 8, 8])
    inner = onnx.helper.make_node("BatchNormalization", norm.input, ["inside"])
    made = [onnx.helper.make_tensor_value_info(name, 1, [2, 16, 8, 8]) for name in ("inside", "instead")]
    one = onnx.helper.make_graph([inner], "one", [], made[:1])
    two = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["h"], ["instead"])], "two", [], made[1:])
    model.graph.node[-1].CopyFrom(onnx.helper.make_node("If", ["c"], ["y"], then_branch=one, else_branch=two))
    model.graph.input.append(onnx.helper.make_tensor_value_info("c", onnx.TensorProto.BOOL, []))
    assert model.graph.output[0].name == value.name
    held = amp.convert(model).to_onnx().graph.initializer
    assert [each.name for each in held] == ["w"]


def test_a_parameter_of_a_constant_says_that_it_is_16_bit() -> None:
    model = _model(1.0, 0.8, 1e-5)
    (scale,) = (each for each in model.graph.initializer if each.name == "s")
    model.graph.initializer.remove(scale)
    model.graph.node.insert(0, onnx.helper.make_node("Constant", [], ["s"], value=scale))
    program = amp.convert(model)
    assert [(op.precision, str(op.why)) for op in program.operators if op.type == "Constant"] == [
        ("float16", "fp16: a constant")
    ]
    once = program.to_onnx()
    assert amp.convert(once).to_onnx() == once


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@needs_placement_tool
def test_norms_and_clips_of_a_file_are_on_cuda(dtype: str, tmp_path: Path) -> None:
    """In bfloat16 CUDA has neither Clip nor the comparisons that onnxruntime would write instead, nor batch norm."""
    model = _model(1.0, 0.8, 1e-5)
    for name, value in (("low", 0.0), ("high", 6.0)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(value), name))
    model.graph.node.append(onnx.helper.make_node("Clip", ["y", "low", "high"], ["z"]))
    model.graph.node.append(onnx.helper.make_node("Conv", ["z", "w"], ["end"]))
    model.graph.output.append(onnx.helper.make_tensor_value_info("end", 1, [2, 16, 8, 8]))
    converted = amp.convert(model, dtype=dtype)
    counts = collections.Counter(op.type for op in converted.operators if op.precision == dtype)
    assert counts["BatchNormalization"] == counts["Clip"] == (dtype == "float16")
    assert counts["Max"] == counts["Min"] == (dtype == "bfloat16") and counts["Conv"] == 2
    done = place(converted.to_onnx(), tmp_path / "converted.onnx")
    assert done.status == 0, done.said


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@needs_placement_tool
def test_norms_of_a_served_model_are_on_cuda(dtype: str, tmp_path: Path) -> None:
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x = amp.data("x", [None, 3, 8, 8], "float32")
        with amp.fp16_guard():
            made = F.relu(amp.nn.batch_norm(amp.nn.conv2d(x, 8, 3)))
        optimizer = amp.optimizer.SGD(0.1, multi_precision=True)
        optimizer = amp.decorate(optimizer, dtype=dtype, use_pure_fp16=True)
        optimizer.minimize(F.mean(F.cast(made, "float32")), startup)
    exe, scope, path = amp.Executor(), amp.Scope(), tmp_path / "served.onnx"
    exe.run(startup, scope=scope)
    optimizer.amp_init(exe.place, scope)
    exe.run(main, {"x": _X[:, :3]}, scope=scope)
    amp.save_inference_model(path, [x], [made], exe, program=main, scope=scope)
    own = amp.Scope()
    served, _, (output,) = amp.load_inference_model(path, exe, scope=own)
    assert _types(served) == {"float16" if dtype == "float16" else "float32"}
    np.testing.assert_array_equal(own.find_var("batch_norm_0.w_2"), scope.find_var("batch_norm_0.w_2"))
    (expected,) = exe.run(main.clone(for_test=True), {"x": _X[:, :3]}, [made], scope)
    (got,) = exe.run(served, {v.name: _X[:, :3].astype(v.dtype) for v in served.inputs}, [output], own)
    assert off(got, expected) < {"float16": 1.5e-3, "bfloat16": 1.2e-2}[dtype]
    done = place(onnx.load(path), tmp_path / "placed.onnx")
    assert done.status == 0, done.said
