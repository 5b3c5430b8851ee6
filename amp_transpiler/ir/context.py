"""What building code stands in: the current programs, name scope, fp16 guard and operator role.

Each is its thread's (or asyncio task's) own, so that two threads may build two programs at once. A thread that stands
in no ``program_guard`` builds into the default programs, of which the process has one pair.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from amp_transpiler.errors import ArgumentTypeError
from amp_transpiler.lists.paddle import paddle_arguments

if TYPE_CHECKING:
    from amp_transpiler.ir.program import Program

_default: list[tuple[Program, Program]] = []
_lock = threading.RLock()
_programs: ContextVar[tuple[Program, Program] | None] = ContextVar("programs", default=None)
_scopes: ContextVar[tuple[str, ...]] = ContextVar("scopes", default=())
_guards: ContextVar[int] = ContextVar("guards", default=0)
_role: ContextVar[str] = ContextVar("role", default="forward")


def _current() -> tuple[Program, Program]:
    current = _programs.get()
    if current is not None:
        return current
    with _lock:
        if not _default:
            from amp_transpiler.ir.program import Program

            startup = Program("startup")
            _default.append((Program("main", startup), startup))
    return _default[0]


@contextmanager
def _inside(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    before = variable.get()
    variable.set(value)
    try:
        yield
    finally:
        variable.set(before)


def default_main_program() -> Program:
    """The program that building code adds to."""
    return _current()[0]


def default_startup_program() -> Program:
    """The program that initialisers are added to."""
    return _current()[1]


@paddle_arguments("program_guard")
@contextmanager
def program_guard(main: Program, startup: Program | None = None) -> Iterator[None]:
    """Build into ``main``, and put initialisers into ``startup`` (default: ``main.startup``, made if missing).

    ArgumentTypeError for what is no Program.
    """
    from amp_transpiler.ir.program import Program

    for argument, given in (("main", main), ("startup", startup)):
        if not isinstance(given, Program) and not (given is None and argument == "startup"):
            raise ArgumentTypeError(f"program_guard: {argument} is {given!r}; expected an amp.Program")
    if startup is None:
        startup = main.startup or Program(f"{main.name}_startup")
    if main.startup is None and main is not startup:
        main.startup = startup
    with _inside(_programs, (main, startup)):
        yield


@contextmanager
def name_scope(prefix: str) -> Iterator[None]:
    """Operators built inside carry the scope ``prefix``, a string (nested scopes join with ``/``)."""
    if not isinstance(prefix, str) or not prefix:
        raise ArgumentTypeError(f"name_scope: the prefix is {prefix!r}; expected a string such as 'encoder'")
    with _inside(_scopes, (*_scopes.get(), prefix)):
        yield


@contextmanager
def fp16_guard() -> Iterator[None]:
    """Operators built inside are marked for 16 bit in pure-fp16 mode; what lies outside stays fp32."""
    with _inside(_guards, _guards.get() + 1):
        yield


@contextmanager
def operator_role(role: str) -> Iterator[None]:
    """Operators added inside have this role."""
    with _inside(_role, role):
        yield


def in_fp16_guard() -> bool:
    """Whether building code stands inside an ``fp16_guard``."""
    return _guards.get() > 0


def scope_name() -> str:
    """The current name scope, joined with ``/``."""
    return "/".join(_scopes.get())


def role() -> str:
    """The role that new operators get."""
    return _role.get()


__all__ = [
    "default_main_program",
    "default_startup_program",
    "fp16_guard",
    "in_fp16_guard",
    "name_scope",
    "operator_role",
    "program_guard",
    "role",
    "scope_name",
]
