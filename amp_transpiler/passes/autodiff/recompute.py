"""Recompute (activation checkpointing): gradients read activations that are computed again, not kept.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost". After the gradients are appended, the forward
operators of a segment that they need are copied. The copies read what enters the segment through an operator that
waits for the gradient reaching the segment, so that they run late and are not merged with the originals (see
``ops/training/recompute_barrier.py``); the gradient operators of the segment then read the copies. What leaves a
segment stays, and so do feeds, parameters and constants. Masks of a dropout are drawn again from the same numbers;
running statistics are updated by the first computation alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import BACKWARD, FORWARD, OWN, Operator, Variable
from amp_transpiler.ir.opdef import lowering_rule_of, traits_of
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.ops.training.random import MASK_ID, mask_stream
from amp_transpiler.ops.training.recompute_barrier import DROPOUT, INPUT, TOKEN

#: A gradient operator and the forward operator that it belongs to.
Made = Sequence[tuple[Operator, Operator]]


@dataclass
class Segment:
    """Forward operators whose results are computed again. ``name`` is for messages and reasons."""

    name: str
    operators: list[Operator] = field(default_factory=list)


def insert(program: Graph, loss: Variable, segments: Sequence[Segment], made: Made, stays: set[int]) -> int:
    """Let gradients read recomputed activations; the number of operators that run twice.

    ``made`` lists the gradient operators in the order in which they were appended, ``stays`` the keys of variables
    that are kept whatever the segments say.
    """
    kept = stays | {v.key for v in program.updates.values()} | {v.key for v in program.outputs}
    sizes = _of_sizes(program)
    of = {op.key: segment for segment in segments for op in segment.operators if _repeatable(op)}
    gradients: dict[int, list[tuple[Operator, Operator]]] = {}
    for gradient, forward in made:
        if forward.key in of:
            gradients.setdefault(id(of[forward.key]), []).append((gradient, forward))
    copies = 0
    for segment in segments:
        inside = {op.key for op in segment.operators if of.get(op.key) is segment}
        copies += _Copier(program, loss, segment, inside, kept, sizes).run(gradients.get(id(segment), []))
    return copies


def _repeatable(op: Operator) -> bool:
    return op.role == FORWARD and not traits_of(op).random and not op.attrs.graphs


def _of_sizes(program: Graph) -> set[int]:
    """The variables that are computed of sizes and constants alone, which gradients may have to know before the run."""
    found: set[int] = set()
    for op in program.operators:
        known = all(v is None or v.is_constant or v.key in found for v in op.inputs)
        if traits_of(op).shape_only or (known and _repeatable(op)):
            found |= {v.key for v in op.outputs if v is not None}
    return found


class _Copier:
    """Copies what the gradients of one segment need of it."""

    def __init__(
        self, program: Graph, loss: Variable, segment: Segment, inside: set[int], kept: set[int], sizes: set[int]
    ) -> None:
        self.program, self.loss, self.segment = program, loss, segment
        self.inside, self.kept, self.sizes = inside, kept, sizes
        self.copies: dict[int, Variable] = {}  # variable -> its recomputed or late form
        self.late: dict[int, Variable] = {}
        self.known: dict[int, bool] = {}
        self.token: Variable | None = None

    def run(self, gradients: Made) -> int:
        wanted = {
            v.key: v for gradient, _ in gradients for v in gradient.inputs if v is not None and self._recomputed(v)
        }
        if not wanted:
            return 0
        source = self._reaching(gradients)
        needed = self._needed(wanted)
        count = 0
        for op in self.segment.operators:
            if op.key in self.inside and any(v is not None and v.key in needed for v in op.outputs):
                count += self._copy(op, source)
        for gradient, _ in gradients:
            for slot, v in enumerate(list(gradient.inputs)):
                if v is not None and (v.key in self.copies or v.key in self.late):
                    gradient.set_input(slot, self.copies.get(v.key) or self.late[v.key])
        return count

    def _recomputed(self, variable: Variable) -> bool:
        """Whether the variable is made in the segment and used nowhere else in the forward pass."""
        op = variable.producer
        if op is None or op.key not in self.inside or variable.key in self.kept:
            return False
        if variable.key not in self.known:
            readers = (reader for reader, _ in variable.readers)
            self.known[variable.key] = all(r.role == BACKWARD or r.key in self.inside for r in readers)
        return self.known[variable.key]

    def _needed(self, wanted: dict[int, Variable]) -> set[int]:
        """What has to be computed again for the wanted variables; one reverse sweep."""
        needed = set(wanted)
        for op in reversed(self.segment.operators):
            if op.key in self.inside and any(v is not None and v.key in needed for v in op.outputs):
                needed |= {v.key for v in op.inputs if v is not None and self._recomputed(v)}
        return needed

    def _reaching(self, gradients: Made) -> Variable:
        """A gradient that arrives before anything of the segment is read for it; the loss where there is none."""
        for gradient, _ in gradients:
            if any(v is not None and self._recomputed(v) for v in gradient.inputs):
                found = [
                    v for v in gradient.inputs if v is not None and v.grad_of is not None and v.producer is not None
                ]
                return found[0] if found else self.loss
        return self.loss

    # -- copies ----------------------------------------------------------------------------------------
    def _copy(self, op: Operator, source: Variable) -> int:
        """Copy one operator, unless it reads parameters and constants alone: then the gradients read the original."""
        inputs = [v if v is None else self._input(v, source) for v in op.inputs]
        if all(new is old for new, old in zip(inputs, op.inputs, strict=True)):
            return 0
        outputs = [None if v is None else self._output(v) for v in op.outputs]
        if op.full_type == "Dropout" and lowering_rule_of(op) is not None:
            inputs = [self._token(source), *inputs]
            copy = self._add(op, DROPOUT, OWN, inputs, outputs)
            copy.metadata[MASK_ID] = str(mask_stream(op))
        else:
            self._add(op, op.type, op.domain, inputs, outputs)
        return 1

    def _add(
        self,
        op: Operator,
        type_: str,
        domain: str,
        inputs: Sequence[Variable | None],
        outputs: Sequence[Variable | None],
    ) -> Operator:
        name = f"{op.name}/recomputed" if op.name else ""
        copy = self.program.add_operator(
            type_, inputs, outputs, attrs=op.attrs.copy(), domain=domain, name=name, role=BACKWARD
        )
        copy.metadata.update(op.metadata)
        copy.guard, copy.scope, copy.precision = op.guard, op.scope, op.precision
        copy.why = Reason(Kind.RECOMPUTED, self.segment.name)
        return copy

    def _input(self, variable: Variable, source: Variable) -> Variable:
        if variable.key in self.copies:
            return self.copies[variable.key]
        # Running statistics change: a kernel that writes over them must get a copy of its own.
        known = variable.is_constant or variable.key in self.sizes
        fixed = known or (variable.persistable and variable not in self.program.updates)
        made_here = variable.producer is not None and variable.producer.key in self.inside
        if fixed or (made_here and self._recomputed(variable)):
            return variable  # in the second case what makes it reads parameters and constants alone
        if variable.key not in self.late:
            late = self._new(variable, f"{variable.name}@LATE")
            op = self.program.add_operator(INPUT, [self._token(source), variable], [late], domain=OWN, role=BACKWARD)
            op.guard, op.scope = False, self.segment.operators[0].scope
            self.late[variable.key] = late
        return self.late[variable.key]

    def _output(self, variable: Variable) -> Variable:
        self.copies[variable.key] = self._new(variable, f"{variable.name}@RECOMPUTED")
        return self.copies[variable.key]

    def _new(self, variable: Variable, name: str) -> Variable:
        new = self.program.fresh_variable(name, variable.dtype, variable.shape)
        new.type_proto, new.stop_gradient = variable.type_proto, True
        return new

    def _token(self, source: Variable) -> Variable:
        if self.token is None:
            self.token = self.program.fresh_variable(f"{source.name}@TOKEN", "float32", ())
            op = self.program.add_operator(TOKEN, [source], [self.token], domain=OWN, role=BACKWARD)
            op.guard, op.scope = False, self.segment.operators[0].scope
        return self.token
