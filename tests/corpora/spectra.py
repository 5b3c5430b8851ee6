"""Models written as text around the constants of a spectrum: Fourier bases, and filters of bands."""

from __future__ import annotations

import numpy as np
import onnx

#: Samples of a window.
WINDOW = 128


def model(text: str, **weights: np.ndarray) -> onnx.ModelProto:
    """An ONNX text, and initializers for the names that nothing in it makes."""
    found = onnx.parser.parse_model(text)
    found.graph.initializer.extend(
        onnx.numpy_helper.from_array(array.astype(np.int64 if array.dtype.kind == "i" else np.float32), name)
        for name, array in weights.items()
    )
    onnx.checker.check_model(found)
    return found


def basis(samples: int = WINDOW) -> np.ndarray:
    """Windowed cosines, then sines: a short-time Fourier transform as a convolution's weights."""
    angles = 2 * np.pi * np.outer(np.arange(samples // 2 + 1), np.arange(samples)) / samples
    return (np.concatenate([np.cos(angles), -np.sin(angles)]) * np.hanning(samples)).astype(np.float32)


def bands(count: int, bins: int) -> np.ndarray:
    """Triangular filters, [bins, count]."""
    centres, places = np.linspace(0, bins - 1, count + 2), np.arange(bins)[:, None]
    rise, fall = (places - centres[:-2]) / np.diff(centres)[:-1], (centres[2:] - places) / np.diff(centres)[1:]
    return np.clip(np.minimum(rise, fall), 0, None).astype(np.float32)
