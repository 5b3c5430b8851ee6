"""Rooms import in one direction, without circles, and no module is too long."""

from pathlib import Path

import pytest

from tests.helpers.where import ROOT
from tests.tools.structure import Structure, order_in

ORDER = order_in((ROOT / "docs" / "design.md").read_text(encoding="utf-8"))


def test_the_checkout_has_no_circle_and_no_arrow_up() -> None:
    assert [fault for fault in Structure(ROOT, ORDER).faults() if "lines, more than" not in fault] == []


def test_types_alone_are_imported_where_the_data_type_is_recursive() -> None:
    """A graph holds operators, and these attributes, which hold graphs; nothing else needs such an import."""
    found = {(each.importer, each.imported) for each in Structure(ROOT, ORDER).imports if each.types}
    assert found == {
        ("amp_transpiler.ir.nodes", "amp_transpiler.ir.graph"),
        ("amp_transpiler.ir.attributes", "amp_transpiler.ir.graph"),
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
