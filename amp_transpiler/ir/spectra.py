"""Constants of a spectrum: what turns a signal into frequencies, and what gathers these into bands.

Networks on sound begin with a short-time Fourier transform, which exporters write as a convolution or a matrix
product with windowed cosines and sines, and often go on with a bank of triangular filters. Neither was trained, and
training would break both: a filter that becomes negative makes the logarithm behind it NaN.
"""

from __future__ import annotations

import math

import numpy as np

from amp_transpiler.ir.constant_data import held_data
from amp_transpiler.ir.infer import static
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import moves, traits_of
from amp_transpiler.ir.tensors import LOOKED_THROUGH, as_array

#: Samples of a window from which on a Fourier transform is looked for.
_SAMPLES = 16
#: Share of the rows that have to be the frequency of their place, and of the zeros in a bank of filters.
_SHARE = 0.9
_ZEROS = 0.75
_HOPS = 4
#: What Fourier transforms and filter banks are written with, beside convolutions.
_PRODUCTS = frozenset({"MatMul", "Gemm"})
#: What powers and magnitudes are made with, once there are squares.
_MAGNITUDES = frozenset({"Add", "Sum", "Sqrt", "ReduceSum", "Pow"})


def spectral(variable: Variable, uses: list[tuple[Operator, int]]) -> str:
    """As what constant of a spectrum a tensor with content is used: "a window", "a Fourier basis", "a filter bank"; or
    ""."""
    shape = static(variable.shape)
    if not shape or not uses or math.prod(shape) > LOOKED_THROUGH:
        return ""
    if all(op.full_type == "Mul" and _meets_fourier(op.output(0)) for op, _ in uses):
        return "a window"
    if len(shape) < 2:
        return ""
    for op, slot in uses:
        if op.domain or (op.type not in _PRODUCTS and (op.type not in ("Conv", "ConvTranspose") or slot != 1)):
            return ""
    if all(_may_transform(op, slot, shape) for op, slot in uses) and _is_fourier(variable, uses[0][0].type):
        return "a Fourier basis"
    if all(_is_power(op.input(1 - slot if slot < 2 else 0)) for op, slot in uses) and _is_filter_bank(variable):
        return "a filter bank"
    return ""


def _may_transform(op: Operator, slot: int, shape: tuple[object, ...]) -> bool:
    """Whether it may compute a Fourier transform: a convolution of one channel, a product that is squared then, be that
    of matrices, which may be stacked, or of a convolution with the samples of a window as its channels."""
    product = len(shape) in (2, 3) and slot < 2
    if op.type in ("Conv", "ConvTranspose"):
        if int(op.attrs.get("group", 1)) != 1:
            return False
        if shape[1] == 1:
            return True
        product = op.type == "Conv" and all(size == 1 for size in shape[2:])
    return product and _is_squared(op.output(0), _HOPS)


def _is_fourier(variable: Variable, reader: str) -> bool:
    array = np.asarray(as_array(variable.data), np.float32)
    if reader in ("Conv", "ConvTranspose"):
        return _are_waves(array.reshape(array.shape[0], -1))
    return any(_are_waves(m.reshape(-1, m.shape[-1])) for m in (array, np.ascontiguousarray(array.swapaxes(-1, -2))))


def _are_waves(rows: np.ndarray) -> bool:
    """Whether each row, but for those of zeros, is a windowed wave of the frequency of its place.

    Cosines lie before the sines, beside them, or alone.
    """
    count, samples = rows.shape
    if (
        rows.size > LOOKED_THROUGH
        or samples < _SAMPLES
        or count < samples // 2
        or count > 2 * samples
        or not np.isfinite(rows).all()
    ):
        return False
    spectrum = np.abs(np.fft.rfft(rows, axis=1))
    top = spectrum.max(axis=1)
    found, waves = spectrum.argmax(axis=1), top > 1e-6 * max(float(top.max()), 1e-30)
    places = np.arange(count)
    for expected in (places, places % ((count + 1) // 2), places // 2):
        if waves.any() and (np.abs(found - expected)[waves] <= 1).mean() >= _SHARE:
            return True
    return False


def _meets_fourier(variable: Variable | None) -> bool:
    """Whether all that reads the tensor, moved about or not, is its product with a Fourier basis."""
    readers = variable.readers if variable is not None else []
    for op, slot in readers:
        made = op.output(0)
        if isinstance(slot, int) and moves(op, slot) and _meets_fourier(made):
            continue
        other = op.input(1 - slot) if isinstance(slot, int) and slot < 2 else None
        if other is None or other.data is None or len(other.shape or ()) < 2 or op.domain:
            return False
        if op.type not in (*_PRODUCTS, "Conv") or not _may_transform(op, 1 - int(slot), other.shape or ()):
            return False
        if not _is_fourier(other, op.type):
            return False
    return bool(readers)


def _is_filter_bank(variable: Variable) -> bool:
    array = as_array(variable.data)
    return bool(array.size and array.min() >= 0 and (array == 0).mean() >= _ZEROS)


def _is_squared(variable: Variable | None, hops: int) -> bool:
    """Whether the tensor, moved about or not, is multiplied by itself or summed up in squares."""
    for op, slot in variable.readers if variable is not None else ():
        if _squares(op):
            return True
        if isinstance(slot, int) and moves(op, slot) and hops and any(_is_squared(v, hops - 1) for v in op.outputs):
            return True
    return False


def _is_power(variable: Variable | None) -> bool:
    """Whether the tensor is made of squares or magnitudes alone."""
    for _ in range(2 * _HOPS):
        op = variable.producer if variable is not None else None
        if op is None:
            return False
        if op.type == "Abs" or _squares(op):
            return True
        if not moves(op, 0) and op.type not in _MAGNITUDES:
            return False
        variable = op.input(0)
    return False


def _squares(op: Operator) -> bool:
    if traits_of(op).reduces in ("squares", "norm"):
        return True
    if op.type == "Mul":
        return op.input(0) is op.input(1)
    exponent = op.input(1) if op.type == "Pow" else None
    data = None if exponent is None else held_data(exponent)
    return data is not None and np.ravel(as_array(data)).tolist() == [2]
