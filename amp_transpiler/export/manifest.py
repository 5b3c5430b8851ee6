"""The manifest of an exported step: what a program in another language has to know to train with it.

Its form is documented in docs/exported_steps.md, and as a JSON schema in ``manifest.schema.json`` beside this file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from amp_transpiler.errors import GraphError
from amp_transpiler.export.plain_ports import CARRIED, PlainModel
from amp_transpiler.export.step_programs import StepPrograms
from amp_transpiler.ir.accumulation_window import AccumulationWindow
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.lists import place_traits
from amp_transpiler.passes.lowering.lowered import Port
from amp_transpiler.passes.lowering.place import Place
from amp_transpiler.passes.view.training_step import TrainingStep
from amp_transpiler.runtime.checkpoint.writing import TENSORS

FORMAT, VERSION = "amp_transpiler.training_step", 1
MANIFEST = "manifest.json"
#: What a runner puts into the text of a checkpoint's ``meta.json``: its step, the size and hash of its tensors, itself.
STEP, BYTES, SHA256, RUNNER = "${step}", "${bytes}", "${sha256}", "${runner}"


@dataclass(frozen=True)
class PlaceStep:
    """A step as one place runs it: what trains, evaluates and infers, by name."""

    place: Place
    portable: bool
    models: Mapping[str, PlainModel]


def manifest_of(programs: StepPrograms, places: Sequence[PlaceStep], meta: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest but for files and what is served, which :func:`~.folder.write_folder` adds.

    ``meta`` is what a checkpoint says of the state.
    """
    step = programs.step
    window = step.accumulation
    return {
        "format": FORMAT,
        "version": VERSION,
        "program": dict(meta["program"]),
        "versions": dict(meta["versions"]),
        "places": [_place(one) for one in places],
        "states": [_state(name, said) for name, said in meta["tensors"].items()],
        "losses": list(programs.losses),
        "outputs": list(programs.outputs),
        "loss_scale": _loss_scale(step),
        "learning_rates": [_rate(step, rate) for rate in step.learning_rates],
        "random": None if step.rng_seed is None else {"seed": step.rng_seed.name, "step": _name(step.rng_step)},
        "window": {"steps": 1, "counter": None} if window is None else _window(window),
        "checkpoint": {"metadata": {"format": meta["format"]}, "meta": checkpoint_text(meta)},
    }


def checkpoint_text(meta: Mapping[str, Any]) -> str:
    """A checkpoint's ``meta.json`` but for its checksum, as the text whose SHA-256 that is.

    With ``${step}``, ``${bytes}``, ``${sha256}`` and ``${runner}`` in the places of what a runner knows.
    """
    file = {"name": TENSORS, "bytes": BYTES, "sha256": SHA256}
    versions = {**meta["versions"], "runner": RUNNER}
    counted = {"number": STEP, "step": STEP, "data_position": None, "extra": None}
    said = {**meta, **counted, "file": file, "versions": versions}
    text = json.dumps(said, sort_keys=True, separators=(",", ":"))
    for mark, count in ((STEP, 2), (BYTES, 1), (SHA256, 1), (RUNNER, 1)):
        if text.count(mark) != count:
            raise GraphError(
                f"a variable's name has '{mark}' in it, which stands for something in a manifest; rename it"
            )
    return text.replace(f'"{STEP}"', STEP).replace(f'"{BYTES}"', BYTES)


def _place(step: PlaceStep) -> dict[str, Any]:
    opsets = {entry.domain: entry.version for entry in step.models["train"].model.opset_import}
    return {
        "place": step.place.kind,
        "provider": place_traits(step.place.kind).provider,
        "portable": step.portable,
        "opsets": opsets,
        "models": {name: _model(model) for name, model in step.models.items()},
    }


def _model(model: PlainModel) -> dict[str, Any]:
    return {
        "feeds": [_port(port, "input") for port in model.feeds],
        "states": {port.variable: port.tensor for port in model.states},
        "zeros": model.zeros,
        "fetches": [_port(port, "output") for port in model.fetches],
        "updates": {port.variable: port.tensor for port in model.updates},
    }


def _port(port: Port, kind: str) -> dict[str, Any]:
    shape = None if port.shape is None else [d if isinstance(d, int) and d >= 0 else None for d in port.shape]
    return {"name": port.variable, kind: port.tensor, "dtype": port.dtype, "shape": shape}


def _state(name: str, said: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "carried": CARRIED.get(said["dtype"], said["dtype"]), **said}


def _window(window: AccumulationWindow) -> dict[str, Any]:
    return {"steps": window.steps, "counter": window.counter.name}


def _loss_scale(step: TrainingStep) -> dict[str, Any] | None:
    """The state of the loss scale, and the rule that moves it; None where gradients are not scaled."""
    if step.scale is None:
        return None
    update = step.scale_updates[0] if step.scale_updates else None
    rule = None
    if update is not None:
        attrs = update.operator.attrs
        counters = {"good_steps": _name(update.good), "bad_steps": _name(update.bad)}
        rule = {**{name: attrs[name] for name in attrs}, **counters}
    return {"state": step.scale.name, "found_inf": _name(step.found_inf), "dynamic": rule}


def _rate(step: TrainingStep, rate: Variable) -> dict[str, Any]:
    """A learning rate: state that may be set between steps, or what a schedule makes, which is fetched."""
    if rate.persistable:
        return {"state": rate.name}
    made = next((each for each in step.schedules if rate in each.operator.outputs), None)
    if made is None:
        return {"fetch": rate.name}
    schedule = json.loads(str(made.operator.attrs["schedule"]))
    return {"fetch": rate.name, "step": _name(made.read("step")), "schedule": schedule}


def _name(variable: Variable | None) -> str | None:
    return None if variable is None else variable.name
