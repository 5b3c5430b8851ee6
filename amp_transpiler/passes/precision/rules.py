"""What the black/white/gray pass and the pure pass share: a decision per operator, and the rules that hold in both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from amp_transpiler.errors import ArgumentError, ArgumentTypeError, OrderError
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.metadata import FULL, FUSED
from amp_transpiler.ir.nodes import BACKWARD, FORWARD, Operator, Variable
from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.ir.patterns import is_pattern, matching
from amp_transpiler.ir.reasons import UNTOUCHED, Kind, Reason, parse
from amp_transpiler.ir.types import FLOATS, HALF, SHORT
from amp_transpiler.lists import (
    TARGET_OPSET,
    USUAL_PLACE,
    AutoMixedPrecisionLists,
    lowering_gap,
    no_kernel,
    place_traits,
    unsupported_reason,
)
from amp_transpiler.passes.view.kernel_faults import fault_of_16_bit
from amp_transpiler.passes.view.names import label, source, written_name
from amp_transpiler.passes.view.typing import (
    Obstacle,
    Slots,
    declared,
    float_type,
    has_float,
    is_float,
    kept_slots,
    narrowed,
    programs,
    require_typed,
    widened,
)
from amp_transpiler.spelling import near_names

WHITE, BLACK = "white", "black"
#: In the name of a variable: what it scales in an update is never 16 bit.
_RATE = "learning_rate"


@dataclass
class Decision:
    """The precision of one operator.

    ``slots``: the element type that each input must have and each output gets. ``colour``: what gray
    readers follow. ``inner``: why every operator in the nested graphs stays fp32 (None where they are
    decided one by one).
    """

    precision: str
    why: Reason
    slots: Slots
    colour: str | None = None
    inner: Reason | None = None


class Rules:
    """The rules of both passes for one program and its lists; holds the decisions made so far."""

    def __init__(self, program: Graph, lists: AutoMixedPrecisionLists) -> None:
        self.program = program
        self.lists = lists
        self.dtype = lists.dtype
        self.decisions: dict[Operator, Decision] = {}
        #: The opset whose kernels count: what a place is lowered to.
        self.kernel_opset = TARGET_OPSET
        #: Whether an operator with a lowering rule needs no kernel.
        self.lowers = True
        self._gaps: dict[str, Reason | None] = {}
        self._named = black_operators(program, lists)
        rates = any(_RATE in name for each in programs(program) for name in each.names)
        #: Whether the name of a variable, or a pattern, may keep an operator fp32.
        self.names_matter = rates or bool(lists.black_varnames or self._named)

    def decide_all(self, rule: Callable[[Operator], Decision]) -> dict[Operator, Decision]:
        """Decide every operator, producers and enclosing operators first; ``rule`` decides what is not settled."""
        for op in self.program.walk():
            self.decisions[op] = self._settled(op) or rule(op)
        return self.decisions

    # -- the three ways to run an operator ---------------------------------------------------------
    def half(self, op: Operator, why: Reason) -> Decision:
        """Run it in 16 bit; in fp32 where no place, no kernel or no schema lets it."""
        gap = self._gap(op)
        if gap:
            return self.full(op, gap)
        slots = narrowed(op, self.dtype)
        if isinstance(slots, Obstacle):
            return self.as_it_is(op, slots.why, colour=None if slots.fixed else BLACK)
        fault = self._fault(op, slots)
        if fault:
            return self.full(op, fault)
        return Decision(self.dtype, why.running(SHORT[self.dtype]), slots, WHITE)

    def full(self, op: Operator, why: Reason) -> Decision:
        """Run it in fp32."""
        slots = widened(op)
        held = {t for t in (*slots.outputs, *slots.inputs) if t in FLOATS}
        if "float32" not in held:  # float64, or a schema that knows 16 bit alone
            return self.as_it_is(op, why)
        return Decision("float32", why.running(SHORT["float32"]), slots, BLACK)

    def constrained(self, op: Operator, constraint: Reason) -> Decision:
        """Run it in fp32 for this constraint; where it computes in a third type, it stays in that."""
        made = op.output(0)
        if made is not None and made.dtype in FLOATS - {"float32", self.dtype}:
            return self.as_it_is(op, Reason(Kind.OTHER_TYPE, detail=(str(made.dtype),)))
        return self.full(op, constraint)

    def as_it_is(
        self, op: Operator, why: Reason, *, colour: str | None = None, inner: Reason | None = None
    ) -> Decision:
        """Leave its types as the program declares them."""
        precision = float_type(op, "float32")
        runs = SHORT[precision] if colour == BLACK else UNTOUCHED
        return Decision(precision, why.running(runs), declared(op), colour, inner)

    # -- rules ---------------------------------------------------------------------------------------
    def _settled(self, op: Operator) -> Decision | None:
        """The decision on operators whose types are not for the lists to choose."""
        if op.role != FORWARD:
            role = (op.role,)
            return self.as_it_is(op, Reason(Kind.ROLE, detail=role), inner=Reason(Kind.INSIDE_ROLE, detail=role))
        forced = self.forced(op)
        if op.attrs.programs:
            inner = forced or (Reason(Kind.BLACK_LIST) if op.full_type in self.lists.black_list else None)
            if inner is not None and inner.kind not in (Kind.INSIDE, Kind.INSIDE_ROLE):
                inner = Reason(Kind.INSIDE, label(op), cause=inner)
            return self.as_it_is(op, Reason(Kind.NESTED), inner=inner)
        name = op.full_type
        if name in ("Cast", "CastLike"):
            return self._cast(op)
        if not has_float(op):
            return self.as_it_is(op, Reason(Kind.NO_FLOAT))
        if any(v is not None and v.dtype is None for v in (*op.inputs, *op.outputs)):
            return self.as_it_is(op, Reason(Kind.NO_TENSOR))
        if name in ("Constant", "ConstantOfShape"):
            decision = self.as_it_is(op, Reason(Kind.CONSTANT))
            decision.why = constant_reason(decision.precision)
            return decision
        if traits_of(op).shape_only:  # it takes any precision as it comes
            decision = self.as_it_is(op, Reason(Kind.SHAPE_ONLY))
            decision.slots.inputs, decision.precision = [None] * len(op.inputs), "float32"
            return decision
        return self.full(op, forced) if forced else None

    def _cast(self, op: Operator) -> Decision:
        """A cast keeps its result type and reads what comes. It says in which precision to go on."""
        source, target = op.inputs[0], op.outputs[0]
        slots = declared(op)
        slots.inputs[0] = None
        assert source is not None and target is not None
        colour = None
        if source.dtype in HALF | {"float32"}:  # a mask made from integers says nothing about precision
            colour = {"float32": BLACK, self.dtype: WHITE}.get(str(target.dtype))
        why = op.why if op.inserted and op.why is not None else own_cast(str(target.dtype))
        return Decision(target.dtype if target.dtype in FLOATS else "float32", why, slots, colour)

    def forced(self, op: Operator) -> Reason | None:
        """Why an operator stays fp32 whatever the lists say; None where nothing forces it."""
        parent = op.program.parent
        if parent is not None and self.decisions[parent].inner is not None:
            return self.decisions[parent].inner
        if FULL in op.metadata:
            return parse(op.metadata[FULL])
        if FUSED in op.metadata and not self.lists.custom_black_list.isdisjoint(op.metadata[FUSED].split()):
            return Reason(Kind.CUSTOM_BLACK_LIST)
        listed = self.lists.black_varnames
        for variable in (*op.inputs, *op.outputs) if self.names_matter else ():
            if variable is None:
                continue
            name = source(variable).name
            if listed and (name in listed or variable.name in listed):
                return Reason(Kind.BLACK_NAME, name)
            if _RATE in name:
                return Reason(Kind.LEARNING_RATE, name)
        return self._named.get(op)

    def trainable_table(self, op: Operator) -> Reason | None:
        """Why a Gather stays fp32: its gradient rows must not be rounded; None for any other operator."""
        if op.full_type != "Gather" or op.inputs[0] is None:
            return None
        table = source(op.inputs[0])
        return Reason(Kind.TRAINABLE_TABLE, table.name) if table.is_parameter else None

    def _gap(self, op: Operator) -> Reason | None:
        """Why no lowering runs the operator in 16 bit; None where one does."""
        name = op.full_type
        if name not in self._gaps:
            gap_of = lowering_gap if self.lowers else unsupported_reason
            gap = gap_of(name, self.dtype, self.kernel_opset, self.lists.place)
            self._gaps[name] = _lacks_kernel(gap, self.lists.place) if gap else None
        return self._gaps[name]

    def _fault(self, op: Operator, slots: Slots) -> Reason | None:
        """Why the place's kernel is of no use to the operator with these types in 16 bit; None where it is."""
        # a lowered program has what stands for the operator
        fault = None if self.lowers else fault_of_16_bit(self.lists.place, op, slots)
        if fault is None:
            return None
        return Reason(Kind.FAULT, place_traits(self.lists.place).title, (fault.where, fault.what))

    def data_inputs(self, op: Operator) -> list[Variable]:
        """Floating-point inputs that carry data: those that no rule keeps fp32."""
        kept, _ = kept_slots(op)
        return [v for slot, v in enumerate(op.inputs) if v is not None and is_float(v) and slot not in kept]


def _lacks_kernel(gap: str, place: str) -> Reason:
    """The reason of an operator without kernel."""
    detail = (gap.removeprefix(no_kernel(place)),)
    if place == USUAL_PLACE:
        return Reason(Kind.NO_KERNEL, detail=detail)
    return Reason(Kind.NO_KERNEL_THERE, place_traits(place).title, detail)


def constant_reason(dtype: str) -> Reason:
    """The reason of a constant, which takes the precision of its readers where they agree."""
    return Reason(Kind.CONSTANT, runs=SHORT.get(dtype, UNTOUCHED))


def own_cast(dtype: str) -> Reason:
    """The reason of a cast that the program itself makes."""
    return Reason(Kind.OWN_CAST, detail=(dtype,), runs=UNTOUCHED)


def check_program(program: Graph, lists: AutoMixedPrecisionLists, what: str, names_must_exist: bool) -> None:
    """Refuse what a precision pass cannot work on.

    ArgumentTypeError for what is no program or no lists, GraphError for a variable without type, OrderError where
    the backward pass was appended already, ArgumentError for ``custom_black_varnames`` that the program does not have.
    """
    if not isinstance(program, Graph):
        raise ArgumentTypeError(f"{what} takes a Program, got {program!r}")
    if not isinstance(lists, AutoMixedPrecisionLists):
        raise ArgumentTypeError(f"{what}: amp_lists is {lists!r}; expected amp.AutoMixedPrecisionLists(...)")
    require_typed(program)
    late = next((op for op in program.operators if op.role == BACKWARD), None)
    if late is not None:
        raise OrderError(
            f"{what}: program '{program.name}' already has backward operators ('{late.label}'); gradients take the "
            "types of the forward pass, so call it before append_backward or minimize"
        )
    if names_must_exist:
        check_variables(program, lists, what)


def check_variables(
    program: Graph, lists: AutoMixedPrecisionLists, what: str, called: str = "custom_black_varnames"
) -> None:
    """ArgumentError where ``custom_black_varnames`` (``called`` so in messages) names a variable, or a pattern, that
    the program does not have."""
    if not lists.black_varnames:
        return
    known = _variable_names(program)
    missing = sorted(lists.black_varnames - known)
    patterns = [name for name in missing if is_pattern(name)]
    if len(patterns) < len(missing):
        name = next(each for each in missing if not is_pattern(each))
        hint = near_names(name, sorted(known), "; ")
        raise ArgumentError(f"{what}: program '{program.name}' has no variable '{name}', which {called} names{hint}")
    matching(_written(program), patterns, f"{what}: {called}", names=_called)


def black_operators(program: Graph, lists: AutoMixedPrecisionLists) -> dict[Operator, Reason]:
    """Operators that a pattern of ``custom_black_varnames`` or of the preset keeps fp32, each with the reason."""
    found: dict[Operator, Reason] = {}
    chosen = sorted(filter(is_pattern, lists.black_varnames))
    if not chosen and not lists.black_patterns:
        return found
    known, operators = _variable_names(program), _written(program)
    chosen = [name for name in chosen if name not in known]
    named = (chosen, "custom_black_varnames", Kind.BLACK_NAME), (lists.black_patterns, "the preset", Kind.PRESET)
    for patterns, where, kind in named:
        for op, pattern in matching(operators, patterns, where, names=_called, required=False).items():
            found.setdefault(op, Reason(kind, pattern))
    return found


def _variable_names(program: Graph) -> set[str]:
    return {v.name for each in programs(program) for v in each.variables}


def _written(program: Graph) -> list[Operator]:
    """The operators of the program as it was written."""
    return [op for op in program.walk() if not op.inserted]


def _called(op: Operator) -> list[str]:
    """What an operator goes by: name, scope, what it makes, and the parameters that it reads."""
    made = [written_name(v) for v in op.outputs if v is not None]
    read = [source(v) for v in op.inputs if v is not None]
    return [op.name, op.scope, *made, *(v.name for v in read if v.persistable)]
