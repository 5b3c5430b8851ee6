"""Networks whose weights and activations are fake-quantised train as torch trains them, and leave with their pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

import amp_transpiler as amp
from amp_transpiler.errors import ArgumentError
from amp_transpiler.nn import functional as F
from tests.helpers.runners import bare, batches, losses
from tests.helpers.sessions import run, session
from tests.helpers.where import RECORDED

ORACLE = np.load(RECORDED / "fake_quantize_torch.npz")
PAIRS = ["QuantizeLinear", "DequantizeLinear"]


class Net:
    """The recorded net with its loss; ``how``: "fp32", or a mode and a type."""

    def __init__(self, exporter: str, how: str = "fp32", recompute: bool = False) -> None:
        mode, _, dtype = how.partition(" ")
        self.main = amp.Program.from_onnx(onnx.load_from_string(ORACLE[f"model|{exporter}"].tobytes()))
        self.prepared = amp.prepare_training(self.main)
        self.executor, self.scope = amp.Executor(), amp.Scope()
        with amp.program_guard(self.main, self.main.startup), amp.unique_name.guard():
            logits = self.main.outputs[0]
            self.loss = F.cross_entropy(logits, amp.data("label", [16], "int64"))
            self.test = self.main.clone(for_test=True)
            if recompute:
                amp.recompute(
                    self.main, [v.name for op in self.main.operators for v in op.outputs if op.type == "Relu"]
                )
            optimizer: Any = amp.optimizer.SGD(0.25, multi_precision=mode == "pure")
            if dtype:
                lists = amp.AutoMixedPrecisionLists(dtype=dtype)
                optimizer = amp.decorate(
                    optimizer,
                    lists,
                    use_pure_fp16=mode == "pure",
                    use_fp16_guard=False,
                    init_loss_scaling=1024.0,
                    dtype=dtype,
                )
            _, self.pairs = optimizer.minimize(self.loss)
        self.executor.run(self.main.startup, scope=self.scope)
        if dtype:
            optimizer.amp_init(amp.CPUPlace(), self.scope, self.test)
        self.x, self.output = self.main.inputs[0].name, logits.name
        self.feed = {self.x: ORACLE["x"], "label": ORACLE["label"]}

    def step(self, *fetched: Any) -> list[Any]:
        return self.executor.run(self.main, self.feed, [self.loss, *fetched], self.scope)

    def losses(self) -> list[float]:
        return [float(self.step()[0]) for _ in ORACLE["losses"]]

    def save(self, path: Path) -> onnx.ModelProto:
        x, y = self.test.var(self.x), self.test.var(self.output)
        amp.save_inference_model(path, [x], [y], self.executor, program=self.test, scope=self.scope)
        return onnx.load(path)


@pytest.mark.parametrize("exporter", ["dynamo", "script"])
def test_it_trains_as_torch_does_and_leaves_with_its_pairs(exporter: str, tmp_path: Path) -> None:
    net = Net(exporter)
    assert len(net.prepared.trainable) == 6
    for (parameter, _), gradient in zip(net.pairs, net.step(*(g for _, g in net.pairs))[1:], strict=True):
        np.testing.assert_allclose(gradient, ORACLE[f"grad|{parameter.name}"], rtol=2e-5, atol=1e-7)
    losses = [float(net.step()[0]) for _ in ORACLE["losses"][1:]]
    np.testing.assert_allclose(losses, ORACLE["losses"][1:], rtol=1e-6)
    for parameter, _ in net.pairs:
        last = net.scope.find_var(parameter.name)
        np.testing.assert_allclose(last, ORACLE[f"last|{parameter.name}"], rtol=1e-5, atol=1e-6)
    model = net.save(tmp_path / "net.onnx")
    before = onnx.load_from_string(ORACLE[f"model|{exporter}"].tobytes())
    assert [kinds(m) for m in (model, before)] == [PAIRS * 6] * 2
    (ours,) = net.executor.run(net.test, net.feed, [net.output], net.scope)
    np.testing.assert_allclose(outputs(model, net.x, integers=False), ours, rtol=1e-5, atol=1e-6)
    # A number between two integers may go to the other one.
    np.testing.assert_allclose(outputs(model, net.x, integers=True), ours, atol=0.02)


def outputs(model: onnx.ModelProto, x: str, integers: bool) -> Any:
    """What onnxruntime alone makes of the inputs, with its integer kernels or without."""
    options = ort.SessionOptions()
    options.add_session_config_entry("session.disable_quant_qdq", str(int(not integers)))
    return ort.InferenceSession(model.SerializeToString(), options).run(None, {x: ORACLE["x"]})[0]


def kinds(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node if node.op_type in PAIRS]


@pytest.mark.parametrize("how", ["mixed float16", "pure float16", "mixed bfloat16", "pure bfloat16"])
def test_in_16_bit_its_losses_are_near_and_its_pairs_fp32(how: str, tmp_path: Path) -> None:
    net = Net("dynamo", how)
    np.testing.assert_allclose(net.losses(), ORACLE["losses"], atol=2e-3)
    pairs = [op for op in net.main.operators if op.type in PAIRS]
    assert {op.precision for op in pairs} == {"float32"} and len(pairs) == 12
    if how.startswith("pure"):
        assert {str(op.reason) for op in pairs} == {"fp32: quantises and brings back: the scale of the pair is fp32"}
    model = net.save(tmp_path / "net.onnx")
    assert kinds(model) == PAIRS * 6
    if "bfloat16" not in how:  # which onnxruntime does not run on CPU
        (ours,) = net.executor.run(net.test, net.feed, [net.output], net.scope)
        np.testing.assert_allclose(outputs(model, net.x, integers=True), ours, atol=0.02)


def test_pairs_are_computed_again_where_activations_are() -> None:
    np.testing.assert_allclose(Net("dynamo", recompute=True).losses(), ORACLE["losses"], rtol=1e-6)


#: Scales at which one sum in fifty lies between two integers.
TIES = """<ir_version: 10, opset_import: ["" : 21]> ties (float[16, 8] x) => (float[16, 4] y)
    <float s = {0.05}, uint8 z = {128}, float t = {0.02}, int8 o = {0}> {
    a = QuantizeLinear(x, s, z)  b = DequantizeLinear(a, s, z)  c = QuantizeLinear(w, t, o)  d = DequantizeLinear(c, t, o)
    h = MatMul(b, d)  r = Relu(h)  e = QuantizeLinear(r, s, z)  f = DequantizeLinear(e, s, z)  y = MatMul(f, v) }"""


def test_a_step_rounds_what_lies_between_two_integers_as_its_pairs_say(tmp_path: Path) -> None:
    """In integer kernels a sum is no fp32 number, and may go to the other one; an exported step has no such kernels."""
    rng, model = np.random.default_rng(0), onnx.parser.parse_model(TIES)
    for name, shape in (("w", (8, 16)), ("v", (16, 4))):
        model.graph.initializer.append(numpy_helper.from_array(rng.normal(0, 0.5, shape).astype(np.float32), name))
    main = amp.Program.from_onnx(model)
    amp.prepare_training(main)
    with amp.program_guard(main, main.startup), amp.unique_name.guard():
        loss = F.mean(F.square(main.outputs[0]))
        amp.optimizer.SGD(0.01).minimize(loss)
    executor, scope = amp.Executor(threads=1), amp.Scope()
    executor.run(main.startup, scope=scope)
    folder = main.export_training(tmp_path / "step", amp.CPUPlace(), outputs=[main.outputs[0]], scope=scope)
    feeds = [{"x": rng.normal(size=(16, 8)).astype(np.float32)} for _ in range(8)]
    data = batches(tmp_path / "data.safetensors", feeds)
    found = losses(bare(folder, data, 8, tmp_path / "end"), loss.name)
    assert found.tolist() == [executor.run(main, feed, [loss], scope)[0].item() for feed in feeds]


def test_a_product_with_four_bit_weights_that_stay_is_computed_in_fp32() -> None:
    """Not with its other operand in 8 bits, as onnxruntime has it by default: that is off by half a per cent."""
    rng = np.random.default_rng(0)
    integers, x = rng.integers(-8, 8, (64, 32)), rng.normal(size=(4, 64)).astype(np.float32)
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]> net (float[4, 64] x) => (float[4, 32] y) {
        w = DequantizeLinear <axis = 0, block_size = 32> (q, s)  h = MatMul(x, w)  y = Mul(h, one) }"""
    )
    scales, one = np.full((2, 32), 0.01, np.float32), np.ones((1, 32), np.float32)
    model.graph.initializer.append(onnx.helper.make_tensor("q", onnx.TensorProto.INT4, (64, 32), integers.ravel()))
    model.graph.initializer.extend(numpy_helper.from_array(array, n) for n, array in (("s", scales), ("one", one)))
    main, executor, scope = amp.Program.from_onnx(model), amp.Executor(), amp.Scope()
    amp.prepare_training(main)
    with amp.program_guard(main, main.startup):
        loss = F.mean(F.square(main.outputs[0]))
        amp.optimizer.SGD(0.1).minimize(loss)
    executor.run(main.startup, scope=scope)
    (found,) = executor.run(main, {"x": x}, [main.outputs[0]], scope)
    np.testing.assert_allclose(found, x.astype(np.float64) @ (integers * 0.01), rtol=1e-5, atol=1e-6)


#: As onnxruntime's quantiser writes a convolution: with the weight as floats or integers, biases as integers.
QUANTISED = """<ir_version: 8, opset_import: ["" : 17]> net (float[2, 1, 6, 6] x, int64[2] label) => (float[2, 3] y)
    <float s = {0.03}, int8 z = {-8}, float[3] t = {0.004, 0.005, 0.003}, int8[3] o = {0, 0, 0},
    float[3] u = {0.00012, 0.00015, 0.00009}, int32[3] b = {500, -400, 300}, int32[3] n = {0, 0, 0}> {
    q = QuantizeLinear(x, s, z)  d = DequantizeLinear(q, s, z)  WEIGHT
    v = DequantizeLinear <axis = 0> (p, t, o)  c = DequantizeLinear <axis = 0> (b, u, n)
    a = Conv(d, v, c)  r = Relu(a)  e = QuantizeLinear(r, s, z)  f = DequantizeLinear(e, s, z)
    g = GlobalAveragePool(f)  y = Flatten(g) }"""


def quantised(as_floats: bool, moved: str = "") -> amp.Program:
    """The net; ``moved``: operators that make ``f2`` of ``f``, which is pooled then."""
    text = QUANTISED.replace("g = GlobalAveragePool(f)", f"{moved}  g = GlobalAveragePool({'f2' if moved else 'f'})")
    text = text.replace("WEIGHT", "p = QuantizeLinear <axis = 0> (w, t, o)" if as_floats else "")
    model = onnx.parser.parse_model(text)
    weight = np.random.default_rng(0).normal(size=(3, 1, 3, 3)).astype(np.float32) * 0.3
    held = ("w", weight) if as_floats else ("p", np.int8(weight / 0.01))
    model.graph.initializer.append(numpy_helper.from_array(held[1], held[0]))
    return amp.Program.from_onnx(model)


def test_what_onnxruntime_quantised_trains_where_weights_are_floats() -> None:
    main = quantised(as_floats=True)
    prepared = amp.prepare_training(main)
    assert prepared.trainable == ("w",) and prepared.notes[-1].startswith("'b': stored as integers, not trained")
    with amp.program_guard(main, main.startup):
        loss = F.cross_entropy(main.outputs[0], main.var("label"))
        amp.optimizer.SGD(0.5).minimize(loss)
    executor, scope = amp.Executor(), amp.Scope()
    executor.run(main.startup, scope=scope)
    feed = {"x": np.random.default_rng(1).normal(size=(2, 1, 6, 6)).astype(np.float32), "label": np.array([0, 2])}
    losses = [float(executor.run(main, feed, [loss], scope)[0]) for _ in range(12)]
    assert losses[-1] < losses[0] - 0.05


@pytest.mark.parametrize("save", ["fp32", "pure", "mixed"])
def test_what_is_moved_between_pairs_is_written_at_an_opset_that_loads(save: str, tmp_path: Path) -> None:
    """Training is at opset 21, at which onnxruntime refuses int8 that is brought back and moved, on x86."""
    moved = "h = Transpose(f)  i = QuantizeLinear(h, s, z)  k = DequantizeLinear(i, s, z)  f2 = Transpose(k)"
    model = quantised(as_floats=True, moved=moved).to_onnx()
    del model.graph.input[1]  # what the other tests train by
    features = np.random.default_rng(1).normal(size=(8, 1, 6, 6)).astype(np.float32)
    data = {"x": features, "label": np.arange(8) % 3}
    out = tmp_path / "out.onnx"
    amp.fit(model, out, data=data, batch_size=2, epochs=1, save=save, say=lambda _: None)
    result = run(onnx.load(out), {"x": features[:2]})[0]
    reference = ReferenceEvaluator(onnx.load(out)).run(None, {"x": features[:2]})[0]
    np.testing.assert_allclose(result, reference, atol=0.04)  # one step of the quantiser

    main = quantised(as_floats=True, moved=moved)
    amp.prepare_training(main)
    executor, scope = amp.Executor(), amp.Scope()
    executor.run(main.startup, scope=scope)
    amp.save_inference_model(out, ["x"], ["y"], executor, main, scope=scope)
    session(onnx.load(out))


def test_a_trained_model_is_written_where_no_such_opset_has_all_of_it(tmp_path: Path) -> None:
    """Scales of blocks are of opset 21: what was trained is not lost, and it is told where it does not load."""
    text = """<ir_version: 10, opset_import: ["" : 21]> net (float[2, 4] x) => (float[2, 4] y)
        <float s = {0.03}, int8 z = {0}, float[4, 2] t = {0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1}> {
        a = MatMul(x, w)  q = QuantizeLinear(a, s, z)  d = DequantizeLinear(q, s, z)  h = Transpose(d)
        r = QuantizeLinear(h, s, z)  e = DequantizeLinear(r, s, z)  k = Transpose(e)
        c = DequantizeLinear<axis = 1, block_size = 2>(b, t)  y = MatMul(k, c) }"""
    model = onnx.parser.parse_model(text)
    weight = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    for name, held in (("w", weight), ("b", np.eye(4, dtype=np.int8))):
        model.graph.initializer.append(numpy_helper.from_array(held, name))
    data = {"x": np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32), "label": np.arange(8) % 4}
    out = tmp_path / "out.onnx"
    with pytest.warns(UserWarning, match="written at opset 21, at which .* 'block_size'"):
        amp.fit(model, out, data=data, batch_size=2, epochs=1, save="fp32", say=lambda _: None)
    written = onnx.load(out)
    assert written.opset_import[0].version == 21
    (trained,) = (numpy_helper.to_array(each) for each in written.graph.initializer if each.name == "w")
    assert not np.array_equal(trained, weight)


def test_weights_that_are_stored_as_integers_are_named_where_nothing_trains() -> None:
    said = r"'p', 'b': stored as integers, not trained; .* a QuantizeLinear reads it: export the model so"
    with pytest.raises(ArgumentError, match=rf"no parameter of program 'net' is left to train .*{said}"):
        amp.prepare_training(quantised(as_floats=False))
    main = quantised(as_floats=False)
    with amp.program_guard(main, main.startup), pytest.raises(amp.AmpError, match=said):
        amp.append_backward(F.cross_entropy(main.outputs[0], main.var("label")))
