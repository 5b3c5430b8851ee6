"""Hard swishes that an exporter wrote out become one operator when they are trained.

Before opset 14 there was no HardSwish: exports of MobileNetV3 and its like hold x * Clip(x + 3, 0, 6) / 6, with the
sixth taken before the product or after it, or x * HardSigmoid(x). The slope of the one operator is looked up in 16 bit;
that of each part reads and writes tensors of the size of the activation.
"""

from __future__ import annotations

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.passes.canonicalize.matching import added_number, factor, number, only_reader, remove
from amp_transpiler.passes.view.of_type import of_type

TYPE = "HardSwish"
#: How far a sixth may be from one, relatively: as far as it is rounded.
_OFF = 1e-6


def fuse_hard_swishes(program: Graph) -> list[str]:
    """Put one HardSwish in the place of each that is written out; in place."""
    count = 0
    for gate in of_type(program, "Clip", "HardSigmoid"):
        last, x = _of_clip(gate) if gate.type == "Clip" else _of_sigmoid(gate)
        out = None if last is None else last.outputs[0]
        if last is None or x is None or out is None or x.dtype != "float32":
            continue
        if len(out.shape or ()) == len(x.shape or ()):  # no number gave it another dimension
            remove(last, {x})
            program.add_operator(TYPE, [x], [out], name=last.name, like=last)
            count += 1
    return [f"{count} hard swishes that were written out are one operator each"] if count else []


#: The operator that ends it, and what it is of.
_Found = tuple[Operator | None, Variable | None]


def _of_sigmoid(gate: Operator) -> _Found:
    """x * HardSigmoid(x), with a slope of a sixth."""
    x, product = gate.inputs[0], only_reader(gate.outputs[0])
    slope, half = gate.attrs.get("alpha", 0.2), gate.attrs.get("beta", 0.5)
    if product is None or factor(product, gate.outputs[0]) is not x or half != 0.5 or not _is_sixth(slope):
        return None, None
    return product, x


def _of_clip(clip: Operator) -> _Found:
    """x * Clip(x + 3, 0, 6) / 6: the product of x with the sixth, or the sixth of the product with x."""
    x, three = added_number(clip.inputs[0])
    first = only_reader(clip.outputs[0])
    second = None if first is None else only_reader(first.outputs[0])
    if three != 3 or [number(clip.input(1)), number(clip.input(2))] != [0, 6] or first is None or second is None:
        return None, None
    for product, sixth, gate in ((second, first, first.outputs[0]), (first, second, clip.outputs[0])):
        read = clip.outputs[0] if sixth is first else first.outputs[0]
        if factor(product, gate) is x and _takes_sixth(sixth, read):
            return second, x
    return None, None


def _takes_sixth(op: Operator, read: Variable | None) -> bool:
    if op.type == "Div":
        return op.input(0) is read and number(op.input(1)) == 6
    share = number(factor(op, read))
    return share is not None and _is_sixth(share)


def _is_sixth(share: float) -> bool:
    return abs(6 * share - 1) < _OFF
