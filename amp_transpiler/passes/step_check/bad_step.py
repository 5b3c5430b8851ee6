"""What tensors of a lowered step hold on a bad step: an old state, or one number everywhere.

Numbers have their sign: adding -0.0 returns every number as it is, adding 0.0 turns -0.0 into 0.0. A Where hands on a
state from its last input alone, since the runtime's turns -0.0 into 0.0 in the branch before; an If from either branch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import onnx

from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.ops.training.all_reduce import ALL_REDUCE

#: How far back the makers of a tensor are looked at: an update is short.
_DEPTH = 40


@dataclass(frozen=True)
class Held:
    """What a tensor holds on a bad step, and the conditions of the Wheres by which that is known.

    ``state``: the graph input whose old value it is; ``number``: what each element is. With neither, nobody knows.
    ``rows``: the tensor that says which rows of the state; "" where it is all of it.
    """

    state: str = ""
    rows: str = ""
    number: float | None = None
    conditions: frozenset[str] = field(default=frozenset())

    def given(self, *others: Held) -> Held:
        """The same, known by what the others are known by too."""
        return replace(self, conditions=self.conditions.union(*(other.conditions for other in others)))


_UNKNOWN = Held()


class BadStep:
    """Answers for the tensors of one graph whose ``states`` are inputs: a test for NaN or infinities holds."""

    def __init__(self, graph: onnx.GraphProto, producers: Mapping[str, onnx.NodeProto], states: frozenset[str]) -> None:
        self.producers, self.states = producers, states
        self.constants = {tensor.name: tensor for tensor in graph.initializer}
        self._known: dict[str, Held] = {}

    def held(self, tensor: str, depth: int = _DEPTH) -> Held:
        """What ``tensor`` holds on a bad step."""
        if tensor not in self._known:
            self._known[tensor] = _UNKNOWN  # also where there is no end
            self._known[tensor] = self._find(tensor, depth) if depth else _UNKNOWN
        return self._known[tensor]

    def _find(self, tensor: str, depth: int) -> Held:
        if tensor in self.states:
            return Held(state=tensor)
        if tensor in self.constants:
            values = onnx.numpy_helper.to_array(self.constants[tensor]).ravel()
            same = values.size > 0 and values.dtype.kind in "bif" and bool(np.all(values == values[0]))
            return Held(number=float(values[0])) if same else _UNKNOWN
        node = self.producers.get(tensor)
        if node is None:
            return _UNKNOWN
        if node.op_type in ("IsNaN", "IsInf"):
            return Held(number=1.0)
        if node.op_type in ("Cast", "Expand", ALL_REDUCE) or traits_of(node.op_type, node.domain).view:
            return self.held(node.input[0], depth - 1)
        if node.op_type == "Where":
            return self._chosen(node, depth - 1)
        if node.op_type == "If":
            return self._branch(node, tensor, depth - 1)
        if node.op_type in ("Gather", "GatherND", "ScatterND"):
            return self._of_rows(node, depth - 1)
        rule = _RULES.get(node.op_type)
        return _UNKNOWN if rule is None else rule(*(self.held(name, depth - 1) for name in node.input))

    def _chosen(self, node: onnx.NodeProto, depth: int) -> Held:
        condition = self.held(node.input[0], depth)
        if condition.number is None:
            return _UNKNOWN
        first = condition.number != 0
        chosen = self.held(node.input[1 if first else 2], depth)
        if first and (chosen.number is None or _is_negative_zero(chosen.number)):
            return _UNKNOWN
        return chosen.given(condition, Held(conditions=frozenset([node.input[0]])))

    def _of_rows(self, node: onnx.NodeProto, depth: int) -> Held:
        """Some rows of a state, or a state of which some rows were written: with themselves, as far as is known."""
        whole, rows = self.held(node.input[0], depth), self._behind_views(node.input[1])
        if node.op_type != "ScatterND":  # of several axes, or of another one, it would have other attributes
            along = next((attribute.i for attribute in node.attribute), 0)
            return replace(whole, rows=rows) if whole.state and not whole.rows and along == 0 else _UNKNOWN
        written = self.held(node.input[2], depth)
        same = whole.state == written.state != "" and not whole.rows and written.rows == rows
        return whole.given(written) if same and not node.attribute else _UNKNOWN

    def _behind_views(self, tensor: str) -> str:
        while (node := self.producers.get(tensor)) is not None and traits_of(node.op_type, node.domain).view:
            tensor = node.input[0]
        return tensor

    def _branch(self, node: onnx.NodeProto, tensor: str, depth: int) -> Held:
        """What the branch that is run hands on from outside."""
        condition = self.held(node.input[0], depth)
        if condition.number is None:
            return _UNKNOWN
        branches = {a.name: a.g for a in node.attribute}
        graph = branches["then_branch" if condition.number else "else_branch"]
        name = graph.output[list(node.output).index(tensor)].name
        maker = next((inner for inner in graph.node if name in inner.output), None)
        if maker is None or maker.op_type != "Identity":
            return _UNKNOWN
        found = self.held(maker.input[0], depth)
        return found.given(condition, Held(conditions=frozenset([node.input[0]])))


def _product(a: Held, b: Held) -> Held:
    if a.number is not None and b.number is not None:
        return Held(number=a.number * b.number).given(a, b)
    for state, factor in ((a, b), (b, a)):
        if state.state and factor.number == 1:
            return state.given(factor)
    return _UNKNOWN


def _sum(a: Held, b: Held) -> Held:
    if a.number is not None and b.number is not None:
        return Held(number=a.number + b.number).given(a, b)
    for state, term in ((a, b), (b, a)):
        if state.state and term.number is not None and _is_negative_zero(term.number):
            return state.given(term)
    return _UNKNOWN


def _is_negative_zero(number: float) -> bool:
    return number == 0 and math.copysign(1, number) < 0


def _compared(a: Held, b: Held) -> Held:
    return _UNKNOWN if a.number is None or b.number is None else Held(number=float(a.number == b.number)).given(a, b)


def _negated(a: Held) -> Held:
    return _UNKNOWN if a.number is None else Held(number=float(not a.number)).given(a)


def _either(a: Held, b: Held) -> Held:
    return next((held for held in (a, b) if held.number), _UNKNOWN)


_RULES: dict[str, Callable[..., Held]] = {
    "Mul": _product,
    "Add": _sum,
    "GatedAdd": lambda x, y, factor: _sum(x, _product(y, factor)),
    "Equal": _compared,
    "Not": _negated,
    "Or": _either,
}
