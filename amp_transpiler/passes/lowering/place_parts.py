"""Operators that a place has no kernel of, and nothing else stands for, in the parts that they are decomposed into."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from amp_transpiler.errors import GraphError
from amp_transpiler.ir.decompose import decompose_operator, has_decomposition
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.opdef import lowering_rule_of
from amp_transpiler.lists import place_kinds, place_traits, unsupported_reason
from amp_transpiler.ops.place_bodies import body_of
from amp_transpiler.passes.pipeline import Context, Pass, option
from amp_transpiler.passes.view.typing import float_type


class DecomposeForPlace(Pass):
    """On a place that has bodies for what it lacks, operators without kernel, body and lowering rule are decomposed.

    One whose form cannot be stays: where its kernel is missing it is refused, or runs on the CPU.
    """

    name = "decompose-for-place"

    place: str = option("cpu", *place_kinds())

    def applies(self, graph: Graph, context: Context) -> bool:
        return next(self._lacking(graph), None) is not None

    def run(self, graph: Graph, context: Context) -> bool:
        found = list(self._lacking(graph))
        for op in found:
            with suppress(GraphError):
                decompose_operator(op)
        return bool(found)

    def _lacking(self, graph: Graph) -> Iterator[Operator]:
        at = place_traits(self.place)
        for op in graph.walk() if at.bodies else ():
            if has_decomposition(op) and lowering_rule_of(op, at) is None and body_of(op.full_type) is None:
                kind = float_type(op)
                if kind and unsupported_reason(op.full_type, kind, op.program.opset(), self.place) is not None:
                    yield op
