"""A Clip becomes Max and Min where a place has no kernel of it in the 16-bit type, as CUDA in bfloat16."""

from __future__ import annotations

from amp_transpiler.conversion.conversion_options import OPTIONS, ConversionOptions
from amp_transpiler.conversion.protected import converted, protected
from amp_transpiler.ir.decompose import write_instead
from amp_transpiler.ir.graph import Graph
from amp_transpiler.lists import unsupported_reason
from amp_transpiler.ops.elementwise import limited
from amp_transpiler.passes.pipeline import Context, Pass, Property
from amp_transpiler.passes.view.of_type import of_type
from amp_transpiler.passes.view.typing import programs

#: The first opset at which Clip reads its bounds.
_READS = 11


class WriteClips(Pass):
    """A Clip becomes Max and Min where the place has no kernel of it in 16 bit, and of these two."""

    name = "write-clips"
    needs = (Property.TYPED, OPTIONS)

    def applies(self, graph: Graph, context: Context) -> bool:
        options = context[OPTIONS]
        black = "Clip" in options.lists.black_list
        return not (black or converted(graph)) and graph.opset() >= _READS and _gains(graph.opset(), options)

    def run(self, graph: Graph, context: Context) -> None:
        names, keep = protected(graph, context[OPTIONS])
        for each in programs(graph):
            for op in of_type(each, "Clip"):
                data, made = op.input(0), op.output(0)
                if data is None or data.dtype != "float32" or op in keep or (made is not None and made.name in names):
                    continue
                if op.input(1) is not None or op.input(2) is not None:
                    write_instead(op, lambda d, op, *inputs: [limited(d, *inputs)])


def _gains(opset: int, options: ConversionOptions) -> bool:
    lacks = {name: unsupported_reason(name, options.dtype, opset, options.kind) for name in ("Clip", "Max", "Min")}
    return lacks["Clip"] is not None and lacks["Max"] is None and lacks["Min"] is None
