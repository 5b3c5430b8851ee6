"""What a program computes of what it is fed, before a layer has rounded anything: there 16 bit can lose what is told.

Kept in fp32 is what the modules beside this one find among it, and what computes that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

import numpy as np

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import moves, traits_of
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.ir.types import FLOATS
from amp_transpiler.ops.einsum import labels_of
from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.passes.numerics.weight_norms import summed_axes
from amp_transpiler.passes.view.constants import content, is_constant
from amp_transpiler.passes.view.flow import Flow, Step
from amp_transpiler.passes.view.reached import reached

#: Terms of a sum: the coordinates of a place.
_FEW = 4
_TOTALS = frozenset({"sum", "mean", "max", "min"})
_ROOTS = frozenset({"Sqrt", "Pow"})
#: Elements that are looked at before all are.
_SOME = 64


class Fed:
    """The floating-point inputs of a program, and what comes of them."""

    def __init__(self, program: Graph, flow: Flow) -> None:
        self.program = program
        self.flow = flow

    @cached_property
    def given(self) -> set[Variable]:
        """The inputs, and what is computed of nothing but them, integers, constants and weights.

        Through what moves numbers, elementwise arithmetic, and products that sum hardly anything: times and their
        frequencies, coordinates and a matrix of directions. What a layer computes was rounded before, and is an
        activation, which may be 16 bit.
        """

        def comes(op: Operator, operands: Sequence[Variable]) -> bool:
            return not operands or moves(op) or traits_of(op).elementwise or _sums_few(op, operands)

        return self._grown(comes)

    @cached_property
    def measured(self) -> set[Variable]:
        """The inputs, and what is computed of them without any weight: through what moves numbers, elementwise
        arithmetic, sums, means and extremes, with numbers and masks beside them."""

        def comes(op: Operator, operands: Sequence[Variable]) -> bool:
            if not operands:  # of integers and shapes, or a constant
                return op.full_type != "Constant" or all(v is not None and _is_mask(v) for v in op.outputs)
            traits = traits_of(op)
            computes = moves(op) or traits.elementwise or traits.reduces not in ("", "index")
            held_ones = [v for v in operands if held(v)]
            return computes and len(held_ones) < len(operands) and all(map(_is_mask, held_ones))

        return self._grown(comes)

    @cached_property
    def totals(self) -> set[Variable]:
        """Sums, means and extremes of what is :attr:`measured`, and what is computed of them; but no lengths, which
        are roots."""
        reduces = self.flow.of(having=lambda kind: kind.reduces in _TOTALS)
        starts = [v for op, _, read in reduces if read[0] in self.measured for v in op.outputs if v is not None]

        def onward(total: Variable) -> Iterable[Variable | None]:
            readers = (op for op in self.flow.readers([total]) if op.full_type not in _ROOTS)
            return (v for op in readers for v in op.outputs if v in self.measured)

        return set(reached(starts, onward))

    @cached_property
    def told(self) -> set[Variable]:
        """The inputs, and what is computed of them before a layer: through what moves numbers, elementwise arithmetic,
        sums, means and extremes, with what the program holds beside them, and products among them that sum hardly
        anything. Rows of a table are none: they were learnt.
        """

        def comes(op: Operator, operands: Sequence[Variable]) -> bool:
            traits = traits_of(op)
            computes = moves(op) or traits.elementwise or traits.reduces not in ("", "index")
            computes = computes or (not any(map(held, operands)) and _sums_few(op, operands))
            return not operands or (computes and not all(map(held, operands)))

        return {v for v in self._grown(comes) if not is_constant(v)}

    def _grown(self, comes: Callable[[Operator, Sequence[Variable]], bool]) -> set[Variable]:
        """The inputs, and what operators of which ``comes`` holds make of such and of what the program holds."""
        found = {v for v in self.program.inputs if v.dtype in FLOATS}
        pending = [*self._of_held, *self.flow.readers(found)]
        for op in pending:
            operands = [v for v in self.flow.inputs[op] if v is not None]
            if all(v in found or held(v) for v in operands) and not op.attrs.programs and comes(op, operands):
                new = {v for v in op.outputs if v is not None} - found
                found |= new
                pending += self.flow.readers(new)
        return found

    @cached_property
    def _of_held(self) -> list[Operator]:
        """The operators that read nothing but what the program holds, or no floats."""
        return [op for op, _, read in self.flow.steps if all([v is None or held(v) for v in read])]

    def keep(
        self,
        constraints: Constraints,
        kind: Kind,
        among: set[Variable],
        steps: Iterable[Step],
        taken: Callable[[Operator, Variable], bool],
    ) -> set[Variable]:
        """Keep the operators among ``steps`` of which ``taken`` holds for their operand, and what computes it.

        An operand is one of ``among`` or one that the program holds, and so is what it is computed of. Those of
        ``among`` come back. What an earlier conversion did to the program makes no difference. Linear in its size.
        """
        operands = ((op, read[0]) for op, _, read in steps if read and read[0] is not None)
        starts = [op for op, v in operands if (v in among or held(v)) and taken(op, v)]
        wanted = set[Variable]()
        for op in reached(starts, lambda op: (v.producer for v in self.flow.inputs[op] if v in among)):
            constraints.keep(op, Reason(kind))
            wanted.update(v for v in self.flow.inputs[op] if v in among)
        return wanted


def held(variable: Variable) -> bool:
    """Whether the program holds it."""
    return variable.persistable or variable.data is not None


def _is_mask(variable: Variable) -> bool:
    """Whether it holds one number, in places 0 instead; of most weights the first elements tell that it does not."""
    data = content(variable) if variable.dtype in FLOATS else None
    if data is None:
        return False
    array = as_array(data).reshape(-1)
    magnitudes = (np.abs(part) for part in (array[:_SOME], array))
    return all(bool(((part == 0) | (part == part.max(initial=0))).all()) for part in magnitudes)


def _sums_few(op: Operator, operands: Sequence[Variable]) -> bool:
    """Whether it is a product, each of whose results adds up a few terms at most."""
    if op.full_type == "Einsum":
        shapes = [v.shape for v in operands if v.shape is not None]
        if len(shapes) < len(operands):
            return False
        terms, result = labels_of(op.attrs["equation"], [len(shape) for shape in shapes])
        axes = [axis for pair in zip(terms, shapes, strict=True) for axis in zip(*pair, strict=True)]
        return _few([size for label, size in dict(axes).items() if label not in result])
    summed, weights = summed_axes(op), op.input(1)
    return summed is not None and weights is not None and _few([(weights.shape or ())[axis] for axis in summed])


def _few(sizes: Sequence[int | str | None]) -> bool:
    known = [size for size in sizes if isinstance(size, int)]
    return len(known) == len(sizes) and math.prod(known) <= _FEW
