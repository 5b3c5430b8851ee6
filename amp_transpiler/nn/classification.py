"""Losses of classes: cross entropy in its forms, spans, and accuracy."""

from __future__ import annotations

from typing import Any

import numpy as np

from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.ir.infer import differ
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.ir.types import numpy_dtype
from amp_transpiler.nn.building import (
    FLOATING,
    INTEGER,
    Builder,
    append,
    appending,
    axis_of,
    constant,
    describe,
    fixed,
    moved,
    real,
    variable,
    whole,
)
from amp_transpiler.nn.calls import function
from amp_transpiler.nn.elementwise_functions import cast
from amp_transpiler.nn.reduction import mean, sum
from amp_transpiler.option_checks import choice, switch

_REDUCTIONS = ("mean", "sum", "none")


def check_reduction(call: str, reduction: str) -> None:
    """ArgumentError where ``reduction`` is no way to reduce a loss."""
    choice(f"{call}: reduction", reduction, _REDUCTIONS)


def reduced(value: Variable, reduction: str) -> Variable:
    """Losses brought together as ``reduction`` says."""
    return {"mean": mean, "sum": sum}[reduction](value) if reduction != "none" else value


def _labels(put: Builder, input: Variable, label: Variable) -> Variable:
    """``label`` without the trailing dimension of size 1 that it may have, checked against ``input``."""
    variable(put.call, "label", label, dtypes=INTEGER, min_rank=1)
    assert input.shape is not None and label.shape is not None
    lead, shape = input.shape[:-1], label.shape
    extra = len(shape) == len(lead) + 1 and shape[-1] == 1
    if differ(lead, shape[: len(shape) - extra]):
        raise ArgumentError(
            f"{put.call}: label {describe(label)} does not fit input {describe(input)}; it has the shape of the input "
            "without the classes, which come last, or that with a 1 behind it"
        )
    if not extra:
        return label
    return put("Squeeze", label, np.array([len(lead)], np.int64))


@function()
def cross_entropy(
    input: Variable,
    label: Variable,
    reduction: str = "mean",
    ignore_index: int = -100,
    weight: Variable | None = None,
    soft_label: bool = False,
    axis: int = -1,
    use_softmax: bool = True,
    label_smoothing: float = 0.0,
    *,
    name: str | None = None,
) -> Variable:
    """Softmax, then the negative logarithm of the label's probability.

    ``input``: float logits [N, …, classes]. ``label``: int64 or int32 classes [N, …] or [N, …, 1]; elements equal
    to ``ignore_index`` give 0. ``reduction``: "mean" (over the elements not ignored) and "sum" give a scalar of
    shape [], "none" the losses in the shape of the label. As in Paddle, softmax is applied here: pass logits; with
    ``use_softmax=False``, ``input`` is probabilities.

    ``soft_label``: ``label`` is probabilities, float in the shape of the input, and "none" gives [N, …, 1].
    ``label_smoothing`` e: the label's probability is 1 - e, and e is spread over all classes (Szegedy et al. 2016).
    ``weight``: float [classes], a factor of each element's loss by its class (for soft labels: the mean under the
    label); "mean" then divides by the sum of these factors. ``axis``: the dimension of the classes.
    """
    call = "cross_entropy"
    variable(call, "input", input, dtypes=FLOATING, min_rank=2)
    if isinstance(reduction, Variable):
        raise ArgumentTypeError(f"{call}: reduction is a Variable; pass class weights by name, as weight=...")
    check_reduction(call, reduction)
    ignore = whole(call, "ignore_index", ignore_index, -(1 << 62))
    smooth = real(call, "label_smoothing", label_smoothing)
    if not 0 <= smooth < 1:
        raise ArgumentError(f"{call}: label_smoothing must be in [0, 1), not {smooth:g}")
    if weight is not None:
        variable(call, "weight", weight, dtypes=(str(input.dtype),), rank=1)
    at = axis_of(call, axis, input)
    soft = switch(f"{call}: soft_label", soft_label)
    variable(call, "label", label, dtypes=(str(input.dtype),) if soft else INTEGER, min_rank=1)
    put = appending(call)
    given = label
    rank = len(input.shape or ())
    logits = moved(put, input, at, rank - 1)
    if len(label.shape or ()) == rank:
        label = moved(put, label, at, rank - 1)
    softmax = switch(f"{call}: use_softmax", use_softmax)
    if soft:
        loss = _soft_cross_entropy(put, logits, label, smooth, weight, softmax, reduction)
        return moved(put, loss, rank - 1, at) if reduction == "none" else loss
    target = _labels(put, logits, label)
    if len(logits.shape or ()) > 2:  # the operator has its classes in dimension 1
        classes = fixed(call, "input", logits, -1)
        logits = put("Reshape", logits, np.array([-1, classes], np.int64))
        target = put("Reshape", target, np.array([-1], np.int64))
    if smooth:
        loss = _smooth_cross_entropy(put, logits, target, smooth, ignore, weight, softmax, reduction)
    else:
        inputs = [logits, target, *([] if weight is None else [weight])]
        loss, _ = _hard_cross_entropy(put, inputs, ignore, softmax, reduction)
    return loss if reduction != "none" or loss.shape == given.shape else _as_label(put, loss, given)


def _hard_cross_entropy(
    put: Builder, inputs: list[Variable], ignore: int, softmax: bool, reduction: str
) -> tuple[Variable, Variable]:
    """The loss, and scores that are the logarithms of the probabilities, or differ from them by a number a row."""
    scores, *rest = inputs
    if not softmax:
        scores = put("Log", scores)
    type_ = "SoftmaxCrossEntropyLoss" if softmax else "NegativeLogLikelihoodLoss"
    attrs = {"reduction": reduction, "ignore_index": ignore}
    return put(type_, scores, *rest, **attrs), scores


def _smooth_cross_entropy(
    put: Builder,
    logits: Variable,
    target: Variable,
    smooth: float,
    ignore: int,
    weight: Variable | None,
    softmax: bool,
    reduction: str,
) -> Variable:
    """(1 - e) loss of the label + e mean of the losses of all classes = loss of the label + e (its score - mean score).

    No label of e / classes is written, of which 16 bit has few digits where classes are many.
    """
    loss, scores = _hard_cross_entropy(put, [logits, target], ignore, softmax, "none")
    below = put("NegativeLogLikelihoodLoss", scores, target, reduction="none", ignore_index=ignore)
    last = np.array([-1], np.int64)
    spread = put("Add", below, put("ReduceMean", scores, last, keepdims=0))
    loss = put("Sub", loss, put("Mul", spread, constant(spread, smooth)))
    valid = put("Not", put("Equal", target, constant(target, ignore)))
    zero = constant(loss, 0)
    factor: Any = constant(loss, 1)
    loss = put("Where", valid, loss, zero)
    if weight is not None:
        kept = put("Gather", weight, put("Where", valid, target, constant(target, 0)))
        shares = ((kept, 1 - smooth), (put("ReduceMean", weight, last, keepdims=0), smooth))
        factor = put("Add", *(put("Mul", v, constant(v, share)) for v, share in shares))
        loss = put("Mul", loss, factor)
    if reduction != "mean":
        return reduced(loss, reduction)
    return put("Div", mean(loss), mean(put("Where", valid, factor, zero)))


def _soft_cross_entropy(
    put: Builder,
    logits: Variable,
    label: Variable,
    smooth: float,
    weight: Variable | None,
    softmax: bool,
    reduction: str,
) -> Variable:
    """-sum(label * log(p)) over the classes, which come last."""
    classes = fixed(put.call, "input", logits, -1)
    if label.shape is not None and label.shape[-1] != classes:
        raise ArgumentError(
            f"{put.call}: soft label {describe(label)} must have {classes} classes, as {describe(logits)}"
        )
    if smooth:
        label = put("Add", put("Mul", label, constant(label, 1 - smooth)), constant(label, smooth / classes))
    logs = put("LogSoftmax", logits, axis=-1) if softmax else put("Log", logits)
    last, keep = np.array([-1], np.int64), int(reduction == "none")
    loss = put("Neg", put("ReduceSum", put("Mul", label, logs), last, keepdims=keep))
    if weight is None:
        return reduced(loss, reduction)
    factor = put("ReduceSum", put("Mul", label, weight), last, keepdims=keep)
    loss = put("Mul", loss, factor)
    return reduced(loss, reduction) if reduction != "mean" else put("Div", mean(loss), mean(factor))


@function("nn.stable")
def softmax_with_cross_entropy(
    logits: Variable,
    label: Variable,
    soft_label: bool = False,
    ignore_index: int = -100,
    return_softmax: bool = False,
    axis: int = -1,
    *,
    name: str | None = None,
) -> Any:
    """:func:`cross_entropy` of each element, with a dimension of size 1 where the classes were.

    ``return_softmax``: (loss, softmax of the logits along ``axis``) instead of the loss.
    """
    call = "softmax_with_cross_entropy"
    variable(call, "logits", logits, dtypes=FLOATING, min_rank=2)
    at = axis_of(call, axis, logits)
    loss = cross_entropy(logits, label, "none", ignore_index, soft_label=soft_label, axis=at)
    if len(loss.shape or ()) < len(logits.shape or ()):
        loss = append(call, "Unsqueeze", [loss, np.array([at], np.int64)])
    if not switch(f"{call}: return_softmax", return_softmax):
        return loss
    return loss, append(call, "Softmax", [logits], attrs={"axis": at})


@function()
def nll_loss(
    input: Variable,
    label: Variable,
    weight: Variable | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    *,
    name: str | None = None,
) -> Variable:
    """The negative logarithm of the label's probability.

    ``input``: float *logarithms* of probabilities [N, classes] or [N, classes, …]; ``label``: int64 or int32 [N, …];
    other arguments as :func:`cross_entropy`.
    """
    call = "nll_loss"
    rank = len(variable(call, "input", input, dtypes=FLOATING, min_rank=2).shape or ())
    variable(call, "label", label, dtypes=INTEGER, rank=rank - 1)
    check_reduction(call, reduction)
    if weight is not None:
        variable(call, "weight", weight, dtypes=(str(input.dtype),), rank=1)
    attrs = {"reduction": reduction, "ignore_index": whole(call, "ignore_index", ignore_index, -(1 << 62))}
    inputs = [input, label, *([] if weight is None else [weight])]
    return append(call, "NegativeLogLikelihoodLoss", inputs, attrs=attrs)


@function()
def label_smooth(
    label: Variable, prior_dist: Variable | None = None, epsilon: float = 0.1, *, name: str | None = None
) -> Variable:
    """``(1 - epsilon) * label + epsilon * prior_dist`` (Szegedy et al. 2016).

    ``label``: float [.., classes]. ``prior_dist``: float, broadcast to it; 1 / classes by default.
    """
    call = "label_smooth"
    variable(call, "label", label, dtypes=FLOATING, min_rank=1)
    share = real(call, "epsilon", epsilon)
    if not 0 <= share <= 1:
        raise ArgumentError(f"{call}: epsilon must be in [0, 1], not {share:g}")
    put = appending(call)
    kept = put("Mul", label, constant(label, 1 - share))
    if prior_dist is None:
        return put("Add", kept, constant(label, share / fixed(call, "label", label, -1)))
    variable(call, "prior_dist", prior_dist, dtypes=(str(label.dtype),))
    spread = put("Mul", prior_dist, constant(label, share))
    return put("Add", kept, spread)


def _as_label(put: Builder, loss: Variable, label: Variable) -> Variable:
    """``loss`` in the shape of its label."""
    sizes = [d if isinstance(d, int) else -1 for d in label.shape or ()]
    if sizes.count(-1) < 2:
        return put("Reshape", loss, np.array(sizes, np.int64))
    y = put("Reshape", loss, put("Shape", label))
    y.shape = label.shape  # which inference does not find behind a Shape
    return y


@function()
def span_loss(
    start_logits: Variable, end_logits: Variable, start: Variable, end: Variable, *, name: str | None = None
) -> Variable:
    """Mean of two cross entropies over places: where a span starts, and where it ends (Devlin et al. 2019).

    ``start_logits``, ``end_logits``: float [N, length]. ``start``, ``end``: int64 or int32 places [N] or [N, 1]; one
    below 0 or from ``length`` on lies outside the window and does not count. Result: a scalar of shape [], the
    mean over the places that count; 0 where none does.
    """
    first, last = (_place_loss(*pair) for pair in ((start_logits, start), (end_logits, end)))
    both = append("span_loss", "Add", [first, last])
    return append("span_loss", "Mul", [both, np.array(0.5, numpy_dtype(str(first.dtype)))])


def _place_loss(logits: Variable, place: Variable) -> Variable:
    """Cross entropy of ``place`` [N] under ``logits`` [N, length], over the places that lie inside."""
    call = "span_loss"
    variable(call, "logits", logits, dtypes=FLOATING, rank=2)
    put = appending(call)
    target = cast(_labels(put, logits, place), "int64")
    length = put("Shape", logits, start=1)
    above = put("GreaterOrEqual", target, np.array(0, np.int64))
    inside = put("And", above, put("Less", target, length))
    target = put("Where", inside, target, np.array(-100, np.int64))
    total = cross_entropy(logits, target, reduction="sum")
    count = sum(cast(inside, str(total.dtype)))
    return append(call, "Div", [total, append(call, "Max", [count, np.array(1, numpy_dtype(str(total.dtype)))])])


@function("nn.accuracy")
def accuracy(input: Variable, label: Variable, k: int = 1, *, name: str | None = None) -> Variable:
    """The share of rows whose label is among the ``k`` highest scores, a float32 scalar.

    ``input``: float scores [N, …, classes]; ``label``: int64 or int32 [N, …] or [N, …, 1].
    """
    call = "accuracy"
    variable(call, "input", input, dtypes=FLOATING, min_rank=2)
    k = whole(call, "k", k)
    assert input.shape is not None
    classes = input.shape[-1]
    if isinstance(classes, int) and k > classes:
        raise ArgumentError(f"{call}: k={k}, but {describe(input)} has {classes} classes")
    put = appending(call)
    target = _labels(put, input, label)
    if target.dtype != "int64":
        target = cast(target, "int64")
    if k == 1:
        best = put("ArgMax", input, axis=-1, keepdims=0)
        return mean(cast(put("Equal", best, target), "float32"))
    _, best = put.several(2, "TopK", input, np.array([k], np.int64))
    column = put("Unsqueeze", target, np.array([-1], np.int64))
    hits = cast(put("Equal", best, column), "float32")
    return mean(sum(hits, axis=-1))
