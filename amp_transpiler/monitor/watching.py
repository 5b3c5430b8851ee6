"""``amp.watch``: an executor that names the culprit of every bad step."""

from __future__ import annotations

import math
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from amp_transpiler.errors import ArgumentError, ArgumentTypeError, NonFiniteError
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.monitor.culprit import Culprit, find_culprit
from amp_transpiler.monitor.rerun import is_bad
from amp_transpiler.option_checks import is_whole
from amp_transpiler.passes.view.training_step import training_step
from amp_transpiler.program import Program, default_main_program
from amp_transpiler.runtime import device_tensors
from amp_transpiler.runtime.collective.current import several
from amp_transpiler.runtime.executor import Executor
from amp_transpiler.runtime.scope import Scope, check_scope

OnBad = Literal["warn", "raise"] | Callable[[Culprit | None], None]


def watch(executor: Executor, on_bad: OnBad = "warn", *, cures: bool = False, limit: int | None = None) -> Watch:
    """An executor that runs programs as ``executor`` does and, on a bad step alone, runs it again to name the culprit::

        exe = amp.watch(amp.Executor(amp.CPUPlace()), on_bad="raise")
        exe.run(main, feed=feed, fetch_list=[loss])

    A good step costs the fetch of found_inf and the losses, and copies of the loss scale and the randomness counter.
    A loss that is not finite counts as a bad step, though its gradients may be good. Programs that update nothing are
    just run.

    Args:
        executor: an ``amp.Executor``.
        on_bad: "warn" with the report, "raise" NonFiniteError (the bad step is over then, and the scope as it left
            it), or a function that is given the Culprit (None: run again, the step was good).
        cures: see :func:`find_culprit`; sessions are compiled for what is tried.
        limit: run this many bad steps again at most (an initial scale that is too high has many), None: all.

    ArgumentTypeError, ArgumentError: an argument of another kind.
    """
    return Watch(executor, on_bad, cures=cures, limit=limit)


class Watch:
    """What :func:`watch` returns. ``bad_steps`` counts bad steps, ``culprits`` holds the reports on them."""

    def __init__(
        self, executor: Executor, on_bad: OnBad = "warn", *, cures: bool = False, limit: int | None = None
    ) -> None:
        if not isinstance(executor, Executor):
            raise ArgumentTypeError(f"watch takes an amp.Executor, got {executor!r}")
        if on_bad not in ("warn", "raise") and not callable(on_bad):
            raise ArgumentError(f"watch: on_bad is {on_bad!r}; expected 'warn', 'raise' or a function")
        if limit is not None and (not is_whole(limit) or limit < 0):
            raise ArgumentError(f"watch: limit is {limit!r}; expected a number of steps, or None")
        self.executor, self.on_bad, self.cures, self.limit = executor, on_bad, cures, limit
        self.bad_steps = 0
        self._lock = threading.RLock()
        self.culprits: list[Culprit | None] = []
        self._watched: weakref.WeakKeyDictionary[Program, _Watched] = weakref.WeakKeyDictionary()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.executor, name)

    def run(
        self,
        program: Program | None = None,
        feed: Mapping[Any, Any] | None = None,
        fetch_list: Sequence[Any] | None = None,
        scope: Scope | None = None,
        return_numpy: bool = True,
    ) -> list[Any]:
        """As ``Executor.run``. NonFiniteError, with ``on_bad="raise"``: the step was bad; its results are lost."""
        program = default_main_program() if program is None else program
        watched = self._parts(program)
        if not watched.flags or not isinstance(fetch_list, (list, tuple, type(None))):
            return self.executor.run(program, feed, fetch_list, scope, return_numpy)
        scope = check_scope(scope)
        names = [item.name if isinstance(item, Variable) else item for item in fetch_list or ()]
        extra = [flag for flag in watched.flags if flag not in names]
        bad, culprit = False, None
        with scope.writing():  # the step that is run again is the one that was bad, whatever other threads run
            before = {name: scope.find_var(name) for name in watched.changed if scope.has_var(name)}
            watched.begin(scope)
            results = self.executor.run(program, feed, [*(fetch_list or ()), *extra], scope, return_numpy)
            found = {n: value for n, value in zip([*names, *extra], results, strict=True) if isinstance(n, str)}
            if any(_is_bad(found[flag]) for flag in watched.flags) and not watched.reported:
                watched.reported = watched.counter != ""
                bad = self._counted()
            if bad:
                before |= watched.sums(scope)
                culprit = find_culprit(program, feed, scope, executor=self.executor, before=before, cures=self.cures)
                self.culprits.append(culprit)
        if bad:
            self._tell(program, culprit)
        return results[: len(names)]

    def _parts(self, program: Program) -> _Watched:
        watched = self._watched.get(program)
        if watched is None or watched.version != program.version:
            watched = self._watched[program] = _Watched(program)
        return watched

    def _counted(self) -> bool:
        """Count a bad step; whether it is to be run again."""
        with self._lock:
            self.bad_steps += 1
            return self.limit is None or len(self.culprits) < self.limit

    def _tell(self, program: Program, culprit: Culprit | None) -> None:
        if callable(self.on_bad):
            self.on_bad(culprit)
            return
        message = f"a step of program '{program.name}' is bad: {culprit or _nothing_found()}"
        if self.on_bad == "raise":
            raise NonFiniteError(message, culprit)
        warnings.warn(message, RuntimeWarning, stacklevel=3)


class _Watched:
    """What is fetched and kept of one program; names alone, so that the program is not kept alive."""

    def __init__(self, program: Program) -> None:
        self.version = program.version
        parts = training_step(program)
        found_inf: Variable | None = parts.found_inf
        flags = [*([found_inf] if found_inf is not None else []), *parts.losses]
        self.flags = [v.name for v in flags] if program.updates else []
        changed = (parts.scale, parts.rng_step)  # the counters of the scale do not change what the step computes
        self.changed = [v.name for v in changed if v is not None and v.persistable]
        self.counter = "" if parts.accumulation is None else parts.accumulation.counter.name
        self._sums = [total.name for total in parts.sums]
        #: Whether the window of micro-batches that is under way is known to be bad.
        self.reported = False

    def begin(self, scope: Scope) -> None:
        """Before a run: the first micro-batch of a window begins anew."""
        if self.counter and scope.has_var(self.counter) and not scope.find_var(self.counter):
            self.reported = False

    def sums(self, scope: Scope) -> dict[str, np.ndarray]:
        """Sums of gradients as they were before a window became bad, as far as that matters: finite."""
        return {name: np.zeros_like(scope.find_var(name)) for name in self._sums}


def _nothing_found() -> str:
    """What is said of a step that has no culprit, on this rank."""
    engine = several()
    on = "" if engine is None else f" on rank {engine.rank}; see what the other ranks say"
    return f"run again, every number was finite{on}"


def _is_bad(flag: Any) -> bool:
    value = device_tensors.to_array(flag) if hasattr(flag, "device_name") else flag
    if value.size == 1:
        number = value.item()
        return number if isinstance(number, bool) else not math.isfinite(number)
    return is_bad(value)
