#!/usr/bin/env python3
"""The structure of the package, measured: rooms, arrows between them, circles, sizes of modules, import time.

    python -m tests.tools.structure [CHECKOUT] [--order FILE] [--arrows]

A room is a folder or a module at the top of the package. The order of the rooms is that of the table "Rooms" in
docs/design.md (or in FILE); an arrow is a room that imports another one, and runs up where that one comes later. Imports
inside functions count, for they hide circles; what is imported for type checkers alone is counted apart. Exit status 1
where anything is as it should not be: a circle, an arrow that runs up, a room without a place, a module that is too long.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import networkx as nx

PACKAGE = "amp_transpiler"
#: Subpackages that lie at the top of a checkout.
OUTSIDE = ("lists", "ops")
LONGEST = 400
_TIMED = "import time; start = time.perf_counter(); import amp_transpiler; print(time.perf_counter() - start)"


@dataclass(frozen=True)
class Import:
    """One module imports another: inside a function (``local``), by dots (``relative``), for ``types`` alone."""

    importer: str
    imported: str
    local: bool
    relative: bool
    types: bool


def modules_of(checkout: Path) -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found: dict[str, Path] = {}
    for folder, name in ((PACKAGE, PACKAGE), *((each, f"{PACKAGE}.{each}") for each in OUTSIDE)):
        for path in sorted((checkout / folder).rglob("*.py")):
            parts = path.relative_to(checkout / folder).with_suffix("").parts
            found[".".join([name, *parts]).removesuffix(".__init__")] = path
    return found


def imports_of(modules: dict[str, Path]) -> list[Import]:
    """What modules of the package import from one another; ``from package import module`` is an import of the module."""
    found: list[Import] = []
    for module, path in modules.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for node, local, types in _statements(ast.parse(path.read_text(encoding="utf-8")), False, False):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                up = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                base = ".".join([*up, *([node.module] if node.module else [])])
                whole = [f"{base}.{alias.name}" for alias in node.names]
                names = [name if name in modules else base for name in whole]
            relative = isinstance(node, ast.ImportFrom) and node.level > 0
            found += [Import(module, name, local, relative, types) for name in names if name in modules]
    return found


def _statements(tree: ast.AST, local: bool, types: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool, bool]]:
    """Every import, whether it stands in a function, and whether type checkers alone see it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node, local, types
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for part in node.body:
                yield from _statements(ast.Module([part], []), local, True)
        else:
            yield from _statements(node, local or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)), types)


def order_in(text: str) -> list[str]:
    """The rooms in the first column of the table that follows the heading "Rooms", from below to above."""
    table = re.search(r"^## Rooms\n\n(?:\|.*\n)+", text, re.MULTILINE)
    rows = table[0].splitlines()[4:] if table else []
    paths = [path for row in rows for path in re.findall(r"`([^`]+)`", row.split("|")[1])]
    return [path.rstrip("/").removeprefix(f"{PACKAGE}/").removesuffix(".py") for path in paths]


def room_of(module: str) -> str:
    """The room of a module; the package's own names are a room too."""
    return (module.split(".") + ["__init__"])[1]


def circles(pairs: set[tuple[str, str]]) -> list[list[str]]:
    """Groups of modules (or rooms) each of which imports all of the others, by way of one another."""
    return sorted(sorted(group) for group in nx.strongly_connected_components(nx.DiGraph(pairs)) if len(group) > 1)


class Structure:
    """What is measured of one checkout. ``order`` names the rooms from below to above."""

    def __init__(self, checkout: Path, order: list[str]) -> None:
        modules = modules_of(checkout)
        self.imports = imports_of(modules)
        self.lines = {module: path.read_text(encoding="utf-8").count("\n") for module, path in modules.items()}
        self.rooms = sorted({room_of(module) for module in modules})
        self.unplaced = [room for room in self.rooms if room not in order]
        loaded = [each for each in self.imports if not each.types]
        self.circles = circles({(each.importer, each.imported) for each in loaded})
        self.type_circles = circles({(each.importer, each.imported) for each in self.imports})
        self.arrows = {
            (room_of(each.importer), room_of(each.imported))
            for each in self.imports
            if room_of(each.importer) != room_of(each.imported)
        }
        self.upward = sorted(
            (below, above)
            for below, above in self.arrows
            if {below, above} <= set(order) and order.index(below) < order.index(above)
        )
        self.long = {module: lines for module, lines in self.lines.items() if lines > LONGEST}

    def faults(self) -> list[str]:
        """What is not as it should be."""
        return [
            *(f"room '{room}' has no place in the order" for room in self.unplaced),
            *(f"circle: {', '.join(group)}" for group in self.circles),
            *(f"arrow up: {self._example(*arrow)}" for arrow in self.upward),
            *(f"{module} has {lines} lines, more than {LONGEST}" for module, lines in self.long.items()),
        ]

    def _example(self, below: str, above: str) -> str:
        each = next(e for e in self.imports if (room_of(e.importer), room_of(e.imported)) == (below, above))
        return f"{each.importer} imports {each.imported}"

    def table(self) -> list[tuple[str, object]]:
        """Names and figures."""
        largest = max(self.lines, key=lambda module: self.lines[module])
        return [
            ("modules", len(self.lines)),
            ("lines", sum(self.lines.values())),
            ("median module, lines", int(statistics.median(self.lines.values()))),
            ("largest module, lines", f"{self.lines[largest]} ({largest})"),
            (f"modules of more than {LONGEST} lines", len(self.long)),
            ("rooms", len(self.rooms)),
            ("arrows between rooms", len(self.arrows)),
            ("arrows that run up", len(self.upward)),
            ("circles of modules", _sizes(self.circles)),
            ("circles, imports for types included", _sizes(self.type_circles)),
            ("imports inside functions", sum(each.local for each in self.imports)),
            ("relative imports", sum(each.relative for each in self.imports)),
        ]


def _sizes(groups: list[list[str]]) -> str:
    return f"{len(groups)}, of {' and '.join(str(len(group)) for group in groups)} modules" if groups else "0"


def import_seconds(checkout: Path, runs: int = 7) -> float:
    """Seconds that ``import amp_transpiler`` takes, the median of fresh processes."""
    environment = {**os.environ, "PYTHONPATH": str(checkout.resolve())}
    command = [sys.executable, "-c", _TIMED]
    taken = [subprocess.run(command, env=environment, capture_output=True, text=True, check=True) for _ in range(runs)]
    return statistics.median(float(done.stdout) for done in taken)


def main() -> int:
    """Measure, print, and say whether anything is at fault."""
    here = Path(__file__).resolve().parents[2]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", nargs="?", type=Path, default=here)
    parser.add_argument("--order", type=Path, help="a text with the table of rooms (default: CHECKOUT/docs/design.md)")
    parser.add_argument("--arrows", action="store_true", help="print what each room imports")
    arguments = parser.parse_args()
    order = arguments.order or arguments.checkout / "docs" / "design.md"
    found = Structure(arguments.checkout, order_in(order.read_text(encoding="utf-8")))
    for name, figure in [*found.table(), ("import, ms", round(1000 * import_seconds(arguments.checkout)))]:
        print(f"{name:<38}{figure}")
    for room in found.rooms if arguments.arrows else ():
        print(f"{room} -> {', '.join(sorted(above for below, above in found.arrows if below == room)) or 'nothing'}")
    print("\n".join(found.faults()))
    return 1 if found.faults() else 0


if __name__ == "__main__":
    sys.exit(main())
