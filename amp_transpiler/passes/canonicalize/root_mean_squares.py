"""Roots of mean squares, and mean squares, become Euclidean norms: sums of squares that are computed in fp32 inside.

Written out, ``sqrt(mean(x * x) + epsilon)`` needs fp32 tensors: a square leaves float16 beyond 255. ReduceL2 reads and
writes 16 bit and squares in fp32, and its result leaves the format no sooner than a vector does. The epsilon comes in
as one more element of the vector: ``sqrt(L2(x)**2 + n * epsilon)`` is the norm of ``(L2(x), sqrt(n * epsilon))``, and
the factor ``1 / sqrt(n)`` goes into the weight of the norm where there is one. A sum and an epsilon under a root are a
mean over one; without an epsilon they are a length (:mod:`.unit_vectors`). torch's own variance is a mean times a
number, whose dimensions are put back in the end; one of deviations has an epsilon under the root or behind it.

The norm of a long row leaves float16 long before its mean square's root does, and what is divided by it is 0 then. So
it is the norm of the norms of its parts, each over the root of how many they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.infer import static
from amp_transpiler.ir.metadata import NORM
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import moves
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.passes.canonicalize.matching import (
    computed,
    number,
    only_reader,
    put,
    reduced_axes,
    remove,
    squaring,
)
from amp_transpiler.passes.canonicalize.opset import add_operator
from amp_transpiler.passes.view.constants import constant_content
from amp_transpiler.passes.view.of_type import of_type
from amp_transpiler.passes.view.reached import reached

#: The largest weight that takes the root of a count in; a larger product would come near the end of float16.
_LARGE = 1024.0
#: The longest row of which one norm is taken: it leaves float16 from a root mean square of 5790 on (of 4096: 1023).
_ROW = 128
#: The shortest part of a longer one.
_PART = 8
#: A root of an epsilon that is less is lost in float16.
LEAST_ROOT = 1e-6
#: What reads a mean square so that the digits of a small one count.
_DELICATE = frozenset({"Add", "Sub", "Sqrt", "Pow", "Log", "Max", "Clip", "Div", "Reciprocal"})


def write_as_norms(program: Graph, names: frozenset[str], keep: frozenset[Operator]) -> None:
    """Rewrite roots of mean squares and mean squares over a known number of elements, and divisions by roots of a sum
    of squares and an epsilon, in place.

    Variables among ``names`` and operators of ``keep`` stay what they are.
    """
    for mean in of_type(program, "ReduceMean", "ReduceSum"):
        made = mean.output(0)
        if made is None or made.producer is not mean:
            continue
        square, axes = squaring(mean.input(0)), reduced_axes(mean)
        if square is None or axes is None:
            continue
        x = square.inputs[0]
        if x is None or x.dtype != "float32" or x.shape is None:
            continue
        summed = mean.type == "ReduceSum"
        sizes = (1,) if summed else static(tuple(x.shape[axis] for axis in axes))
        if sizes is None or 0 in sizes:
            continue
        found = _Found(program, x, square, mean, made, axes, math.prod(sizes), names, keep)
        if found.may_go() and not found.rewrite_root(of_sum=summed) and not summed:
            found.rewrite_mean()


@dataclass(frozen=True)
class _Root:
    """A root, the epsilon under it, and what the mean square is multiplied with."""

    op: Operator
    epsilon: float
    factor: float


@dataclass
class _Found:
    """A mean square, and the root of it if there is one; names and operators that stay."""

    program: Graph
    x: Variable
    square: Operator
    mean: Operator
    made: Variable
    axes: Sequence[int]
    count: int
    names: frozenset[str]
    keep: frozenset[Operator]

    def may_go(self) -> bool:
        """Whether square and mean are nobody else's."""
        squared = self.square.outputs[0]
        assert squared is not None
        alone = only_reader(squared) is not None and not (self.names & {squared.name, self.made.name})
        return alone and not self.keep & {self.square, self.mean} and self.made not in self.program.outputs

    def rewrite_root(self, of_sum: bool) -> bool:
        """Write the root of the mean square, and of an epsilon, as a norm; of a sum and an epsilon, what is divided."""
        found = self._root()
        out = None if found is None else found.op.output(0)
        if found is None or out is None or found.op in self.keep or out.name in self.names:
            return False
        part = self._part()
        root, epsilon, count, shape = found.op, found.epsilon, part / found.factor, self._kept_shape()
        of_sum = of_sum and found.factor == 1
        readers = [op for op, _ in out.readers]
        if out in self.program.outputs or not readers or any(isinstance(s, str) for _, s in out.readers):
            return False
        if (of_sum and not epsilon) or (epsilon and math.sqrt(epsilon * count) < LEAST_ROOT):
            return False
        quotients = self._quotients(out)
        if of_sum and quotients is None:  # the magnitude of a spectrum, whose digits may count
            return False
        one_row, norms = len(self.axes) == 1 and part < self.count, self._of_parts(part)
        if epsilon and one_row:
            norms = self._padded(norms, math.sqrt(epsilon * count))
        norm = self._norm(norms, self.axes, shape)
        if epsilon and not one_row:
            norm = self._norm(self._padded(norm, math.sqrt(epsilon * count)), self.axes[-1:], shape)
        if count != 1 and (quotients is None or not self._scale_weights(quotients, count)):
            norm = self._scaled(norm, 1 / math.sqrt(count))
        if quotients is None:
            self.program.replace_uses(out, norm)
        for op, product in quotients or ():
            if op is product:
                op.set_input(1, norm)
            else:
                other = next(v for v in product.inputs if v is not op.output(0))
                result, name = product.outputs[0], product.name
                self.program.remove_operator(product)
                self._add("Div", [other, norm], result, name)
        for op in dict.fromkeys(op for op, product in quotients or () if op is not product):
            remove(op, set())
        if root.program.has_var(out.name) and out.producer is root:
            remove(root, {self.x})
            self.program.remove_variable(out)
        return True

    def rewrite_mean(self) -> None:
        """Write the mean square as the square of a norm, unless its small values count in what follows."""
        if _counts(self.made):
            return
        last, factor = self._multiplied()
        part = self._part()
        norm = self._norm(self._of_parts(part), self.axes, self.made.shape)
        put(last, "Mul", [self._scaled(norm, share) for share in _factors(factor / part)])

    def _multiplied(self) -> tuple[Operator, float]:
        """The last of the operators that alone multiply the mean with positive numbers, and their product: torch's
        variance is a mean times 4096 over 4095, and times 4096 it leaves float16."""
        last, factor = self.mean, 1.0
        while True:
            before = last.outputs[0]
            op = only_reader(before)
            if op is None or op.full_type not in ("Mul", "Div") or self._held(op) or before is None:
                return last, factor
            by = number(op.input(1) if op.input(0) is before else op.input(0) if op.type == "Mul" else None)
            made = op.output(0)
            if by is None or not by > 0 or made is None or made.shape != before.shape:
                return last, factor
            last, factor = op, factor * by if op.type == "Mul" else factor / by

    def _root(self) -> _Root | None:
        """The root of the mean, times a number (a variance by one less), with its dimensions put back, and epsilon."""
        made, epsilon, factor, shape = self.made, 0.0, 1.0, self._kept_shape()
        while True:
            op = only_reader(made)
            before, made_by = made, None if op is None else op.output(0)
            if op is None or op.domain or made_by is None:
                return None
            if op.type == "Sqrt":
                return _Root(op, epsilon, factor) if before.shape == shape else None
            if self._held(op) or epsilon:
                return None
            by = next((n for v in op.inputs if v is not before and (n := number(v)) is not None), None)
            if op.type == "Add" and by is not None and by >= 0 and len(op.inputs) == 2:
                epsilon = by
            elif by is not None and by > 0 and (op.type == "Mul" or (op.type == "Div" and op.input(0) is before)):
                factor = factor * by if op.type == "Mul" else factor / by
            elif op.type not in ("Reshape", "Unsqueeze") or made_by.shape != shape:
                return None
            made = made_by

    def _kept_shape(self) -> tuple[object, ...]:
        return tuple(1 if axis in self.axes else size for axis, size in enumerate(self.x.shape or ()))

    def _quotients(self, root: Variable) -> list[tuple[Operator, Operator]] | None:
        """The operators that divide by the root, each with the product that it is (a reciprocal: one for each use)."""
        found = []
        for op, slot in root.readers:
            if op.type == "Div" and slot == 1 and number(op.input(0), root) != 1:
                found.append((op, op))
                continue
            made = op.output(0)
            if op.type not in ("Reciprocal", "Div") or (slot == 0 and op.type == "Div") or made is None:
                return None
            if self._held(op) or self.keep.intersection(use for use, _ in made.readers):
                return None
            for use, _ in made.readers:
                if use.full_type != "Mul" or use.input(0) is use.input(1):
                    return None
                found.append((op, use))
            if made in self.program.outputs or not made.readers:
                return None
        return found

    def _held(self, op: Operator) -> bool:
        """Whether the operator has to stay, or what it makes."""
        return op in self.keep or any(made is not None and made.name in self.names for made in op.outputs)

    def _scale_weights(self, quotients: Sequence[tuple[Operator, Operator]], count: float) -> bool:
        """Let the weights that all quotients are multiplied by take in the root of the count."""
        scaled = []
        for _, product in quotients:
            made = product.outputs[0]
            if made is None or made in self.program.outputs or not made.readers:
                return False
            for op, slot in made.readers:
                if op.full_type != "Mul" or isinstance(slot, str):
                    return False
                weight = op.input(1 - slot)
                data = constant_content(weight)
                if weight is None or data is None or weight.dtype != "float32":
                    return False
                array = as_array(data) * np.float32(math.sqrt(count))
                if array.size > 1 << 20 or not np.abs(array).max(initial=0) < _LARGE:
                    return False
                scaled.append((op, 1 - slot, weight, array))
        for op, slot, weight, array in scaled:
            op.set_input(slot, self.program.add_constant(f"{weight.name}.scaled", array))
        return True

    def _part(self) -> int:
        """Of how many elements of a row a norm is taken at once: of a part of the last axis, or of all.

        One of which a row has a power of 4, where there is one: the root of that number is exact.
        """
        last, shape = self.axes[-1], self.x.shape or ()
        size, behind = shape[last], static(shape[last + 1 :])
        assert isinstance(size, int)
        if self.count <= _ROW:
            return self.count
        parts = [size] if size <= _ROW else []
        if not parts and behind is not None and all(behind):
            parts = [n for n in range(_PART, _ROW + 1) if size % n == 0]
        return max(parts, key=lambda n: (math.log(self.count // n, 4).is_integer(), n), default=self.count)

    # -- new operators -----------------------------------------------------------------------------------
    def _add(self, type_: str, inputs: Sequence[Variable | None], output: Variable | None, name: str = "") -> None:
        self.program.add_operator(type_, inputs, [output], name=name, like=self.mean)

    def _new(self, shape: object) -> Variable:
        return self.program.fresh_variable(f"{self.made.name}.norm", self.x.dtype, shape)  # type: ignore[arg-type]

    def _norm(self, x: Variable, axes: Sequence[int], shape: object) -> Variable:
        out, keep = self._new(shape), int(shape == self._kept_shape())
        op = add_operator(self.mean, "ReduceL2", [x], [out], axes=list(axes), keepdims=keep)
        op.metadata[NORM] = "of a mean square"
        return out

    def _of_parts(self, part: int) -> Variable:
        """The norms of parts of the rows, over the root of how many a row has: as large as that of one part."""
        x, shape, last = self.x, list(self.x.shape or ()), self.axes[-1]
        size = shape[last]
        assert isinstance(size, int)
        if part == self.count:
            return x
        axes, shape[last] = [last], size // part
        if part < size:
            pieces = [*shape[: last + 1], part, *shape[last + 1 :]]
            sizes = [0] * last + [int(piece or 0) for piece in pieces[last:]]
            target = self.program.add_constant(f"{self.made.name}.parts", np.array(sizes, np.int64))
            x, axes = computed(self.mean, "Reshape", [x, target], f"{self.made.name}.norm", pieces), [last + 1]
        norms = self._new(tuple(shape))
        op = add_operator(self.mean, "ReduceL2", [x], [norms], axes=axes, keepdims=int(part == size))
        op.metadata[NORM] = "of parts of a mean square"
        return self._scaled(norms, math.sqrt(part / self.count))

    def _padded(self, x: Variable, value: float) -> Variable:
        """One more element along the last of the axes."""
        rank, axis = len(self.x.shape or ()), self.axes[-1]
        pads = [0] * (2 * rank)
        pads[rank + axis] = 1
        size = x.shape[axis] if x.shape else None
        assert isinstance(size, int) and x.shape is not None
        out = self._new((*x.shape[:axis], size + 1, *x.shape[axis + 1 :]))
        add_operator(self.mean, "Pad", [x], [out], pads=pads, value=value)
        return out

    def _scaled(self, x: Variable, factor: float) -> Variable:
        number = self.program.add_constant(f"{self.made.name}.factor", np.array(factor, np.float32))
        return computed(self.mean, "Mul", [x, number], f"{self.made.name}.norm", x.shape)


def _counts(square: Variable) -> bool:
    """Whether the digits of a small mean square count in what follows, multiplied or moved about or not."""

    def by_number(op: Operator, slot: int | str) -> bool:
        return op.type == "Div" and slot == 0 and number(op.input(1)) is not None

    def onward(at: Variable) -> Iterable[Variable | None]:
        on = (op for op, s in at.readers if op.type in ("Mul", "Neg") or by_number(op, s) or moves(op, s))
        return (v for op in on for v in op.outputs)

    readers = (use for v in reached([square], onward) for use in v.readers)
    return any(isinstance(s, str) or (op.type in _DELICATE and not by_number(op, s)) for op, s in readers)


def _factors(product: float) -> tuple[float, float]:
    """Two numbers of float16 that have this product, about as large: the root would be rounded, and counts twice."""
    near = (math.sqrt(product) * (1 + np.arange(-64, 65) / 1024)).astype(np.float16).astype(np.float64)
    other = (product / near).astype(np.float16).astype(np.float64)
    best = int(np.argmin(np.abs(near * other - product)))
    return float(near[best]), float(other[best])
