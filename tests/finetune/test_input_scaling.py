"""What brings the features of an input to a common scale was fitted to data, and is not trained."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import amp_transpiler as amp

RNG = np.random.default_rng(0)
WEIGHT = RNG.normal(size=(6, 2)).astype(np.float32)
FIRST, SECOND = RNG.normal(size=(2, 6)).astype(np.float32)


def trained(scaling: str, first: str = "mean", second: str = "std", **held: np.ndarray) -> set[str]:
    text = f"net (double[4,6] x) => (float[4,2] y) {{ i = Cast <to = 1> (x) {scaling} y = MatMul (s, w) }}"
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18]> {text}')
    contents = {"w": WEIGHT, "p": FIRST, "q": SECOND} | held
    names = {"p": first, "q": second}
    for node in model.graph.node:
        for place, name in enumerate(node.input):
            node.input[place] = names.get(name, name)
    read = {name for node in model.graph.node for name in node.input}
    for key, array in contents.items():
        if (name := names.get(key, key)) in read:
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    report = amp.prepare_training(amp.Program.from_onnx(model))
    told = any("scaling of the input, not trained" in note for note in report.notes)
    assert told == (len(report.trainable) < len(model.graph.initializer))
    return set(report.trainable)


PAIRS = [
    "r = Mul (i, p) s = Add (r, q)",
    "r = Sub (i, p) s = Div (r, q)",
    "r = Add (i, p) c = Identity (r) s = Mul (q, c)",
]


@pytest.mark.parametrize("scaling", PAIRS)
def test_two_vectors_that_an_input_meets_first_are_not_trained(scaling: str) -> None:
    assert trained(scaling) == {"w"}


@pytest.mark.parametrize(("scaling", "left"), [("s = Mul (i, p)", "Mu_Mulcst"), ("s = Div (i, p)", "Di_Divcst1")])
def test_one_vector_is_not_where_scikit_learn_fitted_it(scaling: str, left: str) -> None:
    assert trained(scaling, left) == {"w"}
    assert trained(scaling, "gate") == {"w", "gate"}


@pytest.mark.parametrize(
    ("scaling", "first", "second"),
    [
        (
            PAIRS[0],
            "functional_1/batch_normalization_1/batchnorm/mul:0",
            "functional_1/batch_normalization_1/batchnorm/sub:0",
        ),
        (PAIRS[0], "affine.weight", "affine.bias"),
        ("r = Mul (i, p) s = Mul (r, q)", "mean", "std"),
        ("t = Tanh (i) r = Mul (t, p) s = Add (r, q)", "mean", "std"),
        ("r = Mul (i, p) t = Tanh (r) s = Add (t, q)", "mean", "std"),
    ],
)
def test_what_may_be_a_layer_is_trained(scaling: str, first: str, second: str) -> None:
    assert trained(scaling, first, second) == {"w", first, second}


def test_what_was_not_fitted_is_trained() -> None:
    ones, zeros = np.ones(6, np.float32), np.zeros(6, np.float32)
    assert trained(PAIRS[0], p=ones, q=zeros) == {"w", "mean", "std"}
