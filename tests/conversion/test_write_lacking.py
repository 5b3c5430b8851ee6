"""What has no bfloat16 kernel on CUDA is written in other operators beside products in bfloat16, and there alone."""

from __future__ import annotations

import numpy as np
import pytest

import amp_transpiler as amp
from tests.helpers.converting import faithful, filled, off
from tests.helpers.sessions import session

NET = (
    '<ir_version: 8, opset_import: ["" : 18]>'
    " m (float[1,8,8,8] x) => (float[1,8,A,B] y) <float[8,8,3,3] w>"
    " { c = Conv<pads = [1, 1, 1, 1]>(x, w) a = TAIL z = LeakyRelu<alpha = 0.1>(a) y = GlobalAveragePool(z) }"
)
#: Windows of 5 x 5 of few channels: written out they would move more than bfloat16 saves, and the opset stays.
POOLS = "MaxPool<kernel_shape = [5, 5], pads = [2, 2, 2, 2]>(c)"


def types_of(tail: str, **options: object) -> dict[str, str | None]:
    program = amp.convert(filled(NET.replace("TAIL", tail)), dtype="bfloat16", **options)  # type: ignore[arg-type]
    return {op.type: op.precision for op in program.operators if op.type != "Cast"}


def test_what_stands_for_them_runs_in_bfloat16() -> None:
    assert types_of("Relu(c)") == dict.fromkeys(("Conv", "Relu", "Mul", "Max", "ReduceMean"), "bfloat16")


def test_in_fp32_they_stay_one_kernel_each() -> None:
    assert types_of(POOLS) == dict.fromkeys(("Conv", "MaxPool", "LeakyRelu", "GlobalAveragePool"), "float32")


@pytest.mark.parametrize(
    "options", [{"black_list": ["LeakyRelu"]}, {"exclude": ["re:.*z.*"]}, {"black_varnames": ["z"]}]
)
def test_what_the_user_keeps_stays(options: dict[str, object]) -> None:
    found = types_of("Relu(c)", **options)
    assert found["LeakyRelu"] == "float32" and "Mul" not in found


def test_a_norm_without_a_convolution_is_a_sum_and_a_product() -> None:
    model = filled(
        '<ir_version: 8, opset_import: ["" : 22]> m (float[1,4,8,8] x) => (float[1,4,6,6] y)'
        " <float[4,4,3,3] w, float[4] s, float[4] b, float[4] mu, float[4] v>"
        " { r = Relu(x) n = BatchNormalization(r, s, b, mu, v) y = Conv(n, w) }"
    )
    program = amp.convert(model, dtype="bfloat16")
    assert [op.type for op in program.operators] == ["Cast", "Relu", "Add", "Mul", "Conv", "Cast"]
    assert not {v.name for v in program.variables} & {"s", "b", "mu", "v"}, "unused weights go"
    x = np.random.default_rng(0).standard_normal((1, 4, 8, 8), np.float32)
    assert off(faithful(program, {"x": x})[0], session(model).run(None, {"x": x})[0]) < 0.005


def test_transposed_convolutions_that_are_written_as_convolutions_are_products_in_bfloat16() -> None:
    model = filled(
        '<ir_version: 8, opset_import: ["" : 22]> m (float[1,4,H,W] x) => (float[1,4,A,B] y) <float[4,4,2,2] w>'
        " { r = ConvTranspose<strides=[2,2]>(x, w) y = LeakyRelu(r) }"
    )
    program = amp.convert(model, dtype="bfloat16")
    assert {op.type: op.precision for op in program.operators}["Conv"] == "bfloat16"
    x = np.random.default_rng(0).standard_normal((1, 4, 5, 6), np.float32)
    assert off(faithful(program, {"x": x})[0], session(model).run(None, {"x": x})[0]) < 0.01
