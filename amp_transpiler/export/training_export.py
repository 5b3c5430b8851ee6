"""``Program.export_training``: a training step as a folder that other runtimes train with."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from amp_transpiler.errors import ArgumentError, ExecutionError
from amp_transpiler.export.folder import checked_folder, write_folder
from amp_transpiler.export.manifest import PlaceStep, manifest_of
from amp_transpiler.export.older_builds import for_older_builds
from amp_transpiler.export.plain_ports import PlainModel, check_held, counted, plain
from amp_transpiler.export.portable import portable as same_everywhere
from amp_transpiler.export.serving import serving_model
from amp_transpiler.export.step_programs import CALL, StepPrograms, step_programs
from amp_transpiler.ir.gc_pause import collector_paused
from amp_transpiler.ir.infer import static
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.lists import place_traits
from amp_transpiler.option_checks import is_whole, shown, switch
from amp_transpiler.passes.lowering.exchanges import has_exchanges
from amp_transpiler.passes.lowering.lowering import lower
from amp_transpiler.passes.lowering.place import Place, arithmetic_of, check_place
from amp_transpiler.program import Program
from amp_transpiler.runtime.checkpoint.checkpoints import gathered_state
from amp_transpiler.runtime.device_tensors import dtype_of
from amp_transpiler.runtime.scope import check_scope
from amp_transpiler.runtime.session import Settings, check_model
from amp_transpiler.runtime.states import fits
from amp_transpiler.warn import warn_user

FeedShapes = Mapping[str, Sequence[int]]


def export_training(
    program: Program,
    folder: str | os.PathLike[str],
    place: Place | str | Sequence[Place | str],
    feed_shapes: FeedShapes | None = None,
    *,
    outputs: Sequence[Variable | str] | None = None,
    fetch_list: Sequence[Variable | str] = (),
    eval_shapes: FeedShapes | None = None,
    infer_shapes: FeedShapes | None = None,
    test_program: Program | None = None,
    scope: Any = None,
    portable: bool = False,
    overwrite: bool = False,
) -> Path:
    """See ``Program.export_training``."""
    places = _checked_places(place, portable)
    target = checked_folder(folder, CALL, overwrite)
    programs = step_programs(program, fetch_list, outputs, test_program)
    scope = check_scope(scope)
    left: set[str] = set()
    shapes = {"train": feed_shapes, "eval": eval_shapes or feed_shapes, "infer": infer_shapes or feed_shapes}
    with collector_paused():
        fixed = {name: _checked(name, given, programs) for name, given in shapes.items()}
        steps = [
            PlaceStep(one, same, _models(programs, one, fixed, left if same else None)) for one, same in places.items()
        ]
    if left:
        warn_user(
            f"{CALL}: portable=True: {', '.join(sorted(left))} of program '{program.name}' have kernels in fp32 alone, "
            "which differ between builds in the last bit: now and then a result is another 16-bit number there"
        )
    with scope.reading():  # steps of other threads wait until it is written
        values, meta = gathered_state(program, scope)
        for step in steps:
            _check_states(programs, step.models, values)
        manifest = manifest_of(programs, steps, meta)
        said = {**meta, "number": 1, "step": None, "data_position": None, "extra": None}
        served = serving_model(programs, scope)
        write_folder(target, steps, values, said, manifest, served)
    return target


def _models(
    programs: StepPrograms, place: Place, shapes: Mapping[str, dict[str, tuple[int, ...]]], left: set[str] | None
) -> dict[str, PlainModel]:
    """The lowered models by name: what trains, what a run inside of a window does, what evaluates and infers.

    With ``left`` they are portable, but for the operators that it gets.
    """
    program, test = programs.program, programs.test

    def model(of: Program, name: str, fetches: Sequence[str], updates: Any) -> PlainModel:
        needed = {v.name for v in of.inputs}
        sizes = {feed: shape for feed, shape in shapes[name].items() if feed in needed}
        targets = [of.var(fetch) for fetch in fetches]
        lowered = lower(of, place.kind, sizes, targets, updates=updates, declared=True, arithmetic=arithmetic_of(place))
        if has_exchanges(lowered.model):
            raise ArgumentError(
                f"{CALL}: program '{of.name}' exchanges tensors between ranks, which takes several sessions "
                "and an engine between them; build it again in a process of one rank (without amp.distributed.init)"
            )
        for port in lowered.feeds:
            if static(port.shape) is None:
                raise ArgumentError(
                    f"{CALL}: feed '{port.variable}' of program '{of.name}' has no fixed shape; "
                    f"give it: feed_shapes={{'{port.variable}': (…)}}"
                )
        try:
            check_model(lowered.model, place, Settings(), of.name)
        except ExecutionError as error:
            given = ", ".join(f"{feed} {list(shape)}" for feed, shape in sizes.items())
            raise ArgumentError(f"{CALL}: onnxruntime refuses the step at these shapes: {given} ({error})") from None
        if place_traits(place.kind).emulates:
            lowered = for_older_builds(lowered)
        return plain(lowered if left is None else same_everywhere(lowered, left), of.name)

    models = {"train": model(program, "train", programs.fetches, True)}
    window = program.accumulation
    if window is not None:
        inside = [name for name in programs.fetches if name not in programs.told]
        models["accumulate"] = model(program, "train", inside, window.updates)
        for name in ("train", "accumulate"):
            models[name] = counted(models[name], window.counter.name, window.steps)
    models["eval"] = model(test, "eval", [*programs.losses, *programs.outputs], False)
    models["infer"] = model(test, "infer", programs.outputs, False)
    return models


def _checked_places(given: Any, portable: Any) -> dict[Place, bool]:
    """The places, and of each whether its step is portable: one that processors run may be."""
    places = list(given) if isinstance(given, (list, tuple)) else [given]
    places = [check_place(place, f"{CALL}: place") for place in places]
    kinds = [place.kind for place in places]
    twice = next((kind for kind in kinds if kinds.count(kind) > 1), None)
    if twice or not places:
        wrong = f"two places for {twice}" if twice else "no place"
        raise ArgumentError(f"{CALL}: {wrong}; a folder has one step for each kind of place, at least one")
    portable = switch(f"{CALL}: portable", portable)
    found = {place: portable and place_traits(place.kind).emulates for place in places}
    if portable and not any(found.values()):
        raise ArgumentError(
            f"{CALL}: portable=True is for steps that processors run; those for {places[0]!r} have kernels of its own"
        )
    return found


def _checked(name: str, given: Any, programs: StepPrograms) -> dict[str, tuple[int, ...]]:
    argument = "feed_shapes" if name == "train" else f"{name}_shapes"
    if given is not None and not isinstance(given, Mapping):
        raise ArgumentError(f"{CALL}: {argument} is {given!r}; expected a dictionary of feed -> shape")
    known = {v.name: v for v in (*programs.test.inputs, *programs.program.inputs)}
    shapes = {}
    for feed, shape in (given or {}).items():
        if feed not in known:
            raise ArgumentError(
                f"{CALL}: {argument}: '{feed}' is no feed of program '{programs.program.name}'; its feeds are "
                f"{', '.join(known) or 'none'}"
            )
        sizes = tuple(shape) if isinstance(shape, Iterable) else None
        if sizes is None or not all(is_whole(size) and size > 0 for size in sizes):
            raise ArgumentError(
                f"{CALL}: {argument}: the shape of feed '{feed}' is {shown(shape)}; expected sizes, numbers from 1 on"
            )
        shapes[feed] = tuple(map(int, sizes))
        declared = known[feed].shape
        if declared is not None and not fits(shapes[feed], declared):
            raise ArgumentError(
                f"{CALL}: {argument}: feed '{feed}' of program '{programs.program.name}' is declared as "
                f"{list(declared)}; {list(shapes[feed])} does not fit that"
            )
    return shapes


def _check_states(programs: StepPrograms, models: Mapping[str, PlainModel], values: Mapping[str, Any]) -> None:
    """ArgumentError where a test program reads state that the training program does not have; PrecisionError: types."""
    for name, value in values.items():
        check_held(name, dtype_of(value), programs.program.name)
    for name, model in models.items():
        for port in model.states:
            if port.variable not in values:
                raise ArgumentError(
                    f"{CALL}: {name}.onnx reads '{port.variable}', which is no state of program "
                    f"'{programs.program.name}'; build test program '{programs.test.name}' with the same names "
                    "(amp.unique_name.guard()), or give none"
                )
