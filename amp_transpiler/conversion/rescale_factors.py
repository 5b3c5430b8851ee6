"""Factors that are too small for float16, such as fresh layer scales, are split into a number in its range and a power.

``x + gamma * h`` with gammas of 1e-6 reads them as subnormal numbers of four bits. ``gamma`` is the same as
``(gamma * 2**20) * 2**-20``: the first factor is in the middle of the range and goes into the weights of the product
before it, in fp32 and before they are rounded, where there is one; the second is exact. What the result itself loses
below 6e-8 is nothing beside the tensor that it is added to, and only where it is added is it split.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from amp_transpiler.conversion.conversion_options import ConversionOptions
from amp_transpiler.conversion.simplification import Simplification
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.tensors import as_array, tensor_type
from amp_transpiler.passes.canonicalize.matching import computed
from amp_transpiler.passes.numerics.rounding_loss import TOLERANCE, error_bound, losses, relative_error
from amp_transpiler.passes.view.constants import constant_content
from amp_transpiler.passes.view.of_type import of_type

#: float16 holds no smaller power of two.
_LEAST = -24
#: Elements of the largest factor that is looked at, and of the largest weights that take one in.
_VECTOR, _WEIGHTS = 1 << 16, 1 << 26


def rescale_factors(program: Graph, names: frozenset[str], keep: frozenset[Operator]) -> None:
    """Split the factors that float16 reads too coarsely, in place.

    Variables among ``names`` and operators of ``keep`` stay what they are.
    """
    for op in of_type(program, "Mul"):
        for slot in _suspect(op):
            _Factor(op, slot, names, keep).split()


def _suspect(op: Operator) -> list[int]:
    """The slot of a product that holds the factor, in a list; none where it is none or fits."""
    if not _only_added(op.output(0)):
        return []
    return [slot for slot in (0, 1) if _coarse(op.input(slot)) and _array(op.input(1 - slot), _VECTOR) is None]


def _only_added(made: Variable | None) -> bool:
    """Whether the tensor is read by nothing but additions, turned before or as it is."""
    if made is None or made in made.program.outputs or not made.readers:
        return False
    return all(
        _adds(reader, slot, made) or (reader.full_type == "Transpose" and _only_added(reader.output(0)))
        for reader, slot in made.readers
    )


def _adds(op: Operator, slot: int | str, made: Variable) -> bool:
    """Whether the operator adds the tensor to another one of its shape that is no constant."""
    other = op.input(1 - slot) if op.full_type == "Add" and isinstance(slot, int) else None
    return other is not None and other is not made and other.shape == made.shape and constant_content(other) is None


def _array(variable: Variable | None, most: int) -> np.ndarray | None:
    """The content of a float32 constant that is not larger."""
    data = constant_content(variable)
    if data is None or tensor_type(data)[0] != "float32" or math.prod(tensor_type(data)[1]) > most:
        return None
    return as_array(data)


def _coarse(variable: Variable | None) -> bool:
    """Whether float16 takes too much of the factor, and a power of two would help."""
    array = _array(variable, _VECTOR)
    if array is None or not array.size:
        return False
    found = losses(array, "float16")
    if found.beyond or not found.largest or error_bound(found, "float16") <= TOLERANCE:
        return False
    return math.frexp(found.largest)[1] > _LEAST and relative_error(array, "float16") > TOLERANCE


@dataclass
class _Factor:
    """One factor of a product."""

    op: Operator
    slot: int
    names: frozenset[str]
    keep: frozenset[Operator]

    def split(self) -> None:
        """Put the power of two in its place, and the number into the weights before it or into one more product."""
        op, slot, program = self.op, self.slot, self.op.program
        factor, other = op.inputs[slot], op.inputs[1 - slot]
        array = _array(factor, _VECTOR)
        if op in self.keep or factor is None or other is None or array is None:
            return
        if {v.name for v in (*op.inputs, *op.outputs) if v is not None} & self.names:
            return
        exponent = math.frexp(float(np.abs(array[np.isfinite(array)]).max()))[1]
        number, power = np.ldexp(array, -exponent), np.array(math.ldexp(1.0, exponent), np.float32)
        if not self._taken_in(other, number):
            new = program.add_constant(f"{factor.name}.number", number)
            scaled = computed(op, "Mul", [other, new], f"{other.name}.scaled", other.shape)
            if op.outputs[0] is not None and scaled.shape != op.outputs[0].shape:
                scaled.shape = op.outputs[0].shape
            op.set_input(1 - slot, scaled)
        op.set_input(slot, program.add_constant(f"{factor.name}.power", power))

    def _taken_in(self, variable: Variable, number: np.ndarray) -> bool:
        """Multiply the weights of the product that makes ``variable`` by the number, if that can be."""
        rank = len(variable.shape or ())
        wide = [axis for axis, size in enumerate(number.shape) if size != 1]
        if not rank or number.ndim > rank or len(wide) != 1:
            return False
        axis, vector = wide[0] + rank - number.ndim, number.reshape(-1)
        changes: list[Callable[[], None]] = []
        while True:
            op = variable.producer
            alone = len(variable.readers) == 1 and variable not in op.program.outputs if op is not None else False
            if op is None or op.domain or not alone or op in self.keep or variable.name in self.names:
                return False
            if op.type == "Transpose" and op.inputs[0] is not None:
                axis = int(op.attrs.get("perm", list(range(rank))[::-1])[axis])
                variable = op.inputs[0]
            elif op.type == "Add" and axis == rank - 1 and (bias := self._bias(op, vector.size)) is not None:
                changes.append(self._scaled(op, bias, lambda array: array * vector))
                rest = op.inputs[1 - bias]
                if rest is None or rest.shape is None or len(rest.shape) != rank:
                    return False
                variable = rest
            elif op.type == "MatMul" and axis == rank - 1 and self._weighs(op, 1, vector.size, 2, -1):
                changes.append(self._scaled(op, 1, lambda array: array * vector))
                break
            elif op.type == "Conv" and axis == 1 and self._weighs(op, 1, vector.size, rank, 0):
                changes.append(self._scaled(op, 1, lambda array: array * vector.reshape(-1, *[1] * (array.ndim - 1))))
                if op.input(2) is not None:
                    if not self._weighs(op, 2, vector.size, 1, 0):
                        return False
                    changes.append(self._scaled(op, 2, lambda array: array * vector))
                break
            else:
                return False
        for change in changes:
            change()
        return True

    def _weighs(self, op: Operator, slot: int, size: int, rank: int, axis: int) -> bool:
        array = _array(op.input(slot), _WEIGHTS)
        read = op.input(slot)
        free = read is not None and read.name not in self.names
        return free and array is not None and array.ndim == rank and array.shape[axis] == size

    def _bias(self, op: Operator, size: int) -> int | None:
        """The slot of an Add that holds a vector of this size."""
        return next((slot for slot in (0, 1) if self._weighs(op, slot, size, 1, 0)), None)

    def _scaled(self, op: Operator, slot: int, by: Callable[[np.ndarray], np.ndarray]) -> Callable[[], None]:
        """What lets the operator read a constant multiplied."""

        def change() -> None:
            read = op.inputs[slot]
            array = _array(read, _WEIGHTS)
            assert read is not None and array is not None
            op.set_input(slot, op.program.add_constant(f"{read.name}.scaled", by(array).astype(np.float32)))

        return change


class RescaleFactors(Simplification):
    """Factors that float16 holds too coarsely, of what is only added to something, are split off a power of two."""

    name = "rescale-factors"

    def wanted(self, graph: Graph, options: ConversionOptions) -> bool:
        return options.dtype == "float16" and options.numeric_guards

    def simplify(
        self, graph: Graph, names: frozenset[str], keep: frozenset[Operator], options: ConversionOptions
    ) -> None:
        rescale_factors(graph, names, keep)
