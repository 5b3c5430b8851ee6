"""Operators taken apart for training: they compute what onnxruntime's own kernels compute, and have gradients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import GradientError
from amp_transpiler.ir import decompose as decompose_module
from amp_transpiler.ir.decompose import Parts, decompose_operator, decomposition, has_decomposition
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.nn import functional as F
from amp_transpiler.passes.canonicalize.standard_form import standardize
from tests.corpora.fused_operators import KEPT, MS, ONE, PACKED, PLAIN, B, H, N, S, X, normal, of_one
from tests.helpers.cuda_kernels import without_cuda_kernel
from tests.helpers.sessions import run, session

pytestmark = pytest.mark.rules

Array = np.ndarray[Any, Any]


def taken_apart(model: onnx.ModelProto) -> amp.Program:
    program = amp.Program.from_onnx(model)
    standardize(program)
    program.verify()
    return program


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "open"])
@pytest.mark.parametrize(("type_", "inputs", "attrs", "outputs"), [*ONE, *PLAIN])
def test_one_operator(type_: str, inputs: list[Any], attrs: dict[str, Any], outputs: str, dynamic: bool) -> None:
    model = of_one(type_, inputs, attrs, outputs, "" if type_ in {p[0] for p in PLAIN} else MS, dynamic)
    feeds = {f"x{i}": a for i, a in enumerate(inputs) if a is not None}
    expected = run(model, feeds, "DISABLE_ALL")
    program = taken_apart(model)
    for op in [op for op in program.operators if op.type == type_ and has_decomposition(op)]:
        decompose_operator(op)  # one that has a gradient is taken apart where that is asked for
    assert not [op for op in program.operators if op.type == type_ and op.type != "Gelu"], "it is still there"
    assert not [op for op in program.operators if op.domain]
    assert all(op.name.startswith("block/one/") for op in program.operators if op.type != "Identity")
    for want, got in zip(expected, run(program.to_onnx(), feeds, "DISABLE_ALL"), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5)


def test_attention_with_a_scale_needs_no_fixed_head_size() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
    net (float[2,5,D] q, float[2,7,D] k, float[2,7,D] v) => (float[2,5,D] y)
    { y = com.microsoft.MultiHeadAttention <num_heads = 2, scale = 0.5> (q, k, v) }"""
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal((2, n, 8)).astype(np.float32) for name, n in (("q", 5), ("k", 7), ("v", 7))}
    program = taken_apart(model := onnx.parser.parse_model(text))
    assert not [op for op in program.operators if op.domain]
    wanted, found = (run(each, feeds, "DISABLE_ALL")[0] for each in (model, program.to_onnx()))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=2e-5)


def test_a_user_s_own_rule_keeps_the_operator_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from amp_transpiler.ir import opdef

    monkeypatch.setattr(opdef, "_TABLE", {key: replace(found) for key, found in opdef._TABLE.items()})
    monkeypatch.setattr(opdef, "_READS", dict(opdef._READS))
    amp.register_gradient(f"{MS}::QuickGelu", reads="dy0", replace=True)(lambda e, op, dy: [dy])
    program = taken_apart(of_one("QuickGelu", [X], {}, "1", MS, False))
    assert [op.type for op in program.operators] == ["QuickGelu"]


def test_a_form_that_is_not_known_stays_and_is_named_on_the_path_of_the_loss() -> None:
    model = of_one("Attention", [*PACKED, np.zeros(3 * B + 2, np.int32)], {"num_heads": N}, "1", MS, False)
    program = amp.Program.from_onnx(model)
    before = program.to_onnx()
    standardize(program)
    assert program.to_onnx() == before, "nothing is left of the attempt"
    weights = program.var("x1")
    program.var("y0").shape = (B, S, H)
    with amp.program_guard(program, amp.Program("startup")):
        loss = F.mean(program.var("y0"))
    complaint = r"'block/one' \(com.microsoft::Attention\).*start and end.*freeze.*@amp.register_gradient\('com.micro"
    with pytest.raises(GradientError, match=complaint):
        amp.append_backward(loss, parameter_list=[weights])


# -- what onnxruntime's optimiser writes ---------------------------------------------------------------------
def optimised(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    session(model, "ENABLE_EXTENDED", folder / "optimised.onnx")
    return onnx.load(folder / "optimised.onnx")


BLOCK = """<ir_version: 10, opset_import: ["" : 17]>
block (float[B,5,12] x, float[B,1,1,5] mask) => (float[B,5,12] y) {
    q0 = MatMul (x, wq)  q1 = Add (q0, bq)  q2 = Reshape (q1, apart)  q = Transpose <perm = [0, 2, 1, 3]> (q2)
    k0 = MatMul (x, wk)  k1 = Add (k0, bk)  k2 = Reshape (k1, apart)  k = Transpose <perm = [0, 2, 3, 1]> (k2)
    v0 = MatMul (x, wv)  v1 = Add (v0, bv)  v2 = Reshape (v1, apart)  v = Transpose <perm = [0, 2, 1, 3]> (v2)
    s0 = MatMul (q, k)  s1 = Div (s0, root)  s2 = Add (s1, mask)  p = Softmax <axis = -1> (s2)
    c0 = MatMul (p, v)  c1 = Transpose <perm = [0, 2, 1, 3]> (c0)  c2 = Reshape (c1, together)
    o0 = MatMul (c2, wo)  o1 = Add (bo, o0)  r1 = Add (o1, x)
    n1 = LayerNormalization <axis = -1, epsilon = 1e-5> (r1, g1, b1)
    h0 = MatMul (n1, w1)  h1 = Add (h0, c1b)
    e0 = Div (h1, sqrt2)  e1 = Erf (e0)  e2 = Add (e1, one)  e3 = Mul (h1, e2)  h2 = Mul (e3, half)
    f0 = MatMul (h2, w2)  f1 = Add (f0, c2b)  r2 = Add (f1, n1)
    n2 = LayerNormalization <axis = -1, epsilon = 1e-5> (r2, g2, b2)
    t0 = MatMul (n2, w3)  t1 = Add (t0, c3b)  u0 = Mul (t1, t1)  u1 = Mul (u0, t1)  u2 = Mul (u1, cube)
    u3 = Add (t1, u2)  u4 = Mul (u3, rate)  u5 = Tanh (u4)  u6 = Add (u5, one)  u7 = Mul (t1, half)  y = Mul (u7, u6)
}"""
SHAPES = {
    **dict.fromkeys(("wq", "wk", "wv", "wo", "w3"), (12, 12)),
    **dict.fromkeys(("bq", "bk", "bv", "bo", "c3b"), (12,)),
    **dict.fromkeys(("g1", "b1", "g2", "b2", "c2b"), (12,)),
    "w1": (12, 24),
    "c1b": (24,),
    "w2": (24, 12),
}
NUMBERS = {"root": 2.0, "sqrt2": 2**0.5, "one": 1.0, "half": 0.5, "cube": 0.044715, "rate": (2 / np.pi) ** 0.5}


def block() -> onnx.ModelProto:
    values = np.random.default_rng(1)
    model = onnx.parser.parse_model(BLOCK)
    arrays = {name: values.normal(size=shape).astype(np.float32) * 0.4 for name, shape in SHAPES.items()}
    arrays |= {name: np.array(number, np.float32) for name, number in NUMBERS.items()}
    arrays |= {"apart": np.array([0, 0, 3, 4]), "together": np.array([0, 0, 12])}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in arrays.items())
    return model


def gradients(model: onnx.ModelProto, feeds: dict[str, Array], names: list[str], weights: Array) -> dict[str, Array]:
    """The gradients of the weighted mean of the first output, by onnxruntime."""
    program = amp.Program.from_onnx(model)
    with amp.program_guard(program, amp.Program("startup")):
        loss = F.mean(program.outputs[0] * program.add_constant("weights", weights))
    pairs = amp.append_backward(loss, parameter_list=[n for n in names if program.has_var(n)])
    assert not [op for op in program.operators if op.domain == MS]
    scope = amp.Scope()
    with amp.scope_guard(scope):
        exe = amp.Executor(amp.CPUPlace())
        exe.run(program.startup)
        values = exe.run(program, feed=feeds, fetch_list=[grad for _, grad in pairs])
    return {parameter.name: value for (parameter, _), value in zip(pairs, values, strict=True)}


def test_an_optimised_block_trains_as_the_block_did(tmp_path: Path) -> None:
    model = block()
    fused = optimised(model, tmp_path)
    kinds = {node.op_type for node in fused.graph.node if node.domain == MS}
    assert kinds >= {"SkipLayerNormalization", "FusedMatMul"} and kinds & {"BiasGelu", "FastGelu", "Gelu"}
    feeds = {"x": normal(2, 5, 12), "mask": np.where(KEPT, 0, -10000).astype(np.float32).reshape(2, 1, 1, 5)}
    program = taken_apart(fused)
    want = run(fused, feeds, "DISABLE_ALL")[0]
    np.testing.assert_allclose(run(program.to_onnx(), feeds, "DISABLE_ALL")[0], want, rtol=1e-4, atol=1e-5)
    weights = normal(*want.shape)
    expected, found = (gradients(m, feeds, list(SHAPES), weights) for m in (model, fused))
    assert set(expected) == set(found) == set(SHAPES)
    for name, gradient in expected.items():
        error = np.linalg.norm(found[name] - gradient) / max(np.linalg.norm(gradient), 1e-3)
        assert error < 1e-5, (name, error)


def precisions(model: onnx.ModelProto, pure: bool) -> dict[str, set[str | None]]:
    """The element types of the first inputs of the forward operators, by operator type, under ``decorate``."""
    program = amp.Program.from_onnx(model)
    with amp.program_guard(program, program.startup):
        y = program.var("y")
        loss = F.mean(y * y)
    optimizer = amp.decorate(
        amp.optimizer.SGD(0.1, multi_precision=pure), use_pure_fp16=pure, use_fp16_guard=False if pure else None
    )
    optimizer.minimize(loss, program.startup)
    found: dict[str, set[str | None]] = {}
    for op in program.operators:
        if op.role == "forward" and op.inputs and op.inputs[0] is not None:
            found.setdefault(op.type, set()).add(op.inputs[0].dtype)
    return found


@pytest.mark.parametrize("pure", [False, True])
def test_precision_lists_apply_to_the_parts(pure: bool, tmp_path: Path) -> None:
    whole, parts = precisions(block(), pure), precisions(optimised(block(), tmp_path), pure)
    assert parts["MatMul"] == whole["MatMul"] == {"float16"}
    assert all(parts[kind] == whole[kind] for kind in ("Softmax", "LayerNormalization")), (parts, whole)
    assert not set(parts) & {type_ for type_, *_ in ONE} - {"Gelu"}


def test_a_test_program_is_taken_apart_and_computes_the_same(tmp_path: Path) -> None:
    program = amp.Program.from_onnx(optimised(block(), tmp_path))
    feeds = {"x": X, "mask": np.zeros((2, 1, 1, 5), np.float32)}
    feeds["x"] = normal(2, 5, 12)
    want = run(program.to_onnx(), feeds, "DISABLE_ALL")[0]
    test = program.clone(for_test=True)
    with amp.program_guard(program, program.startup):
        y = program.var("y")
        loss = F.mean(y * y)
    optimizer = amp.decorate(amp.optimizer.SGD(0.1, multi_precision=True), use_pure_fp16=True, use_fp16_guard=False)
    optimizer.minimize(loss, program.startup)
    with amp.scope_guard(amp.Scope()):
        exe = amp.Executor(amp.CPUPlace())
        exe.run(program.startup)
        optimizer.amp_init(amp.CPUPlace(), test_program=test)
        (found,) = exe.run(test, feed=feeds, fetch_list=["y"])
    assert not [op for op in test.operators if op.domain]
    np.testing.assert_allclose(found, want, rtol=2e-2, atol=2e-2)


LLAMA = """<ir_version: 11, opset_import: ["" : 24]>
llama (float[3,6,16] x) => (float[3,6,16] y) {
    n1 = RMSNormalization <epsilon = 1e-5> (x, g1)
    q0 = MatMul (n1, wq)  k0 = MatMul (n1, wk)  v0 = MatMul (n1, wv)
    q = RotaryEmbedding <num_heads = 4> (q0, cos, sin, at)  k = RotaryEmbedding <num_heads = 2> (k0, cos, sin, at)
    a = Attention <is_causal = 1, q_num_heads = 4, kv_num_heads = 2> (q, k, v0, mask)
    o = MatMul (a, wo)  r = Add (x, o)  n2 = RMSNormalization <epsilon = 1e-5> (r, g2)
    u0 = MatMul (n2, wu)  u = Swish (u0)  w = MatMul (n2, ww)  uw = Mul (u, w)  d = MatMul (uw, wd)  y = Add (r, d)
}"""


def test_at_an_older_opset_too() -> None:
    """onnxruntime writes SimplifiedLayerNormalization and LayerNormalization into models of any opset."""
    text = """<ir_version: 8, opset_import: ["" : 13]>
    old (float[2,5,12] x, float[12] g) => (float[2,5,12] y) {
        h = SimplifiedLayerNormalization <epsilon = 0.001> (x, g)  y = LayerNormalization <epsilon = 0.01> (h, g, g)
    }"""
    model = onnx.parser.parse_model(text)
    feeds = {"x": X, "g": normal(12)}
    program = taken_apart(model)
    (want,), (found,) = run(model, feeds, "DISABLE_ALL"), run(program.to_onnx(), feeds, "DISABLE_ALL")
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)


def llama() -> onnx.ModelProto:
    values = np.random.default_rng(2)
    angles = np.outer(np.arange(8), [1.0, 0.1])
    mask = np.where(np.arange(6) < 5, 0, -np.inf).astype(np.float32).reshape(1, 1, 1, 6)
    arrays = {"cos": np.cos(angles), "sin": np.sin(angles), "mask": mask, "g1": np.ones(16), "g2": np.ones(16)}
    shapes = {
        "wq": (16, 16),
        "wk": (16, 8),
        "wv": (16, 8),
        "wo": (16, 16),
        "wu": (16, 32),
        "ww": (16, 32),
        "wd": (32, 16),
    }
    arrays |= {name: values.normal(size=shape) * 0.2 for name, shape in shapes.items()}
    model = onnx.parser.parse_model(LLAMA)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a.astype(np.float32), n) for n, a in arrays.items())
    at = np.array([[0, 1, 2, 3, 4, 5], [1, 3, 5, 7, 0, 2], [5, 4, 3, 2, 1, 0]])
    model.graph.initializer.append(onnx.numpy_helper.from_array(at, "at"))
    return model


@pytest.mark.parametrize("mode", ["fp32", "mixed", "pure"])
def test_operators_newer_than_the_training_opset_train(mode: str) -> None:
    """At inputs of 300 too, whose squares leave fp16: the statistics and the softmax stay fp32 inside."""
    program = amp.Program.from_onnx(llama())
    assert not {v.name for v in program.parameters} & {"cos", "sin", "mask"}
    startup = program.startup
    with amp.program_guard(program, startup):
        target = amp.data("target", [3, 6, 16])
        error = program.var("y") - target
        loss = F.mean(error * error)
    optimizer: Any = amp.optimizer.Adam(0.01, multi_precision=mode == "pure")
    if mode != "fp32":
        optimizer = amp.decorate(
            optimizer,
            use_pure_fp16=mode == "pure",
            init_loss_scaling=64.0,
            use_fp16_guard=False if mode == "pure" else None,
        )
    optimizer.minimize(loss, startup)
    assert not without_cuda_kernel(program.lower(amp.CUDAPlace(0)).model)
    values = np.random.default_rng(3)
    feed = {"x": values.normal(size=(3, 6, 16)).astype(np.float32)}
    feed["x"][0, 0] *= 300
    feed["target"] = feed["x"] + values.normal(size=(3, 6, 16)).astype(np.float32)
    with amp.scope_guard(amp.Scope()):
        exe = amp.Executor(amp.CPUPlace())
        exe.run(startup)
        if mode != "fp32":
            optimizer.amp_init(amp.CPUPlace())
        (normal_x,) = exe.run(program, feed=feed, fetch_list=["n1"])
        np.testing.assert_allclose(np.mean(np.float32(normal_x) ** 2, axis=-1), 1, rtol=1e-2)
        losses = [float(exe.run(program, feed=feed, fetch_list=[loss])[0]) for _ in range(20)]
    assert np.isfinite(losses).all() and losses[-1] < 0.8 * losses[0], losses


def test_an_export_of_bert_optimised(exports: Path, tmp_path: Path) -> None:
    model = onnx.load(exports / "bert_l2_leg.onnx")
    fused = optimised(model, tmp_path)
    kinds = {node.op_type for node in fused.graph.node if node.domain == MS}
    assert kinds == {"SkipLayerNormalization", "FusedMatMul", "Gelu"}
    saved = np.load(exports / "bert_l2_leg.npz")
    feeds = {i.name: saved[i.name] for i in model.graph.input}
    want = run(fused, feeds, "DISABLE_ALL")[0]
    found = run(taken_apart(fused).to_onnx(), feeds, "DISABLE_ALL")[0]
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=2e-5)
    names = [
        t.name
        for t in model.graph.initializer
        if t.data_type == 1 and len(t.dims) and t.name in {f.name for f in fused.graph.initializer}
    ]
    assert len(names) >= 16
    weights = normal(*want.shape)
    expected, gradient = (gradients(m, feeds, names, weights) for m in (model, fused))
    for name in names:
        error = np.linalg.norm(gradient[name] - expected[name]) / max(np.linalg.norm(expected[name]), 1e-6)
        assert error < 1e-4, (name, error)


def test_attention_behind_attention_knows_its_batch() -> None:
    """The lengths of a batch of any size mask both: BERT as onnxruntime's transformers optimizer writes it."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
    net (float[batch,places,8] x, int32[batch] lengths) => (float[batch,places,8] y) {
      a = com.microsoft.Attention <num_heads = 2> (x, w1, b, lengths)
      r = Add(a, x)
      y = com.microsoft.Attention <num_heads = 2> (r, w2, b, lengths)
    }""")
    arrays = {"w1": normal(8, 24), "w2": normal(8, 24), "b": normal(24)}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in arrays.items())
    feeds = {"x": normal(3, 5, 8), "lengths": np.array([5, 2, 4], np.int32)}
    found = gradients(model, feeds, [*arrays], normal(3, 5, 8))
    assert set(found) == set(arrays) and all(np.abs(g).max() > 0 for g in found.values())


@pytest.fixture
def scaled_tanh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decompose_module, "_ENTRIES", dict(decompose_module._ENTRIES))

    @decomposition("other::ScaledTanh")
    def _(d: Parts, op: Operator, x: Variable) -> list[Variable]:
        if d.whole("refused", 0):
            raise d.error("it is refused")
        return [d.ReduceSum(d.Mul(d.Tanh(x), d.number("scale", 1.0)), [1], keepdims=0)]


OTHER = """<ir_version: 8, opset_import: ["" : %d, "other" : 1]>
net (float[2,3] x) => (float[2] y) { h = Neg (x)  y = other.ScaledTanh <scale = 2.0%s> (h) }"""


@pytest.mark.usefixtures("scaled_tanh")
@pytest.mark.parametrize("opset", [11, 21, 22])
def test_what_only_decomposes_is_evaluated_and_saved(opset: int, tmp_path: Path) -> None:
    program = amp.Program.from_onnx(onnx.parser.parse_model(OTHER % (opset, "")))
    x = normal(2, 3)
    want = (2 * np.tanh(-x.astype(np.float64))).sum(1)
    with amp.scope_guard(amp.Scope()):
        exe = amp.Executor(amp.CPUPlace())
        np.testing.assert_allclose(exe.run(program, feed={"x": x}, fetch_list=["y"])[0], want, rtol=1e-5)
        amp.save_inference_model(tmp_path / "m.onnx", ["x"], ["y"], exe, program)
    np.testing.assert_allclose(run(onnx.load(tmp_path / "m.onnx"), {"x": x}, "DISABLE_ALL")[0], want, rtol=1e-5)
    assert [op.type for op in program.operators] == ["Neg", "ScaledTanh"] and program.opset() == opset


@pytest.mark.usefixtures("scaled_tanh")
def test_a_test_program_of_what_only_decomposes() -> None:
    main, startup = amp.Program(), amp.Program()
    with amp.program_guard(main, startup):
        hidden = amp.nn.fc(amp.data("x", [4, 6]), 6)
        made = main.add_variable("made", "float32", (4,))
        main.add_operator("ScaledTanh", [hidden], [made], domain="other")
        loss = amp.nn.functional.mean(made * made)
    test = main.clone(for_test=True)
    optimizer = amp.decorate(amp.optimizer.SGD(0.1))
    optimizer.minimize(loss, startup)
    with amp.scope_guard(amp.Scope()):
        exe = amp.Executor(amp.CPUPlace())
        exe.run(startup)
        optimizer.amp_init(amp.CPUPlace(), test_program=test)
        x = normal(4, 6)
        (evaluated,) = exe.run(test, feed={"x": x}, fetch_list=[loss.name])
        (trained,) = exe.run(main, feed={"x": x}, fetch_list=[loss])
    np.testing.assert_allclose(evaluated, trained, rtol=1e-2)


@pytest.mark.usefixtures("scaled_tanh")
def test_what_cannot_be_decomposed_is_named() -> None:
    program = amp.Program.from_onnx(onnx.parser.parse_model(OTHER % (21, ", refused = 1")))
    with pytest.raises(
        amp.AmpError, match=r"'ScaledTanh -> y' \(other::ScaledTanh\) cannot be decomposed: it is refused"
    ):
        program.lower(amp.CPUPlace())
