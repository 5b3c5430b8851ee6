"""The places that tests go through. A test that takes a place takes every one; what computes on a device is marked for it.

``pytest --place KIND`` turns the checks of rules (gradcheck, forwardcheck), which lower for CUDA and compute on CPU, to that
place, where they compute: ``make test-webgpu`` does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.lists import place_kinds, place_traits
from amp_transpiler.passes.lowering.place import Place
from tests.helpers import cuda_sessions, sessions, webgpu_sessions
from tests.helpers.cuda_kernels import without_kernel

_CLASSES = {"cpu": amp.CPUPlace, "cuda": amp.CUDAPlace, "webgpu": amp.WebGPUPlace}
_MARKS = {"cpu": (), "cuda": (pytest.mark.gpu,), "webgpu": (pytest.mark.webgpu,)}

LOWERED = tuple(_CLASSES[kind]() for kind in place_kinds())
"""Every place, for tests that lower and need no device."""

PLACES = tuple(pytest.param(place, marks=_MARKS[place.kind], id=repr(place)) for place in LOWERED)
"""Every place, for tests that run a program there."""

IN_PLACE = tuple(param for param, place in zip(PLACES, LOWERED, strict=True) if place_traits(place.kind).in_place)
"""The places whose kernels may write what they read."""

DEVICES = tuple(kind for kind in place_kinds() if not place_traits(kind).emulates)
"""Kinds of places with 16-bit operators."""

_ON_HOST = {"webgpu": frozenset({"ReverseSequence", "Round", "Trilu"})}
"""Operators that have no kernel on a place and no body: the host computes them where a program allows that."""


def needs(place: Place, dtype: str) -> None:
    """Skip the test on a place that has no tensors of an element type."""
    if dtype not in place_traits(place.kind).dtypes:
        pytest.skip(f"{place!r} has no {dtype}")


_chosen: list[str] = []


def choose(kind: str) -> None:
    """Turn the checks of rules to a place."""
    if kind not in DEVICES:
        raise pytest.UsageError(f"--place takes one of {', '.join(DEVICES)}, not {kind!r}")
    _chosen[:] = [kind]


def chosen() -> str | None:
    """The place that --place names."""
    return _chosen[0] if _chosen else None


def checked(dtype: str) -> tuple[str, ...]:
    """The kinds of devices that a rule is checked for at an element type: CUDA, or what --place names."""
    kinds = (chosen() or "cuda",)
    return tuple(kind for kind in kinds if dtype in place_traits(kind).dtypes)


def check_kernels(kind: str, model: onnx.ModelProto, what: str) -> None:
    """Every node of a model has a kernel on a place, but for what is known to run on the host beside it."""
    missing = [
        each for each in without_kernel(model, place_traits(kind).provider) if each not in _ON_HOST.get(kind, ())
    ]
    assert not missing, f"{what}: no kernel on {kind} for {', '.join(missing)}"


def run_on(kind: str, model: onnx.ModelProto, feeds: dict[str, np.ndarray[Any, Any]]) -> list[Any]:
    """Every output of a model that was lowered for a place: computed there if --place names it, else on CPU."""
    if chosen() != kind:
        return sessions.run(model, feeds)
    if kind == "cuda":
        return cuda_sessions.run(model, feeds)
    return list(webgpu_sessions.session(model).run(None, feeds))


def computes(kind: str, dtype: str) -> bool:
    """Whether :func:`run_on` takes an element type: onnxruntime computes no bfloat16 on CPU."""
    return dtype != "bfloat16" or chosen() == kind
