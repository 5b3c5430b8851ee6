"""Bounds beyond the range of 16 bit bound nothing there: they end where the range does, and cost no casts."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import PrecisionError
from amp_transpiler.ir.types import LIMITS
from amp_transpiler.nn import functional as F
from amp_transpiler.passes.view import constants
from tests.helpers.constraints_of import run_faithful, without_parameters

LARGE = {"float16": 1e9, "bfloat16": 3.4e38}
BOUNDED = ["Clip(a, zero, high)", "Clip(a, low, one)", "Clip(a, low, high)", "Min(a, high)", "Max(low, a)"]


def model(call: str, large: float) -> onnx.ModelProto:
    found = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 18]> main (float[N,8] x) => (float[N,8] y)
        <float[8,8] w, float zero = {{0}}, float one = {{1}}, float low = {{-{large!r}}}, float high = {{{large!r}}}>
        {{ a = MatMul(x, w)  c = {call}  y = MatMul(c, w) }}"""
    )
    w = np.random.default_rng(0).normal(0, 0.5, (8, 8)).astype(np.float32)
    found.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    return found


@pytest.mark.parametrize("mode", ["pure", "mixed"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("call", BOUNDED)
def test_they_are_converted_with_what_they_bound(call: str, dtype: str, mode: str) -> None:
    given = model(call, LARGE[dtype])
    converted = amp.convert(given, mode=mode, dtype=dtype).to_onnx()
    assert [node.op_type for node in converted.graph.node].count("Cast") == 2
    x = {"x": np.random.default_rng(1).normal(size=(4, 8)).astype(np.float32)}
    right, found = (run_faithful(without_parameters(amp.Program.from_onnx(m)), x)[0] for m in (given, converted))
    assert np.linalg.norm(found - right) < 4 * LIMITS[dtype].epsilon * np.linalg.norm(right)


def test_what_may_leave_the_range_stays_fp32_with_its_bound() -> None:
    given = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 18]> main (float[4,64] x) => (float[4,1] y)
        <float low = {0}, float high = {1e9}, int64[1] last = {1}>
        { a = ReduceSumSquare(x, last)  c = Clip(a, low, high)  y = Sqrt(c) }"""
    )
    x = {"x": np.full((4, 64), 300, np.float32)}
    (found,) = run_faithful(amp.Program.from_onnx(amp.convert(given).to_onnx()), x)
    np.testing.assert_allclose(found, np.full((4, 1), 2400), rtol=1e-3)


def trained(guarded: bool, factor: bool = False) -> amp.Program:
    main = amp.Program("main")
    optimizer = amp.decorate(amp.optimizer.SGD(0.1, multi_precision=True), use_pure_fp16=True)
    with amp.program_guard(main, main.startup), amp.unique_name.guard():
        with amp.fp16_guard():
            h = amp.nn.fc(amp.data("x", [4, 8], "float32"), 8)
            if guarded:
                high = main.add_constant("high", np.array(1e9, np.float32))
                bound = F.minimum(h, high)
                h = bound * high if factor else bound
        loss = F.mean(h if guarded else F.clip(h, 0, 1e9))
        optimizer.minimize(loss)
    return main


def test_of_a_training_those_that_16_bit_reads() -> None:
    """Where the guard ends, the bound is what it was."""
    for guarded, number in ((True, LIMITS["float16"].largest), (False, 1e9)):
        bounds = next(op for op in trained(guarded).operators if op.type in ("Clip", "Min"))
        assert bounds.precision == ("float16" if guarded else "float32")
        assert float(constants.values(bounds.inputs[-1])) == number


def test_a_number_that_is_a_factor_too_is_refused_as_before() -> None:
    with pytest.raises(PrecisionError, match="'high' .* holds 1e\\+09, beyond the range of float16"):
        trained(True, factor=True)
