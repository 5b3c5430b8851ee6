"""Variables and operators as the program was written: behind the casts that passes put in, out of nested graphs."""

from __future__ import annotations

from amp_transpiler.ir.nodes import Operator, Variable


def source(variable: Variable) -> Variable:
    """The variable of the program as it was written: through inserted casts and out of nested graphs."""
    while True:  # the question that passes ask most: without a call inside
        while variable.outer is not None:
            variable = variable.outer
        producer = variable.producer
        if producer is None or not producer.inserted or producer.inputs[0] is None:
            return variable
        variable = producer.inputs[0]


def written_name(variable: Variable) -> str:
    """The name of the variable as the program was written: not of one that a pass put before or behind it."""
    variable = source(variable)
    for reader, _ in variable.readers:
        made = reader.output(0)
        if reader.inserted and made is not None and variable.name.startswith(f"{made.name}."):
            return made.name
    return variable.name


def label(op: Operator) -> str:
    """The operator's label, by the variable that it was written to make: not by one that a cast was put behind."""
    first = next((v for v in op.outputs if v is not None), None)
    return op.label if op.name or first is None else f"{op.type} -> {written_name(first)}"
