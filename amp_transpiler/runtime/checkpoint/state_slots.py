"""What a program keeps between runs, and what each of it is for; and the fingerprint of a program."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import FORWARD, OWN, Operator, Variable
from amp_transpiler.ir.tensors import SMALL, as_array, tensor_type
from amp_transpiler.ops.training.average import AVERAGE, average_states, averaged_parameters
from amp_transpiler.ops.training.random import SEED, STEP
from amp_transpiler.ops.training.scaling import CHECK, COUNT_BAD, GATE, UPDATE_SCALE
from amp_transpiler.ops.training.schedule import LEARNING_RATE
from amp_transpiler.ops.training.update import LAYOUTS
from amp_transpiler.program import Program

PARAMETER, MASTER, STATISTICS, BUFFER, STATE = "parameter", "master", "statistics", "buffer", "state"
RANDOM, SCALING, RATE, RATE_STEP, UNUSED = "random", "loss_scaling", "learning_rate", "lr_step", "unused"
AVERAGED, AVERAGE_STEP = "ema", "ema_step"
SUM, BEFORE, TURN = "accumulated", "before_window", "micro_step"
#: Roles of what a program has under a name of its own, whatever precision it trains in.
NAMED = frozenset({PARAMETER, STATISTICS, BUFFER, STATE, RANDOM})
#: Roles of what a program that only infers has.
INFERENCE = frozenset({PARAMETER, STATISTICS, BUFFER})
#: Roles of what a window of accumulation has.
OF_A_WINDOW = frozenset({SUM, BEFORE, TURN})
#: Roles of what one precision, or one way to step, has and another has not.
OF_A_MODE = frozenset({MASTER, SCALING, UNUSED}) | OF_A_WINDOW

#: What stands for the same state in two programs: a group, the name or number that it goes by there.
Key = tuple[str, str, int]


@dataclass(frozen=True)
class Slot:
    """What a persistable variable is for: its role, the parameter (or variable) it belongs to, a running number.

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


def state_slots(program: Program) -> dict[Variable, Slot]:
    """The persistable variables of a program, in order, each with what it is for."""
    slots: dict[Variable, Slot] = {}
    for variable, slot in _training_state(program):
        if variable is not None and variable.persistable:
            slots.setdefault(variable, slot)
    return {v: slots.get(v) or Slot(_plain_role(v, program), v.name) for v in program.variables if v.persistable}


def _training_state(program: Program) -> Iterator[tuple[Variable | None, Slot]]:
    operators = [op for op in program.operators if op.domain == OWN]
    for number, op in enumerate(op for op in operators if op.type in LAYOUTS):
        yield from _optimizer_state(op, number)
    for number, op in enumerate(op for op in operators if op.type == LEARNING_RATE):
        yield op.inputs[0], Slot(RATE_STEP, "", number)
    for number, op in enumerate(op for op in operators if op.type == AVERAGE):
        step, *averages = average_states(op.inputs)
        yield step, Slot(AVERAGE_STEP, "", number)
        yield from ((a, Slot(AVERAGED, p.name, number)) for a, p in zip(averages, averaged_parameters(op), strict=True))
    # A static scale has no update, only the check; the alarm's counters come after the three of the rule.
    for type_, first, last, slot in ((UPDATE_SCALE, 1, 4, 0), (CHECK, 0, 1, 0), (COUNT_BAD, 3, 6, 3)):
        for number, op in enumerate(op for op in operators if op.type == type_):
            yield from ((v, Slot(SCALING, str(number), i)) for i, v in enumerate(op.inputs[first:last], slot))
    if program.window is not None:
        yield program.window.counter, Slot(TURN)
        for state, new in program.window.updates.items():
            yield from _window_state(program, state, new)


def _window_state(program: Program, state: Variable, new: Variable) -> Iterator[tuple[Variable | None, Slot]]:
    """The sum of a parameter's gradients; for state of the forward pass, its value before the window."""
    gate = program.updates[state].producer
    if new.grad_of is not None:
        yield state, Slot(SUM, new.grad_of.name)
    elif gate is not None and gate.type == GATE and gate.domain == OWN and gate.input(1) is not state:
        yield gate.input(1), Slot(BEFORE, state.name)


def _optimizer_state(op: Operator, number: int) -> Iterator[tuple[Variable | None, Slot]]:
    layout = LAYOUTS[op.type]
    rate, *scalars = op.inputs[1 : layout.head]
    yield rate, Slot(RATE, "", number)
    yield from ((scalar, Slot(kind, "", number)) for kind, scalar in zip(layout.scalars, scalars, strict=True))
    for row in layout.read(op.inputs):
        assert row.parameter is not None
        of = row.parameter.name
        yield row.parameter, Slot(PARAMETER, of)
        yield row.master, Slot(MASTER, of)
        yield from ((one, Slot(kind, of)) for kind, one in zip(layout.accumulators, row.accumulators, strict=True))


def _plain_role(variable: Variable, program: Program) -> str:
    if variable.name in (SEED, STEP):
        return RANDOM
    if variable.trainable:
        return PARAMETER
    new = program.updates.get(variable)
    if new is None:
        return BUFFER if variable.readers else UNUSED
    maker = new.producer
    if maker is not None and maker.type == GATE and maker.domain == OWN:
        value = maker.input(2)
        maker = value.producer if value is not None else None
    return STATISTICS if maker is not None and maker.role == FORWARD else STATE


def trains(program: Program) -> bool:
    """Whether the program has an update operator."""
    return any(op.type in LAYOUTS and op.domain == OWN for op in program.operators)


def scaler_settings(program: Program) -> list[dict[str, Any]]:
    """The attributes of every loss scaling update of a program."""
    found = [op for op in program.operators if op.type == UPDATE_SCALE and op.domain == OWN]
    return [{name: op.attrs[name] for name in op.attrs} for op in found]


# -- fingerprint ---------------------------------------------------------------------------------------
def fingerprint(program: Program) -> str:
    """A hash of what a program computes: operators, attributes, small constants, names of inputs and of state.

    Names of intermediate values and the values of weights and seeds play no part.
    """
    found = hashlib.sha256()
    for line in _lines(program, {}):
        found.update(line)
        found.update(b"\n")
    return found.hexdigest()


def _lines(program: Graph, numbers: dict[Variable, str]) -> Iterator[bytes]:
    yield repr(sorted(program.info.opsets.items())).encode()
    for variable in program.variables:
        if variable.persistable or variable.is_input:
            numbers[variable] = f"={variable.name}"
            kind = (variable.is_input, variable.persistable, variable.trainable)
            yield repr((variable.name, variable.dtype, variable.shape, *kind)).encode()
        elif variable.outer is not None:
            numbers[variable] = f"^{numbers.get(variable.outer, '?')}"
        elif variable.data is not None:
            numbers[variable] = _constant(variable.data)
    for op in program.operators:
        for output in op.outputs:
            if output is not None:
                numbers.setdefault(output, f"%{len(numbers)}")
        names = [[v and numbers.get(v, "?") for v in variables] for variables in (op.inputs, op.outputs)]
        yield repr((op.type, op.domain, op.role, *names)).encode()
        for proto in sorted(op.attrs.protos(), key=lambda proto: proto.name):
            yield proto.SerializeToString(deterministic=True)
        for nested in op.attrs.programs:
            yield from _lines(nested, numbers)
    spread = program.window.updates if program.window is not None else {}
    for updates in (program.updates, spread):
        yield repr([(numbers[state], numbers.get(new, "?")) for state, new in updates.items()]).encode()
    yield repr(program.window and program.window.steps).encode()


def _constant(data: Any) -> str:
    dtype, shape = tensor_type(data)
    content = ""
    array = as_array(data)
    if array.size <= SMALL:
        content = hashlib.sha256(repr(array.tolist()).encode()).hexdigest()
    return f"#{dtype}{list(shape)}{content}"
