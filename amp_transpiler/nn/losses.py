"""Losses and accuracy."""

from __future__ import annotations

import numpy as np

from ..errors import ArgumentError
from ..ir import names
from ..ir.program import Variable
from ..ir.types import numpy_dtype
from .building import FLOATING, INTEGER, append, append_many, describe, fixed, variable, whole
from .elementwise import cast, mean, sum

_REDUCTIONS = ("mean", "sum", "none")


def check_reduction(call: str, reduction: str) -> None:
    """ArgumentError where ``reduction`` is no way to reduce a loss."""
    if reduction not in _REDUCTIONS:
        raise ArgumentError(f"{call}: reduction={reduction!r}; known are {', '.join(_REDUCTIONS)}")


def _labels(call: str, input: Variable, label: Variable, prefix: str) -> Variable:
    """``label`` without the trailing dimension of size 1 that it may have, checked against ``input``."""
    variable(call, "label", label, dtypes=INTEGER, min_rank=1)
    assert input.shape is not None and label.shape is not None
    lead, shape = input.shape[:-1], label.shape
    extra = len(shape) == len(lead) + 1 and shape[-1] == 1
    pairs = list(zip(lead, shape, strict=False))
    if len(shape) != len(lead) + extra or any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs):
        raise ArgumentError(
            f"{call}: label {describe(label)} does not fit input {describe(input)}; it has the shape of the input "
            "without the classes, which come last, or that with a 1 behind it"
        )
    if not extra:
        return label
    return append(call, "Squeeze", [label, np.array([len(lead)], np.int64)], prefix=prefix)


def cross_entropy(input: Variable, label: Variable, reduction: str = "mean", ignore_index: int = -100) -> Variable:
    """Softmax, then the negative logarithm of the label's probability.

    ``input``: float logits [N, …, classes]. ``label``: int64 or int32 classes [N, …] or [N, …, 1]; elements equal
    to ``ignore_index`` give 0. ``reduction``: "mean" (over the elements not ignored) and "sum" give a scalar of
    shape [], "none" the losses in the shape of the label. As in Paddle, softmax is applied here: pass logits.
    """
    call = "cross_entropy"
    variable(call, "input", input, dtypes=FLOATING, min_rank=2)
    check_reduction(call, reduction)
    ignore = whole(call, "ignore_index", ignore_index, -(1 << 62))
    variable(call, "label", label, dtypes=INTEGER, min_rank=1)
    assert input.shape is not None
    classes = fixed(call, "input", input, -1) if len(input.shape) > 2 else None
    prefix = names.generate(call)
    target = _labels(call, input, label, prefix)
    logits = input
    if classes is not None:  # the operator has its classes in dimension 1
        logits = append(call, "Reshape", [input, np.array([-1, classes], np.int64)], prefix=prefix)
        target = append(call, "Reshape", [target, np.array([-1], np.int64)], prefix=prefix)
    attrs = {"reduction": reduction, "ignore_index": ignore}
    loss = append(call, "SoftmaxCrossEntropyLoss", [logits, target], attrs=attrs, prefix=prefix)
    if reduction != "none" or loss.shape == label.shape:
        return loss
    return _as_label(call, loss, label, prefix)


def _as_label(call: str, loss: Variable, label: Variable, prefix: str) -> Variable:
    assert label.shape is not None
    if _unknown(label) > 1:
        raise ArgumentError(f'{call}: reduction="none" needs the sizes of label {describe(label)}, all but one')
    sizes = [d if isinstance(d, int) else -1 for d in label.shape]
    return append(call, "Reshape", [loss, np.array(sizes, np.int64)], prefix=prefix)


def _unknown(value: Variable) -> int:
    """The number of dimensions whose size is not known."""
    return len([d for d in value.shape or () if not isinstance(d, int)])


def span_loss(start_logits: Variable, end_logits: Variable, start: Variable, end: Variable) -> Variable:
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
    prefix = names.generate(call)
    target = cast(_labels(call, logits, place, prefix), "int64")
    length = append(call, "Shape", [logits], attrs={"start": 1}, prefix=prefix)
    above = append(call, "GreaterOrEqual", [target, np.array(0, np.int64)], prefix=prefix)
    inside = append(call, "And", [above, append(call, "Less", [target, length], prefix=prefix)], prefix=prefix)
    target = append(call, "Where", [inside, target, np.array(-100, np.int64)], prefix=prefix)
    total = cross_entropy(logits, target, reduction="sum")
    count = sum(cast(inside, str(total.dtype)))
    return append(call, "Div", [total, append(call, "Max", [count, np.array(1, numpy_dtype(str(total.dtype)))])])


def _alike(call: str, input: Variable, label: Variable, reduction: str) -> str:
    """Check two floats of one shape and a reduction; a prefix for what is appended."""
    variable(call, "input", input, dtypes=FLOATING)
    variable(call, "label", label, dtypes=FLOATING)
    check_reduction(call, reduction)
    a, b = input.shape, label.shape
    if a is not None and b is not None:
        sizes = zip(a, b, strict=False)
        if len(a) != len(b) or any(isinstance(p, int) and isinstance(q, int) and p != q for p, q in sizes):
            raise ArgumentError(f"{call}: input {describe(input)} and label {describe(label)} must have one shape")
    return names.generate(call)


def _reduced(value: Variable, reduction: str) -> Variable:
    return {"mean": mean, "sum": sum}[reduction](value) if reduction != "none" else value


def mse_loss(input: Variable, label: Variable, reduction: str = "mean") -> Variable:
    """(input - label)**2, both float of one shape; ``reduction`` "mean", "sum" or "none"."""
    call = "mse_loss"
    prefix = _alike(call, input, label, reduction)
    difference = append(call, "Sub", [input, label], prefix=prefix)
    two = np.array(2, numpy_dtype(input.dtype or "float32"))
    square = append(call, "Pow", [difference, two], prefix=prefix)  # Pow, not Mul: a square is computed in fp32
    return _reduced(square, reduction)


def bce_with_logits(input: Variable, label: Variable, reduction: str = "mean") -> Variable:
    """Sigmoid, then binary cross entropy: ``-label * log(p) - (1 - label) * log(1 - p)``, finite for every logit.

    ``input``: float logits. ``label``: float probabilities in [0, 1] of the same shape. ``reduction``: "mean" and
    "sum" (over all elements) give a scalar of shape [], "none" the losses in the shape of the input. Computed as
    ``softplus(input) - input * label``.
    """
    call = "bce_with_logits"
    prefix = _alike(call, input, label, reduction)
    softplus = append(call, "Softplus", [input], prefix=prefix)
    loss = append(call, "Sub", [softplus, append(call, "Mul", [input, label], prefix=prefix)], prefix=prefix)
    return _reduced(loss, reduction)


def kl_div(input: Variable, label: Variable, reduction: str = "mean") -> Variable:
    """Kullback-Leibler divergence of ``label`` from ``input``: ``label * (log(label) - input)``, 0 where label is 0.

    ``input``: float *logarithms* of probabilities (``log_softmax``). ``label``: float probabilities of the same
    shape. ``reduction``: "mean" and "sum" (over all elements), "batchmean" (the sum over the first dimension's size:
    the divergence of a row) give a scalar of shape [], "none" the shape of the input.
    """
    call = "kl_div"
    prefix = _alike(call, input, label, "sum" if reduction == "batchmean" else reduction)
    dtype = numpy_dtype(label.dtype or "float32")
    positive = append(call, "Greater", [label, np.array(0, dtype)], prefix=prefix)
    safe = append(call, "Where", [positive, label, np.array(1, dtype)], prefix=prefix)
    ratio = append(call, "Sub", [append(call, "Log", [safe], prefix=prefix), input], prefix=prefix)
    loss = append(call, "Mul", [label, ratio], prefix=prefix)
    loss = append(call, "Where", [positive, loss, np.array(0, dtype)], prefix=prefix)  # also where input is -inf
    if reduction != "batchmean":
        return _reduced(loss, reduction)
    rows = append(call, "Shape", [input], attrs={"start": 0, "end": 1}, prefix=prefix)
    count = append(call, "Squeeze", [cast(rows, str(input.dtype)), np.array([0], np.int64)], prefix=prefix)
    return append(call, "Div", [sum(loss), count], prefix=prefix)


def accuracy(input: Variable, label: Variable, k: int = 1) -> Variable:
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
    prefix = names.generate(call)
    target = _labels(call, input, label, prefix)
    if target.dtype != "int64":
        target = cast(target, "int64")
    if k == 1:
        best = append(call, "ArgMax", [input], attrs={"axis": -1, "keepdims": 0}, prefix=prefix)
        return mean(cast(append(call, "Equal", [best, target], prefix=prefix), "float32"))
    _, best = append_many(call, "TopK", [input, np.array([k], np.int64)], 2, prefix=prefix)
    column = append(call, "Unsqueeze", [target, np.array([-1], np.int64)], prefix=prefix)
    hits = cast(append(call, "Equal", [best, column], prefix=prefix), "float32")
    return mean(sum(hits, axis=-1))
