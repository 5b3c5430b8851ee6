"""The kernel table against the registry of the installed onnxruntime, whichever admitted version that is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

from amp_transpiler.lists._data import read_text
from tests.helpers.kernel_registry import DOMAINS, Registry, installed_version, numbered
from tests.helpers.made_once import made_once
from tests.helpers.placement import needs_placement_tool
from tests.record import wheel_kernels

TABLE = json.loads(read_text("kernels.json"))
CPU, CUDA = wheel_kernels.PROVIDERS
#: The build with CUDA tells neither without its libraries.
pytestmark = needs_placement_tool if wheel_kernels.needs_stubs() else []
PLACES = [CPU, CUDA] if wheel_kernels.needs_stubs() else [CPU]


def _ask(folder: Path) -> None:
    (folder / "registries.json").write_text(json.dumps(wheel_kernels.registries(folder)))


@cache
def _installed(provider: str) -> Registry:
    found: Registry = json.loads((made_once("wheel_kernels", _ask) / "registries.json").read_text())[provider]
    return found


def _served(registrations: Mapping[str, Mapping[str, list[str]]], version: int) -> dict[str, set[str]] | None:
    """Element types by type parameter, for operators of a version; None without a kernel for it.

    An open end serves its first version alone, and a parameter that is absent holds every type.
    """
    found: dict[str, set[str]] | None = None
    for versions, params in registrations.items():
        first, _, last = versions.rstrip("+").partition("-")
        if int(first) <= version <= int(last or first):
            found = {} if found is None else found
            for param, types in params.items():
                found.setdefault(param, set()).update(types)
    return found


@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("provider", PLACES)
def test_every_kernel_of_the_table_is_installed(provider: str, domain: str) -> None:
    here, lacking = _installed(provider)[domain], []
    for op_type, registrations in TABLE["kernels"][provider][domain].items():
        spelled = {v: {p: TABLE["type_sets"][n] for p, n in params.items()} for v, params in registrations.items()}
        for version in range(1, 31):
            promised, found = _served(spelled, version), _served(here.get(op_type, {}), version)
            if promised is None:
                continue
            if found is None or not all(types <= found.get(param, types) for param, types in promised.items()):
                lacking.append((op_type, version, promised, found))
    assert lacking == []


@pytest.mark.parametrize("provider", PLACES)
def test_the_table_is_the_registry_of_the_version_that_it_names(provider: str) -> None:
    if TABLE["source"][provider] != installed_version():
        pytest.skip(f"{TABLE['source'][provider]} is recorded, {installed_version()} installed")
    assert numbered(_installed(provider), list(TABLE["type_sets"])) == TABLE["kernels"][provider]
