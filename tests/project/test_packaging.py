"""The wheel holds every package of the checkout under its name."""

import ast
import importlib.metadata
import os
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from tests.helpers.where import ROOT


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
    for name, folder in setuptools["package-dir"].items():
        assert (ROOT / folder / "__init__.py").is_file()
        found = found - {folder.replace("/", ".")} | {name}
    assert found == set(setuptools["packages"]), "add the package to [tool.setuptools] packages in pyproject.toml"


def test_this_run_uses_the_checkout():
    import amp_transpiler
    import amp_transpiler.lists

    assert Path(amp_transpiler.__file__).parent == ROOT / "amp_transpiler"
    assert Path(amp_transpiler.lists.__file__).parent == ROOT / "lists"


SCRIPT = """
import amp_transpiler as amp, amp_transpiler.ops, amp_transpiler.lists
assert len(amp.AutoMixedPrecisionLists().white_list) > 3
for module in (amp, amp_transpiler.ops, amp_transpiler.lists):
    print(module.__file__)
"""
#: What only some programs need is not loaded, and is there nevertheless.
SPARED = """
import sys, amp_transpiler as amp
rooms = ("conversion", "export", "finetune", "monitor", "distributed", "mixed_precision", "static", "runtime.checkpoint")
assert [name for name in sys.modules if name.startswith(tuple(f"amp_transpiler.{room}" for room in rooms))] == []
assert {"onnx.reference", "scipy.optimize"}.isdisjoint(sys.modules)
assert {*amp.__all__, *rooms[:-1]} <= set(dir(amp))
assert str(amp.Pipeline("fold-constants,fuse-gelus,widen")) == "fold-constants,fuse-gelus,widen"
assert all(getattr(amp, name) is getattr(amp, name) for name in (*amp.__all__, *rooms[:-1]))
assert amp.monitor.Watch is amp.Watch and vars(amp)["convert"] is amp.conversion.converting.convert
"""


def imported_from(folder: Path, script: str = SCRIPT) -> list[Path]:
    """Where a fresh interpreter, standing in ``folder``, finds the package and its two outer subpackages."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [Path(line) for line in done.stdout.split()]


def installed() -> bool:
    try:
        return importlib.metadata.distribution("amp-transpiler") is not None
    except importlib.metadata.PackageNotFoundError:
        return False


def test_a_damaged_onnxruntime_is_named(tmp_path):
    """What is left where onnxruntime and onnxruntime-gpu were both installed and one was removed: a bare module."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    shadow = (
        "import sys, types; m = sys.modules['onnxruntime'] = types.ModuleType('onnxruntime'); import amp_transpiler"
    )
    done = subprocess.run([sys.executable, "-c", shadow], cwd=tmp_path, env=environment, capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert (
        done.returncode == 1
        and "MissingPackageError" in last
        and "pip uninstall -y onnxruntime onnxruntime-gpu" in last
    )


@pytest.mark.skipif(not installed(), reason="the package is not installed in this environment (make test installs it)")
def test_the_installed_package_stands_alone(tmp_path):
    files = imported_from(tmp_path)
    assert not any(file.is_relative_to(ROOT / part) for file in files for part in ("amp_transpiler", "ops", "lists"))


@pytest.mark.parametrize(("stop", "status", "word"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")])
def test_ctrl_c_while_the_command_is_imported_is_quiet(tmp_path, stop, status, word):
    """An onnxruntime whose import is interrupted, and the script that pip makes of the entry point."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    module, function = scripts["amp-transpile"].split(":")
    (tmp_path / "onnxruntime.py").write_text(
        f"import os, signal\ntry: os.kill(os.getpid(), signal.{stop})\n"
        "except KeyboardInterrupt: raise ImportError('initialization failed')"  # as C modules have it
    )
    (tmp_path / module).symlink_to(ROOT / "amp_transpiler" / "command")  # as a wheel lays it out
    script = f"import sys; from {module} import {function}; sys.exit({function}())"
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", script, "info", "m.onnx"], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (status, f"amp-transpile: {word}; nothing was written\n")


def test_a_checkout_is_complete_beside_an_installed_package():
    """Standing in the clone, every part comes from the clone, whether a wheel is installed or not."""
    files = imported_from(ROOT, SPARED + SCRIPT)
    assert [file.parent for file in files] == [ROOT / "amp_transpiler", ROOT / "ops", ROOT / "lists"]


def test_type_checkers_see_each_name_that_is_loaded_later():
    import amp_transpiler as amp

    tree = ast.parse(Path(str(amp.__file__)).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    seen = {each.module: {a.name for a in each.names} for each in block.body if isinstance(each, ast.ImportFrom)}
    later = {f"amp_transpiler.{module}".rstrip("."): set(names) for module, names in amp._LATER.items()}
    assert seen == later


def test_no_two_modules_of_the_package_have_the_same_name() -> None:
    """A name in a traceback, an editor's tab or a search leads to one file."""
    seen = Counter(path.name for room in ("amp_transpiler", "ops", "lists") for path in (ROOT / room).rglob("*.py"))
    assert {name for name, count in seen.items() if count > 1} <= {"__init__.py"}
