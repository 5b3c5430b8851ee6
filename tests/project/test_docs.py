"""The documentation: the API reference is whole and current, and every link leads somewhere."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
import textwrap
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import amp_transpiler as amp
from amp_transpiler.cli.main import COMMANDS, main as command
from amp_transpiler.ir import opdef
from amp_transpiler.passes import pipeline
from tests.helpers.where import ROOT

DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sys.path.append(str(DOCS))  # as for a script there
api = load(DOCS / "make_api.py")
tables = load(DOCS / "made_tables.py")
passes = load(DOCS / "make_passes.py")
places = load(DOCS / "make_places.py")


def test_every_public_name_has_a_docstring() -> None:
    bare = [f"{module}.{name}" for module, name, _, text in api.entries() if not text.strip()]
    assert not bare, f"write docstrings for {bare}"


def test_every_public_module_with_names_of_its_own_is_in_the_reference() -> None:
    missing, pending = [], dict(api.MODULES)
    while pending:
        short, full = pending.popitem()
        if short == "amp.ops":
            continue  # importing it fills the table of operators; nobody calls what is in it
        module = importlib.import_module(full)
        names = api.public(module)
        inner = {name: found.__name__ for name in names if isinstance(found := getattr(module, name), ModuleType)}
        if short not in api.MODULES and len(inner) < len(names):
            missing.append(short)
        pending |= {f"{short}.{name}": path for name, path in inner.items() if f"{short}.{name}" not in api.MODULES}
    assert not missing, f"add to MODULES of docs/make_api.py: {missing}"


def surface(page: str) -> set[str]:
    """``amp.nn.fc: fc(x, size, …)``: every public name of the reference, with its arguments where it says them."""
    found = set()
    for module, section in re.findall(r"^## (amp\S*)\n(.*?)(?=^## amp|\Z)", page, re.S | re.M):
        for name, called in re.findall(r"^####? ([\w.]+)\n\n(?:```text\n(.*?)\n\n)?", section, re.M):
            found.add(f"{module}.{name}: {called}")
    return found


def test_public_names_and_arguments_are_those_of_the_reference() -> None:
    """A name that comes, goes or takes other arguments is a change that users see, and shows in the page's diff."""
    recorded, there = surface((DOCS / "api.md").read_text(encoding="utf-8")), surface(api.page())
    told = "run python docs/make_api.py, and write a line in CHANGELOG.md"
    assert not there - recorded, f"{told}: not in docs/api.md: {sorted(there - recorded)}"
    assert not recorded - there, f"{told}: gone, but in docs/api.md: {sorted(recorded - there)}"
    names = {f"{module}.{name}" for module, name, _, _ in api.entries()}
    assert {line.partition(":")[0] for line in there} == names, "the page leaves out what the script lists"
    assert len(names) > 400, "the script has lost most of the package"


def test_the_tables_of_passes_are_current_and_leave_none_out() -> None:
    recorded = (DOCS / "passes.md").read_text(encoding="utf-8")
    assert tables.page(recorded, passes.rows) == recorded, "run python docs/make_passes.py"
    assert {passes.room(each) for each in passes.PASSES.values()} | {"pipelines"} == tables.names(recorded)
    assert all(f"| `{name}` |" in recorded for name in passes.PASSES)


def test_the_script_alone_knows_every_pass() -> None:
    done = subprocess.run(
        [sys.executable, DOCS / "make_passes.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_tables_of_places_are_current() -> None:
    recorded = (DOCS / "places.md").read_text(encoding="utf-8")
    assert tables.page(recorded, places.rows) == recorded, "run python docs/make_places.py"
    assert tables.names(recorded) == places.TABLES.keys()


@pytest.mark.parametrize("name", [name for name in api.MODULES if name != "amp"])
def test_public_modules_have_their_names(name: str) -> None:
    found = attrgetter(name.removeprefix("amp."))(amp)
    assert found is importlib.import_module(api.MODULES[name])


def test_a_name_without_a_docstring_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType("amp_transpiler.fake")
    fake.__doc__, fake.__all__ = "A module.", ["bare"]  # type: ignore[attr-defined]
    fake.bare = lambda x, y=1: x  # type: ignore[attr-defined]
    monkeypatch.setitem(api.MODULES, "amp.fake", "amp_transpiler.fake")
    monkeypatch.setitem(__import__("sys").modules, "amp_transpiler.fake", fake)
    assert [(n, s, t) for m, n, s, t in api.entries() if m == "amp.fake"] == [("bare", "(x, y=1)", "")]


def anchor(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(
        r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    ):
        if target.startswith("http"):
            continue
        file, _, part = target.partition("#")
        found = page.parent / file if file else page
        assert found.exists(), f"{page.name}: {target}"
        if part:
            headings = re.findall(r"^#+ (.+)$", found.read_text(encoding="utf-8"), re.M)
            assert part in map(anchor, headings), f"{page.name}: {target}"


def paths(text: str) -> set[str]:
    """Paths of the repository that a page names in backticks."""
    found = re.findall(r"`((?:amp_transpiler|ops|lists|tests|docs|demo)/[\w/.]*)`", text)
    return {path.rstrip("/") for path in found}


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in ("api.md", "CHANGELOG.md")], ids=lambda page: page.name
)
def test_named_files_are_there(page: Path) -> None:
    named = paths(page.read_text(encoding="utf-8"))
    assert not [path for path in named if not (ROOT / path).exists()]


#: Pages whose Python runs from top to bottom; the README has tests of its own.
RUN = [page for page in PAGES if page.parent == DOCS and "```python\n" in page.read_text(encoding="utf-8")]


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page are one program; ``assert`` in them is meant."""
    monkeypatch.chdir(tmp_path)
    for module, table in ((opdef, "_TABLE"), (opdef, "_READS"), (pipeline, "PASSES")):  # what pages add goes with them
        monkeypatch.setattr(module, table, dict(getattr(module, table)))
    names: dict[str, Any] = {}
    with amp.scope_guard(amp.Scope()), amp.unique_name.guard():
        for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S):
            exec(block, names)


def test_the_recipe_for_an_operator_is_what_stands_in_its_file() -> None:
    section = (DOCS / "operators.md").read_text(encoding="utf-8").split("## The recipe, tried")[1].split("\n## ")[0]
    shown = [textwrap.dedent(block).strip() for block in re.findall(r"```text\n(.*?)```", section, re.S)]
    source = (ROOT / "ops" / "pool.py").read_text(encoding="utf-8")
    rules = [block for block in shown if "def " in block]
    assert len(rules) == 2 and not [rule for rule in rules if rule not in source]


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "api.md"], ids=lambda page: page.name)
def test_named_attributes_are_there(page: Path) -> None:
    """What a page calls ``amp.…`` is there; where it is not offered, the page says what to use."""
    text = page.read_text(encoding="utf-8")
    missing = []
    for name in sorted(set(re.findall(r"(?<![\w.])amp((?:\.[A-Za-z_]\w*)+)", text))):
        found: Any = amp
        for part in name[1:].split("."):
            found = getattr(found, part, None)
        if found is None and name != ".GradScaler":
            missing.append(f"amp{name}")
    assert not missing


#: Options in the pages that belong to other programs: the demos and runners, npm.
OTHERS = {"--vocab", "--ignore-scripts", "--web", "--provider"}


def test_named_options_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    told = ""
    for name in COMMANDS:
        with pytest.raises(SystemExit):
            command([name, "--help"])
        told += capsys.readouterr().out
    known = set(re.findall(r"--[a-z][a-z-]+", told))
    for page in PAGES:
        if page.name not in ("api.md", "CONTRIBUTING.md"):
            named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page.read_text(encoding="utf-8")))
            assert named <= known | OTHERS, page.name
