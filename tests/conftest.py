"""Fixtures of the runtime's tests."""

from __future__ import annotations

import pytest

from amp_transpiler.runtime import (
    CPUPlace,
    CUDAPlace,
    Executor,
    Scope,
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
