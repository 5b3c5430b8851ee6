"""Fourier transforms in training: products with a matrix of cosines and sines, whose gradients are products too.

A transform of n samples to m frequencies, complex numbers side by side, is [2n] to [2m]:
https://onnx.ai/onnx/operators/onnx__DFT.html, https://onnx.ai/onnx/operators/onnx__STFT.html. CUDA has no kernel of
either, but the ones of products and convolutions.
"""

from __future__ import annotations

import numpy as np

from amp_transpiler.ir.constant_data import constant_number
from amp_transpiler.ir.decompose import Parts, decomposition
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import traits
from amp_transpiler.ir.reasons import Kind
from amp_transpiler.ops.common import Maybe

#: Elements of the largest matrix, 256 MiB in fp32: from 4,096 complex numbers to as many.
_LARGEST = 1 << 26

traits("DFT")
traits("STFT", settings=(2,))


@decomposition("DFT")
def dft(d: Parts, op: Operator, x: Variable, length: Maybe = None, axis: Maybe = None) -> list[Variable]:
    """X [..., n, ..., 1 or 2] along an axis; to 2 parts, or to the real one of an inverse from one side."""
    rank, back, one_sided = d.rank(x), bool(d.whole("inverse", 0)), bool(d.whole("onesided", 0))
    at = (-2 if axis is None else _number(d, axis, "axis")) % rank
    samples, parts = d.size(x, at), d.size(x, rank - 1)
    if samples is None or parts is None:
        raise d.open_size(f"the size of '{x.name}' along the axis that is transformed, or along the last,")
    whole = 2 * (samples - 1) if back and one_sided else samples
    whole = whole if length is None else _number(d, length, "dft_length")
    read = whole // 2 + 1 if back and one_sided else whole
    if read < samples:
        x, samples = d.Slice(x, [0], [read], [at]), read
    matrix = _matrix(d, samples, whole, back, one_sided)[:, :parts]
    made = matrix.shape[2:]
    order = [*(i for i in range(rank - 1) if i != at), at, rank - 1]
    with d.fp32(Kind.FOURIER):
        rows = d.Reshape(_ordered(d, x, order), [*[0] * (rank - 2), samples * parts])
        product = d.MatMul(rows, d.const(matrix.reshape(samples * parts, -1), x.dtype))
        y = d.Reshape(product, [*[0] * (rank - 2), *made])
        return [_ordered(d, y, np.argsort(order).tolist())]


@decomposition("STFT")
def stft(
    d: Parts, op: Operator, x: Variable, step: Variable, window: Maybe = None, length: Maybe = None
) -> list[Variable]:
    """The signal [B, N, 1 or 2] to [B, frames, frequencies, 2]: a convolution with a filter for each part."""
    size = d.size(window, 0) if window is not None else None
    size = _number(d, length, "frame_length") if length is not None else size
    parts = 1 if d.rank(x) == 2 else d.size(x, 2)
    if size is None or parts is None:
        raise d.open_size("the length of its frames, or the last axis of its signal,")
    matrix = _matrix(d, size, size, False, bool(d.whole("onesided", 1)))[:, :parts]
    frequencies = matrix.shape[2]
    with d.fp32(Kind.FOURIER):
        filters = d.const(matrix.reshape(size, parts, -1).transpose(2, 1, 0), x.dtype)
        filters = filters if window is None else d.Mul(filters, d.cast(window, x.dtype))
        signal = d.Unsqueeze(x, [1]) if d.rank(x) == 2 else d.Transpose(x, perm=[0, 2, 1])
        y = d.Conv(signal, filters, strides=[_number(d, step, "frame_step")])
        return [d.Reshape(d.Transpose(y, perm=[0, 2, 1]), [0, 0, frequencies, 2])]


def _matrix(d: Parts, samples: int, whole: int, back: bool, one_sided: bool) -> np.ndarray:
    """What each part of each sample adds to each part of each frequency: [samples, 2, frequencies, 2], or 1 last.

    Of ``whole`` samples those behind the given ones are 0. Back from one side, ``samples`` are frequencies that stand
    for two each, but for the first and, of an even number, the last.
    """
    made = whole // 2 + 1 if one_sided and not back else whole
    if 4 * samples * made > _LARGEST or whole < 1:
        raise d.error(f"a transform of {whole:,} samples to {made:,} numbers is not written as a product")
    turns = np.outer(np.arange(samples), np.arange(made)) % whole * (2 * np.pi / whole)
    cosines, sines = np.cos(turns), np.sin(turns) * (1 if back else -1)
    matrix = np.stack([np.stack([cosines, sines], -1), np.stack([-sines, cosines], -1)], 1)
    if back and one_sided:
        twice = np.where((np.arange(samples) == 0) | (2 * np.arange(samples) == whole), 1, 2)
        matrix = matrix[..., :1] * twice.reshape(-1, 1, 1, 1)
    return matrix / whole if back else matrix


def _number(d: Parts, variable: Variable, name: str) -> int:
    number = constant_number(variable)
    if number is None:
        raise d.error(f"its {name} is computed")
    return int(number)


def _ordered(d: Parts, x: Variable, order: list[int]) -> Variable:
    return x if order == sorted(order) else d.Transpose(x, perm=order)
