"""On CUDA an operator in fp32 between two casts is its float16 kernel, where that computes in fp32 and rounds once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.nn import functional as F
from amp_transpiler.passes.lowering.lowered import Lowered
from amp_transpiler.passes.lowering.lowering import lower
from tests.helpers import cuda_sessions
from tests.helpers.node_by_node import node_by_node
from tests.helpers.ports import fed

Made = Callable[[Variable], Variable]
X = np.random.default_rng(0).normal(size=(4, 6, 32)).astype(np.float16) * np.float16(3)


def lowered(made: Made, dtype: str = "float16", also: Made | None = None, whole: bool = False) -> Lowered:
    """A parameter of 16 bit that is widened, what is made of it in fp32, and that in 16 bit; fp32 is fetched too, or read
    by ``also``, if asked."""
    main, startup = amp.Program("main"), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        wide = made(F.cast(amp.create_parameter(X.shape, dtype, "x"), "float32"))
        fetches = [F.cast(wide, dtype), *([wide] if whole else []), *([also(wide)] if also else [])]
    return lower(main, "cuda", {}, fetches)


def kernels(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def mean(x: Variable) -> Variable:
    return F.mean(x, axis=[2])


def total(x: Variable) -> Variable:
    return F.sum(x, axis=[0, 2])


@pytest.mark.parametrize("made", [F.gelu, mean, total], ids=["Gelu", "ReduceMean", "ReduceSum"])
def test_one_kernel_stands_for_three(made: Made) -> None:
    found = lowered(made)
    assert len(kernels(found.model)) == 1
    known = node_by_node(found.model, fed(found.states, {"x": X}.get))
    narrow = known[found.fetches[0].tensor]
    both = lowered(made, whole=True)
    wide = node_by_node(both.model, fed(both.states, {"x": X}.get))[both.fetches[1].tensor]
    assert narrow.dtype == np.float16 and wide.dtype == np.float32
    np.testing.assert_array_equal(narrow, wide.astype(np.float16))


def tanh_gelu(x: Variable) -> Variable:
    return F.gelu(x, approximate=True)


@pytest.mark.parametrize(
    "given",
    [
        {"made": F.gelu, "whole": True},
        {"made": F.gelu, "also": F.relu},
        {"made": F.gelu, "dtype": "bfloat16"},
        {"made": tanh_gelu},
        {"made": F.softplus},
    ],
    ids=["fetched", "read in fp32", "bfloat16", "computes in 16 bit", "not known"],
)
def test_others_stay_fp32(given: dict[str, Any]) -> None:
    found = kernels(lowered(**given).model)
    assert found[0] == found[2] == "Cast" or found.count("Cast") == 2


@pytest.mark.gpu
def test_gelu_has_the_bits_of_fp32() -> None:
    """Of every finite number."""
    x = np.arange(2**16, dtype=np.uint16).view(np.float16)
    x = x[np.isfinite(x)]
    info = onnx.helper.make_tensor_value_info
    nodes = [
        onnx.helper.make_node("Gelu", ["x"], ["narrow"]),
        onnx.helper.make_node("Cast", ["x"], ["wide"], to=onnx.TensorProto.FLOAT),
        onnx.helper.make_node("Gelu", ["wide"], ["made"]),
    ]
    outputs = [info("narrow", onnx.TensorProto.FLOAT16, x.shape), info("made", onnx.TensorProto.FLOAT, x.shape)]
    graph = onnx.helper.make_graph(nodes, "both", [info("x", onnx.TensorProto.FLOAT16, x.shape)], outputs)
    model = onnx.helper.make_model(graph, ir_version=10, opset_imports=[onnx.helper.make_opsetid("", 20)])
    narrow, made = cuda_sessions.run(model, {"x": x})
    np.testing.assert_array_equal(narrow.view(np.uint16), made.astype(np.float16).view(np.uint16))
