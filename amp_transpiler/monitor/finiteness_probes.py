"""Finiteness probes: one bool for each float variable of a step, whether it holds a number that is not finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from amp_transpiler.ir import context
from amp_transpiler.ir.metadata import PROBE
from amp_transpiler.ir.nodes import BACKWARD, Operator, Shape, Variable
from amp_transpiler.ir.types import FLOATS, HALF, ONNX_TYPES
from amp_transpiler.monitor.rerun import Rerun, is_nonfinite
from amp_transpiler.program import Program, program_guard

PROBES = "@probes"


def floats(variables: Sequence[Variable | None]) -> list[Variable]:
    """Those that hold floating-point tensors, each once."""
    return list(dict.fromkeys(v for v in variables if v is not None and v.dtype in FLOATS))


def reads(op: Operator) -> list[Variable]:
    """The float variables that an operator reads, in nested graphs too."""
    return floats([*op.inputs, *op.captures])


def nonfinite(program: Program, order: Sequence[Operator], rerun: Rerun) -> set[str]:
    """The names of the float variables that operators of ``order`` read or make and that are not finite.

    One run of a copy of the program, with ``x - x`` summed up for each variable: zero, or NaN where x is NaN or
    infinite. What is probed is what is stored: on CPU too, where a 16-bit variable is a rounded fp32 tensor. The copy
    is run without its updates, and rounds where the program does, since the rounding casts stand in the graph.
    """
    made = floats([v for op in order for v in op.outputs])
    sources = floats([v for op in order for v in reads(op) if v.producer is None])
    found = {v.name for v in sources if is_nonfinite(rerun.source(v))}
    if made:
        flags = rerun.run(with_probes(program, made), [PROBES])[0]
        # operators that read many inputs take the last first: probes in reverse run as the step goes by
        found |= {v.name for v, bad in zip(reversed(made), flags, strict=True) if bad}
    return found


def with_probes(program: Program, variables: Sequence[Variable]) -> Program:
    """A copy of ``program`` with the variable ``@probes``: one bool for each of ``variables``, the last first."""
    copy = program.clone()
    with program_guard(copy, program.startup or Program("startup")), context.operator_role(BACKWARD):
        one = copy.add_constant("@probes.one", np.ones(1, np.int64))
        sums = [_sum(copy, copy.var(v.name), one) for v in reversed(variables)]
        joined = copy.add_variable("@probes.joined", "float32", (len(sums),))
        copy.add_operator("Concat", sums, [joined], attrs={"axis": 0})
        flags = copy.add_variable(PROBES, "bool", (len(sums),))
        copy.add_operator("IsNaN", [joined], [flags])
    return copy


def _sum(program: Program, x: Variable, one: Variable) -> Variable:
    """The sum of ``x - x`` as an fp32 tensor of one element."""
    name = f"@probes.{x.name}"
    if x.dtype in HALF:
        x = _appended(program, "Cast", [x], f"{name}.fp32", "float32", x.shape, {"to": ONNX_TYPES["float32"]})
    zero = _appended(program, "Sub", [x, x], f"{name}.zero", x.dtype, x.shape)
    total = _appended(program, "ReduceSum", [zero], f"{name}.sum", x.dtype, (), {"keepdims": 0})
    if total.dtype != "float32":
        total = _appended(program, "Cast", [total], f"{name}.narrow", "float32", (), {"to": ONNX_TYPES["float32"]})
    return _appended(program, "Reshape", [total, one], f"{name}.flat", "float32", (1,))


def _appended(
    program: Program,
    type_: str,
    inputs: list[Variable],
    name: str,
    dtype: str | None,
    shape: Shape | None,
    attrs: dict[str, Any] | None = None,
) -> Variable:
    made = program.fresh_variable(name, dtype, shape)
    program.add_operator(type_, inputs, [made], attrs=attrs).metadata[PROBE] = "1"
    return made
