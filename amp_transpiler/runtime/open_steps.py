"""Compiled programs whose session serves feeds of several sizes.

The first sizes that a program is fed get a session of their own. With others the model is opened
(:mod:`~amp_transpiler.passes.lowering.open_sizes`), and one session serves these and all that follow: what is left of a
new feed shape is to lower the program for it. That session must compute what the first one computes; where onnxruntime
makes other kernels of an open model, every shape gets a session of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property

import onnx

from amp_transpiler.errors import ExecutionError, PlaceError
from amp_transpiler.passes.lowering.computations import computations
from amp_transpiler.passes.lowering.exchanges import has_exchanges
from amp_transpiler.passes.lowering.lowered import Lowered
from amp_transpiler.passes.lowering.open_sizes import OpenModel, Sized
from amp_transpiler.passes.lowering.parts import WHOLE
from amp_transpiler.passes.lowering.size_check import Inferred, SizeCheck, watched
from amp_transpiler.runtime.binding import Step

#: Bytes of a model with its constants up to which it is kept for those that are like it, and how many are.
LARGEST, KEPT = 64 << 20, 32

#: Makes a step of a model, with the ports of a lowered one, and gives the graph that it really runs (None: unknown).
Make = Callable[[onnx.ModelProto, Lowered], tuple[Step, onnx.GraphProto | None]]
#: The shapes of a model's outputs. Raises what making a session raises of one whose sizes do not fit together.
Check = Callable[[onnx.ModelProto], Mapping[str, Inferred]]


class _Alike:
    """Models that are alike, the first of them with the graph that its session runs."""

    def __init__(self, first: Lowered, graph: onnx.GraphProto) -> None:
        self.model, self.given, self.graph = first.model, first.given, graph  # the rest would keep the program alive
        self.open: OpenModel | None = None
        self.step: Step | None = None
        self.closed = False  # what is not served yet gets sessions of its own
        self.size_check: SizeCheck | None = None

    @cached_property
    def samples(self) -> list[Sized]:
        """What the model is opened for; found when there are others, for a program may be fed one shape alone."""
        return [Sized(self.model, self.given)]

    def served(self, sized: Sized, lowered: Lowered, make: Make, check: Check) -> Step | None:
        """The step for one more of them; None where it needs a session of its own.

        What does not fit is refused here: an open model would be refused in the middle of a step.
        """
        inputs = None if self.open is None else self.open.inputs(sized)
        if inputs is not None:
            self._check_sizes(sized, check)
        elif not self.closed:
            opened = OpenModel([*self.samples, sized])
            step = self._made(opened, sized, lowered, make, check)
            self.closed = step is None
            if step is not None:
                self.samples.append(sized)
                self.open, self.step, inputs = opened, step, opened.inputs(sized)
        return None if inputs is None or self.step is None else self.step.resized(lowered, inputs)

    def _check_sizes(self, sized: Sized, check: Check) -> None:
        """Raise where the sizes of a model that the open one serves do not fit."""
        if self.size_check is not None and self.size_check.serves:
            with suppress(ExecutionError, PlaceError):
                if self.size_check.fits(check(self.size_check.part(sized))):
                    return
        check(sized.model)  # it says what is wrong with the whole

    def _made(self, opened: OpenModel, sized: Sized, lowered: Lowered, make: Make, check: Check) -> Step | None:
        if opened.model is None:
            return None
        models = [self.model, sized.model] if self.size_check is None else [sized.model]
        shapes = [] if self.size_check is None else self.size_check.shapes
        size_check = SizeCheck(opened, shapes + [_shapes(model, check) for model in models])
        if not size_check.serves:
            check(sized.model)
        self.size_check = size_check
        try:
            step, graph = make(opened.model, lowered)
        except (ExecutionError, PlaceError):
            return None
        known = opened.known(self.samples[0])
        return step if graph is not None and computations(graph, known) == computations(self.graph, {}) else None


class OpenSteps:
    """The steps of one plan."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.known: list[_Alike] = []

    def step(self, lowered: Lowered, make: Make, check: Check) -> Step:
        """The step for what was lowered: with a session that is there, if one serves it."""
        found: _Alike | None = None
        with self.lock:
            if self.known:
                sized = Sized(lowered.model, lowered.given, self.known[-1].samples[-1])
                found = next((each for each in self.known if each.samples[0].alike(sized)), None)
                step = None if found is None else found.served(sized, lowered, make, check)
                if step is not None:
                    return step
        step, graph = make(lowered.model, lowered)
        if found is None and graph is not None and _is_small(lowered.model) and not has_exchanges(lowered.model):
            with self.lock:
                self.known = [*self.known[1 - KEPT :], _Alike(lowered, graph)]
        return step


def _shapes(model: onnx.ModelProto, check: Check) -> Mapping[str, Inferred]:
    """What onnxruntime infers of what the nodes of a model make; nothing where it refuses that."""
    with suppress(ExecutionError, PlaceError):
        return check(watched(model))
    return {}


def _is_small(model: onnx.ModelProto) -> bool:
    return len(model.graph.node) <= WHOLE and sum(tensor.ByteSize() for tensor in model.graph.initializer) <= LARGEST
