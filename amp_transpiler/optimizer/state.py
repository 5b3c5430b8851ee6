"""State variables of a training step: persistable in the main program, initialised in its startup program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from amp_transpiler.errors import ArgumentError, ArgumentTypeError, GraphError
from amp_transpiler.ir import unique_name
from amp_transpiler.ir.gc_pause import collector_paused
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.infer import static
from amp_transpiler.ir.nodes import OWN, Operator, Variable
from amp_transpiler.ir.opdef import slots_of
from amp_transpiler.ir.rollback import unchanged_on_error
from amp_transpiler.ir.types import FLOATS, ONNX_TYPES
from amp_transpiler.nn.initializer import Constant
from amp_transpiler.ops.training.master_names import master_names
from amp_transpiler.ops.training.scaling import GATE
from amp_transpiler.program import Program, default_main_program, default_startup_program


def startup_of(program: Program, startup: Program | None) -> Program:
    """The startup program to initialise new state in: the given one, else the program's own.

    ArgumentTypeError: ``startup`` is no Program. ArgumentError: there is none, or it is the program itself.
    """
    if startup is None:
        startup = program.startup
    elif not isinstance(startup, Program):
        raise ArgumentTypeError(f"startup_program must be a Program, not {type(startup).__name__}")
    if startup is None and program is default_main_program():
        startup = default_startup_program()
    if startup is None:
        raise ArgumentError(
            f"program '{program.name}' has no startup program to initialise optimizer state in; pass startup_program"
        )
    if startup is program:
        raise ArgumentError(
            f"startup_program is program '{program.name}' itself, the one that is trained; pass the "
            "program that initialises its parameters, or nothing"
        )
    return startup


@contextmanager
def appending(program: Program, startup_program: Program | None, *owners: object) -> Iterator[Program]:
    """The startup program, while a part of the training step is appended.

    Where that fails, both programs and the attributes of ``owners`` (optimizers) are as before. Errors: see
    :func:`startup_of`.
    """
    startup = startup_of(program, startup_program)
    with unchanged_on_error(program, startup, *owners), collector_paused():
        program.startup = program.startup or startup
        yield startup


def shared_name(prefix: str, *programs: Program) -> str:
    """``<prefix>_<n>``, never used before: two programs in one scope must not share this state by accident.

    It is free in each of ``programs``, the startup program among them: another one may have state there, whose name was
    made inside of another ``unique_name.guard()``.
    """
    while True:
        name = unique_name.generate(prefix)
        if not any(program.has_var(name) for program in programs):
            return name


def owned_name(prefix: str, *programs: Program) -> str:
    """``<prefix>_<n>`` with the lowest n that is free in each of ``programs``; for state that hangs on a parameter's
    name, which another program that trains it may have in the same startup program."""
    number = 0
    while any(program.has_var(f"{prefix}_{number}") for program in programs):
        number += 1
    return f"{prefix}_{number}"


def create_state(
    program: Program,
    startup: Program,
    name: str,
    dtype: str,
    shape: Sequence[int],
    value: float,
    owner: int | None = None,
) -> Variable:
    """A persistable variable filled with ``value`` by the startup program; of the rank ``owner`` alone."""
    state = program.add_variable(name, dtype, shape, persistable=True)
    state.stop_gradient = True
    initial = startup.add_variable(name, dtype, shape, persistable=True)
    state.owner = initial.owner = owner
    state.startup = initial.startup = startup
    Constant(value).initialize(initial)
    return state


def create_master(program: Program, startup: Program, parameter: Variable) -> Variable:
    """The fp32 master weight ``<parameter>_fp32_master_0``, a bit-exact copy of the initial value.

    The startup program writes the parameter in fp32; it is rounded to 16 bit later, by ``amp_init``, so
    the master keeps the digits that the rounding drops. Programs with one startup program share it.
    """
    name = next(name for name in master_names(parameter.name) if not program.has_var(name))
    if not startup.has_var(name):
        return create_copy(program, startup, parameter, name, "float32")
    master = program.add_variable(name, "float32", parameter.shape, persistable=True)
    master.stop_gradient, master.owner = True, startup.var(name).owner
    return master


def create_copy(program: Program, startup: Program, parameter: Variable, name: str, dtype: str) -> Variable:
    """A state of this element type that starts with the initial value of a parameter, not rounded to 16 bit.

    It belongs to the parameter's owner.
    """
    initial = initial_value(startup, parameter)
    state = program.add_variable(name, dtype, parameter.shape, persistable=True)
    state.stop_gradient = True
    copy = startup.add_variable(name, dtype, parameter.shape, persistable=True)
    state.owner = copy.owner = parameter.owner
    state.startup = copy.startup = startup
    if initial.dtype == dtype:
        startup.add_operator("Identity", [initial], [copy])
    else:
        startup.add_operator("Cast", [initial], [copy], attrs={"to": ONNX_TYPES[dtype]})
    return state


def follow_dealt(startup: Program, parameter: Variable, states: Sequence[Variable | None]) -> None:
    """Deal out the rows of a parameter's states as its own are, in the startup program too."""
    for variable in (parameter, *states):
        if variable is not None and parameter.dealt is not None:
            variable.dealt = startup.var(variable.name).dealt = parameter.dealt


def append_update(program: Graph, type_: str, inputs: Sequence[Variable | None], attrs: dict[str, Any]) -> Operator:
    """An operator of the training step all of whose outputs are new values of persistable inputs, which take them."""
    slots = slots_of(type_)
    assert slots is not None
    states = slots.states(inputs)
    outputs = [None if state is None else next_value(state) for state in states]
    op = program.add_operator(type_, inputs, outputs, attrs=attrs, domain=OWN)
    for state, new in zip(states, outputs, strict=True):
        if state is not None and new is not None:
            program.set_update(state, new)
    return op


def next_value(state: Variable) -> Variable:
    """The variable ``<state>@NEW``, of the state's type and shape."""
    program = state.program
    new = program.fresh_variable(f"{state.name}@NEW", state.dtype, state.shape)
    new.stop_gradient = True
    return new


def gated_value(state: Variable, old: Variable, new: Variable, found_inf: Variable) -> Variable:
    """The variable ``<state>@GATED``: ``new`` on a good step, ``old`` bit for bit where ``found_inf`` is true."""
    program = state.program
    kept = program.fresh_variable(f"{state.name}@GATED", state.dtype, state.shape)
    kept.stop_gradient = True
    program.add_operator(GATE, [found_inf, old, new], [kept], domain=OWN)
    return kept


def initial_value(startup: Program, parameter: Variable) -> Variable:
    """The startup program's variable of a parameter; GraphError where it does not initialise it."""
    if not startup.has_var(parameter.name):
        raise GraphError(
            f"startup program '{startup.name}' does not initialise parameter '{parameter.name}' of program "
            f"'{parameter.program.name}'; pass the startup program that the parameter was built with"
        )
    return startup.var(parameter.name)


def static_shape(parameter: Variable) -> tuple[int, ...]:
    """The sizes of a float parameter; GraphError where they or its type are not those of one."""
    shape = static(parameter.shape)
    if parameter.dtype not in FLOATS or shape is None:
        raise GraphError(
            f"parameter '{parameter.name}' has element type {parameter.dtype} and shape {parameter.shape}; "
            "a trainable parameter is a float tensor of fixed shape"
        )
    return shape
