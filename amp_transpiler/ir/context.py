"""What building code stands in: name scope, fp16 guard and operator role; each is its thread's (or task's) own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from amp_transpiler.errors import ArgumentTypeError

Value = TypeVar("Value")

_scopes: ContextVar[tuple[str, ...]] = ContextVar("scopes", default=())
_guards: ContextVar[int] = ContextVar("guards", default=0)
_role: ContextVar[str] = ContextVar("role", default="forward")


@contextmanager
def inside(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    """Let a context variable have this value inside, and the one of before afterwards, also after Ctrl-C."""
    before = variable.get()
    try:
        variable.set(value)
        yield
    finally:
        try:
            variable.set(before)
        finally:
            variable.set(before)  # where Ctrl-C came just before the first


@contextmanager
def name_scope(prefix: str) -> Iterator[None]:
    """Operators built inside carry the scope ``prefix``, a string (nested scopes join with ``/``)."""
    if not isinstance(prefix, str) or not prefix:
        raise ArgumentTypeError(f"name_scope: the prefix is {prefix!r}; expected a string such as 'encoder'")
    with inside(_scopes, (*_scopes.get(), prefix)):
        yield


@contextmanager
def fp16_guard() -> Iterator[None]:
    """Operators built inside are marked for 16 bit in pure mode; what lies outside stays fp32."""
    with inside(_guards, _guards.get() + 1):
        yield


@contextmanager
def operator_role(role: str) -> Iterator[None]:
    """Operators added inside have this role."""
    with inside(_role, role):
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
