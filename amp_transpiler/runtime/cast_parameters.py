"""Stored parameters in the precision that a rewritten program declares."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from amp_transpiler.errors import ArgumentError, ArgumentTypeError, PrecisionError
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.ir.types import FLOATS, HALF
from amp_transpiler.lists.paddle import paddle_arguments
from amp_transpiler.option_checks import strings
from amp_transpiler.passes.lowering.place import Place
from amp_transpiler.program import Program
from amp_transpiler.runtime import device_tensors
from amp_transpiler.runtime.collective.current import own_place
from amp_transpiler.runtime.heap import trim
from amp_transpiler.runtime.missing import require
from amp_transpiler.runtime.scope import Scope, check_scope
from amp_transpiler.runtime.states import not_in_scope
from amp_transpiler.spelling import near_names


@paddle_arguments("cast_parameters_to_fp16")
def cast_parameters_to_fp16(
    place: Place | str, program: Program, scope: Scope | None = None, to_fp16_var_names: Iterable[str] | None = None
) -> None:
    """Round values in ``scope`` (default: the global one) to the 16-bit types that ``program`` declares.

    ``to_fp16_var_names`` are those to round, as ``cast_model_to_fp16`` returned them: names that ``program`` does not
    have are left out, those that it declares in fp32 stay; None takes every persistable variable of 16 bit. Values
    are rounded to the nearest, ties to even; those of the right type already stay as they are. What was rounded lies
    on the host, until a program on ``place`` is run. All are checked before any is written: PlaceError where the place
    cannot be used; PrecisionError names a parameter with a finite value beyond the format, and its largest value;
    ScopeError a variable without a value.
    """
    require(own_place(place, "cast_parameters_to_fp16: place"))
    if not isinstance(program, Program):
        raise ArgumentTypeError(f"cast_parameters_to_fp16 takes a program, got {program!r}")
    scope = check_scope(scope)
    chosen = _chosen(program, to_fp16_var_names)
    with scope.writing():
        arrays = {v.name: array for v in chosen if (array := _rounded(v, scope)) is not None}
        scope.hold({name: device_tensors.from_array(arrays.pop(name)) for name in list(arrays)})
    trim()  # the fp32 values


def _chosen(program: Program, names: Iterable[str] | None) -> list[Variable]:
    stored = [v for v in program.variables if v.persistable]
    if names is None:
        return [v for v in stored if v.dtype in HALF]
    wanted = set(strings("cast_parameters_to_fp16: to_fp16_var_names", names, "a set of names"))
    found = [v for v in stored if v.name in wanted]
    # 16-bit operators may read no parameter: the names are then those of what they make.
    if wanted and not found and not any(v.name in wanted for v in program.variables):
        name = min(wanted)
        hint = near_names(name, [v.name for v in stored])
        raise ArgumentError(
            f"to_fp16_var_names: program '{program.name}' stores none of these variables ('{name}' …); {hint}".rstrip(
                "; "
            )
        )
    return [v for v in found if v.dtype in HALF]


def _rounded(variable: Variable, scope: Scope) -> np.ndarray | None:
    """The value in the variable's type; None where it has it already."""
    value: Any = scope.ort_values.get(variable.name)
    if value is None:
        raise not_in_scope(f"variable '{variable.name}'", variable.program.name)
    found = device_tensors.dtype_of(value)
    if found == variable.dtype:
        return None
    if found not in FLOATS:
        raise PrecisionError(
            f"variable '{variable.name}' is {found} in the scope and cannot be rounded to {variable.dtype}"
        )
    host = device_tensors.on_host(value)
    array = device_tensors.shared_array(host).reshape(host.shape())
    return device_tensors.rounded(variable.name, array, str(variable.dtype))
