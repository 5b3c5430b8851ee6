"""``prepare_training``: what exporters did to the weights is undone, layers train, the rest is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import amp_transpiler as amp
from amp_transpiler.nn import functional as F


def floats(*shape: int, seed: int = 0) -> str:
    values = np.random.default_rng(seed).normal(size=shape).reshape(-1)
    return "{" + ", ".join(f"{v:.5f}" for v in values) + "}"


def load(text: str, opset: int = 17) -> amp.Program:
    return amp.Program.from_onnx(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]>\n{text}'))


def run(program: amp.Program, feed: dict[str, Any], *fetches: Any) -> list[np.ndarray]:
    scope, exe = amp.Scope(), amp.Executor(threads=1)
    exe.run(program.startup, scope=scope)
    return [np.asarray(v) for v in exe.run(program, feed=feed, fetch_list=list(fetches), scope=scope)]


#: Two linear layers as exporters write them: weights transposed and anonymous, equal biases one tensor, one of its
#: uses behind an Identity, and a head that is the embedding transposed.
LINEAR = f"""
net (int64[2] ids) => (float[2,5] y)
  <float[5,4] emb = {floats(5, 4, seed=1)}, float[4,4] val_7 = {floats(4, 4, seed=2)},
   float[4,4] onnx_MatMul_9 = {floats(4, 4, seed=3)}, float[4] a_bias = {{0.0, 0.0, 0.0, 0.0}},
   float[4,5] val_12 = {{TIED}}>
{{
  e = Gather(emb, ids)
  [n1] h = MatMul(e, val_7)
  b = Identity(a_bias)
  [n2] h1 = Add(h, b)
  [n3] g = MatMul(h1, onnx_MatMul_9)
  [n4] g1 = Add(g, a_bias)
  [n5] y = MatMul(g1, val_12)
}}"""


def linear() -> amp.Program:
    table = np.array([float(v) for v in floats(5, 4, seed=1)[1:-1].split(",")]).reshape(5, 4)
    tied = "{" + ", ".join(f"{v:.5f}" for v in table.T.reshape(-1)) + "}"
    model = onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 17]>' + LINEAR.replace("{TIED}", tied))
    for tensor in model.graph.initializer:
        tensor.name = tensor.name.replace("onnx_MatMul", "onnx::MatMul")
    scopes = {
        "n1": "/enc/query/MatMul",
        "n2": "/enc/query/Add",
        "n3": "/enc/out/MatMul",
        "n4": "/enc/out/Add",
        "n5": "/head/MatMul",
    }
    for node in model.graph.node:
        node.name = scopes.get(node.name, node.name)
        node.input[:] = [name.replace("onnx_MatMul", "onnx::MatMul") for name in node.input]
    return amp.Program.from_onnx(model)


def test_weights_are_what_they_were_before_the_export() -> None:
    program, feed = linear(), {"ids": np.array([3, 1])}
    before = run(program, feed, "y")[0]
    told = amp.prepare_training(program)
    shapes = {v.name: v.shape for v in program.parameters}
    assert shapes == {
        "emb": (5, 4),
        "enc.query.weight": (4, 4),
        "enc.out.weight": (4, 4),
        "a_bias": (4,),
        "enc.out.bias": (4,),
    } or shapes == {
        "emb": (5, 4),
        "enc.query.weight": (4, 4),
        "enc.out.weight": (4, 4),
        "a_bias": (4,),
        "enc.query.bias": (4,),
    }
    assert "'val_12' is 'emb' transposed: tied again" in told.notes
    assert any("got 1 copies" in note for note in told.notes)
    program.verify()
    np.testing.assert_allclose(run(program, feed, "y")[0], before, rtol=1e-6)
    query = run(program, feed, "enc.query.weight")[0]
    np.testing.assert_allclose(query.T.reshape(-1), [float(v) for v in floats(4, 4, seed=2)[1:-1].split(",")])


def test_names_and_ties_can_be_left_alone() -> None:
    program = linear()
    amp.prepare_training(program, restore=False, keep_tied=["a_bias"])
    assert {v.name for v in program.parameters} == {"emb", "val_7", "onnx::MatMul_9", "a_bias"}


def test_a_tied_vector_that_was_trained_stays_tied() -> None:
    program = load(f"""net (float[2,4] x) => (float[2,4] y) <float[4] b = {floats(4)}>
                   {{ h = Add(x, b)  y = Add(h, b) }}""")
    assert amp.prepare_training(program).trainable == ("b",)


def test_what_a_branch_gives_as_it_is_stays_there(tmp_path: Path) -> None:
    """As a parameter it would be given past the branch, which onnxruntime refuses in what is saved."""
    program = load(
        f"""net (float[2,4] x, bool c) => (float[2,4] y) <float[4,4] w = {floats(4, 4)}, int64[1] ax = {{0}}>
        {{ a = MatMul(x, w)
           b = If (c) <then_branch = t () => (float[1,4] k) <float[1,4] k = {{0.1, 0.2, 0.3, 0.4}}> {{ }},
                      else_branch = e () => (float[1,4] o) {{ o = ReduceMax <keepdims = 1> (a, ax) }}>
           y = Add(a, b) }}""",
        18,
    )
    assert amp.prepare_training(program).trainable == ("w",)
    scope, executor = amp.Scope(), amp.Executor(threads=1)
    executor.run(program.startup, scope=scope)
    amp.save_inference_model(tmp_path / "out.onnx", ["x", "c"], list(program.outputs), executor, program, scope=scope)
    feeds = {"x": np.ones((2, 4), np.float32), "c": np.array(True)}
    (found,) = ort.InferenceSession(tmp_path / "out.onnx").run(None, feeds)
    np.testing.assert_allclose(found, executor.run(program, feeds, ["y"], scope)[0], rtol=1e-6)


def test_patterns_choose_by_name_and_by_reader() -> None:
    program = linear()
    told = amp.prepare_training(program, trainable=["enc/*", "emb"], freeze=["re:.*bias"])
    assert set(told.trainable) == {"emb", "enc.query.weight", "enc.out.weight"}
    assert set(told.frozen) >= {"a_bias"}
    with amp.program_guard(program, program.startup), amp.unique_name.guard():
        loss = F.mean(program.outputs[0] * program.outputs[0])
        amp.optimizer.SGD(0.1).minimize(loss)
    scope, exe = amp.Scope(), amp.Executor(threads=1)
    exe.run(program.startup, scope=scope)
    before = {name: np.array(scope.find_var(name)) for name in told.trainable + told.frozen}
    exe.run(program, feed={"ids": np.array([3, 1])}, fetch_list=[loss], scope=scope)
    for name, value in before.items():
        assert (np.array_equal(scope.find_var(name), value)) == (name in told.frozen), name


def test_weights_in_constants_and_nested_graphs_become_parameters() -> None:
    values = ", ".join(["0.5", "-1.0", "2.0", "1.0"])
    program = load(f"""
      net (float[2,2] x, bool on) => (float[2,2] y)
      {{
        w = Constant <value = float[2,2] {{{values}}}> ()
        h = MatMul(x, w)
        y = If (on) <
          then_branch = yes () => (float[2,2] t) <float[2,2] inner = {floats(2, 2)}> {{ t = MatMul(h, inner) }},
          else_branch = no () => (float[2,2] e) {{ e = Relu(h) }}>
      }}""")
    assert not program.parameters
    feed = {"x": np.ones((2, 2), np.float32), "on": np.array(True)}
    before = run(program, feed, "y")[0]
    told = amp.prepare_training(program)
    assert set(told.trainable) == {"w", "inner"}
    program.verify()
    np.testing.assert_array_equal(run(program, feed, "y")[0], before)


#: Two layer norms as exports before opset 17 hold them: with Pow and bias last, and with Mul and operands swapped.
NORMS = f"""
net (float[4,6] x) => (float[4,6] y)
  <float[6] g = {floats(6, seed=4)}, float[6] b = {floats(6, seed=5)}, float[6,6] w = {floats(6, 6, seed=6)},
   float[6] g2 = {floats(6, seed=7)}, float[6] b2 = {floats(6, seed=8)}, float two = {{2.0}}, float eps = {{1e-12}}>
{{
  m = ReduceMean <axes = [-1]> (x)
  d = Sub(x, m)
  s = Pow(d, two)
  v = ReduceMean <axes = [-1]> (s)
  ve = Add(v, eps)
  r = Sqrt(ve)
  n = Div(d, r)
  ns = Mul(n, g)
  o = Add(ns, b)
  h = MatMul(o, w)
  m2 = ReduceMean <axes = [1]> (h)
  d2 = Sub(h, m2)
  d3 = Sub(h, m2)
  s2 = Mul(d3, d3)
  v2 = ReduceMean <axes = [1]> (s2)
  ve2 = Add(eps, v2)
  r2 = Sqrt(ve2)
  n2 = Div(d2, r2)
  ns2 = Mul(g2, n2)
  y = Add(b2, ns2)
}}"""


@pytest.mark.parametrize("mode", ["fp32", "pure"])
def test_layer_norms_that_were_written_out_are_whole_again(mode: str) -> None:
    x = np.random.default_rng(0).normal(0, 400, (4, 6)).astype(np.float32)  # squares leave fp16
    expected = run(load(NORMS, 13), {"x": x}, "y")[0]
    program = load(NORMS, 13)
    told = amp.prepare_training(program)
    program.verify()
    assert "2 layer norms that were written out are one operator each" in told.notes
    assert [op.type for op in program.operators] == ["LayerNormalization", "MatMul", "LayerNormalization"]
    np.testing.assert_allclose(run(program, {"x": x}, "y")[0], expected, rtol=1e-5, atol=1e-5)
    if mode == "fp32":
        return
    with amp.program_guard(program, program.startup), amp.unique_name.guard():
        loss = F.mean(program.outputs[0] * program.outputs[0])
        optimizer = amp.decorate(
            amp.optimizer.SGD(0.01, multi_precision=True),
            init_loss_scaling=8.0,
            use_pure_fp16=True,
            use_fp16_guard=False,
        )
        optimizer.minimize(loss)
    scope, exe = amp.Scope(), amp.Executor(threads=1)
    exe.run(program.startup, scope=scope)
    optimizer.amp_init(amp.CPUPlace(), scope=scope)
    found, y = exe.run(program, feed={"x": x}, fetch_list=[optimizer.get_found_inf(), "y"], scope=scope)
    assert not found[0]
    np.testing.assert_allclose(y, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    "change, count",
    [
        (("ReduceMean <axes = [-1]> (s)", "ReduceMean <axes = [0]> (s)"), 1),
        (("Pow(d, two)", "Pow(d, eps)"), 1),
        (("n = Div(d, r)", "n = Div(x, r)"), 1),
        (("(float[4,6] y)", "(float[4,6] y, float[4,6] n)"), 2),
    ],
)
def test_what_is_no_layer_norm_stays_as_it_is(change: tuple[str, str], count: int) -> None:
    x = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    text = NORMS.replace(*change, 1)
    assert text != NORMS
    expected = run(load(text, 13), {"x": x}, "y")[0]
    program = load(text, 13)
    told = amp.prepare_training(program)
    assert f"{count} layer norms that were written out are one operator each" in told.notes
    program.verify()
    np.testing.assert_allclose(run(program, {"x": x}, "y")[0], expected, rtol=1e-5, atol=1e-5)


def test_the_scaling_of_an_image_is_not_trained() -> None:
    program = load(f"""
      net (float[1,3,4,4] x) => (float[1,3,4,4] y)
        <float[1,3,1,1] mean = {{0.4, 0.5, 0.6}}, float[3,1,1] std = {{0.2, 0.2, 0.3}}, float[3,3,1,1] w = {floats(3, 3, 1, 1)},
         float[3,1,1] bias = {{0.1, 0.2, 0.3}}>
      {{ a = Sub(x, mean)  b = Div(a, std)  c = Conv(b, w)  y = Add(c, bias) }}""")
    told = amp.prepare_training(program)
    assert told.trainable == ("w", "bias") and "'mean', 'std': scaling of the input, not trained" in told.notes
    program.verify()


def test_batch_norm_and_dropout_train() -> None:
    text = f"""
      net (float[8,2,3,3] x) => (float[8,2,3,3] y)
        <float[2] scale = {{1.0, 2.0}}, float[2] bias = {{0.0, 1.0}}, float[2] mean = {{0.0, 0.0}},
         float[2] var = {{1.0, 1.0}}, float[2,2,1,1] w = {floats(2, 2, 1, 1)}>
      {{ [conv] c = Conv(x, w)  [bn] n = BatchNormalization(c, scale, bias, mean, var)  y = Dropout(n) }}"""
    x = np.random.default_rng(0).normal(3, 2, (8, 2, 3, 3)).astype(np.float32)
    program = load(text)
    told = amp.prepare_training(program, dropout={"conv": 0.25})
    assert "1 BatchNormalization train with the statistics of the batch" in told.notes
    assert "1 Dropout are switched on" in told.notes and "1 Dropout of 0.25 behind 'conv'" in told.notes
    with amp.program_guard(program, program.startup), amp.unique_name.guard():
        loss = F.mean(program.outputs[0])
        amp.optimizer.SGD(0.0).minimize(loss)
    scope, exe = amp.Scope(), amp.Executor(threads=1)
    exe.run(program.startup, scope=scope)
    first, normal = exe.run(program, feed={"x": x}, fetch_list=["y", "n"], scope=scope)
    second = exe.run(program, feed={"x": x}, fetch_list=["y"], scope=scope)[0]
    assert abs(normal.mean((0, 2, 3)) - [0, 1]).max() < 1e-5, "normalised by the batch"
    assert 0.3 < (first == 0).mean() < 0.7 and not np.array_equal(first == 0, second == 0)
    assert abs(scope.find_var("mean")).min() > 0, "running statistics move"
    whole = exe.run(program.clone(for_test=True), feed={"x": x}, fetch_list=["y"], scope=scope)[0]
    assert (whole != 0).all()

    frozen = load(text)
    amp.prepare_training(frozen, batch_norm="frozen")
    assert not frozen.updates.get(frozen.var("mean"))


def test_batch_norms_that_were_exported_in_training_mode() -> None:
    """As torch.onnx writes them then: with outputs for the new statistics, which nothing reads."""
    text = """
      net (float[8,2] x) => (float[8,2] y)
        <float[2] scale = {1, 2}, float[2] bias = {0, 1}, float[2] mean = {0, 0}, float[2] var = {1, 1}>
      { y, m, v = BatchNormalization <training_mode = 1, momentum = 0.75> (x, scale, bias, mean, var) }"""
    x = np.random.default_rng(0).normal(3, 2, (8, 2)).astype(np.float32)
    for how, mean in (("train", x.mean(0) / 4), ("frozen", np.zeros(2))):
        program = load(text)
        told = amp.prepare_training(program, batch_norm=how)
        assert any("BatchNormalization" in note for note in told.notes)
        with amp.program_guard(program, program.startup), amp.unique_name.guard():
            amp.optimizer.SGD(0.0).minimize(F.mean(program.outputs[0]))
        scope, exe = amp.Scope(), amp.Executor(threads=1)
        exe.run(program.startup, scope=scope)
        y = exe.run(program, feed={"x": x}, fetch_list=["y"], scope=scope)[0]
        np.testing.assert_allclose(scope.find_var("mean"), mean, rtol=1e-5)
        normal = (x - x.mean(0)) / x.std(0) if how == "train" else x
        np.testing.assert_allclose(y, normal * [1, 2] + [0, 1], rtol=1e-3, atol=1e-4)
        program.verify()


def test_merged_statistics_of_two_layers_are_two_states() -> None:
    program = load("""
      net (float[4,2] x) => (float[4,2] y)
        <float[2] one = {1.0, 1.0}, float[2] zero = {0.0, 0.0}>
      { a = BatchNormalization(x, one, zero, zero, one)  y = BatchNormalization(a, one, zero, zero, one) }""")
    amp.prepare_training(program)
    states = [
        [op.inputs[slot].name for slot in (1, 2, 3, 4)] for op in program.operators if op.type == "BatchNormalization"
    ]  # type: ignore[union-attr]
    assert len({name for row in states for name in row}) == 8
    assert len(program.updates) == 4


def test_a_merged_vector_stays_with_the_layer_that_it_is_named_after() -> None:
    program = load("""
      net (float[4,2] x) => (float[4,2] y) <float[2] g = {0.1, 0.1}>
      { n = LayerNormalization(x, g)  s = Mul(g, n)  y = LayerNormalization(s, g) }""")
    program.rename_variable(program.var("g"), "block.gamma")
    for op, scope in zip(program.operators, ["block/norm1", "block", "block/norm2"], strict=True):
        op.scope = scope
    amp.prepare_training(program)
    read = [[v.name for v in op.inputs if v is not None and v.persistable] for op in program.operators]
    assert read == [["block.norm1.weight"], ["block.gamma"], ["block.norm2.weight"]]


def test_root_mean_squares_are_computed_in_fp32_in_pure_16_bit() -> None:
    """As one operator where it is a norm; else they stay in fp32 as they are written."""
    for scaled in (True, False):
        last = "n = Mul(x, i)  y = Mul(n, g)" if scaled else "t = Neg(x)  n = Mul(t, i)  y = Mul(n, g)"
        program = load(f"""
          net (float[4,6] x) => (float[4,6] y) <float[6] g = {floats(6)}, float two = {{2.0}}, float eps = {{1e-6}}, float one = {{1.0}}>
          {{ s = Pow(x, two)  v = ReduceMean <axes = [-1]> (s)  ve = Add(v, eps)  r = Sqrt(ve)  i = Div(one, r)
             {last} }}""")
        x = np.random.default_rng(0).normal(0, 400, (4, 6)).astype(np.float32)
        expected = run(program, {"x": x}, "y")[0]
        (note,) = amp.prepare_training(program).notes
        amp.cast_model_to_fp16(program, use_fp16_guard=False)
        found = {op.outputs[0].name: op.precision for op in program.operators if op.type != "Cast"}
        wide = {name for name, precision in found.items() if precision == "float32"}
        if scaled:
            assert note == "1 RMS norms that were written out are one operator each" and not wide
        else:
            assert note == "1 RMS norms that are written out keep their statistics in fp32"
            assert wide >= {"s", "v", "ve", "r", "i"}
        assert found["y.fp16"] == "float16"
        scope, exe = amp.Scope(), amp.Executor(threads=1)
        exe.run(program.startup, scope=scope)
        amp.cast_parameters_to_fp16(amp.CPUPlace(), program, scope)
        (y,) = exe.run(program, feed={"x": x}, fetch_list=["y"], scope=scope)
        np.testing.assert_allclose(y, expected, rtol=5e-3, atol=1e-3)


def test_a_second_preparation_changes_nothing() -> None:
    program = linear()
    amp.prepare_training(program)
    once = program.to_onnx().SerializeToString()
    assert not amp.prepare_training(program).notes
    assert program.to_onnx().SerializeToString() == once


@pytest.mark.parametrize(
    "options, told",
    [
        ({"trainable": ["decoder*"]}, "trainable: pattern 'decoder\\*' matches no parameter of program 'net'"),
        ({"freeze": "emb"}, "freeze takes strings"),
        ({"freeze": ["*"], "trainable": ["*"]}, "no parameter of program 'net' is left to train"),
        ({"batch_norm": "eval"}, "batch_norm is 'eval'; expected one of train, synchronized, frozen"),
        ({"dropout": {"nowhere": 0.1}}, "dropout: pattern 'nowhere' matches no operator"),
        ({"dropout": {"enc/*": 1.0}}, "rate of 'enc/\\*' is 1.0"),
        ({"dropout": [0.1]}, "expected {pattern: rate}"),
        ({"values": {"n": 3}}, "has no input 'n'; its inputs are ids"),
        ({"values": {"ids": 3}}, "does not fit input 'ids'"),
        ({"feed_shapes": {"ids": (3,)}}, "does not fit input 'ids' of shape \\[2\\]"),
    ],
)
def test_what_it_refuses_leaves_the_program_alone(options: dict[str, Any], told: str) -> None:
    program = linear()
    before = program.to_onnx().SerializeToString()
    with pytest.raises(amp.AmpError, match=told):
        amp.prepare_training(program, **options)
    assert program.to_onnx().SerializeToString() == before


@pytest.mark.parametrize("type_", ["LinearRegressor", "SVMRegressor", "TreeEnsembleRegressor"])
def test_weights_in_attributes_are_named(type_: str) -> None:
    text = f"net (float[n, 2] x) => (float[n, 1] y) {{ y = ai.onnx.ml.{type_} <coefficients = [1.0, 2.0]> (x) }}"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21, "ai.onnx.ml" : 3]> {text}')
    with pytest.raises(amp.AmpError, match=f"is left to train.*The weights of {type_} are attributes"):
        amp.prepare_training(amp.Program.from_onnx(model))


def test_not_after_minimize() -> None:
    program = linear()
    with amp.program_guard(program, program.startup), amp.unique_name.guard():
        amp.optimizer.SGD(0.1).minimize(F.mean(program.outputs[0]))
    with pytest.raises(amp.AmpError, match="has a backward pass already"):
        amp.prepare_training(program)
