"""Losses of orders and of rare classes. Formulas: Paddle's functions of the same names, and the papers named there."""

from __future__ import annotations

from amp_transpiler.errors import ArgumentError
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.nn.activation_functions import relu, sigmoid
from amp_transpiler.nn.building import FLOATING, real, variable
from amp_transpiler.nn.calls import function
from amp_transpiler.nn.classification import check_reduction, reduced
from amp_transpiler.nn.elementwise_functions import log, minimum
from amp_transpiler.nn.losses import binary_cross_entropy_with_logits
from amp_transpiler.nn.reduction import norm


@function()
def log_loss(input: Variable, label: Variable, epsilon: float = 1e-4, *, name: str | None = None) -> Variable:
    """``-label * log(input + epsilon) - (1 - label) * log(1 - input + epsilon)``, element by element.

    ``input``: float probabilities; ``label``: float in [0, 1] of the same shape. See also ``binary_cross_entropy``.
    """
    call = "log_loss"
    variable(call, "input", input, dtypes=FLOATING)
    variable(call, "label", label, dtypes=FLOATING)
    least = real(call, "epsilon", epsilon)
    if not least > 0:
        raise ArgumentError(f"{call}: epsilon must be above 0, not {least:g}")
    return -label * log(input + least) - (1.0 - label) * log((1.0 - input) + least)  # exact, then rounded once


@function()
def margin_ranking_loss(
    input: Variable,
    other: Variable,
    label: Variable,
    margin: float = 0.0,
    reduction: str = "mean",
    *,
    name: str | None = None,
) -> Variable:
    """``max(0, margin - label * (input - other))``: where ``label`` is 1, ``input`` is to be larger, where -1, smaller.

    All float, broadcast. ``reduction``: "mean", "sum" or "none".
    """
    call = "margin_ranking_loss"
    check_reduction(call, reduction)
    for name, value in (("input", input), ("other", other), ("label", label)):
        variable(call, name, value, dtypes=FLOATING)
    return reduced(relu(real(call, "margin", margin) - label * (input - other)), reduction)


@function()
def triplet_margin_loss(
    input: Variable,
    positive: Variable,
    negative: Variable,
    margin: float = 1.0,
    p: float = 2,
    epsilon: float = 1e-6,
    swap: bool = False,
    reduction: str = "mean",
    *,
    name: str | None = None,
) -> Variable:
    """``max(0, d(input, positive) - d(input, negative) + margin)`` (Balntas et al. 2016).

    All float [..., features]. d is the ``p``-norm (1 or 2) of the difference plus ``epsilon`` over the features.
    ``swap``: the distance of ``positive`` and ``negative`` counts where it is the smaller one. ``reduction``: "mean",
    "sum" or "none".
    """
    call = "triplet_margin_loss"
    check_reduction(call, reduction)
    for name, value in (("input", input), ("positive", positive), ("negative", negative)):
        variable(call, name, value, dtypes=FLOATING, min_rank=1)
    least = real(call, "epsilon", epsilon)

    def distance(a: Variable, b: Variable) -> Variable:
        return norm(a - b + least, p, -1)

    apart = distance(input, negative)
    if swap:
        apart = minimum(apart, distance(positive, negative))
    return reduced(relu(distance(input, positive) - apart + real(call, "margin", margin)), reduction)


@function()
def sigmoid_focal_loss(
    logit: Variable,
    label: Variable,
    normalizer: Variable | None = None,
    alpha: float = 0.25,
    gamma: float = 2.0,
    reduction: str = "sum",
    *,
    name: str | None = None,
) -> Variable:
    """Binary cross entropy of logits times ``alpha_t * (1 - p_t)**gamma`` (Lin et al. 2017), over ``normalizer``.

    p_t is the probability of the label, ``alpha_t`` is ``alpha`` for labels of 1 and 1 - ``alpha`` for 0. ``logit``,
    ``label``: float of one shape. ``reduction``: "sum", "mean" or "none".
    """
    call = "sigmoid_focal_loss"
    check_reduction(call, reduction)
    share, power = real(call, "alpha", alpha), real(call, "gamma", gamma)
    if power < 0:
        raise ArgumentError(f"{call}: gamma must not be negative, it is {power:g}")
    loss = binary_cross_entropy_with_logits(logit, label, reduction="none")
    p = sigmoid(logit)
    missed = p + label - 2.0 * (p * label)  # 1 - p_t
    loss = loss * missed**power * (label * (2.0 * share - 1.0) + (1.0 - share))
    return reduced(loss if normalizer is None else loss / normalizer, reduction)
