"""Builds programs, and runs them on CPU: lowered, one session, and a scope that is a plain dict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnxruntime as ort

from amp_transpiler.ir import unique_name
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.ir.types import ONNX_TYPES, numpy_dtype
from amp_transpiler.passes.lowering.lowering import lower
from amp_transpiler.program import Program, program_guard
from tests.helpers.sessions import session

Array = np.ndarray[Any, Any]


@contextmanager
def building() -> Iterator[tuple[Program, Program]]:
    """A main and a startup program to build into."""
    main, startup = Program("main"), Program("startup")
    with program_guard(main, startup), unique_name.guard():
        yield main, startup


def _value(array: Array) -> ort.OrtValue:
    if array.dtype.name == "bfloat16":
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(np.ascontiguousarray(array), ONNX_TYPES["bfloat16"])
    return ort.OrtValue.ortvalue_from_numpy(np.require(array, requirements="C"))


def _array(value: ort.OrtValue, dtype: str) -> Array:
    if dtype != "bfloat16":
        return np.array(value.numpy())
    import ctypes

    size = value.tensor_size_in_bytes()
    return np.frombuffer(ctypes.string_at(value.data_ptr(), size), numpy_dtype(dtype)).reshape(value.shape())


def run(program: Program, scope: dict[str, Array], feeds: dict[str, Array], fetches: Sequence[Variable]) -> list[Array]:
    """Fetched arrays of one run on CPU; the program's updates go into ``scope``."""
    lowered = lower(program, "cpu", {name: array.shape for name, array in feeds.items()}, list(fetches))
    if not lowered.fetches and not lowered.updates:
        return []
    running = session(lowered.model)
    inputs = {port.tensor: _value(feeds[port.variable]) for port in lowered.feeds}
    inputs |= {port.tensor: _value(np.asarray(scope[port.variable])) for port in lowered.states}
    inputs |= {name: _value(np.zeros((), np.float32)) for name in lowered.scalars}
    tensors = [output.name for output in running.get_outputs()]
    found = dict(zip(tensors, running.run_with_ort_values(tensors, inputs), strict=True))
    results = [_array(found[port.tensor], port.dtype) for port in lowered.fetches]
    scope.update({port.variable: _array(found[port.tensor], port.dtype) for port in lowered.updates})
    return results


def startup_values(startup: Program) -> dict[str, Array]:
    """What a startup program writes."""
    scope: dict[str, Array] = {}
    run(startup, scope, {}, [])
    return scope
