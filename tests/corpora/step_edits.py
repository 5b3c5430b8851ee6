"""What the mutations of training steps find and make in a program."""

from __future__ import annotations

from typing import Any

import numpy as np

from amp_transpiler.ir.nodes import OWN, Operator, Variable
from amp_transpiler.program import Program


def the(program: Program, type_: str) -> Operator:
    (op,) = [op for op in program.operators if op.type == type_ and op.domain == OWN]
    return op


def given(variable: Variable | None) -> Variable:
    assert variable is not None
    return variable


def found_inf(program: Program) -> Variable:
    return given(the(program, "CheckFiniteAndUnscale").output(0))


def made(program: Program, type_: str, inputs: list[Variable], dtype: str, name: str, **attrs: Any) -> Variable:
    """The output of a new standard operator."""
    new = program.add_variable(program.unique(name), dtype, inputs[0].shape)
    program.add_operator(type_, inputs, [new], attrs=attrs)
    return new


def ungated(program: Program, state: str) -> None:
    """Let ``state`` take what its gate would keep out."""
    new = program.updates[program.var(state)]
    assert given(new).producer is not None and new.producer.type == "GateState"
    program.set_update(program.var(state), given(new.producer.input(2)))


def step_by_hand(program: Program, state: str, type_: str, factor: float) -> None:
    """Let ``state`` take a value that a plain operator makes."""
    old = program.var(state)
    other = program.add_constant(program.unique("number"), np.full(1, factor, old.dtype))
    program.set_update(old, made(program, type_, [old, other], str(old.dtype), f"{state}@HAND"))
