"""Parameters in the scope are rounded to the types of the program, all of them or none."""

from __future__ import annotations

import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from amp_transpiler.errors import ArgumentError, ArgumentTypeError, PrecisionError, ScopeError
from amp_transpiler.program import Program
from amp_transpiler.runtime import CPUPlace, Scope, cast_parameters_to_fp16


def half_program() -> Program:
    program = Program("half")
    for name, dtype in (("a", "float16"), ("b", "bfloat16"), ("c", "float32")):
        program.add_variable(name, dtype, [2], persistable=True, trainable=True)
    return program


def test_parameters_are_rounded_to_nearest_even(scope: Scope) -> None:
    values = np.array([1 + 2**-11, -(1 + 3 * 2**-11)], np.float32)  # both halfway between two fp16 numbers
    for name in "abc":
        scope.set_var(name, values)
    cast_parameters_to_fp16(CPUPlace(), half_program(), scope)
    assert scope.find_var("a").dtype == np.float16 and scope.find_var("a").tolist() == [1, -(1 + 2**-9)]
    assert scope.find_var("b").tobytes() == values.astype(ml_dtypes.bfloat16).tobytes()
    assert scope.find_var("c").dtype == np.float32
    cast_parameters_to_fp16(CPUPlace(), half_program(), scope)  # a second time changes nothing
    assert scope.find_var("a").tolist() == [1, -(1 + 2**-9)]


def test_only_the_named_parameters_are_cast(scope: Scope) -> None:
    for name in "abc":
        scope.set_var(name, np.ones(2, np.float32))
    cast_parameters_to_fp16(CPUPlace(), half_program(), scope, {"b", "elsewhere"})
    assert [scope.find_var(name).dtype.name for name in "abc"] == ["float32", "bfloat16", "float32"]
    cast_parameters_to_fp16(CPUPlace(), half_program(), scope, set())
    assert scope.find_var("a").dtype == np.float32


def test_a_parameter_beyond_the_format_stops_all(scope: Scope) -> None:
    scope.set_var("b", np.ones(2, np.float32))
    with pytest.raises(ScopeError, match="'a' of program 'half' is not in the scope"):
        cast_parameters_to_fp16(CPUPlace(), half_program(), scope)
    scope.set_var("a", np.array([1, -70000], np.float32))
    with pytest.raises(PrecisionError, match="'a' does not fit float16: its largest value is 70000"):
        cast_parameters_to_fp16(CPUPlace(), half_program(), scope)
    assert scope.find_var("b").dtype == np.float32
    scope.set_var("a", np.array([np.inf, np.nan], np.float32))  # what is not finite already stays so
    cast_parameters_to_fp16(CPUPlace(), half_program(), scope)
    assert scope.find_var("a").dtype == np.float16
    with pytest.raises(ArgumentTypeError, match="a set of names"):
        cast_parameters_to_fp16(CPUPlace(), half_program(), scope, "a")
    with pytest.raises(ArgumentError, match="none of these variables"):
        cast_parameters_to_fp16(CPUPlace(), half_program(), scope, ["aa"])


def test_no_copy_of_a_large_table_is_made_on_the_way(scope: Scope) -> None:
    program = Program("half")
    program.add_variable("table", "float16", [2**23], persistable=True, trainable=True)
    scope.set_var("table", np.ones(2**23, np.float32))
    tracemalloc.start()
    try:
        cast_parameters_to_fp16(CPUPlace(), program, scope)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 3 * 2 * 2**23  # the result, and what is worked on
    assert scope.find_var("table").dtype == np.float16


def test_a_value_beyond_the_format_is_found_wherever_it_lies(scope: Scope) -> None:
    program = Program("half")
    program.add_variable("table", "float16", [9 * 2**19], persistable=True, trainable=True)
    values = np.zeros(9 * 2**19, np.float32)
    values[[0, -1]] = np.inf, 1e5
    scope.set_var("table", values)
    with pytest.raises(PrecisionError, match="its largest value is 100000"):
        cast_parameters_to_fp16(CPUPlace(), program, scope)
