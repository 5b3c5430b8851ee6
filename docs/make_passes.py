"""Write the tables of ``docs/passes.md`` from the passes: ``python docs/make_passes.py``.

``--check`` only says whether they are current. What stands between ``<!-- made: ROOM -->`` and ``<!-- end -->`` is
made: the passes of a room, or under ``pipelines`` what the calls of the package run.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from amp_transpiler.cli.pass_tables import HEAD, cells, pipelines
from amp_transpiler.passes.pipeline import PASSES

PAGE = Path(__file__).resolve().parent / "passes.md"
_MADE = re.compile(r"(<!-- made: (\w+) -->\n).*?(<!-- end -->)", re.S)


def room(each: type) -> str:
    """The room that a pass lies in: one of ``passes/``, or of the package."""
    return each.__module__.removeprefix("amp_transpiler.").removeprefix("passes.").split(".")[0]


def table(what: str) -> str:
    """The passes of a room by name, or the pipelines."""
    if what == "pipelines":
        rows = [("call", "passes"), *((f"`{call}`", f"`{passes}`") for call, passes in pipelines().items())]
    else:
        found = [cells(each) for name, each in sorted(PASSES.items()) if room(each) == what]
        rows = [HEAD, *((f"`{name}`", *rest) for name, *rest in found)]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]) + "\n"


def page(text: str) -> str:
    """The page with its tables as they are now."""
    return _MADE.sub(lambda found: found[1] + table(found[2]) + found[3], text)


def rooms(text: str) -> set[str]:
    """The rooms whose passes the page has."""
    return {found[2] for found in _MADE.finditer(text)} - {"pipelines"}


if __name__ == "__main__":
    before = PAGE.read_text(encoding="utf-8")
    after = page(before)
    if "--check" in sys.argv[1:]:
        sys.exit(0 if after == before else "docs/passes.md is not current: run python docs/make_passes.py")
    PAGE.write_text(after, encoding="utf-8")
