"""A loss that applies the model's last activation reads what stands before it, also behind what only moves elements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import amp_transpiler as amp

RNG = np.random.default_rng(3)
X = RNG.normal(size=(40, 6)).astype(np.float32)
IMAGES = RNG.normal(size=(12, 2, 4, 4)).astype(np.float32)
FEW, TWO, MANY = (RNG.integers(0, n, 40) for n in (3, 2, 6))


def model(text: str, **weights: tuple[int, ...]) -> onnx.ModelProto:
    """A model of this text, with random weights of these shapes."""
    made = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21, "ai.onnx.ml" : 1]>\n{text}')
    rng = np.random.default_rng(5)
    for name, shape in weights.items():
        array = rng.normal(size=shape).astype(np.float32) / 2
        made.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return made


def flat(body: str, out: str, columns: int, constants: str = "") -> onnx.ModelProto:
    return model(
        f"net (float[n, 6] x) => (float[{out}] y) <float one = {{1}}, int64[1] last = {{1}}, int64 first = {{0}}, "
        f"int64[1] flat = {{-1}}{constants}> {{ z = MatMul (x, w)  {body} }}",
        w=(6, columns),
    )


def told_first(made: onnx.ModelProto, folder: Path, loss: str, **data: np.ndarray) -> tuple[float, list[str]]:
    """The loss that fit tells of the model as it is, and what else it tells."""
    lines: list[str] = []
    result = amp.fit(made, folder / "o.onnx", data=data, test=data, loss=loss, mode="fp32", say=lines.append)
    assert result.history[0].test_loss is not None
    return result.history[0].test_loss, lines


def probabilities(made: onnx.ModelProto, **feed: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(["y"], feed)[0], np.float64)


def likely(p: np.ndarray, label: np.ndarray) -> float:
    return float(-np.log(np.take_along_axis(p, label[..., None], -1)).mean())


def binary(p: np.ndarray, label: np.ndarray) -> float:
    return float(-(label * np.log(p) + (1 - label) * np.log(1 - p)).mean())


CLASSES = {
    "last": (flat("y = Softmax (z)", "n, 3", 3), FEW),
    "retyped": (flat("p = Softmax (z)  y = Cast <to = 11> (p)", "n, 3", 3).SerializeToString(), FEW),
    "turned twice": (
        flat("p = Softmax (z)  t = Transpose <perm = [1, 0]> (p)  i = Identity (t)  y = Transpose (i)", "n, 3", 3),
        FEW,
    ),
    "written out": (
        flat(
            "m = ReduceMax <keepdims = 0> (z, last)  c = Unsqueeze (m, last)  d = Sub (z, c)  e = Exp (d) "
            "s = ReduceSum <keepdims = 1> (e, last)  y = Div (e, s)",
            "n, 3",
            3,
        ),
        FEW,
    ),
    "no and yes": (flat("p = Sigmoid (z)  q = Sub (one, p)  y = Concat <axis = 1> (q, p)", "n, 2", 1), TWO),
}


@pytest.mark.parametrize("name", CLASSES)
def test_cross_entropy_is_that_of_the_probabilities(name: str, tmp_path: Path) -> None:
    made, label = CLASSES[name]
    made = onnx.load_from_string(made) if isinstance(made, bytes) else made
    if name == "retyped":
        made.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    found, lines = told_first(made, tmp_path, "cross_entropy", x=X, label=label)
    assert found == pytest.approx(likely(probabilities(made, x=X), label), rel=1e-5)
    assert sum("and cross_entropy takes logits: the loss reads those" in line for line in lines) == 1


def test_pixels_whose_channels_are_turned_to_the_end(tmp_path: Path) -> None:
    made = model(
        "net (float[n, 2, 4, 4] x) => (float[n, 4, 4, 5] y) "
        "{ z = Conv (x, w)  p = Softmax <axis = 1> (z)  y = Transpose <perm = [0, 2, 3, 1]> (p) }",
        w=(5, 2, 1, 1),
    )
    label = RNG.integers(0, 5, (12, 4, 4))
    found, lines = told_first(made, tmp_path, "cross_entropy", x=IMAGES, label=label)
    assert found == pytest.approx(likely(probabilities(made, x=IMAGES), label), rel=1e-5)
    assert any("the model ends in Softmax (then Transpose)" in line for line in lines)
    trained = onnx.load(tmp_path / "o.onnx").graph
    assert [node.op_type for node in trained.node] == ["Conv", "Softmax", "Transpose"], "what is written gives the same"


BINARY = {
    "squeezed": flat("p = Sigmoid (z)  y = Squeeze (p, last)", "n", 1),
    "one column": flat("p = Sigmoid (z)  t = Transpose <perm = [1, 0]> (p)  y = Gather <axis = 0> (t, first)", "n", 1),
    "reshaped": flat("p = Sigmoid (z)  y = Reshape (p, flat)", "n", 1),
    "a piece": flat("p = Sigmoid (z)  a, y = Split <axis = 1, num_outputs = 2> (p)", "n, 1", 2),
    "of two heads": flat("p = Sigmoid (z)  v = Neg (z)  q = Sigmoid (v)  y = Concat <axis = 1> (p, q)", "n, 2", 1),
}


@pytest.mark.parametrize("name", BINARY)
def test_binary_cross_entropy_is_that_of_the_probabilities(name: str, tmp_path: Path) -> None:
    made = BINARY[name]
    p = probabilities(made, x=X)
    label = RNG.integers(0, 2, p.shape).astype(np.float32)
    found, _ = told_first(made, tmp_path, "bce_with_logits", x=X, label=label)
    assert found == pytest.approx(binary(p, label), rel=1e-5)


@pytest.mark.parametrize("turned", [False, True])
def test_divergence_is_that_of_the_probabilities(turned: bool, tmp_path: Path) -> None:
    body = "p = Softmax (z)  t = Transpose <perm = [1, 0]> (p)  y = Transpose (t)" if turned else "y = Softmax (z)"
    made = flat(body, "n, 3", 3)
    wanted = RNG.dirichlet([1, 1, 1], 40)
    found, _ = told_first(made, tmp_path, "kl_div", x=X, label=wanted.astype(np.float32))
    assert found == pytest.approx((wanted * np.log(wanted / probabilities(made, x=X))).mean(), rel=1e-4)


REFUSED: dict[str, tuple[onnx.ModelProto, str, Any, str]] = {
    "many of yes and no": (flat("y = Sigmoid (z)", "n, 6", 6), "cross_entropy", MANY, "loss=bce_with_logits"),
    "one of classes": (
        flat("p = Softmax (z)  y = Gather <axis = 1> (p, last)", "n, 1", 3),
        "bce_with_logits",
        TWO[:, None].astype(np.float32),
        "loss=cross_entropy",
    ),
    "another activation": (flat("y = HardSigmoid (z)", "n, 1", 1), "bce_with_logits", TWO[:, None] * 1.0, "loss=mse"),
    "zeros beside": (
        flat("p = Sigmoid (z)  y = Trilu (p)", "n, 6", 6),
        "bce_with_logits",
        np.ones((40, 6), np.float32),
        "loss=mse",
    ),
    "classes of two heads": (
        flat("p = Softmax (z)  v = Neg (z)  q = Softmax (v)  y = Concat <axis = 1> (p, q)", "n, 6", 3),
        "cross_entropy",
        MANY,
        "loss=mse",
    ),
    "pairs of several": (
        flat("p = Sigmoid (z)  q = Sub (one, p)  y = Concat <axis = 1> (q, p)", "n, 6", 3),
        "cross_entropy",
        MANY,
        "loss=mse",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_probabilities_are_refused(name: str, tmp_path: Path) -> None:
    made, loss, label, way = REFUSED[name]
    with pytest.raises(amp.errors.ArgumentError, match=rf"'y'.* lies between 0 and 1.*\(target\).*{way}"):
        amp.fit(made, tmp_path / "o.onnx", data={"x": X, "label": label}, loss=loss)
    if name == "another activation":
        amp.fit(made, tmp_path / "o.onnx", data={"x": X, "label": label}, loss="mse")


def test_shapes_are_known_behind_operators_that_onnx_says_nothing_of(tmp_path: Path) -> None:
    """scikit-learn's Scaler: ONNX's inference knows the element type behind the Cast, and no shape."""
    made = model(
        "net (float[n, 6] x) => (int64[n, 1] best, float[n, 3] y) { s = ai.onnx.ml.Scaler <offset = [0.5], "
        "scale = [2.0]> (x)  c = Cast <to = 1> (s)  h = MatMul (c, w)  a = Relu (h)  z = MatMul (a, v)  "
        "p = Softmax (z)  y = Identity (p)  best = ArgMax <axis = 1> (y) }",
        w=(6, 8),
        v=(8, 3),
    )
    found, _ = told_first(made, tmp_path, "cross_entropy", x=X, label=FEW)
    assert found == pytest.approx(likely(probabilities(made, x=X), FEW), rel=1e-5)
