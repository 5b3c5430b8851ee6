"""Write the tables of ``docs/passes.md`` from the passes: ``python docs/make_passes.py``.

``--check`` only says whether they are current. What stands between ``<!-- made: ROOM -->`` and ``<!-- end -->`` is
made: the passes of a room, or under ``pipelines`` what the calls of the package run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from made_tables import main

from amp_transpiler.cli.pass_tables import HEAD, cells
from amp_transpiler.conversion.known_passes import pipelines
from amp_transpiler.passes.pipeline import PASSES

PAGE = Path(__file__).resolve().parent / "passes.md"


def room(each: type) -> str:
    """The room that a pass lies in: one of ``passes/``, or of the package."""
    return each.__module__.removeprefix("amp_transpiler.").removeprefix("passes.").split(".")[0]


def rows(what: str) -> Iterator[tuple[str, ...]]:
    """The passes of a room by name, or the pipelines."""
    if what == "pipelines":
        yield "call", "passes"
        yield from ((f"`{call}`", f"`{passes}`") for call, passes in pipelines().items())
    else:
        yield HEAD
        found = (cells(each) for name, each in sorted(PASSES.items()) if room(each) == what)
        yield from ((f"`{name}`", *rest) for name, *rest in found)


if __name__ == "__main__":
    main(PAGE, rows)
