"""Operators by name or scope: glob patterns, and regular expressions after ``re:``."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.ir.nodes import Operator

Item = TypeVar("Item")


def is_pattern(name: str) -> bool:
    """Whether ``name`` can stand for more than itself."""
    return name.startswith("re:") or any(sign in name for sign in "*?[")


def matching(
    operators: Iterable[Operator],
    patterns: Sequence[str],
    what: str,
    *,
    names: Callable[[Operator], list[str]] | None = None,
    required: bool = True,
) -> dict[Operator, str]:
    """The operators whose name or scope fits a pattern, each with the first pattern that it fits.

    A pattern is a glob (``encoder/*``, letter case counts) or, after ``re:``, a regular expression that the whole
    name or scope fits. An operator without a name is found by the names of what it makes; ``names`` gives other
    names to go by. ``what`` names the caller in errors: ArgumentTypeError for what is no list of strings,
    ArgumentError for a broken expression and, where ``required``, for a pattern that fits nothing.
    """
    operators = list(operators)

    def nothing(pattern: str) -> str:
        known = list(dict.fromkeys(repr(name) for op in operators if (name := op.scope or op.name)))
        some = f"it has, for example, {', '.join(known[:3])}" if known else "its operators have neither"
        program = f" of program '{operators[0].program.name}'" if operators else ""
        return f"operator name or scope{program} ({some})"

    return _fitting([(op, (names or _names)(op)) for op in operators], patterns, what, nothing if required else None)


def pattern_of(pattern: str, what: str) -> re.Pattern[str]:
    """The expression that a pattern stands for; ArgumentError, for the caller ``what``, where it is broken."""
    if not pattern.startswith("re:"):
        return re.compile(fnmatch.translate(pattern))
    try:
        return re.compile(pattern[3:])
    except re.error as error:
        raise ArgumentError(f"{what}: {pattern[3:]!r} is no regular expression: {error}") from None


def _names(op: Operator) -> list[str]:
    """Name and scope, and both together, so that ``encoder/*`` fits an operator that lies in ``encoder`` itself."""
    own = [op.name] if op.name else [v.name for v in op.outputs if v is not None]
    return [op.scope, *own, *(f"{op.scope}/{name}" for name in own if op.scope)]


def matching_names(
    items: Iterable[Item],
    patterns: Sequence[str],
    what: str,
    names: Callable[[Item], list[str]],
    kind: str,
    *,
    required: bool = True,
) -> dict[Item, str]:
    """The items with a name that fits a pattern, each with the first pattern that it fits; errors as above.

    ``names`` gives the names of an item, its own first; ``kind`` says in errors what is looked for.
    """
    called = [(item, names(item)) for item in items]

    def nothing(pattern: str) -> str:
        known = [own[0] for _, own in called]
        near = difflib.get_close_matches(pattern, known, 3, 0.3) or known[:3]
        return f"{kind}; there are, for example, {', '.join(map(repr, near))}" if near else f"{kind}; there is none"

    return _fitting(called, patterns, what, nothing if required else None)


def _fitting(
    called: Sequence[tuple[Item, list[str]]], patterns: Sequence[str], what: str, nothing: Callable[[str], str] | None
) -> dict[Item, str]:
    """The items with a name that fits; ``nothing`` says of a pattern that fits none what it does not match."""
    listed = isinstance(patterns, Iterable) and not isinstance(patterns, str)
    if not listed or not all(isinstance(pattern, str) for pattern in patterns):
        raise ArgumentTypeError(f"{what} takes strings, as in ('a/*', 'b/*'); got {patterns!r}")
    found: dict[Item, str] = {}
    for pattern in patterns:
        expression = pattern_of(pattern, what)
        hits = [item for item, own in called if any(expression.fullmatch(name) for name in own)]
        if not hits and nothing is not None:
            raise ArgumentError(f"{what}: pattern {pattern!r} matches no {nothing(pattern)}")
        for item in hits:
            found.setdefault(item, pattern)
    return found
