"""Checks of options: a refusal names an option as its caller spells it, in Python or on the command line."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Set
from typing import Any, TypeGuard

from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.spelling import read_as


def is_whole(value: Any) -> TypeGuard[int]:
    """Whether it is a whole number of Python or numpy; True and False are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_real(value: Any) -> TypeGuard[float]:
    """Whether it is a real number of Python or numpy, infinite or NaN too; True and False are none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_finite(value: Any) -> TypeGuard[float]:
    """Whether it is a real number that a float can be: neither infinite nor NaN nor an int beyond all floats."""
    try:
        return is_real(value) and math.isfinite(value)
    except OverflowError:
        return False


def flag(name: str) -> str:
    """An option as the command line spells it."""
    return "--" + name.replace("_", "-")


def choice(called: str, value: Any, choices: Iterable[str], spellings: Mapping[str, str] | None = None) -> str:
    """``value`` as one of the choices, by any of its spellings; ArgumentError where it is none."""
    read, known = read_as(spellings, value) if spellings else value, tuple(choices)
    if not isinstance(read, str) or read not in known:
        raise ArgumentError(f"{called} is {value!r}; expected one of {', '.join(known)}")
    return read


def number(called: str, value: Any, least: float = 0.0, *, taken: bool = False) -> None:
    """ArgumentTypeError for what is no number, ArgumentError unless it is finite and above ``least``; ``taken``: or
    ``least`` itself."""
    if not is_real(value):
        raise ArgumentTypeError(f"{called} is {value!r}; expected a number")
    if not is_finite(value) or value < least or (value == least and not taken):
        raise ArgumentError(
            f"{called} is {value}; expected a number {'from' if taken else 'above'} {least:g}{' on' if taken else ''}"
        )


def whole(called: str, value: Any, least: int) -> None:
    """ArgumentTypeError for what is no whole number, ArgumentError below ``least``."""
    if not is_whole(value):
        raise ArgumentTypeError(f"{called} is {value!r}; expected a whole number")
    if value < least:
        raise ArgumentError(f"{called} is {value}; expected a whole number, at least {least}")


def switch(called: str, value: Any) -> None:
    """ArgumentTypeError for what is neither True nor False."""
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"{called} is {value!r}; expected True or False")


def strings(called: str, value: Any, expected: str = "a list of names or patterns") -> tuple[str, ...]:
    """The strings of a list; ArgumentTypeError, with what is ``expected``, for a single one and for what is no list."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise ArgumentTypeError(f"{called} is {value!r}; expected {expected}")
    listed = tuple(sorted(value, key=str) if isinstance(value, Set) else value)  # the same in every process
    wrong = next((item for item in listed if not isinstance(item, str) or not item), None)
    if wrong is not None:
        raise ArgumentTypeError(f"{called} holds {wrong!r}; expected {expected}")
    return listed
