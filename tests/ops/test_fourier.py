"""Fourier transforms in training: what numpy computes in float64, and the gradients of a linear operator."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import amp_transpiler as amp
from amp_transpiler.errors import GradientError
from amp_transpiler.nn import functional as F
from tests.helpers.linear_operators import check_linear
from tests.helpers.sessions import run

Array = np.ndarray[Any, Any]
#: Shape of the input, attributes, dft_length and axis.
DFTS: dict[str, tuple[tuple[int, ...], dict[str, int], int | None, int | None]] = {
    "real": ((2, 10, 1), {}, None, None),
    "complex": ((2, 10, 2), {}, None, None),
    "one side": ((2, 10, 1), {"onesided": 1}, None, None),
    "one side, odd": ((2, 9, 1), {"onesided": 1}, None, None),
    "an axis": ((5, 6, 3, 2), {}, None, 1),
    "the first axis": ((5, 6, 3, 1), {"onesided": 1}, None, 0),
    "padded": ((2, 10, 1), {}, 16, None),
    "cut": ((2, 10, 2), {}, 7, None),
    "back": ((2, 10, 2), {"inverse": 1}, None, None),
    "back from a real one": ((2, 10, 1), {"inverse": 1}, None, -2),
    "back from one side": ((2, 6, 2), {"inverse": 1, "onesided": 1}, None, None),
    "back from one side, odd": ((2, 6, 2), {"inverse": 1, "onesided": 1}, 11, None),
    "back from one side, cut": ((2, 6, 2), {"inverse": 1, "onesided": 1}, 6, None),
}
#: Shape of the signal, frame_step, window, frame_length, onesided.
STFTS: dict[str, tuple[tuple[int, ...], int, int | None, int | None, int]] = {
    "window": ((2, 40, 1), 5, 16, None, 1),
    "length": ((2, 41, 1), 7, None, 15, 1),
    "both, two sides": ((1, 40, 1), 4, 16, 16, 0),
    "complex": ((2, 40, 2), 5, 16, None, 0),
}


def numbers(x: Array) -> Array:
    """[..., 1 or 2] as complex numbers."""
    wide = x.astype(np.float64)
    return wide[..., 0] + 1j * (wide[..., 1] if x.shape[-1] == 2 else 0)


def pairs(x: Array) -> Array:
    return np.stack([x.real, x.imag], -1)


def dft(name: str, x: Array) -> Array:
    _, attrs, length, axis = DFTS[name]
    at = (-2 if axis is None else axis) % x.ndim
    if attrs.get("inverse") and attrs.get("onesided"):
        return np.fft.irfft(numbers(x), length, at)[..., None]
    y = (np.fft.ifft if attrs.get("inverse") else np.fft.fft)(numbers(x), length, at)
    return pairs(y.take(range(y.shape[at] // 2 + 1), at) if attrs.get("onesided") else y)


def stft(name: str, x: Array) -> Array:
    _, step, window, length, one_sided = STFTS[name]
    size = length or window or 0
    windowed = np.ones(size) if window is None else np.hanning(window).astype(np.float32)
    begins = range(0, x.shape[1] - size + 1, step)
    y = np.stack([np.fft.fft(numbers(x)[:, at : at + size] * windowed) for at in begins], 1)
    return pairs(y[..., : size // 2 + 1] if one_sided else y)


def model(type_: str, name: str) -> onnx.ModelProto:
    """y = type_(x w, …): a parameter lies before it. The batch is open where it is not transformed."""
    held: dict[str, Any]
    if type_ == "DFT":
        shape, attrs, length, axis = DFTS[name]
        held = {"length": length, "axis": axis}
    else:
        shape, step, window, length, one_sided = STFTS[name]
        attrs = {"onesided": one_sided}
        held = {"step": step, "window": None if window is None else np.hanning(window).astype(np.float32)}
        held["length"] = length
    names = [key if value is not None else "" for key, value in held.items()]
    while names and not names[-1]:
        names.pop()
    batch = shape[0] if held.get("axis") == 0 else "batch"
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "w"], ["p"]), helper.make_node(type_, ["p", *names], ["y"], **attrs)],
        "net",
        [helper.make_tensor_value_info("x", 1, [batch, *shape[1:]])],
        [helper.make_tensor_value_info("y", 1, [None] * (len(shape) + (type_ == "STFT")))],
        [numpy_helper.from_array(np.ones(shape[1:], np.float32), "w")]
        + [numpy_helper.from_array(np.asarray(value), key) for key, value in held.items() if value is not None],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


@pytest.mark.parametrize(
    ("type_", "name"), [*(("DFT", name) for name in DFTS), *(("STFT", name) for name in STFTS)], ids=str
)
def test_values_and_gradients(type_: str, name: str) -> None:
    made, by_numpy = model(type_, name), {"DFT": dft, "STFT": stft}[type_]
    rng = np.random.default_rng(0)
    x = rng.standard_normal((DFTS if type_ == "DFT" else STFTS)[name][0]).astype(np.float32)
    check_linear(made, x, rng.standard_normal(x.shape[1:], np.float32), lambda values: by_numpy(name, values))
    if name != "back from one side, cut":  # there onnxruntime's kernel computes something else than numpy
        expected = by_numpy(name, x)
        close = {"rtol": 1e-5, "atol": 1e-5 * np.abs(expected).max()}
        np.testing.assert_allclose(run(made, {"x": x}, "DISABLE_ALL")[0], expected, **close)


def test_in_16_bit_the_transform_stays_fp32() -> None:
    program = amp.Program.from_onnx(model("STFT", "window"))
    amp.prepare_training(program)
    with amp.program_guard(program, program.startup), amp.unique_name.guard():
        loss = F.mean(program.outputs[0])
        optimizer = amp.decorate(amp.optimizer.SGD(0.1, multi_precision=True), use_pure_fp16=True, use_fp16_guard=False)
        optimizer.minimize(loss)
    (transform,) = (op for op in program.operators if op.type == "Conv")
    assert transform.reason == "fp32: a Fourier transform"
    assert transform.outputs[0] is not None and transform.outputs[0].dtype == "float32"


@pytest.mark.parametrize(
    ("held", "told"),
    [
        (
            "length = Constant <value_int = 16777216> ()",
            "a transform of 16,777,216 samples to 16,777,216 numbers is not",
        ),
        ("length = ReduceMax <keepdims = 0> (n)", "its dft_length is computed"),
    ],
)
def test_what_is_no_product_is_named(held: str, told: str) -> None:
    text = f"net (float[2,10,1] x, int64[1] n) => (float[2,m,2] y) {{ {held} p = Mul (x, w) y = DFT (p, length) }}"
    made = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 20]> {text}')
    made.graph.initializer.append(numpy_helper.from_array(np.ones((10, 1), np.float32), "w"))
    program = amp.Program.from_onnx(made)
    amp.prepare_training(program)
    with amp.program_guard(program, program.startup), pytest.raises(GradientError, match=f"{told}.*register a rule"):
        amp.append_backward(F.mean(program.outputs[0]))


def test_an_open_length_says_how_to_fix_it() -> None:
    """As FNet has it: a transform along the tokens of a text."""
    text = """<ir_version: 9, opset_import: ["" : 20]>
    net (float[2,n,4,1] x) => (float[2,n,4,2] y) <int64 along = {1}> {
      t = Transpose <perm = [0, 1, 3, 2]> (x)  m = MatMul (t, w)  p = Transpose <perm = [0, 1, 3, 2]> (m)
      y = DFT (p, "", along)
    }"""
    made = onnx.parser.parse_model(text)
    made.graph.initializer.append(numpy_helper.from_array(np.eye(4, dtype=np.float32) + 0.5, "w"))

    def differentiated(**options: Any) -> None:
        program = amp.Program.from_onnx(made)
        amp.prepare_training(program, **options)
        with amp.program_guard(program, program.startup):
            amp.append_backward(F.mean(program.outputs[0]))

    with pytest.raises(GradientError, match=r"size of 'p' along .* is not fixed .*prepare_training.*feed_shapes"):
        differentiated()
    differentiated(feed_shapes={"x": [2, 6, 4, 1]})
