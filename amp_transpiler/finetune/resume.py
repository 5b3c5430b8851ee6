"""Going on from a checkpoint: what it was made with, what this run asks for, and what that comes to."""

from __future__ import annotations

import os
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from amp_transpiler.errors import ArgumentError, CheckpointError
from amp_transpiler.finetune.best_epoch import best_epoch
from amp_transpiler.finetune.options import FIXED, FitOptions, in_one_spelling, options_of
from amp_transpiler.finetune.training_record import EpochRecord
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.option_checks import is_real
from amp_transpiler.program import Program
from amp_transpiler.runtime import Scope
from amp_transpiler.runtime.checkpoint.checkpoints import latest_checkpoint, load_checkpoint, save_checkpoint
from amp_transpiler.runtime.checkpoint.reading import read_meta
from amp_transpiler.runtime.checkpoint.state_slots import fingerprint
from amp_transpiler.runtime.checkpoint.writing import step_folder

#: The entry of a checkpoint that says how the training was asked for.
_KEY = "fit"


@dataclass(frozen=True)
class Resumed:
    """A checkpoint to go on from: its folder, the epochs behind it, and what it says of its training.

    ``best`` is that of the best epoch, where its weights are the ones to be written.
    """

    path: Path
    epochs: int
    steps: int
    options: Mapping[str, Any]
    identity: Mapping[str, Any]
    history: tuple[EpochRecord, ...]
    best: Path | None = None


def find(folder: str | os.PathLike[str]) -> Resumed | None:
    """The last checkpoint in a folder; None where there is none. CheckpointError for one that ``fit`` did not write."""
    path = latest_checkpoint(folder)
    if path is None:
        return None
    meta = read_meta(path)
    try:
        said = meta["extra"][_KEY]
        history = tuple(map(_record, said["history"]))
        options, identity = dict(said["options"]), {"data": {}, **said["identity"]}
        if not isinstance(identity["data"], dict):
            raise TypeError
        return Resumed(path, int(meta["step"]), int(said["steps"]), in_one_spelling(options), identity, history)
    except (KeyError, TypeError, ValueError, OverflowError):
        raise CheckpointError(
            f"'{path}' is not a checkpoint of amp.fit or `amp-transpile train`, which keep their options in it; "
            "choose another folder. Where a runner of an exported step wrote it, `amp-transpile trained-model FOLDER "
            f"trained.onnx --checkpoint {path}` makes a model of the step's FOLDER and these weights, to train on"
        ) from None


def _record(said: Mapping[str, Any]) -> EpochRecord:
    """A record as it was written: a loss that was not finite is NaN again. TypeError for what is no number."""
    if not all(value is None or is_real(value) for value in dict(said).values()):
        raise TypeError
    return EpochRecord(**{**said, "loss": float("nan") if said["epoch"] and said["loss"] is None else said["loss"]})


def merged(found: Resumed, given: Mapping[str, Any]) -> tuple[FitOptions, list[str]]:
    """The options of a resumed run, and what they change: what is given wins, the rest is the checkpoint's.

    ArgumentError names every given option that would make it another training.
    """
    try:
        options_of(found.options)
    except TypeError as error:
        raise CheckpointError(f"'{found.path}': {error}") from None
    options = options_of({**found.options, **given})
    now, before = options.plain(), FitOptions().plain() | dict(found.options)  # an older one has fewer options
    changed = [name for name in now if name in given and now[name] != before[name]]
    wrong = [name for name in changed if name in FIXED]
    if wrong:
        listed = ", ".join(f"{options.said(name, now[name])} (the checkpoint has {before[name]})" for name in wrong)
        raise ArgumentError(
            f"'{found.path}' is a checkpoint of another training: {listed}. Leave that out to go on, "
            "or give another folder to begin anew"
        )
    notes = [f"{options.said(name)} from now on, where the checkpoint has {before[name]}" for name in changed]
    return options, notes


def identity(program: Program, data: Mapping[str, Any], test: Mapping[str, Any] | None) -> dict[str, Any]:
    """What tells a prepared program and its data from others; ``data`` and ``test``: their ``Samples.identity``."""
    weights = 0
    for variable in program.variables:
        if variable.persistable and variable.data is not None:
            content = np.ascontiguousarray(as_array(variable.data))
            weights = zlib.crc32(content.view(np.uint8).reshape(-1).data if content.size else b"", weights)
    return {"model": [fingerprint(program), weights], "data": dict(data), "test": test}


def check_identity(found: Resumed, now: Mapping[str, Any], data: str) -> None:
    """ArgumentError where the checkpoint was made with another model or other data."""
    if found.identity.get("model") != now["model"]:
        raise ArgumentError(
            f"'{found.path}' is a checkpoint of another model: its weights or its operators are "
            "others than those given. Give that model, or another folder to begin anew"
        )
    was = found.identity.get("data", {})
    other = [name for name in now["data"] if was.get(name) != now["data"][name]]
    if other or set(was) != set(now["data"]):
        named = f": array '{other[0]}' differs" if other else ""
        raise ArgumentError(
            f"'{found.path}' is a checkpoint of a training on other data than {data}{named}. Give the "
            "same, or another folder to begin anew"
        )


def check_tested(found: Resumed, now: Mapping[str, Any], options: FitOptions) -> None:
    """ArgumentError where the checkpoint's epochs were tested by other data or metrics: no best one is told then."""
    was = options_of(found.options).measured
    if options.monitor != "test_loss" and was != options.measured:
        raise ArgumentError(
            f"{options.said('monitor')}: the epochs of '{found.path}' were measured by {was}; choose "
            f"{options.said('monitor', 'test_loss')} or {options.said('metric', was)}, or another folder to begin anew"
        )
    if found.identity.get("test") not in (None, now["test"]):
        raise ArgumentError(
            f"'{found.path}' is a checkpoint of a training with other test data, whose {options.monitor} is not to be "
            f"compared with that of {options.called('test')}; give the same, or another folder to begin anew"
        )


def with_best(found: Resumed, options: FitOptions) -> Resumed:
    """The checkpoint with that of its best epoch, where that is to be written. ArgumentError where it is gone."""
    best = best_epoch(found.history, options) if options.restore_best_weights else None
    if best is None:
        return found
    path = step_folder(found.path.parent, best)
    if latest_checkpoint(path) is None:
        raise ArgumentError(
            f"{options.called('restore_best_weights')}: epoch {best} is the best by {options.monitor} so far, and "
            f"'{found.path.parent}' no longer has it, as a training without that option leaves the last two alone. "
            "Leave the option out, or give another folder to begin anew"
        )
    return replace(found, best=path)


def load(path: Path, program: Program, scope: Scope) -> None:
    """Set the state of the training program to that of a checkpoint."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that other options are another program was told, option by option
        load_checkpoint(path, program, scope)


def save(
    folder: str | os.PathLike[str],
    program: Program,
    scope: Scope,
    options: FitOptions,
    steps: int,
    now: Mapping[str, Any],
    history: tuple[EpochRecord, ...],
) -> None:
    """Write the state behind the last epoch of ``history``, and keep the one before, and a best one to be written."""
    said = {"options": options.plain(), "steps": steps, "identity": now, "history": [one.plain() for one in history]}
    best = best_epoch(history, options) if options.restore_best_weights else None
    save_checkpoint(
        folder,
        program,
        scope,
        step=history[-1].epoch,
        extra={_KEY: said},
        keep_last=2,
        keep_steps=[] if best is None else [best],
    )
