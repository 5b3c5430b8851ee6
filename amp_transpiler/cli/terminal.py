"""What goes to the terminal: text of a model cannot steer it.

Names in a model are anybody's. Printed as they are, an escape sequence in one could clear the screen, rename the
window, or turn the direction of a line. :func:`printable` is for one name in a line; the streams inside
:func:`safe_streams` see to whatever comes.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from amp_transpiler.warn import AmpWarning

#: Control characters, those that turn or join text unseen, other ends of lines, and halves of characters.
_STEERING = frozenset(
    [
        *range(0x20),
        *range(0x7F, 0xA0),
        0x061C,
        *range(0x200B, 0x2010),
        *range(0x2028, 0x202F),
        *range(0x2060, 0x2070),
        0xFEFF,
    ]
)
#: Characters of a message that are shown.
_LONGEST = 2000
_LINE = {ord("\n"): "\n", ord("\t"): "\t"}


class _Table(dict[int, str]):
    """What ``str.translate`` asks for: a steering character as an escape, any other as it is."""

    def __missing__(self, code: int) -> str:
        shown = chr(code)
        if code in _STEERING or 0xD800 <= code < 0xE000:
            shown = f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
        self[code] = shown
        return shown


_NAME, _TEXT = _Table(), _Table(_LINE)


def printable(name: str) -> str:
    """One name as it is shown in a line: control characters, ends of lines among them, as escapes."""
    return name.translate(_NAME)


def typed(argument: str) -> str:
    """A name as the user typed it, in UTF-8, where the locale's encoding is another (LC_ALL=C)."""
    try:
        return argument.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeDecodeError:
        return argument


def one_of(words: Iterable[str]) -> str:
    """How help shows an option that takes one of some words."""
    return "{" + ",".join(words) + "}"


def many(group: argparse._ActionsContainer, flag: str, metavar: str, text: str) -> None:
    """An option that takes several words, and may come several times."""
    group.add_argument(flag, nargs="+", action="extend", metavar=metavar, help=text)


def number(text: str) -> float | int | str:
    """A number as the user typed it; what is none as it stands, for the message that refuses it."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


class _Stream:
    """A text stream that shows what steers a terminal, and what its encoding lacks, as escapes."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        # A progress bar begins its line anew; a name never stands at the beginning of what is written.
        start = "\r" if text.startswith("\r") else ""
        shown = start + text[len(start) :].translate(_TEXT)
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        self.stream.write(shown.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def safe_streams() -> Iterator[None]:
    """Print through streams that cannot steer the terminal.

    One that was closed before the command began (``>&-``) takes everything and shows nothing. It has a descriptor all
    the while, so that no file of the command's is opened under the number at which libraries print.
    """
    out, err = sys.stdout, sys.stderr
    with ExitStack() as stack:
        streams = [stream or stack.enter_context(open(os.devnull, "w")) for stream in (out, err)]
        sys.stdout, sys.stderr = map(_Stream, streams)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = out, err


def complain(message: object) -> None:
    """One line on standard error; of a very long one (a name may have a million characters) both ends."""
    line = " ".join(str(message).splitlines())
    if len(line) > _LONGEST:
        line = f"{line[: _LONGEST // 2]} … {line[-_LONGEST // 2 :]}"
    print(f"amp-transpile: {line}", file=sys.stderr)


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Each warning of this package is one plain line on standard error, without a line of source; told once."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def line(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, AmpWarning):
                complain(f"warning: {message}")
            else:
                show(message, category, *where, **more)

        warnings.showwarning = line
        yield
