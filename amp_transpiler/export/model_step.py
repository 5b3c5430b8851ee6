"""The training step of an exported model as a folder for other runtimes; ``amp-transpile export-step`` is this."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from amp_transpiler.errors import ArgumentError
from amp_transpiler.export.folder import checked_folder
from amp_transpiler.finetune.batch import fixed_batch, freed, with_hidden_batch
from amp_transpiler.finetune.checks import remarks
from amp_transpiler.finetune.options import FitOptions, options_of
from amp_transpiler.finetune.programs import Programs, refuse_label
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.ir.types import FLOATS, numpy_dtype
from amp_transpiler.option_checks import whole
from amp_transpiler.passes.lowering.place import Place
from amp_transpiler.program import Program
from amp_transpiler.runtime import CPUPlace, Executor, Scope


def export_model_step(
    program: Program,
    folder: str | os.PathLike[str],
    place: Place | Sequence[Place],
    feed_shapes: Mapping[str, Sequence[int]],
    *,
    updates: int | None = None,
    calibration: Sequence[str] = (),
    portable: bool = False,
    overwrite: bool = False,
    say: Callable[[str], None],
    **options: Any,
) -> Path:
    """Attach loss and optimizer to the program of a model, and export its step; returns the folder.

    ``feed_shapes`` are those of the model's inputs in training; ``updates`` are all of them, for a schedule that ends;
    ``calibration`` files hold samples of the inputs, by which what leaves the range of float16 stays fp32; ``options``
    are fields of :class:`FitOptions`. Errors as of ``amp.fit`` and ``Program.export_training``.
    """
    chosen = options_of(options)
    if updates is not None:
        whole(chosen.called("steps"), updates, 1)
    elif chosen.schedule != "constant":
        raise ArgumentError(
            f"{chosen.said('schedule')} goes down to 0 by the last update; say with {chosen.called('steps')} how many "
            "there are"
        )
    checked_folder(folder, "export-step", overwrite)
    places = list(place) if isinstance(place, Sequence) else [place]
    for line in remarks(places, chosen):
        say(line)
    program = _with_batch(program, feed_shapes, chosen)
    program.seed = chosen.seed
    if program.startup is not None:
        program.startup.seed = chosen.seed
    refuse_label(program, chosen, computed=True)  # the step's files have both names
    programs = Programs.of(program, chosen, list(calibration), feed_shapes, (), say)
    shapes = {name: tuple(shape) for name, shape in feed_shapes.items() if name not in chosen.values}
    asked = shapes.pop(programs.label.name, None)
    label = _label_shape(programs.label, programs.program, shapes, chosen)
    if asked not in (None, label):
        raise ArgumentError(
            f"{chosen.said('label')}: its shape is {list(label)}, by that of the inputs, and not {list(asked or ())}"
        )
    shapes[programs.label.name] = label
    optimizer = programs.compile(chosen, updates or 1)
    scope = Scope()
    Executor(CPUPlace()).run(programs.program.startup, scope=scope)
    if chosen.mode != "fp32":
        optimizer.amp_init(CPUPlace(), scope=scope, test_program=programs.evaluation, use_fp16_test=True)
    return programs.program.export_training(
        folder,
        place,
        shapes,
        outputs=[programs.prediction.name],
        test_program=programs.evaluation,
        scope=scope,
        portable=portable,
        overwrite=overwrite,
    )


def _with_batch(program: Program, shapes: Mapping[str, Sequence[int]], options: FitOptions) -> Program:
    """The program, freed of a fixed batch where ``shapes`` have another one.

    What the freed program gives is compared with what it gave before, on made-up samples.
    """
    fed = [v for v in program.inputs if v.readers and v.shape and v.name not in options.values]

    def samples(count: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(0)
        made = {v.name: rng.standard_normal((count, *_fixed(v)[1:])) for v in fed}
        return {
            v.name: made[v.name].astype(numpy_dtype(str(v.dtype)))
            if v.dtype in FLOATS
            else np.zeros_like(made[v.name], str(v.dtype))
            for v in fed
        }

    if fixed_batch(fed) is None:
        program = with_hidden_batch(program, fed, samples, options.values)
        fed = [program.var(v.name) for v in fed]
    batch = fixed_batch(fed)
    given = {v.name: tuple(shapes[v.name]) for v in fed if v.name in shapes}
    if batch is None or all(shape[:1] == (batch,) for shape in given.values()):
        return program
    found = freed(program, fed, samples(batch + 1), options.values)
    if isinstance(found, str):
        raise ArgumentError(
            f"the model was exported with a fixed batch of {batch}, which stays: {found}. Give that, or "
            "export it with a dynamic batch"
        )
    return found


def _fixed(variable: Variable) -> list[int]:
    return [size if isinstance(size, int) else 1 for size in variable.shape or ()]


def _label_shape(
    label: Variable, program: Program, shapes: Mapping[str, Sequence[int]], options: FitOptions
) -> tuple[int, ...]:
    """The shape of the label, whose open sizes are those of the inputs, the batch first."""
    known: dict[str, int] = {}
    for feed in program.inputs:
        given = shapes.get(feed.name)
        known |= {n: s for n, s in zip(feed.shape or (), given or (), strict=False) if isinstance(n, str)}
    batch = next((shape[0] for shape in shapes.values() if shape), None)
    found = []
    for axis, size in enumerate(label.shape or ()):
        number = size if isinstance(size, int) else known.get(size or "", batch if axis == 0 else None)
        if number is None:
            raise ArgumentError(
                f"the shape of {options.said('label')} is {list(label.shape or ())}; size {axis} is not known from "
                "the inputs; export the model with fixed sizes"
            )
        found.append(int(number))
    return tuple(found)
