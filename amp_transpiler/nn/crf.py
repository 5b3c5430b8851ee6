"""Conditional random fields over chains of tags (Lafferty et al. 2001): the loss, and the best path.

Steps are written out one by one, so their number is fixed. All of it is computed in fp32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from amp_transpiler.errors import ArgumentError
from amp_transpiler.ir.metadata import FULL
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.ir.types import ONNX_TYPES
from amp_transpiler.lists.paddle import paddle_arguments
from amp_transpiler.nn.building import FLOATING, INTEGER, append, describe, fixed, layer_name, variable
from amp_transpiler.nn.initializer import XavierUniform
from amp_transpiler.nn.parameters import Attr, parameter, required

_LAST = np.array([-1], np.int64)


@paddle_arguments("nn.input", "nn.weights")
def linear_chain_crf(
    x: Variable, label: Variable, param_attr: Attr = None, length: Variable | None = None, name: str | None = None
) -> Variable:
    """The negative log-likelihood of tags: what is to be minimised, fp32 [N, 1].

    ``x``: float [N, T, tags], the score of each tag at each step, T and tags fixed. ``label``: int64 or int32 [N, T] or
    [N, T, 1], the tags; ``length``: int64 or int32 [N] or [N, 1], from 1 to T, steps that count of each chain, all
    where None. The parameter w_0 [tags + 2, tags] starts Xavier uniform: what a chain scores that begins with a tag,
    one that ends with it, and in the other rows one tag (a row) before another (a column).
    """
    chain = _Chain("linear_chain_crf", x, param_attr, length, name)
    tags = chain.tags_of(label)
    alpha, scores = chain.first, chain.scores(tags)
    for step in range(1, chain.steps):
        column = chain.add("Unsqueeze", alpha, _LAST)
        both = chain.add("Add", column, chain.transitions)
        new = chain.add("Add", chain.add("ReduceLogSumExp", both, np.array([1]), keepdims=0), chain.at(step))
        alpha = chain.within(step, new, alpha)
    total = chain.add("ReduceLogSumExp", chain.add("Add", alpha, chain.end), _LAST, keepdims=1)
    return chain.add("Sub", total, scores)


@paddle_arguments("nn.input", "nn.weights")
def crf_decoding(
    x: Variable,
    param_attr: Attr,
    label: Variable | None = None,
    length: Variable | None = None,
    name: str | None = None,
) -> Variable:
    """The tags of the best path (Viterbi), int64 [N, T], 0 behind the end of a chain; no gradient flows.

    ``param_attr`` is the parameter of :func:`linear_chain_crf`, a variable or its name. With ``label`` the result is 1
    where the best path has this tag, and 0 elsewhere. The other arguments: see :func:`linear_chain_crf`.
    """
    chain = _Chain("crf_decoding", x, param_attr, length, name)
    best, before = chain.first, list[Variable]()
    own = np.arange(chain.count, dtype=np.int64)[None]
    for step in range(1, chain.steps):
        both = chain.add("Add", chain.add("Unsqueeze", best, _LAST), chain.transitions)
        new = chain.add("Add", chain.add("ReduceMax", both, np.array([1]), keepdims=0), chain.at(step))
        came = chain.add("ArgMax", both, axis=1, keepdims=0)
        before.append(came if length is None else chain.add("Where", chain.lasts(step), came, own))
        best = chain.within(step, new, best)
    path = [chain.add("ArgMax", chain.add("Add", best, chain.end), axis=1, keepdims=1)]
    for came in reversed(before):
        path.append(chain.add("GatherElements", came, path[-1], axis=1))
    tags = chain.add("Concat", *reversed(path), axis=1)
    if label is not None:
        tags = chain.add("Cast", chain.add("Equal", tags, chain.tags_of(label)), to=ONNX_TYPES["int64"])
    return tags if length is None else chain.add("Where", chain.all_last, tags, np.zeros((), np.int64))


class _Chain:
    """The scores of chains, and the parameter of a call."""

    def __init__(self, call: str, x: Variable, param_attr: Attr, length: Variable | None, name: str | None) -> None:
        self.call, self.prefix = call, layer_name(call, name)
        variable(call, "x", x, dtypes=FLOATING, rank=3)
        self.steps, self.count = fixed(call, "x", x, 1), fixed(call, "x", x, 2)
        required(call, "param_attr", param_attr)
        shape = [self.count + 2, self.count]
        weight = parameter(call, f"{self.prefix}.w_0", shape, "float32", param_attr, XavierUniform())
        self.length = None if length is None else variable(call, "length", length, dtypes=INTEGER)
        self.x = self.add("Cast", x, to=ONNX_TYPES["float32"])
        self.start, self.end, self.transitions = (
            self.add("Slice", weight, np.array([low]), np.array([high]), np.array([0]))
            for low, high in ((0, 1), (1, 2), (2, self.count + 2))
        )
        self.first = self.add("Add", self.at(0), self.start)
        if self.length is not None:
            self.counts = self.add("Reshape", self.add("Cast", self.length, to=ONNX_TYPES["int64"]), np.array([-1, 1]))
            self.all_last = self.add("Less", np.arange(self.steps, dtype=np.int64)[None], self.counts)

    def add(self, type_: str, *inputs: Any, **attrs: Any) -> Variable:
        """An operator, which stays fp32, as all that moves between them does."""
        made = append(self.call, type_, inputs, attrs=attrs, prefix=self.prefix)
        assert made.producer is not None
        made.producer.metadata[FULL] = str(Reason(Kind.LOSS))
        return made

    def part(self, whole: Variable, start: int, end: int) -> Variable:
        """Steps of what has some of each chain."""
        return self.add("Slice", whole, np.array([start]), np.array([end]), np.array([1]))

    def at(self, step: int) -> Variable:
        """What each tag scores at a step, [N, tags]."""
        return self.add("Squeeze", self.part(self.x, step, step + 1), np.array([1]))

    def lasts(self, step: int) -> Variable:
        """Whether chains have this step, [N, 1]."""
        return self.part(self.all_last, step, step + 1)

    def within(self, step: int, new: Variable, old: Variable) -> Variable:
        """What is new of chains that have this step, and what was of the others."""
        return new if self.length is None else self.add("Where", self.lasts(step), new, old)

    def tags_of(self, label: Variable) -> Variable:
        """The tags, int64 [N, T]."""
        variable(self.call, "label", label, dtypes=INTEGER)
        if len(label.shape or ()) not in (2, 3):
            raise ArgumentError(f"{self.call}: label {describe(label)} is not [N, T] or [N, T, 1]")
        tags = self.add("Reshape", label, np.array([-1, self.steps]))
        return tags if tags.dtype == "int64" else self.add("Cast", tags, to=ONNX_TYPES["int64"])

    def scores(self, tags: Variable) -> Variable:
        """What chains of these tags score, [N, 1]."""
        found = self._counted(self._picked(self.x, tags), 0)
        if self.steps > 1:
            rows = self.add("Mul", self.part(tags, 0, -1), np.array(self.count))
            moves = self.add("Add", rows, self.part(tags, 1, self.steps))
            flat = self.add("Reshape", self.transitions, np.array([-1]))
            found = self.add("Add", found, self._counted(self.add("Gather", flat, moves, axis=0), 1))
        first, last = self.part(tags, 0, 1), self.part(tags, self.steps - 1, self.steps)
        if self.length is not None:
            last = self.add("GatherElements", tags, self.add("Sub", self.counts, np.array(1)), axis=1)
        for ends, tag in ((self.start, first), (self.end, last)):
            row = self.add("Reshape", ends, np.array([-1]))
            found = self.add("Add", found, self.add("Gather", row, tag, axis=0))
        return found

    def _picked(self, scores: Variable, tags: Variable) -> Variable:
        found = self.add("GatherElements", scores, self.add("Unsqueeze", tags, _LAST), axis=2)
        return self.add("Squeeze", found, _LAST)

    def _counted(self, values: Variable, start: int) -> Variable:
        """The sum over the steps, from this one on, that chains have."""
        if self.length is not None:
            values = self.add("Where", self.part(self.all_last, start, self.steps), values, np.zeros((), np.float32))
        return self.add("ReduceSum", values, np.array([1]), keepdims=1)
