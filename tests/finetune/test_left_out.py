"""What training leaves as it is, by name or look, and says so."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.ir.weights import not_a_weight

TORCH, FOLDED = "pkg.torch.export.graph_signature", "pkg.onnxscript.optimizer.folded_from"


def program(text: str, **contents: np.ndarray) -> amp.Program:
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18]> {text}')
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in contents.items())
    return amp.Program.from_onnx(model)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("lifted_tensor_0", "what the model's code makes"),
        ("parametrizations.weight.0._u", "what the model's code makes"),
        ("net.0.parametrizations.weight.0._v", "what the model's code makes"),
        ("levels", ""),
        ("net.0.parametrizations.weight.original", ""),
    ],
)
def test_names_that_say_that_nothing_is_learned(name: str, reason: str) -> None:
    made = program("net (float[2,3] x) => (float[2,3] y) { y = Mul (x, c) }", c=np.array([0.1, 0.5, 0.9], np.float32))
    variable = made.var("c")
    variable.name = name
    assert not_a_weight(variable) == reason


def test_vectors_that_begin_as_counted_numbers_and_draws_are_told() -> None:
    text = """net (float[2,8] x) => (float[2,1] y) {
        r = RandomNormalLike (x)  d = Sub (x, centers)  e = Add (d, r)  f = Exp (e)  y = MatMul (f, w) }"""
    made = program(text, centers=np.linspace(-1, 1, 8, dtype=np.float32), w=np.ones((8, 1), np.float32) / 3)
    report = amp.prepare_training(made)
    assert report.trainable == ("w",)
    assert any(note.startswith("'centers': counted numbers") for note in report.notes)
    assert "1 operators (RandomNormalLike) draw by the program's seed" in report.notes
    named = program(text, centers=np.linspace(-1, 1, 8, dtype=np.float32), w=np.ones((8, 1), np.float32) / 3)
    assert set(amp.prepare_training(named, trainable=["w", "centers"]).trainable) == {"w", "centers"}


@pytest.mark.filterwarnings("error")
def test_numbers_of_which_some_are_infinite_do_not_count() -> None:
    table = np.array([[0, 1, 2, 3], [0, 1, 2, np.inf], [0, np.inf, np.inf, 3]], np.float32)
    made = program("net (float[3,4] x) => (float[3,4] y) { y = Add (x, table) }", table=table)
    assert not_a_weight(made.var("table")) == ""


def test_what_the_exporter_calls_a_buffer_is_no_weight_and_what_it_calls_a_parameter_may_be_one_number() -> None:
    """As PyTorch's exporter writes them: kinds at tensors, and by name in the graph's signature, for what it folded."""
    text = """<ir_version: 10, opset_import: ["" : 20]> net (float[4,5] x, int64[4] t) => (float[4,5] y)
        <float[5,5] w, float[5] scale, float[10,1] val_0, float[5,5] val_1, float gain, float k> {
        a = MatMul(x, w)  b = Mul(a, scale)  c = Gather(val_0, t)  d = Mul(b, c)  e = MatMul(d, val_1)  f = Mul(e, gain)
        y = Div(f, k) }"""
    model = onnx.parser.parse_model(text)
    said = {
        "scale": {f"{TORCH}.InputSpec.kind": "BUFFER"},
        "val_0": {FOLDED: "['alphas', 'sqrt']"},
        "val_1": {FOLDED: "['lora.w', 'scale']"},
        "gain": {f"{TORCH}.InputSpec.kind": "PARAMETER"},
        "k": {f"{TORCH}.InputSpec.kind": "BUFFER"},
    }
    rng = np.random.default_rng(0)
    for name, shape in {"w": (5, 5), "scale": 5, "val_0": (10, 1), "val_1": (5, 5), "gain": (), "k": ()}.items():
        array = np.asarray(rng.random(shape), np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
        info = onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, array.shape)
        for key, value in said.get(name, {}).items():
            info.metadata_props.add(key=key, value=value)
        model.graph.value_info.append(info)
    kinds = "b_a: BUFFER target='alphas' persistent=True\nb_s: BUFFER target='scale'\np_w: PARAMETER target='lora.w'\n"
    model.graph.metadata_props.add(key="pkg.torch.export.ExportedProgram.graph_signature", value=f"\n# inputs\n{kinds}")
    report = amp.prepare_training(amp.Program.from_onnx(model))
    assert report.trainable == ("w", "val_1", "gain")
    assert any(note.startswith("'scale', 'val_0': buffers of the exported model, not trained") for note in report.notes)
    named = amp.prepare_training(amp.Program.from_onnx(model), trainable=["scale", "gain"])
    assert set(named.trainable) == {"scale", "gain"}


def exported(text: str, signature: str, folded: dict[str, str], **contents: np.ndarray) -> amp.Program:
    """A program as PyTorch's exporter writes it: what was folded from what, and the kinds of what there was."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> {text}')
    for name, array in contents.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
        info = onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, array.shape)
        if name in folded:
            info.metadata_props.add(key=FOLDED, value=folded[name])
        model.graph.value_info.append(info)
    model.graph.metadata_props.add(key="pkg.torch.export.ExportedProgram.graph_signature", value=signature)
    return amp.Program.from_onnx(model)


def test_tensors_that_the_code_makes_are_not_trained_though_they_were_copied() -> None:
    signature = "c_lifted_tensor_0: CONSTANT_TENSOR target='lifted_tensor_0'\np_w: PARAMETER target='w'\nb_s: BUFFER target='s'\n"
    made = exported(
        "net (float[N,2] x) => (float[N,2] y) { a = Div (x, clone_1)  b = Mul (a, mul_1)  y = MatMul (b, w) }",
        signature,
        {"clone_1": "['lifted_tensor_0']", "mul_1": "['lifted_tensor_0', 's']"},
        clone_1=np.array([16, 8], np.float32),
        mul_1=np.array([0.5, 0.7], np.float32),
        w=np.array([[0.1, 0.2], [0.3, 0.5]], np.float32),
    )
    report = amp.prepare_training(made)
    assert report.trainable == ("w",)
    assert any(note.startswith("'mul_1': buffers of the exported model") for note in report.notes)


def test_what_was_computed_of_one_parameter_and_is_trained_apart_from_it_is_told() -> None:
    """A flow's scale and its share of the log-determinant, and the other side of a mixture; pieces alone are fine."""
    made = exported(
        """net (float[N,3] x) => (float[N,3] y) { a = Mul (x, exp)  b = Add (a, sum_1)  c = Mul (b, mu)  d = Mul (x, sub_9)
        e = Add (c, d)  f = Mul (e, getitem_1)  y = Add (f, getitem) }""",
        "".join(f"p_{name}: PARAMETER target='{name}'\n" for name in ("ls", "mu", "pair")),
        {"exp": "['ls', 'select', 'val_5']", "sum_1": "['ls', 'select_1']", "sub_9": "['mu']"}
        | {"getitem": "['pair']", "getitem_1": "['pair', 'val_7']"},
        **{
            name: np.array(numbers, np.float32)
            for name, numbers in {
                "exp": [0.9, 1.2, 1.4],
                "sum_1": [0.1, 0.2, 0.7],
                "mu": [0.1, 0.3, 0.2],
                "sub_9": [0.9, 0.7, 0.8],
                "getitem": [0.3, 0.1, 0.7],
                "getitem_1": [0.2, 0.5, 0.1],
            }.items()
        },
    )
    notes = [note for note in amp.prepare_training(made).notes if "computed of" in note]
    end = "in the export, and trained apart from what else is or was that: export with optimize=False to train it alone"
    assert notes == [f"'sub_9': computed of 'mu' {end}", f"'exp', 'sum_1': computed of 'ls' {end}"]


def test_stencils_are_not_trained_and_told() -> None:
    """TorchScript's exporter does not say that they are buffers: a Laplace filter that was trained broke the field."""
    made = program(
        "net (float[N,1,8] x) => (float[N,2,6] y) { d = Conv (x, k)  y = Conv (d, w, b) }",
        k=np.array([[[1, -2, 1]]], np.float32),
        w=np.array([[[0.4]], [[-0.3]]], np.float32),
        b=np.array([0.1, 0.2], np.float32),
    )
    report = amp.prepare_training(made)
    assert set(report.trainable) == {"w", "b"}
    assert (
        "'k': rows that add up to nothing, as stencils have, not trained; name in trainable what is learned"
        in report.notes
    )


@pytest.mark.parametrize("ordered", [True, False])
def test_tables_that_fall_all_along_are_schedules(ordered: bool) -> None:
    """The noise of a diffusion's steps: trained, it left the domain of its root in one step. What has no order is a
    number of each of many things."""
    table = np.cumprod(1 - np.linspace(1e-4, 0.02, 40)).astype(np.float32)
    made = program(
        "net (float[N,2] x, int64[N,1] t) => (float[N,2] y) { a = Gather (ac, t)  s = Sqrt (a)  h = MatMul (x, w)  y = Mul (h, s) }",
        ac=table if ordered else np.random.default_rng(0).permutation(table),
        w=np.array([[0.1, 0.2], [0.3, 0.5]], np.float32),
    )
    report = amp.prepare_training(made)
    assert set(report.trainable) == ({"w"} if ordered else {"w", "ac"})
    said = "'ac': tables that rise or fall all along, as schedules do, not trained; name in trainable what is learned"
    assert (said in report.notes) == ordered
