"""DeformConv's gradient, against central differences in float64."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from tests.helpers.gradcheck import check_gradient

pytestmark = pytest.mark.rules


def deformed(
    x: np.ndarray,
    w: np.ndarray,
    offset: np.ndarray,
    bias: np.ndarray | None = None,
    mask: np.ndarray | None = None,
    **attrs: Any,
) -> list[np.ndarray]:
    """DeformConv, sample by sample, in float64: the evaluator of onnx has places in fp32."""
    strides, dilations = attrs.get("strides", [1, 1]), attrs.get("dilations", [1, 1])
    (batch, channels, *image), (filters, _, *kernel), result = x.shape, w.shape, offset.shape[2:]
    taps = list(np.ndindex(*kernel))
    samples = np.zeros((batch, channels, len(taps), *result))
    for n, channel, (k, tap), at in itertools.product(
        range(batch), range(channels), enumerate(taps), np.ndindex(*result)
    ):
        move = channel * attrs["offset_group"] // channels * len(taps) + k
        place = [
            at[i] * strides[i] - attrs["pads"][i] + tap[i] * dilations[i] + offset[n, 2 * move + i, *at] for i in (0, 1)
        ]
        low = np.floor(place).astype(int)
        for corner in itertools.product((0, 1), repeat=2):
            element = low + corner
            if ((element >= 0) & (element < image)).all():
                weight = np.prod(1 - np.abs(place - element)) * (1 if mask is None else mask[n, move, *at])
                samples[n, channel, k, *at] += weight * x[n, channel, *element]
    groups = attrs.get("group", 1)
    samples = samples.reshape(batch, groups, channels // groups, len(taps), *result)
    weights = w.reshape(groups, filters // groups, channels // groups, len(taps))
    y = np.einsum("ngckhw,gfck->ngfhw", samples, weights).reshape(batch, filters, *result)
    return [y if bias is None else y + bias[:, None, None]]


WIDE = (2, 4, 3, 4), {"group": 2, "offset_group": 2, "pads": [1, 0, 1, 2], "strides": [2, 1]}
DILATED = (1, 2, 4, 3), {"offset_group": 1, "dilations": [2, 1], "pads": [1, 1, 1, 1]}


@pytest.mark.parametrize(("sizes", "attrs", "given"), [(*WIDE, "mask"), (*DILATED, "offsets"), (*DILATED, "bias")])
def test_the_gradient_of_a_deformed_convolution(sizes: tuple[int, ...], attrs: dict[str, Any], given: str) -> None:
    rng = np.random.default_rng(0)
    batch, channels, *image = sizes
    kernel, filters = (2, 3), 4
    strides, dilations, pads = (attrs.get(n, d) for n, d in (("strides", [1, 1]), ("dilations", [1, 1]), ("pads", 0)))
    result = [
        (image[i] + pads[i] + pads[i + 2] - dilations[i] * (kernel[i] - 1) - 1) // strides[i] + 1 for i in range(2)
    ]
    moved = attrs["offset_group"] * 6
    x = rng.standard_normal(sizes)
    w = rng.standard_normal((filters, channels // attrs.get("group", 1), *kernel))
    offsets = rng.integers(-3, 3, (batch, 2 * moved, *result)) + rng.uniform(0.1, 0.9, (batch, 2 * moved, *result))
    bias = rng.standard_normal(filters) if given != "offsets" else None
    mask = rng.uniform(0, 1, (batch, moved, *result)) if given == "mask" else None
    inputs = [x, w, offsets, bias, mask]
    while inputs[-1] is None:
        inputs.pop()
    whole = {**attrs, "kernel_shape": list(kernel)}
    check_gradient("DeformConv", inputs, attrs=whole, forward=lambda *given: deformed(*given, **whole))
