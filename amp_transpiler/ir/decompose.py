"""Operators decomposed into those of ai.onnx that gradient rules, lowering rules and precision lists are written for.

An entry is one decorated function that writes operators and returns the values of the outputs::

    @decomposition("com.microsoft::BiasGelu")
    def bias_gelu(d, op, x, bias):
        return [d.Gelu(d.Add(x, bias))]

``d`` is a :class:`Parts`; the entry gets the operator's input variables by slot, None where one is left out. What it
writes has the form of the target opset and takes over name, scope, marks and reason of the operator. It raises
:class:`~amp_transpiler.errors.GraphError` for what it cannot express, which names the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, overload

import numpy as np

from amp_transpiler.errors import GraphError
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.infer import Declared, declare_missing, infer_operator
from amp_transpiler.ir.metadata import FULL, FUSED
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import lookup, lowering_rule_of
from amp_transpiler.ir.operator_call import OperatorCall
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.ir.rule_errors import rule_of
from amp_transpiler.ir.types import ONNX_TYPES, numpy_dtype
from amp_transpiler.lists import split_name

#: Domains of which onnxruntime has operators.
RUNTIME_DOMAINS = frozenset({"", "ai.onnx.ml", "com.microsoft"})
Entry = Callable[..., Sequence[Variable | None]]
_ENTRIES: dict[tuple[str, str], Entry] = {}


def decomposition(*full_types: str) -> Callable[[Entry], Entry]:
    """Register the decorated function for operators ``Type`` or ``domain::Type``."""

    def register(function: Entry) -> Entry:
        for full_type in full_types:
            _ENTRIES[split_name(full_type)] = function
        return function

    return register


def has_decomposition(op: Operator) -> bool:
    """Whether there is an entry for this operator."""
    return decomposition_of(op) is not None


def decomposition_of(op: Operator) -> Entry | None:
    """The entry for this operator."""
    return _ENTRIES.get((op.domain, op.type))


class Parts:
    """Writes operators in the place of one: ``d.Mul(a, b)`` adds a Mul to its program and gives its output.

    Inputs are variables, None, numbers (a scalar of the element type of the first variable) or lists of integers
    (int64). Operators with several outputs give a tuple: ``outputs=``.
    """

    def __init__(self, op: Operator) -> None:
        self.op = op
        self.program = op.program
        first = next(v for v in op.outputs if v is not None)
        self.prefix = first.name
        #: What was written: operators, and their variables and constants.
        self.made: dict[Operator | Variable, None] = {}
        self._count = 0
        self._full = ""

    @contextmanager
    def fp32(self, why: Kind) -> Iterator[None]:
        """What is written inside runs in fp32 whatever the lists say: the operator computes this in fp32 inside."""
        before, self._full = self._full, str(Reason(why))
        try:
            yield
        finally:
            self._full = before

    def __getattr__(self, type_: str) -> OperatorCall[Any, Variable]:
        if not type_[:1].isupper():
            raise AttributeError(type_)
        return partial(self.add, type_)  # type: ignore[return-value]  # of the overloads mypy keeps one

    @overload
    def add(self, type_: str, *inputs: Any, outputs: int, **attrs: Any) -> tuple[Variable, ...]: ...
    @overload
    def add(self, type_: str, *inputs: Any, outputs: None = None, **attrs: Any) -> Variable: ...
    def add(
        self, type_: str, *inputs: Any, outputs: int | None = None, domain: str = "", **attrs: Any
    ) -> Variable | tuple[Variable, ...]:
        """Add one operator; attributes that are None are left out."""
        kind = next((v.dtype for v in inputs if isinstance(v, Variable)), None)
        read = [self._variable(v, kind) for v in inputs]
        written = [self.program.add_variable(self._name(type_)) for _ in range(1 if outputs is None else outputs)]
        kept = {k: v for k, v in attrs.items() if v is not None}
        op = self.program.add_operator(type_, read, written, attrs=kept, domain=domain)
        self.made[op] = None
        self.mark(op)
        env = Declared()
        infer_operator(op, env)
        for variable in written:
            self.made[variable] = None
            variable.dtype, variable.shape = env.types.get(variable.key, (kind, None))
        return written[0] if outputs is None else tuple(written)

    def cast(self, value: Variable, dtype: str | None) -> Variable:
        """``value`` in another element type; itself where it has it."""
        if value.dtype == dtype or dtype is None:
            return value
        return self.add("Cast", value, to=ONNX_TYPES[dtype])

    def const(self, array: Any, dtype: str | None = None) -> Variable:
        """A constant of the program."""
        array = np.asarray(array)
        typed = array if dtype is None else array.astype(numpy_dtype(dtype))
        constant = self.program.add_constant(self._name("const"), typed)
        self.made[constant] = None
        return constant

    def take_back(self) -> None:
        """Remove everything that was written."""
        for item in reversed(self.made):
            if isinstance(item, Operator):
                self.program.remove_operator(item)
        for item in self.made:
            if isinstance(item, Variable):
                self.program.remove_variable(item)

    def number(self, name: str, default: float) -> float:
        """A float attribute."""
        return float(self.op.attrs.get(name, default))

    def whole(self, name: str, default: int) -> int:
        """An integer attribute."""
        return int(self.op.attrs.get(name, default))

    def size(self, variable: Variable, axis: int) -> int | None:
        """The size of one axis where it is fixed."""
        if variable.shape is None:
            return None
        size = variable.shape[axis]
        return size if isinstance(size, int) else None

    def rank(self, variable: Variable) -> int:
        """The number of axes. GraphError where it is not known."""
        if variable.shape is None:
            raise self.error(f"the rank of '{variable.name}' is not known")
        return len(variable.shape)

    def error(self, reason: str) -> GraphError:
        """What to raise for a form that the entry does not know."""
        return GraphError(
            f"operator '{self.op.label}' ({self.op.full_type}) cannot be decomposed: {reason}. Export the model "
            "again without this operator"
        )

    def open_size(self, what: str) -> GraphError:
        """What to raise where a size that the entry needs is not known before the run."""
        return self.error(f"{what} is not fixed (amp.prepare_training(program, feed_shapes=...) fixes it)")

    def _name(self, hint: str) -> str:
        self._count += 1
        return self.program.unique(f"{self.prefix}/{hint}_{self._count}")

    def _variable(self, value: Any, kind: str | None) -> Variable | None:
        if value is None or isinstance(value, Variable):
            return value
        if isinstance(value, list):
            return self.const(np.array(value, np.int64))
        return self.const(value, kind)

    def mark(self, new: Operator) -> None:
        """Give a new operator the marks of the one that is decomposed."""
        op = self.op
        new.scope, new.guard, new.role, new.precision, new.why = op.scope, op.guard, op.role, op.precision, op.why
        new.metadata.update(op.metadata)
        if self._full:
            new.metadata[FULL] = self._full
        if op.name:
            new.name = f"{op.name}/{new.type}_{self._count}"


def decompose_operator(op: Operator) -> None:
    """Replace an operator by what its entry writes. GraphError where the entry cannot express it; then it stays."""
    write_instead(op, _ENTRIES[op.domain, op.type])


def write_instead(op: Operator, entry: Entry) -> list[Operator]:
    """Replace an operator by what ``entry`` writes, these operators; GraphError of the entry's, and it stays."""
    parts = Parts(op)
    try:
        with rule_of(op):
            values = list(entry(parts, op, *op.inputs))
        for slot, target in enumerate(op.outputs):
            if target is not None and (slot >= len(values) or values[slot] is None):
                raise parts.error(f"its output {slot} ('{target.name}') has no equivalent")
    except GraphError:
        parts.take_back()
        raise
    outputs = list(op.outputs)
    op.program.remove_operator(op)
    for target, value in zip(outputs, values, strict=False):
        if target is not None and value is not None:
            _hand_over(parts, value, target)
    return [item for item in parts.made if isinstance(item, Operator)]


def _hand_over(parts: Parts, value: Variable, target: Variable) -> None:
    """Let the producer of ``value`` write ``target`` instead."""
    producer, slot = value.producer, value.producer_slot
    if producer is None or value not in parts.made:
        parts.mark(parts.program.add_operator("Identity", [value], [target]))
        return
    if target.shape is None:
        target.shape = value.shape
    target.dtype = target.dtype or value.dtype
    producer.set_output(slot, None)
    producer.set_output(slot, target)
    parts.program.replace_uses(value, target)
    parts.program.remove_variable(value)


def decompose(program: Graph) -> int:
    """Decompose every operator that has an entry and no gradient rule for its form, nested programs too; their number.

    One whose form its entry cannot express stays; :func:`decompose_operator` says why.
    """
    count = 0
    for op in list(program.walk()):
        if has_decomposition(op) and not _is_differentiated(op):
            try:
                decompose_operator(op)
            except GraphError:
                continue
            count += 1
        elif count and not op.attrs.programs and any(v is not None and v.shape is None for v in op.outputs):
            _complete(op)  # import could not see through the operators before it
    return count


def runs_by_parts(op: Operator) -> bool:
    """Whether nothing runs an operator but what it is decomposed into: neither onnxruntime, nor a lowering rule."""
    return op.domain not in RUNTIME_DOMAINS and has_decomposition(op) and lowering_rule_of(op) is None


def write_out(program: Graph) -> None:
    """Put what they stand for in the place of operators that are marked as fused, in operators of ai.onnx."""
    for op in program.operators:
        if op.metadata.pop(FUSED, None):
            decompose_operator(op)


def _is_differentiated(op: Operator) -> bool:
    """Whether the operator itself has a gradient rule, and that serves its form."""
    found = lookup(op)
    if found is None or found.gradient is None:
        return False
    return found.gradient.refuse is None or not found.gradient.refuse(op)


def _complete(op: Operator) -> None:
    with suppress(GraphError):  # as import had left it
        declare_missing(op)
