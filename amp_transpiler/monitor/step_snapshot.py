"""What a bad step changes, as it is before the step; and a whole step in one file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx

from amp_transpiler.errors import ArgumentError, ArgumentTypeError, ModelFileError, ModelFileNotFoundError
from amp_transpiler.files import write_files
from amp_transpiler.ir.serializing import serialized
from amp_transpiler.ir.types import element_type, numpy_dtype
from amp_transpiler.passes.view.training_step import training_step
from amp_transpiler.program import Program
from amp_transpiler.runtime import device_tensors
from amp_transpiler.runtime.feeds import Feeds
from amp_transpiler.runtime.scope import Scope, check_scope

_FORMAT, _VERSION = "amp_transpiler step", 1
_META, _PROGRAM, _FEED, _STATE = "meta", "program", "feed/", "state/"


def step_state(program: Program, scope: Scope | None = None) -> dict[str, np.ndarray]:
    """Copies of what a bad step of ``program`` changes: the loss scale with its counters, and the randomness counter.

    Inside of a window of accumulation those are the sums of gradients too. Give it to :func:`find_culprit` as
    ``before``. Variables without a value in ``scope`` are left out.
    """
    scope = check_scope(scope)
    with scope.reading():
        return {name: scope.find_var(name) for name in changed_names(program) if scope.has_var(name)}


def as_state(name: str, value: Any, state: np.ndarray) -> np.ndarray:
    """A value that a variable had, as its state is now. ArgumentError where it does not fit."""
    try:
        return np.asarray(value, state.dtype).reshape(state.shape)
    except (TypeError, ValueError) as error:
        shape = f"{state.dtype} of shape {list(state.shape)}"
        raise ArgumentError(f"before: the value of '{name}' is not {shape} ({error})") from None


def changed_names(program: Program) -> list[str]:
    """The names of the variables that a bad step changes."""
    step = training_step(program)
    found = [state for scaling in step.scale_updates for state, _ in scaling.states]
    return list(dict.fromkeys(v.name for v in (*found, step.rng_step, *step.sums) if v is not None and v.persistable))


def save_step(
    path: str | os.PathLike[str],
    program: Program,
    feed: Mapping[Any, Any] | None = None,
    scope: Scope | None = None,
    *,
    before: Mapping[str, Any] | None = None,
) -> None:
    """Write one step to a file that :func:`find_culprit` can run elsewhere: the program, its feed and its state.

    The file is an ``.npz`` of plain arrays (the program as the bytes of an ONNX model), without pickles; it appears
    whole or not at all. ``before`` as in :func:`find_culprit`. ScopeError where the scope lacks a variable of the
    program, ModelFileWriteError where the file cannot be written; FeedError and FeedTypeError as of ``Executor.run``,
    ArgumentError for values of ``before`` that do not fit.
    """
    if not isinstance(program, Program):
        raise ArgumentTypeError(f"save_step takes a program as second argument, got {program!r:.80}")
    scope = check_scope(scope)
    stripped = program.clone()
    for variable in stripped.variables:
        if variable.persistable:
            variable.data = None
    content = {_PROGRAM: np.frombuffer(serialized(stripped.to_onnx()), np.uint8)}
    with scope.reading():
        kept = [v.name for v in program.variables if v.persistable and v.name not in scope.elsewhere]
        states = {name: scope.find_var(name) for name in kept}
    for name, value in (before or {}).items():
        if name not in states:
            raise ArgumentError(f"save_step: before names '{name}', which is no variable of the scope")
        states[name] = as_state(name, value, states[name])
    arrays = {_STATE + name: value for name, value in states.items()}
    feeds = Feeds(program, [v for op in program.operators for v in op.outputs if v is not None])
    fed = feeds.check(feed)
    feeds.check_shapes(fed)
    for name, value in fed.items():
        arrays[_FEED + name] = device_tensors.to_array(value) if hasattr(value, "device_name") else np.asarray(value)
    plain = {name: device_tensors.plain(array) for name, array in arrays.items()}
    content |= plain
    types = {name: element_type(array.dtype) for name, array in arrays.items() if plain[name] is not array}
    meta = {"format": _FORMAT, "version": _VERSION, "name": program.name, "types": types}
    content[_META] = np.frombuffer(json.dumps(meta).encode(), np.uint8)

    def write(stream: BinaryIO) -> None:
        np.savez(stream, allow_pickle=False, **content)

    write_files([(path, write)])


def load_step(path: str | os.PathLike[str]) -> tuple[Program, dict[str, np.ndarray], Scope]:
    """The program, feed and state of a file that :func:`save_step` wrote.

    ModelFileNotFoundError: there is no such file. ModelFileError: it is no such file, or is cut short.
    """
    path = Path(path)
    if not path.is_file():
        raise ModelFileNotFoundError(f"there is no saved step '{path}'")
    try:
        with np.load(path, allow_pickle=False) as stored:
            content = {name: stored[name] for name in stored.files}
        meta = json.loads(content.pop(_META).tobytes())
        model = onnx.ModelProto.FromString(content.pop(_PROGRAM).tobytes())
        types, name = dict(meta["types"]), str(meta["name"])
        if (meta["format"], meta["version"]) != (_FORMAT, _VERSION):
            raise ValueError(f"format {meta['format']!r}, version {meta['version']!r}")
    except Exception as error:  # zipfile's, numpy's, protobuf's and json's have no common base class
        why = "" if "pickle" in str(error) else f" ({error})"  # numpy's advice would be a bad one
        raise ModelFileError(f"'{path}' is no step that amp.save_step wrote, or is damaged{why}") from None
    program = Program.from_onnx(model, name=name)
    feed, scope = {}, Scope()
    for name, array in content.items():
        value = array.view(numpy_dtype(types[name])) if name in types else array
        if name.startswith(_FEED):
            feed[name.removeprefix(_FEED)] = value
        else:
            scope.hold({name.removeprefix(_STATE): device_tensors.from_array(value)})
    return program, feed, scope
