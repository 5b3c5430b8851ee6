"""Let inputs and outputs of a converted program be 16 bit themselves."""

from __future__ import annotations

from collections.abc import Iterable

from amp_transpiler.ir.metadata import inserted
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.passes.precision.casts import add_cast
from amp_transpiler.program import Program


def narrow_io(program: Program, names: Iterable[str], dtype: str) -> None:
    """Turn these float32 inputs and outputs of ``program`` to ``dtype``, under their names, in place.

    A cast that the conversion put behind an input or before an output is then not needed; where fp32
    operators use it as well, it turns round.
    """
    wanted = set(names)
    for variable in [v for v in program.inputs if v.name in wanted and v.dtype == "float32"]:
        _narrow_input(program, variable, dtype)
    for variable in [v for v in program.outputs if v.name in wanted and v.dtype == "float32"]:
        _narrow_output(program, variable, dtype)
    for op in program.walk():  # variables of nested graphs that stand for what changed
        for nested in op.attrs.programs:
            for variable in nested.variables:
                if variable.outer is not None:
                    variable.dtype = variable.outer.dtype


def _narrow_input(program: Program, variable: Variable, dtype: str) -> None:
    cast = _cast_of(variable, dtype)
    variable.dtype = dtype
    full = None
    if any(op is not cast for op, _ in variable.readers) or variable in program.outputs:
        full = program.add_variable(program.unique(f"{variable.name}.cast_fp32"), "float32", variable.shape)
        program.replace_uses(variable, full, lambda op: op is not cast)
        add_cast(variable, full)
    if cast is not None:
        narrow = cast.outputs[0]
        assert narrow is not None
        program.remove_operator(cast)
        program.replace_uses(narrow, variable)
        program.remove_variable(narrow)


def _narrow_output(program: Program, variable: Variable, dtype: str) -> None:
    """The output's name goes to the 16-bit tensor; fp32 readers go on with the fp32 one."""
    producer, name = variable.producer, variable.name
    if producer is None:
        return  # an input that is an output at once: it was narrowed as an input, or is fp32 for its readers
    slot = program.outputs.index(variable)
    program.rename_variable(variable, program.unique(f"{name}.fp32"))
    narrow = producer.inputs[0] if inserted(producer) else None
    if narrow is not None and narrow.dtype == dtype and narrow not in program.outputs and narrow.producer is not None:
        program.rename_variable(narrow, name)
    else:
        existing = _cast_of(variable, dtype)
        narrow = existing.outputs[0] if existing is not None else None
        if narrow is None:
            narrow = program.add_variable(name, dtype, variable.shape)
            add_cast(variable, narrow)
        else:
            program.rename_variable(narrow, name)
    program.outputs[slot] = narrow
    if inserted(producer) and not variable.readers:
        program.remove_operator(producer)
        program.remove_variable(variable)


def _cast_of(variable: Variable, dtype: str) -> Operator | None:
    for op, _ in variable.readers:
        made = op.output(0)
        if inserted(op) and made is not None and made.dtype == dtype:
            return op
    return None
