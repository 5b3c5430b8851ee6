"""Sizes that data decide, such as how many places NonZero finds: numbers stand for them while a program is lowered.

A program is typed several times side by side, each time with other numbers in the place of these sizes. What differs
between the times hangs on data; what is the same whatever the numbers are, does not. The numbers are primes above what
there can be of anything here, so that nothing is chosen because a size has divisors.

Sizes of one kind get one number: those of equal operators on equal inputs, and what would not fit together otherwise
(a target that is fed for each place found has as many rows as were fed). Arithmetic on sizes is known where it is
linear; anything else is left to the run, and a size that comes of it is one that data decide.
"""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Mapping
from copy import copy
from itertools import count, pairwise, permutations

import numpy as np

from amp_transpiler.errors import GraphError
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.infer import Shapes, infer_operator, static
from amp_transpiler.ir.nodes import Operator, Shape, Variable
from amp_transpiler.ir.opdef import traits_of

#: How often a program is typed: two tell what differs, the third whether what is made of the two holds.
TIMES = 3
#: The least number that stands for a size, and how often others are drawn where one is another size by chance.
_LEAST, _DRAWS = 64, 32
_LINEAR = frozenset({"Add", "Mul", "Neg", "Sub"})
#: Inputs that say sizes of the result as they are, by operator and slot.
_SAYS = frozenset(
    {
        ("ConstantOfShape", 0),
        ("Expand", 1),
        ("Pad", 1),
        ("Range", 0),
        ("Range", 1),
        ("Reshape", 1),
        ("Resize", 3),
        ("Split", 1),
        ("Tile", 1),
    }
)
#: Operators whose results' sizes are rounded along the axes that they walk over: they must not hang on data.
_ROUNDED = frozenset(
    {"AveragePool", "Col2Im", "Conv", "ConvTranspose", "LpPool", "MaxPool", "MaxUnpool", "Resize", "Split", "Upsample"}
)

#: What stands for one size, each time.
Numbers = tuple[int, ...]
#: An axis of what an operator makes: its key, the slot of the output, the axis.
_Where = tuple[int, int, int]


class _Unified(Exception):
    """A size was found to be another one."""


class DecidedSizes(Shapes):
    """Concrete types for given feed shapes, with numbers for sizes that data decide.

    ``times``: the same with other numbers, this one first; it is alone where data decide no size. ``decided``: the
    variables whose sizes they decide first hand.
    """

    def __init__(self, program: Graph, feed_shapes: Mapping[str, tuple[int, ...]] | None, above: float = 1.0) -> None:
        """``above``: the numbers begin at so many times what there can be."""
        self.above = above
        #: What sizes turned out to be, by where they are first: key of the operator, slot of its output, axis.
        self.same: dict[_Where, Numbers] = {}
        self.draws = 0
        while True:
            self.times: list[DecidedSizes] = [self]
            self.decided: dict[Variable, None] = {}
            self.found: dict[Hashable, Numbers] = {}
            self.origins: dict[Numbers, _Where] = {}
            self.tokens: dict[int, Hashable] = {}
            try:
                super().__init__(program, feed_shapes)
            except _Unified:
                continue
            if self._apart() or self.draws == _DRAWS:
                return
            self.draws += 1

    def told(self, op: Operator, slot: int, variable: Variable) -> np.ndarray | None:
        """As of :class:`Shapes`; what hangs on sizes that data decide only where the operator takes it linearly."""
        known = self.value(variable)
        if known is None or not self._varies(variable):
            return known
        moves = traits_of(op).moves
        linear = not op.domain and (op.type in _LINEAR or (op.type, slot) in _SAYS)
        whole = np.issubdtype(known.dtype, np.integer)
        return known if whole and (linear or moves is None or slot in moves) else None

    def ruled(self, variable: Variable) -> np.ndarray | None:
        """As of :class:`Shapes`; not what hangs on sizes that data decide."""
        return None if self._varies(variable) else self.value(variable)

    def settle(self, op: Operator) -> None:
        """As of :class:`Shapes`, each time."""
        for each in self.times:
            try:
                infer_operator(op, each)
            except GraphError:
                self._unify(op)
                raise
        self._check(op)
        for slot, variable in enumerate(op.outputs):
            if variable is not None:
                self._decide(op, slot, variable)
                if len(self.times) > 1:
                    self._remember(op, slot, variable)

    def _varies(self, variable: Variable) -> bool:
        first, *others = (each.value(variable) for each in self.times)
        return first is not None and any(other is None or not np.array_equal(first, other) for other in others)

    def sizes(self, variable: Variable) -> list[Numbers] | None:
        """The sizes of a variable each time; None where some are not known."""
        shapes = [static(each[variable][1]) for each in self.times]
        known = [shape for shape in shapes if shape is not None]
        return list(zip(*known, strict=True)) if len(known) == len(shapes) else None

    def hangs(self, size: int) -> bool:
        """Whether a size hangs on data: one that stands for such a size, or a multiple."""
        time = self.times.index(self)
        return any(size and size % numbers[time] == 0 for numbers in self.origins)

    # -- sizes that data decide ------------------------------------------------------------------------
    def _decide(self, op: Operator, slot: int, variable: Variable) -> None:
        """Put numbers in the place of sizes that are not known, or that may be less than was inferred."""
        open_axes = [axis for axis, size in enumerate(self[variable][1] or ()) if not isinstance(size, int)]
        if op.full_type == "Slice" and not open_axes and len(self.times) > 1:
            open_axes = self._clipped(op.inputs[0], variable)
        if not open_axes or variable.grad_of is not None or op.attrs.programs or not self._fixed(op):
            return
        while len(self.times) < TIMES:
            self.times.append(self._again())
        numbers = {axis: self._numbers(op, slot, axis) for axis in open_axes}
        self._put(variable, numbers)
        self.decided[variable] = None

    def _put(self, variable: Variable, numbers: Mapping[int, Numbers]) -> None:
        """Put these sizes on a variable, by axis."""
        for time, each in enumerate(self.times):
            dtype, shape = each[variable]
            assert shape is not None
            sizes: Shape = tuple(numbers[axis][time] if axis in numbers else size for axis, size in enumerate(shape))
            each.types[variable.key] = dtype, sizes
            each.values.pop(variable.key, None)

    def _remember(self, op: Operator, slot: int, variable: Variable) -> None:
        """Note where sizes that hang on data are first, and put what they turned out to be."""
        hanging = [(axis, numbers) for axis, numbers in enumerate(self.sizes(variable) or ()) if len(set(numbers)) > 1]
        for axis, numbers in hanging:
            place = op.key, slot, axis
            if place in self.same:
                self._put(variable, {axis: self.same[place]})
            self.origins.setdefault(numbers, place)

    def _fixed(self, op: Operator) -> bool:
        """Whether what an operator reads has sizes."""
        return all(v is None or static(self[v][1]) is not None for v in op.inputs)

    def _clipped(self, whole: Variable | None, part: Variable) -> list[int]:
        """The axes along which a Slice takes some of as many as data decide: perhaps fewer than it asks for."""
        before, after = None if whole is None else self.sizes(whole), self.sizes(part)
        if before is None or after is None:
            return []
        pairs = enumerate(zip(before, after, strict=True))
        return [axis for axis, (old, new) in pairs if len(set(old)) > 1 and new != old]

    def _again(self) -> DecidedSizes:
        """The same so far."""
        twin = copy(self)
        twin.types, twin.values = dict(self.types), dict(self.values)
        return twin

    def _numbers(self, op: Operator, slot: int, axis: int) -> Numbers:
        token: Hashable = self._token(op)
        key = token if op.type == "Unique" else (token, slot, axis)
        if key not in self.found:
            self.found[key] = self._fresh(self._most(op, slot, axis))
        return self.found[key]

    def _most(self, op: Operator, slot: int, axis: int) -> int:
        """How large a size that an operator finds may well be."""
        shapes = [static(self[v][1]) or () for v in op.inputs if v is not None]
        made = self[op.outputs[slot]][1] or ()  # type: ignore[index]  # what is decided is a variable
        if not traits_of(op).selects and shapes and len(shapes[0]) == len(made):
            return shapes[0][axis]
        return max(map(math.prod, shapes), default=1)

    def _fresh(self, most: int) -> Numbers:
        """Primes that stand for nothing else, the first no less than ``most``."""
        draw, numbers = random.Random(f"{len(self.found)} {self.draws}"), list[int]()
        least = int(self.above * max(_LEAST, most))
        for time in range(TIMES):
            taken = {each[time] for each in self.found.values()} | set(numbers)
            start = least + (draw.randrange(_LEAST + least // 8) if time or self.draws else 0)
            numbers.append(next(n for n in count(start) if n not in taken and _is_prime(n)))
        return tuple(numbers)

    def _apart(self) -> bool:
        """Whether sizes that differ some time differ each time: what they are for these numbers may be chance else."""
        shapes = ([static(each.types[key][1]) for each in self.times] for key in self.types)
        known = [sizes for sizes in shapes if None not in sizes]
        all_sizes = {numbers for sizes in known for numbers in zip(*sizes, strict=True)}
        times = range(TIMES if len(self.times) > 1 else 0)
        return all(len({numbers[time] for numbers in all_sizes}) == len(all_sizes) for time in times)

    def _token(self, op: Operator) -> Hashable:
        """What is equal for operators that make equal things."""
        if op.key not in self.tokens:
            numbers: dict[Hashable, int] = {}
            for each in self.program.operators:
                read = tuple(None if v is None else self._made(v) for v in each.inputs)
                alone = each.key if each.attrs.programs or traits_of(each).random else None
                settings = tuple(proto.SerializeToString(deterministic=True) for proto in each.attrs.protos())
                key = each.full_type, settings, read, alone
                self.tokens[each.key] = numbers.setdefault(key, len(numbers))
        return self.tokens[op.key]

    def _made(self, variable: Variable) -> Hashable:
        maker = variable.producer
        return variable.key if maker is None else (self.tokens.get(maker.key), variable.producer_slot)

    # -- what fits together ----------------------------------------------------------------------------
    def _unify(self, op: Operator) -> None:
        """Where an operator's inputs do not fit because of a size that hangs on data: it is what it has to fit."""
        sizes = [found for v in op.inputs if v is not None and (found := self.sizes(v))]
        pairs = [
            pair
            for one, other in permutations(sizes, 2)
            for pair in zip(reversed(one), reversed(other), strict=False)
            if set(pair[1]) != {1}
        ]
        second = op.input(1)
        said = [] if second is None else [known for each in self.times if (known := each.value(second)) is not None]
        if op.type == "Split" and said:
            pairs = [(sizes[0][int(op.attrs.get("axis", 0))], tuple(int(each.sum()) for each in said))]
        elif op.type == "Squeeze" and said:
            pairs = [(sizes[0][axis], (1,) * TIMES) for axis in said[0].tolist()]
        elif op.type == "Expand" and said:
            asked = list(zip(*(each.tolist() for each in said), strict=True))
            pairs = [pair for pair in zip(reversed(sizes[0]), reversed(asked), strict=False) if set(pair[1]) != {1}]
        for size, wanted in pairs:
            place = self.origins.get(size)
            if place is not None and size != wanted and place not in self.same:
                self.same[place] = wanted
                raise _Unified

    def _check(self, op: Operator) -> None:
        """GraphError where a size is rounded that hangs on data: what it is for these numbers says nothing."""
        cut = op.type == "Split" and op.input(1) is not None
        if len(self.times) == 1 or op.full_type not in _ROUNDED or cut:
            return
        read = op.input(0)
        before = None if read is None else self.sizes(read)
        for variable in op.outputs:
            after = self.sizes(variable) if variable is not None else None
            for old, new in zip(before or (), after or (), strict=False):
                steps = {
                    divmod(b - a, d - c) for (a, b), (c, d) in zip(pairwise(new), pairwise(old), strict=True) if d != c
                }
                if read is not None and len(set(new)) > 1 and (len(steps) != 1 or next(iter(steps))[1]):
                    raise GraphError(
                        f"operator '{op.label}' ({op.full_type}) rounds a size that data decide, that of "
                        f"'{read.name}': such sizes are known in training only where they are "
                        "sums and multiples of others. Pad what it reads to a fixed size"
                    )


def _is_prime(n: int) -> bool:
    return all(n % d for d in range(2, math.isqrt(n) + 1))
