"""What a loop hands on unchanged is read from around it."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import amp_transpiler as amp
from tests.helpers.converting import inserted, off

#: A recurrent loop as tf2onnx writes it: what the body reads are states, handed on as they are or through Identity.
LOOP = """<ir_version: 8, opset_import: ["" : 17]>
net (float[8,16] x, int64 n) => (float[8,16] h, float[16,16] w_out, float[16] b_sum, float[k,8,16] all)
  <bool yes = {1}, float[16,16] w = {WEIGHTS}, float[16] b = {BIAS}>
{
  h, w_out, b_out, all = Loop (n, yes, x, w, b) <body = turn
    (int64 i, bool on, float[8,16] h_in, float[16,16] w_in, float[16] b_in)
      => (bool go, float[8,16] h_out, float[16,16] w_same, float[16] b_in, float[8,16] row) {
    go = Identity(on)
    p = MatMul(h_in, w_in)
    q = Add(p, b_in)
    h_out = Tanh(q)
    w_same = Identity(w_in)
    row = Identity(h_out)
  }>
  b_sum = Add(b_out, b)
}"""


def model(text: str = LOOP) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    for name, count in (("WEIGHTS", 256), ("BIAS", 16)):
        text = text.replace(name, ", ".join(f"{v:.4f}" for v in rng.normal(0, 0.3, count)))
    return onnx.parser.parse_model(text)


def run(proto: onnx.ModelProto, turns: int) -> list[np.ndarray]:
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.random.default_rng(1).normal(size=(8, 16)).astype(np.float32)
    return [np.asarray(v) for v in session.run(None, {"x": x, "n": np.array(turns)})]


def test_weights_of_a_loop_are_stored_in_16_bit_and_not_cast_in_each_turn() -> None:
    program = amp.convert(model())
    program.verify()
    (loop,) = program.nesting
    body = loop.attrs["body"]
    assert len(loop.inputs) == 3 and len(loop.outputs) == 2 and len(body.inputs) == 3 and len(body.outputs) == 3
    proto = program.to_onnx()
    onnx.checker.check_model(proto, full_check=True)
    assert {i.name for i in proto.graph.initializer if i.data_type == onnx.TensorProto.FLOAT16} >= {"w", "b"}
    (node,) = (n for n in proto.graph.node if n.op_type == "Loop")
    inside = [n for n in node.attribute[0].g.node if inserted(n)]
    assert len(inside) == 2, "the state that changes, in and out"
    for turns in (0, 1, 5):
        for found, wanted in zip(run(proto, turns), run(model(), turns), strict=True):
            assert off(found, wanted) < 2e-3


@pytest.mark.parametrize(
    "change, states",
    [
        (("w_same = Identity(w_in)", "w_same = Neg(w_in)"), 2),
        (("w_same = Identity(w_in)", "w_two = Identity(w_in) w_same = Identity(w_two)"), 1),
        (("=> (bool go, float[8,16] h_out, float[16,16] w_same, float[16] b_in, float[8,16] row)",
          "=> (bool go, float[8,16] h_out, float[16,16] w_same, float[16] b_same, float[16] b_in)"), 2),
    ],
)  # fmt: skip
def test_what_changes_or_is_made_besides_stays_a_state(change: tuple[str, str], states: int) -> None:
    text = LOOP.replace(*change)
    if "b_same" in change[1]:
        text = text.replace("row = Identity(h_out)", "b_same = Identity(b_in)").replace(
            "float[k,8,16] all", "float[k,16] all"
        )
    assert text != LOOP
    program = amp.convert(model(text), numeric_guards=False)
    program.verify()
    (loop,) = program.nesting
    assert len(loop.inputs) == 2 + states
    for found, wanted in zip(run(program.to_onnx(), 3), run(model(text), 3), strict=True):
        assert off(found, wanted) < 2e-3


@pytest.mark.parametrize("read", ["w_in", "w"])
def test_one_weight_may_be_several_states_and_be_read_from_around_too(read: str) -> None:
    twice = LOOP.replace("x, w, b)", "x, w, w)")
    twice = twice.replace("float[16] b_in", "float[16,16] b_in").replace(
        "b_sum = Add(b_out, b)", "b_sum = ReduceSum(b_out, first)"
    )
    twice = twice.replace("float[16] b_sum", "float[1,16] b_sum").replace(
        "<bool yes", "<int64[1] first = {0}, bool yes"
    )
    twice = twice.replace("q = Add(p, b_in)", f"r = MatMul(p, {read})  q = MatMul(r, b_in)")
    program = amp.convert(model(twice))
    program.verify()
    (loop,) = program.nesting
    assert len(loop.inputs) == 3 and len(loop.captures) == 1
    onnx.checker.check_model(program.to_onnx(), full_check=True)
    for turns in (0, 1, 4):
        for found, wanted in zip(run(program.to_onnx(), turns), run(model(twice), turns), strict=True):
            assert off(found, wanted) < 1e-2
