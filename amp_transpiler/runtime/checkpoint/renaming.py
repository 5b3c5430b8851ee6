"""Names of stored tensors turned into those of a program, by pattern."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Callable, Iterable, Mapping

from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.ir.patterns import pattern_of

#: pattern -> replacement, or None to leave the tensor out.
Renames = Mapping[str, str | None]
_WILD = re.compile(r"\[!?\]?[^\]]*\]|[*?]")


def renamed(names: Iterable[str], rename: Renames | None, what: str) -> dict[str, str | None]:
    """Each stored name with its name in the program; None for one that is left out.

    A pattern is a glob that the whole name fits, or after ``re:`` a regular expression; the first that fits counts.
    In the replacement of a glob each ``*`` stands for what the wildcard of the same number (``*``, ``?`` or ``[…]``)
    matched; in that of an expression ``\\\\1`` or ``\\\\g<name>`` stands for a group.

    ArgumentTypeError for what is no mapping of strings; ArgumentError for a broken pattern or replacement, a pattern
    that fits no name, and two tensors that get one name. ``what`` names the caller.
    """
    if rename is None:
        return {name: name for name in names}
    if not isinstance(rename, Mapping) or not all(
        isinstance(key, str) and isinstance(value, (str, type(None))) for key, value in rename.items()
    ):
        raise ArgumentTypeError(
            f"{what}: rename maps patterns to replacements, as in {{'encoder.*': 'enc/*'}}; got {rename!r}"
        )
    names = list(names)
    rules = [_Rule(pattern, replacement, what) for pattern, replacement in rename.items()]
    result: dict[str, str | None] = {}
    for name in names:
        rule = next((rule for rule in rules if rule.fits(name)), None)
        result[name] = name if rule is None else rule(name)
    unused = [rule.pattern for rule in rules if not any(map(rule.fits, names))]
    if unused:
        raise ArgumentError(
            f"{what}: rename pattern {unused[0]!r} fits no stored name; there are, for example, "
            f"{', '.join(map(repr, names[:3]))}"
        )
    _check_distinct(result, what)
    return result


def _check_distinct(result: Mapping[str, str | None], what: str) -> None:
    taken: dict[str, str] = {}
    for name, new in result.items():
        if new is not None and taken.setdefault(new, name) != name:
            raise ArgumentError(f"{what}: rename gives '{taken[new]}' and '{name}' one name, '{new}'")


class _Rule:
    def __init__(self, pattern: str, replacement: str | None, what: str) -> None:
        self.pattern, self.what = pattern, what
        self._replace: Callable[[re.Match[str]], str] | None = None
        glob = not pattern.startswith("re:")
        self.expression = re.compile(_grouped(pattern)) if glob else pattern_of(pattern, what)
        if replacement is None:
            return
        if not glob:
            self._replace = functools.partial(_expanded, replacement)
        elif replacement.count("*") <= self.expression.groups:
            self._replace = functools.partial(_filled, replacement.split("*"))
        else:
            raise ArgumentError(
                f"{what}: rename gives {pattern!r} the replacement {replacement!r}, which has more "
                "wildcards than the pattern"
            )

    def fits(self, name: str) -> bool:
        return self.expression.fullmatch(name) is not None

    def __call__(self, name: str) -> str | None:
        match = self.expression.fullmatch(name)
        assert match is not None
        if self._replace is None:
            return None
        try:
            return self._replace(match)
        except (re.error, IndexError) as error:
            raise ArgumentError(f"{self.what}: the replacement of {self.pattern!r} is wrong: {error}") from None


def _expanded(replacement: str, match: re.Match[str]) -> str:
    return match.expand(replacement)


def _filled(pieces: list[str], match: re.Match[str]) -> str:
    return pieces[0] + "".join(match[number] + piece for number, piece in enumerate(pieces[1:], 1))


def _grouped(pattern: str) -> str:
    """A glob as an expression with a group for each wildcard."""
    parts, end = [], 0
    for wild in _WILD.finditer(pattern):
        parts.append(re.escape(pattern[end : wild.start()]))
        one = fnmatch.translate(wild[0])
        parts.append(f"({one[: one.rindex(')') + 1]})")  # without the end of the text that follows
        end = wild.end()
    return "".join(parts) + re.escape(pattern[end:])
