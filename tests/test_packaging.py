"""The wheel holds every package of the checkout under its name."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_pyproject_lists_every_package():
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    found = set()
    for folder, name in (
        ("amp_transpiler", "amp_transpiler"),
        ("lists", "amp_transpiler.lists"),
        ("ops", "amp_transpiler.ops"),
    ):
        for init in (ROOT / folder).rglob("__init__.py"):
            found.add(".".join([name, *init.parent.relative_to(ROOT / folder).parts]))
    assert found == set(setuptools["packages"]), "add the package to [tool.setuptools] packages in pyproject.toml"


def test_this_run_uses_the_checkout():
    import amp_transpiler
    import amp_transpiler.lists

    assert Path(amp_transpiler.__file__).parent == ROOT / "amp_transpiler"
    assert Path(amp_transpiler.lists.__file__).parent == ROOT / "lists"
