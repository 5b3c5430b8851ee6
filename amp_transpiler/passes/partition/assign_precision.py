"""The converter's assignment: lists, types and constraints bind, a minimum cut chooses the rest.

An operator is bound to 16 bit (white list), bound to fp32 (a list, a pattern, a name, a constraint, no kernel), left
unchanged, or free. Of all assignments of the free ones the pass takes the one that moves the fewest bytes:
every operator reads and writes its floating-point tensors, every cast reads one and writes one. A tensor is
cast at most once in each direction, however many operators read it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, replace

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.metadata import FULL as KEPT
from amp_transpiler.ir.nodes import FORWARD, Operator, Variable
from amp_transpiler.ir.opdef import combined, moves
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.ir.types import SHORT
from amp_transpiler.lists import AutoMixedPrecisionLists, faults
from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.passes.numerics.mask_constants import saturate_stored
from amp_transpiler.passes.partition.boundaries import Boundary, boundaries
from amp_transpiler.passes.partition.cut import FULL, HALF, Cut, solve, traffic_of
from amp_transpiler.passes.partition.problem import Free, Problem
from amp_transpiler.passes.precision.casts import apply
from amp_transpiler.passes.precision.rules import BLACK, Decision, Rules, check_program, own_cast
from amp_transpiler.passes.view import constants
from amp_transpiler.passes.view.names import source
from amp_transpiler.passes.view.reached import reached
from amp_transpiler.passes.view.typing import by_shapes, declared, is_float

#: Operators whose choice depends on more than the element types of their slots.
_OWN_CHOICE = frozenset({"Cast", "CastLike", "Constant"})
#: What 16 bit takes over float32 as it would straight: float32 holds exactly what float16 can hold of integers; of
#: float64, the two roundings seldom give another number than one, and a range of 16 bit is one of float32.
_NARROW = frozenset({"bool", "int8", "uint8", "int16", "uint16", "float64"})
_SOURCES = _NARROW | {"int32", "uint32", "int64", "uint64"}


@dataclass(frozen=True)
class Assignment:
    """What the cut decided: ``free`` operators, the least traffic in bytes, and that of the two plain choices.

    ``saved``: in mode "mixed" the bytes that fp32 throughout, bound operators and all, would move more; negative where
    it moves fewer.
    """

    free: int
    cut: Cut
    all_half: int
    all_full: int
    saved: int


def assign(
    program: Graph,
    lists: AutoMixedPrecisionLists,
    mode: str,
    constraints: Constraints | None,
    *,
    outside: Callable[[Operator], Reason | None] | None = None,
    narrow_io: frozenset[str] = frozenset(),
) -> Assignment:
    """Decide every operator of ``program``, nested graphs included, and insert the casts, in place.

    Args:
        program: the program; a second call with the same constraints changes nothing.
        lists: operator lists and the 16-bit type.
        mode: "pure" and "auto" free whatever no list of the user's and no constraint binds; "mixed" binds
            the white list to 16 bit and the black list to fp32.
        constraints: what must stay fp32, and why; None takes everything literally, and "pure" then frees nothing.
        outside: why an operator is out of reach (None where it is not); None where none is.
        narrow_io: names of inputs and outputs that will be 16 bit.

    Raises: what :func:`.rewrite.rewrite_program` raises.
    """
    check_program(program, lists, "convert", names_must_exist=False)
    choices = _Choices(program, lists, mode, constraints, outside, narrow_io)
    decisions = choices.collect()
    free: list[Operator | Boundary] = [op for op, choice in decisions.items() if isinstance(choice, Free)]
    free += choices.boundaries
    problem = Problem(program, decisions, free, lists.dtype, narrow_io, given_io=mode == "pure")
    cut = solve(problem.costs, problem.tensors)
    final: dict[Operator, Decision] = {}
    chosen = dict(zip(free, cut.half, strict=True))
    for op, choice in decisions.items():
        if isinstance(choice, Free):
            choice = choice.half if chosen[op] else choice.full
        final[op] = choice
    given: dict[Variable, Operator] = {}
    for boundary in choices.boundaries:
        boundary.retype(final[boundary.op], lists.dtype if chosen[boundary] else "float32")
        given.update(dict.fromkeys(boundary.constants() if chosen[boundary] else (), boundary.op))
    all_half, all_full = (
        cut.value if all(chosen is side for chosen in cut.half) else traffic_of(problem.costs, problem.tensors, side)
        for side in (HALF, FULL)
    )
    if constraints is not None and constraints.replaced:
        saturate_stored(program, lists.dtype, constraints, {op: choice.slots for op, choice in final.items()})
    saved = problem.saved(cut.value) if mode == "mixed" else 0
    magnitudes = constraints.magnitudes if constraints else {}
    apply(program, final, lists, narrow_parameters=False, fetchable=False, magnitudes=magnitudes, given=given)
    return Assignment(len(free), cut, all_half, all_full, saved)


class _Choices(Rules):
    """A decision, or two, for every operator."""

    def __init__(
        self,
        program: Graph,
        lists: AutoMixedPrecisionLists,
        mode: str,
        constraints: Constraints | None,
        outside: Callable[[Operator], Reason | None] | None,
        narrow_io: frozenset[str],
    ) -> None:
        super().__init__(program, lists)
        self.mode, self.constraints, self.outside, self.narrow_io = mode, constraints, outside, narrow_io
        #: The choices of operators that are told apart by type and element types alone; None where shapes or attributes
        #: matter too.
        self.alike: dict[tuple[str | None, ...], Decision | Free | None] = {}
        self.faults = faults(lists.place)
        self.picks = outside is not None or self.names_matter
        self.kernel_opset, self.lowers = program.opset(), False  # the file is run as it is written
        #: Where nested graphs meet the graph around them, and the type may be chosen.
        self.boundaries: list[Boundary] = []
        because, short = {"pure": Kind.PURE, "auto": Kind.FREE}.get(mode, Kind.BETWEEN), SHORT[self.dtype]
        #: The reasons that most operators have.
        self.white, self.because = Reason(Kind.WHITE_LIST, runs=short), Reason(because, runs=short)
        self.cheaper = Reason(Kind.CHEAPER, runs=SHORT["float32"])

    def collect(self) -> dict[Operator, Decision | Free]:
        """The choices of every operator, in program order."""
        found: dict[Operator, Decision | Free] = {}
        for op in self.program.walk():
            found[op] = choice = self._like_others(op) or self._choice(op)
            if op.attrs.programs:
                self.decisions[op] = choice.full if isinstance(choice, Free) else choice
        self._free_dequantised(found)
        if self.mode != "auto":
            self._bind_isolated(found)
        return found

    def _like_others(self, op: Operator) -> Decision | Free | None:
        """The choice of an operator that is like others; None where it may have one of its own."""
        if self.picks or op.role != FORWARD or op.type in _OWN_CHOICE or KEPT in op.metadata:
            return None
        if op.attrs.programs or op.program.parent is not None or (self.constraints and self.constraints.on(op)):
            return None
        kind = (
            op.type,
            op.domain,
            *["" if v is None else v.dtype for v in op.inputs],
            "->",
            *["" if v is None else v.dtype for v in op.outputs],
        )
        if kind not in self.alike:
            apart = None in kind or by_shapes(op) or op.full_type in self.faults
            self.alike[kind] = None if apart else self._choice(op)
        return self.alike[kind]

    def _choice(self, op: Operator) -> Decision | Free:
        settled = self._settled(op)
        if settled is not None:
            if op.attrs.programs and not self._literal and not settled.inner:
                self.boundaries += [b for b in boundaries(op, self.dtype) if not self._pinned(b)]
            return self._retargeted(op) or settled
        name, lists = op.full_type, self.lists
        outside = self.outside(op) if self.outside else None
        if outside:
            return self.full(op, outside)
        if name in lists.custom_black_list:
            return self.full(op, Reason(Kind.CUSTOM_BLACK_LIST))
        white, black = name in lists.white_list, name in lists.black_list
        if not (white or black or name in lists.gray_list):
            return self.as_it_is(op, Reason(Kind.NO_LIST), colour=BLACK)
        constraint = self.constraints.on(op, lists) if self.constraints else None
        if constraint:
            return self.constrained(op, constraint)
        if self.mode == "mixed" and black:
            return self.full(op, Reason(Kind.BLACK_LIST))
        half = self.half(op, self.white if white else self.because)
        if half.precision != self.dtype or white or self._literal:
            return half
        full = self.full(op, self.cheaper)
        return Free(half, full) if full.precision == "float32" else half

    @property
    def _literal(self) -> bool:
        return self.mode == "pure" and self.constraints is None

    def _pinned(self, boundary: Boundary) -> bool:
        """Whether a name or a constraint keeps the tensors of a boundary fp32."""
        tensors = {source(v) for v in (boundary.outer(), *boundary.inner())}
        kept = self.constraints.tensors if self.constraints else {}
        return any(v in kept or v.name in self.lists.black_varnames for v in tensors)

    def _retargeted(self, op: Operator) -> Free | None:
        """The program's own cast of integers or float64 to float32: in 16 bit it gives what a cast behind it would."""
        read, made = op.input(0), op.output(0)
        if op.full_type != "Cast" or op.inserted or read is None or made is None:
            return None
        half = Reason(Kind.TARGET_OF_READERS, runs=SHORT[self.dtype])
        sources = _SOURCES if self.dtype == "float16" else _NARROW
        ours = made.dtype == self.dtype and op.why == half
        if read.dtype not in sources or not (made.dtype == "float32" or ours):
            return None
        if self.forced(op) or (self.outside and self.outside(op)) or (self.constraints and self.constraints.on(op)):
            return None
        slots = declared(op)
        return Free(
            Decision(self.dtype, half, replace(slots, outputs=[self.dtype])),
            Decision("float32", own_cast("float32"), replace(slots, outputs=["float32"])),
        )

    def _free_dequantised(self, found: dict[Operator, Decision | Free]) -> None:
        """Free what the white list binds and reads nothing but what a DequantizeLinear in fp32 brings back: casts may
        move more than 16 bit saves, and runtimes that compute with the integers look for a product right behind."""
        bound = self.lists.white_list - self.lists.custom_white_list
        for op, choice in found.items() if not self._literal and any(map(_is_dequantizer, found)) else ():
            if op.full_type in bound and isinstance(choice, Decision) and choice.precision == self.dtype:
                read = [source(v) for v in op.inputs if v is not None and is_float(v)]
                makers = [v.producer for v in read if not constants.is_constant(v)]
                if makers and all(maker is not None and _dequantises(maker, found.get(maker)) for maker in makers):
                    found[op] = Free(choice, self.full(op, self.cheaper))

    def _bind_isolated(self, found: dict[Operator, Decision | Free]) -> None:
        """Leave free operators unchanged that no chain of free ones joins to what 16 bit is for: in mode "mixed" to an
        operator that is bound to it, in "pure" to one that does more than hand numbers on, as from input to output."""
        seeds = {op for op, choice in found.items() if self._is_seed(op, choice)}
        others = {op: choice for op, choice in found.items() if isinstance(choice, Free) and op not in seeds}
        edges = _neighbours(found, others) if others else {}
        starts = [op for op in others if not seeds.isdisjoint(edges.get(op, ()))]
        joined = set(reached(starts, lambda op: (near for near in edges[op] if near in others)))
        for op, choice in others.items():
            if op not in joined:
                found[op] = self.full(op, Reason(Kind.NO_NEIGHBOUR)) if op.full_type != "Cast" else choice.full

    def _is_seed(self, op: Operator, choice: Decision | Free) -> bool:
        half = isinstance(choice, Free) or choice.precision == self.dtype
        if self.mode == "mixed":
            return half and isinstance(choice, Decision) and not op.attrs.programs
        return half and not self._hands_on(op)

    def _hands_on(self, op: Operator) -> bool:
        """Whether the operator only hands fp32 numbers on that the main graph is given or makes: none that the program
        holds, and none that is an input or an output in 16 bit."""
        if op.program.parent is not None or not moves(op) or combined(op) != "none":
            return False
        read, made = map(source, filter(None, op.inputs)), list(filter(None, op.outputs))
        cast = [reader.outputs[0] for v in made for reader, _ in v.readers if reader.inserted]
        numbers = [v for v in (*read, *made, *cast) if v is not None and is_float(v)]
        return not any(v.dtype == self.dtype or constants.is_constant(v) or v.name in self.narrow_io for v in numbers)


def _is_dequantizer(op: Operator) -> bool:
    return op.type == "DequantizeLinear"


def _dequantises(op: Operator, choice: Decision | Free | None) -> bool:
    """Whether the operator brings integers back, in fp32 whatever else is decided."""
    return _is_dequantizer(op) and isinstance(choice, Decision) and choice.precision == "float32"


def _neighbours(operators: Iterable[Operator], among: Container[Operator]) -> dict[Operator, list[Operator]]:
    """With which operators those ``among`` them share a floating-point tensor, or integers that one makes of them and
    the other brings back; constants left out."""
    edges: dict[Operator, list[Operator]] = {}
    for op in operators:
        for variable in () if op.inserted else op.inputs:
            maker = None if variable is None else source(variable).producer
            if maker is None or variable is None or not (op in among or maker in among):
                continue
            if (is_float(variable) or _is_dequantizer(op)) and not constants.is_constant(source(variable)):
                edges.setdefault(op, []).append(maker)
                edges.setdefault(maker, []).append(op)
    return edges
