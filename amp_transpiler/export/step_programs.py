"""What an exported step is made of: the program that trains, those that evaluate and infer, and what they give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from amp_transpiler.errors import ArgumentError, ArgumentTypeError, GraphError, OrderError
from amp_transpiler.ir.nodes import FORWARD, Operator, Variable
from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.passes.lowering.lowered import needed
from amp_transpiler.passes.view.training_step import TrainingStep, training_step
from amp_transpiler.program import Program
from amp_transpiler.runtime.plan import names_of

CALL = "export_training"


@dataclass(frozen=True)
class StepPrograms:
    """``fetches`` of the training program are its losses, what is ``told`` of each step, and more.

    ``told``: what tells a bad step, and the learning rates that schedules make, which are no state.
    ``test`` has the same state; ``outputs`` are names of what it infers, ``losses`` of what it evaluates.
    """

    program: Program
    step: TrainingStep
    fetches: tuple[str, ...]
    told: tuple[str, ...]
    losses: tuple[str, ...]
    test: Program
    outputs: tuple[str, ...]


def step_programs(
    program: Program,
    fetch_list: Sequence[Variable | str],
    outputs: Sequence[Variable | str] | None,
    test_program: Program | None,
) -> StepPrograms:
    """The programs of an exported step, the arguments of ``Program.export_training`` checked."""
    step = training_step(program)
    if not step.updates or not step.losses:
        raise OrderError(
            f"{CALL}: program '{program.name}' has no training step (a loss, gradients and updates); call the "
            "optimizer's minimize(loss) first"
        )
    if test_program is not None and not isinstance(test_program, Program):
        raise ArgumentTypeError(f"{CALL}: test_program is {test_program!r}; expected an amp.Program")
    test = program.clone(for_test=True) if test_program is None else test_program
    losses = tuple(loss.name for loss in step.losses)
    for name in losses:
        if not test.has_var(name):
            raise ArgumentError(
                f"{CALL}: test program '{test.name}' has no variable '{name}', the loss of program '{program.name}'; "
                "give one that computes the loss under the same name, or none"
            )
    found = known_names(outputs, test, "outputs") if outputs is not None else predictions(test, losses)
    if not found:
        raise ArgumentError(
            f"{CALL}: what program '{program.name}' predicts is not to be told from its loss; name it: outputs=[…]"
        )
    rates = [rate for rate in step.learning_rates if not rate.persistable]
    told = tuple(v.name for v in (step.found_inf, *rates) if v is not None)
    more = known_names(fetch_list, program, "fetch_list")
    state = next((name for name in (*more, *found) if program.has_var(name) and program.var(name).persistable), None)
    if state is not None:
        raise ArgumentError(f"{CALL}: '{state}' is state, which is in the folder anyhow; leave it out")
    given = next((name for name in found if test.var(name).producer is None), None)
    if given is not None:
        raise ArgumentError(f"{CALL}: outputs: nothing in program '{test.name}' computes '{given}'; leave it out")
    fetches = dict.fromkeys([*losses, *told, *more])
    return StepPrograms(program, step, tuple(fetches), told, losses, test, found)


def known_names(given: Sequence[Variable | str], program: Program, argument: str) -> tuple[str, ...]:
    """The names of variables of ``program``; ArgumentTypeError, GraphError for what are none."""
    names = tuple(dict.fromkeys(names_of(given, f"{CALL}: {argument}")))
    for name in names:
        try:
            program.var(name)
        except GraphError as error:
            raise GraphError(f"{CALL}: {argument}: {error}") from None
    return names


def predictions(test: Program, losses: Sequence[str]) -> tuple[str, ...]:
    """What a loss compares with its labels: computed from parameters and feeds that go through layers, where it meets
    feeds that go through none.

    The declared outputs, where a program has such.
    """
    declared = tuple(v.name for v in test.outputs if v.name not in losses)
    if declared:
        return declared
    order = needed(test, [test.var(name) for name in losses])
    feeds = _feeds_behind(test)
    layered = {feed for op in order if any(map(_is_weight, op.inputs)) for feed in _read(op, feeds)}
    found: dict[str, None] = {}
    for op in order:
        labels = _read(op, feeds) - layered
        for v in op.inputs if labels else ():
            inside = v is not None and v.producer is not None and v.producer.role == FORWARD
            if v is not None and inside and {None} < feeds[v.key] <= layered:
                found[v.name] = None
    return tuple(found)


def _is_weight(variable: Variable | None) -> bool:
    """Whether it is a trained parameter, cast or moved perhaps."""
    while variable is not None and (op := variable.producer) is not None:
        if op.full_type != "Cast" and traits_of(op).moves != (0,):
            return False
        variable = op.input(0)
    return variable is not None and variable.is_parameter


def _read(op: Operator, feeds: Mapping[int, frozenset[str | None]]) -> frozenset[str | None]:
    """The feeds that an operator depends on."""
    return frozenset[str | None]().union(*(feeds[v.key] for v in (*op.inputs, *op.captures) if v is not None))


def _feeds_behind(program: Program) -> Mapping[int, frozenset[str | None]]:
    """The feeds that each variable depends on, by key; None among them stands for parameters."""
    found: dict[int, frozenset[str | None]] = {}
    for v in program.variables:
        if v.producer is None:
            names: set[str | None] = {None} if v.persistable else {v.name} if v.is_input else set()
            found[v.key] = frozenset(names)
    for op in program.operators:
        behind = _read(op, found)
        found.update((v.key, behind) for v in op.outputs if v is not None)
    return found
