"""The text of a pipeline: read into names and options with their positions, and written back."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import Field, dataclass, fields
from difflib import get_close_matches
from typing import Any, get_type_hints

from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.spelling import MODES, TYPES, read_as

#: The name of a pass or an option.
NAME = re.compile(r"[A-Za-z][\w-]*")
_BLANKS = re.compile(r"\s*")
_VALUE = re.compile(r'"(?:[^"\\]|\\.)*"|[^\s{}"]+')
_COMMA = re.compile(r"(?<!\\),")
_PLAIN = re.compile(r'[^\s{}"]+')


@dataclass(frozen=True)
class PassText:
    """A pass of a text: its name and its options, each with the position that it stands at."""

    text: str
    name: str
    at: int
    options: dict[str, tuple[str, int]]

    def error(self, what: str, at: int | None = None) -> ArgumentError:
        """The error that says ``what`` is wrong, and where."""
        return _error(self.text, self.at if at is None else at, what)


def _error(text: str, at: int, what: str) -> ArgumentError:
    return ArgumentError(f"pipeline {text!r}, character {at + 1}: {what}")


def parse(text: str) -> list[PassText]:
    """The passes of a text; ArgumentError with the position where it is none."""
    return _Reader(text).passes()


class _Reader:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def passes(self) -> list[PassText]:
        found = [self._pass()]
        while self._took(","):
            found.append(self._pass())
        if self.at < len(self.text):
            raise self._expected("',' or the end")
        return found

    def _pass(self) -> PassText:
        at, name = self._match(NAME, "the name of a pass")
        options: dict[str, tuple[str, int]] = {}
        if self._took("{"):
            while not self._took("}"):
                start, key = self._match(NAME, "the name of an option, or '}'")
                if key in options:
                    raise _error(self.text, start, f"option {key!r} of {name} is given twice")
                options[key] = (self._value(), start) if self._took("=") else ("true", start)
        return PassText(self.text, name, at, options)

    def _value(self) -> str:
        _, value = self._match(_VALUE, "a value")
        return re.sub(r"\\(.)", r"\1", value[1:-1]) if value.startswith('"') else value

    def _match(self, pattern: re.Pattern[str], what: str) -> tuple[int, str]:
        self._skip()
        found = pattern.match(self.text, self.at)
        if found is None:
            raise self._expected(what)
        self.at = found.end()
        return found.start(), found.group()

    def _took(self, sign: str) -> bool:
        self._skip()
        took = self.text.startswith(sign, self.at)
        self.at += took
        return took

    def _skip(self) -> None:
        found = _BLANKS.match(self.text, self.at)
        self.at = found.end() if found else self.at

    def _expected(self, what: str) -> ArgumentError:
        there = repr(self.text[self.at]) if self.at < len(self.text) else "the end"
        return _error(self.text, self.at, f"expected {what}, found {there}")


def read_options(kind: type, text: PassText) -> dict[str, Any]:
    """The fields of a pass that its text gives."""
    options = {key_of(each): each for each in fields(kind)}
    found = {}
    for key, (value, at) in text.options.items():
        if key not in options:
            near = get_close_matches(key, options, 1)
            hint = f"did you mean {near[0]}?" if near else f"its options are {', '.join(options) or 'none'}"
            raise text.error(f"{text.name} has no option {key!r}; {hint}", at)
        try:
            found[options[key].name] = _read(kind, options[key], value)
        except ValueError:
            expected = values_of(kind, options[key])
            raise text.error(f"option {key} of {text.name} is {value!r}; expected {expected}", at) from None
    return found


def key_of(option: Field[Any]) -> str:
    """An option as it is called in text."""
    return option.name.replace("_", "-")


#: Type of an option -> what it holds in words, and how it is read.
_TYPES: dict[Any, tuple[str, Callable[[str], Any]]] = {
    bool: ("true or false", {"true": True, "false": False}.__getitem__),
    int: ("a whole number", int),
    str: ("text", str),
    tuple[str, ...]: (
        "names separated by commas",
        lambda text: tuple(part.replace(r"\,", ",") for part in _COMMA.split(text)) if text else (),
    ),
}


def values_of(kind: type, option: Field[Any]) -> str:
    """What an option holds, in words."""
    choices: tuple[str, ...] = option.metadata.get("choices", ())
    return " or ".join(choices) if choices else _type(kind, option)[0]


def _type(kind: type, option: Field[Any]) -> tuple[str, Callable[[str], Any]]:
    found = get_type_hints(kind)[option.name]
    if found not in _TYPES:
        raise ArgumentTypeError(
            f"option {key_of(option)} of pass {kind.__qualname__} is of type {found}, which has no text; expected "
            "bool, int, str or tuple[str, ...]"
        )
    return _TYPES[found]


def _read(kind: type, option: Field[Any], text: str) -> Any:
    """A value of this option; ValueError where the text is none."""
    choices = option.metadata.get("choices", (text,))
    if text not in choices:  # another spelling of a mode or a type, as everywhere
        text = next((word for word in (read_as(MODES, text), read_as(TYPES, text)) if word in choices), text)
    if text not in choices:
        raise ValueError(text)
    try:
        return _type(kind, option)[1](text)
    except KeyError:
        raise ValueError(text) from None


def written(each: Any) -> str:
    """The text of a pass: its name, and the options that are not the default."""
    changed = [option for option in fields(each) if getattr(each, option.name) != option.default]
    for option in changed:
        _type(type(each), option)
    given = [f"{key_of(option)}={_quoted(_written(getattr(each, option.name)))}" for option in changed]
    return f"{each.name}{{{' '.join(given)}}}" if given else str(each.name)


def _written(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(part.replace(",", r"\,") for part in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _quoted(text: str) -> str:
    if _PLAIN.fullmatch(text):
        return text
    escaped = re.sub(r'(["\\])', r"\\\1", text)
    return f'"{escaped}"'
