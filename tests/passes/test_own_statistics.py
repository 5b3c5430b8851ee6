"""Batch norms of one example by its own statistics, as exporters write standardised weights, are layer norms."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.nn import functional as F
from amp_transpiler.passes.canonicalize.own_statistics import normalise_rows
from tests.helpers.slopes import assert_slope, assert_stays, slope

RNG = np.random.default_rng(3)


def numbers(*shape: int) -> str:
    return "{" + ", ".join(f"{value:.3f}" for value in RNG.normal(size=shape).reshape(-1)) + "}"


HEAD = '<ir_version: 8, opset_import: ["" : 18]> g (float[EXAMPLES, 3, 4, 2] x) => (float[EXAMPLES, 3, 4, 2] y) '
HEAD += "<int64[3] all = {0, 2, 3}, int64[2] last = {2, 3}, float two = {2}, "
HEAD += f"float[3] gain = {numbers(3)}, float[3] shift = {numbers(3)}, "
HEAD += f"float[4, 2] w = {numbers(4, 2)}> "
MOMENTS = (
    "{ ones = Constant <value = float[3] {1, 1, 1}> ()  zeros = Constant <value = float[3] {0, 0, 0}> ()  "
    "mean = ReduceMean <keepdims = 0> (x, all)  kept = ReduceMean (x, all)  centred = Sub(x, kept)  "
    "square = Mul(centred, centred)  variance = ReduceMean <keepdims = 0> (square, all)  "
)
NORM = "n = BatchNormalization <epsilon = 0.001> (x, gain, shift, mean, variance)  "
BODY = MOMENTS + NORM + "y = Mul(n, w) }"
ROWS = {
    "with a gain and a shift": BODY,
    "by nothing": BODY.replace("gain, shift", "ones, zeros"),
    "with a gain": BODY.replace("gain, shift", "gain, zeros"),
    "with a shift": BODY.replace("gain, shift", "ones, shift"),
    "by a power": BODY.replace("Mul(centred, centred)", "Pow(centred, two)"),
    "whose mean is read": BODY.replace("Mul(n, w)", "Add(m, kept)").replace("y =", "m = Mul(n, w)  y ="),
}
OTHERS = {
    "of another tensor": BODY.replace("BatchNormalization <epsilon = 0.001> (x,", "BatchNormalization (centred,"),
    "by the mean of another": BODY.replace("ReduceMean <keepdims = 0> (x", "ReduceMean <keepdims = 0> (centred"),
    "around another mean": BODY.replace("ReduceMean (x, all)", "ReduceMean (x, last)"),
    "by the mean as variance": BODY.replace("mean, variance)", "mean, mean)"),
    "by a third power": BODY.replace("square = Mul(centred, centred)", "q = Mul(centred, centred)  square = Mul(q, x)"),
}


def program(body: str, examples: int = 1) -> amp.Program:
    return amp.Program.from_onnx(onnx.parser.parse_model(HEAD.replace("EXAMPLES", str(examples)) + body))


def outputs(found: amp.Program, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    executor, scope = amp.Executor(threads=1), amp.Scope()
    executor.run(found.startup, scope=scope)
    return executor.run(found, feed, found.outputs, scope)


@pytest.mark.parametrize("name", ROWS)
def test_it_is_a_layer_norm(name: str) -> None:
    x = (RNG.normal(size=(1, 3, 4, 2)) * 3 + 1).astype(np.float32)
    expected = slope(program(ROWS[name]), x)
    found = program(ROWS[name])
    assert normalise_rows(found) == ["1 batch norms of one example by its own statistics are layer norms"]
    kinds = [
        "LayerNormalization",
        *["Reshape", "Mul"] * ("gain" in ROWS[name]),
        *["Reshape", "Add"] * ("shift" in ROWS[name]),
    ]
    assert [
        op.type for op in found.operators if op.type != "Constant" and op.outputs[0].name not in ("kept", "m", "y")
    ] == kinds
    assert all(v.readers for op in found.operators for v in op.outputs if v.name not in ("y", "ones", "zeros"))
    assert name != "by nothing" or "Constant" not in {op.type for op in found.operators}
    assert_slope(found, x, expected)


@pytest.mark.parametrize("name", OTHERS)
def test_what_only_looks_like_one_stays(name: str) -> None:
    assert_stays(program(OTHERS[name]), normalise_rows)


def test_that_of_several_examples_stays() -> None:
    assert_stays(program(BODY, 2), normalise_rows)


@pytest.mark.parametrize("mode", ["fp32", "mixed", "pure"])
def test_standardised_weights_are_trained(mode: str) -> None:
    """As torch exports them without folding, with pieces of the shape that are put together: as few casts as weights."""
    text = f"""<ir_version: 8, opset_import: ["" : 18]> g (float[n, 2, 5, 5] x) => (float[n, 4, 5, 5] y)
      <float[4, 2, 3, 3] w = {numbers(4, 2, 3, 3)}, float[4, 1, 1, 1] gain = {numbers(4)}, int64[1] one = {{1}},
       int64[1] rows = {{4}}, int64[1] rest = {{-1}}, int64[4] whole = {{4, 2, 3, 3}}, float scale = {{0.2}},
       int64[2] axes = {{0, 2}}> {{
        sizes = Concat <axis = 0> (one, rows, rest)  rowed = Reshape (w, sizes)  scaled = Mul (gain, scale)
        each = Reshape (scaled, rest)  zero = Constant <value_floats = [0.0]> ()  shape = Shape <start = 1, end = 2> (rowed)
        none = Expand (zero, shape)
        mean = ReduceMean <keepdims = 0> (rowed, axes)  kept = ReduceMean (rowed, axes)  centred = Sub (rowed, kept)
        square = Mul (centred, centred)  variance = ReduceMean <keepdims = 0> (square, axes)
        norm = BatchNormalization <momentum = 1.0> (rowed, each, none, mean, variance)
        standard = Reshape (norm, whole)  y = Conv <pads = [1, 1, 1, 1]> (x, standard) }}"""
    main = amp.Program.from_onnx(onnx.parser.parse_model(text))
    feed = {"x": RNG.normal(size=(2, 2, 5, 5)).astype(np.float32)}
    (before,) = outputs(main, feed)
    report = amp.prepare_training(main)
    assert set(report.trainable) == {"w", "gain"} and any("layer norms" in note for note in report.notes)
    (after,) = outputs(main, feed)
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)
    with amp.program_guard(main, main.startup), amp.unique_name.guard():
        loss = F.mean(F.cast(F.square(main.outputs[0]), "float32"))
        optimizer = amp.optimizer.SGD(0.1, multi_precision=mode == "pure")
        if mode != "fp32":
            optimizer = amp.decorate(optimizer, use_pure_fp16=mode == "pure", use_fp16_guard=False)
        optimizer.minimize(loss)
    kinds = [op.type for op in main.operators]
    assert "BatchNormalization" not in kinds and kinds.count("LayerNormalization") == 1
    scope, exe = amp.Scope(), amp.Executor(threads=1)
    exe.run(main.startup, scope=scope)
    if mode == "pure":
        optimizer.amp_init(amp.CPUPlace(), scope=scope)
    losses = [float(exe.run(main, feed, [loss], scope)[0]) for _ in range(6)]
    assert losses[-1] < 0.9 * losses[0]
