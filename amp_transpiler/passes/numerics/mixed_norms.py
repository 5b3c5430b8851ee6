"""Norms that are written out, with borders in two types, are kept from a fusion that has no kernel for them.

onnxruntime makes one SimplifiedLayerNormalization of Pow(x, 2), ReduceMean, Add, Sqrt, Div and a product with a scale,
and takes a cast before it in that nothing else reads, and one before the product. On CUDA that operator has kernels
that read float16 and write fp32, and the other way round; of bfloat16 there is one that reads and writes it. A norm of
fp32 values whose product is in bfloat16, or the other way round, would be fused all the same, and the file not loaded.
So would a layer norm, of which LayerNormalization takes one type alone from opset 17 on, and onnxruntime refuses the
file. Neither is fused where the square is a product, which is the same number.
"""

from __future__ import annotations

from collections.abc import Iterator

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.lists import place_kinds, place_traits
from amp_transpiler.passes.canonicalize.fuse_norm import LAYER_NORM
from amp_transpiler.passes.canonicalize.matching import drop_unread, maker, squares
from amp_transpiler.passes.pipeline import Context, Pass, option
from amp_transpiler.passes.view.of_type import of_type
from amp_transpiler.passes.view.typing import programs

#: The type of which there is no kernel with two types.
_ONE_TYPE = "bfloat16"
#: What is fused, between the square and the product with the scale.
_WITHIN = frozenset({"ReduceMean", "Add", "Sqrt", "Div", "Reciprocal", "Mul", "Cast"})


class MixedNorms(Pass):
    """The square in a norm between 16 bit and fp32 is a product, where it would be fused without a kernel."""

    name = "mixed-norms"

    place: str = option("cpu", *place_kinds())

    def applies(self, graph: Graph, context: Context) -> bool:
        return place_traits(self.place).device and next(_mixed(graph), None) is not None

    def run(self, graph: Graph, context: Context) -> None:
        write_mixed_norms(graph)


def write_mixed_norms(program: Graph) -> None:
    """Write the square as a product in each norm that would be fused into one of two types that there is not; casts
    are in place."""
    for square in list(_mixed(program)):
        base, power = square.input(0), square.input(1)
        square.type = "Mul"
        square.set_input(1, base)
        if power is not None and power is not base:
            drop_unread(power)


def _mixed(program: Graph) -> Iterator[Operator]:
    """The squares of such norms."""
    for each in programs(program):
        for square in of_type(each, "Pow") if of_type(each, "ReduceMean") else ():
            written = _written(square) if squares(square) else None
            if written is None:
                continue
            deviation = maker(square.input(0), "Sub")
            read = _read(square.inputs[0] if deviation is None else deviation.inputs[0])
            one = deviation is not None and each.opset() >= LAYER_NORM
            if read != written and (one or _ONE_TYPE in (read, written)):
                yield square


def _read(x: Variable | None) -> str | None:
    """The element type that the fused norm reads: that of ``x``, or before a cast which the norm alone reads: the
    square and the quotient, or the mean and the deviation.

    Casts of one value to one type count together, for onnxruntime makes one of them.
    """
    assert x is not None
    cast = maker(x, "Cast")
    source = None if cast is None else cast.input(0)
    if source is None:
        return x.dtype
    same = [op.outputs[0] for op, _ in source.readers if op.type == "Cast"]
    readers = sum(len(v.readers) + (v in v.program.outputs) for v in same if v is not None and v.dtype == x.dtype)
    return source.dtype if readers == 2 else x.dtype


def _written(square: Operator) -> str | None:
    """The element type that the fused norm writes, that of the product with a vector; None for no norm."""
    made = square.outputs[0]
    while made is not None and len(made.readers) == 1 and made not in made.program.outputs:
        ((op, _),) = made.readers
        if op.full_type not in _WITHIN:
            break
        made = op.outputs[0]
        if op.type == "Mul" and any(v is not None and len(v.shape or ()) == 1 for v in op.inputs):
            return None if made is None else made.dtype
    return None
