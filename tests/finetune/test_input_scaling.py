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


KERAS = "functional_1/normalization_1/Sub/y:0", "ConstantFolding/functional_1/normalization_1/truediv_recip:0"


@pytest.mark.parametrize("scaling", PAIRS)
@pytest.mark.parametrize("names", [("Mu_Mulcst", "Ad_Addcst1"), ("mean", "std"), ("scaler.mu", "scaler.sigma"), KERAS])
def test_vectors_that_an_input_meets_first_are_not_trained_if_names_tell(scaling: str, names: tuple[str, str]) -> None:
    assert trained(scaling, *names) == {"w"}


def test_one_vector_may_be_fitted() -> None:
    assert trained("s = Div (i, p)", "Di_Divcst") == {"w"}


BATCH_NORM = "functional_1/batch_normalization_1/batchnorm/mul:0", "functional_1/batch_normalization_1/batchnorm/sub:0"


@pytest.mark.parametrize(
    ("scaling", "first", "second"),
    [
        (PAIRS[0], *BATCH_NORM),
        (PAIRS[0], "log_scale", "shift"),  # of a flow
        ("t = Tanh (i) r = Mul (t, p) s = Add (r, q)", "mean", "std"),
        ("t = Mul (i, p) r = Add (t, q) s = Mul (r, q)", "gate", "mean"),
    ],
)
def test_what_may_be_a_layer_is_trained(scaling: str, first: str, second: str) -> None:
    assert trained(scaling, first, second) == {"w", first, second}
