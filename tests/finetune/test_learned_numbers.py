"""What is trained is not what it was at first: numbers that layers multiply or divide by, exponents."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

import amp_transpiler as amp
from amp_transpiler.nn import functional as F

RNG = np.random.default_rng(3)
WEIGHTS = {name: RNG.normal(size=(4, 4)).astype(np.float32) for name in ("w", "v")}
X = RNG.normal(size=(4, 4)).astype(np.float32)
SCORES = "z = MatMul (x, w)  r = Transpose <perm = [1, 0]> (z)  s = MatMul (z, r)  "
#: By what is learned: the layers, and what the number is at first.
LAYERS = {
    "a scale before a product": ("q = MatMul (x, w)  k = MatMul (x, v)  s = Mul (q, t)  y = MatMul (s, k)", 0.5),
    "a scale behind a product": (SCORES + "y = Mul (s, t)", 0.5),
    "the logarithm of a scale": (SCORES + "e = Exp (t)  y = Mul (s, e)", 0.5),
    "a temperature": (SCORES + "y = Div (s, t)", 0.5),
    "what a layer counts for, nothing at first": ("z = MatMul (x, w)  r = Relu (z)  s = Mul (r, t)  y = Add (x, s)", 0),
    "a power": ("z = MatMul (x, w)  a = Abs (z)  b = Pow (a, t)  y = MatMul (b, v)", 2),
    "a power of layers that normalise": (
        "z = MatMul (x, w)  b = Pow (z, t)  m = ReduceMean <axes = [1], keepdims = 1> (b)  y = Mul (z, m)",
        2,
    ),
}
LATER = {0.5: 1.5, 0: 0.7, 2: 4}


def text(layers: str, kind: str) -> str:
    return f'<ir_version: 8, opset_import: ["" : 17]> net ({kind}[4,4] x) => ({kind}[4,4] y) {{ {layers} }}'


def started(layers: str, pure: bool = False, **held: np.ndarray) -> tuple[amp.Program, amp.Variable, amp.Scope]:
    model = onnx.parser.parse_model(text(layers, "float"))
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in held.items())
    main, scope = amp.Program.from_onnx(model), amp.Scope()
    amp.prepare_training(main, trainable=["*", *held])
    with amp.program_guard(main, main.startup):
        y = main.outputs[0]
        loss = F.sum(F.cast(y * y, "float32"))
        optimizer = amp.optimizer.SGD(0.0, multi_precision=pure)
        if pure:
            optimizer = amp.decorate(optimizer, use_pure_fp16=True, use_fp16_guard=False, init_loss_scaling=8.0)
        optimizer.minimize(loss)
    amp.Executor().run(main.startup, scope=scope)
    if pure:
        optimizer.amp_init(amp.CPUPlace(), scope)
    return main, loss, scope


def exact(layers: str, held: dict[str, np.ndarray]) -> float:
    """The loss in float64, of the reference evaluator."""
    model = onnx.parser.parse_model(text(layers, "double"))
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.asarray(array, np.float64), name) for name, array in held.items()
    )
    (y,) = ReferenceEvaluator(model).run(None, {"x": X.astype(np.float64)})
    return float((y * y).sum())


def slope(layers: str, held: dict[str, np.ndarray], name: str) -> np.ndarray:
    """Differences of the loss, element by element of one of what it is computed from."""
    found = np.zeros(held[name].shape)
    for place in np.ndindex(found.shape):
        step = np.zeros_like(found)
        step[place] = 1e-5
        sides = [exact(layers, held | {name: held[name] + sign * step}) for sign in (1, -1)]
        found[place] = (sides[0] - sides[1]) / 2e-5
    return found


@pytest.mark.parametrize("what", LAYERS)
def test_a_learned_number_counts_for_what_it_is_now(what: str) -> None:
    layers, first = LAYERS[what]
    held = {name: array for name, array in WEIGHTS.items() if f" {name})" in layers}
    main, loss, scope = started(layers, t=np.float32(first), **held)
    now = held | {"t": np.float64(LATER[first])}
    scope.set_var("t", np.float32(now["t"]))
    value, *gradients = amp.Executor().run(main, {"x": X}, [loss, *(f"{name}@GRAD" for name in now)], scope)
    np.testing.assert_allclose(value, exact(layers, now), rtol=1e-5)
    for name, gradient in zip(now, gradients, strict=True):
        np.testing.assert_allclose(gradient, slope(layers, now, name), rtol=1e-3, atol=1e-3, err_msg=name)


@pytest.mark.parametrize("what", LAYERS)
def test_it_counts_in_pure_float16(what: str) -> None:
    layers, first = LAYERS[what]
    held = {name: array for name, array in WEIGHTS.items() if f" {name})" in layers}
    main, loss, scope = started(layers, True, t=np.float32(first), **held)
    later = LATER[first]
    scope.set_var("t", scope.find_var("t").dtype.type(later))
    (value,) = amp.Executor().run(main, {"x": X}, [loss], scope)
    np.testing.assert_allclose(value, exact(layers, held | {"t": np.float64(later)}), rtol=0.02)


NAMES = {
    "head.scale": True,
    "val_3": False,
    "/head/Constant_output_0": False,
    "functional_1/attention_1/Mul/ReadVariableOp:0": True,
    "functional_1/p_re_lu_1/Neg:0": True,
    "functional_1/gelu/mul/x:0": False,
    "functional_1/softmax_1/Const_1:0": False,
    "ConstantFolding/functional_1/activation_1/truediv_recip:0": False,
}


@pytest.mark.parametrize("number", [0.5, 1])
@pytest.mark.parametrize(("name", "told"), NAMES.items())
def test_numbers_that_stay_constants_are_told(name: str, told: bool, number: float) -> None:
    """Those whose names are the model's own: one may be learned, and nothing in the file says so. Of TensorFlow's, what
    was a variable. Where it is 1 nothing is computed with it."""
    model = onnx.parser.parse_model(text("z = MatMul (x, w)  y = Mul (z, t)", "float"))
    model.graph.node[1].input[1] = name
    held = {"w": WEIGHTS["w"], name: np.float32(number)}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, key) for key, array in held.items())
    note = f"'{name}': single numbers, not trained; name in trainable what the model learns of them"
    assert (note in amp.prepare_training(amp.Program.from_onnx(model)).notes) == told
    if told:
        report = amp.prepare_training(amp.Program.from_onnx(model), trainable=["*", name])
        assert name in report.trainable and note not in report.notes


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (4,)])
def test_the_slope_of_a_prelu_is_learned_whatever_its_shape(shape: tuple[int, ...]) -> None:
    layers, held = "z = MatMul (x, w)  y = PRelu (z, t)", {"w": WEIGHTS["w"], "t": np.full(shape, 0.25, np.float32)}
    model = onnx.parser.parse_model(text(layers, "float"))
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in held.items())
    main, scope = amp.Program.from_onnx(model), amp.Scope()
    assert amp.prepare_training(main).trainable == ("w", "t")
    with amp.program_guard(main, main.startup):
        found = amp.append_backward(F.sum(main.outputs[0] * main.outputs[0]))
    amp.Executor().run(main.startup, scope=scope)
    gradients = amp.Executor().run(main, {"x": X}, [gradient for _, gradient in found], scope)
    exactly = {name: array.astype(np.float64) for name, array in held.items()}
    for (parameter, _), gradient in zip(found, gradients, strict=True):
        np.testing.assert_allclose(gradient, slope(layers, exactly, parameter.name), rtol=1e-3, atol=1e-3)


def test_a_layer_whose_activation_is_a_sine_is_trained() -> None:
    """Of networks that solve differential equations all layers but the last were taken for frequencies."""
    held = {"w": WEIGHTS["w"], "b": RNG.normal(size=4).astype(np.float32), "v": WEIGHTS["v"]}
    model = onnx.parser.parse_model(text("z = Gemm (x, w, b)  s = Sin (z)  y = MatMul (s, v)", "float"))
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in held.items())
    report = amp.prepare_training(amp.Program.from_onnx(model))
    assert report.trainable == ("w", "b", "v") and not report.notes
