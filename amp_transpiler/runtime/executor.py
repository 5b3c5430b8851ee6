"""The executor: runs programs on a place, with their state in a scope."""

from __future__ import annotations

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import ArgumentError, ArgumentTypeError, ExecutionError, GraphError, OrderError, PlaceError, ScopeError
from ..ir import context
from ..ir.marks import INITIALIZER
from ..ir.program import OWN, Operator, Program, Variable, other_program
from ..ir.tensors import tensor_array
from ..passes.lowering import lower
from . import tensors
from .binding import PlainStep, Step, needs_plain
from .feeds import Feeds, shape_of
from .place import CPUPlace, CUDAPlace, Place, check_place
from .report import ReportRequest, expanded, joined, requested
from .scope import Scope, check_scope
from .session import Settings, create_session, require_cuda

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class MemoryReport:
    """How a program's updated variables are kept: in one buffer, or in two, and then why."""

    in_place: tuple[str, ...]
    two_buffers: dict[str, str]


@dataclass
class _Plan:
    """What a program does for one list of fetches; compiled once for each set of feed shapes.

    ``sources`` says for each fetch where it comes from: the number of a session output, or the name of a variable
    in the scope. ``outputs`` are the names of the session outputs. ``updates`` is what a run writes: True for the
    program's updates, or those of a run that does not end a window of accumulation.
    """

    updates: bool | dict[Variable, Variable]
    feeds: Feeds
    sources: list[int | str]
    outputs: list[str]
    runs: bool
    initialises: bool
    steps: OrderedDict[Shapes, Step | PlainStep] = field(default_factory=OrderedDict)
    last: Step | PlainStep | None = None


@dataclass
class _Cache:
    version: int
    plans: dict[tuple[tuple[str, ...], bool], _Plan] = field(default_factory=dict)
    last: _Plan | None = None


class Executor:
    """Runs programs on ``place`` (default ``CPUPlace()``).

    Sessions are compiled once per program, feed shapes and fetches, the last ``max_sessions`` of them per program and
    fetches; a program that changes is compiled anew, and one that is dropped is forgotten. ``optimization_level`` is
    onnxruntime's: "all", "extended", "basic" or "disable"; from "extended" on it may rearrange fp32 arithmetic between
    two roundings. ``threads`` within one operator (default: onnxruntime's choice). ``tf32`` lets CUDA round the
    operands of fp32 matrix products to 10 bits. On CUDA an operator without a kernel is an error, unless
    ``allow_cpu_fallback``; with it, and no usable device at all, programs run on ``CPUPlace()`` with a warning.

    PlaceError where CUDA is asked for and cannot be used.
    """

    def __init__(self, place: Place | None = None, *, optimization_level: str = "all", threads: int | None = None,
                 tf32: bool = False, allow_cpu_fallback: bool = False, max_sessions: int = 32) -> None:  # fmt: skip
        self.place: Place = CPUPlace() if place is None else check_place(place, "Executor")
        self.settings = Settings(optimization_level, threads, tf32, allow_cpu_fallback)
        if isinstance(max_sessions, bool) or not isinstance(max_sessions, int) or max_sessions < 1:
            raise ArgumentError(f"max_sessions is a number, at least 1; got {max_sessions!r}")
        self.max_sessions = max_sessions
        self._programs: weakref.WeakKeyDictionary[Program, _Cache] = weakref.WeakKeyDictionary()
        if isinstance(self.place, CUDAPlace):
            self._require_cuda(self.place)

    def _require_cuda(self, place: CUDAPlace) -> None:
        try:
            require_cuda(place)
        except PlaceError as error:
            if not self.settings.allow_cpu_fallback:
                raise
            warnings.warn(f"{error}. Running on CPUPlace()", stacklevel=3)
            self.place = CPUPlace()

    def run(self, program: Program | None = None, feed: Mapping[Any, Any] | None = None,
            fetch_list: Sequence[Variable | ReportRequest | str] | None = None, scope: Scope | None = None,
            return_numpy: bool = True) -> list[Any]:  # fmt: skip
        """Run ``program`` (default: the current main program) once, and return what ``fetch_list`` names, in its order.

        ``feed`` maps inputs, by name or variable, to arrays of exactly the declared element type and shape (sizes that
        are declared under one name must agree); Python numbers and lists take the declared type. ``fetch_list`` holds
        variables or names. A fetched persistable variable has its value *after* the run. Results are numpy arrays
        (ml_dtypes for bfloat16), or OrtValues on the executor's place with ``return_numpy=False``; they belong to the
        caller and later runs leave them alone. ``fetch_list`` may also hold an ``amp.StepReports``; a StepReport comes
        out in its place.

        State is read from and written to ``scope`` (default: ``global_scope()``). A run that raises leaves the scope as
        it was, with one exception: where onnxruntime itself fails in the middle of the updates, variables that
        :meth:`memory_report` lists as in place may be updated already. Ctrl-C takes effect after the step.

        Errors: FeedError and FeedTypeError (nothing has run), ScopeError where the startup program never ran or a
        variable has another type than the program declares, GraphError for an unknown fetch or a program that cannot
        be lowered, PlaceError for an operator without a kernel on the place, ExecutionError from onnxruntime.
        """
        program = _check_program(program)
        scope = check_scope(scope)
        if requested(fetch_list):
            on_host = return_numpy and self.place.kind == "cpu"  # there, an array is no copy more than what is bound
            results = self.run(program, feed, expanded(fetch_list), scope, on_host)
            return joined(results, fetch_list or (), return_numpy)
        names = _fetch_names(fetch_list)
        _check_home(program, fetch_list or ())
        window = program.window
        turn = 0 if window is None else int(scope.find_var(window.counter.name))
        plan = self._plan(program, names, window is not None and turn + 1 < window.steps)
        feeds = plan.feeds.check(feed)
        if plan.initialises:
            return self._initialise(program, plan, feeds, scope, return_numpy)
        results = self._run(program, plan, feeds, scope, return_numpy)
        if window is not None:
            scope.set_var(window.counter.name, np.array((turn + 1) % window.steps, np.int32))
        return results

    def memory_report(self, program: Program | None = None) -> MemoryReport:
        """Which updated variables the last run of ``program`` kept in place. OrderError where it never ran."""
        program = _check_program(program)
        cache = self._programs.get(program)
        step = cache.last.last if cache is not None and cache.last is not None else None
        if step is None:
            raise OrderError(f"program '{program.name}' has not been run by this executor; run it once first")
        return MemoryReport(
            tuple(u.name for u in step.updates if not u.refusal), {u.name: u.refusal for u in step.updates if u.refusal}
        )

    def close(self) -> None:
        """Free every session. The executor can still be used, and compiles anew."""
        self._programs.clear()

    # -- compiling ------------------------------------------------------------------------------------
    def _plan(self, program: Program, names: tuple[str, ...], spread: bool = False) -> _Plan:
        cache = self._programs.get(program)
        if cache is None or cache.version != program.version:
            cache = self._programs[program] = _Cache(program.version)
        plan = cache.plans.get((names, spread))
        if plan is None:
            plan = cache.plans[names, spread] = _make_plan(program, names, spread)
        cache.last = plan
        return plan

    def _step(self, program: Program, plan: _Plan, feeds: Mapping[str, Any]) -> Step | PlainStep:
        key = tuple((name, shape_of(value)) for name, value in sorted(feeds.items()))
        step = plan.steps.get(key)
        if step is None:
            plan.feeds.check_shapes(feeds)
            try:
                step = self._compile(program, plan, dict(key))
            except (GraphError, ExecutionError) as error:
                raise type(error)(f"{error}{_fed(key)}") from None
            plan.steps[key] = step
            if len(plan.steps) > self.max_sessions:
                plan.steps.popitem(last=False)
        elif step is not plan.last:
            plan.steps.move_to_end(key)
        plan.last = step
        return step

    def _compile(self, program: Program, plan: _Plan, shapes: dict[str, tuple[int, ...]]) -> Step | PlainStep:
        tensors_fed = {name: shape for name, shape in shapes.items() if program.var(name).dtype is not None}
        fetches = [program.var(name) for name in plan.outputs]
        lowered = lower(program, self.place.kind, tensors_fed, fetches, plan.updates)
        in_place = bool(lowered.updates) and not plan.initialises
        session, graph = create_session(lowered.model, self.place, self.settings, program.name, keep_graph=in_place)
        startup = program.startup.name if program.startup is not None else ""
        if needs_plain(lowered):
            return PlainStep(session, lowered, self.place, program.name, startup)
        return Step(session, graph, lowered, self.place, program.name, startup)

    # -- running --------------------------------------------------------------------------------------
    def _run(
        self, program: Program, plan: _Plan, feeds: Mapping[str, Any], scope: Scope, return_numpy: bool
    ) -> list[Any]:
        results: list[Any] = []
        if plan.runs:
            results = self._step(program, plan, feeds).run(scope, feeds, return_numpy)
        return [
            results[s] if isinstance(s, int) else self._state(program, scope, s, return_numpy) for s in plan.sources
        ]

    def _state(self, program: Program, scope: Scope, name: str, return_numpy: bool) -> Any:
        value = scope._values.get(name)
        if value is None:
            raise ScopeError(
                f"the fetched variable '{name}' of program '{program.name}' is not in the scope; run its startup "
                "program first, into this scope"
            )
        return tensors.to_array(value) if return_numpy else tensors.copy_to(value, self.place)

    def _initialise(self, program: Program, plan: _Plan, feeds: Mapping[str, Any], scope: Scope,
                    return_numpy: bool) -> list[Any]:  # fmt: skip
        """Run a program whose operators write persistable variables. Arrays are copied, the rest is one session.

        Nothing of it is kept: a startup program runs once. The scope changes when all of it is done.
        """
        staged = Scope()
        staged._values.update(scope._values)
        arrays = [variable for op in program.operators if (variable := _array(op)) is not None]
        for variable in arrays:
            staged._values[variable.name] = tensors.from_array(tensor_array(variable), self.place)
        if len(arrays) < len(program.operators):
            rest = program.clone() if arrays else program
            for op in rest.operators:
                if _array(op) is not None:
                    rest.remove_operator(op)
            results = self._run(rest, plan, feeds, staged, return_numpy)
            plan.steps.clear()
            plan.last = None
        else:
            results = [self._state(program, staged, str(name), return_numpy) for name in plan.sources]
        scope._values.update(staged._values)
        return results


def _make_plan(program: Program, names: tuple[str, ...], spread: bool) -> _Plan:
    updates = program.window.updates if spread and program.window is not None else program.updates
    fetched = {name: _fetched(program, name) for name in names}
    outputs = [name for name, variable in fetched.items() if not variable.persistable]
    number = {name: index for index, name in enumerate(outputs)}
    written = [v for v in program.variables if v.persistable and v.producer is not None]
    targets = [*(fetched[name] for name in outputs), *written, *updates.values()]
    return _Plan(
        updates=dict(updates) if spread else True,
        feeds=Feeds(program, targets),
        sources=[number.get(name, name) for name in names],
        outputs=outputs,
        runs=bool(targets),
        initialises=bool(written),
    )


def _array(op: Operator) -> Variable | None:
    """The variable that a startup operator sets to content that lies on it; None for another operator."""
    return op.output(0) if op.type == INITIALIZER and op.domain == OWN else None


def _fetched(program: Program, name: str) -> Variable:
    try:
        return program.var(name)
    except GraphError as error:
        raise GraphError(f"fetch_list: {error}") from None


def _fetch_names(fetch_list: Sequence[Variable | ReportRequest | str] | None) -> tuple[str, ...]:
    if fetch_list is None:
        return ()
    if isinstance(fetch_list, (str, Variable)) or not isinstance(fetch_list, Sequence):
        raise ArgumentTypeError(
            f"fetch_list is a list of variables or names; got {fetch_list!r}, write [{fetch_list!r}]"
        )
    names = tuple(item.name if isinstance(item, Variable) else item for item in fetch_list)
    wrong = [name for name in names if not isinstance(name, str)]
    if wrong:
        raise ArgumentTypeError(f"fetch_list holds variables or names, got {wrong[0]!r}")
    return tuple(str(name) for name in names)


def _check_home(program: Program, fetch_list: Sequence[Variable | ReportRequest | str]) -> None:
    """GraphError for a variable of another program that has no counterpart of its name in ``program``."""
    for item in fetch_list:
        if isinstance(item, Variable) and not program.has_var(item.name):
            raise GraphError(
                f"fetch_list: variable '{item.name}' belongs to {other_program(item.program, program)}; program "
                f"'{program.name}', which is run, has no variable of that name"
            )


def _fed(shapes: Shapes) -> str:
    """What was fed, for a program that does not take these shapes together."""
    if len(shapes) < 2:
        return ""
    listed = ", ".join(f"'{name}' {list(shape)}" for name, shape in shapes)
    return f". Fed were {listed}: sizes that belong together, such as that of the batch, must be equal"


def _check_program(program: Program | None) -> Program:
    if program is None:
        return context.default_main_program()
    if not isinstance(program, Program):
        raise ArgumentTypeError(f"expected a Program to run, got {program!r}")
    return program
