"""Rooms import in one direction, without circles; no module is too long; nothing is attached where it is not defined."""

import re
from pathlib import Path
from types import FunctionType

import pytest

import amp_transpiler as amp
from tests.helpers.where import ROOT
from tests.tools.structure import Structure, order_in

ORDER = order_in((ROOT / "docs" / "design.md").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def measured() -> Structure:
    return Structure(ROOT, ORDER)


def test_the_checkout_has_no_fault(measured: Structure) -> None:
    assert measured.faults() == []


def test_types_alone_are_imported_where_the_data_type_is_recursive(measured: Structure) -> None:
    """A graph holds operators, and these attributes, which hold graphs; what is done with a variable gives another.
    Nothing else needs such an import.

    The package itself shows type checkers what it loads when it is asked for.
    """
    seen = [each for each in measured.imports if each.types and each.importer != "amp_transpiler"]
    found = {(each.importer, each.imported) for each in seen}
    assert found == {
        ("amp_transpiler.ir.nodes", "amp_transpiler.ir.graph"),
        ("amp_transpiler.ir.attributes", "amp_transpiler.ir.graph"),
        ("amp_transpiler.ir.variable_operators", "amp_transpiler.ir.nodes"),
    }


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        (
            {
                "ops/one.py": "from amp_transpiler.ops import two\n",
                "ops/two.py": "def f():\n    import amp_transpiler.ops.one\n",
            },
            "circle: amp_transpiler.ops.one, amp_transpiler.ops.two",
        ),
        (
            {"lists/one.py": "from ..ops.two import x\n", "ops/two.py": "x = 1\n"},
            "arrow up: amp_transpiler.lists.one imports amp_transpiler.ops.two",
        ),
        (
            {"lists/one.py": "if TYPE_CHECKING:\n    from amp_transpiler.ops.two import x\n", "ops/two.py": "x = 1\n"},
            "arrow up: amp_transpiler.lists.one imports amp_transpiler.ops.two",
        ),
        ({"ops/one.py": "\n" * 401}, "amp_transpiler.ops.one has 401 lines, more than 400"),
        ({"amp_transpiler/cellar.py": ""}, "room 'cellar' has no place in the order"),
    ],
    ids=["circle", "up", "up for types", "long", "unplaced"],
)
def test_each_fault_is_found(tmp_path: Path, files: dict[str, str], fault: str) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert Structure(tmp_path, ORDER).faults() == [fault]


@pytest.mark.parametrize("cls", [amp.Program, amp.Variable])
def test_type_checkers_see_what_every_method_gives(cls: type) -> None:
    """Nothing is attached from outside, where they do not look, and nothing they see is untyped."""
    own = [base for base in cls.__mro__ if base is not object]
    methods = {name: value for base in own[::-1] for name, value in vars(base).items() if name != "__getattr__"}
    called = {n: v.fget if isinstance(v, property) else getattr(v, "__func__", v) for n, v in methods.items()}
    functions = {name: value for name, value in called.items() if isinstance(value, FunctionType)}
    assert {"lower", "memory_estimate"} <= set(functions) or {"__matmul__", "__getitem__", "astype"} <= set(functions)
    for name, function in functions.items():
        assert function.__module__ in {base.__module__ for base in own}, f"{name} is attached from outside"
        assert function.__annotations__.get("return", "Any") != "Any", f"{name} gives what no type checker knows"


def test_rules_and_passes_ask_places_for_what_they_need() -> None:
    """And not for their names: what tells places apart stands in ``lists/places.toml``, where a new place is added."""
    named = re.compile(r"""(==|!=|\bin|\bis) *\(?["'](cpu|cuda|webgpu)["']""")
    sources = [path for room in ("ops", "amp_transpiler/passes") for path in sorted((ROOT / room).rglob("*.py"))]
    assert len(sources) > 200
    assert not [path.name for path in sources if named.search(path.read_text(encoding="utf-8"))]
