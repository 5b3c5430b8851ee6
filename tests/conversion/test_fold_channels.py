"""What is done to each channel goes into the weights of the convolution before it, where that is all the same."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from tests.helpers.converting import faithful, filled, off
from tests.helpers.sessions import session

HEAD = '<ir_version: 8, opset_import: ["" : 17]> m (float[1,4,8,8] x) => (float[1,4,A,B] y) '
HEAD += "<float[4,4,3,3] w, float[4,2,3,3] pairs, float[4] s, float[4] b, float[4] mu, float[4] v, float[4] c, "
HEAD += "float[4,1,1] each, float[1] number, float[6] columns, float[1,1,1,1,1] deep> "
NORM = "n = BatchNormalization<epsilon = 0.1>(a, s, b, mu, v) "
X = np.random.default_rng(0).standard_normal((1, 4, 8, 8), np.float32)
FOLDED = {
    "without a bias": "a = Conv(x, w) " + NORM + "y = Relu(n)",
    "with a bias": "a = Conv(x, w, c) " + NORM + "y = Relu(n)",
    "an output": "a = Conv(x, w) " + NORM.replace("n = B", "y = B"),
    "transposed": "a = ConvTranspose(x, w, c) " + NORM + "y = Relu(n)",
    "a sum": "a = Conv(x, w) n = Add(each, a) y = Relu(n)",
    "a number": "a = Conv(x, w, c) n = Sub(a, number) y = Relu(n)",
    "a difference": "a = Conv(x, w, c) n = Sub(each, a) y = Relu(n)",
    "a sum, then a norm": "k = Conv(x, w) a = Add(k, each) " + NORM + "y = Relu(n)",
    "a sum of weights of two": "a = Conv(x, w) n = Add(a, each) o = Conv(x, w) y = Add(n, o)",
    "a sum, transposed, in groups": "a = ConvTranspose<group = 2>(x, pairs) n = Add(a, each) y = Relu(n)",
    "in groups": "a = Conv<group = 2>(x, pairs) " + NORM + "y = Relu(n)",
}
LEFT = {
    "read by others": "a = Conv(x, w) " + NORM + "y = Add(a, n)",
    "an output": "a = Conv(x, w) " + NORM + "y = Relu(n)",
    "weights of two": "a = Conv(x, w) " + NORM + "o = Conv(x, w) y = Add(n, o)",
    "transposed, in groups": "a = ConvTranspose<group = 2>(x, pairs) " + NORM + "y = Relu(n)",
    "a number for each column": "a = Conv(x, w) n = Add(a, columns) y = Relu(n)",
    "an axis more": "a = Conv(x, w) n = Add(a, deep) z = Relu(n) y = Squeeze(z)",
    "a sum of itself": "a = Conv(x, w) n = Add(a, a) y = Relu(n)",
    "a sum of two": "a = Conv(x, w) o = Relu(x) p = Conv(o, w) n = Add(a, p) y = Relu(n)",
    "a sum with what is fed": "a = Conv(x, w) n = Add(a, fed) y = Relu(n)",
    "a norm by what is fed": "f = Reshape(fed, flat) a = Conv(x, w) " + NORM.replace("(a, s", "(a, f") + "y = Relu(n)",
    "weights that are fed": "f = Mul(w, fed) a = Conv(x, f) " + NORM + "y = Relu(n)",
    "statistics of the batch": "a = Conv(x, w) "
    + NORM.replace("n = B", "n, seen, spread = B").replace("= 0.1", "= 0.1, training_mode = 1")
    + "y = Relu(n)",
    "nothing": "a = Relu(x) " + NORM + "y = Conv(n, w)",
}


def model_of(body: str, output: bool = False) -> onnx.ModelProto:
    head = HEAD.replace("y) <", "y, float[1,4,C,D] a) <") if output else HEAD
    head = head.replace("float[1,4,8,8] x", "float[1,4,8,8] x, float[4,1,1] fed") if "fed" in body else head
    model = filled(f"{head}{{ {body} }}")
    for weight in model.graph.initializer:  # two numbers of each sign, and of several sizes
        array = onnx.numpy_helper.to_array(weight)
        sign = np.where(np.arange(array.shape[0]) % 2, -1, 1).reshape(-1, *[1] * (array.ndim - 1))
        size = np.float32(2.0) ** np.arange(array.shape[0]).reshape(sign.shape)
        new = array * size * (1 if weight.name == "v" else sign)
        weight.CopyFrom(onnx.numpy_helper.from_array(new.astype(np.float32), weight.name))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1]), "flat"))
    return model


def types(program: amp.Program) -> list[str]:
    return [op.type for op in program.operators if op.type != "Cast"]


@pytest.mark.parametrize("name", FOLDED)
def test_one_operator_computes_both(name: str) -> None:
    model = model_of(FOLDED[name])
    program = amp.convert(model)
    assert len(types(program)) == FOLDED[name].count("=") - FOLDED[name].count("<") - FOLDED[name].count("(k") - 1
    assert not {v.name for v in program.variables} & {"s", "b", "mu", "v", "a", "each", "number"}, "unused weights go"
    onnx.checker.check_model(program.to_onnx(), full_check=True)
    assert off(faithful(program, {"x": X})[0], session(model).run(None, {"x": X})[0]) < 1e-3


@pytest.mark.parametrize("name", LEFT)
def test_what_others_need_stays(name: str) -> None:
    model = model_of(LEFT[name], output=name == "an output")
    assert types(amp.convert(model)) == [node.op_type for node in model.graph.node]


@pytest.mark.parametrize(("other", "left"), [("y = Relu(x)", 1), ("y = Conv(x, w)", 2)])
def test_weights_from_outside_of_a_branch(other: str, left: int) -> None:
    """They take the norm in where that branch alone reads them."""
    model = model_of(FOLDED["an output"])
    value = onnx.helper.make_tensor_value_info("which", onnx.TensorProto.BOOL, [])
    branches = {
        f"{name}_branch": onnx.helper.make_graph(nodes, name, [], [onnx.helper.make_empty_tensor_value_info("y")])
        for name, nodes in (("then", model.graph.node), ("else", model_of(other).graph.node))
    }
    branches["then_branch"].output[0].name = branches["then_branch"].node[-1].output[0] = "norm"
    branches["else_branch"].output[0].name = branches["else_branch"].node[-1].output[0] = "other"
    del model.graph.node[:]
    model.graph.node.append(onnx.helper.make_node("If", ["which"], ["y"], **branches))
    model.graph.input.append(value)
    program = amp.convert(model)
    (then,) = (op.attrs.programs[1] for op in program.operators if op.type == "If")
    assert len(types(then)) == left
    assert program.has_var("w") == (left == 2) and not program.has_var("mu")


def test_statistics_of_the_batch_as_older_opsets_write_them() -> None:
    text = FOLDED["without a bias"].replace("n = B", "n, seen, spread, m, d = B")
    model = model_of(text)
    model.opset_import[0].version = 11
    program = amp.convert(model)
    assert "BatchNormalization" in types(program)


@pytest.mark.parametrize("name", ["w", "mu"])
def test_what_a_caller_may_feed_over_stays(name: str) -> None:
    """Initializers that a file lists as inputs."""
    model = model_of(FOLDED["without a bias"])
    (held,) = (each for each in model.graph.initializer if each.name == name)
    model.graph.input.append(onnx.helper.make_tensor_value_info(name, held.data_type, held.dims))
    program = amp.convert(model)
    assert "BatchNormalization" in types(program) and program.has_var(name)


@pytest.mark.parametrize("factor", [1e6, float("nan")])
def test_numbers_that_float16_does_not_hold_stay_apart(factor: float) -> None:
    model = model_of(FOLDED["without a bias"])
    (scale,) = (each for each in model.graph.initializer if each.name == "s")
    scale.CopyFrom(onnx.numpy_helper.from_array(np.full(4, factor, np.float32), "s"))
    assert "BatchNormalization" in types(amp.convert(model))


@pytest.mark.parametrize(
    "options",
    [
        {"exclude": ["re:.*n.*"]},
        {"black_varnames": ["a"]},
        {"black_varnames": ["n"]},
        {"black_list": ["BatchNormalization"]},
        {"black_list": ["Conv"]},
    ],
)
def test_what_the_user_keeps_stays(options: dict[str, object]) -> None:
    program = amp.convert(model_of(FOLDED["without a bias"]), **options)  # type: ignore[arg-type]
    assert "BatchNormalization" in types(program)


def test_weights_are_rounded_once() -> None:
    """Of the folded weights each is the nearest float16 of the product, computed in float64."""
    model = model_of(FOLDED["without a bias"])
    held = {each.name: onnx.numpy_helper.to_array(each).astype(np.float64) for each in model.graph.initializer}
    slope = held["s"] / np.sqrt(held["v"] + np.float32(0.1))
    written = {each.name: onnx.numpy_helper.to_array(each) for each in amp.convert(model).to_onnx().graph.initializer}
    expected = (held["w"] * slope.reshape(-1, 1, 1, 1)).astype(np.float32).astype(np.float16)
    np.testing.assert_array_equal(written["w.folded"], expected)
