"""Operators of which a place has no kernel in the 16-bit type are written in others, as on CUDA in bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from amp_transpiler.conversion.conversion_options import ConversionOptions
from amp_transpiler.conversion.simplification import Simplification
from amp_transpiler.errors import GraphError
from amp_transpiler.ir.decompose import write_instead
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.ir.proto_residue import listed_inputs
from amp_transpiler.lists import unsupported_reason
from amp_transpiler.ops.place_gaps import LACKING
from amp_transpiler.passes.view.of_type import of_type
from amp_transpiler.passes.view.typing import programs


class WriteLacking(Simplification):
    """An operator of which the place has no kernel in 16 bit is written in others of which it has, where these give the
    same to a rounding, and products run in 16 bit: beside products in fp32 they would move more."""

    name = "write-lacking"

    def wanted(self, graph: Graph, options: ConversionOptions) -> bool:
        return bool(formed(graph, options.dtype, options.kind, options.binds_full))

    def simplify(
        self, graph: Graph, names: frozenset[str], keep: frozenset[Operator], options: ConversionOptions
    ) -> None:
        lacking = formed(graph, options.dtype, options.kind, options.binds_full)
        listed = listed_inputs(graph)  # for which a caller may give others
        for each in programs(graph):
            for op in [op for kind in lacking for op in of_type(each, kind)]:
                data, made = op.input(0), op.output(0)
                if data is None or data.dtype != "float32" or op in keep or (made is not None and made.name in names):
                    continue
                if not listed.isdisjoint(op.inputs[1:]):
                    continue
                try:
                    write_instead(op, LACKING[op.type].write)
                except GraphError:  # a form that it does not have: it stays fp32
                    continue


def formed(graph: Graph, dtype: str, place: str, bound: Callable[[str], bool]) -> list[str]:
    """Types of operators of which the place has no kernel, but of what they are written in; none where it has none of
    most products either. ``bound``: of which operators lists say that they run in fp32 anyway."""
    opset = graph.opset()

    @cache
    def lacks(kind: str) -> bool:
        return unsupported_reason(kind, dtype, opset, place) is not None

    found = [
        kind
        for kind, form in LACKING.items()
        if opset >= form.opset and not bound(kind) and lacks(kind) and not any(map(lacks, form.parts))
    ]
    products = [op.full_type for op in graph.walk() if traits_of(op).product] if found else []
    wide = [kind not in found and lacks(kind) for kind in products]
    return found if 2 * sum(wide) <= len(wide) else []
