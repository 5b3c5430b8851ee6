"""Col2Im (``torch.nn.Fold``): columns, each a window of an image, added up where the windows lie.

Columns are [N, C * taps, windows], the taps of a channel side by side:
https://onnx.ai/onnx/operators/onnx__Col2Im.html. The gradient takes every window out of the image's.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.opdef import gradient, lowering_rule, traits
from amp_transpiler.ops.common import Grads, integers, size_of
from amp_transpiler.ops.window import Window, window_by

traits("Col2Im", carries_large=True)


def _window(op: Operator, image: Sequence[int], block: Sequence[int]) -> Window:
    rank = len(image)
    pads = op.attrs.get("pads") or [0] * 2 * rank
    whole = [n + b + a for n, b, a in zip(image, pads[:rank], pads[rank:], strict=True)]
    reach = window_by(op.attrs, block, image, image)
    target = [(n - x) // s + 1 for n, x, s in zip(whole, reach.extent, reach.strides, strict=True)]
    return window_by(op.attrs, block, image, target)


@lowering_rule("Col2Im", native=True)
def col2im(e: Emitter, op: Operator, x: Value, image_shape: Value, block_shape: Value) -> list[Value]:
    """A transposed convolution of each channel whose kernel has a one for each tap: CUDA has no kernel of Col2Im."""
    image, block = e.known(op.input(1)), e.known(op.input(2))
    if e.at.host or image is None or block is None:
        return [e.op("Col2Im", x, image_shape, block_shape, outputs=None, **op.attrs)]
    window = _window(op, image.tolist(), block.tolist())
    batch, rows, taps = size_of(x)[0], size_of(x)[1], len(window.taps)
    values = e.reshape(x, (batch * rows // taps, taps, *window.target))
    values = e.f32(values) if x.dtype == "bfloat16" else values  # no such ConvTranspose
    ones = e.const(np.eye(taps).reshape(taps, 1, *window.kernel), values.dtype)
    added = window.scatter(e, values, ones, 1)
    return [e.cast(e.reshape(added, (batch, rows // taps, *window.source)), x.dtype)]


@gradient("Col2Im", "x1 x2 dy0", inputs=(0,), native=True)
def col2im_gradient(e: Emitter, op: Operator, image_shape: Value, block_shape: Value, dy: Value) -> Grads:
    image, block = integers(e, op, 0, "image_shape"), integers(e, op, 1, "block_shape")
    assert image is not None and block is not None
    window = _window(op, image, block)
    batch, channels = size_of(dy)[:2]
    wide = e.f32(dy) if dy.dtype == "bfloat16" else dy  # no such Pad
    padded, positions = window.pad(e, wide, 2), prod(window.target)
    taps = [e.reshape(window.read(e, padded, tap, 2), (batch, channels, 1, positions)) for tap in window.taps]
    columns = e.Concat(*taps, axis=2, shape=(batch, channels, len(taps), positions))
    return [e.cast(e.reshape(columns, (batch, channels * len(taps), positions)), dy.dtype)]
