"""Portable steps: double where builds of onnxruntime have kernels of their own, and nothing else changed."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import amp_transpiler as amp
from amp_transpiler.export.portable import portable
from amp_transpiler.nn import functional as F
from amp_transpiler.passes.lowering.lowered import Lowered
from tests.helpers.checkpoints import STEPS, build
from tests.helpers.runners import bare, batches, losses

HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'
#: Before, what comes of each operator ("Softmax*": in double), and what is left as it is.
CASES: dict[str, tuple[str, list[str], set[str]]] = {
    "functions and norms": (
        "agraph (float[4, 8] x, float[8] w, float[8] b) => (float[4, 8] y) "
        "{ a = Softmax(x) c = Sqrt(a) d = LayerNormalization(c, w, b) e = Add(d, x) y = Tanh(e) }",
        ["Softmax*", "Sqrt", "LayerNormalization*", "Add", "Tanh*"],
        set(),
    ),
    "a sum along the first axis is one of rows": (
        "agraph (float[4, 8] x) => (float[8] y) <int64[1] axis = {0}> { y = ReduceSum <keepdims = 0> (x, axis) }",
        ["ReduceSum*"],
        set(),
    ),
    "a sum along the first axis and others begins with rows": (
        "agraph (float[4, 3, 8] x) => (float[3] y) <int64[2] axes = {0, 2}> { y = ReduceSum <keepdims = 0> (x, axes) }",
        ["ReduceSum", "ReduceSum*"],
        set(),
    ),
    "the mean of all": (
        "agraph (float[4, 8] x) => (float y) { y = ReduceMean <keepdims = 0> (x) }",
        ["ReduceMean", "ReduceMean*"],
        set(),
    ),
    "products of 16-bit numbers": (
        "agraph (float16[4, 8] x, float[8, 4] w) => (float[4, 4] y) { a = Cast <to = 1> (x) b = Cast <to = 10> (w) "
        "c = Cast <to = 1> (b) d = Relu(a) y = MatMul(d, c) }",
        ["Cast", "Cast", "Cast", "Relu", "MatMul"],
        set(),
    ),
    "products of others": (
        "agraph (float16[4, 8] x, float[8, 4] w) => (float[4, 4] y) { a = Cast <to = 1> (x) y = MatMul(a, w) }",
        ["Cast", "MatMul*"],
        set(),
    ),
    "products of 16-bit numbers that are scaled": (
        "agraph (float16[4, 8] x, float16[8, 4] w) => (float[4, 4] y, float[4, 4] z) { a = Cast <to = 1> (x) "
        "b = Cast <to = 1> (w) y = Gemm <alpha = 0.3> (a, b) z = Gemm <alpha = 0.25> (a, b) }",
        ["Cast", "Cast", "Gemm*", "Gemm"],
        set(),
    ),
    "products with a vector": (
        "agraph (float16[4, 8] x, float16[8, 1] w) => (float[4, 1] y) "
        "{ a = Cast <to = 1> (x) b = Cast <to = 1> (w) y = MatMul(a, b) }",
        ["Cast", "Cast", "MatMul*"],
        set(),
    ),
    "convolutions of 16-bit numbers": (
        "agraph (float16[1, 2, 8, 8] x, float16[4, 1, 3, 3] w) => (float[1, 4, 6, 6] y) "
        "{ a = Cast <to = 1> (x) b = Cast <to = 1> (w) y = Conv <group = 2> (a, b) }",
        ["Cast", "Cast", "Conv"],
        set(),
    ),
    "depthwise convolutions have their filters twice": (
        "agraph (float16[1, 2, 8, 8] x, float16[2, 1, 3, 3] w) => (float[1, 2, 6, 6] y) "
        "{ a = Cast <to = 1> (x) b = Cast <to = 1> (w) y = Conv <group = 2> (a, b) }",
        ["Cast", "Cast", "Reshape", "Concat", "Reshape", "Conv", "Slice"],
        set(),
    ),
    "convolutions at one place are products": (
        "agraph (float16[2, 3, 4, 5] x, float16[6, 3, 4, 5] w, float16[6] c) => (float[2, 6, 1, 1] y) "
        "{ a = Cast <to = 1> (x) b = Cast <to = 1> (w) d = Cast <to = 1> (c) y = Conv(a, b, d) }",
        ["Cast", "Cast", "Cast", "Reshape", "Reshape", "Gemm", "Reshape"],
        set(),
    ),
    "convolutions at one place of one image": (
        "agraph (float16[1, 3, 1, 1] x, float16[6, 3, 1, 1] w) => (float[1, 6, 1, 1] y) "
        "{ a = Cast <to = 1> (x) b = Cast <to = 1> (w) y = Conv(a, b) }",
        ["Cast", "Cast", "Reshape", "Reshape", "Gemm*", "Reshape"],
        set(),
    ),
    "what has no kernel of double stays": (
        "agraph (float16[1, 2, 8, 8] x, float[4, 2, 3, 3] w) => (float[1, 4, 6, 6] y) "
        "{ a = Cast <to = 1> (x) c = Conv(a, w) y = Erf(c) }",
        ["Cast", "Conv", "Erf"],
        {"Conv", "Erf"},
    ),
    "lines between bounds are products and sums": (
        "agraph (float[8] x) => (float[8] y, float[8] z) { y = HardSwish(x) z = HardSigmoid <alpha = 0.25> (x) }",
        ["Mul", "Add", "Clip", "Mul", "Mul", "Add", "Clip"],
        set(),
    ),
    "in a branch": (
        "agraph (float[8] x, bool c) => (float[8] y) { y = If (c) <then_branch = t () => (float[8] a) { a = Exp(x) }, "
        "else_branch = e () => (float[8] b) { b = Neg(x) }> }",
        ["If", "Exp*", "Neg"],
        set(),
    ),
    "a scan that hands on 16-bit numbers": (
        "agraph (float16[2, 4] s, float[3, 2, 4] r, float16[4, 4] w) => (float[2, 4] y) { a = Cast <to = 1> (s) "
        "b = Cast <to = 1> (w) y = Scan <num_scan_inputs = 1, body = t (float[2, 4] h, float[2, 4] i) => "
        "(float[2, 4] o) { m = MatMul(h, b) n = Add(m, i) k = Cast <to = 10> (n) o = Cast <to = 1> (k) }> (a, r) }",
        ["Cast", "Cast", "Scan", "MatMul", "Add", "Cast", "Cast"],
        set(),
    ),
    "a scan that hands on others": (
        "agraph (float16[2, 4] s, float[3, 2, 4] r, float16[4, 4] w) => (float[2, 4] y) { a = Cast <to = 1> (s) "
        "b = Cast <to = 1> (w) y = Scan <num_scan_inputs = 1, body = t (float[2, 4] h, float[2, 4] i) => "
        "(float[2, 4] o) { m = MatMul(h, b) o = Add(m, i) }> (a, r) }",
        ["Cast", "Cast", "Scan", "MatMul*", "Add"],
        set(),
    ),
}


def listed(graph: onnx.GraphProto) -> list[str]:
    """The operators, those in double marked and without the casts around them."""
    wide = {node.output[0] for node in graph.node if node.op_type == "Cast" and node.attribute[0].i == 11}
    found = []
    for node in graph.node:
        if node.op_type == "Cast" and (node.output[0] in wide or node.input[0].endswith("/wide")):
            continue
        found.append(node.op_type + "*" * (not wide.isdisjoint(node.input)))
        for attribute in node.attribute:
            found += listed(attribute.g)
    return found


@pytest.mark.parametrize("case", CASES)
def test_double_where_kernels_differ(case: str) -> None:
    text, expected, stays = CASES[case]
    model = onnx.parser.parse_model(HEAD + text)
    left: set[str] = set()
    made = portable(Lowered(model, "cpu"), left).model
    onnx.checker.check_model(made, full_check=True)
    assert listed(made.graph) == expected and left == stays
    ort.InferenceSession(made.SerializeToString())


def test_results_are_those_of_float64_rounded_once() -> None:
    """Which a kernel of fp32 does not give everywhere."""
    text = (
        "agraph (float[64, 96] x) => (float[64, 96] a, float[64, 96] b, float[64, 96] c, float d) "
        "{ a = Exp(x) b = Tanh(x) c = Softmax(x) d = ReduceSumSquare <keepdims = 0> (x) }"
    )
    model = onnx.parser.parse_model(HEAD + text)
    x = np.random.default_rng(0).standard_normal((64, 96)).astype(np.float32)
    wide = x.astype(np.float64)
    powers = np.exp(wide - wide.max(1, keepdims=True))
    expected = [np.exp(wide), np.tanh(wide), powers / powers.sum(1, keepdims=True), (wide * wide).sum()]
    made = portable(Lowered(model, "cpu"), set()).model
    found, before = (ort.InferenceSession(m.SerializeToString()).run(None, {"x": x}) for m in (made, model))
    rounded = [array.astype(np.float32).tobytes() for array in expected]
    assert [array.tobytes() for array in found] == rounded != [array.tobytes() for array in before]


def test_an_operator_that_onnx_does_not_know_computes_in_double() -> None:
    text = "agraph (float[64, 96] x, float[96] g) => (float[64, 96] y) { y = SimplifiedLayerNormalization <epsilon = 1e-3> (x, g) }"
    model = onnx.parser.parse_model(HEAD + text)
    rng = np.random.default_rng(0)
    x, g = (rng.standard_normal(size).astype(np.float32) for size in ((64, 96), 96))
    wide = x.astype(np.float64)
    exact = wide / np.sqrt((wide * wide).mean(1, keepdims=True) + np.float64(np.float32(1e-3))) * g
    left: set[str] = set()
    made = portable(Lowered(model, "cpu"), left).model
    assert listed(made.graph) == ["SimplifiedLayerNormalization*"] and not left
    found, before = (ort.InferenceSession(m.SerializeToString()).run(None, {"x": x, "g": g})[0] for m in (made, model))
    assert found.tobytes() == exact.astype(np.float32).tobytes() != before.tobytes()


ROTATIONS = {
    "heads before places": ("2, 3, 5, 8", "{0}", "1", "", ["Gather", "Unsqueeze"] * 2 + ["Split"], []),
    "heads behind places": (
        "2, 5, 24",
        "{2}",
        "1",
        "<num_heads = 3> ",
        ["Reshape", *["Gather", "Unsqueeze"] * 2, "Split"],
        ["Reshape"],
    ),
    "a place of each": (
        "2, 3, 5, 8",
        "{3, 1, 4, 1, 5, 0, 2, 6, 5, 3}",
        "2, 5",
        "",
        ["Gather", "Unsqueeze"] * 2 + ["Split"],
        [],
    ),
    "neighbours": (
        "2, 3, 5, 8",
        "{1}",
        "1",
        "<interleaved = 1> ",
        ["Gather", "Unsqueeze"] * 2 + ["Reshape", "Gather", "Gather"],
        [],
    ),
    "neighbours of heads behind places": (
        "2, 5, 24",
        "{2}",
        "1",
        "<num_heads = 3, interleaved = 1> ",
        ["Reshape", *["Gather", "Unsqueeze"] * 2, "Reshape", "Gather", "Gather"],
        ["Reshape"],
    ),
}


@pytest.mark.parametrize("name", ROTATIONS)
def test_rotations_round_each_product_and_sum(name: str) -> None:
    shape, places, sizes, attributes, before, behind = ROTATIONS[name]
    text = (
        f"agraph (float[{shape}] x, float[7, 4] c, float[7, 4] s) => (float[{shape}] y) <int64[{sizes}] at = {places}> "
        f"{{ y = com.microsoft.RotaryEmbedding {attributes}(x, at, c, s) }}"
    )
    model = onnx.parser.parse_model(HEAD.replace("21]", '21, "com.microsoft" : 1]') + text)
    rng = np.random.default_rng(0)
    x, angles = rng.standard_normal([int(n) for n in shape.split(",")]).astype(np.float32), rng.standard_normal((7, 4))
    feeds = {"x": x, "c": np.cos(angles).astype(np.float32), "s": np.sin(angles).astype(np.float32)}
    left: set[str] = set()
    made = portable(Lowered(model, "cpu"), left).model
    joined = ["Unsqueeze", "Unsqueeze", "Concat", "Reshape"] if "interleaved" in attributes else ["Concat"]
    assert listed(made.graph) == [*before, *["Mul"] * 4, "Sub", "Add", *joined, *behind] and not left
    found, kernel = (ort.InferenceSession(m.SerializeToString()).run(None, feeds)[0] for m in (made, model))
    np.testing.assert_allclose(found, kernel, atol=1e-6)


@pytest.mark.parametrize(
    "attributes",
    ["num_heads = 2, rotary_embedding_dim = 4", "num_heads = 2, scale = 2.0"],
)
def test_rotations_of_another_kind_stay(attributes: str) -> None:
    text = (
        "agraph (float[2, 3, 16] x, float[3, 4] c, float[3, 4] s) => (float[2, 3, 16] y) <int64[1] at = {0}> "
        f"{{ y = com.microsoft.RotaryEmbedding <{attributes}> (x, at, c, s) }}"
    )
    left: set[str] = set()
    model = onnx.parser.parse_model(HEAD.replace("21]", '21, "com.microsoft" : 1]') + text)
    assert listed(portable(Lowered(model, "cpu"), left).model.graph) == ["RotaryEmbedding"]
    assert left == {"RotaryEmbedding"}


def test_lines_between_bounds_round_each_product_and_sum() -> None:
    """A kernel may round both at once."""
    text = (
        "agraph (float[4000] x) => (float[4000] y, float[4000] z, float[4000] u) "
        "{ y = HardSwish(x) z = HardSigmoid(x) u = HardSigmoid <alpha = 0.3, beta = 0.1> (x) }"
    )
    model = onnx.parser.parse_model(HEAD + text)
    x = np.random.default_rng(0).normal(0, 3, 4000).astype(np.float32)

    def line(slope: float, height: float) -> np.ndarray:
        return np.clip(x * np.float32(slope) + np.float32(height), 0, 1, dtype=np.float32)

    expected = [x * line(1 / 6, 0.5), line(0.2, 0.5), line(0.3, 0.1)]
    made = portable(Lowered(model, "cpu"), set()).model
    found = ort.InferenceSession(made.SerializeToString()).run(None, {"x": x})
    assert [array.tobytes() for array in found] == [array.tobytes() for array in expected]


@pytest.mark.parametrize(
    ("x", "w", "attributes"),
    [
        ((2, 6, 9, 8), (6, 1, 3, 2), "<group = 6, strides = [2, 1], pads = [1, 0, 1, 0]>"),
        ((2, 3, 4, 5), (6, 3, 4, 5), ""),
        ((1, 6, 1, 1), (6, 6, 1, 1), "<kernel_shape = [1, 1], auto_pad = 'VALID'>"),
    ],
)
def test_convolutions_are_what_they_were(x: tuple[int, ...], w: tuple[int, ...], attributes: str) -> None:
    """Sums of products of small whole numbers are exact, in whatever order."""
    text = (
        f"agraph (float16[{','.join(map(str, x))}] x, float16[{','.join(map(str, w))}] w, float16[6] c) "
        "=> (float[n, 6, h, v] y) { a = Cast <to = 1> (x) b = Cast <to = 1> (w) d = Cast <to = 1> (c) "
        f"y = Conv {attributes} (a, b, d) }}".replace("'VALID'", '"VALID"')
    )
    model = onnx.parser.parse_model(HEAD + text)
    rng = np.random.default_rng(0)
    feeds = {n: rng.integers(-8, 9, s).astype(np.float16) for n, s in {"x": x, "w": w, "c": (6,)}.items()}
    made = portable(Lowered(model, "cpu"), set()).model
    found, before = (ort.InferenceSession(m.SerializeToString()).run(None, feeds)[0] for m in (made, model))
    assert np.array_equal(found, before) and found.any()


def test_a_portable_step_is_the_same_training_but_for_roundings(tmp_path: Path) -> None:
    net = build(average=True, window=2)
    scope = net.start()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        folder = net.main.export_training(tmp_path / "step", amp.CPUPlace(), scope=scope, portable=True)
    assert json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["places"][0]["portable"] is True
    data = batches(tmp_path / "data.safetensors", [net.feed(s) for s in range(STEPS)])
    found = losses(bare(folder, data, STEPS, tmp_path / "end"), net.loss.name)
    expected = np.frombuffer(b"".join(net.train(scope, 0, STEPS)), np.float32)
    assert np.allclose(found, expected, rtol=4e-3, equal_nan=True)
    ended = amp.Scope()
    assert amp.load_checkpoint(tmp_path / "end", net.main, ended).exact


def test_what_cannot_be_portable_is_said(tmp_path: Path) -> None:
    main, startup, scope = amp.Program("gelu"), amp.Program("startup"), amp.Scope()
    with amp.program_guard(main, startup), amp.unique_name.guard():
        loss = F.mean(F.gelu(amp.nn.fc(amp.data("x", [4, 8], "float32"), 4)))
        amp.optimizer.SGD(0.1).minimize(loss, startup)
    amp.Executor().run(startup, scope=scope)
    with pytest.warns(UserWarning, match="Gelu.*'gelu'"):
        main.export_training(tmp_path / "step", amp.CPUPlace(), outputs=[loss], scope=scope, portable=True)
    with pytest.raises(ValueError, match="for steps that processors run"):
        main.export_training(tmp_path / "gpu", amp.CUDAPlace(0), outputs=[loss], scope=scope, portable=True)
    with pytest.raises(TypeError, match="portable is 1"):
        main.export_training(tmp_path / "gpu", amp.CPUPlace(), outputs=[loss], scope=scope, portable=1)
