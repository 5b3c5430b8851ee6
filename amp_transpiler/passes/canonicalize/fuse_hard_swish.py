"""Hard swishes that an exporter wrote out become one operator when they are trained, and two when they are converted.

Before opset 14 there was no HardSwish: exports of MobileNetV3 and its like hold x * Clip(x + 3, 0, 6) / 6, with the
sixth taken before the product or after it, or x * HardSigmoid(x). The slope of the one operator is looked up in 16 bit;
that of each part reads and writes tensors of the size of the activation. The last form has two kernels for four, and is
what runtimes make of a HardSwish.
"""

from __future__ import annotations

from dataclasses import dataclass

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.passes.canonicalize.matching import added_number, factor, maker, number, only_reader, put
from amp_transpiler.passes.view.of_type import of_type

TYPE = "HardSwish"
#: How far a sixth may be from one, relatively: as far as it is rounded.
_OFF = 1e-6


def fuse_hard_swishes(program: Graph) -> list[str]:
    """Put one HardSwish in the place of each that is written out; in place."""
    count = 0
    for gate in of_type(program, "Clip", "HardSigmoid"):
        found = _of_clip(gate, frozenset()) if gate.type == "Clip" else _of_sigmoid(gate)
        if found is not None:
            put(found.last, TYPE, [found.x])
            count += 1
    return [f"{count} hard swishes that were written out are one operator each"] if count else []


def write_hard_sigmoids(program: Graph, names: frozenset[str], keep: frozenset[Operator]) -> None:
    """Put the product with a HardSigmoid in the place of each with a Clip; in place.

    Variables among ``names`` and operators of ``keep`` stay what they are.
    """
    for clip in of_type(program, "Clip"):
        found = _of_clip(clip, names)
        if found is None or not keep.isdisjoint((*found.parts, found.last)):
            continue
        x, last, attrs = found.x, found.last, {"alpha": 1 / 6, "beta": 0.5}
        gate = program.fresh_variable(f"{found.out.name}.gate", x.dtype, x.shape)
        program.add_operator("HardSigmoid", [x], [gate], attrs=attrs, name=clip.name, like=last)
        put(last, "Mul", [x, gate])


@dataclass(frozen=True)
class _Found:
    """A hard swish of ``x``, which is ``out``: the operator that ends it, and those before it."""

    x: Variable
    out: Variable
    last: Operator
    parts: tuple[Operator, ...]


def _found(x: Variable | None, last: Operator, *parts: Operator) -> _Found | None:
    """A hard swish in fp32 to which no number gives another dimension."""
    out = last.outputs[0]
    if x is None or out is None or x.dtype != "float32" or len(out.shape or ()) != len(x.shape or ()):
        return None
    return _Found(x, out, last, parts)


def _of_sigmoid(gate: Operator) -> _Found | None:
    """x * HardSigmoid(x), with a slope of a sixth."""
    x, product = gate.inputs[0], only_reader(gate.outputs[0])
    slope, half = gate.attrs.get("alpha", 0.2), gate.attrs.get("beta", 0.5)
    if product is None or factor(product, gate.outputs[0]) is not x or half != 0.5 or not _is_sixth(slope):
        return None
    return _found(x, product, gate)


def _of_clip(clip: Operator, names: frozenset[str]) -> _Found | None:
    """x * Clip(x + 3, 0, 6) / 6: the product of x with the sixth, or the sixth of the product with x; no variable
    within it is among ``names``."""
    moved = maker(clip.inputs[0], "Add")
    x, three = added_number(clip.inputs[0])
    first = only_reader(clip.outputs[0])
    second = None if first is None else only_reader(first.outputs[0])
    if three != 3 or [number(clip.input(1)), number(clip.input(2))] != [0, 6]:
        return None
    if moved is None or first is None or second is None:
        return None
    if any(v is not None and v.name in names for op in (moved, clip, first) for v in op.outputs):
        return None
    for product, sixth, gate in ((second, first, first.outputs[0]), (first, second, clip.outputs[0])):
        read = clip.outputs[0] if sixth is first else first.outputs[0]
        if factor(product, gate) is x and _takes_sixth(sixth, read):
            return _found(x, second, moved, clip, first)
    return None


def _takes_sixth(op: Operator, read: Variable | None) -> bool:
    if op.type == "Div":
        return op.input(0) is read and number(op.input(1)) == 6
    share = number(factor(op, read))
    return share is not None and _is_sixth(share)


def _is_sixth(share: float) -> bool:
    return abs(6 * share - 1) < _OFF
