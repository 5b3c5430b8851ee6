"""Checkpoints: the whole state of a program in a scope, to continue from bit for bit.

A checkpoint is a folder: ``state.safetensors`` with every tensor in its own element type, and ``meta.json`` with the
format version, the program's fingerprint, the role of each tensor, the step, the data position, what the caller adds,
the settings of the loss scaling, versions of libraries, and checksums. There is no pickle in it.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import safetensors

from amp_transpiler.errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    ScopeError,
)
from amp_transpiler.file_targets import PathLike, folder_path
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.option_checks import is_whole, switch, whole
from amp_transpiler.program import Program
from amp_transpiler.runtime import device_tensors
from amp_transpiler.runtime.checkpoint.reading import TensorFile, read_checkpoint, read_meta
from amp_transpiler.runtime.checkpoint.renaming import Renames
from amp_transpiler.runtime.checkpoint.restore import restore, stored_tensors, warn_of_window
from amp_transpiler.runtime.checkpoint.state_slots import (
    UNUSED,
    Slot,
    fingerprint,
    scaler_settings,
    state_slots,
)
from amp_transpiler.runtime.checkpoint.writing import (
    FORMAT,
    META,
    VERSION,
    awaited,
    remove_checkpoint,
    step_folder,
    step_folders,
    write_checkpoint,
)
from amp_transpiler.runtime.collective.current import by_rank_0
from amp_transpiler.runtime.scope import Scope, check_not_replaced, check_scope
from amp_transpiler.runtime.shards import Pieces, open_sums
from amp_transpiler.runtime.states import fits, type_message
from amp_transpiler.version import __version__
from amp_transpiler.warn import warn_user

#: In place of the number of a checkpoint that cannot be read; they are the first to be removed.
_DAMAGED = 0
#: How deep lists and dicts of the caller's may lie in each other, and the bits of a whole number that Python writes.
_DEEPEST, _LONGEST = 100, 10_000


@dataclass(frozen=True)
class Checkpoint:
    """What was loaded, and what came with it.

    ``step``, ``data_position`` and ``extra`` are what :func:`save_checkpoint` was given. ``exact`` says that the
    program is the one that was saved, so that training continues bit for bit. ``missing`` (with ``strict=False``) are
    variables that nothing was stored for, ``unused`` stored tensors that went nowhere. ``versions`` are those of the
    libraries that the checkpoint was written with.
    """

    path: Path
    step: int | None
    data_position: Any
    extra: Any
    exact: bool
    missing: tuple[str, ...]
    unused: tuple[str, ...]
    versions: Mapping[str, str]


def save_checkpoint(
    path: PathLike,
    program: Program,
    scope: Scope | None = None,
    *,
    step: int | None = None,
    data_position: Any = None,
    extra: Any = None,
    keep_last: int | None = None,
    keep_steps: Collection[int] = (),
) -> Path:
    """Write all state of ``program`` in ``scope`` (default: the global one), whole or not at all; returns the folder.

    All state is every persistable variable: parameters, master weights, moments, statistics, the loss scale and its
    counters, learning rate and schedule, seed and step of the randomness. Each keeps its element type. Of several ranks
    all call it, and rank 0 writes; the others return when that is done. State that is dealt out among them comes to
    rank 0 one variable at a time; of sums of an open window of accumulation the mean over the ranks is written.

    Args:
        path: with ``step``, the folder that holds the checkpoints, each in ``step_<8 digits>``; without, the
            checkpoint itself. One that is there already is replaced.
        step: a number >= 0, kept in the checkpoint.
        data_position, extra: anything of numbers, strings, lists and dicts; ``load_checkpoint`` gives it back (tuples
            as lists). ``data_position`` is meant for the place in the data to go on from.
        keep_last: keep the last so many checkpoints in ``path``, in the order they were written, and remove the
            others once the new one is whole; files of yours in their folders stay. Only with ``step``.
        keep_steps: steps that stay besides, such as that of the best epoch.

    Raises:
        ScopeError: a variable is not in the scope, or has another element type or shape than the program declares.
        CheckpointWriteError: disk full, no permission, a folder that is something else. Nothing changed then.
        ArgumentError, ArgumentTypeError: an argument that cannot be used.
    """
    call = "save_checkpoint"
    _check_program(program, call)
    scope = check_scope(scope)
    _check_numbers(step, keep_last, keep_steps)
    home = folder_path(path, f"{call}: path")
    target = home if step is None else step_folder(home, step)
    if step is not None and os.path.isfile(home / META):
        raise ArgumentError(f"{call}: '{home}' is a checkpoint itself; give the steps a folder of their own")
    with scope.reading():  # steps of other threads wait until it is written
        values, meta = gathered_state(program, scope)
        others = step_folders(home) if step is not None else []
        written = _written(others)
        meta |= {
            "number": 1 + max(written.values(), default=0),
            "step": None if step is None else int(step),
            "data_position": _plain(data_position, f"{call}: data_position"),
            "extra": _plain(extra, f"{call}: extra"),
        }

        pieces = Pieces(program, scope)

        def write() -> None:
            try:
                write_checkpoint(target, values, meta, pieces)
            finally:
                pieces.finish()
            if keep_last is not None:
                spared = {step_folder(home, kept) for kept in keep_steps}
                _remove_older(target, {f: n for f, n in written.items() if f not in spared}, keep_last)

        by_rank_0(write, pieces.finish)
    return target


def load_checkpoint(
    path: PathLike, program: Program, scope: Scope | None = None, *, strict: bool = True, rename: Renames | None = None
) -> Checkpoint:
    """Set the state of ``program`` in ``scope`` (default: the global one) to that of a checkpoint.

    Neither the startup program nor ``amp_init`` need have run (``amp_init`` is still what rewrites a test program).
    The scope changes when everything has been verified and found to fit; variables of other programs stay. Values are
    then replaced one by one, so that memory holds the state, and one tensor beside it. Where that ends half way (the
    disk fails, Ctrl-C), the scope has no state of the program, rather than some of each.

    A checkpoint of the same program continues bit for bit. One of another precision is converted: an fp32 master
    takes the stored master or fp32 parameter, a 16-bit parameter is that value rounded, a fp32 parameter is the
    stored master; moments and statistics stay. The loss scale and its counters, where the checkpoint has none, or one
    that moved while this one is fixed, keep their values in the scope or take those of the startup program; a window of
    gradient accumulation begins anew, as one of another number of runs does, with a warning where it was open. A
    program that does not train takes parameters and statistics and leaves the rest.

    Args:
        path: a checkpoint, or the folder that holds those of steps: then the one that was written last.
        strict: False loads what fits: tensors that go nowhere are left, variables that nothing is stored for keep
            their values, or take those of the startup program. Wrong shapes are errors in any case.
        rename: names in the checkpoint to names in the program; see :func:`~.renaming.renamed`. The state of a
            parameter follows it.

    Raises:
        CheckpointNotFoundError: there is none. CheckpointError: it is damaged.
        CheckpointMismatchError: it does not fit; lists every missing, extra and wrong tensor.
        PrecisionError: a parameter does not fit the 16-bit type of the program.
    """
    call = "load_checkpoint"
    _check_program(program, call)
    scope = check_scope(scope)
    folder, meta, file = _last_read(folder_path(path, f"{call}: path"))
    what = f"checkpoint '{folder}'"
    stored = stored_tensors(meta, file, program, rename, what)
    found = restore(program, stored, scope, what, strict=switch(f"{call}: strict", strict))
    warn_of_window(program, stored, what)
    same = meta["program"]["fingerprint"] == fingerprint(program)
    if not same and not found.converted and rename is None:
        _warn_of_change(folder, meta, program)
    loaded = Checkpoint(
        folder,
        meta["step"],
        meta["data_position"],
        meta["extra"],
        same and not found.converted,
        tuple(found.missing),
        tuple(found.extra),
        meta["versions"],
    )
    found.put(program, scope)
    return loaded


def latest_checkpoint(path: PathLike) -> Path | None:
    """The checkpoint below ``path`` that was written last, or ``path`` itself where it is one; None if there is none.

    What a killed save left behind does not count. Written last is not always the highest step: training may have gone
    back to an earlier one. CheckpointError where a checkpoint of a higher step is damaged: it may be the last.
    """
    home = folder_path(path, "latest_checkpoint: path")
    if os.path.isfile(home / META):
        return home
    written = _written(step_folders(home))
    latest = max(written, key=lambda folder: written[folder], default=None)
    for folder in reversed(written):
        if folder == latest:
            break
        if written[folder] == _DAMAGED:
            read_meta(folder)  # raises
    return latest


def chosen_checkpoint(path: Path) -> Path:
    """A checkpoint, or of a folder of those of steps the last. CheckpointNotFoundError where the folder has none."""
    latest = latest_checkpoint(path)
    if latest is not None:
        return latest
    if os.path.isdir(path) and not any(path.glob("*.safetensors")):
        raise CheckpointNotFoundError(f"there is no checkpoint in folder '{path}'")
    return path  # reading it says what it is


def _last_read(path: Path) -> tuple[Path, dict[str, Any], TensorFile]:
    """The checkpoint to load: another process may write the next one meanwhile, and remove this one."""
    while True:
        folder = chosen_checkpoint(path)
        try:
            return folder, *read_checkpoint(folder)
        except CheckpointNotFoundError:
            if chosen_checkpoint(path) == folder:
                raise


# -- saving ----------------------------------------------------------------------------------------------
def gathered_state(program: Program, scope: Scope) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of all state of ``program``, by name, and what ``meta.json`` says of them and of the program.

    Without what the caller of :func:`save_checkpoint` says, and without the file. ScopeError as there.
    """
    check_not_replaced(scope)
    slots = state_slots(program)
    values = {v.name: value for v in slots if (value := _held(v, slots[v], program, scope)) is not None}
    values |= {v.name: awaited(v) for v in open_sums(program, scope)}
    return values, {
        "format": FORMAT,
        "version": VERSION,
        "program": {"name": program.graph_name, "fingerprint": fingerprint(program)},
        "scaling": scaler_settings(program),
        "versions": _versions(),
        "tensors": {v.name: _described(v, values[v.name], slots[v]) for v in slots if v.name in values},
    }


def _held(variable: Variable, slot: Slot, program: Program, scope: Scope) -> Any:
    """The value of a variable; None where it has none and nothing reads it."""
    value = scope.ort_values.get(variable.name)
    if value is not None and variable.name in scope.dealt:
        return awaited(variable)
    if value is None:
        if slot.role == UNUSED:
            return None
        if variable.name in scope.elsewhere:
            return awaited(variable)
        raise ScopeError(
            f"variable '{variable.name}' of program '{program.name}' is not in the scope, so there is no "
            "whole state to save; run its startup program first, into this scope"
        )
    found = device_tensors.dtype_of(value)
    if found != variable.dtype:
        raise ScopeError(type_message(variable.name, program.name, found, str(variable.dtype)))
    if variable.shape is not None and not fits(value.shape(), variable.shape):
        raise ScopeError(
            f"variable '{variable.name}' has shape {list(value.shape())} in the scope; program "
            f"'{program.name}' declares {list(variable.shape)}"
        )
    return value


def _described(variable: Variable, value: Any, slot: Slot) -> dict[str, Any]:
    said: dict[str, Any] = {"dtype": variable.dtype, "shape": list(value.shape()), "role": slot.role}
    if slot.of not in ("", variable.name):
        said["of"] = slot.of
    if slot.number:
        said["number"] = slot.number
    return said


def _written(folders: list[Path]) -> dict[Path, int]:
    """Checkpoints, by step, with the number that says in what order they were written."""
    found = {}
    for folder in folders:
        try:
            found[folder] = int(read_meta(folder)["number"])
        except CheckpointError:
            found[folder] = _DAMAGED
    return found


def _remove_older(newest: Path, written: Mapping[Path, int], keep_last: int) -> None:
    older = sorted((folder for folder in written if folder != newest), key=lambda folder: (written[folder], folder))
    for folder in older[: max(0, len(older) - keep_last + 1)]:
        try:
            remove_checkpoint(folder)
        except FileNotFoundError:  # another process that saves here was faster
            continue
        except OSError as error:
            raise CheckpointWriteError(
                f"checkpoint '{newest}' is written, but the older '{folder}' cannot be removed: "
                f"{error.strerror or error}"
            ) from None


def _versions() -> dict[str, str]:
    return {
        "amp_transpiler": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "onnx": onnx.__version__,
        "onnxruntime": ort.__version__,
        "ml_dtypes": ml_dtypes.__version__,
        "safetensors": safetensors.__version__,
    }


# -- loading ---------------------------------------------------------------------------------------------
def _warn_of_change(folder: Path, meta: Mapping[str, Any], program: Program) -> None:
    was, now = meta["scaling"], scaler_settings(program)
    changed = f" (loss scaling was {was}, is {now})" if was != now else ""
    warn_user(
        f"program '{program.name}' has the state of checkpoint '{folder}' but computes something else than "
        f"the program that was saved{changed}; training goes on, not bit for bit"
    )


# -- arguments -------------------------------------------------------------------------------------------
def _check_program(program: Any, call: str) -> None:
    if not isinstance(program, Program):
        raise ArgumentTypeError(f"{call} takes a program as second argument, got {program!r}")


def _check_numbers(step: Any, keep_last: Any, keep_steps: Any) -> None:
    if not isinstance(keep_steps, Collection) or not all(map(is_whole, keep_steps)):
        raise ArgumentTypeError(f"save_checkpoint: keep_steps is {keep_steps!r}; expected a list of steps")
    for name, value, least in (("step", step, 0), ("keep_last", keep_last, 1)):
        if value is not None:
            whole(f"save_checkpoint: {name}", value, least)
    if keep_last is not None and step is None:
        raise ArgumentError("save_checkpoint: keep_last counts the checkpoints of steps; pass step= too")


def _plain(value: Any, what: str, deep: int = 0) -> Any:
    """``value`` as JSON gives it back; ArgumentTypeError for what JSON does not hold, ArgumentError beyond limits."""
    if isinstance(value, np.generic):
        value = value.item()
    if deep > _DEEPEST:
        raise ArgumentError(f"{what[: what.index('[')]} has lists and dicts more than {_DEEPEST} deep in each other")
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise ArgumentTypeError(f"{what} has the key {key!r}; keys are strings")
        return {key: _plain(item, f"{what}[{key!r}]", deep + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{what}[{index}]", deep + 1) for index, item in enumerate(value)]
    if isinstance(value, int) and value.bit_length() > _LONGEST:
        raise ArgumentError(f"{what} is a whole number of {value.bit_length()} bits; expected {_LONGEST} at most")
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        hint = "; an array goes in as array.tolist()" if isinstance(value, np.ndarray) else ""
        raise ArgumentTypeError(f"{what} is {value!r:.80}; expected numbers, strings, lists and dicts{hint}") from None
