"""Options and fixtures of all tests."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path

import pytest

from amp_transpiler.runtime import CPUPlace, Executor, Scope
from tests.helpers.made_once import keep_in
from tests.helpers.on_places import PLACES, choose
from tests.helpers.webgpu_sessions import REQUIRED, built_in, devices, real_card


def pytest_configure(config: pytest.Config) -> None:
    """Shells start background jobs with Ctrl-C ignored; the tests of Ctrl-C need Python's own handler."""
    if config.getoption("--place"):
        choose(config.getoption("--place"))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A search of the whole heap goes through ten thousand collected tests: a tenth as often, a twentieth less in all.
    gc.set_threshold(*gc.get_threshold()[:2], 100)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exports", metavar="FOLDER", help="exported models: NAME.onnx beside NAME.npz")
    parser.addoption("--torch-python", metavar="PYTHON", help="interpreter of another environment that has torch")
    parser.addoption(
        "--place", metavar="KIND", help="compute what proves rules (gradcheck, forwardcheck) on this place"
    )
    parser.addoption("--examples", type=int, default=150, metavar="N", help="random models to convert (default: 150)")
    parser.addoption(
        "--every-chain",
        action="store_true",
        help="chains of train and convert from both exporters in "
        "every combination of modes (default: from one in each)",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked webgpu are skipped where onnxruntime has no such provider; a device is make test-webgpu's matter."""
    marked = [item for item in items if item.get_closest_marker("webgpu")]
    if marked and not (built_in() or devices()):
        if REQUIRED in os.environ:
            raise pytest.UsageError("these tests are to run on WebGPU, and onnxruntime lists no device of it")
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="onnxruntime has no WebGPU here: make test-webgpu"))


NO_EXPORTS = "no exported models: python -m tests.tools.export_models FOLDER, then pytest --exports FOLDER"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with an argument ``export`` runs on the path of each exported model."""
    if "export" in metafunc.fixturenames:
        folder = metafunc.config.getoption("--exports")
        none = pytest.param(None, marks=pytest.mark.skip(reason=NO_EXPORTS), id="none")
        paths = [pytest.param(path, id=path.stem) for path in sorted(Path(folder).glob("*.onnx"))] if folder else [none]
        assert paths, f"{folder} has no exported model"
        metafunc.parametrize("export", paths)


@pytest.fixture(scope="session", autouse=True)
def _shared_by_the_processes_of_a_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    own = tmp_path_factory.getbasetemp()
    keep_in(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own)


@pytest.fixture
def exports(pytestconfig: pytest.Config) -> Path:
    """The folder of exported models."""
    folder = pytestconfig.getoption("--exports")
    if folder is None:
        pytest.skip(NO_EXPORTS)
    return Path(folder)


@pytest.fixture
def torch_python(pytestconfig: pytest.Config) -> str:
    """The interpreter of another environment, which has torch."""
    python = pytestconfig.getoption("--torch-python")
    if python is None:
        pytest.skip("no interpreter with torch: pytest --torch-python PYTHON")
    return str(python)


@pytest.fixture(params=PLACES)
def exe(request: pytest.FixtureRequest) -> Executor:
    return Executor(request.param, threads=1)


@pytest.fixture
def software_vulkan() -> None:
    """For what is recorded of software Vulkan; a graphics card may round otherwise."""
    if real_card():
        pytest.skip("recorded on software Vulkan; here is a graphics card")


@pytest.fixture
def cpu() -> Executor:
    """For what CUDA has no kernel for, or does not report: strings, shape arithmetic, an index out of range."""
    return Executor(CPUPlace(), threads=1)


@pytest.fixture
def scope() -> Scope:
    return Scope()
