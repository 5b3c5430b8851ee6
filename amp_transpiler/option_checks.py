"""Checks of options: a refusal names an option as its caller spells it, in Python or on the command line."""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection, Iterable, Mapping, Set
from itertools import islice
from typing import Any, TypeGuard

import numpy as np

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


#: The largest number of steps, which programs count in int32.
LARGEST_COUNT = 2**31 - 1
#: Characters of a value in a message.
_SHOWN = 200


def flag(name: str) -> str:
    """An option as the command line spells it."""
    return "--" + name.replace("_", "-")


def shown(value: Any) -> str:
    """A value in one line, both ends of a long one."""
    try:
        text = " ".join((str(value) if is_real(value) else repr(value)).split())
    except ValueError:  # Python writes no int of more than some thousand digits
        text = "a number of thousands of digits"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} … {text[-_SHOWN // 2 :]}"


def listed(names: Collection[str], most: int = 3, quote: str = "'") -> str:
    """Some of the names, quoted, and how many there are beyond them."""
    some = ", ".join(f"{quote}{name}{quote}" for name in islice(names, most))
    return some + (f" and {len(names) - most} more" if len(names) > most else "")


def counted(count: int, what: str) -> str:
    """``1 sample``, ``2 samples``."""
    return f"{count} {what}{'s' * (count != 1)}"


def choice(called: str, value: Any, choices: Iterable[str], spellings: Mapping[str, str] | None = None) -> str:
    """``value`` as one of the choices, by any of its spellings; ArgumentError where it is none."""
    read, known = value if spellings is None else read_as(spellings, value), tuple(choices)
    if not isinstance(read, str) or read not in known:
        raise ArgumentError(f"{called} is {shown(value)}; expected one of {', '.join(known)}")
    return read


def number(called: str, value: Any, least: float = 0.0, *, taken: bool = False) -> None:
    """ArgumentTypeError for what is no number, ArgumentError unless it is finite and above ``least``; ``taken``: or
    ``least`` itself."""
    if not is_real(value):
        raise ArgumentTypeError(f"{called} is {shown(value)}; expected a number")
    if not is_finite(value) or value < least or (value == least and not taken):
        expected = f"from {least:g} on" if taken else f"above {least:g}"
        raise ArgumentError(f"{called} is {shown(value)}; expected a number {expected}")


def whole(called: str, value: Any, least: int, most: int | None = None) -> None:
    """ArgumentTypeError for what is no whole number, ArgumentError below ``least`` or above ``most``."""
    if not is_whole(value):
        raise ArgumentTypeError(f"{called} is {shown(value)}; expected a whole number")
    if value < least or (most is not None and value > most):
        expected = f"at least {least}" if most is None else f"{least} to {most}"
        raise ArgumentError(f"{called} is {shown(value)}; expected a whole number, {expected}")


def share(called: str, value: Any) -> None:
    """ArgumentError for what is no number from 0 to below 1."""
    if not is_real(value) or not 0 <= value < 1:
        raise ArgumentError(f"{called} is {shown(value)}; expected a number from 0 to below 1")


def switch(called: str, value: Any) -> bool:
    """``value``, which is True or False; ArgumentTypeError for all else."""
    if not isinstance(value, bool | np.bool_):
        raise ArgumentTypeError(f"{called} is {shown(value)}; expected True or False")
    return bool(value)


def strings(called: str, value: Any, expected: str = "a list of names or patterns") -> tuple[str, ...]:
    """The strings of a list; ArgumentTypeError, with what is ``expected``, for a single one and for what is no list."""
    try:
        listed = None if isinstance(value, str | bytes | Mapping) else tuple(value)
    except TypeError:  # an array without dimensions among it, which has the methods of what can be gone through
        listed = None
    if listed is None:
        raise ArgumentTypeError(f"{called} is {shown(value)}; expected {expected}")
    if isinstance(value, Set):  # the same in every process
        listed = tuple(sorted(listed, key=str))
    wrong = next((item for item in listed if not isinstance(item, str) or not item), None)
    if wrong is not None:
        raise ArgumentTypeError(f"{called} holds {shown(wrong)}; expected {expected}")
    return listed
