"""What every function of :mod:`amp.nn.functional` takes besides its own arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar, cast

from amp_transpiler.errors import ArgumentTypeError
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.ir.rollback import without_leftovers
from amp_transpiler.lists.paddle import paddle_arguments, parameter_names
from amp_transpiler.nn.building import FLOATING, append, prefixed, variable
from amp_transpiler.program import default_main_program

Called = TypeVar("Called", bound=Callable[..., Any])
Kind = TypeVar("Kind")
#: What a function of a family takes besides its kind.
Own = ParamSpec("Own")


class OfOneVariable(Protocol):
    """The type of a function that takes a variable alone."""

    __name__: str

    def __call__(self, x: Variable, *, name: str | None = None) -> Variable: ...


class OfTwoOperands(Protocol):
    """The type of a function of two operands, one of them a variable."""

    __name__: str

    def __call__(self, x: Any, y: Any, *, name: str | None = None) -> Variable: ...


def function(*tables: str) -> Callable[[Called], Called]:
    """A public function of variables.

    It declares ``name``, the prefix of its results' names (``<name>.tmp_0``), which is taken here. Besides its own
    arguments it takes ``input`` for ``x``, and the keywords of these tables of Paddle's spelling. A call that is
    refused adds nothing to the program.
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


def family(shared: Callable[Concatenate[Kind, Own], Variable], kind: Kind, name: str) -> Callable[Own, Variable]:
    """The function ``name`` of a family: ``shared``, whose first argument is ``kind``, which its docstring shows."""
    called = partial(shared, kind)
    told = inspect.cleandoc(shared.__doc__ or "").format(kind)
    vars(called).update(__name__=name, __qualname__=name, __module__=shared.__module__, __doc__=told)
    return called


def member(
    shared: Callable[Concatenate[Kind, Own], Variable], kind: Kind, name: str, *tables: str
) -> Callable[Own, Variable]:
    """:func:`family` for a public function of variables; see :func:`function`."""
    return function(*tables)(family(shared, kind, name))


class _Simple(NamedTuple):
    name: str
    type: str
    text: str
    dtypes: tuple[str, ...] | None

    @property
    def taken(self) -> str:
        return "float" if self.dtypes == FLOATING else "numbers"


def _simple(kind: _Simple, x: Variable, *, name: str | None = None) -> Variable:
    """{0.text} ``x``: {0.taken}, any shape."""
    return append(kind.name, kind.type, [variable(kind.name, "x", x, dtypes=kind.dtypes)])


def simple(name: str, type_: str, text: str, *tables: str, dtypes: tuple[str, ...] | None = FLOATING) -> OfOneVariable:
    """The function ``name`` of one variable that is one operator; ``text`` says what it computes."""
    return member(_simple, _Simple(name, type_, text, dtypes), name, *tables)
