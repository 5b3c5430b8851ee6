"""Constants and sizes that an exporter left to compute are known once a program is prepared."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.nn import functional as F


@pytest.mark.parametrize("mode", ["fp32", "mixed", "pure"])
def test_sizes_that_the_exporter_left_to_compute_are_known(mode: str) -> None:
    """Exported to be trained, without folding: scales and pads are pieces of constants put together. In pure mode they
    were so in 16 bit, and nobody knew what they were."""
    text = """<ir_version: 8, opset_import: ["" : 17]>
        net (float[n,2,h,w] x) => (float[n,3] y)
          <float[3,2,1,1] w0 = {0.3, -0.2, 0.5, 0.1, -0.4, 0.2}, float[2] one = {1.0, 1.0}, float[2] by = {1.7, 2.0},
           float[2] gain = {0.9, 1.1}, int64[2] none = {0, 0}, int64[4] rim = {1, 0, 0, 0}>
        {
          scales = Concat <axis = 0> (one, by)
          wide = Resize <mode = "linear"> (x, , scales)
          pads = Concat <axis = 0> (none, rim, none)
          padded = Pad (wide, pads)
          twice = Add (gain, gain)
          shape = Constant <value = int64[3] {2, 1, 1}> ()
          channels = Reshape (twice, shape)
          scaled = Mul (padded, channels)
          features = Conv (scaled, w0)
          z = GlobalAveragePool (features)
          y = Flatten (z)
        }"""
    program = amp.Program.from_onnx(onnx.parser.parse_model(text))
    report = amp.prepare_training(program)
    assert set(report.trainable) == {"w0", "gain"}  # of which something is computed, which stays
    assert [op.type for op in program.operators if op.type in ("Concat", "Add")] == ["Add"]
    assert all(v.readers for v in program.variables if v.producer is None)
    with amp.program_guard(program, program.startup), amp.unique_name.guard():
        loss = F.mse_loss(program.outputs[0], amp.data("label", [None, 3]))
        optimizer: Any = amp.optimizer.SGD(0.1, multi_precision=mode == "pure")
        if mode != "fp32":
            optimizer = amp.decorate(optimizer, use_pure_fp16=mode == "pure", use_fp16_guard=False)
        optimizer.minimize(loss)
    scope, exe = amp.Scope(), amp.Executor(threads=1)
    exe.run(program.startup, scope=scope)
    if mode == "pure":
        optimizer.amp_init(amp.CPUPlace(), scope=scope)
    feed = {"x": np.ones((2, 2, 10, 5), np.float32), "label": np.ones((2, 3), np.float32)}
    losses = [float(exe.run(program, feed, [loss, "wide"], scope)[0]) for _ in range(5)]
    assert exe.run(program, feed, ["padded"], scope)[0].shape == (2, 2, 18, 10) and losses[-1] < losses[0]


@pytest.mark.parametrize("mode", ["fp32", "mixed", "pure"])
def test_sequences_of_known_pieces_are_tensors(mode: str) -> None:
    """torch's split and chunk, exported without folding, make a sequence, of which the pieces are taken one by one."""
    text = """<ir_version: 8, opset_import: ["" : 17]>
        net (float[n,4] x) => (float[n,4] y) <float[4,4] w = {1, 2, 0, 1, 0, 1, 3, 1, 2, 0, 1, 1, 1, 0, 2, 0}>
        {
          h = MatMul (x, w)  two = Constant <value_int = 2> ()  pieces = SplitToSequence <axis = 1> (h, two)
          first = Constant <value_int = 0> ()  last = Constant <value_int = -1> ()
          a = SequenceAt (pieces, first)  b = SequenceAt (pieces, last)
          gate = Sigmoid (b)  gated = Mul (a, gate)
          both = SequenceConstruct (gated, b)  y = ConcatFromSequence <axis = -1> (both)
        }"""
    program = amp.Program.from_onnx(onnx.parser.parse_model(text))
    amp.prepare_training(program)
    kinds = [op.type for op in program.operators if op.type != "Constant"]
    assert kinds == ["MatMul", "Split", "Sigmoid", "Mul", "Concat"]
    assert all(v.readers or v in program.outputs for v in program.variables)
    with amp.program_guard(program, program.startup), amp.unique_name.guard():
        loss = F.mean(F.cast(F.square(program.outputs[0] - 1.0), "float32"))
        optimizer: Any = amp.optimizer.SGD(0.01, multi_precision=mode == "pure")
        if mode != "fp32":
            optimizer = amp.decorate(
                optimizer, use_pure_fp16=mode == "pure", use_fp16_guard=False, init_loss_scaling=128.0
            )
        optimizer.minimize(loss)
    scope, exe = amp.Scope(), amp.Executor(threads=1)
    exe.run(program.startup, scope=scope)
    if mode == "pure":
        optimizer.amp_init(amp.CPUPlace(), scope=scope)
    feed = {"x": np.array([[0.5, -1, 2, 1], [1, 0, -0.5, 2]], np.float32)}
    w = scope.find_var("w").astype(np.float64)
    a, b = np.split(feed["x"] @ w, 2, axis=1)
    expected = np.concatenate([a / (1 + np.exp(-b)), b], axis=1)
    (found,) = exe.run(program, feed, ["y"], scope)
    np.testing.assert_allclose(found, expected, rtol=1e-5 if mode == "fp32" else 1e-2, atol=1e-6)
    losses = [float(exe.run(program, feed, [loss], scope)[0]) for _ in range(20)]
    assert losses[-1] < 0.6 * losses[0]


def test_a_loop_whose_end_is_computed_of_what_is_given_for_good_puts_pieces_together() -> None:
    """As torch exports an EmbeddingBag: each turn adds a piece to a sequence, and the turns are computed of the bags."""
    text = """<ir_version: 10, opset_import: ["" : 21]>
        net (float[3,4] x, int64[2] rows) => (float[n,4] y)
          <float[4,4] w = {1, 2, 0, 1, 0, 1, 3, 1, 2, 0, 1, 1, 1, 0, 2, 0}, int64 one = {1}, bool yes = {1},
           int64 start = {0}, int64[1] zero = {0}>
        {
          h = MatMul (x, w)  bags = Gather (rows, one)  none = SequenceEmpty <dtype = 1> ()
          count, all = Loop (, yes, start, none)
            <body = b (int64 i, bool go, int64 at, seq(float[k,4]) s) => (bool on, int64 next, seq(float[k,4]) t) {
              step = CastLike (one, at)  next = Add (at, step)  on = Less (next, bags)
              row = Gather (h, at)  piece = Unsqueeze (row, zero)  t = SequenceInsert (s, piece) }>
          y = ConcatFromSequence <axis = 0> (all)
        }"""
    program = amp.Program.from_onnx(onnx.parser.parse_model(text))
    w = as_array(program.var("w").data)
    amp.prepare_training(program, values={"rows": [0, 2]})
    assert [op.type for op in program.operators] == ["MatMul", *["Gather", "Unsqueeze"] * 2, "Concat"]
    with amp.program_guard(program, program.startup), amp.unique_name.guard():
        loss = F.mean(F.square(program.outputs[0]))
        amp.optimizer.SGD(0.01).minimize(loss)
    scope, exe = amp.Scope(), amp.Executor(threads=1)
    exe.run(program.startup, scope=scope)
    x = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    exe.run(program, {"x": x}, [loss], scope)
    gradient = x[:2].T @ (2 * (x[:2] @ w) / 8)
    np.testing.assert_allclose(scope.find_var("w"), w - 0.01 * gradient, rtol=1e-5)
