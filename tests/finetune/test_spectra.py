"""What a spectrum is made with is no parameter: windows, Fourier bases and filter banks, however they are written."""

from __future__ import annotations

import numpy as np
import pytest

import amp_transpiler as amp
from tests.corpora.spectra import WINDOW, bands, basis, model


def test_constants_of_a_spectrum_are_no_parameters() -> None:
    """Window, Fourier basis and bands as matrix products; filters that were learned are parameters."""
    rng, bins = np.random.default_rng(0), WINDOW // 2 + 1
    text = """<ir_version: 8, opset_import: ["" : 17]> net (float[8,20,128] frames) => (float[8,20,20] y) {
      windowed = Mul(frames, window)  both = MatMul(windowed, transform)  re, im = Split <axis = 2> (both, halves)
      re2 = Mul(re, re)  im2 = Mul(im, im)  power = Add(re2, im2)  banded = MatMul(power, bank)
      above = Add(banded, eps)  logged = Log(above)  y = MatMul(logged, w)
    }"""
    weights = {
        "window": np.hanning(WINDOW),
        "transform": np.fft.rfft(np.eye(WINDOW)),
        "bank": bands(20, bins),
        "w": rng.normal(0, 1, (20, 20)),
        "eps": np.array(1e-9),
        "halves": np.array([bins] * 2),
    }
    weights["transform"] = np.concatenate([weights["transform"].real, weights["transform"].imag], 1)
    assert [v.name for v in amp.Program.from_onnx(model(text, **weights)).parameters] == ["w"]
    learned = {name: rng.normal(0, 1, weights[name].shape) for name in ("transform", "bank")}
    found = amp.Program.from_onnx(model(text, **{**weights, **learned})).parameters
    assert {v.name for v in found} == {"window", "transform", "bank", "w"}


def test_a_basis_over_frames_that_are_channels_is_no_parameter() -> None:
    """As Keras has it: the samples of a window are the channels of a convolution of one place."""
    text = """<ir_version: 8, opset_import: ["" : 17]> net (float[8,128,20] frames) => (float[8,4,20] y) {
      re = Conv(frames, real)  im = Conv(frames, imag)  re2 = Mul(re, re)  im2 = Mul(im, im)  power = Add(re2, im2)
      y = Conv(power, w)
    }"""
    real, imag = np.split(basis()[..., None], 2)
    weights = {"real": real, "imag": imag, "w": np.random.default_rng(0).normal(0, 1, (4, WINDOW // 2 + 1, 1))}
    assert [v.name for v in amp.Program.from_onnx(model(text, **weights)).parameters] == ["w"]
    linear = text.replace("Mul(re, re)", "Relu(re)").replace("Mul(im, im)", "Relu(im)")
    found = amp.Program.from_onnx(model(linear, **weights)).parameters
    assert {v.name for v in found} == {"real", "imag", "w"}


@pytest.mark.parametrize("learned", [False, True])
def test_a_stack_of_cosines_and_sines_is_no_parameter(learned: bool) -> None:
    """A transform of real numbers as tf2onnx writes it."""
    text = """<ir_version: 8, opset_import: ["" : 17]> net (float[8,128] x) => (float[65,8] y) {
      along = Transpose <perm = [1, 0]> (x)  both = MatMul(stack, along)  re = Gather <axis = 0> (both, zero)
      im = Gather <axis = 0> (both, one)  re2 = Pow(re, two)  im2 = Pow(im, two)  power = Add(re2, im2)
      root = Sqrt(power)  y = MatMul(w, root)
    }"""
    rng, numbers = np.random.default_rng(0), {"zero": np.array(0), "one": np.array(1), "two": np.array(2.0)}
    stack = rng.normal(0, 1, (2, 65, 128)) if learned else basis().reshape(2, 65, 128)
    found = amp.Program.from_onnx(model(text, stack=stack, w=rng.normal(0, 1, (65, 65)), **numbers)).parameters
    assert {v.name for v in found} == ({"stack", "w"} if learned else {"w"})
