"""``amp.fit`` on what exports bring: several outputs, predictions of pixels, and types whose range needs no guard."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import amp_transpiler as amp
from tests.helpers.fitting import FAST, features, linear


def parsed(text: str, **weights: tuple[int, ...]) -> onnx.ModelProto:
    """A model of this text with random weights of these shapes."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]>\n{text}')
    rng = np.random.default_rng(5)
    for name, shape in weights.items():
        array = rng.normal(size=shape).astype(np.float32) / 3
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def two_heads() -> onnx.ModelProto:
    return parsed(
        "net (float[n, 4] x) => (float[n, 3] classes, float[n, 1] number) { h = Gemm (x, w, b)\n t = Tanh (h)\n "
        "classes = MatMul (t, c)\n number = MatMul (t, r) }",
        w=(4, 8),
        b=(8,),
        c=(8, 3),
        r=(8, 1),
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("mode", ["fp32", "mixed", "pure"])
@pytest.mark.parametrize("save", ["fp32", "pure"])
def test_an_output_that_the_loss_does_not_read_stays_as_it_was(
    save: str, mode: str, dtype: str, tmp_path: Path
) -> None:
    """Its weights have no masters; they are rounded once, when written, and not at all in fp32."""
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    with pytest.warns(UserWarning, match="get no gradient from this loss, and are not updated: 'r'"):
        amp.fit(
            two_heads(),
            tmp_path / "out.onnx",
            data={"x": x, "label": x[:, :3].argmax(1)},
            mode=mode,
            save=save,
            dtype=dtype,
            lr=0.01,
        )
    before = {t.name: onnx.numpy_helper.to_array(t) for t in two_heads().graph.initializer}
    after = {t.name: t for t in onnx.load(tmp_path / "out.onnx").graph.initializer}
    assert after["r"].data_type == getattr(onnx.TensorProto, "FLOAT" if save == "fp32" else dtype.upper())
    found = onnx.numpy_helper.to_array(after["r"])
    assert np.array_equal(found, before["r"].astype(found.dtype))
    assert not np.array_equal(onnx.numpy_helper.to_array(after["c"]), before["c"].astype(found.dtype)), "it is trained"


def pixels(batch: str = "n") -> onnx.ModelProto:
    """Three classes for each pixel, along the second dimension, as torch has them."""
    return parsed(
        f"net (float[{batch}, 1, h, 6] image) => (float[{batch}, 3, h, 6] scores) "
        "{ f = Conv <pads = [1, 1, 1, 1]> (image, w, b)\n r = Relu (f)\n scores = Conv (r, v, c) }",
        w=(8, 1, 3, 3),
        b=(8,),
        v=(3, 8, 1, 1),
        c=(3,),
    )


@pytest.mark.parametrize("column", [False, True])
@pytest.mark.parametrize("mode", ["fp32", "mixed", "pure"])
def test_pixels_are_classified(mode: str, column: bool, tmp_path: Path) -> None:
    """What is told is what bare onnxruntime and numpy find, labels that do not count left out."""
    image = np.random.default_rng(1).random((60, 1, 5, 6)).astype(np.float32)
    label = (image[:, 0] > 0.3).astype(np.int64) + (image[:, 0] > 0.6)
    label[:, 0, 0] = -100
    data = {"image": image, "label": label[..., None] if column else label}
    result = amp.fit(
        pixels(), tmp_path / "out.onnx", data=data, test=data, mode=mode, save="fp32", lr=0.03, epochs=6, batch_size=12
    )
    session = ort.InferenceSession(str(tmp_path / "out.onnx"), providers=["CPUExecutionProvider"])
    (scores,) = session.run(None, {"image": image})
    assert scores.shape == (60, 3, 5, 6), "the written model has its classes where they were"
    counted = label >= 0
    last = result.history[-1]
    assert last.test_metric == pytest.approx((scores.argmax(1) == label)[counted].mean(), abs=5e-3)
    exact = scores.astype(np.float64)
    likely = exact - np.log(np.exp(exact).sum(1, keepdims=True))
    chosen = np.take_along_axis(likely, np.maximum(label, 0)[:, None], 1)[:, 0]
    first = result.history[0]
    assert last.test_loss == pytest.approx(-chosen[counted].sum() / counted.sum(), rel=0.02)
    assert last.test_loss is not None and first.test_loss is not None and last.test_loss < 0.8 * first.test_loss


def test_classes_last_stay_last_and_other_labels_are_refused(tmp_path: Path) -> None:
    tokens = parsed("net (float[n, 5, 4] x) => (float[n, 5, 3] y) { y = MatMul (x, w) }", w=(4, 3))
    x = np.random.default_rng(0).normal(size=(64, 5, 4)).astype(np.float32)
    result = amp.fit(tokens, tmp_path / "a.onnx", data={"x": x, "label": x[..., :3].argmax(2)}, lr=0.03, epochs=8)
    assert result.history[-1].metric > 0.8
    with pytest.raises(amp.errors.FeedError, match=re.escape("'label' has the shape [64, 4]")):
        amp.fit(tokens, tmp_path / "b.onnx", data={"x": x, "label": np.zeros((64, 4), int)})


@pytest.mark.parametrize("dtype, kept", [("float16", True), ("bfloat16", False)])
def test_what_leaves_float16_alone_is_no_matter_in_bfloat16(dtype: str, kept: bool, tmp_path: Path) -> None:
    data: dict[str, Any] = {"x": np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32) * 1e6}
    data["label"] = data["x"][:, :3].argmax(1)
    told: list[str] = []
    with pytest.warns(UserWarning, match="'r'"):
        amp.fit(two_heads(), tmp_path / "out.onnx", data=data, mode="pure", dtype=dtype, lr=1e-5, say=told.append)
    assert any("not fit float16" in line for line in told) == kept, told


def test_an_output_without_classes_names_one_that_has_them(tmp_path: Path) -> None:
    model = two_heads()
    model.graph.output.reverse()
    model.graph.node.append(onnx.helper.make_node("Flatten", ["number"], ["flat"]))
    model.graph.node.append(onnx.helper.make_node("ReduceSum", ["flat", "one"], ["sum"], keepdims=0))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), "one"))
    model.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("sum", onnx.TensorProto.FLOAT, ["n"]))
    with pytest.raises(amp.errors.ArgumentError, match="'sum' .* has no classes; .* choose --output classes"):
        amp.fit(model, tmp_path / "out.onnx", data={"x": np.ones((4, 4)), "label": np.zeros(4, int)}, flags=True)


def test_messages_name_the_way_out(tmp_path: Path) -> None:
    x = np.zeros((40, 4), np.float32)
    one = parsed("net (float[n, 4] x) => (float[n, 1] y) { y = MatMul (x, w) }", w=(4, 1))
    with pytest.raises(amp.errors.FeedError, match="needs the loss bce_with_logits"):
        amp.fit(one, tmp_path / "a.onnx", data={"x": x, "label": np.ones((40, 1), np.float32)})
    few = parsed("net (float[n, 4] x) => (float[n, 3] y) { y = MatMul (x, w) }", w=(4, 3))
    for shares in (np.eye(3)[np.ones(40, int)], np.ones((40, 3), int)):
        said = r"'label' has the shape \[40, 3\], a number for each class.*index of the class.*argmax.*kl_div"
        with pytest.raises(amp.errors.FeedError, match=said):
            amp.fit(few, tmp_path / "a.onnx", data={"x": x, "label": shares})
    scalar = parsed("net (float[n, 4] x, float s) => (float[n, 3] y) { z = Mul (x, s)\n y = MatMul (z, w) }", w=(4, 3))
    with pytest.raises(amp.errors.FeedError, match="no input is left to be fed"):
        amp.fit(scalar, tmp_path / "a.onnx", data={"x": x, "label": np.ones(40, int)}, values={"x": 0.0, "s": 1.0})


def test_labels_may_be_called_like_an_output(tmp_path: Path) -> None:
    """Data of x and y, and a model whose output is y: the file is that of labels called otherwise."""
    data = features(40)
    named = {"x": data["x"], "y": data["label"]}
    amp.fit(linear(), tmp_path / "a.onnx", data=data, test=data, epochs=2, **FAST)
    for epochs in (1, 2):  # and it goes on from a checkpoint
        state = tmp_path / "state"
        amp.fit(
            linear(), tmp_path / "b.onnx", data=named, test=named, label="y", epochs=epochs, checkpoint=state, **FAST
        )
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()
    for taken in ("x", "w"):
        with pytest.raises(amp.errors.ArgumentError, match=f"label={taken}: the model has a tensor of that name"):
            amp.fit(linear(), tmp_path / "c.onnx", data={**data, taken: data["label"]}, label=taken)
