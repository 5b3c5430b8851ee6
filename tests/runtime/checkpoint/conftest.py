"""A net that has been trained for two steps."""

from __future__ import annotations

import pytest

import amp_transpiler as amp
from tests.helpers.checkpoints import Small, build


@pytest.fixture(scope="module")
def net() -> Small:
    return build()


@pytest.fixture
def scope(net: Small) -> amp.Scope:
    scope = net.start()
    net.train(scope, 0, 2)
    return scope
