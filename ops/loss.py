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
from amp_transpiler.ops.common import Grads, size_of

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


def _labels(e: Emitter, op: Operator, labels: Value, weights: Value | None, like: Value) -> _Labels:
    shape = size_of(labels)
    index = e.reshape(e.cast(labels, "int64"), (shape[0], 1, *shape[1:]))
    ignored = weight = None
    kept = index
    if "ignore_index" in op.attrs:
        ignored = e.Equal(index, e.const(np.int64(op.attrs["ignore_index"])))
        kept = e.Where(ignored, e.const(np.int64(0)), index, shape=index.shape)
    if e.place == "cpu":  # onnxruntime wraps negative indices, and says so where one lies beyond the last class
        kept = e.Where(e.Less(kept, e.const(np.int64(0))), e.const(_BEYOND), kept, shape=index.shape)
    if weights is not None:
        weight = e.Gather(e.cast(weights, like.dtype), kept)
    if ignored is not None:
        weight = e.Where(ignored, e.like(0, like), e.like(1, like) if weight is None else weight)
    return _Labels(kept, ignored, weight)


def _total_weight(e: Emitter, labels: _Labels, like: Value) -> Value:
    return e.like(labels.count, like) if labels.weight is None else e.reduce_sum(labels.weight)


def _loss(e: Emitter, op: Operator, log_prob: Value, labels: Value, weights: Value | None) -> Value:
    found = _labels(e, op, labels, weights, log_prob)
    each = e.Neg(e.GatherElements(log_prob, found.index, axis=1))
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
    """d loss / d (-log_prob[label]) per label, [N, 1, d1, ..] or a scalar."""
    reduction = op.attrs.get("reduction", "mean")
    if reduction == "none":
        dy = e.reshape(dy, size_of(found.index))
    elif reduction == "mean":
        dy = e.Div(dy, _total_weight(e, found, dy))
    return dy if found.weight is None else e.Mul(dy, found.weight)


@lowering_rule("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy(
    e: Emitter, op: Operator, scores: Value, labels: Value, weights: Value | None = None
) -> Grads:
    log_prob = e.LogSoftmax(scores, axis=1)
    return [_loss(e, op, log_prob, labels, weights), log_prob]


@gradient("SoftmaxCrossEntropyLoss", reads="x0 x1 x2 dy0 dy1", inputs=[0])
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
    prob = e.Softmax(scores, axis=1)
    parts = []
    if dy is not None:
        found = _labels(e, op, labels, weights, scores)
        at_label = e.Sub(e.GatherElements(prob, found.index, axis=1), e.like(1, prob))
        difference = e.ScatterElements(prob, found.index, at_label, axis=1)
        part = e.Mul(difference, _row_scale(e, op, found, dy))
        if found.ignored is not None:
            part = e.Where(found.ignored, e.like(0, part), part)
        parts.append(part)
    if dlog_prob is not None:
        parts.append(e.Sub(dlog_prob, e.Mul(prob, e.reduce_sum(dlog_prob, [1], keepdims=True))))
    return [parts[0] if len(parts) == 1 else e.Add(*parts)]


@lowering_rule("NegativeLogLikelihoodLoss")
def negative_log_likelihood(
    e: Emitter, op: Operator, log_prob: Value, labels: Value, weights: Value | None = None
) -> Grads:
    return [_loss(e, op, log_prob, labels, weights)]


@gradient("NegativeLogLikelihoodLoss", reads="x1 x2 dy0", inputs=[0])
def negative_log_likelihood_grad(e: Emitter, op: Operator, labels: Value, weights: Value | None, dy: Value) -> Grads:
    found = _labels(e, op, labels, weights, dy)
    scale = e.Neg(_row_scale(e, op, found, dy))
    shape = e.output_shapes[0]
    assert shape is not None
    updates = e.Expand(scale, e.ints(*size_of(found.index)))
    return [e.ScatterElements(e.zeros(shape, dy.dtype), found.index, updates, axis=1)]


traits("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")
