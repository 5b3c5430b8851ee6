"""A training step run again: same program, feeds and state, nothing changed by it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from amp_transpiler.errors import ArgumentError, ArgumentTypeError, FeedError
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.lists import place_traits
from amp_transpiler.monitor.step_snapshot import as_state
from amp_transpiler.passes.lowering.lowering import lower
from amp_transpiler.passes.lowering.place import CPUPlace, Place, arithmetic_of
from amp_transpiler.passes.view.training_step import TrainingStep
from amp_transpiler.runtime import device_tensors
from amp_transpiler.runtime.binding import PlainStep, Step, needs_plain
from amp_transpiler.runtime.executor import Executor
from amp_transpiler.runtime.feeds import Feeds, shape_of
from amp_transpiler.runtime.given_executor import given_executor
from amp_transpiler.runtime.scope import Scope, check_scope
from amp_transpiler.runtime.session import Settings, create_session

Values = Mapping[str, Any]


class Rerun:
    """Runs parts of a step on values of ``scope``, ``before`` instead of what it holds where that names a variable.

    The scope is left alone: no update is computed. Sessions are kept for as long as this lives.
    """

    def __init__(
        self, feed: Values | None, scope: Scope | None, executor: Executor | None, before: Values | None
    ) -> None:
        if executor is not None:
            executor = given_executor(executor, "executor: expected an amp.Executor")
        for name, given in (("feed", feed), ("before", before)):
            if given is not None and not isinstance(given, Mapping):
                raise ArgumentTypeError(f"{name} is {given!r:.80}; expected a mapping from names to values")
        self.feed = {key.name if isinstance(key, Variable) else key: value for key, value in (feed or {}).items()}
        self.place: Place = CPUPlace() if executor is None else executor.place
        self.settings = Settings() if executor is None else executor.settings
        self.scope = Scope()
        self.scope.hold(check_scope(scope).ort_values)
        self.change(before or {})
        self._steps: dict[Any, tuple[Graph, Feeds, Step | PlainStep]] = {}

    def change(self, values: Values) -> None:
        """Let variables of the scope have other values from now on. ArgumentError for one that it does not have."""
        for name, value in values.items():
            if not self.scope.has_var(name):
                raise ArgumentError(f"'{name}' is no variable of the scope, so the step had no value of it before")
            old = self.scope.ort_values[name]
            self.scope.set_var(name, as_state(name, value, device_tensors.to_array(old)))

    def run(self, program: Graph, names: Sequence[str], keep_fp32: Collection[str] = frozenset()) -> list[Any]:
        """The values of variables; those in ``keep_fp32`` are held in fp32 (see ``passes.lowering.lower``).

        What is persistable has its value before the step.
        """
        computed = list(dict.fromkeys(n for n in names if program.var(n).producer is not None))
        found = dict(zip(computed, self._compute(program, computed, keep_fp32), strict=True)) if computed else {}
        return [found[name] if name in found else self.source(program.var(name)) for name in names]

    def source(self, variable: Variable) -> Any:
        """The value of a feed, a persistable variable or a constant."""
        if variable.is_constant:
            return as_array(variable.data)
        if variable.persistable:
            return self.scope.find_var(variable.name)
        value = self.feed.get(variable.name)
        if value is None:
            raise FeedError(f"program '{variable.program.name}' needs the input '{variable.name}', which is not fed")
        return device_tensors.to_array(value) if hasattr(value, "device_name") else np.asarray(value)

    def _compute(self, program: Graph, names: Sequence[str], keep_fp32: Collection[str]) -> list[Any]:
        key = (program.name, id(program), program.version, tuple(names), frozenset(keep_fp32))
        if key not in self._steps:
            self._steps[key] = (program, *self._compile(program, names, keep_fp32))
        _, feeds, step = self._steps[key]
        return step.run(self.scope, feeds.check(self.feed), True)

    def _compile(
        self, program: Graph, names: Sequence[str], keep_fp32: Collection[str]
    ) -> tuple[Feeds, Step | PlainStep]:
        targets = [program.var(name) for name in names]
        feeds = Feeds(program, targets)
        fed = feeds.check(self.feed)
        feeds.check_shapes(fed)
        shapes = {name: shape_of(value) for name, value in fed.items() if program.var(name).dtype is not None}
        # Arithmetic in fp32 is that of the lowering for CPU, which runs as well on a device with 64-bit integers.
        kind, place = ("cpu" if keep_fp32 else self.place.kind), self.place
        arithmetic = arithmetic_of(self.place)
        lowered = lower(program, kind, shapes, targets, updates=False, keep_fp32=keep_fp32, arithmetic=arithmetic)
        settings, traits = self.settings, place_traits(place.kind)
        if keep_fp32 and traits.device:
            settings = Settings(settings.optimization_level, settings.threads, settings.tf32, allow_cpu_fallback=True)
            place = place if traits.wide_integers else CPUPlace()
        session, _ = create_session(lowered.model, place, settings, program.name)
        startup = program.startup.name if program.startup is not None else ""
        if needs_plain(lowered):
            return feeds, PlainStep(session, lowered, place, program.name, startup)
        return feeds, Step(session, None, lowered, place, program.name, startup)

    def is_bad(self, parts: TrainingStep, keep_fp32: Collection[str] = frozenset()) -> bool:
        """Whether the step is bad: a found_inf that is true, or a number among what is tested that is not finite."""
        found_infs = [check.found_inf for check in parts.checks]
        names = [v.name for v in ([*found_infs, *parts.losses] if found_infs else parts.tested) if v is not None]
        return any(map(is_bad, self.run(parts.program, names, keep_fp32)))


def is_bad(value: Any) -> bool:
    """Whether a fetched found_inf is true, or a fetched number not finite."""
    return bool(value.any()) if value.dtype == bool else is_nonfinite(value)


def is_nonfinite(value: Any) -> bool:
    """Whether an array holds NaN or infinity."""
    array = np.asarray(value)
    return array.dtype.kind not in "biuOSU" and not bool(np.isfinite(array.astype(np.float64)).all())
