"""Places with other traits than they have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from amp_transpiler.lists import _places


def change_place(monkeypatch: pytest.MonkeyPatch, kind: str, **traits: Any) -> None:
    """Let a place of this kind have other traits while the test runs."""
    table = dict(_places._table())
    table[kind] = replace(table[kind], **traits)
    monkeypatch.setattr(_places, "_table", lambda: table)
