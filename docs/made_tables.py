"""What a script writes into a page: tables between ``<!-- made: NAME -->`` and ``<!-- end -->``."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

_MADE = re.compile(r"(<!-- made: (\w+) -->\n).*?(<!-- end -->)", re.S)


def names(text: str) -> set[str]:
    """The tables that a page has."""
    return {found[2] for found in _MADE.finditer(text)}


def page(text: str, rows: Callable[[str], Iterable[Sequence[str]]]) -> str:
    """The page with its tables as they are now; ``rows`` gives those of a table by name, the first its head."""
    return _MADE.sub(lambda found: found[1] + _table(rows(found[2])) + found[3], text)


def _table(rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |\n" for row in rows]
    return "".join([lines[0], "|" + "---|" * (lines[0].count("|") - 1) + "\n", *lines[1:]])


def main(path: Path, rows: Callable[[str], Iterable[Sequence[str]]]) -> None:
    """Write the tables of a page, or with ``--check`` only say whether they are current."""
    before = path.read_text(encoding="utf-8")
    after = page(before, rows)
    if "--check" in sys.argv[1:]:
        sys.exit(0 if after == before else f"docs/{path.name} is not current: run python docs/make_{path.stem}.py")
    path.write_text(after, encoding="utf-8")
