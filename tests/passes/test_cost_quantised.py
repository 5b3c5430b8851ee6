"""What quantised models cost: their integer products count, and a shape that nobody knows is told by its operator."""

from __future__ import annotations

import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.passes.lowering.cost_estimate import CostEstimate

SCALES = "float s = {0.1}, uint8 z = {128}"


def estimate(body: str, inputs: str, outputs: str, more: str = "") -> CostEstimate:
    text = (
        '<ir_version: 9, opset_import: ["" : 17, "com.microsoft" : 1]> '
        f"g ({inputs}) => ({outputs}) <{SCALES}{more}> {{ {body} }}"
    )
    return amp.Program.from_onnx(onnx.parser.parse_model(text)).cost_estimate(amp.CUDAPlace(0))


@pytest.mark.parametrize(
    ("body", "inputs", "outputs", "flops"),
    [
        ("y = MatMulInteger(a, b)", "uint8[4, 8] a, uint8[8, 16] b", "int32[4, 16] y", 2 * 4 * 8 * 16),
        ("y = QLinearMatMul(a, s, z, b, s, z, s, z)", "uint8[2, 4, 8] a, uint8[8, 16] b", "uint8[2, 4, 16] y", 2048),
        ("y = ConvInteger(a, b)", "uint8[1, 3, 9, 9] a, uint8[5, 3, 3, 3] b", "int32[1, 5, 7, 7] y", 2 * 245 * 27),
        (
            "y = QLinearConv(a, s, z, b, s, z, s, z)",
            "uint8[1, 3, 9, 9] a, uint8[5, 3, 3, 3] b",
            "uint8[1, 5, 7, 7] y",
            2 * 245 * 27,
        ),
    ],
)
def test_integer_products_count(body: str, inputs: str, outputs: str, flops: int) -> None:
    found = estimate(body, inputs, outputs)
    assert (found.flops_16, found.flops_32) == (0, flops)
    assert [kernel.dtype for kernel in found.work] == ["uint8"]


@pytest.mark.parametrize("type_", ["QLinearAdd", "QLinearMul"])
def test_sums_of_quantised_numbers_are_broadcast(type_: str) -> None:
    body = (
        f"q = QuantizeLinear(x, s, z)  a = com.microsoft.{type_}(q, s, z, b, s, z, s, z)  y = DequantizeLinear(a, s, z)"
    )
    found = estimate(body, "float[1, 4, 8] x, uint8[3, 1, 8] b", "float[3, 4, 8] y")
    assert found.bytes_by_type["uint8"] >= 2 * 96


def test_an_operator_without_a_shape_rule_is_named() -> None:
    body = "[p] a = com.microsoft.CDist(x, x)  y = Relu(a)"
    with pytest.raises(amp.AmpError, match=r"com.microsoft::CDist 'p'.* has no shape rule here; declare 'a'"):
        estimate(body, "float[4, 8] x", "float[4, 4] y")


def test_so_is_one_whose_sizes_hang_on_data() -> None:
    body = "q = SplitToSequence(x, sizes)  [c] n = ConcatFromSequence <axis = 0> (q)  y = Relu(n)"
    with pytest.raises(amp.AmpError, match="SplitToSequence .*hang on data or feeds; give the shapes of all feeds"):
        estimate(body, "float[4, 8] x, int64[2] sizes", "float[4, 8] y")
