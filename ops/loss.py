"""Losses on class labels: SoftmaxCrossEntropyLoss and NegativeLogLikelihoodLoss, composed.

CUDA has no kernel of either. Scores [N, C, d1, ..], labels [N, d1, ..]; per label
``loss = -weights[label] * log_prob[label]``, 0 where the label is ``ignore_index``; "mean" divides by the sum
of the weights of the labels that count (https://onnx.ai/onnx/operators/onnx__SoftmaxCrossEntropyLoss.html).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.opdef import gradient, lowering_rule, traits
from amp_transpiler.ir.types import HALF
from amp_transpiler.ops.common import Grads, comparable, once, size_of

#: An index that no number of classes reaches.
_BEYOND = np.int64(2**31 - 1)


@dataclass(frozen=True)
class _Labels:
    """Labels [N, 1, d1, ..], as indices that exist, and what belongs to each; None: nothing to do."""

    index: Value
    ignored: Value | None
    weight: Value | None

    @property
    def count(self) -> int:
        return math.prod(size_of(self.index))


def _wide(value: Value) -> str:
    """The type of numbers of a label, beside this tensor."""
    return "float32" if value.dtype in HALF else value.dtype


def _labels(e: Emitter, op: Operator, labels: Value, weights: Value | None, like: Value) -> _Labels:
    shape = size_of(labels)
    index = e.reshape(e.cast(labels, "int64"), (shape[0], 1, *shape[1:]))
    ignored = weight = None
    kept = index
    if "ignore_index" in op.attrs:
        ignored = e.Equal(index, e.const(np.int64(op.attrs["ignore_index"])))
        kept = e.Where(ignored, e.const(np.int64(0)), index, shape=index.shape)
    if e.at.host:  # onnxruntime wraps negative indices, and says so where one lies beyond the last class
        kept = e.Where(e.Less(kept, e.const(np.int64(0))), e.const(_BEYOND), kept, shape=index.shape)
    if weights is not None:
        weight = e.Gather(e.f32(weights), kept)
    if ignored is not None:
        zero, one = (e.const(number, _wide(like)) for number in (0, 1))
        weight = e.Where(ignored, zero, one if weight is None else weight)
    return _Labels(kept, ignored, weight)


def _total_weight(e: Emitter, labels: _Labels, like: Value) -> Value:
    return e.like(labels.count, like) if labels.weight is None else e.reduce_sum(labels.weight)


def _loss(e: Emitter, op: Operator, log_prob: Value, labels: Value, weights: Value | None) -> Value:
    found = _labels(e, op, labels, weights, log_prob)
    each = e.Neg(e.f32(e.GatherElements(log_prob, found.index, axis=1, shape=size_of(found.index))))
    if found.weight is not None:
        each = e.Mul(each, found.weight)
    if found.ignored is not None:  # 0 * log_prob is no 0 where a class is masked out with -inf
        each = e.Where(found.ignored, e.like(0, each), each)
    reduction = op.attrs.get("reduction", "mean")
    if reduction == "none":
        return e.reshape(each, size_of(labels))
    total = e.reduce_sum(each)
    return e.Div(total, _total_weight(e, found, total)) if reduction == "mean" else total


def _row_scale(e: Emitter, op: Operator, found: _Labels, dy: Value) -> Value:
    """d loss / d (-log_prob[label]) per label, [N, 1, d1, ..] or a scalar; fp32 for 16 bit."""
    dy, reduction = e.f32(dy), op.attrs.get("reduction", "mean")
    if reduction == "none":
        dy = e.reshape(dy, size_of(found.index))
    elif reduction == "mean":
        dy = e.Div(dy, _total_weight(e, found, dy))
    return dy if found.weight is None else e.Mul(dy, found.weight)


def _log_prob(e: Emitter, scores: Value) -> Value:
    def made() -> Value:
        plain = comparable(e, scores)  # nor has CUDA a LogSoftmax of bfloat16
        return e.cast(e.LogSoftmax(plain, axis=1, shape=size_of(scores)), scores.dtype)

    return once(e, f"logarithms of the softmax of {scores.name}", made)


@lowering_rule("SoftmaxCrossEntropyLoss", native=True)
def softmax_cross_entropy(
    e: Emitter, op: Operator, scores: Value, labels: Value, weights: Value | None = None
) -> Grads:
    """The loss is fp32 from the logarithm of each label on; those of all classes are of the type of the scores."""
    log_prob = _log_prob(e, scores)
    return [_loss(e, op, log_prob, labels, weights), log_prob]


@gradient("SoftmaxCrossEntropyLoss", reads="x0 x1 x2 dy0 dy1", inputs=[0], native=True)
def softmax_cross_entropy_grad(
    e: Emitter,
    op: Operator,
    scores: Value,
    labels: Value,
    weights: Value | None,
    dy: Value | None,
    dlog_prob: Value | None,
) -> Grads:
    """(softmax - one-hot) * scale, and for the log probabilities dy - softmax * sum(dy)."""
    prob = e.Softmax(scores, axis=1, shape=size_of(scores))
    parts = []
    if dy is not None:
        found = _labels(e, op, labels, weights, scores)
        at_label = e.Sub(_at_label(e, scores, prob, found), e.const(1, _wide(prob)))
        difference = e.ScatterElements(prob, found.index, e.cast(at_label, prob.dtype), axis=1, shape=prob.shape)
        part = e.Mul(difference, e.cast(_row_scale(e, op, found, dy), prob.dtype))
        if found.ignored is not None:
            part = e.Where(found.ignored, e.like(0, part), part)
        parts.append(part)
    if dlog_prob is not None:
        total = e.ReduceSum(dlog_prob, e.ints(1), keepdims=1)
        parts.append(e.Sub(dlog_prob, e.Mul(prob, total)))
    return [parts[0] if len(parts) == 1 else e.Add(*parts)]


def _at_label(e: Emitter, scores: Value, prob: Value, found: _Labels) -> Value:
    """The probability of each label. Near 1 its logarithm has the digits in 16 bit that it has not."""
    if prob.dtype not in HALF:
        return e.GatherElements(prob, found.index, axis=1)
    return e.Exp(e.f32(e.GatherElements(_log_prob(e, scores), found.index, axis=1, shape=size_of(found.index))))


@lowering_rule("NegativeLogLikelihoodLoss", native=True)
def negative_log_likelihood(
    e: Emitter, op: Operator, log_prob: Value, labels: Value, weights: Value | None = None
) -> Grads:
    return [_loss(e, op, log_prob, labels, weights)]


@gradient("NegativeLogLikelihoodLoss", reads="x1 x2 dy0", inputs=[0], native=True)
def negative_log_likelihood_grad(e: Emitter, op: Operator, labels: Value, weights: Value | None, dy: Value) -> Grads:
    found = _labels(e, op, labels, weights, dy)
    scale = e.Neg(_row_scale(e, op, found, dy))
    shape = e.output_shapes[0]
    assert shape is not None
    updates = e.Expand(e.cast(scale, dy.dtype), e.ints(*size_of(found.index)), shape=size_of(found.index))
    return [e.ScatterElements(e.zeros(shape, dy.dtype), found.index, updates, axis=1, shape=shape)]


traits("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss", settings=(2,))
