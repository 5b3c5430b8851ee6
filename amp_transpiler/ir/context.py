"""What building code stands in: the current programs, name scope, fp16 guard and operator role."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..errors import ArgumentTypeError
from . import names

if TYPE_CHECKING:
    from .program import Program

_programs: list[tuple[Program, Program]] = []
_scopes: list[str] = []
_guards = 0
_roles: list[str] = ["forward"]


def _current() -> tuple[Program, Program]:
    if not _programs:
        from .program import Program

        startup = Program("startup")
        _programs.append((Program("main", startup), startup))
    return _programs[-1]


def default_main_program() -> Program:
    """The program that building code adds to."""
    return _current()[0]


def default_startup_program() -> Program:
    """The program that initialisers are added to."""
    return _current()[1]


@contextmanager
def program_guard(main: Program, startup: Program | None = None) -> Iterator[None]:
    """Build into ``main``, and put initialisers into ``startup`` (default: ``main.startup``, made if missing).

    ArgumentTypeError for what is no Program.
    """
    from .program import Program

    for argument, given in (("main", main), ("startup", startup)):
        if not isinstance(given, Program) and not (given is None and argument == "startup"):
            raise ArgumentTypeError(f"program_guard: {argument} is {given!r}; expected an amp.Program")
    if startup is None:
        startup = main.startup or Program(f"{main.name}_startup")
    if main.startup is None and main is not startup:
        main.startup = startup
    _current()
    _programs.append((main, startup))
    try:
        yield
    finally:
        _programs.pop()


@contextmanager
def name_scope(prefix: str) -> Iterator[None]:
    """Operators built inside carry the scope ``prefix``, a string (nested scopes join with ``/``)."""
    if not isinstance(prefix, str) or not prefix:
        raise ArgumentTypeError(f"name_scope: the prefix is {prefix!r}; expected a string such as 'encoder'")
    _scopes.append(prefix)
    try:
        yield
    finally:
        _scopes.pop()


@contextmanager
def fp16_guard() -> Iterator[None]:
    """Operators built inside are marked for 16 bit in pure-fp16 mode; what lies outside stays fp32."""
    global _guards
    _guards += 1
    try:
        yield
    finally:
        _guards -= 1


@contextmanager
def operator_role(role: str) -> Iterator[None]:
    """Operators added inside have this role."""
    _roles.append(role)
    try:
        yield
    finally:
        _roles.pop()


def in_fp16_guard() -> bool:
    """Whether building code stands inside an ``fp16_guard``."""
    return _guards > 0


def scope_name() -> str:
    """The current name scope, joined with ``/``."""
    return "/".join(_scopes)


def role() -> str:
    """The role that new operators get."""
    return _roles[-1]


__all__ = ["default_main_program", "default_startup_program", "fp16_guard", "in_fp16_guard", "name_scope", "names",
           "operator_role", "program_guard", "role", "scope_name"]  # fmt: skip
