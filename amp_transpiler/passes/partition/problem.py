"""The minimum cut problem of a program: what each operator and each cast moves, and who makes and reads each tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.kernel_cost import cast_bytes, moved_bytes, tensor_bytes
from amp_transpiler.ir.nodes import Operator, Shape, Variable
from amp_transpiler.ir.types import FLOATS
from amp_transpiler.passes.partition.boundaries import Boundary
from amp_transpiler.passes.partition.cut import Tensor
from amp_transpiler.passes.precision.rules import Decision
from amp_transpiler.passes.view import constants
from amp_transpiler.passes.view.counted_shapes import counted, counted_shapes
from amp_transpiler.passes.view.names import source
from amp_transpiler.passes.view.typing import Slots, programs


@dataclass(frozen=True)
class Free:
    """The two ways to run an operator whose precision is free."""

    half: Decision
    full: Decision


#: An operator, and the two ways to run it.
_Way = tuple[Operator, Decision, Decision]


class Problem:
    """The minimum cut problem of a program: bytes that each free operator and each cast moves.

    ``given_io``: casts at the inputs and outputs of the program are taken as given and cost nothing. Pure 16 bit
    would otherwise stop short of them, and leave a small program as it is.
    """

    def __init__(
        self,
        program: Graph,
        choices: dict[Operator, Decision | Free],
        free: list[Operator | Boundary],
        dtype: str,
        narrow_io: frozenset[str],
        given_io: bool,
    ) -> None:
        self.dtype, self.narrow_io, self.given_io = dtype, narrow_io, given_io
        self.number = {each: i for i, each in enumerate(free)}
        self.shape_of = counted_shapes(program)
        crossing = [each for each in free if isinstance(each, Boundary)]
        self.crossing = {
            (b.op, kind, place[0]) for b in crossing for kind, place in (("in", b.read), ("out", b.made)) if place
        }
        inner = {v for b in crossing if b.made for v in b.made[1]}
        self.ends: dict[Variable, Tensor] = {}
        ways = [(op, *_ways(choice)) for op, choice in choices.items() if not op.inserted]
        self._writes(ways)
        for boundary in crossing:
            crossed = boundary.outer() if boundary.made else boundary.inner()[0]
            self.ends[crossed] = self._made(crossed, self.number[boundary])
        self._reads(ways)
        moved = _Moved(self.shape_of)
        self.costs = [moved(op, half, full) for op, half, full in ways if op in self.number]
        self.ways = ways
        for boundary in crossing:
            for variable in boundary.inner() if boundary.made else (boundary.outer(),):
                ends = self._ends(source(variable))
                if ends is not None:
                    ends.readers.append(self.number[boundary])
            self.costs.append((0, 0))  # a runtime hands the buffer over
        for each in programs(program):
            for variable in () if given_io and each is program else each.outputs:
                ends = self._ends(source(variable))
                if ends is not None and variable not in inner:
                    _read(ends, self._io_type(variable), dtype)
        self.tensors = list(self.ends.values())

    def saved(self, traffic: int) -> int:
        """Bytes that fp32 throughout would move beyond an assignment of this traffic; negative where it moves fewer."""
        bound = [(op, half) for op, half, _ in self.ways if op not in self.number and half.precision == self.dtype]
        moved = _Moved(self.shape_of)
        more = sum(moved.bytes(op, _widened(half)) - moved.bytes(op, half) for op, half in bound)
        return sum(full for _, full in self.costs) + more - traffic

    def _writes(self, ways: list[_Way]) -> None:
        """Note who makes each tensor."""
        dtype, ends = self.dtype, self.ends
        for op, half, full in ways:
            number = self.number.get(op)
            for slot, variable in enumerate(op.outputs):
                if variable is None or variable.dtype not in FLOATS or constants.is_constant(variable):
                    continue
                if self.crossing and (op, "out", slot) in self.crossing:
                    continue
                made = half.slots.outputs[slot]
                if number is not None and made == dtype and full.slots.outputs[slot] == "float32":
                    ends[variable] = Tensor(number, [], False, False, counted_cast(self.shape_of(variable), dtype))
                elif made in (dtype, "float32"):
                    ends[variable] = Tensor(
                        made == dtype, [], False, False, counted_cast(self.shape_of(variable), dtype)
                    )

    def _reads(self, ways: list[_Way]) -> None:
        """Note who reads each tensor."""
        dtype, known = self.dtype, self.ends.get
        for op, half, full in ways:
            number, narrow, wide = self.number.get(op), half.slots.inputs, full.slots.inputs
            for slot, variable in enumerate(op.inputs):
                if variable is None or variable.dtype not in FLOATS:
                    continue
                ends = known(variable)
                if ends is None:  # behind a cast, in a nested graph, or what nobody makes
                    variable = source(variable)
                    ends = known(variable) or (self._ends(variable) if variable.producer is None else None)
                if ends is None or (self.crossing and (op, "in", slot) in self.crossing):
                    continue
                if number is not None and narrow[slot] == dtype and wide[slot] == "float32":
                    ends.readers.append(number)
                else:
                    _read(ends, narrow[slot], dtype)

    def _ends(self, variable: Variable) -> Tensor | None:
        """The ends of a tensor; None where a cast costs nothing (constants, given inputs), and for other types."""
        if variable not in self.ends:
            known = variable.producer is not None or constants.is_constant(variable)
            given = self.given_io and variable.program.parent is None
            dtype = self._io_type(variable)
            if known or given or dtype not in (self.dtype, "float32"):
                return None
            self.ends[variable] = self._made(variable, dtype == self.dtype)
        return self.ends[variable]

    def _made(self, variable: Variable, producer: int | bool) -> Tensor:
        """A tensor that nobody is known to read yet."""
        return Tensor(producer, [], False, False, counted_cast(self.shape_of(variable), self.dtype))

    def _io_type(self, variable: Variable) -> str | None:
        narrow = variable.program.parent is None and variable.name in self.narrow_io
        return self.dtype if narrow and variable.dtype == "float32" else variable.dtype


def _read(ends: Tensor, dtype: str | None, half: str) -> None:
    """Note that something reads a tensor in this type whatever is decided."""
    ends.read_half |= dtype == half
    ends.read_full |= dtype == "float32"


def _ways(choice: Decision | Free) -> tuple[Decision, Decision]:
    return (choice.half, choice.full) if isinstance(choice, Free) else (choice, choice)


class _Moved:
    """Bytes that operators move in 16 bit and in fp32; those that decide alike on equal shapes are counted once."""

    def __init__(self, shape_of: Callable[[Variable], Shape | None]) -> None:
        self.shape_of = shape_of
        self.known: dict[tuple[int | Shape | None, ...], tuple[int, int]] = {}

    def __call__(self, op: Operator, half: Decision, full: Decision) -> tuple[int, int]:
        shapes = [None if v is None else self.shape_of(v) for v in (*op.inputs, *op.outputs)]
        kind = (id(half), id(full), *shapes)
        found = self.known.get(kind)
        if found is None:
            found = self.known[kind] = self.bytes(op, half), self.bytes(op, full)
        return found

    def bytes(self, op: Operator, decision: Decision) -> int:
        """Bytes of floating-point tensors that the operator reads and writes."""
        reads = [self._of(v, dtype) for v, dtype in zip(op.inputs, decision.slots.inputs, strict=True)]
        writes = [self._of(v, dtype) for v, dtype in zip(op.outputs, decision.slots.outputs, strict=True)]
        return moved_bytes(op.type, op.domain, reads, writes)

    def _of(self, variable: Variable | None, dtype: str | None) -> int:
        return 0 if variable is None or dtype not in FLOATS else counted_bytes(self.shape_of(variable), dtype)


def _widened(decision: Decision) -> Decision:
    """The decision with fp32 in the place of 16 bit."""
    slots = decision.slots
    inputs, outputs = (
        ["float32" if dtype == decision.precision else dtype for dtype in each]
        for each in (slots.inputs, slots.outputs)
    )
    return replace(decision, slots=Slots(inputs, outputs))


@lru_cache(maxsize=4096)  # a program has few shapes, and thousands of tensors of each
def counted_bytes(shape: Shape | None, dtype: str) -> int:
    """Bytes of a tensor of this shape for the traffic."""
    return tensor_bytes((dtype, counted(shape)))


@lru_cache(maxsize=4096)
def counted_cast(shape: Shape | None, dtype: str) -> int:
    """Bytes that a cast between this 16-bit type and fp32 moves, of a tensor of this shape."""
    return cast_bytes(counted(shape), dtype, "float32")
