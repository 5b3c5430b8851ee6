"""Small numbers beside 1 keep their digits: log1p and expm1 as exporters write them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from tests.helpers.constraints_of import run_faithful
from tests.helpers.sessions import session

HEAD = """<ir_version: 10, opset_import: ["" : 20]> m (float[N] x) => (float[N] y)
<float one = {1}, float less = {-1}, float two = {2}, float zero = {0}> """
SMALL = {
    "log(1 + x)": "{ a = Add(one, x)  y = Log(a) }",
    "log(x + 1)": "{ a = Add(x, one)  y = Log(a) }",
    "log(1 - x)": "{ a = Sub(one, x)  y = Log(a) }",
    "log(x - -1)": "{ a = Sub(x, less)  y = Log(a) }",
    "exp(-x) - 1": "{ n = Neg(x)  b = Min(n, zero)  e = Exp(b)  y = Sub(e, one) }",
    "exp(-x) + -1": "{ n = Neg(x)  b = Min(n, zero)  e = Exp(b)  y = Add(less, e) }",
    "1 - exp(-x)": "{ n = Neg(x)  b = Min(n, zero)  e = Exp(b)  y = Sub(one, e) }",
}
OTHERS = {
    "log(2 + x)": "{ a = Add(x, two)  y = Log(a) }",
    "log(x - 1)": "{ d = Exp(x)  b = Add(d, two)  c = Min(b, two)  a = Sub(c, one)  y = Log(a) }",
    "1 + exp(-x)": "{ n = Neg(x)  b = Min(n, zero)  e = Exp(b)  y = Add(e, one) }",
    "log(1 + x) of an x of 1 at least": "{ b = Max(x, one)  a = Add(b, one)  y = Log(a) }",
}


def model(body: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(HEAD + body)


@pytest.mark.parametrize("name", SMALL)
def test_small_numbers_keep_their_digits(name: str) -> None:
    x = (np.random.default_rng(0).uniform(0.1, 1, 100) * 2e-3).astype(np.float16).astype(np.float32)
    exact = session(model(SMALL[name])).run(None, {"x": x})[0]
    found = run_faithful(amp.convert(model(SMALL[name])), {"x": x})[0]
    np.testing.assert_allclose(found, exact, rtol=1e-3)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_near_one_is_free(name: str) -> None:
    converted = amp.convert(model(OTHERS[name]))
    assert not [op.reason for op in converted.operators if "beside 1" in str(op.reason)]


def test_a_training_in_16_bit_keeps_them() -> None:
    program = amp.Program.from_onnx(model(SMALL["log(1 + x)"]))
    amp.cast_model_to_fp16(program, use_fp16_guard=False, numeric_guards=True)
    assert [op.precision for op in program.operators if not op.inserted] == ["float32"] * 2
