"""A program read from an ONNX file trains like a built one, in every mode, and leaves as ONNX again."""

from __future__ import annotations

import lzma
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import amp_transpiler as amp
from amp_transpiler.nn import functional as F
from tests.helpers.where import DATA, NO_DATA

#: Opset 11: reductions take attributes, Softmax flattens; parameters are transposed as exporters write them.
TEXT = """<ir_version: 8, opset_import: ["" : 11]>
net (float[4,8] x) => (float[4,3] scores)
  <float[6,8] w1 = {W1}, float[6] b1 = {B1}, float[6,3] w2 = {W2}>
{
  [fc1] h = Gemm <transB = 1> (x, w1, b1)
  r = Relu(h)
  m = ReduceMean <axes = [1], keepdims = 1> (r)
  c = Sub(r, m)
  [fc2] scores = MatMul(c, w2)
}"""


def net() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    text = TEXT
    for name, size in (("W1", 48), ("B1", 6), ("W2", 18)):
        text = text.replace("{" + name + "}", "{" + ", ".join(f"{v:.4f}" for v in rng.standard_normal(size)) + "}")
    return onnx.parser.parse_model(text)


def decorated(mode: str, **options: object) -> amp.optimizer.Adam:
    adam = amp.optimizer.Adam(0.05, multi_precision=mode == "pure-fp16")
    if mode == "fp32":
        return adam
    return amp.decorate(adam, init_loss_scaling=128.0, use_pure_fp16=mode == "pure-fp16", **options)


@pytest.mark.parametrize("mode", ["fp32", "amp", "pure-fp16"])
def test_trains_and_leaves_as_onnx(mode: str, tmp_path: Path) -> None:
    model = net()
    before = model.SerializeToString()
    program = amp.Program.from_onnx(model)
    if mode == "pure-fp16":
        program.mark_fp16("fc*")
    with amp.program_guard(program, program.startup), amp.unique_name.guard():
        label = amp.data("label", [4, 1], "int64")
        loss = F.cross_entropy(program.outputs[0], label)
        optimizer = decorated(mode)
        optimizer.minimize(loss)
    executor, scope = amp.Executor(), amp.Scope()
    executor.run(program.startup, scope=scope)
    if mode != "fp32":
        optimizer.amp_init(amp.CPUPlace(), scope=scope)
    rng = np.random.default_rng(1)
    feed = {"x": rng.standard_normal((4, 8)).astype(np.float32), "label": rng.integers(0, 3, (4, 1))}
    losses = [
        float(np.ravel(executor.run(program, feed=feed, fetch_list=[loss], scope=scope)[0])[0]) for _ in range(40)
    ]
    assert losses[-1] < 0.2 * losses[0]
    if mode == "pure-fp16":
        assert scope.find_var("w1").dtype == np.float16 and "w1_fp32_master_0" in scope.var_names()
    path = tmp_path / "trained.onnx"
    amp.save_inference_model(str(path), ["x"], ["scores"], executor, program, scope=scope)
    trained = onnx.load(path)
    onnx.checker.check_model(trained, full_check=True)
    assert [o.name for o in trained.graph.output] == ["scores"]
    (scores,) = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(["scores"], {"x": feed["x"]})
    assert scores.dtype == np.float32 and (scores.argmax(1) == feed["label"][:, 0]).all()
    assert model.SerializeToString() == before, "the model that was read is not changed"


def test_an_imported_dropout_draws_anew_at_each_step() -> None:
    text = """<ir_version: 8, opset_import: ["" : 13]>
    net (float[4,50] x) => (float[4,50] y) <float[50,50] w = {WEIGHTS}, float half = {0.5}, bool on = {1}>
    { h = MatMul(x, w)  y = Dropout(h, half, on) }"""
    model = onnx.parser.parse_model(text.replace("WEIGHTS", ", ".join("0.1" for _ in range(2500))))
    program = amp.Program.from_onnx(model)
    with amp.program_guard(program, program.startup), amp.unique_name.guard():
        loss = F.mean(program.outputs[0])
        amp.optimizer.SGD(1e-6).minimize(loss)
    executor, scope = amp.Executor(), amp.Scope()
    executor.run(program.startup, scope=scope)
    feed = {"x": np.ones((4, 50), np.float32)}
    first, second = (executor.run(program, feed=feed, fetch_list=["y"], scope=scope)[0] for _ in range(2))
    assert 50 < (first == 0).sum() < 150 and not np.array_equal(first == 0, second == 0)
    (whole,) = executor.run(program.clone(for_test=True), feed=feed, fetch_list=["y"], scope=scope)
    assert (whole != 0).all()


@pytest.mark.parametrize("mode", ["fp32", "amp", "pure-fp16"])
def test_a_trained_model_is_fine_tuned(mode: str) -> None:
    file = DATA / "onnx_models" / "mnist_cntk.onnx.xz"
    if not file.exists():
        pytest.skip(NO_DATA)
    program = amp.Program.from_onnx(onnx.load_model_from_string(lzma.decompress(file.read_bytes())))
    with amp.program_guard(program, program.startup), amp.unique_name.guard():
        label = amp.data("label", [1, 1], "int64")
        loss = F.cross_entropy(program.outputs[0], label)
        optimizer = decorated(mode, use_fp16_guard=False) if mode == "pure-fp16" else decorated(mode)
        optimizer.minimize(loss)
    executor, scope = amp.Executor(), amp.Scope()
    executor.run(program.startup, scope=scope)
    if mode != "fp32":
        optimizer.amp_init(amp.CPUPlace(), scope=scope)
    image = np.random.default_rng(0).random((1, 1, 28, 28)).astype(np.float32)
    feed = {program.inputs[0].name: image, "label": np.array([[3]])}
    losses = [
        float(np.ravel(executor.run(program, feed=feed, fetch_list=[loss], scope=scope)[0])[0]) for _ in range(20)
    ]
    assert losses[-1] < 0.1 * losses[0]


#: An export with free batch and sequence: sizes are taken apart and put together as PyTorch writes it. Positions have
#: a table of their own.
FREE = """<ir_version: 8, opset_import: ["" : 17]>
net (int64[batch,seq] ids) => (float[batch,seq,8] y)
  <float[20,8] table = {TABLE}, float[6,8] positions = {POSITIONS}, float[8,8] w = {W}, int64 zero = {0}, int64 first = {1},
   int64 one = {1}, int64[1] axis = {0}, int64[1] heads = {2}, int64[1] width = {4}>
{
  s = Shape(ids)
  n = Gather(s, zero)
  t = Gather(s, first)
  places = Range(zero, t, one)
  e = Gather(table, ids)
  p = Gather(positions, places)
  x = Add(e, p)
  h = MatMul(x, w)
  n1 = Unsqueeze(n, axis)
  t1 = Unsqueeze(t, axis)
  apart = Concat <axis = 0> (n1, t1, heads, width)
  split = Reshape(h, apart)
  act = Tanh(split)
  whole = Shape(x)
  y = Reshape(act, whole)
}"""


@pytest.mark.parametrize("mode", ["fp32", "amp", "pure-fp16"])
def test_free_batch_and_sequence_train_at_any_size(mode: str) -> None:
    rng, text = np.random.default_rng(0), FREE
    for name, size in (("TABLE", 160), ("POSITIONS", 48), ("W", 64)):
        text = text.replace("{" + name + "}", "{" + ", ".join(f"{v:.4f}" for v in rng.standard_normal(size)) + "}")
    program = amp.Program.from_onnx(onnx.parser.parse_model(text))
    amp.prepare_training(program)
    with amp.program_guard(program, program.startup), amp.unique_name.guard():
        target = amp.data("target", ["batch", "seq", 8], "float32")
        loss = F.mse_loss(program.outputs[0], target)
        optimizer = decorated(mode) if mode != "pure-fp16" else decorated(mode, use_fp16_guard=False)
        optimizer.minimize(loss)
    executor, scope = amp.Executor(threads=1), amp.Scope()
    executor.run(program.startup, scope=scope)
    if mode != "fp32":
        optimizer.amp_init(amp.CPUPlace(), scope=scope)
    losses = []
    for step in range(40):
        shape = ((2, 5), (3, 4))[step % 2]
        feed = {"ids": np.arange(np.prod(shape)).reshape(shape) % 20, "target": np.full((*shape, 8), 0.5, np.float32)}
        losses.append(executor.run(program, feed=feed, fetch_list=[loss], scope=scope)[0].item())
    assert losses[-2] < 0.5 * losses[0] and losses[-1] < 0.5 * losses[1]
    feed = {"ids": np.zeros((2, 7), np.int64), "target": np.zeros((2, 7, 8), np.float32)}
    with pytest.raises(amp.AmpError, match="Gather.*out of data bounds, idx=6"):  # longer than the positions
        executor.run(program, feed=feed, fetch_list=[loss], scope=scope)


@pytest.mark.parametrize("training", [0, 1])
def test_weights_standardised_by_a_batch_normalisation_of_computed_statistics_train(training: int) -> None:
    """As exporters write weight standardisation: in training mode the statistics are read by nobody."""
    head = """<ir_version: 8, opset_import: ["" : 17]> net (float[2,3,5,5] x) => (float[2,4,3,3] y)
      <float[1,4,27] w = {W}, float[4] gain = {1, 2, 3, 4}, float[4] zero = {0, 0, 0, 0}, int64[4] kernel = {4, 3, 3, 3},
       int64[3] vector = {1, 4, 1}, float eps = {1e-5}>
      { m = ReduceMean <axes = [0, 2], keepdims = 0> (w)  c = ReduceMean <axes = [0, 2]> (w)  d = Sub(w, c)
        q = Mul(d, d)  v = ReduceMean <axes = [0, 2], keepdims = 0> (q)"""
    written = """e = Add(v, eps)  s = Sqrt(e)  f = Div(gain, s)  g = Reshape(f, vector)  n = Mul(d, g)"""
    # momentum 1: the running statistics stay what they are
    attrs = f"training_mode = {training}, momentum = 1.0" if training else "epsilon = 1e-5"
    outputs = "n, new_mean, new_var" if training else "n"
    as_norm = f"{outputs} = BatchNormalization <{attrs}> (w, gain, zero, m, v)"
    weights = ", ".join(f"{v:.4f}" for v in np.random.default_rng(0).standard_normal(108))
    image = np.random.default_rng(1).standard_normal((2, 3, 5, 5)).astype(np.float32)
    found = {}
    for form in (written, as_norm):
        text = f"{head} {form}  k = Reshape(n, kernel)  y = Conv(x, k) }}".replace("{W}", f"{{{weights}}}")
        program = amp.Program.from_onnx(onnx.parser.parse_model(text))
        amp.prepare_training(program, restore=False, freeze=["zero"])
        with amp.program_guard(program, program.startup), amp.unique_name.guard():
            loss = F.mean(program.outputs[0] * program.outputs[0] * program.outputs[0])
        pairs = amp.append_backward(loss, parameter_list=["w", "gain"])
        scope, executor = amp.Scope(), amp.Executor(threads=1)
        executor.run(program.startup, scope=scope)
        found[form] = executor.run(program, feed={"x": image}, fetch_list=[loss, *(g for _, g in pairs)], scope=scope)
    for wanted, got in zip(found[written], found[as_norm], strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())


def test_statistics_that_nobody_reads_are_not_computed_for_an_inference_model() -> None:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
      net (float[1,4,N] x) => (float[1,4,N] y) <float[4] one = {1, 1, 1, 1}, float[4] zero = {0, 0, 0, 0}>
      { m = ReduceMean <axes = [0, 2], keepdims = 0> (x)  q = Mul(x, x)
        v = ReduceMean <axes = [0, 2], keepdims = 0> (q)
        y, new_mean, new_var = BatchNormalization <training_mode = 1> (x, one, zero, m, v) }""")
    after = amp.convert(model).to_onnx()
    assert {node.op_type for node in after.graph.node} <= {"BatchNormalization", "Cast", "Constant"}


@pytest.mark.parametrize("initializer", [True, False])
def test_constants_beside_weights_that_are_initializers_are_not_trained(initializer: bool) -> None:
    """Initial states and anchors, which exporters of such files write; other files have all weights in constants."""
    values = ", ".join(f"{v:.3f}" for v in np.random.default_rng(0).standard_normal(12))
    held = f"<float[3,4] w = {{{values}}}>" if initializer else ""
    made = "" if initializer else f"w = Constant <value = float[3,4] {{{values}}}> ()"
    program = amp.Program.from_onnx(
        onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17]> net (float[2,3] x) => (float[2,4] y) {held}
          {{ {made} anchors = Constant <value = float[2,4] {{1, 2, 3, 4, 5, 6, 7, 9}}> ()
             h = MatMul(x, w)  y = Add(h, anchors) }}""")
    )
    told = amp.prepare_training(program, restore=False)
    assert told.trainable == (("w",) if initializer else ("w", "anchors"))
