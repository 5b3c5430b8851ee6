"""Shares of a sum: the floor under it is one that float16 holds, and the numbers are the same."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.nn import functional as F
from amp_transpiler.passes.canonicalize.floored_sums import write_shares
from tests.helpers.constraints_of import run_faithful
from tests.helpers.sessions import run

HEAD = '<ir_version: 8, opset_import: ["" : 18]> net (float[2,5,8] x, int64[2,5,3] at) => (float[2,5,3] y) '
HEAD += "<int64[1] last = {-1}, int64[1] one = {1}, int64[1] six = {6}, float tiny = {1e-20}, float small = {1e-12}, float some = {1e-6}, int64[3] shape = {2, 5, 3}> "
#: A layer: what is fed is taken a softmax of, and divided by its sum, in fp32.
LAYER = "half = Constant <value = float[8] {0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.25}> ()  z = Mul(x, half)"
HALF = f"{LAYER}  p = Softmax(z)"
SHARES = {
    "as DeepSeek writes them": "p = Sigmoid(x)  w = GatherElements <axis = -1> (p, at)  s = ReduceSum(w, last)  d = Add(s, tiny)",
    "as ERNIE writes them": f"{HALF}  w = GatherElements <axis = -1> (p, at)  s = ReduceSum(w, last)  d = Clip(s, small)",
    "as normalize writes them": f"""{HALF}  w = GatherElements <axis = -1> (p, at)  s = ReduceL1(w, last)  c = Max(small, s)
        d = Expand(c, shape)""",
}
#: Of numbers of either sign, whose magnitudes are added.
MAGNITUDES = f"""{LAYER}  w = GatherElements <axis = -1> (z, at)  s = ReduceL1(w, last)  c = Clip(s, small)
    d = Expand(c, shape)"""
OTHERS = {
    "of what may be negative": "w = GatherElements <axis = -1> (x, at)  s = ReduceSum(w, last)  d = Add(s, tiny)",
    "of what may be negative in part": "p = Sigmoid(x)  n = Concat <axis = 1> (p, x)  f = Slice(n, one, six, one)  w = GatherElements <axis = -1> (f, at)  s = ReduceSum(w, last)  d = Add(s, tiny)",
    "of another": "p = Sigmoid(x)  w = GatherElements <axis = -1> (p, at)  q = Neg(w)  s = ReduceSum(q, last)  d = Add(s, tiny)",
    "with a floor that counts": "p = Sigmoid(x)  w = GatherElements <axis = -1> (p, at)  s = ReduceSum(w, last)  d = Add(s, some)",
    "of means": "p = Sigmoid(x)  w = GatherElements <axis = -1> (p, at)  s = ReduceMean(w, last)  d = Add(s, tiny)",
}
RNG = np.random.default_rng(0)
FEEDS = {"x": RNG.normal(size=(2, 5, 8)).astype(np.float32), "at": RNG.integers(0, 8, (2, 5, 3))}
#: Probabilities of 0 in float16, and some that it holds with few digits.
FEEDS["x"][1, 2], FEEDS["x"][1, 3] = -30, -12


def net(body: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f"{HEAD} {{ {body}  y = Div(w, d) }}")


@pytest.mark.parametrize("form", SHARES)
def test_they_are_16_bit(form: str) -> None:
    model = net(SHARES[form])
    expected = run(model, FEEDS)[0]
    converted = amp.convert(model)
    assert {op.precision for op in converted.operators if op.type != "Cast"} == {"float16"}
    got = run(converted.to_onnx(), FEEDS)[0]
    held = np.arange(5) != 2
    assert np.allclose(got[:, held], expected[:, held], rtol=5e-3)
    assert np.isfinite(got).all() and (got >= 0).all() and (got <= 1).all()


@pytest.mark.parametrize("form", SHARES)
def test_in_fp32_the_numbers_are_the_same(form: str) -> None:
    program = amp.Program.from_onnx(net(SHARES[form]))
    assert write_shares(program, frozenset(), frozenset()) == 1
    feeds = {**FEEDS, "x": np.maximum(FEEDS["x"], -12)}
    assert np.allclose(run(program.to_onnx(), feeds)[0], run(net(SHARES[form]), feeds)[0], rtol=1e-6)


def test_magnitudes_are_shares_whatever_their_signs() -> None:
    model, feeds = net(MAGNITUDES), {**FEEDS, "x": FEEDS["x"].copy()}
    feeds["x"][0, 1], feeds["x"][0, 2] = 0, 1e-9
    converted = amp.convert(model)
    assert {op.precision for op in converted.operators if op.type != "Cast"} == {"float16"}
    got, expected = run_faithful(converted, feeds)[0], run(model, feeds)[0]
    assert (got[0, 1:3] == 0).all() and (expected[0, 1] == 0).all()  # what float16 does not hold is 0 before
    held = [each for each in np.ndindex(2, 5) if each not in ((0, 1), (0, 2))]
    assert all(np.allclose(got[each], expected[each], rtol=5e-3, atol=1e-4) for each in held)


@pytest.mark.parametrize("form", OTHERS)
def test_what_is_anything_else_stays(form: str) -> None:
    program = amp.Program.from_onnx(net(OTHERS[form]))
    assert write_shares(program, frozenset(), frozenset()) == 0
    got = run(amp.convert(net(OTHERS[form])).to_onnx(), FEEDS)[0]
    assert np.allclose(got, run(net(OTHERS[form]), FEEDS)[0], rtol=2e-2, atol=2e-3)


def test_what_the_user_names_stays() -> None:
    model = net(SHARES["as DeepSeek writes them"])
    for more in ({"black_varnames": ["s"]}, {"exclude": ["d"]}):
        assert "Add" in [op.type for op in amp.convert(model, **more).operators], more


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_router_is_trained_in_16_bit(dtype: str) -> None:
    numbers = ", ".join(f"{value:.3f}" for value in RNG.normal(size=64))
    body = SHARES["as DeepSeek writes them"].replace("Sigmoid(x)", "Sigmoid(h)")
    text = f"{HEAD.replace('<int64[1] last', f'<float[8, 8] w0 = {{{numbers}}}, int64[1] last')}"
    program = amp.Program.from_onnx(onnx.parser.parse_model(f"{text} {{ h = MatMul(x, w0)  {body}  y = Div(w, d) }}"))
    amp.prepare_training(program)
    with amp.program_guard(program, program.startup), amp.unique_name.guard():
        loss = F.mean(F.square(F.cast(program.outputs[0], "float32") - 0.25))
        lists = amp.AutoMixedPrecisionLists(dtype=dtype)
        optimizer = amp.optimizer.SGD(0.5, multi_precision=True)
        optimizer = amp.decorate(optimizer, lists, 128.0, use_pure_fp16=True, use_fp16_guard=False, dtype=dtype)
        optimizer.minimize(loss)
    forward = {op.type: op.precision for op in program.operators if op.role == "forward" and op.type != "Cast"}
    assert {forward["ReduceSum"], forward["Max" if dtype == "float16" else "Add"], forward["Div"]} == {dtype}
    scope, executor = amp.Scope(), amp.Executor(threads=1)
    executor.run(program.startup, scope=scope)
    optimizer.amp_init(amp.CPUPlace(), scope)
    feeds = {**FEEDS, "x": RNG.normal(size=(2, 5, 8)).astype(np.float32)}
    losses = [float(executor.run(program, feeds, [loss], scope)[0]) for _ in range(10)]
    assert losses[-1] < losses[0]


def test_in_bfloat16_they_stay() -> None:
    """It holds 1e-20."""
    converted = amp.convert(net(SHARES["as DeepSeek writes them"]), dtype="bfloat16")
    assert "Add" in [op.type for op in converted.operators]
