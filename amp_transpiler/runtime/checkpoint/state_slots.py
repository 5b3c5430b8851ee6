"""What a program keeps between runs, and what each of it is for; and the fingerprint of a program."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import FORWARD, OWN, Operator, Variable
from amp_transpiler.ir.tensors import SMALL, as_array, tensor_type
from amp_transpiler.ops.training.all_reduce import ALL_GATHER, ALL_REDUCE
from amp_transpiler.ops.training.dealt_tables import SEND
from amp_transpiler.ops.training.monitor import INSPECT, SUMMARY
from amp_transpiler.ops.training.sparse import MERGE
from amp_transpiler.passes.view.training_step import TrainingStep, Update, training_step, ungated
from amp_transpiler.program import Program

PARAMETER, MASTER, STATISTICS, BUFFER, STATE = "parameter", "master", "statistics", "buffer", "state"
RANDOM, SCALING, RATE, RATE_STEP, UNUSED = "random", "loss_scaling", "learning_rate", "lr_step", "unused"
AVERAGED, AVERAGE_STEP = "ema", "ema_step"
SUM, BEFORE, MICRO_STEP = "accumulated", "before_window", "micro_step"
#: Roles of what a program has under a name of its own, whatever precision it trains in.
NAMED = frozenset({PARAMETER, STATISTICS, BUFFER, STATE, RANDOM})
#: Roles of what a program that only infers has.
INFERENCE = frozenset({PARAMETER, STATISTICS, BUFFER})
#: Roles of what a window of accumulation has.
OF_A_WINDOW = frozenset({SUM, BEFORE, MICRO_STEP})
#: Roles of what one precision, or one way to step, has and another has not.
OF_A_MODE = frozenset({MASTER, SCALING, UNUSED}) | OF_A_WINDOW

#: Attributes of operators of our own that say how ranks share the work.
_OF_RANKS = frozenset({"ranks", "over_ranks", "dealt"})

#: What stands for the same state in two programs: a group, the name or number that it goes by there.
Key = tuple[str, str, int]


@dataclass(frozen=True)
class Slot:
    """What a persistable variable is for: its role, the parameter (or variable) it belongs to, a running number.

    The number of what a window of accumulation has is that of its runs: a window of another number has nothing of it.

    The role of an optimizer's state is its kind ("moment1", "velocity", "beta1_pow_acc"); that of a master weight is
    "master", and ``of`` its parameter.
    """

    role: str
    of: str = ""
    number: int = 0

    def key(self, name: str) -> Key:
        """What this state goes by in every program that has it; ``name`` is the variable's."""
        if self.role in NAMED:
            return ("value", self.of or name, 0)
        return (self.role, name if self.role == UNUSED else self.of, self.number)


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its name there, element type, shape, role, and how to read it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    read: Callable[[], np.ndarray]


def state_slots(program: Program) -> dict[Variable, Slot]:
    """The persistable variables of a program, in order, each with what it is for."""
    step = training_step(program)
    slots: dict[Variable, Slot] = {}
    for variable, slot in _training_state(step):
        if variable is not None and variable.persistable:
            slots.setdefault(variable, slot)
    return {v: slots.get(v) or Slot(_plain_role(v, step), v.name) for v in program.variables if v.persistable}


def _training_state(step: TrainingStep) -> Iterator[tuple[Variable | None, Slot]]:
    for number, update in enumerate(step.updates):
        yield from _optimizer_state(update, number)
    for number, schedule in enumerate(step.schedules):
        yield schedule.read("step"), Slot(RATE_STEP, "", number)
    for number, average in enumerate(step.averages):
        yield average.read("step"), Slot(AVERAGE_STEP, "", number)
        yield from ((value, Slot(AVERAGED, parameter.name, number)) for parameter, value in step.averaged(average))
    # A static scale has no update, only the check; the alarm's counters come after the three of the rule.
    for number, scaling in enumerate(step.scale_updates):
        yield from ((state, Slot(SCALING, str(number), i)) for i, (state, _) in enumerate(scaling.states))
    for number, check in enumerate(step.checks):
        yield check.scale, Slot(SCALING, str(number))
    for number, alarm in enumerate(step.counters):
        yield from ((state, Slot(SCALING, str(number), i)) for i, (state, _) in enumerate(alarm.states, 3))
    if step.accumulation is not None:
        runs = step.accumulation.steps
        yield step.accumulation.counter, Slot(MICRO_STEP, "", runs)
        yield from ((total, Slot(SUM, parameter.name, runs)) for total, parameter in step.sums.items())
        yield from ((before, Slot(BEFORE, state.name, runs)) for before, state in step.before_window.items())


def _optimizer_state(update: Update, number: int) -> Iterator[tuple[Variable | None, Slot]]:
    yield update.learning_rate, Slot(RATE, "", number)
    yield from ((scalar, Slot(kind, "", number)) for kind, scalar in update.scalars.items())
    for row in update.rows:
        assert row.parameter is not None
        of = row.parameter.name
        yield row.parameter, Slot(PARAMETER, of)
        yield row.master, Slot(MASTER, of)
        yield from ((one, Slot(kind, of)) for kind, one in row.accumulators.items())


def _plain_role(variable: Variable, step: TrainingStep) -> str:
    if variable is step.rng_seed or variable is step.rng_step:
        return RANDOM
    if variable.trainable:
        return PARAMETER
    new = step.program.updates.get(variable)
    if new is None:
        return BUFFER if variable.readers else UNUSED
    value = ungated(new)
    forward = value is not None and value.producer is not None and value.producer.role == FORWARD
    return STATISTICS if forward else STATE


def scaler_settings(program: Program) -> list[dict[str, Any]]:
    """The attributes of every loss scaling update of a program."""
    found = [scaling.operator.attrs for scaling in training_step(program).scale_updates]
    return [{name: attrs[name] for name in attrs} for attrs in found]


# -- fingerprint ---------------------------------------------------------------------------------------
def fingerprint(program: Program) -> str:
    """A hash of what a program computes: operators, attributes, small constants, names of inputs and of state.

    Names of intermediate values, the values of weights and seeds, how many ranks share the work, and whether steps are
    reported play no part.
    """
    found = hashlib.sha256()
    for line in _lines(program, {}):
        found.update(line)
        found.update(b"\n")
    return found.hexdigest()


def _only_tells(op: Operator) -> bool:
    """Whether an operator is there for reports of steps alone."""
    return op.domain == OWN and op.type in (SUMMARY, INSPECT)


def _only_meets(op: Operator) -> bool:
    """Whether an operator is there for several ranks alone; it hands on what it reads."""
    merges = op.type == MERGE and "ranks" in op.attrs
    return op.domain == OWN and (op.type in (ALL_REDUCE, ALL_GATHER, SEND) or merges)


def _lines(program: Graph, numbers: dict[Variable, str]) -> Iterator[bytes]:
    opsets = {domain: version for domain, version in program.info.opsets.items() if domain != OWN}  # a file names ours
    yield repr(sorted(opsets.items())).encode()
    for variable in program.variables:
        if variable.persistable or variable.is_input:
            numbers[variable] = f"={variable.name}"
            kind = (variable.is_input, variable.persistable, variable.trainable)
            yield repr((variable.name, variable.dtype, variable.shape, *kind)).encode()
        elif variable.outer is not None:
            numbers[variable] = f"^{numbers.get(variable.outer, '?')}"
        elif variable.data is not None:
            numbers[variable] = _constant(variable.data)
    reduced: dict[Variable, str] = {}
    for op in program.operators:
        if _only_tells(op):
            continue
        if _only_meets(op):
            pairs = zip(op.inputs, op.outputs, strict=True)
            for old, new in pairs:
                if old is not None and new is not None:
                    reduced[new] = numbers.get(old) or reduced[old]
            continue
        for output in op.outputs:
            if output is not None:
                numbers.setdefault(output, f"%{len(numbers)}")
        names = [
            [v and (numbers.get(v) or reduced.get(v, "?")) for v in variables] for variables in (op.inputs, op.outputs)
        ]
        yield repr((op.type, op.domain, op.role, *names)).encode()
        for proto in sorted(op.attrs.protos(), key=lambda proto: proto.name):
            if op.domain == OWN and proto.name in _OF_RANKS:
                continue
            yield proto.SerializeToString(deterministic=True)
        for nested in op.attrs.programs:
            yield from _lines(nested, numbers)
    spread = program.accumulation.updates if program.accumulation is not None else {}
    for updates in (program.updates, spread):
        yield repr([(numbers[state], numbers.get(new, "?")) for state, new in updates.items()]).encode()
    yield repr(program.accumulation and program.accumulation.steps).encode()


def _constant(data: Any) -> str:
    dtype, shape = tensor_type(data)
    content = ""
    array = as_array(data)
    if array.size <= SMALL:
        content = hashlib.sha256(repr(array.tolist()).encode()).hexdigest()
    return f"#{dtype}{list(shape)}{content}"
