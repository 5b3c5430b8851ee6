"""Layers that were copied when the model was made are equal until they are trained, and are trained apart."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

import amp_transpiler as amp

BARE = "h = MatMul (x, w) r = Tanh (h) y = MatMul (r, w)"
MATRIX = np.random.default_rng(0).normal(size=(3, 3)).astype(np.float32)


def model(
    weights: tuple[str, str],
    scopes: tuple[str, str] = ("/layers.0/fc", "/layers.1/fc"),
    matrix: np.ndarray = MATRIX,
    bias: bool = False,
) -> onnx.ModelProto:
    """Two products by equal matrices of these names, in modules of these names, which may add the same zeros."""
    layers = "h0 = MatMul (x, w) h = Add (h0, b) r = Tanh (h) y0 = MatMul (r, w) y = Add (y0, b)" if bias else BARE
    made = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> net (float[2,3] x) => (float[2,3] y) {{ {layers} }}'
    )
    for name in dict.fromkeys(weights):
        made.graph.initializer.append(onnx.numpy_helper.from_array(matrix, name))
    if bias:
        made.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(3, np.float32), "b"))
    for kind in ("MatMul", "Add"):
        nodes = [node for node in made.graph.node if node.op_type == kind]
        for number, node, weight, scope in zip(("", "_1"), nodes, weights, scopes, strict=False):
            node.name = f"{scope}/{kind}{number}"
            node.input[1] = weight if kind == "MatMul" else "b"
    return made


@pytest.mark.parametrize("weights", [("layers.0.fc.weight", "layers.1.fc.weight"), ("val_3", "val_95")])
def test_equal_layers_keep_their_own_matrices(weights: tuple[str, str]) -> None:
    """PyTorch's nn.TransformerEncoder copies one layer; exporters name its matrices, or make names up."""
    report = amp.prepare_training(amp.Program.from_onnx(model(weights)))
    assert report.trainable == ("layers.0.fc.weight", "layers.1.fc.weight")
    assert not any("tied" in note or "as one" in note for note in report.notes)


@pytest.mark.parametrize("second", ["/layer.0/fc", "/layer.0/fc_1"])
def test_what_one_module_reads_twice_stays_one(second: str) -> None:
    """A layer that runs twice, as in ALBERT, of whose matrix the exporter wrote a copy for each time. TorchScript's
    counts the times behind the module's name."""
    report = amp.prepare_training(amp.Program.from_onnx(model(("val_3", "val_95"), ("/layer.0/fc", second))))
    assert len(report.trainable) == 1 and any("tied again" in note for note in report.notes)


def test_one_matrix_of_several_layers_is_told() -> None:
    """The exporter has merged what was equal: nobody can tell whether that was meant, but for what it says itself."""
    program = amp.Program.from_onnx(model(("layers.0.fc.weight", "layers.0.fc.weight")))
    report = amp.prepare_training(program)
    assert report.trainable == ("layers.0.fc.weight",)
    assert any(note.startswith("read by several layers") for note in report.notes)


@pytest.mark.parametrize("scopes", [("/layers.0/q/up", "/layers.1/q/up"), ("/q/up", "/v/up")])
def test_matrices_that_begin_with_zeros_are_trained_apart(scopes: tuple[str, str]) -> None:
    """As those of LoRA, which exporters merge; they are named and turned back as any other."""
    program = amp.Program.from_onnx(model(("onnx::MatMul_9",) * 2, scopes, np.zeros((3, 3), np.float32)))
    report = amp.prepare_training(program)
    assert report.trainable == tuple(f"{scope[1:].replace('/', '.')}.weight" for scope in scopes)
    assert any("got 1 copies, one for each layer" in note for note in report.notes)
    assert all(program.var(name).readers[0][0].type == "Transpose" for name in report.trainable)


@pytest.mark.parametrize("second", ["/l/fc", "/l/fc_1"])
@pytest.mark.parametrize("matrix", [MATRIX, np.zeros((3, 3), np.float32)])
def test_what_is_untrained_stays_one_where_a_layer_runs_twice(matrix: np.ndarray, second: str) -> None:
    """Its matrix is turned back for both."""
    made, x = model(("val_3",) * 2, ("/l/fc", second), matrix, bias=True), np.ones((2, 3), np.float32)
    (before,) = ReferenceEvaluator(made).run(None, {"x": x})
    program = amp.Program.from_onnx(made)
    report = amp.prepare_training(program)
    assert set(report.trainable) == {"l.fc.weight", "b"} and not any("as one" in note for note in report.notes)
    scope = amp.Scope()
    amp.Executor().run(program.startup, scope=scope)
    np.testing.assert_array_equal(scope.find_var("l.fc.weight"), matrix.T)
    np.testing.assert_allclose(amp.Executor().run(program, {"x": x}, [program.outputs[0]], scope)[0], before, rtol=1e-5)


def test_one_matrix_of_layers_of_other_names_is_told() -> None:
    program = amp.Program.from_onnx(model(("online.fc.weight",) * 2, ("/online/fc", "/target/fc")))
    assert any(note.startswith("read by several layers") for note in amp.prepare_training(program).notes)


def test_a_bias_that_an_exporter_computed_anew_is_tied_again() -> None:
    """From a state of zeros and the bias: a cell's first step."""
    made = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        net (float[3,4] x) => (float[3,4] y) { a = Add (x, linear) h = Tanh (a) y = Add (h, b) }""")
    bias = np.random.default_rng(1).normal(size=4).astype(np.float32)
    for name, array in (("linear", np.tile(bias, (3, 1))), ("b", bias)):
        made.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    report = amp.prepare_training(amp.Program.from_onnx(made))
    assert report.trainable == ("b",) and "'linear' is 'b': tied again" in report.notes


def copies(shared: bool) -> onnx.ModelProto:
    """A policy and its reference, two matrices each; or an encoder and a decoder of which the first one is one table."""
    names = ("encoder", "decoder") if shared else ("policy", "ref")
    made = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> net (float[2,3] x) => (float[2,3] y) {
            a = MatMul (x, a1)  b = MatMul (a, a2)  c = MatMul (x, b1)  d = MatMul (c, b2)  y = Sub (b, d) }"""
    )
    for node, name in zip(
        made.graph.node, [f"{one}.{two}.weight" for one in names for two in ("e", "h")], strict=False
    ):
        node.input[1] = name
        content = MATRIX if name.endswith("e.weight") else MATRIX @ MATRIX
        content = content + 1 if name == "encoder.h.weight" else content
        made.graph.initializer.append(onnx.numpy_helper.from_array(content, name))
    return made


@pytest.mark.parametrize("chosen", [{"freeze": ["ref.*"]}, {"trainable": ["policy.*"]}])
def test_a_frozen_copy_of_what_is_trained_stays_as_it_is(chosen: dict[str, list[str]]) -> None:
    """The reference of a policy: tied again, it moved with the policy."""
    report = amp.prepare_training(amp.Program.from_onnx(copies(shared=False)), **chosen)  # type: ignore[arg-type]
    assert report.trainable == ("policy.e.weight", "policy.h.weight")
    assert report.frozen == ("ref.e.weight", "ref.h.weight")
    assert any(
        note.startswith("'ref.e.weight' is equal to 'policy.e.weight', and stays apart") for note in report.notes
    )


def test_one_table_of_two_modules_is_frozen_with_either() -> None:
    report = amp.prepare_training(amp.Program.from_onnx(copies(shared=True)), freeze=["encoder.*"])
    assert "decoder.e.weight" not in report.trainable and "decoder.h.weight" in report.trainable
    assert any("tied again" in note for note in report.notes)


def said(made: onnx.ModelProto, names: tuple[str, ...]) -> onnx.ModelProto:
    """The same with what PyTorch's dynamo exporter says: what its operations called the weights that they read."""
    for node, name in zip([node for node in made.graph.node if node.op_type == "MatMul"], names, strict=True):
        called = f"call_function[target=torch.ops.aten.mm.default](args = (%x, %p_{name}), kwargs = {{}})"
        node.metadata_props.add(key="pkg.torch.onnx.fx_node", value=f"%mm : [num_users=1] = {called}")
    return made


@pytest.mark.parametrize(
    "weight, names",
    [
        ("layers.0.fc.w", ("layers.0.fc.w", "layers.1.fc.w")),
        ("val_3", ("layers.0.fc.weight", "layers.1.fc.weight")),
        ("online.fc.w", ("online.fc.w", "target.fc.weight")),
    ],
)
def test_layers_of_which_the_exporter_says_that_they_were_two_are_trained_apart(
    weight: str, names: tuple[str, str]
) -> None:
    """Although it merged their matrices, which were equal; the copy has its name in PyTorch."""
    flat = [name.replace(".", "_") for name in names]
    scopes = [f"/{name.rpartition('.')[0].replace('.fc', '/fc')}" for name in names]
    made = said(model((weight,) * 2, tuple(scopes)), tuple(flat))  # type: ignore[arg-type]
    report = amp.prepare_training(amp.Program.from_onnx(made))
    assert report.trainable == names and not any("as one" in note for note in report.notes)
    kept = amp.prepare_training(amp.Program.from_onnx(made), keep_tied=[weight])
    assert len(kept.trainable) == 1


@pytest.mark.parametrize("names", [("layers_1_fc_w",) * 2, ("layers_0_fc_w", "")])
def test_layers_that_the_exporter_does_not_tell_apart_stay_one(names: tuple[str, str]) -> None:
    """PyTorch has one name for what several modules share."""
    made = said(model(("layers.0.fc.w",) * 2), names)
    report = amp.prepare_training(amp.Program.from_onnx(made))
    assert report.trainable == ("layers.0.fc.w",)


@pytest.mark.parametrize("last, apart", [("ref_h_weight", True), ("policy_h_weight", False)])
def test_equal_matrices_that_the_exporter_tells_apart_are_not_tied(last: str, apart: bool) -> None:
    made = said(copies(shared=False), ("policy_e_weight", "policy_h_weight", "ref_e_weight", last))
    report = amp.prepare_training(amp.Program.from_onnx(made))
    assert report.trainable == ("policy.e.weight", "policy.h.weight", "ref.e.weight") + ("ref.h.weight",) * apart


@pytest.mark.parametrize("names", [("scale", "bias"), ("norm.running_var", "norm.running_mean")])
@pytest.mark.parametrize("how", ["frozen", "train"])
def test_statistics_that_were_equal_to_a_weight_are_not_trained(how: str, names: tuple[str, str]) -> None:
    """Those of a batch norm as it was made: ones are its scale and variance, zeros its bias and mean."""
    one, zero = names
    made = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]> net (float[4,2] x) => (float[4,2] y)
        <float[2] one = {1, 1}, float[2] zero = {0, 0}> { y = BatchNormalization(x, one, zero, zero, one) }""")
    made.graph.node[0].input[1:] = [one, zero, zero, one]
    for held, name in zip(made.graph.initializer, names, strict=True):
        held.name = name
    program = amp.Program.from_onnx(made)
    report = amp.prepare_training(program, batch_norm=how)
    (norm,) = program.operators
    assert [v is not None and v.trainable for v in norm.inputs[1:]] == [True, True, False, False]
    assert len(report.trainable) == 2
