"""What a training step computes and exchanges, unit by unit: the nodes that several ranks really run,
or the operators of a program that was built by one rank, with the exchanges that they would have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import onnx

from amp_transpiler.errors import ArgumentError
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.infer import static
from amp_transpiler.ir.kernel_cost import tensor_bytes
from amp_transpiler.ir.nodes import BACKWARD, FORWARD, OWN, Operator, Variable
from amp_transpiler.ir.opdef import exchange_of
from amp_transpiler.ir.types import BYTES, FLOATS
from amp_transpiler.ops.training.all_reduce import ALL_GATHER, ALL_REDUCE
from amp_transpiler.passes.lowering.cost_estimate import Counted
from amp_transpiler.passes.lowering.kernels import Alike, work_of
from amp_transpiler.passes.lowering.lowered import used_tensors
from amp_transpiler.passes.lowering.rounds import Rounds, rounds
from amp_transpiler.passes.lowering.tensor_types import Type, inferred, types_in
from amp_transpiler.passes.view.training_step import TrainingStep, replaced

REDUCED, GATHERED, DEALT = "reduced", "gathered", "dealt"


@dataclass(frozen=True)
class Sent:
    """What a rank brings to an exchange: ``size`` bytes of a type.

    ``how``: "reduced", every rank gets the mean of all; "gathered", what all bring; "dealt", a part of each.
    """

    how: str
    dtype: str
    size: int


@dataclass
class Units:
    """``reads``: the units from which each reads, all before it. ``work``: the kernels of each, by kind, with their
    number. ``sent``: what the units that are exchanges bring, ``uneven`` ones perhaps other bytes on each rank."""

    reads: list[list[int]] = field(default_factory=list)
    work: list[Counter[Alike]] = field(default_factory=list)
    sent: dict[int, list[Sent]] = field(default_factory=dict)
    uneven: set[int] = field(default_factory=set)

    def add(self, reads: Iterable[int], sent: list[Sent] | None = None) -> int:
        """Add a unit; its number."""
        self.reads.append(sorted(set(reads)))
        self.work.append(Counter())
        if sent is not None:
            self.sent[len(self.reads) - 1] = sent
        return len(self.reads) - 1

    def rounds(self) -> Rounds:
        """The parts in which the step runs, and what leaves after which."""
        sizes = {unit: sum(each.size for each in sent) for unit, sent in self.sent.items()}
        return rounds(self.reads, sizes, self.uneven)


def units_of(program: Graph, step: TrainingStep, counted: Counted, precision: str | None) -> Units:
    """The units of a step that is lowered and counted. ``precision``: the type in which gradients travel."""
    if any(node.domain == OWN and exchange_of(node.op_type) for node in counted.lowered.model.graph.node):
        return _nodes(counted, precision)
    return _Imagined(program, step, counted, precision).units


def _nodes(counted: Counted, precision: str | None) -> Units:
    """The nodes of a lowered step that exchanges."""
    units, maker = Units(), dict[str, int]()
    types = types_in(inferred(counted.lowered))
    for node in counted.lowered.model.graph.node:
        call = exchange_of(node.op_type) if node.domain == OWN else None
        sent = None if call is None else _sent(node, types, precision)
        number = units.add((maker[name] for name in used_tensors([node]) if name in maker), sent)
        if call is not None and call.uneven:
            units.uneven.add(number)
        maker.update((name, number) for name in node.output if name)
    for kernel in counted.kernels:
        if kernel.node not in units.sent:
            units.work[kernel.node].update(work_of([kernel]))
    return units


def _sent(node: onnx.NodeProto, types: Mapping[str, Type], precision: str | None) -> list[Sent]:
    """What a node brings. Where each rank may bring other bytes, as much as it brings or gets, whichever is less."""
    sent, received = ([_bytes(types[name]) for name in names] for names in (node.input, node.output))
    kinds = [types[name][0] for name in node.input]
    call = exchange_of(node.op_type)
    if call is not None and call.uneven:
        return [Sent(DEALT, kinds[0], min(sum(sent), sum(received)))]
    how = REDUCED if call is not None and call.in_place else GATHERED if sum(received) > sum(sent) else DEALT
    found = []
    for dtype, size in zip(kinds, sent, strict=True):
        if precision is not None and dtype in FLOATS and node.op_type in (ALL_REDUCE, ALL_GATHER):
            size, dtype = size // BYTES[dtype] * BYTES[precision], precision
        found.append(Sent(how, dtype, size))
    return found


def _bytes(found: Type) -> int:
    return tensor_bytes((found[0], found[1] or ()))


class _Imagined:
    """The operators of a program that was built by one rank, and exchanges of its gradients."""

    def __init__(self, program: Graph, step: TrainingStep, counted: Counted, precision: str | None) -> None:
        self.program, self.counted = program, counted
        scaled = {made: source for check in step.checks for source, made in check.gradients}
        found = dict.fromkeys(_raw(gradient, scaled) for _, gradient in step.gradients)
        self.precision = precision or self._narrowest()
        sparse = [gradient for gradient in found if gradient.rows is not None]
        self.gradients = [*sparse, *(gradient for gradient in found if gradient.rows is None)]
        self.units, self.made = Units(), dict[int, int]()
        behind = self._behind()
        for op in program.operators:
            if op.key not in behind:
                self._add(op, {})
        come = {gradient.key: self._exchange(gradient) for gradient in self.gradients}
        for op in program.operators:
            if op.key in behind:
                self._add(op, come)
        rest = self.units.add(())
        numbers = {each.key: self._number(op) for op in program.operators for each in (op, *_inside(op))}
        for kernel in counted.kernels:
            number = rest if kernel.operator is None else numbers.get(kernel.operator.key, rest)
            self.units.work[number].update(work_of([kernel]))

    def _narrowest(self) -> str:
        """The type in which ``decorate`` lets gradients travel by default."""
        used = {v.dtype for v in self.program.variables}
        return next((dtype for dtype in ("float16", "bfloat16") if dtype in used), "float32")

    def _behind(self) -> set[int]:
        """The operators that need a gradient of all ranks."""
        keys, waiting, behind = {g.key for g in self.gradients}, set[int](), set[int]()
        for op in self.program.operators:
            read = [v.key for v in (*op.inputs, *op.captures) if v is not None]
            waits = op.role not in (FORWARD, BACKWARD) and not keys.isdisjoint(read)
            if waits or not waiting.isdisjoint(read):
                behind.add(op.key)
                waiting.update(v.key for v in op.outputs if v is not None)
        return behind

    def _add(self, op: Operator, come: Mapping[int, int]) -> None:
        """``come``: the exchanges of gradients, for those who read them behind."""
        read = (v.key for v in (*op.inputs, *op.captures) if v is not None)
        number = self.units.add(n for key in read if (n := come.get(key, self.made.get(key))) is not None)
        self.made.update((v.key, number) for v in op.outputs if v is not None)

    def _number(self, op: Operator) -> int:
        return next((self.made[v.key] for v in op.outputs if v is not None), len(self.units.reads) - 1)

    def _exchange(self, gradient: Variable) -> int:
        parts = [(gradient, self.precision)] if gradient.rows is None else [(gradient.rows, "int64")]
        parts += [] if gradient.rows is None else [(gradient, self.precision)]
        how = REDUCED if gradient.rows is None else GATHERED
        reads = [self.made[v.key] for v, _ in parts if v.key in self.made]
        return self.units.add(reads, [Sent(how, dtype, size_of(self.counted, v, dtype)) for v, dtype in parts])


def _inside(op: Operator) -> Iterable[Operator]:
    return (each for inner in op.attrs.programs for each in inner.walk())


def _raw(gradient: Variable, scaled: Mapping[Variable | None, Variable | None]) -> Variable:
    """The gradient as the backward pass has made it, of one that was unscaled or rounded since."""
    while (op := gradient.producer) is not None and op.role not in (FORWARD, BACKWARD):
        same = (v for v in op.inputs if v is not None and v.grad_of is gradient.grad_of is not None)
        source = scaled.get(gradient) or replaced(gradient) or next(same, op.input(0))
        if source is None or source.persistable:
            break
        gradient = source
    return gradient


def size_of(counted: Counted, variable: Variable, dtype: str | None = None) -> int:
    """Bytes of a variable of a program that is lowered, in a type. ArgumentError where its shape is not known."""
    value = counted.lowered.tensors.get(variable.name)
    shape = static(variable.shape) if value is None or value.shape is None else static(value.shape)
    if shape is None:
        raise ArgumentError(
            f"plan: the shape of '{variable.name}' of program '{variable.program.name}' is not known; give the shapes "
            "of all feeds, as in feed_shapes={'x': (8, 3)}"
        )
    return tensor_bytes((str(dtype or variable.dtype), shape))
