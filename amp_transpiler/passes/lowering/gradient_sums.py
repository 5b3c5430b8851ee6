"""Sums of a variable's gradients: a product of matrices adds what is there, in the kernel that makes its own share.

A variable that several products read, as what attention takes its queries, keys and values of, has a gradient from each
of them; so has what goes around a block and through its first convolution, which with one position is a product too on
a GPU. Gemm adds its third input before it rounds: the sum costs one more tensor read for each, and no pass of its
own. These are fewer bytes and fewer roundings than a sum of finished gradients. Not in fp32 on CPU, where the sum stays
in the order that it has; and there a convolution's share is rounded by itself, as on a GPU where it is no product.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from amp_transpiler.ir.metadata import only_looks
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import own
from amp_transpiler.ir.types import HALF
from amp_transpiler.lists import place_traits

_PRODUCTS = (own("MatMulGrad"), own("GemmGrad"))
_CONVOLUTION = own("ConvGrad")
_SUM = own("GradSum")


@dataclass
class RunningSums:
    """What products add to their own share, and what is left to add."""

    #: Of a product's gradient the variable whose value it adds to that of its first input.
    before: dict[Operator, Variable] = field(default_factory=dict)
    #: Of a sum the variables that no product has added.
    left: dict[Operator, list[Variable]] = field(default_factory=dict)


def running_sums(
    order: Sequence[Operator], place: str, keep_fp32: Container[str], fetches: Container[Variable]
) -> RunningSums:
    """For operators in the order in which they are emitted."""
    found, at_place = RunningSums(), place_traits(place)
    at = {op: number for number, op in enumerate(order)}
    for op in order:
        shares = [v for v in op.inputs if v is not None]
        result = op.outputs[0] if op.outputs else None
        if op.full_type != _SUM or result is None or len({v.key for v in shares}) < len(shares) or len(shares) < 2:
            continue
        if {v.dtype for v in shares} != {result.dtype} or not all(v.producer and v.producer in at for v in shares):
            continue
        if not at_place.device and (not at_place.emulates or result.dtype not in HALF or result.name in keep_fp32):
            continue
        shares.sort(key=lambda v: at[v.producer] if v.producer else 0)
        total, left = shares[0], list[Variable]()
        for share in shares[1:]:
            made = share.producer
            kept = share in fetches or share.name in keep_fp32
            if made is not None and not kept and _adds(made, share, at_place.fused):
                found.before[made], total = total, share
            else:
                left.append(share)
        if total is not shares[0]:
            found.left[op] = [total, *left]
    return found


def _adds(made: Operator, share: Variable, convolves: bool) -> bool:
    """Whether a gradient operator makes this share, which only the sum reads, by one product of two matrices.

    ``convolves``: a convolution with one position is one.
    """
    readers = [reader for reader, _ in share.readers if not only_looks(reader)]
    if made.output(0) is not share or len(readers) != 1:
        return False
    a, b = (None if v is None else v.shape for v in (made.input(0), made.input(1)))
    if made.full_type == _CONVOLUTION and convolves and b is not None:
        return {*b[2:], made.attrs.get("group", 1)} == {1} and not any(made.attrs.get("pads") or ())
    return made.full_type in _PRODUCTS and b is not None and len(b) == 2 and a is not None and len(a) >= 2
