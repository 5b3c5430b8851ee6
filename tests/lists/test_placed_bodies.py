"""Operators by their function bodies: where the table says that they run, onnxruntime has them on CUDA, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest
from onnx import TensorProto, helper

from amp_transpiler.lists import has_kernel, unsupported_reason
from amp_transpiler.lists._schemas import schema_at
from tests.helpers.placement import left_on_cpu, needs_placement_tool

_TYPES = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
#: Operators of one input that some types and opsets have no kernel of.
OPERATORS = ["ReduceL1", "ReduceL2", "ReduceLogSumExp", "ReduceSumSquare", "Elu", "Selu", "ThresholdedRelu"]
OPERATORS += ["Mish", "Swish", "Celu", "Softsign", "Softplus", "LogSoftmax", "MeanVarianceNormalization", "Bernoulli"]


@pytest.mark.parametrize("op_type", OPERATORS)
@needs_placement_tool
def test_a_body_counts_where_onnxruntime_uses_it(op_type: str, tmp_path: Path) -> None:
    asked = 0
    for opset in range(18, 27):
        for dtype, elem_type in _TYPES.items():
            newer = schema_at(op_type, opset, "") is None
            if newer or has_kernel("CUDAExecutionProvider", op_type, dtype, opset):
                continue
            x, y = (helper.make_tensor_value_info(name, elem_type, [2, 3, 4, 5]) for name in ("x", "y"))
            graph = helper.make_graph([helper.make_node(op_type, ["x"], ["y"], "n")], "g", [x], [y])
            if op_type.startswith("Reduce"):
                y.type.tensor_type.ClearField("shape")
            model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
            try:
                there = not left_on_cpu(model, tmp_path / "node.onnx")
            except AssertionError:
                there = False
            assert there == (unsupported_reason(op_type, dtype, opset) is None), (dtype, opset)
            asked += 1
    assert asked
