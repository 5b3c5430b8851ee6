"""The operators of some types: what a rewriting looks at, when it looks for few."""

from __future__ import annotations

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator


def of_type(program: Graph, *types: str) -> list[Operator]:
    """The operators of ai.onnx of these types, in order, without those of nested graphs."""
    return [op for op in program.operators if op.type in types and not op.domain]
