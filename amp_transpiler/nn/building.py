"""One operator of a layer or function: checked, added to the current program, its outputs typed."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import onnx

from amp_transpiler.errors import ArgumentError, ArgumentTypeError, GraphError
from amp_transpiler.ir import unique_name
from amp_transpiler.ir.context import inside
from amp_transpiler.ir.infer import Declared, infer_operator
from amp_transpiler.ir.nodes import Variable, other_program
from amp_transpiler.ir.rollback import without_leftovers
from amp_transpiler.ir.types import FLOATS, ONNX_TYPES, element_type, numpy_dtype
from amp_transpiler.lists import TARGET_OPSET
from amp_transpiler.option_checks import is_real, is_whole, shown
from amp_transpiler.program import Program, default_main_program

#: What an operator may be given: a variable, an array (it becomes a constant), or nothing.
Input = Variable | np.ndarray | None
FLOATING = tuple(sorted(FLOATS))
INTEGER = ("int64", "int32")
#: Beyond the end of every dimension, and still an int64 where a size is added to it.
LARGEST = (1 << 62) - 1
_INFERENCE = re.compile(r".*\[\w*InferenceError\]\s*(\(op_type:[^)]*\):\s*)?", re.DOTALL)


def append(
    call: str, type_: str, inputs: Sequence[Input], *, attrs: dict[str, Any] | None = None, prefix: str | None = None
) -> Variable:
    """Add an operator with one output; see :func:`append_many`."""
    return append_many(call, type_, inputs, 1, attrs=attrs, prefix=prefix)[0]


class Builder(NamedTuple):
    """Appends several operators of a call, under one prefix: ``put("Gather", table, x, axis=0)``."""

    call: str
    prefix: str

    def __call__(self, type_: str, *inputs: Input, **attrs: Any) -> Variable:
        """An operator with one output."""
        return append(self.call, type_, inputs, attrs=attrs, prefix=self.prefix)

    def several(self, outputs: int, type_: str, *inputs: Input, **attrs: Any) -> list[Variable]:
        """An operator with so many."""
        return append_many(self.call, type_, inputs, outputs, attrs=attrs, prefix=self.prefix)


def appending(call: str) -> Builder:
    """What appends the operators of a call, under a fresh prefix."""
    return Builder(call, fresh(call))


def moved(put: Builder, x: Variable, source: int, target: int) -> Variable:
    """``x`` with its dimension ``source``, counted from 0, as dimension ``target``; ``x`` itself where they are one."""
    if source == target:
        return x
    assert x.shape is not None
    perm = [i for i in range(len(x.shape)) if i != source]
    perm.insert(target, source)
    return put("Transpose", x, perm=perm)


def append_many(
    call: str,
    type_: str,
    inputs: Sequence[Input],
    outputs: int,
    *,
    attrs: dict[str, Any] | None = None,
    prefix: str | None = None,
) -> list[Variable]:
    """Add a standard operator to the current program; its output variables, named ``<prefix>.tmp_<n>``.

    ``call`` is the function that the user called; ``prefix`` defaults to a fresh name made from it. An imported
    program that is older than these layers is brought to their opset first.
    ArgumentError, and an unchanged program, where element types or shapes do not fit.
    """
    program = default_main_program()
    for item in inputs:
        check_program(call, item, program)
    if program.opset() < TARGET_OPSET:
        program.convert_opset(TARGET_OPSET)
    schema = _schema(call, type_, program.opset())
    _check_types(call, schema, inputs)
    prefix = prefix or fresh(call)
    env = Declared()
    with without_leftovers(program):
        variables = [
            program.add_constant(f"{prefix}.const", item) if isinstance(item, np.ndarray) else item for item in inputs
        ]
        results = [program.new_variable(prefix) for _ in range(outputs)]
        op = program.add_operator(type_, variables, results, attrs=attrs)
        try:
            infer_operator(op, env)
        except GraphError as error:
            given = ", ".join(describe(item) for item in inputs if item is not None)
            reason = _INFERENCE.sub("", str(error))  # what onnx says, without its own name of the operator
            raise ArgumentError(f"{call}: {given} do not fit {type_}: {reason}") from None
    for variable in results:
        variable.dtype, variable.shape = env.types.get(variable.key, (None, None))
    return results


_prefix: ContextVar[str | None] = ContextVar("prefix", default=None)


@contextmanager
def prefixed(prefix: str) -> Iterator[None]:
    """What functions append inside is named ``<prefix>.tmp_<n>``."""
    with inside(_prefix, prefix):
        yield


def layer_name(call: str, name: str | None) -> str:
    """The name of a layer: what its user gave, or a fresh one."""
    if name is not None and not isinstance(name, str):
        raise ArgumentTypeError(f"{call}: name is {shown(name)}; expected a string")
    return name or unique_name.generate(call)


def fresh(call: str) -> str:
    """The prefix of what a call of the function ``call`` appends."""
    prefix = _prefix.get()
    return unique_name.generate(call) if prefix is None else prefix


@cache
def _schema(call: str, type_: str, opset: int) -> onnx.defs.OpSchema:
    try:
        return onnx.defs.get_schema(type_, opset, "")
    except onnx.defs.SchemaError:
        raise ArgumentError(
            f"{call}: operator {type_} does not exist at opset {opset}, which the current program is written in; "
            f"convert the program to opset {TARGET_OPSET} first"
        ) from None


def _check_types(call: str, schema: onnx.defs.OpSchema, inputs: Sequence[Input]) -> None:
    """Element types against the operator's schema; onnx's own inference does not look at them."""
    constraints = {c.type_param_str: set(c.allowed_type_strs) for c in schema.type_constraints}
    bound: dict[str, tuple[Input, str]] = {}
    for slot, item in enumerate(inputs):
        dtype = _dtype(item)
        if dtype is None:
            continue
        formal = schema.inputs[min(slot, len(schema.inputs) - 1)]
        allowed = constraints.get(formal.type_str, {formal.type_str})
        text = f"tensor({onnx.TensorProto.DataType.Name(ONNX_TYPES[dtype]).lower()})"
        if text not in allowed:
            wanted = ", ".join(sorted(t[7:-1] for t in allowed if t.startswith("tensor(")))
            raise ArgumentError(f"{call}: {schema.name} cannot take {describe(item)} there; it takes {wanted}")
        if formal.type_str in constraints and formal.is_homogeneous:
            first, kind = bound.setdefault(formal.type_str, (item, dtype))
            if kind != dtype:
                raise ArgumentError(
                    f"{call}: {describe(first)} and {describe(item)} have different element types; cast one of them "
                    "with amp.nn.functional.cast"
                )


def _dtype(item: Input) -> str | None:
    if isinstance(item, np.ndarray):
        return element_type(item.dtype)
    return None if item is None else item.dtype


def describe(item: Input) -> str:
    """A variable or constant as messages show it."""
    if isinstance(item, Variable):
        shape = "shape unknown" if item.shape is None else list(item.shape)
        return f"'{item.name}' ({item.dtype} {shape})"
    assert item is not None
    return f"constant {item!r}" if item.size == 1 else f"a constant ({item.dtype} {list(item.shape)})"


# -- arguments -------------------------------------------------------------------------------------
def check_program(call: str, item: Input, program: Program | None = None) -> None:
    """ArgumentError where a variable is not of the current program."""
    program = program or default_main_program()
    if isinstance(item, Variable) and item.program is not program:
        raise ArgumentError(
            f"{call}: variable '{item.name}' belongs to {other_program(item.program, program)}, which is not the "
            f"current one ('{program.name}'); build under amp.program_guard of the program that it belongs to"
        )


def variable(
    call: str,
    argument: str,
    value: Any,
    *,
    dtypes: Sequence[str] | None = None,
    rank: int | None = None,
    min_rank: int = 0,
) -> Variable:
    """``value`` if it is a variable of the current program with this element type and rank."""
    if not isinstance(value, Variable):
        raise ArgumentTypeError(f"{call}: {argument} must be a Variable, not {type(value).__name__}")
    check_program(call, value)
    if dtypes is not None and value.dtype not in dtypes:
        raise ArgumentError(f"{call}: {argument} {describe(value)} must have element type {' or '.join(dtypes)}")
    if rank is None and not min_rank:
        return value
    if value.shape is None:
        raise ArgumentError(f"{call}: the rank of {argument} '{value.name}' is not known; give it a shape in amp.data")
    if rank is not None and len(value.shape) != rank:
        raise ArgumentError(f"{call}: {argument} {describe(value)} must have {rank} dimensions, not {len(value.shape)}")
    if len(value.shape) < min_rank:
        raise ArgumentError(f"{call}: {argument} {describe(value)} must have at least {min_rank} dimensions")
    return value


def fixed(call: str, argument: str, value: Variable, axis: int, way_out: str = "") -> int:
    """The size of one dimension; ArgumentError, with the way out, where it is not fixed."""
    assert value.shape is not None
    size = value.shape[axis]
    if not isinstance(size, int):
        raise ArgumentError(
            f"{call}: dimension {axis} of {argument} {describe(value)} must be known while building"
            + f"; {way_out}" * bool(way_out)
        )
    return size


def whole(call: str, argument: str, value: Any, minimum: int = 1) -> int:
    """``value`` as an int of at least ``minimum``, which int64 holds."""
    if not is_whole(value):
        raise ArgumentTypeError(f"{call}: {argument} must be an integer, not {value!r}")
    if value < minimum:
        raise ArgumentError(f"{call}: {argument} must be at least {minimum}, not {shown(value)}")
    if abs(value) > LARGEST:
        raise ArgumentError(f"{call}: {argument} is {shown(value)}, more than int64 holds")
    return int(value)


def real(call: str, argument: str, value: Any) -> float:
    """``value`` as a float; ArgumentTypeError where it is no number."""
    if not is_real(value):
        raise ArgumentTypeError(f"{call}: {argument} must be a number, not {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise ArgumentError(f"{call}: {argument} is {shown(value)}, more than float64 holds") from None


def integers(call: str, argument: str, values: Any, minimum: int | None = None) -> list[int]:
    """A list of integers, each at least ``minimum``."""
    if not isinstance(values, (list, tuple, np.ndarray)) or not np.ndim(values):
        raise ArgumentTypeError(f"{call}: {argument} must be a list of integers, not {values!r}")
    return [whole(call, argument, value, -LARGEST if minimum is None else minimum) for value in values]


def axes_of(call: str, axis: Any, x: Variable) -> list[int]:
    """Axes of ``x``, one or several, counted from 0, each named once."""
    axes = [axis_of(call, a, x) for a in (axis if isinstance(axis, (list, tuple)) else [axis])]
    if len(set(axes)) != len(axes) or not axes:
        raise ArgumentError(f"{call}: axis {axis!r} must name each axis once, and at least one")
    return axes


def as_type(x: Variable, dtype: Any) -> Variable:
    """``x`` cast to ``dtype``; as it is where that is None."""
    if dtype is None:
        return x
    return append("cast", "Cast", [variable("cast", "x", x)], attrs={"to": ONNX_TYPES[element_type(dtype)]})


def constant(like: Variable, value: Any) -> np.ndarray:
    """``value`` in the element type of ``like``."""
    return np.array(value, numpy_dtype(str(like.dtype)))


def axis_of(call: str, axis: Any, x: Variable, argument: str = "axis") -> int:
    """An axis of ``x``, counted from 0."""
    rank = len(variable(call, "x", x, min_rank=1).shape or ())
    if not is_whole(axis):
        raise ArgumentTypeError(f"{call}: {argument} must be an integer, not {axis!r}")
    if not -rank <= int(axis) < rank:
        raise ArgumentError(f"{call}: {argument} {axis} is outside {describe(x)}")
    return int(axis) % rank


def operand(call: str, value: Any, like: Variable) -> Input:
    """A variable as it is; a number or array as a constant of the element type of ``like``."""
    if isinstance(value, Variable):
        return value
    if like.dtype is None:
        raise ArgumentError(f"{call}: the element type of '{like.name}' is not known")
    if not isinstance(value, (numbers.Real, np.ndarray, np.generic, list, tuple)):
        raise ArgumentTypeError(f"{call}: cannot use {type(value).__name__} as an operand")
    try:
        return typed(value, like.dtype)
    except ValueError:
        raise ArgumentError(
            f"{call}: {shown(value)} is no {like.dtype}, the element type of '{like.name}'; cast the "
            "variable with amp.nn.functional.cast first"
        ) from None


def typed(value: Any, dtype: str) -> np.ndarray:
    """Numbers as an array of this element type; ValueError where they are none, or fractions and it has integers."""
    try:
        given = np.asarray(value)
        array = given.astype(numpy_dtype(dtype))
    except (OverflowError, TypeError):  # what no integer type holds; objects
        raise ValueError(f"no {dtype}: {shown(value)}") from None
    if dtype not in FLOATING and not np.array_equal(array, given):
        raise ValueError(f"no {dtype}: {shown(value)}")
    return array


def clip_bounds(call: str, x: Variable, low: float | None, high: float | None) -> list[Input]:
    """The bounds of a Clip of ``x``; ArgumentError for NaN, and for a lower bound above the upper one."""
    for name, bound in (("min", low), ("max", high)):
        if bound is not None and math.isnan(real(call, name, bound)):
            raise ArgumentError(f"{call}: {name} is no number")
    if low is not None and high is not None and low > high:
        raise ArgumentError(f"{call}: min {low:g} is above max {high:g}")
    return [None if bound is None else operand(call, bound, x) for bound in (low, high)]
