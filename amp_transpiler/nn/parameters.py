"""Inputs and parameters of a program that is being built."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx

from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.ir import unique_name
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.ir.settings import UpdateSettings, set_settings
from amp_transpiler.ir.types import element_type
from amp_transpiler.lists.paddle import paddle_arguments
from amp_transpiler.nn.building import check_program, describe, real
from amp_transpiler.nn.getter import got
from amp_transpiler.nn.initializer import Assign, Constant, Initializer, XavierUniform
from amp_transpiler.option_checks import is_whole, switch
from amp_transpiler.program import Program, default_main_program, default_startup_program
from amp_transpiler.regularizer import L1Decay, L2Decay


@paddle_arguments()
@dataclass(frozen=True, eq=False)
class ParamAttr:
    """How a parameter is made and updated.

    ``name``; ``initializer``: of ``amp.nn.initializer``, or an array; None for what the layer would choose.
    ``trainable=False``: never updated. ``learning_rate``: a factor of the optimizer's, at least 0. ``regularizer``:
    ``amp.regularizer.L2Decay`` or ``L1Decay``, in place of the optimizer's ``weight_decay``. ``need_clip=False``: the
    gradient is not clipped, and does not count in a norm that others are clipped by. ArgumentError, ArgumentTypeError:
    values of other kinds.
    """

    name: str | None = None
    initializer: Any = None
    learning_rate: float = 1.0
    regularizer: L1Decay | L2Decay | None = None
    trainable: bool = True
    do_model_average: bool = True
    need_clip: bool = True

    def __post_init__(self) -> None:
        call = "ParamAttr"
        if self.name is not None:
            _check_name(call, self.name)
        rate = real(call, "learning_rate", self.learning_rate)
        if not 0 <= rate < math.inf:
            raise ArgumentError(f"{call}: learning_rate is a factor of the optimizer's, at least 0, not {rate:g}")
        if not isinstance(self.regularizer, (L1Decay, L2Decay, type(None))):
            raise ArgumentTypeError(
                f"{call}: regularizer must be an amp.regularizer.L2Decay or L1Decay, not {self.regularizer!r}"
            )
        for argument in ("trainable", "need_clip"):
            switch(f"{call}: {argument}", getattr(self, argument))

    def settings(self) -> UpdateSettings:
        """What the optimizer is asked for."""
        decay = self.regularizer
        kind, coeff = ("", 0.0) if decay is None else (type(decay).__name__, decay.coeff)
        return UpdateSettings(float(self.learning_rate), kind, coeff, self.need_clip)


#: How a layer's parameter may be described: None or True (the default), False (none), a name, an
#: initialiser or array, a :class:`ParamAttr`, or a variable to share.
Attr = None | bool | str | Variable | Initializer | np.ndarray | ParamAttr


@paddle_arguments("nn.data")
def data(name: str, shape: Iterable[int | str | None], dtype: Any = "float32") -> Variable:
    """Declare an input of the current program, fed at each run.

    ``shape``: sizes; None or -1 for one that may differ between runs, a string for a named one. ``dtype``: an
    element type. ArgumentError where the name is taken or the shape is no list of sizes.
    """
    program = default_main_program()
    _check_name("data", name)
    if program.has_var(name):
        raise ArgumentError(
            f"data: program '{program.name}' already has a variable '{name}'; declare an input once, "
            "and use the variable that amp.data returned"
        )
    return program.add_input(name, element_type(dtype), [_size(name, d) for d in _listed("data", name, shape)])


def _size(name: str, value: Any) -> int | str | None:
    if value is None or isinstance(value, str):
        return value
    if not is_whole(value) or value < -1:
        raise ArgumentError(f"data: {value!r} in the shape of '{name}' is no size")
    return None if value == -1 else int(value)


def _listed(call: str, name: str, shape: Any) -> list[Any]:
    if not isinstance(shape, (list, tuple)):
        raise ArgumentTypeError(f"{call}: the shape of '{name}' must be a list of sizes, not {shape!r}")
    return list(shape)


def _check_name(call: str, name: Any) -> None:
    if not isinstance(name, str):
        raise ArgumentTypeError(f"{call}: a name must be a string, not {name!r}")
    if not name or name.startswith("@"):
        raise ArgumentError(f"{call}: {name!r} cannot be a name; names starting with '@' are the program's own")


@paddle_arguments("nn.create_parameter")
def create_parameter(
    shape: Iterable[int],
    dtype: Any = "float32",
    name: str | None = None,
    initializer: Any = None,
    trainable: bool = True,
    attr: ParamAttr | None = None,
    is_bias: bool = False,
) -> Variable:
    """A parameter of the current program, initialised by the startup program.

    ``shape``: fixed sizes. ``name``: a name that the program has already, with the same shape and element type,
    gives that parameter (shared weights). ``initializer``: of :mod:`amp.nn.initializer`, or an array; Xavier
    uniform by default, 0 where ``is_bias``. ``trainable=False``: kept between runs, never updated by an optimizer.
    ``attr``: a :class:`ParamAttr` in place of name, initializer and trainable.

    ArgumentError: the name is taken by a variable of another shape or type, or a shape is not fixed.
    """
    call = "create_parameter"
    settings = UpdateSettings()
    if isinstance(attr, ParamAttr):
        name, trainable, settings = attr.name or name, attr.trainable and trainable, attr.settings()
        initializer = initializer if attr.initializer is None else attr.initializer
    elif attr is not None:
        raise ArgumentTypeError(f"{call}: attr must be an amp.ParamAttr, not {attr!r}")
    if initializer is None and is_bias:
        initializer = Constant()
    if name is None:
        name = f"{unique_name.generate(call)}.w_0"
    _check_name(call, name)
    start = _initializer(call, initializer)
    return _create(call, name, _sizes(call, name, shape), element_type(dtype), start, trainable, settings)


def parameter(
    call: str,
    name: str,
    shape: Iterable[int],
    dtype: str | None,
    attr: Attr,
    default: Initializer,
    trainable: bool = True,
) -> Variable:
    """The parameter of a layer that ``attr`` describes."""
    sizes = _sizes(call, name, list(shape))
    if isinstance(attr, Variable):
        check_program(call, attr)
        if attr.shape != sizes or attr.dtype != dtype:
            raise ArgumentError(f"{call}: parameter {describe(attr)} does not fit; expected {dtype} {list(sizes)}")
        return attr
    settings = UpdateSettings()
    if isinstance(attr, ParamAttr):
        settings = attr.settings()
        name, trainable, attr = attr.name or name, trainable and attr.trainable, attr.initializer
    if isinstance(attr, str):
        _check_name(call, attr)
        name, attr = attr, None
    initializer = default if attr is None or isinstance(attr, bool) else _initializer(call, attr)
    return _create(call, name, sizes, element_type(dtype), initializer, trainable, settings)


def required(call: str, argument: str, attr: Attr) -> None:
    """ArgumentError where a parameter that the layer cannot do without is described as False."""
    if attr is False:
        raise ArgumentError(f"{call}: {argument}=False, but the layer cannot do without this parameter")


def _sizes(call: str, name: str, shape: Any) -> tuple[int, ...]:
    sizes = _listed(call, name, shape)
    for size in sizes:
        if not is_whole(size) or size < 1:
            raise ArgumentError(f"{call}: {size!r} in the shape {sizes} of parameter '{name}' is no fixed size above 0")
    return tuple(int(size) for size in sizes)


def _initializer(call: str, value: Any) -> Initializer:
    if value is None:
        return XavierUniform()
    if isinstance(value, Initializer):
        return value
    if isinstance(value, (np.ndarray, onnx.TensorProto, list, numbers.Real)):
        return Assign(value)
    raise ArgumentTypeError(f"{call}: an initial value must be an amp.nn.initializer or an array, not {value!r}")


def _create(
    call: str,
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    initializer: Initializer,
    trainable: bool,
    settings: UpdateSettings,
) -> Variable:
    return got(call, partial(_stored, call, settings), name, shape, dtype, initializer, trainable)


def _stored(
    call: str,
    settings: UpdateSettings,
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    initializer: Initializer,
    trainable: bool,
) -> Variable:
    main, startup = default_main_program(), default_startup_program()
    for program in (main, startup):
        _check_same(call, program, name, shape, dtype)
    if not startup.has_var(name):
        target = startup.add_variable(name, dtype, shape, persistable=True, trainable=trainable)
        try:
            initializer.initialize(target)
        except Exception:
            startup.remove_variable(target)
            raise
    if main.has_var(name):
        return main.var(name)
    made = main.add_variable(name, dtype, shape, persistable=True, trainable=trainable)
    set_settings(made, settings)
    return made


def _check_same(call: str, program: Program, name: str, shape: tuple[int, ...], dtype: str) -> None:
    if not program.has_var(name):
        return
    found = program.var(name)
    if not found.persistable:
        raise ArgumentError(f"{call}: '{name}' is a variable of program '{program.name}' already, and no parameter")
    if found.shape != shape or found.dtype != dtype:
        raise ArgumentError(
            f"{call}: program '{program.name}' already has a parameter {describe(found)}, not {dtype} {list(shape)}. "
            "Give the new one another name; a program that shares parameters is built under its own "
            "amp.unique_name.guard()"
        )
