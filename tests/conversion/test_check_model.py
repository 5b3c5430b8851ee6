"""``amp.check_model``: models that others made, replayed as a place computes them; what leaves first is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.cli.main import main
from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.passes.view.names import label
from tests.corpora.leaving import CASES
from tests.helpers.sessions import session


@pytest.mark.parametrize(  # on CPU results are rounded as on CUDA
    ("name", "kind"), [*((name, kind) for name in CASES for kind in ("cuda", "webgpu")), ("norm", "cpu")]
)
def test_the_operator_that_leaves_and_why(name: str, kind: str) -> None:
    case = CASES[name]
    found = amp.check_model(case.model(), kind, data=case.sample())
    leaving = found.leaving
    assert (f"{leaving.type} {leaving.cause.value}" if leaving is not None else "") == case.on(kind), str(found)
    assert found.ok == (leaving is None) and bool(found.missed) == (leaving is not None)
    assert leaving is None or leaving.sudden


def test_what_is_said() -> None:
    case = CASES["between"]
    found = amp.check_model(case.model(), amp.WebGPUPlace(0), data=case.sample())
    leaving = found.leaving
    assert leaving is not None and leaving.summands == 8192 and leaving.tensor == "g" and leaving.before == 0
    assert leaving.largest < 1000 and leaving.error == np.inf
    assert "8192 summands up in float16: a partial result leaves it" in str(found)
    assert "--place webgpu" in leaving.cure and found.outputs["y"] == np.inf
    assert [step.op.type for step in found.operators] == ["Split", "Neg", "Concat", "Gemm", "Neg"]
    small = amp.check_model(CASES["small"].model(), data=CASES["small"].sample())
    assert small.leaving is not None and "sinks to zero" in small.leaving.says
    divisor = amp.check_model(CASES["divisor"].model(), data=CASES["divisor"].sample())
    assert divisor.leaving is not None and "64 numbers sink to zero, and 'Div -> y' makes" in divisor.leaving.says


def test_weights_that_became_infinite_are_named() -> None:
    text = "m (float16[2,8] x) => (float16[2,4] y) <float16[8,4] w> { y = MatMul(x, w) }"
    model = onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 17]>\n' + text)
    with np.errstate(over="ignore"):
        array = np.full((8, 4), 1e5).astype(np.float16)
    model.graph.initializer.append(onnx.numpy_helper.from_array(array, "w"))
    del model.graph.value_info[:]
    found = amp.check_model(model)
    assert found.infinite == {"w": 32} and "weight 'w' holds numbers that are not finite: 32" in str(found)
    assert found.leaving is not None and found.leaving.cause.value == "no numbers in fp32 either"


def test_sequences_are_measured() -> None:
    text = (
        "m (float16[2,8] x) => (seq(float16[1,8]) p) { s = SplitToSequence<axis=0>(x)"
        " p = SequenceMap(s)<body = b(float16[1,8] e) => (float16[1,8] f) { f = Mul(e, e) }> }"
    )
    model = onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 17]>\n' + text)
    found = amp.check_model(model, data={"x": np.full((2, 8), 300, np.float16)})
    assert found.leaving is not None and found.leaving.type == "SequenceMap" and found.outputs == {"p": np.inf}
    assert found.leaving.cause.value == "overflow" and found.leaving.largest == 90000


def test_sequences_are_measured_beside_bfloat16() -> None:
    """Which onnxruntime hands out as no array, where a run gives a sequence too."""
    text = (
        "m (float[2,8] x) => (float[2,8] y) { b = Cast<to=16>(x) m = Mul(b, b) f = Cast<to=1>(m)"
        " s = SplitToSequence<axis=0>(f) y = ConcatFromSequence<axis=0>(s) }"
    )
    model = onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 17]>\n' + text)
    found = amp.check_model(model, data={"x": np.full((2, 8), 1 / 3, np.float32)})
    assert found.ok and 0 < found.outputs["y"] < 0.01


def test_what_is_not_followed_is_named() -> None:
    text = (
        "m (float16[2,64] x) => (float16[2,8] y) <float16[64,8] w, uint8[8,2,16] b, float16[16] scales>"
        " { s = SplitToSequence<axis=0>(x) a = ConcatFromSequence<axis=0>(s) m = MatMul(a, w)"  # of a size nobody knows
        " c = Cosh(x) l = ReduceLogSum<axes=[1]>(c) q = com.microsoft.MatMulNBits<K=64,N=8,block_size=32>(x, b, scales)"
        " p = Mul(m, q) y = Mul(p, l) }"
    )
    model = onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>\n' + text)
    for name, array in {
        "w": np.ones((64, 8), np.float16),
        "b": np.ones((8, 2, 16), np.uint8),
        "scales": np.ones(16, np.float16),
    }.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    del model.graph.value_info[:]
    feeds = {"x": np.ones((2, 64), np.float16)}
    found = amp.check_model(model, "webgpu", data=feeds).not_emulated
    assert found == ("Cosh", "MatMul", "com.microsoft::MatMulNBits")
    assert amp.check_model(model, data=feeds).not_emulated == ("com.microsoft::MatMulNBits",)


def test_sums_in_branches_are_followed_whose_sizes_the_feeds_say() -> None:
    text = (
        "m (float16[N,4096] x, bool c) => (float16[N,4] y) <float16[4096,4] w> { h = Abs(x)"
        " y = If(c)<then_branch = yes() => (float16[N,4] a) { a = MatMul(h, w) },"
        " else_branch = no() => (float16[N,4] a) { a = MatMul(x, w) }> }"
    )
    model = onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 17]>\n' + text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((4096, 4), np.float16), "w"))
    del model.graph.value_info[:]
    found = amp.check_model(model, "webgpu", data={"x": np.ones((2, 4096), np.float16), "c": np.array(True)})
    assert found.outputs == {"y": 0.5} and found.not_emulated == ()
    assert found.leaving is not None and found.leaving.type == "If"


def test_errors_that_grow_bit_by_bit_name_what_adds_most() -> None:
    text = (
        "m (float16[1,64] x) => (float16[1,64] y) <float16[64,64] w>"
        " { k = Constant<value = float16[1] {1}>() a = MatMul(x, w) b = Tanh(a) c = Mul(b, k) y = MatMul(c, w) }"
    )
    model = onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 17]>\n' + text)
    array = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float16)
    model.graph.initializer.append(onnx.numpy_helper.from_array(array, "w"))
    del model.graph.value_info[:]
    found = amp.check_model(model, "webgpu", tolerance=1e-5)
    assert found.leaving is not None and found.leaving.type == "MatMul"


def test_a_conversion_for_the_place_has_nothing_to_say_against() -> None:
    case = CASES["sums"]
    model = case.model()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    for tensor in model.graph.initializer:
        tensor.CopyFrom(
            onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor).astype(np.float32), tensor.name)
        )
    feeds = {name: array.astype(np.float32) for name, array in case.sample().items()}
    assert amp.check_model(amp.convert(model, place="webgpu").to_onnx(), "webgpu", data=feeds).ok


def test_operators_without_a_kernel() -> None:
    text = (
        '<ir_version: 8, opset_import: ["" : 17]> m (float16[4,1,8] x, float16[1,24,8] w, float16[1,24,8] r) =>'
        " (float16[4,1,1,8] y) { a = Relu(x) y, h = GRU<hidden_size=8>(a, w, r) }"
    )
    model = onnx.parser.parse_model(text)
    found = amp.check_model(model, "webgpu")
    assert found.ok and list(found.without_kernel.values()) == [1]
    assert "GRU (no WebGPU kernel for GRU at float16" in str(found)
    assert not amp.check_model(model, "cuda").without_kernel and not amp.check_model(model, "cpu").without_kernel
    text = (
        '<ir_version: 8, opset_import: ["" : 18]> m (float16[4] x) => (float16[4] y) { a = HardSwish(x) y = Mish(a) }'
    )
    model = onnx.parser.parse_model(text)
    assert session(model).run(None, {"x": np.ones(4, np.float16)}), "by their bodies, between casts"
    assert not amp.check_model(model, "cpu").without_kernel
    text = '<ir_version: 8, opset_import: ["" : 17]> m (bfloat16[4,4] x) => (bfloat16[4,4] y) { y = MatMul(x, x) }'
    found = amp.check_model(onnx.parser.parse_model(text), "cpu")
    assert found.ok and "onnxruntime by itself does not run it" in str(found)

    text = (
        '<ir_version: 8, opset_import: ["" : OPSET]> m (float16[1,1,4,4] x) => (float16[1,1,3,3] y)'
        " { y = AveragePool<kernel_shape=[2,2]>(x) }"
    )
    checks = [
        amp.check_model(onnx.parser.parse_model(text.replace("OPSET", opset)), "webgpu") for opset in ("17", "19")
    ]
    assert [len(check.without_kernel) for check in checks] == [0, 1]  # the file's own opset counts

    text = (
        '<ir_version: 8, opset_import: ["" : 17]> m (float16[3,4] x) => (float16[3,4] y)'
        " { y = Scan<num_scan_inputs=1, body = b (float16[4] v) => (float16[4] w) { w = Relu(v) }>(x) }"
    )
    checks = [amp.check_model(onnx.parser.parse_model(text), place) for place in ("webgpu", "cuda", "cpu")]
    assert [len(check.without_kernel) for check in checks] == [1, 0, 0]


@pytest.mark.parametrize(
    ("graph", "what"),
    [
        ("(float16[1,6,8,9] x, float16[8,6,3,3] w) => (float16[1,8,6,7] y) { y = Conv(x, w) }", "reads three channels"),
        (
            "(float16[1,1,4,4] x) => (float16[1,1,3,3] y, int64[1,1,3,3] i) { y, i = MaxPool<kernel_shape=[2,2]>(x) }",
            "indices wanted: the run ends with an error",
        ),
        ("(float16[4,5] x) => (float16[4,1] y) { y = ReduceLogSumExp<axes=[1]>(x) }", "exponentials as they are"),
    ],
)
def test_kernels_that_fail(graph: str, what: str) -> None:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> m {graph}')
    found = amp.check_model(model, "webgpu", tolerance=1)
    assert not found.ok and not found.missed and what in str(found)
    assert not amp.check_model(model, "cuda", tolerance=1).faults


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"place": "tpu"}, "cpu, cuda, webgpu"),
        ({"tolerance": -1}, "tolerance"),
        ({"time_budget": "8 s"}, "time_budget is '8 s'; expected a number"),
        ({"time_budget": 0}, "time_budget is 0; expected a number above 0"),
        ({}, "nothing is there to replay"),
    ],
)
def test_what_cannot_be_checked(change: dict[str, Any], text: str) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> m (float[4] x) => (float[4] y) { y = Relu(x) }'
    )
    with pytest.raises((ArgumentError, ArgumentTypeError), match=text):
        amp.check_model(model, **change)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = CASES["mean"]
    path, data = tmp_path / "model.onnx", tmp_path / "data.npz"
    onnx.save(case.model(), path)
    np.savez(data, **case.sample())
    assert main(["check", str(path), "--data", str(data)]) == 0
    assert "4 operators" not in capsys.readouterr().out
    assert main(["check", str(path), "--place", "webgpu", "--data", str(data)]) == 3
    out = capsys.readouterr().out
    assert "leaves at 'ReduceMean -> m' (ReduceMean): overflow of a partial sum" in out and "256 summands" in out


def test_the_record_is_written_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = CASES["mean"]
    model, data, out = tmp_path / "m.onnx", tmp_path / "data.npz", tmp_path / "found.json"
    onnx.save(case.model(), model)
    np.savez(data, **case.sample())
    command = ["check", str(model), "--data", str(data), "--place", "webgpu", "--json"]
    assert main([*command, str(out)]) == 3 and main([*command, str(data)]) == 2
    assert "are the same file" in capsys.readouterr().err
    found, told = amp.check_model(model, "webgpu", data=str(data)), json.loads(out.read_text("ascii"))
    assert told == found.to_dict() and told["missed"] == list(found.missed) and not told["ok"]
    assert found.leaving is not None and told["leaving"]["cause"] == "overflow of a partial sum"
    assert [each["operator"] for each in told["operators"]] == [label(each.op) for each in found.operators]
    assert told["outputs"] == {"y": "Infinity"}, "JSON has no number for it"
