"""Recurrences over a length that the model leaves open: a loop whose turns hang on the shape of what is fed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import FeedError, GradientError
from amp_transpiler.nn import functional as F

RNG = np.random.default_rng(0)
W, V = RNG.normal(size=(2, 4)).astype(np.float32), RNG.normal(size=(4, 3)).astype(np.float32)
X, LABEL = RNG.normal(size=(40, 5, 2)).astype(np.float32), RNG.integers(0, 3, 40)


def recurrence() -> onnx.ModelProto:
    """tanh of the step before and this one, as Keras's exporter writes it: with a condition, and sizes in 32 bits."""
    text = """<ir_version: 8, opset_import: ["" : 15]>
        net (float[n, l, 2] x) => (float[n, 3] y)
          <int64[1] first = {0}, int64[1] second = {1}, int64[1] width = {4}, float zero = {0}>
        {
          steps = Transpose <perm = [1, 0, 2]> (x)
          shape = Shape (steps)
          sizes = Cast <to = 6> (shape)
          long = Slice (sizes, first, second, first)
          length = Squeeze (long, first)
          turns = Cast <to = 7> (length)
          some = Cast <to = 1> (length)
          begin = Less (zero, some)
          all = Shape (x)
          batch = Slice (all, first, second, first)
          start = Concat <axis = 0> (batch, width)
          h0 = Expand (zero, start)
          i0 = Constant <value = int32 {0}> ()
          i, h = Loop (turns, begin, i0, h0) <body = step (int64 turn, bool on, int32 c, float[n, 4] h)
            => (bool going, int32 d, float[n, 4] k) {
              one = Constant <value = int32 {1}> ()
              d = Add (c, one)
              going = Less (d, length)
              now = Gather <axis = 0> (steps, turn)
              p = MatMul (now, w)
              s = Add (p, h)
              k = Tanh (s)
            }>
          y = MatMul (h, v)
        }"""
    model = onnx.parser.parse_model(text)
    for name, array in (("w", W), ("v", V)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def cross_entropy(x: np.ndarray, w: np.ndarray, v: np.ndarray) -> float:
    """In float64."""
    h = np.zeros((len(x), 4))
    for step in x.astype(np.float64).transpose(1, 0, 2):
        h = np.tanh(step @ w + h)
    z = h @ v
    return float(-(z - np.log(np.exp(z).sum(1, keepdims=True)))[np.arange(len(x)), LABEL[: len(x)]].mean())


def test_fit_takes_the_length_from_the_data(tmp_path: Path) -> None:
    data, lines = {"x": X, "label": LABEL}, list[str]()
    result = amp.fit(
        recurrence(), tmp_path / "o.onnx", data=data, test=data, mode="fp32", lr=0.03, epochs=2, say=lines.append
    )
    assert result.history[0].test_loss == pytest.approx(cross_entropy(X, W, V), rel=1e-5)
    assert "input 'x' is [?, 5, 2] for good, as it is fed: the model's control flow hangs on its sizes" in lines
    trained = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(tmp_path / "o.onnx").graph.initializer}
    expected = cross_entropy(X, trained["w"], trained["v"])
    assert result.history[-1].test_loss == pytest.approx(expected, rel=1e-5) and expected < cross_entropy(X, W, V)
    session = ort.InferenceSession(str(tmp_path / "o.onnx"), providers=["CPUExecutionProvider"])
    assert session.run(None, {"x": X[:7]})[0].shape == (7, 3), "the batch stays open"
    with pytest.raises(FeedError, match=r"test: array 'x' has the shape \[40, 4, 2\]; the program is fed \[n, 5, 2\]"):
        amp.fit(recurrence(), tmp_path / "o.onnx", data=data, test={**data, "x": X[:, :4]})


@pytest.mark.parametrize("shape", [[None, 5, 2], ["b", 5, 2], [None, 5, None]])
def test_an_open_batch_will_do(shape: list[int | str | None]) -> None:
    program = amp.Program.from_onnx(recurrence())
    notes = amp.prepare_training(program, feed_shapes={"x": shape}).notes
    assert "control flow that is known before the run is straight-line now" in notes
    assert program.inputs[0].shape == ("n", 5, 2)
    with amp.program_guard(program, program.startup), amp.unique_name.guard():
        label = amp.data("label", [None], "int64")
        loss = F.cross_entropy(program.outputs[0], label)
        amp.optimizer.SGD(0.1).minimize(loss)
    scope, exe = amp.Scope(), amp.Executor(threads=1)
    exe.run(program.startup, scope=scope)
    for count in (40, 6):
        w, v = (np.array(scope.find_var(name), np.float64) for name in "wv")
        feed = {"x": X[:count], "label": LABEL[:count]}
        found = exe.run(program, feed, [loss], scope)[0]
        assert float(found) == pytest.approx(cross_entropy(X[:count], w, v), rel=1e-5)


def test_the_way_out_is_named() -> None:
    program = amp.Program.from_onnx(recurrence())
    amp.prepare_training(program)
    with amp.program_guard(program, program.startup), amp.unique_name.guard():
        loss = F.mean(program.outputs[0])
        with pytest.raises(GradientError, match=r"feed_shapes={'INPUT': \[None, SIZE, \.\.\.\]}"):
            amp.optimizer.SGD(0.1).minimize(loss)


def test_sizes_that_decide_nothing_stay_open(tmp_path: Path) -> None:
    """A loop over a number that is known is no reason to close the length."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 15]> net (float[n, l, 2] x) => (float[n, 3] y) '
        "<int64 three = {3}, bool on = {1}> { s = ReduceMax <axes = [1], keepdims = 0> (x) "
        "r = Loop (three, on, s) <body = b (int64 i, bool c, float[n, 2] h) => (bool d, float[n, 2] k) "
        "{ d = Identity (c)  k = Tanh (h) }>  y = MatMul (r, w) }"
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(W[:, :3].copy(), "w"))
    amp.fit(model, tmp_path / "o.onnx", data={"x": X, "label": LABEL})
    assert amp.Program.from_onnx(tmp_path / "o.onnx").inputs[0].shape == ("n", "l", 2)


def test_a_sequence_that_a_loop_makes_names_the_sizes_to_give() -> None:
    """As PyTorch's exporter writes an EmbeddingBag."""
    text = """<ir_version: 8, opset_import: ["" : 18]>
    net (float[n,3] x) => (float[n,3] y)
      <float[3,3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9}, int64 zero = {0}, bool go = {1}>
    {
      h = MatMul(x, w)  size = Shape(x)  turns = Gather <axis = 0> (size, zero)  none = SequenceEmpty()
      rows = Loop (turns, go, none) <body = step (int64 i, bool c, seq(float[3]) had) => (bool d, seq(float[3]) has)
        { row = Gather(h, i)  has = SequenceInsert(had, row)  d = Identity(c) }>
      y = ConcatFromSequence <axis = 0, new_axis = 1> (rows)
    }"""
    model = onnx.parser.parse_model(text)
    program = amp.Program.from_onnx(model)
    amp.prepare_training(program)
    with (
        pytest.raises(GradientError, match="its trip count 'turns' is not known.*feed_shapes="),
        amp.program_guard(program, program.startup),
    ):
        amp.append_backward(F.sum(program.outputs[0]))
    program = amp.Program.from_onnx(model)
    amp.prepare_training(program, feed_shapes={"x": [4, 3]})
    with amp.program_guard(program, program.startup):
        assert [v.name for v, _ in amp.append_backward(F.sum(program.outputs[0]))] == ["w"]
