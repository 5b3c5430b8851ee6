"""Named recipes, and names that stand for many operators."""

from __future__ import annotations

import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import ArgumentError, ListError
from amp_transpiler.lists import default_lists, resolve
from amp_transpiler.lists._presets import parse_presets, presets

#: One transformer block's tail as exporters write it: layer norm and GELU whole, then logits.
WHOLE = """<ir_version: 8, opset_import: ["" : 20]>
net (int64[2,5] ids) => (float[2,5,2] logits)
  <float[9,8] table = {T}, float[8] scale = {S}, float[8,8] w = {W}, float[8,2] qa_outputs_weight = {Q}>
{
  e = Gather(table, ids)
  n = LayerNormalization(e, scale)
  d = MatMul(n, w)
  g = Gelu(d)
  p = Tanh(d)
  s = Add(g, p)
  h = LayerNormalization(s, scale)
  y = MatMul(h, qa_outputs_weight)
  logits = Identity(y)
}"""

#: GELU and layer norm as opset 13 writes them.
DECOMPOSED = """<ir_version: 8, opset_import: ["" : 13]>
net (float[2,8] x) => (float[2,8] out)
  <float[8,8] w = {W}, float root = {1.4142}, float one = {1}, float half = {0.5}, float two = {2}, float eps = {1e-12}>
{
  d = MatMul(x, w)
  q = Div(d, root)
  f = Erf(q)
  a = Add(f, one)
  m = Mul(d, a)
  g = Mul(m, half)
  mean = ReduceMean <axes = [-1]> (g)
  c = Sub(g, mean)
  sq = Pow(c, two)
  var = ReduceMean <axes = [-1]> (sq)
  ve = Add(var, eps)
  sd = Sqrt(ve)
  n = Div(c, sd)
  out = MatMul(n, w)
}"""


def program(text: str) -> amp.Program:
    for key, size in (("T", 72), ("S", 8), ("W", 64), ("Q", 16)):
        text = text.replace("{" + key + "}", "{" + ", ".join(f"{0.01 * i:.2f}" for i in range(size)) + "}")
    model = onnx.parser.parse_model(text)
    for node in model.graph.node:
        if node.output[0] == "d":
            node.name = "/dense/MatMul"
    return amp.Program.from_onnx(model)


def precisions(rewritten: amp.Program) -> dict[str, str]:
    """Precision by operator type, and by the first output for MatMul."""
    found = {}
    for op in rewritten.operators:
        if op.type != "Cast":
            found[op.outputs[0].name.split(".")[0] if op.type == "MatMul" else op.type] = op.precision
    return found


def test_there_are_these_presets():
    assert set(presets()) == {"bert", "bert_pure"}


@pytest.mark.parametrize("preset", presets().values(), ids=presets())
def test_every_preset_names_operators_that_exist(preset):
    assert all(resolve(name) == (name,) for name in preset.black)
    assert preset.reasons.keys() == preset.black | set(preset.names) and preset.why
    assert not preset.black & default_lists().white, "the products stay in 16 bit"


def test_bert_keeps_norms_activations_and_logits_fp32():
    rewritten = program(WHOLE)
    amp.rewrite_program(rewritten, amp.AutoMixedPrecisionLists(preset="bert"))
    assert precisions(rewritten) == {
        "Gather": "float32",
        "LayerNormalization": "float32",
        "d": "float16",
        "Gelu": "float32",
        "Tanh": "float32",
        "Add": "float32",
        "y": "float32",
        "Identity": "float32",
    }
    plain = program(WHOLE)
    amp.rewrite_program(plain)
    assert precisions(plain)["y"] == precisions(plain)["Tanh"] == "float16", "the preset made the difference"


def test_bert_keeps_what_was_written_out_fp32():
    rewritten = program(DECOMPOSED)
    amp.rewrite_program(rewritten, amp.AutoMixedPrecisionLists(preset="bert", dtype="bfloat16"))
    found = precisions(rewritten)
    assert found.pop("d") == "bfloat16" and found.pop("out") == "bfloat16"
    assert set(found.values()) == {"float32"}, found


def test_bert_pure_keeps_logits_and_written_out_sums_fp32():
    rewritten = program(WHOLE)
    lists = amp.AutoMixedPrecisionLists(preset="bert_pure")
    amp.cast_model_to_fp16(rewritten, lists, use_fp16_guard=False)
    found = precisions(rewritten)
    assert found["LayerNormalization"] == found["Gelu"] == found["d"] == "float16"
    assert found["y"] == found["Identity"] == "float32"
    assert rewritten.var("qa_outputs_weight").dtype == "float32"
    reason = next(op.reason for op in rewritten.operators if op.outputs[0].name == "y")
    assert reason == "fp32: '*logits*' is in the preset" or "qa_outputs" in reason
    before = rewritten.to_onnx().SerializeToString()
    amp.cast_model_to_fp16(rewritten, lists, use_fp16_guard=False)
    assert rewritten.to_onnx().SerializeToString() == before, "a second call changes nothing"
    written_out = program(DECOMPOSED)
    amp.cast_model_to_fp16(written_out, lists, use_fp16_guard=False)
    found = precisions(written_out)
    assert found["Pow"] == found["Sqrt"] == found["ReduceMean"] == "float32" and found["Erf"] == "float16"


def test_custom_lists_change_a_preset():
    lists = amp.AutoMixedPrecisionLists(["Gelu"], ["Relu"], preset="bert")
    assert "Gelu" in lists.white_list and "Relu" in lists.black_list and "LayerNormalization" in lists.black_list
    assert "LayerNormalization" not in amp.AutoMixedPrecisionLists().black_list
    with pytest.raises(ListError, match="there is no preset 'brt'. Did you mean 'bert'"):
        amp.AutoMixedPrecisionLists(preset="brt")


@pytest.mark.parametrize(
    "text, message",
    [
        ('[a]\nwhy = "x"\n[[a.gray]]\nwhy = "y"\noperators = ["Add"]', "no list 'gray'"),
        ('[a]\nwhy = "x"\n[[a.black]]\nwhy = "y"\noperators = ["Gelly"]', "no operator 'Gelly'. Did you mean 'Gelu'"),
        ('[a]\nwhy = "x"\n[[a.black]]\nwhy = "y"\noperators = ["Add", "Add"]', "'Add' stands there twice"),
    ],
)
def test_a_broken_preset_file_is_refused(text: str, message: str):
    with pytest.raises(ListError, match=message):
        parse_presets(text, "presets.toml")


def test_a_pattern_names_operators_by_name_result_or_parameter():
    for pattern in ("/dense/*", "re:/dense/.*", "d*"):
        rewritten = program(WHOLE)
        amp.rewrite_program(rewritten, amp.AutoMixedPrecisionLists(custom_black_varnames=[pattern]))
        assert precisions(rewritten)["d"] == "float32" and precisions(rewritten)["y"] == "float16", pattern
    by_parameter = program(WHOLE)
    amp.rewrite_program(by_parameter, amp.AutoMixedPrecisionLists(custom_black_varnames=["qa_outputs_*"]))
    assert precisions(by_parameter)["d"] == "float16" and precisions(by_parameter)["y"] == "float32"
    with pytest.raises(ArgumentError, match=r"custom_black_varnames: pattern 'head/\*' matches no operator"):
        amp.rewrite_program(program(WHOLE), amp.AutoMixedPrecisionLists(custom_black_varnames=["head/*"]))
