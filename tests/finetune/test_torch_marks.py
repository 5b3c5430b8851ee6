"""What PyTorch's dynamo exporter says of parameters that it left out, merged or computed with."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import amp_transpiler as amp

RANDOM = np.random.default_rng(0)
NODE, FOLDED = "pkg.torch.onnx.fx_node", "pkg.onnxscript.optimizer.folded_from"
KIND, SIGNATURE = "pkg.torch.export.graph_signature.InputSpec.kind", "pkg.torch.export.ExportedProgram.graph_signature"


def exported(
    body: str, weights: dict[str, np.ndarray], marks: list[str], parameters: tuple[str, ...], x: str = "float[2,4] x"
) -> onnx.ModelProto:
    """A model as the exporter writes it: operations by operator, and the names of the parameters."""
    made = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 20]> net ({x}) => (float y) {{ {body} }}')
    made.graph.output[0].type.tensor_type.ClearField("shape")
    for node in made.graph.node:
        node.input[:] = [{name.replace(".", "_"): name for name in weights}.get(name, name) for name in node.input]
    for name, array in weights.items():
        made.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(array, np.float32), name))
    for node, mark in zip(made.graph.node, marks, strict=True):
        if mark:
            called = f"call_function[target=torch.ops.aten.{mark}, kwargs = {{}})"
            node.metadata_props.add(key=NODE, value=f"%made : [num_users=1] = {called}")
    lines = [f"p_{name.replace('.', '_')}: PARAMETER target='{name}'" for name in parameters]
    made.graph.metadata_props.add(key=SIGNATURE, value="\n".join(["", "# inputs", *lines]))
    for name in weights:
        if name in parameters:
            info = onnx.helper.make_tensor_value_info(name, 1, weights[name].shape)
            info.metadata_props.add(key=KIND, value="PARAMETER")
            made.graph.value_info.append(info)
    return made


FILTERS = RANDOM.normal(size=(3, 2, 1, 1))


@pytest.mark.parametrize(
    "operator, weight, mark, x, channels",
    [
        ("Gemm (x, a_weight)", np.eye(4, 5), "addmm.default](args = (%p_a_bias, %x, %p_a_weight)", "2,4", 5),
        ("Gemm (x, a_weight)", np.eye(4, 5), "linear.default](args = (%x, %p_a_weight, %p_a_bias)", "2,4", 5),
        ("Conv (x, a_weight)", FILTERS, "conv2d.default](args = (%x, %p_a_weight, %p_a_bias, [1, 1])", "1,2,4,4", 3),
        ("Conv (x, a_weight)", FILTERS, "conv2d.padding](args = (%x, %p_a_weight, %p_a_bias)", "1,2,4,4", 3),
        ("ConvTranspose (x, a_weight)", FILTERS, "convolution.default](args = (%x, %p_a_weight, %p_a_bias)",
         "1,3,4,4", 2),
    ],
)  # fmt: skip
def test_a_bias_of_zeros_that_the_exporter_left_out_is_trained(
    operator: str, weight: np.ndarray, mark: str, x: str, channels: int
) -> None:
    """GPT-2's layers, and new heads, begin with zeros: the exporter's optimiser drops those of Gemm and Conv."""
    made = exported(f"y = {operator}", {"a.weight": weight}, [mark], ("a.weight", "a.bias"), f"float[{x}] x")
    main = amp.Program.from_onnx(made)
    report = amp.prepare_training(main)
    assert report.trainable == ("a.weight", "a.bias") and main.var("a.bias").shape == (channels,)
    assert "1 biases that the exporter left out, being zero, are parameters again" in report.notes
    with amp.program_guard(main, main.startup):
        amp.optimizer.SGD(0.1).minimize(amp.nn.functional.mean(main.outputs[0]))
    executor, feed = amp.Executor(amp.CPUPlace()), {"x": np.ones([int(size) for size in x.split(",")], np.float32)}
    with amp.scope_guard(amp.Scope()):
        executor.run(main.startup)
        executor.run(main, feed=feed)
        bias = amp.global_scope().find_var("a.bias")
    np.testing.assert_allclose(bias, np.full(channels, -0.1 / channels), rtol=1e-5)


def test_layers_that_share_a_bias_share_it_again() -> None:
    mark = "addmm.default](args = (%p_b, %{}, %p_{}_weight)"
    made = exported(
        "h = Gemm (x, a_weight) y = Gemm (h, c_weight)",
        {name: RANDOM.normal(size=(4, 4)) for name in ("a.weight", "c.weight")},
        [mark.format("x", "a"), mark.format("h", "c")],
        ("a.weight", "c.weight", "b"),
    )
    main = amp.Program.from_onnx(made)
    assert amp.prepare_training(main).trainable == ("a.weight", "c.weight", "b")
    assert len(main.var("b").readers) == 2


@pytest.mark.parametrize(
    "body, marks",
    [
        ("y = Gemm (x, a_weight)", ["linear.default](args = (%x, %p_a_weight)"]),
        ("y = Gemm (x, a_weight)", ["linear.default](args = (%x, %p_a_weight, None)"]),
        ("y = Gemm (x, a_weight)", [""]),
        ("g = Gemm (x, a_weight) y = Add (g, a_bias)", ["linear.default](args = (%x, %p_a_weight, %p_a_bias)"] * 2),
    ],
)
def test_a_layer_without_a_bias_gets_none(body: str, marks: list[str]) -> None:
    weights = {"a.weight": np.eye(4), "a.bias": np.arange(4)}
    made = exported(
        body, {name: weights[name] for name in weights if name.replace(".", "_") in body}, marks, ("a.weight", "a.bias")
    )
    main = amp.Program.from_onnx(made)
    report = amp.prepare_training(main)
    assert len(report.trainable) == len(marks) and not any("left out" in note for note in report.notes)
    assert all(len(op.inputs) == 2 for op in main.operators)


def test_what_a_group_norm_computes_with_is_not_trained() -> None:
    """The exporter writes one of a layer norm's scale and the ones of as many groups, where both are ones."""
    made = exported(
        "n = LayerNormalization (x, norm_weight, norm_bias) g = InstanceNormalization (n, norm_weight, norm_bias)"
        " s = Mul (g, val_1) y = Add (s, val_2)",
        {
            "norm.weight": np.ones(4),
            "norm.bias": np.zeros(4),
            "val_1": RANDOM.normal(size=(4, 1)),
            "val_2": RANDOM.normal(size=(4, 1)),
        },
        ["layer_norm.default](args = (%x, [4], %p_norm_weight, %p_norm_bias)"]
        + ["group_norm.default](args = (%n, 4, %p_gn_weight, %p_gn_bias)"] * 3,
        ("norm.weight", "norm.bias", "gn.weight", "gn.bias"),
        "float[2,4,4] x",
    )
    for name, of in (("val_1", "gn.weight"), ("val_2", "gn.bias")):
        info = made.graph.value_info.add(name=name)
        info.metadata_props.add(key=FOLDED, value=repr([of, "val_0"]))
    report = amp.prepare_training(amp.Program.from_onnx(made))
    assert set(report.trainable) == {"norm.weight", "norm.bias", "gn.weight", "gn.bias"}
    assert report.frozen == ()


def test_a_merged_parameter_keeps_its_name_and_its_copies_have_theirs() -> None:
    """A bias before it read what is called after a parameter of the model's root."""
    made = exported(
        "h = MatMul (x, val_0) l = Add (h, p) t = Tanh (l) s = Add (t, p) m = Mul (s, one) y = Div (m, one)",
        {"val_0": RANDOM.normal(size=(4, 4)), "p": np.zeros(4), "one": np.ones(1)},
        ["linear.default](args = (%x, %p_fc_weight, %p_fc_bias)"] * 2
        + ["tanh.default](args = (%l)", "add.Tensor](args = (%t, %p_p)", "mul.Tensor](args = (%s, %p_one)"]
        + ["div.Tensor](args = (%m, %p_scale_two)"],
        ("fc.weight", "fc.bias", "p", "one", "scale.two"),
    )
    for node in made.graph.node[:2]:
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'fc', 'linear']")
    main = amp.Program.from_onnx(made)
    report = amp.prepare_training(main)
    assert set(report.trainable) == {"fc.weight", "fc.bias", "p", "one", "scale.two"}
    assert {name: main.var(name).readers[0][0].output(0).name for name in ("fc.bias", "p", "one", "scale.two")} == {
        "fc.bias": "l",
        "p": "s",
        "one": "m",
        "scale.two": "y",
    }


def test_weights_have_the_names_that_the_exporter_computed_them_of() -> None:
    """The input layer of an attention, in_proj_weight; of a second one that was equal the operation tells."""
    matrix = RANDOM.normal(size=(4, 4))
    marks = [f"linear.default](args = (%x, %p_{one}_in_proj_weight, %p_{one}_in_proj_bias)" for one in "ab"]
    made = exported(
        "h = MatMul (x, val_0) g = Add (h, a_in_proj_bias) k = MatMul (g, val_0) y = Add (k, b_in_proj_bias)",
        {"val_0": matrix, "a.in_proj_bias": np.arange(4), "b.in_proj_bias": np.ones(4)},
        [marks[0], marks[0], marks[1], marks[1]],
        ("a.in_proj_weight", "a.in_proj_bias", "b.in_proj_weight", "b.in_proj_bias"),
    )
    made.graph.value_info.add(name="val_0").metadata_props.add(key=FOLDED, value="['a.in_proj_weight']")
    for node, module in zip(made.graph.node, "aabb", strict=True):
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=f"['', '{module}', 'linear']")
    main = amp.Program.from_onnx(made)
    names = amp.prepare_training(main).trainable
    assert set(names) == {"a.in_proj_weight", "a.in_proj_bias", "b.in_proj_weight", "b.in_proj_bias"}
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(main.var("b.in_proj_weight").data), matrix.T.astype("f"))


def folded(made: onnx.ModelProto, name: str, *sources: str) -> None:
    """Let the exporter have computed a tensor of others."""
    known = [info for info in made.graph.value_info if info.name == name]
    for info in known or [made.graph.value_info.add(name=name)]:
        info.metadata_props.add(key=FOLDED, value=repr(list(sources)))


def test_what_was_computed_of_no_parameter_is_not_trained() -> None:
    """An embedding bag's counts, the mask of an autoencoder."""
    made = exported(
        "h = Mul (x, tmp) y = MatMul (h, a_weight)",
        {"tmp": np.ones((2, 1)), "a.weight": RANDOM.normal(size=(4, 3))},
        ["", ""],
        ("a.weight",),
    )
    folded(made, "tmp", "val_9", "view")
    assert amp.prepare_training(amp.Program.from_onnx(made)).trainable == ("a.weight",)


def test_a_class_token_of_zeros_is_trained_and_one_for_all_examples() -> None:
    """It looked like a state that each example begins with."""
    made = exported(
        "c = Concat <axis = 1> (expand, x) f = Flatten (c) y = MatMul (f, a_weight)",
        {"expand": np.zeros((2, 1, 4)), "a.weight": RANDOM.normal(size=(16, 3))},
        ["cat.default](args = ([%expand, %x], 1)", "", ""],
        ("cls", "a.weight"),
        "float[2,3,4] x",
    )
    folded(made, "expand", "cls", "val_1")
    main = amp.Program.from_onnx(made)
    assert set(amp.prepare_training(main).trainable) == {"cls", "a.weight"}
    assert main.var("cls").shape == (1, 1, 4)


def test_what_was_computed_of_several_parameters_is_said() -> None:
    made = exported(
        "h = Add (x, add_3) y = MatMul (h, a_weight)",
        {"add_3": RANDOM.normal(size=(2, 4)), "a.weight": RANDOM.normal(size=(4, 3))},
        ["", ""],
        ("a.weight", "q.weight", "q.bias"),
    )
    folded(made, "add_3", "linear", "q.bias", "q.weight")
    report = amp.prepare_training(amp.Program.from_onnx(made))
    assert set(report.trainable) == {"a.weight", "add_3"}
    (note,) = [note for note in report.notes if "in the export" in note]
    assert note.startswith("'add_3' was computed of 'q.bias', 'q.weight' in the export")


@pytest.mark.parametrize("name, sign", [("exp", 1), ("exp_2", 1), ("unsqueeze_3", -1)])
def test_a_temperature_is_trained_and_not_its_exponential(name: str, sign: int) -> None:
    """CLIP's, of which the exporter computed the scale; a state space model's rates with a minus."""
    scale = np.asarray(sign * np.exp([2.0]), np.float32)
    made = exported(
        f"h = MatMul (x, a_weight) y = Mul (h, {name})",
        {name: scale, "a.weight": np.eye(4)},
        ["", ""],
        ("a.weight", "logit_scale"),
    )
    folded(made, name, *["exp", "neg", "val_3"][: 3 if sign < 0 else 0], "logit_scale")
    main = amp.Program.from_onnx(made)
    report = amp.prepare_training(main)
    assert set(report.trainable) == {"a.weight", "logit_scale"}
    with amp.program_guard(main, main.startup):
        loss = amp.nn.functional.mean(main.outputs[0])
        amp.optimizer.SGD(0.1, parameter_list=["logit_scale"]).minimize(loss)
    executor, feed = amp.Executor(amp.CPUPlace()), {"x": np.ones((2, 4), np.float32)}
    with amp.scope_guard(amp.Scope()):
        executor.run(main.startup)
        (first,) = executor.run(main, feed=feed, fetch_list=[loss])
        learned = amp.global_scope().find_var("logit_scale")
    assert float(first) == pytest.approx(float(scale[0]), rel=1e-6)
    np.testing.assert_allclose(learned, 2 - 0.1 * scale, rtol=1e-5)


def test_an_exponential_of_something_else_stays_what_it_is() -> None:
    made = exported("y = Mul (x, exp)", {"exp": np.full(4, 2.0)}, [""], ("a", "b"))
    folded(made, "exp", "a", "mul")
    assert amp.prepare_training(amp.Program.from_onnx(made)).trainable == ("exp",)


def test_what_was_computed_of_a_parameter_alone_is_that_parameter() -> None:
    """``linear(tanh(linear(x, w, b)), w.t(), c)``, whose second operation reads no parameter by name but ``c``."""
    w = RANDOM.normal(size=(3, 4))
    made = exported(
        "h = Gemm <transB = 1> (x, w, b)  t = Tanh (h)  y = Gemm <transB = 1> (t, turned, c)",
        {"w": w, "b": np.ones(3), "turned": w.T, "c": np.zeros(4)},
        [
            "linear.default](args = (%x, %p_w, %p_b)",
            "tanh.default](args = (%h,)",
            "linear.default](args = (%t, %t, %p_c)",
        ],
        ("w", "b", "c"),
    )
    info = onnx.helper.make_tensor_value_info("turned", 1, w.T.shape)
    info.metadata_props.add(key=FOLDED, value="['w']")
    made.graph.value_info.append(info)
    report = amp.prepare_training(amp.Program.from_onnx(made))
    assert report.trainable == ("w", "b", "c") and "'turned' is 'w' transposed: tied again" in report.notes


@pytest.mark.parametrize("learned", [True, False])
def test_a_gain_of_the_input_that_is_a_parameter_is_trained(learned: bool) -> None:
    """As that of RevIN, which looks like the scaling of an image's channels."""
    weights = {"gain": np.array([[0.5], [2.0], [3.0]]), "w": RANDOM.normal(size=(4, 5))}
    parameters = ("gain", "w") if learned else ("w",)
    made = exported("s = Mul (x, gain)  y = MatMul (s, w)", weights, ["", ""], parameters, "float[2,3,4] x")
    report = amp.prepare_training(amp.Program.from_onnx(made))
    assert report.trainable == parameters
    assert ("'gain': scaling of the input, not trained" in report.notes) != learned


def test_the_statistics_of_a_new_norm_are_no_parameters() -> None:
    """Ones and zeros both, so that the exporter merged them: what is learned moved with what is measured."""
    held = {"norm.weight": np.ones(4), "norm.bias": np.zeros(4), "v": RANDOM.normal(size=(4, 3))}
    read = "%x, %p_norm_weight, %p_norm_bias, %b_norm_running_mean, %b_norm_running_var, 0.1, 1e-05"
    made = exported(
        "n = BatchNormalization (x, norm_weight, norm_bias, norm_bias, norm_weight)  y = MatMul (n, v)",
        held,
        [f"_native_batch_norm_legit_no_training.default](args = ({read})", ""],
        tuple(held),
    )
    signature = made.graph.metadata_props[0]
    for name in ("running_mean", "running_var"):
        signature.value += f"\nb_norm_{name}: BUFFER target='norm.{name}' persistent=True"
    main = amp.Program.from_onnx(made)
    assert amp.prepare_training(main).trainable == tuple(held)
    norm = next(op for op in main.operators if op.type == "BatchNormalization")
    assert norm.input_arg_names == ["x", *list(held)[:2], "norm.running_mean", "norm.running_var"]
    assert set(main.updates) == {main.var("norm.running_mean"), main.var("norm.running_var")}
