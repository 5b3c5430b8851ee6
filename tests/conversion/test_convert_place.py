"""Conversions for a place: its kernels decide what stays fp32, and what they compute wrongly is written otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator

import amp_transpiler as amp
from amp_transpiler.errors import ArgumentError, ListError
from amp_transpiler.ir.reasons import Kind, parse
from amp_transpiler.lists import faults
from amp_transpiler.passes.view.kernel_faults import fault_at
from tests.corpora.kernel_faults_met import MEET, conv
from tests.helpers.converting import filled

RECURRENT = (
    "m (float[4,1,8] x) => (float[4,1,1,8] y) <float[1,24,8] w, float[1,24,8] r>"
    " { a = Relu(x) y, h = GRU<hidden_size=8>(a, w, r) }"
)
NORMED = (
    "m (float[1,4,6,6] x) => (float[1,4,6,6] z) <float[4] s, float[4] b, float[4] mean, float[4] var>"
    " { y = BatchNormalization(x, s, b, mean, var) z = Relu(y) }"
)


def run(model: onnx.ModelProto, output: str | None = None, **feeds: Any) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(output and [output], feeds)[0])


def only(program: amp.Program, type_: str) -> Any:
    return next(op for op in program.walk() if op.type == type_)


def test_what_has_no_kernel_on_the_place_stays_fp32() -> None:
    model = filled(RECURRENT)
    assert only(amp.convert(model), "GRU").precision == "float16"  # CUDA has a kernel
    program = amp.convert(model, place="webgpu")
    why = only(program, "GRU").why
    assert why.kind is Kind.NO_KERNEL_THERE and why.subject == "WebGPU"
    assert str(why).startswith("fp32: no WebGPU kernel for GRU at float16 in opset 17")
    assert parse(str(why)) == why
    assert "GRU (1) stay float32: WebGPU has no float16 kernel for them" in program.conversion.notes


@pytest.mark.parametrize("place", ["webgpu", amp.WebGPUPlace(0)])
def test_a_norm_with_fp32_statistics(place: Any) -> None:
    assert only(amp.convert(filled(NORMED)), "BatchNormalization").precision == "float16"
    op = only(amp.convert(filled(NORMED), place=place, numeric_guards=False), "BatchNormalization")
    assert op.precision == "float32" and op.why.kind is Kind.FAULT
    assert "does not compile" in str(op.why) and parse(str(op.why)) == op.why


@pytest.mark.parametrize("where", ["outputs", "branches"])
def test_padded_channels_leave_outputs_and_names_alone(where: str) -> None:
    branch = "() => (float[1,8,6,7] a) { a = Conv(x, w) }"
    text = {
        "outputs": "(float[1,6,8,9] x) => (float[1,8,6,7] y, float[8,6,3,3] w) <float[8,6,3,3] w> { y = Conv(x, w) }",
        "branches": "(float[1,6,8,9] x, bool c) => (float[1,8,6,7] y) <float[8,6,3,3] w>"
        f" {{ u = Conv(x, w) z = If(c)<then_branch = t {branch}, else_branch = e {branch}> y = Add(u, z) }}",
    }[where]
    model = filled(f"m {text}")
    written = amp.convert(model, place="webgpu", keep_io=True).to_onnx()
    onnx.checker.check_model(written, full_check=True)
    feeds = {"x": np.random.default_rng(1).random((1, 6, 8, 9), dtype=np.float32), "c": np.array(True)}
    feeds = {value.name: feeds[value.name] for value in model.graph.input}
    for value in model.graph.output:
        wanted = run(model, value.name, **feeds)
        assert np.linalg.norm(run(written, value.name, **feeds) - wanted) < 1e-3 * np.linalg.norm(wanted)


@pytest.mark.parametrize(("opset", "shared"), [(17, False), (9, False), (17, True)])
def test_channels_that_a_kernel_reads_by_threes_are_padded(opset: int, shared: bool) -> None:
    more = "d = Conv(x, w) y = Add(c, d)" if shared else ""
    model = filled(conv(6, 8, opset=opset, more=more))
    program = amp.convert(model, place="webgpu", keep_io=True)
    convs = [op for op in program.walk() if op.type == "Conv"]
    assert all(op.inputs[0].shape[1] == op.inputs[1].shape[1] == 8 for op in convs)
    x = np.random.default_rng(1).random((1, 6, 8, 9), dtype=np.float32)
    written = program.to_onnx()
    onnx.checker.check_model(written, full_check=True)
    wanted = run(model, x=x)
    assert np.linalg.norm(run(written, x=x) - wanted) < 1e-3 * np.linalg.norm(wanted)
    assert all(op.type != "Pad" for op in amp.convert(model).walk())


@pytest.mark.parametrize(
    "text",
    [
        conv(3, 8),
        conv(12, 8),
        conv(6, 10),
        conv(5, 8),
        conv(6, 8, kernel=1),
        conv(6, 8, attrs="<group=1, strides=[1,1]>", kernel=1),
        "m (float[1,18,8,9] x) => (float[n,c,h,v] y) <float[12,6,3,3] w> { y = Conv<group=3>(x, w) }",
        "m (float[1,6,5,5,5] x) => (float[n,c,d,h,v] y) <float[8,6,3,3,3] w> { y = Conv(x, w) }",
    ],
)
def test_other_convolutions_stay(text: str) -> None:
    assert all(op.type != "Pad" for op in amp.convert(filled(text), place="webgpu").walk())


@pytest.mark.parametrize("kernel", [1, 3])
def test_steps_make_a_convolution_of_points_one_of_those(kernel: int) -> None:
    program = amp.convert(filled(conv(9, 4, kernel, attrs="<strides=[2,2]>")), place="webgpu")
    assert only(program, "Pad").outputs[0].shape[1] == 12


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"place": "cpu"}, ListError, "'cuda' or 'webgpu'"),
        ({"place": "tpu"}, ArgumentError, "cpu, cuda, webgpu"),
        ({"place": 3}, ArgumentError, "place is 3"),
        ({"place": "webgpu", "dtype": "bfloat16"}, ListError, "which WebGPU does not have; take 'float16'"),
        ({"place": "webgpu", "white_list": ["GRU"]}, ListError, "no WebGPU kernel for GRU"),
    ],
)
def test_what_cannot_be_asked_for(options: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        amp.convert(filled(RECURRENT), **options)


# -- faults ----------------------------------------------------------------------------------------------
FAULTS = {f"{fault.operator}: {fault.where}": fault for each in faults("webgpu").values() for fault in each}
#: What onnxruntime does not run on CPU.
NOT_ON_CPU = ("integers times a fraction", "truth values chosen")


def sample(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    found, random = {}, np.random.default_rng(1)
    for value in model.graph.input:
        kind = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        dims = value.type.tensor_type.shape.dim
        shape = [size.dim_value if size.HasField("dim_value") else 3 for size in dims]
        found[value.name] = (random.random(shape) * (1 if kind == np.float32 else 2)).astype(kind)
    return found


@pytest.mark.parametrize(("name", "text"), [(name, text) for name in FAULTS for text in MEET[name]])
def test_no_conversion_meets_a_kernel_that_fails(name: str, text: str) -> None:
    model, fault = filled(text), FAULTS[name]
    as_it_is = [amp.Program.from_onnx(model), amp.convert(model, numeric_guards=False)]
    assert any(fault_at("webgpu", op) == fault for each in as_it_is for op in each.walk())
    literally = amp.convert(model, place="webgpu", numeric_guards=False)
    program = amp.convert(model, place="webgpu")
    assert not [op for each in (program, literally) for op in each.walk() if fault_at("webgpu", op)]
    written = program.to_onnx()
    if all(onnx.defs.has(node.op_type, node.domain) for node in written.graph.node):
        onnx.checker.check_model(written, full_check=True)
    types = [[v.type.tensor_type.elem_type for v in m.graph.output] for m in (model, written)]
    assert types[0] == types[1]
    feeds = sample(model)
    if fault.where in NOT_ON_CPU:
        wanted, found = (ReferenceEvaluator(each).run(None, feeds)[0] for each in (model, written))
        np.testing.assert_array_equal(found, wanted.astype(found.dtype))
        return
    wanted = run(model, **feeds).astype(np.float32)
    found = run(written, **feeds).astype(np.float32)
    assert np.linalg.norm(found - wanted) <= 2e-3 * np.linalg.norm(wanted) + 1e-6


def test_what_16_bit_alone_fails_at_is_fp32() -> None:
    model = filled(MEET["ScatterND: 16-bit numbers combined"][0])
    for given in (model, amp.convert(model, numeric_guards=False).to_onnx()):  # written for another place
        program = amp.convert(given, place="webgpu", numeric_guards=False)
        scatters = [op for op in program.walk() if op.type == "ScatterND"]
        assert [op.precision for op in scatters] == ["float16", "float32", "float16"]  # alike but for an attribute
        assert scatters[1].why.kind is Kind.FAULT and "16-bit numbers combined" in str(scatters[1].why)
        fault = "the float16 kernel of WebGPU is faulty for such operands (16-bit numbers combined): the run ends with"
        assert f"ScatterND (1) stay float32: {fault} an error" in program.conversion.notes
        again = amp.convert(program.to_onnx(), place="webgpu", numeric_guards=False)
        assert [op.type for op in again.walk()] == [op.type for op in program.walk()]


def test_what_nothing_stands_for_is_told() -> None:
    model = filled("m (float[4,N] x) => (float[N] y) <float[4] w> { y = MatMul(w, x) }")
    told = amp.convert(model, place="webgpu").conversion.notes
    assert any("(MatMul) stays as it is, and its kernel there is wrong: the run ends" in note for note in told)


# -- sums ------------------------------------------------------------------------------------------------
def product(count: int, width: int = 64) -> onnx.ModelProto:
    return filled(
        f"m (float[4,{count}] x) => (float[n,o] y) <float[{count},{width}] w> {{ a = MatMul(x, w) y = Relu(a) }}"
    )


def test_a_long_sum_is_fp32_and_its_weights_are_16_bit() -> None:
    program = amp.convert(product(256), place="webgpu")
    op = only(program, "MatMul")
    assert op.precision == "float32" and op.why.kind is Kind.ROUNDED_SUM and parse(str(op.why)) == op.why
    assert (
        str(op.why) == "fp32: WebGPU adds it up in float16, an error worth 11 roundings of the result"
    )  # of sqrt(129)
    written = program.to_onnx()
    assert [tensor.data_type for tensor in written.graph.initializer] == [onnx.TensorProto.FLOAT16]
    x = np.random.default_rng(1).random((4, 256), dtype=np.float32)
    wanted = run(product(256), x=x)
    error = np.linalg.norm(run(written, x=x) - wanted) / np.linalg.norm(wanted)
    assert 1e-6 < error < 3e-4  # the weights are rounded, and nothing else
    assert only(amp.convert(product(256)), "MatMul").precision == "float16"
    assert any("1 operators are float32 for it" in note for note in program.conversion.notes)
    again = amp.convert(written, place="webgpu")
    assert [op.type for op in again.walk()] == [op.type for op in program.walk()]


def test_a_short_sum_stays_16_bit() -> None:
    assert only(amp.convert(product(6), place="webgpu"), "MatMul").precision == "float16"


def test_modes_that_ask_for_it_literally() -> None:
    program = amp.convert(product(256), place="webgpu", numeric_guards=False)
    assert only(program, "MatMul").precision == "float16"
    program = amp.convert(product(256), place="webgpu", white_list=["MatMul"])
    assert only(program, "MatMul").precision == "float16"


def test_a_function_that_is_computed_in_16_bit() -> None:
    model = filled(
        "m (float[64,64] x) => (float[64,64] y) <float[64] w> { m = Mul(x, w) a = Softmax(m) b = Neg(x) c = Neg(b) y = Add(a, c) }"
    )
    why = only(amp.convert(model, place="webgpu"), "Softmax").why
    assert why.kind is Kind.ROUNDED_INSIDE and why.runs == "fp32"


def test_a_weight_that_16_bit_operators_read_too_is_held_once() -> None:
    text = (
        "m (float[4,256] x, int64[9] ids) => (float[n,o] y, float[m,o] z) <float[256,64] w>"
        " { a = MatMul(x, w) y = Relu(a) b = Gather(w, ids) z = Neg(b) }"
    )
    program = amp.convert(filled(text), place="webgpu", keep_io=["x", "ids", "y"])
    assert only(program, "Gather").precision == "float16" and only(program, "MatMul").precision == "float32"
    (weight,) = program.to_onnx().graph.initializer
    assert weight.data_type == onnx.TensorProto.FLOAT16


def test_a_weight_that_16_bit_does_not_hold_stays() -> None:
    model = product(256)
    array = onnx.numpy_helper.to_array(model.graph.initializer[0]).copy()
    array[0, 0] = 1e6
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(array, "w"))
    (weight,) = amp.convert(model, place="webgpu").to_onnx().graph.initializer
    assert weight.data_type == onnx.TensorProto.FLOAT


def as_constant(model: onnx.ModelProto) -> onnx.ModelProto:
    """As Paddle2ONNX writes weights."""
    weight = model.graph.initializer.pop()
    model.graph.node.insert(0, onnx.helper.make_node("Constant", [], [weight.name], value=weight))
    return model


def in_both_branches(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same product in both branches of an If, which read the weight from outside."""
    g, nodes = model.graph, list(model.graph.node)
    del g.node[:]
    branch = onnx.helper.make_graph(nodes, "branch", [], list(g.output))
    g.node.append(onnx.helper.make_node("If", ["c"], [g.output[0].name], then_branch=branch, else_branch=branch))
    g.input.append(onnx.helper.make_tensor_value_info("c", onnx.TensorProto.BOOL, []))
    return model


@pytest.mark.parametrize("written", [as_constant, in_both_branches])
def test_where_a_weight_stands_makes_no_difference_to_its_storage(
    written: Callable[[onnx.ModelProto], onnx.ModelProto],
) -> None:
    converted = amp.convert(written(product(256)), place="webgpu").to_onnx()
    (weight,) = converted.graph.initializer
    assert weight.data_type == onnx.TensorProto.FLOAT16
    assert [node.op_type for node in converted.graph.node].count("Cast") == 1
    onnx.checker.check_model(converted, full_check=True)
    assert len(converted.SerializeToString()) < 0.6 * len(product(256).SerializeToString())


def test_a_stored_weight_is_no_input_of_the_file() -> None:
    model = product(256)
    weight = model.graph.initializer[0]
    model.graph.input.append(onnx.helper.make_tensor_value_info("w", weight.data_type, weight.dims))
    model.ir_version = 4
    written = amp.convert(model, place="webgpu").to_onnx()
    assert [value.name for value in written.graph.input] == ["x"]  # WebGPU sessions crash on a cast of such a one
    onnx.checker.check_model(written, full_check=True)
