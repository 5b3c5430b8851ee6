"""How numbers that 16 bit cannot hold go on through a program, and where they end.

A tensor *may overflow* where its elements may leave the format's range, is a *square* where they are squares on the
way to a sum (which leave the range, and lose small terms below it), *may underflow* where they may sink to zero before
a division or a logarithm, and is an *inverse* where they are one over what may underflow. None of them is stored in 16
bit. They end where an operator brings them back into range: a root, a logarithm, a tanh, a softmax, a norm, a division.

A matrix product or convolution that reads what may overflow runs in fp32, but its result counts as an ordinary tensor
again: sums and powers that only may overflow would otherwise turn whole networks to fp32 for numbers that no trained
network feeds to a product. Weights that hold numbers beyond the format do make products that may overflow.
"""

from __future__ import annotations

from collections.abc import Callable

from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import moves, traits_of
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.ir.types import FLOATS
from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.passes.numerics.masks import HIGH, LOW, Masks, flipped
from amp_transpiler.passes.view.constants import is_constant
from amp_transpiler.passes.view.flow import Flow
from amp_transpiler.passes.view.names import label

MAY_OVERFLOW, SQUARE, MAY_UNDERFLOW, INVERSE = 4, 8, 16, 32
#: A constant whose digits vanish in 16 bit; one that holds numbers beyond it.
VANISHING, BEYOND = 64, 128
_KEPT = MAY_OVERFLOW | SQUARE | MAY_UNDERFLOW | INVERSE | VANISHING | BEYOND

Cause = tuple[Operator | None, Reason]

#: What statistics do with sums of squares before the root, in the words in which exporters write them.
_STATISTICS = frozenset(
    """
    Abs Add AveragePool CumSum GlobalAveragePool Max Mean Min Mul ReduceMax ReduceMean ReduceMin ReduceSum Relu Sub Sum
    """.split()  # noqa: SIM905
)
#: What they do with the root before the division.
_DIVISORS = frozenset({"Add", "Sum", "Mul", "Max", "Min", "Abs", "Sqrt"})


class OverflowPropagation:
    """One sweep over a program that finds the tensors not to be stored in 16 bit, from the operators that make them.

    ``fits`` says whether a tensor is proved to lie within the format.
    """

    def __init__(self, masks: Masks, constraints: Constraints, fits: Callable[[Variable], bool]) -> None:
        self.flow, self.dtype, self.limit = masks.flow, masks.dtype, masks.limit
        self.constraints, self.masks, self.fits = constraints, masks, fits
        #: What is known of a tensor, as bits, and where that comes from.
        self.state: dict[Variable, int] = {}
        self.cause: dict[Variable, Cause] = {}
        self._words: dict[Cause, Reason] = {}
        self.divides = _before_division(self.flow)

    def sweep(self, seed: Callable[[Operator, str], tuple[int, Reason] | None]) -> None:
        """Go over the program; ``seed`` says what an operator makes of ordinary operands, and why it is kept."""
        for _ in range(2 if self.flow.loops else 1):
            for op, name, read in self.flow.steps:
                found = seed(op, name)
                if found is not None or (self.state and not self.state.keys().isdisjoint(read)):
                    self._visit(op, name, read, found)

    def mark(self, variable: Variable, bits: int, cause: Cause) -> None:
        """Note what is known of a tensor, inside and outside of nested graphs.

        ``cause``: the operator that it comes from (None for a tensor that the words name) and why.
        """
        pending = [variable]
        while pending:
            variable = pending.pop()
            known = self.state.get(variable, 0)
            new = bits | known
            if new & MAY_OVERFLOW and not new & BEYOND and self.fits(variable):
                new &= ~MAY_OVERFLOW
            if new == known:
                continue
            self.state[variable] = new
            self.cause.setdefault(variable, cause)
            if new & _KEPT:
                maker, why = cause
                here = maker is None or maker is variable.producer
                self.constraints.keep_tensor(variable, why if here else self._after(cause))
            for edges in (self.flow.results, self.flow.entries, self.flow.loops):
                pending.extend(edges.get(variable, ()))

    def _after(self, cause: Cause) -> Reason:
        """The reason for a tensor further on."""
        if cause not in self._words:
            maker, why = cause
            self._words[cause] = Reason(Kind.AFTER, label(maker), cause=why) if maker is not None else why
        return self._words[cause]

    def _visit(self, op: Operator, name: str, read: list[Variable | None], seed: tuple[int, Reason] | None) -> None:
        known = [self.state.get(v, 0) if v is not None else 0 for v in read]
        bits, cause = 0, None
        if any(known):
            masked = self._masked(op, known)
            if masked and seed is None and self.masks.crowded(op, name):
                seed = MAY_OVERFLOW, Reason(Kind.MASKS)
            bits = masked | self._carried(op, name, known)
            cause = next(self.cause[v] for v, b in zip(read, known, strict=True) if b and v is not None)
        if seed is not None and not bits & SQUARE:  # the sum of squares is about the squares
            self.constraints.keep(op, seed[1])
            cause = op, seed[1]
        elif cause is not None and not op.attrs.programs and any(each & _KEPT for each in known):
            self.constraints.keep(op, self._after(cause))
        bits |= seed[0] if seed is not None else 0
        if not bits or cause is None or _cast_down(op, name, self.dtype):
            return
        for made in op.outputs:
            if made is not None and made.dtype in FLOATS:
                self.mark(made, bits, cause)

    # -- what an operator makes of what it reads ------------------------------------------------------
    def _carried(self, op: Operator, name: str, known: list[int]) -> int:
        bits = 0
        if moves(op):
            for slot, each in enumerate(known):
                if moves(op, slot):
                    bits |= each & ~(LOW | HIGH)
            return bits
        for slot, each in enumerate(known):
            if each & (MAY_OVERFLOW | BEYOND):
                bits |= self._overflow(op, name, slot, known)
            if each & SQUARE:
                bits |= self._square(op, name, slot, known)
            if each & (MAY_UNDERFLOW | VANISHING):
                bits |= self._underflow(op, name, slot, each)
            if each & INVERSE and name == "Mul" and self.flow.number(self.flow.inputs[op][1 - slot]) is not None:
                bits |= INVERSE
        return bits

    def _masked(self, op: Operator, known: list[int]) -> int:
        """Masked places of the result."""
        bits = 0
        for slot, each in enumerate(known):
            sign = self.masks.through(op, slot) if each & (LOW | HIGH) else None
            if sign is not None:
                bits |= flipped(each & (LOW | HIGH), sign)
        return bits

    def _overflow(self, op: Operator, name: str, slot: int, known: list[int]) -> int:
        if name == "Mul":
            return (
                0
                if known[1 - slot] & INVERSE or self._means(op, self.flow.number(self.flow.inputs[op][1 - slot]))
                else MAY_OVERFLOW
            )
        traits = traits_of(op)
        if traits.carries_large:
            return MAY_OVERFLOW
        if traits.product:
            return MAY_OVERFLOW if known[slot] & BEYOND else 0
        if name == "Div" and slot == 0:
            number, divisor = self.flow.number(self.flow.inputs[op][1]), self.flow.inputs[op][1]
            if number is None:  # several, each its own, bring nothing back into range either
                return MAY_OVERFLOW if divisor is not None and is_constant(divisor) else 0
            return MAY_OVERFLOW if number and not self._means(op, 1 / number) else 0
        if name == "Clip" and slot == 0:
            return 0 if self._clips(op) else MAY_OVERFLOW
        if name == "Pow" and slot == 0:
            return self._power(op, MAY_OVERFLOW)
        return self._root(op, name)

    def _means(self, op: Operator, factor: float | None) -> bool:
        """Whether the constant factor makes the mean of a sum."""
        for variable in self.flow.inputs[op]:
            terms = summed_terms(variable.producer, self.flow) if variable is not None and variable.producer else None
            if terms and factor is not None and abs(factor) * terms <= 1.001:
                return True
        return False

    def _clips(self, op: Operator) -> bool:
        """Whether both bounds are constants within the format."""
        bounds = [op.attrs.get("min"), op.attrs.get("max")]
        if len(op.inputs) > 1:
            bounds = [self.flow.number(op.input(1)), self.flow.number(op.input(2))]
        return all(bound is not None and abs(bound) <= self.limit for bound in bounds)

    def _power(self, op: Operator, bits: int) -> int:
        exponent = self.flow.number(op.input(1))
        if exponent is None or exponent >= 1:
            return bits
        return INVERSE if exponent < 0 else self._root(op, "Sqrt")

    def _root(self, op: Operator, name: str) -> int:
        """A root is in range again, but a division by it needs its digits."""
        made = op.output(0)
        return MAY_UNDERFLOW if name == "Sqrt" and made is not None and made in self.divides else 0

    def _square(self, op: Operator, name: str, slot: int, known: list[int]) -> int:
        if name in _STATISTICS or (name in ("Div", "Clip") and slot == 0):
            return SQUARE
        if traits_of(op).product and any(v in self.divides for v in op.outputs if v is not None):
            return SQUARE  # bands of a spectrum
        if name == "Pow" and slot == 0:
            return self._power(op, SQUARE)
        bits = self._root(op, name)
        return bits or (self._overflow(op, name, slot, known) if self.dtype == "float16" else 0)

    def _underflow(self, op: Operator, name: str, slot: int, bits: int) -> int:
        numerator = self.flow.inputs[op][0]
        if name == "Reciprocal" or (name == "Pow" and slot == 0 and (self.flow.number(op.input(1)) or 0) < 0):
            return INVERSE
        if name == "Div" and slot == 1:
            return MAY_OVERFLOW if bits & VANISHING else INVERSE if self.flow.number(numerator) is not None else 0
        if bits & VANISHING and (name in ("Mul", "Div") or traits_of(op).product):
            return MAY_UNDERFLOW
        carries = name in _DIVISORS or name == "Clip" or (name in ("Div", "Pow") and slot == 0)
        made = op.output(0)
        return MAY_UNDERFLOW if carries and made is not None and made in self.divides else 0


def _cast_down(op: Operator, name: str, dtype: str) -> bool:
    """Whether it is the program's own cast to 16 bit: whoever wrote it wants just that."""
    made = op.output(0)
    return name == "Cast" and made is not None and made.dtype == dtype


def _before_division(flow: Flow) -> frozenset[Variable]:
    """Tensors that a division, a logarithm or a negative power reads, at once or after what statistics do between."""

    def passes(op: Operator, slot: int) -> bool:
        name = op.full_type
        return name in _DIVISORS or moves(op, slot) or (slot == 0 and name in ("Clip", "Div", "Pow"))

    steps = flow.of("Reciprocal", "Log", "Div", "Pow")
    divide = [step for step in steps if step[1] != "Pow" or (flow.number(step[0].input(1)) or 0) < 0]
    return flow.before((read[name == "Div"] for _, name, read in divide), passes)


def summed_terms(op: Operator, flow: Flow) -> int | None:
    """How many elements a sum over axes adds into each of its results; None where that is not known."""
    x = op.input(0)
    if traits_of(op).reduces != "sum" or x is None or x.shape is None:
        return None
    shape = x.shape
    axes = op.attrs.get("axes")
    if axes is None and op.input(1) is not None:
        axes = flow.integers(op.input(1))
        if axes is None:
            return None
    if not axes:
        axes = () if op.attrs.get("noop_with_empty_axes") else range(len(shape))
    total = 1
    for axis in axes:
        size = shape[axis] if -len(shape) <= axis < len(shape) else None
        if not isinstance(size, int):
            return None
        total *= size
    return total
