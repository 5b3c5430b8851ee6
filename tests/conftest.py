"""Fixtures of the runtime's tests."""

from __future__ import annotations

import signal

import pytest

from amp_transpiler.runtime import CPUPlace, CUDAPlace, Executor, Scope


def pytest_configure() -> None:
    """Shells start background jobs with Ctrl-C ignored; the tests of Ctrl-C need Python's own handler."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exports", metavar="FOLDER", help="exported models to convert: NAME.onnx beside NAME.npz")
    parser.addoption("--torch-python", metavar="PYTHON", help="interpreter of another environment that has torch")
    parser.addoption("--examples", type=int, default=200, metavar="N", help="random models to convert (default: 200)")
    parser.addoption(
        "--every-chain",
        action="store_true",
        help="chains of train and convert from both exporters in "
        "every combination of modes (default: from one in each)",
    )


@pytest.fixture(params=[CPUPlace(), pytest.param(CUDAPlace(0), marks=pytest.mark.gpu)], ids=repr)
def exe(request: pytest.FixtureRequest) -> Executor:
    return Executor(request.param, threads=1)


@pytest.fixture
def cpu() -> Executor:
    """For what CUDA has no kernel for, or does not report: strings, shape arithmetic, an index out of range."""
    return Executor(CPUPlace(), threads=1)


@pytest.fixture
def scope() -> Scope:
    return Scope()
