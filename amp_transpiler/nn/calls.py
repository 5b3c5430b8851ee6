"""What every function of :mod:`amp.nn.functional` takes besides its own arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any, TypeVar, cast

from amp_transpiler.errors import ArgumentTypeError
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.ir.rollback import without_leftovers
from amp_transpiler.lists.paddle import paddle_arguments, parameter_names
from amp_transpiler.nn.building import FLOATING, append, prefixed, variable
from amp_transpiler.program import default_main_program

Called = TypeVar("Called", bound=Callable[..., Any])


def function(*tables: str) -> Callable[[Called], Called]:
    """A public function of variables.

    It takes ``name``, the prefix of its results' names (``<name>.tmp_0``), ``input`` for ``x``, and the keywords of
    these tables of Paddle's spelling. A call that is refused adds nothing to the program.
    """

    def carry(called: Called) -> Called:
        parameters = parameter_names(inspect.unwrap(called))

        @wraps(called)
        def call(*args: Any, name: str | None = None, **kwargs: Any) -> Any:
            if name is not None and (not isinstance(name, str) or not name):
                raise ArgumentTypeError(f"{called.__name__}: name must be a string, not {name!r}")
            with without_leftovers(default_main_program()), nullcontext() if name is None else prefixed(name):
                return called(*args, **kwargs)

        both = ["nn.input", *tables] if "x" in parameters and "input" not in parameters else tables
        return cast(Called, paddle_arguments(*both)(call))

    return carry


def simple(
    name: str, type_: str, text: str, *tables: str, dtypes: tuple[str, ...] | None = FLOATING, **attrs: Any
) -> Callable[[Variable], Variable]:
    """The function ``name`` of one variable that is one operator; ``text`` says what it computes."""

    def called(x: Variable) -> Variable:
        return append(name, type_, [variable(name, "x", x, dtypes=dtypes)], attrs=attrs)

    called.__name__ = called.__qualname__ = name
    called.__doc__ = f"{text} ``x``: {'float' if dtypes == FLOATING else 'numbers'}, any shape."
    return function(*tables)(called)
