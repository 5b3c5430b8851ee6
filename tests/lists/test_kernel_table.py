"""The kernel table: what a provider has kernels for, and why an operator is not supported."""

import json
import re

import pytest

from amp_transpiler import lists
from amp_transpiler.errors import ListError
from amp_transpiler.lists import has_kernel, kernel_types, lowering_gap, plain_domain, unsupported_reason
from amp_transpiler.lists._data import read_text
from tests.helpers.where import ORACLES
from tests.record import webgpu_operators

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"


# ---------------------------------------------------------------- kernels


def test_an_open_ended_kernel_serves_one_schema_version_only():
    # MaxPool on CUDA: "12+"; its schema is of version 12 up to opset 21, of version 22 from then on.
    assert kernel_types(CUDA, "MaxPool", 21) == {"I": {"int64"}, "T": {"double", "float", "float16", "int8", "uint8"}}
    assert kernel_types(CUDA, "MaxPool", 22) is None
    # a range, "1-7", serves a schema inside it
    assert kernel_types(CUDA, "MaxPool", 7) == {"T": {"double", "float", "float16"}}
    # a single number, "14", serves that version alone
    assert kernel_types(CUDA, "BatchNormalization", 14) == {
        "T": {"double", "float", "float16"},
        "U": {"double", "float", "float16"},
    }


@pytest.mark.parametrize(
    ("provider", "op_type", "opset", "domain"),
    [
        (CUDA, "MaxUnpool", 21, ""),  # no kernel at all
        (CUDA, "Attention", 21, ""),  # newer than the opset
        (CUDA, "Upsample", 21, ""),  # deprecated at that opset
        (CUDA, "NoSuchThing", 21, ""),
        (CUDA, "MatMul", 21, "my.own"),
    ],
)
def test_no_kernel(provider, op_type, opset, domain):
    assert kernel_types(provider, op_type, opset, domain) is None
    assert not has_kernel(provider, op_type, "float16", opset, domain)


@pytest.mark.parametrize(
    ("op_type", "dtypes"),
    [
        ("MatMul", {"float16", "bfloat16", "float32", "float64"}),
        ("Conv", {"float16", "float32", "float64"}),
        ("Cast", {"float16", "bfloat16", "float32", "float64"}),
        ("OneHot", {"float16", "float32"}),  # for its indices there are integer kernels only
        ("Dropout", {"float16", "bfloat16", "float32", "float64"}),
        ("EyeLike", {"float32", "float64"}),
        ("Range", {"float32", "float64"}),
        ("IsInf", {"float16", "bfloat16", "float32", "float64"}),
        ("SequenceAt", {"float16", "float32", "float64"}),  # CUDA has bfloat16, the operator's schema does not admit it
        ("ai.onnx::Shape", {"float16", "bfloat16", "float32", "float64"}),
        ("com.microsoft::FusedMatMul", {"float16", "bfloat16", "float32", "float64"}),
    ],
)
def test_has_kernel_on_cuda(op_type, dtypes):
    domain, _, name = op_type.rpartition("::")
    every = ("float16", "bfloat16", "float32", "float64")
    assert {dtype for dtype in every if has_kernel(CUDA, name, dtype, 21, domain)} == dtypes


def test_a_kernel_may_be_lost_or_gained_by_opset():
    assert not has_kernel(CUDA, "Conv", "bfloat16", 21) and has_kernel(CUDA, "Conv", "bfloat16", 22)
    assert has_kernel(CUDA, "Dropout", "float16", 21) and not has_kernel(CUDA, "Dropout", "float16", 22)
    assert not has_kernel(CUDA, "IsInf", "float16", 19) and has_kernel(CUDA, "IsInf", "float16", 20)
    assert has_kernel(CPU, "MatMul", "float32", 21) and not has_kernel(CPU, "MatMul", "float16", 21)


def test_the_kernel_table_refuses_what_it_does_not_know():
    with pytest.raises(ListError, match="no provider 'TPU'; it has CPUExecutionProvider, CUDAExecutionProvider"):
        kernel_types("TPU", "MatMul", 21)
    with pytest.raises(ListError, match="no element type 'float'; expected one of float16, bfloat16"):
        has_kernel(CUDA, "MatMul", "float", 21)


WEBGPU = "WebGpuExecutionProvider"


@pytest.mark.parametrize(
    ("op_type", "types", "in_plugin"),
    [
        ("MatMul", {"T": {"float", "float16"}}, {"T": {"float", "float16"}}),
        ("LogSoftmax", None, None),
        ("Sum", None, None),
        ("IsNaN", None, None),
        (
            "Where",
            {"T": {"bool", "float", "float16", "int32", "uint32"}},
            {"T": {"bool", "float", "float16", "int32", "uint32"}},
        ),
        ("Max", None, {"T": {"float", "float16", "int32", "uint32"}}),  # the built-in provider of 1.27 has none
        ("AveragePool", None, {"T": {"float", "float16"}}),  # there it ends with opset 18
        ("Tile", {"T": {"float", "float16"}}, {"T": {"float", "float16", "int32", "uint32"}}),
    ],
)
def test_kernels_of_webgpu(op_type, types, in_plugin):
    assert kernel_types(WEBGPU, op_type, 21) == types
    assert kernel_types(f"{WEBGPU}/plugin", op_type, 21) == in_plugin


@pytest.mark.parametrize("domain", ["ai.onnx", "com.microsoft"])
def test_the_plugin_of_webgpu_has_what_both_have(domain):
    table = json.loads(read_text("kernels.json"))["kernels"]
    for op_type in table[WEBGPU][domain]:
        for opset in range(7, 24) if domain == "ai.onnx" else (1,):
            both = kernel_types(WEBGPU, op_type, opset, plain_domain(domain))
            if both is not None:
                plugin = kernel_types(f"{WEBGPU}/plugin", op_type, opset, plain_domain(domain))
                assert plugin is not None and all(both[param] <= plugin[param] for param in both)


#: Its branches, a version of onnxruntime's own, and an operator newer than the opset.
WITHOUT_CASES = {"If", "SimplifiedLayerNormalization", "RotaryEmbedding"}


def test_every_kernel_of_webgpu_has_run():
    table = json.loads(read_text("kernels.json"))["kernels"]
    assert set(table[f"{WEBGPU}/plugin"]["ai.onnx"]) - set(webgpu_operators.ALL) == WITHOUT_CASES
    assert set(webgpu_operators.recorded("plugin")) == {str(case) for case in webgpu_operators.numbered()}


GAPS = json.loads((ORACLES / "onnxruntime_kernel_opset_gaps.json").read_text())


@pytest.mark.parametrize("key", [key for key in GAPS if re.fullmatch(rf"({CPU}|{CUDA})@\d+", key)])
def test_opset_gaps_are_the_recorded_ones(key):
    gaps = GAPS[key]
    provider, _, opset = key.partition("@")
    lacking = [(op, kernel_types(provider, op, int(opset))) for op in gaps["no_kernel"]]
    lacking += [(op, has_kernel(provider, op, "float16", int(opset))) for op in gaps["no_fp16"]]
    lacking += [(op, has_kernel(provider, op, "bfloat16", int(opset))) for op in gaps["no_bf16"]]
    assert [op for op, found in lacking if found] == []


# ---------------------------------------------------------------- unsupported


@pytest.mark.parametrize(
    ("op_type", "dtype", "reason"),
    [
        ("MatMul", "float16", None),
        ("MatMul", "bfloat16", None),
        ("Constant", "float16", None),
        ("Attention", "float16", None),  # newer than the opset: its function body runs
        ("SoftmaxCrossEntropyLoss", "float16", None),
        ("GroupNormalization", "bfloat16", None),
        ("RotaryEmbedding", "float16", None),
        ("com.microsoft::FusedMatMul", "float16", None),
        ("my.own::Thing", "float16", None),
        ("MaxUnpool", "float16", "no CUDA kernel for MaxUnpool at float16 in opset 21, and no function body"),
        ("Conv", "bfloat16", "no CUDA kernel for Conv at bfloat16 in opset 21, and its schema does not admit bfloat16"),
        (
            "PRelu",
            "bfloat16",
            "no CUDA kernel for PRelu at bfloat16 in opset 21, and its function body was written for older versions of "
            "Constant, CastLike",
        ),
        (
            "Clip",  # with bounds; without any its body is Identity
            "bfloat16",
            "no CUDA kernel for Clip at bfloat16 in opset 21, and its function body has no lowering: "
            "no CUDA kernel for Less at bfloat16 in opset 21, and no function body",
        ),
        (
            "MeanVarianceNormalization",
            "float16",
            "no CUDA kernel for MeanVarianceNormalization at float16 in opset 21, and its function body was written for "
            "older versions of Constant",
        ),
        ("com.microsoft::MurmurHash3", "float16", "no CUDA kernel for MurmurHash3 at float16 in opset 21"),
    ],
)
def test_unsupported_reason(op_type, dtype, reason):
    assert lists.unsupported_reason(op_type, dtype) == reason


@pytest.mark.parametrize(
    ("op_type", "dtype", "used", "not_used"),
    [
        ("ReduceLogSumExp", "bfloat16", 18, 19),  # Cast is another from 19 on
        ("ReduceL2", "bfloat16", 18, 21),
        ("ReduceL1", "bfloat16", 26, None),  # nothing in it has changed
        ("Elu", "float16", 21, 22),  # a kernel, then the body of opset 18
        ("Swish", "bfloat16", 24, 25),
        ("HannWindow", "float16", 18, 19),
        ("GroupNormalization", "bfloat16", 26, None),  # its body depends on the node
        ("Bernoulli", "float16", 26, None),
        ("Bernoulli", "bfloat16", None, 21),  # its result alone may be of the type
    ],
)
def test_bodies_that_onnxruntime_uses(op_type, dtype, used, not_used):
    assert used is None or unsupported_reason(op_type, dtype, used) is None
    assert not_used is None or unsupported_reason(op_type, dtype, not_used) is not None


def test_a_place_with_bodies_of_ours_does_not_ask_whether_onnxruntime_uses_its_own():
    assert "older versions" in unsupported_reason("Softsign", "float16", place="webgpu")
    assert lowering_gap("Softsign", "float16", place="webgpu") is None
