"""Losses of numbers: of differences, of binary labels, of distributions."""

from __future__ import annotations

import numpy as np

from amp_transpiler.errors import ArgumentError
from amp_transpiler.ir.infer import differ
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.ir.types import numpy_dtype
from amp_transpiler.nn.building import FLOATING, Builder, appending, constant, describe, real, variable
from amp_transpiler.nn.calls import function
from amp_transpiler.nn.classification import check_reduction, reduced
from amp_transpiler.nn.elementwise_functions import cast
from amp_transpiler.nn.reduction import sum


def _alike(call: str, input: Variable, label: Variable, reduction: str) -> Builder:
    """Check two floats of one shape and a reduction; what appends the rest."""
    variable(call, "input", input, dtypes=FLOATING)
    variable(call, "label", label, dtypes=FLOATING)
    check_reduction(call, reduction)
    a, b = input.shape, label.shape
    if a is not None and b is not None and differ(a, b):
        raise ArgumentError(f"{call}: input {describe(input)} and label {describe(label)} must have one shape")
    return appending(call)


@function()
def mse_loss(input: Variable, label: Variable, reduction: str = "mean", *, name: str | None = None) -> Variable:
    """(input - label)**2, both float of one shape; ``reduction`` "mean", "sum" or "none"."""
    call = "mse_loss"
    put = _alike(call, input, label, reduction)
    difference = put("Sub", input, label)
    two = np.array(2, numpy_dtype(input.dtype or "float32"))
    square = put("Pow", difference, two)  # Pow, not Mul: a square is computed in fp32
    return reduced(square, reduction)


@function()
def square_error_cost(input: Variable, label: Variable, *, name: str | None = None) -> Variable:
    """(input - label)**2, element by element."""
    return mse_loss(input, label, "none")


def _distance(put: Builder, input: Variable, label: Variable) -> Variable:
    return put("Abs", put("Sub", input, label))


@function()
def l1_loss(input: Variable, label: Variable, reduction: str = "mean", *, name: str | None = None) -> Variable:
    """The absolute difference of two floats of one shape; ``reduction`` "mean", "sum" or "none"."""
    return reduced(_distance(_alike("l1_loss", input, label, reduction), input, label), reduction)


@function()
def smooth_l1_loss(
    input: Variable, label: Variable, reduction: str = "mean", delta: float = 1.0, *, name: str | None = None
) -> Variable:
    """Half the square of the difference d up to ``delta``, then ``delta * abs(d) - delta**2 / 2`` (Huber 1964).

    Both float of one shape; ``reduction`` "mean", "sum" or "none".
    """
    call = "smooth_l1_loss"
    put = _alike(call, input, label, reduction)
    limit = real(call, "delta", delta)
    if limit <= 0:
        raise ArgumentError(f"{call}: delta must be above 0, not {limit:g}")
    distance = _distance(put, input, label)
    near = put("Min", distance, constant(input, limit))  # near * (distance - near / 2)
    half = put("Mul", near, constant(input, 0.5))
    rest = put("Sub", distance, half)
    return reduced(put("Mul", near, rest), reduction)


@function()
def bce_with_logits(
    input: Variable,
    label: Variable,
    reduction: str = "mean",
    weight: Variable | None = None,
    pos_weight: Variable | None = None,
    *,
    name: str | None = None,
) -> Variable:
    """Sigmoid, then binary cross entropy: ``-label * log(p) - (1 - label) * log(1 - p)``, finite for every logit.

    ``input``: float logits. ``label``: float probabilities in [0, 1] of the same shape. ``reduction``: "mean" and
    "sum" (over all elements) give a scalar of shape [], "none" the losses in the shape of the input. Computed as
    ``label * softplus(-input) + (1 - label) * softplus(input)``. ``weight``: a factor of each loss; ``pos_weight``: a
    factor of the label's own term; both broadcast.
    """
    call = "bce_with_logits"
    put = _alike(call, input, label, reduction)
    # softplus(input) - input * label has p - 1 for a slope where the label is 1, of which 16 bit keeps nothing near 0.
    hit = put("Mul", label, put("Softplus", put("Neg", input)))
    if pos_weight is not None:
        hit = put("Mul", pos_weight, hit)
    loss = put("Add", hit, put("Mul", put("Sub", constant(label, 1), label), put("Softplus", input)))
    return reduced(loss if weight is None else put("Mul", loss, weight), reduction)


@function()
def binary_cross_entropy_with_logits(
    logit: Variable,
    label: Variable,
    weight: Variable | None = None,
    reduction: str = "mean",
    pos_weight: Variable | None = None,
    *,
    name: str | None = None,
) -> Variable:
    """:func:`bce_with_logits`, with Paddle's order of arguments."""
    return bce_with_logits(logit, label, reduction, weight, pos_weight)


@function()
def binary_cross_entropy(
    input: Variable,
    label: Variable,
    weight: Variable | None = None,
    reduction: str = "mean",
    *,
    name: str | None = None,
) -> Variable:
    """``-label * log(input) - (1 - label) * log(1 - input)``, the logarithm of 0 being -100, with gradient 0.

    ``input``: float probabilities (of logits: :func:`bce_with_logits`); ``label``: float in [0, 1] of the same shape;
    ``weight``: a factor of each loss, broadcast.
    """
    call = "binary_cross_entropy"
    put = _alike(call, input, label, reduction)

    def logarithm(p: Variable) -> Variable:
        positive = put("Greater", p, constant(p, 0))
        return put("Where", positive, put("Log", put("Where", positive, p, constant(p, 1))), constant(p, -100))

    one = constant(input, 1)
    hit = put("Mul", label, logarithm(input))
    miss = put("Mul", put("Sub", one, label), logarithm(put("Sub", one, input)))
    loss = put("Neg", put("Add", hit, miss))
    return reduced(loss if weight is None else put("Mul", loss, weight), reduction)


@function()
def kl_div(input: Variable, label: Variable, reduction: str = "mean", *, name: str | None = None) -> Variable:
    """Kullback-Leibler divergence of ``label`` from ``input``: ``label * (log(label) - input)``, 0 where label is 0.

    ``input``: float *logarithms* of probabilities (``log_softmax``). ``label``: float probabilities of the same
    shape. ``reduction``: "mean" and "sum" (over all elements), "batchmean" (the sum over the first dimension's size:
    the divergence of a row) give a scalar of shape [], "none" the shape of the input.
    """
    call = "kl_div"
    put = _alike(call, input, label, "sum" if reduction == "batchmean" else reduction)
    dtype = numpy_dtype(label.dtype or "float32")
    positive = put("Greater", label, np.array(0, dtype))
    safe = put("Where", positive, label, np.array(1, dtype))
    ratio = put("Sub", put("Log", safe), input)
    loss = put("Mul", label, ratio)
    loss = put("Where", positive, loss, np.array(0, dtype))  # also where input is -inf
    if reduction != "batchmean":
        return reduced(loss, reduction)
    rows = put("Shape", input, start=0, end=1)
    count = put("Squeeze", cast(rows, str(input.dtype)), np.array([0], np.int64))
    return put("Div", sum(loss), count)
