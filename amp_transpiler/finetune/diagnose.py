"""Why a loss or its gradients are not finite: the model as it was given, its precision, or the steps. The data was
tried before."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from amp_transpiler.errors import NonFiniteError
from amp_transpiler.finetune.options import FitOptions
from amp_transpiler.finetune.programs import Programs
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.ir.types import FLOATS
from amp_transpiler.monitor import Culprit
from amp_transpiler.program import Program

Feed = Mapping[str, np.ndarray]
LossOf = Callable[[Program, Feed], float]


def model_fault(programs: Programs, feeds: Iterable[Feed], loss: LossOf) -> NonFiniteError | None:
    """The error for a model that is not finite before it is trained; None where it is.

    ``feeds``: the first batches; ``loss`` runs an evaluation program with the initial weights on one.
    """
    broken = _broken_weight(programs.program)
    if broken:
        return NonFiniteError(f"the model itself is at fault, not the training: {broken}. Nothing was written")
    found = next((value for feed in feeds if not math.isfinite(value := loss(programs.reference, feed))), None)
    if found is None:
        return None
    return NonFiniteError(
        f"the model as it was given is at fault, not the training: before the first step, in fp32, "
        f"its loss is {found} on this data, which is finite (its output leaves the range of numbers, "
        "or the loss does not fit what it puts out). Nothing was written"
    )


def training_fault(
    programs: Programs, options: FitOptions, feeds: Iterable[Feed], loss: LossOf, where: str
) -> NonFiniteError:
    """The error for a training of a finite model whose loss is not finite ``where``."""
    batches = list(feeds)
    first = sum(loss(programs.reference, feed) for feed in batches) / len(batches)
    if options.mode != "fp32" and not all(math.isfinite(loss(programs.evaluation, feed)) for feed in batches):
        return NonFiniteError(
            f"the loss is not finite {where}, because of {options.dtype}: before the first step it "
            f"is {first:.4g} in fp32, and not finite in {options.dtype}. Train with "
            f"{_way_out(options)}. Nothing was written"
        )
    warmup, clip = options.called("warmup_steps"), options.called("clip_norm")
    return NonFiniteError(
        f"the loss is not finite {where}. Before the first step it was {first:.4g}, and data and "
        f"model are finite, so the steps are too long: lower the learning rate "
        f"({options.said('lr')}), or try {warmup} or {clip}. Nothing was written"
    )


def gradient_fault(culprit: Culprit, options: FitOptions) -> NonFiniteError:
    """The error for gradients that are not finite with the weights as they were given, where the loss is."""
    return NonFiniteError(
        "the gradients are not finite with the weights as they were given, though the loss is: "
        f"{str(culprit).splitlines()[0]}. Let the model keep what that reads away from where it, or its slope, is "
        f"infinite, or freeze the layers before it ({options.called('freeze')}). Nothing was written"
    )


def _way_out(options: FitOptions) -> str:
    ways = [options.said("mode", "fp32"), f"{options.called('black_list')} for what overflows"]
    if options.dtype == "float16":
        ways.insert(0, options.said("dtype", "bfloat16"))
    return ", ".join(ways[:-1]) + f" or {ways[-1]}"


def _broken_weight(program: Program) -> str:
    """The first weight with a number that is not finite, in words."""
    for variable in program.variables:
        if variable.persistable and variable.data is not None and variable.dtype in FLOATS:
            array = np.asarray(as_array(variable.data), np.float32)
            wrong = ~np.isfinite(array)
            if wrong.any():
                place = [int(i) for i in np.unravel_index(int(np.argmax(wrong)), wrong.shape)]
                return f"its weight '{variable.name}' holds {array[tuple(place)]} at index {place}"
    return ""
