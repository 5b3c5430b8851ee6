"""The executor: runs programs on a place, with their state in a scope."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from amp_transpiler.errors import ArgumentError, ExecutionError, GraphError, OrderError, PlaceError
from amp_transpiler.ir.gc_pause import collector_paused
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.lists import place_traits
from amp_transpiler.lists.paddle import paddle_arguments, paddle_attributes
from amp_transpiler.option_checks import whole
from amp_transpiler.passes.lowering.lowered import Lowered
from amp_transpiler.passes.lowering.lowering import lower
from amp_transpiler.passes.lowering.place import CPUPlace, Place, arithmetic_of, cores_of
from amp_transpiler.program import Program
from amp_transpiler.runtime.begun import begin, warn_of_shared
from amp_transpiler.runtime.binding import PlainStep, Step, needs_plain
from amp_transpiler.runtime.capture import CapturedStep, check_capturable
from amp_transpiler.runtime.collective.current import own_place, own_rank, own_size
from amp_transpiler.runtime.forks import OfOneProcess
from amp_transpiler.runtime.host_tables import HostTables
from amp_transpiler.runtime.largest_feeds import Shapes, largest_feeds
from amp_transpiler.runtime.locks import Uninterrupted
from amp_transpiler.runtime.missing import require
from amp_transpiler.runtime.plan import (
    Plan,
    Plans,
    Session,
    Tables,
    check_home,
    drop_oldest,
    fed_together,
    fetch_names,
    given_program,
    make_plan,
    names_of,
    next_micro_step,
    shapes_of,
    thrashes,
)
from amp_transpiler.runtime.report import ReportRequest, expanded, joined, requested
from amp_transpiler.runtime.scope import Scope, check_scope
from amp_transpiler.runtime.session import Settings, check_model, create_session, release_behind, release_memory
from amp_transpiler.runtime.session_cache import SessionCache
from amp_transpiler.runtime.shards import Sent, run_updates, settle
from amp_transpiler.runtime.staging import Prefetch, staged
from amp_transpiler.runtime.startup_run import startup_parts, startup_settings
from amp_transpiler.runtime.states import fetched_state
from amp_transpiler.warn import warn_user


@dataclass(frozen=True)
class MemoryReport:
    """How a program's updated variables are kept: in one buffer, or in two, and then why."""

    in_place: tuple[str, ...]
    two_buffers: dict[str, str]


class Executor(OfOneProcess):
    """Runs programs on ``place``, a place or its kind ("cuda"); ``CPUPlace()`` by default.

    Programs are compiled once per feed shapes and fetches, into the last ``max_sessions`` sessions per program and
    fetches (a warning says so when one is dropped); a program that changes is compiled anew, and one that is dropped
    is forgotten. On CPU one session serves every shape where a program neither updates state nor holds operators of
    this package, and of other programs a second one serves most shapes after the first: those are lowered alone, and
    128 times ``max_sessions`` shapes are kept.
    ``optimization_level`` is onnxruntime's: "all", "extended", "basic" or "disable"; from "extended" on it may
    rearrange fp32 arithmetic between two roundings. ``threads`` within one operator (default: onnxruntime's
    choice). ``tf32`` lets CUDA round the operands of fp32 matrix products to 10 bits; 16-bit convolutions take tensor
    cores without it where a program has no such product, and else are slower. On a GPU an operator without a kernel is
    an error, unless ``allow_cpu_fallback``; with it, and no usable device at all, programs run on ``CPUPlace()`` with a
    warning.

    ``cache_dir`` names a folder in which the models of sessions are kept as onnxruntime has optimised them: a program
    that was run before then starts in half the time, also in another process. It holds at most 1 GiB, what was
    used longest ago goes first, and may be removed at any time. Name a folder that nobody else writes into. On WebGPU
    models with convolutions are not kept (a warning says so).

    ``cuda_graph``: steps are captured as CUDA graphs, one for each signature, scope and thread, and launched as one
    from then on, which saves what launching their kernels one by one takes. The first run of a signature runs the step
    four times, three of them without effect, and nothing else may use CUDA meanwhile. A program that cannot be
    captured is a PlaceError that says why; startup programs run once and are not captured.

    Threads may share an executor, and several executors a scope: no update is lost. The first run of a signature
    (program, fetches, feed shapes) makes its session while others that need it wait; sessions of other signatures are
    made at the same time. Runs go on side by side in different scopes, and in one scope where they write nothing; a
    step that updates a scope has it for itself (see :class:`Scope`). A program must not be changed while it runs:
    build and rewrite it first, in one thread. A process that ``os.fork`` makes compiles anew; fork while no other
    thread runs anything, and let the child end by ``os._exit``, as multiprocessing's do (onnxruntime 1.31 hangs else).

    ``host_tables``: sparse tables, variables or names, that stay in host memory with their master weights and moments;
    a step takes the rows that it looks up to the place, each once, and brings changed ones back unless it was bad.

    PlaceError where a GPU is asked for and cannot be used.
    """

    @paddle_arguments()
    def __init__(
        self,
        place: Place | str | None = None,
        *,
        optimization_level: str = "all",
        threads: int | None = None,
        tf32: bool = False,
        allow_cpu_fallback: bool = False,
        max_sessions: int = 32,
        cache_dir: str | os.PathLike[str] | None = None,
        cuda_graph: bool = False,
        host_tables: Collection[Variable | str] = (),
    ) -> None:
        self.place: Place = CPUPlace() if place is None else own_place(place, "Executor: place")
        cache = None if cache_dir is None else SessionCache(cache_dir)
        self.settings = Settings(optimization_level, threads, tf32, allow_cpu_fallback, cache, cuda_graph)
        if cuda_graph and (self.place.kind != "cuda" or allow_cpu_fallback):
            found = "allow_cpu_fallback lets operators leave it" if allow_cpu_fallback else f"the place is {self.place}"
            raise ArgumentError(f"cuda_graph=True is for programs that run on a CUDAPlace alone; {found}")
        whole("Executor: max_sessions", max_sessions, 1)
        self.max_sessions = max_sessions
        tables = names_of(tuple(host_tables) if isinstance(host_tables, Set) else host_tables, "Executor: host_tables")
        host = Executor(optimization_level=optimization_level, threads=threads) if tables else None
        self._host_tables = None if host is None else HostTables(tables, host.run)
        self._tables = Tables()
        self._require(self.place)

    def _require(self, place: Place) -> None:
        try:
            require(place)
        except PlaceError as error:
            if not self.settings.allow_cpu_fallback:
                raise
            warn_user(f"{error.found}. Running on CPUPlace()")
            self.place = CPUPlace()

    if not TYPE_CHECKING:  # to a type checker an unknown name is an error
        __getattr__ = paddle_attributes("amp_transpiler.Executor")

    @paddle_arguments("Executor.run")
    def run(
        self,
        program: Program | None = None,
        feed: Mapping[Any, Any] | None = None,
        fetch_list: Sequence[Variable | ReportRequest | str] | None = None,
        scope: Scope | None = None,
        return_numpy: bool = True,
    ) -> list[Any]:
        """Run ``program`` (default: the current main program) once, and return what ``fetch_list`` names, in its order.

        ``feed`` maps inputs, by name or variable, to arrays of exactly the declared element type and shape (sizes
        that are declared under one name must agree); Python numbers and lists take the declared type. ``fetch_list``
        holds variables or names. A fetched persistable variable has its value *after* the run. What is fetched has
        the element type that it was declared with: a 16-bit rewriting changes its values (every one a number of 16
        bit), not the type in which they come out; ``scope.find_var`` gives a parameter as it is stored. Results are
        numpy arrays (ml_dtypes for bfloat16), or OrtValues on the executor's place with ``return_numpy=False``; they
        belong to the caller and later runs leave them alone. ``fetch_list`` may also hold an ``amp.StepReports``; a
        StepReport comes out in its place.

        State is read from and written to ``scope`` (default: ``global_scope()``). A run that raises leaves the scope as
        it was, with one exception: where onnxruntime itself fails in the middle of the updates, variables that
        :meth:`memory_report` lists as in place may be updated already. Ctrl-C, and a SIGTERM that Python handles,
        take effect after the step.

        Errors: FeedError and FeedTypeError (nothing has run), ScopeError where the startup program never ran or a
        variable has another type than the program declares, GraphError for an unknown fetch or a program that cannot
        be lowered, PlaceError for an operator without a kernel on the place, ExecutionError from onnxruntime.
        """
        program = given_program(program)
        scope = check_scope(scope)
        if requested(fetch_list):
            on_host = return_numpy and self.place.kind == "cpu"  # there, an array is no copy more than what is bound
            with scope.writing():  # reports are numbered in the order of the steps
                results = self.run(program, feed, expanded(fetch_list), scope, on_host)
                return joined(results, fetch_list or (), return_numpy)
        names = fetch_names(fetch_list)
        check_home(program, fetch_list or ())
        if self._host_tables is not None and self._host_tables.keep(program):
            return self._host_tables.run(self.run, program, feed or {}, names, scope, return_numpy)
        # Sessions are made before the scope is taken, so that those of other shapes are made side by side.
        window = program.accumulation
        micro_step = next_micro_step(window, scope)
        plan, feeds, step = self._ready(program, names, feed, micro_step)
        if plan.initialises:
            return self._initialise(program, plan, feeds, scope, return_numpy)
        if not plan.writes:
            with scope.reading():
                return self._run(program, plan, step, feeds, scope, return_numpy)
        with scope.writing(), Uninterrupted():
            warn_of_shared(program, plan, scope)
            if window is not None:
                now = next_micro_step(window, scope)
                if now != micro_step:  # another thread has taken it
                    plan, feeds, step = self._ready(program, names, feed, now)
                results = self._run(program, plan, step, feeds, scope, return_numpy)
                scope.set_var(window.counter.name, np.array((now + 1) % window.steps, np.int32))
                return results
            return self._run(program, plan, step, feeds, scope, return_numpy)

    def stage(self, feed: Mapping[Any, Any]) -> dict[Any, Any]:
        """The feed with its arrays copied to the place: what :meth:`run` takes as well, without a copy in the step.

        Python numbers and strings stay as they are. Checks of names, types and shapes are the run's.
        """
        return staged(feed, self.place)

    def prefetch(self, batches: Iterable[Mapping[Any, Any]], ahead: int = 1) -> Prefetch:
        """The feeds of ``batches``, each staged (:meth:`stage`) by a thread while earlier ones are run::

            for feed in exe.prefetch(batches):
                exe.run(program, feed, [loss])

        At most ``ahead`` of them lie on the place before they are asked for. A batch may be written over as soon as the
        next one is asked for: what is staged is a copy, on every place. An error of ``batches`` is raised where its
        batch would have come. A loop that is left early drops what is staged; ``close()``, or the end of
        ``with exe.prefetch(batches) as feeds: ...``, waits for the batch that is being made.
        """
        return Prefetch(batches, self.stage, ahead)

    def memory_report(self, program: Program | None = None) -> MemoryReport:
        """Which updated variables the last run of ``program`` kept in place. OrderError where it never ran."""
        program = given_program(program)
        cache = self._tables.programs.get(program)
        step = cache.last.last if cache is not None and cache.last is not None else None
        if step is None:
            raise OrderError(f"program '{program.name}' has not been run by this executor; run it once first")
        return MemoryReport(
            tuple(name for u in step.updates if not u.refusal for name in u.names),
            {name: u.refusal for u in step.updates if u.refusal for name in u.names},
        )

    def close(self) -> None:
        """Free every session, and the memory that no other executor uses. This one still runs, and compiles anew."""
        with self._tables.lock:
            self._tables.programs.clear()
        release_memory()

    # -- compiling ------------------------------------------------------------------------------------
    def _ready(
        self, program: Program, names: tuple[str, ...], feed: Mapping[Any, Any] | None, micro_step: int
    ) -> tuple[Plan, dict[str, Any], Step | PlainStep | None]:
        """What a run needs: its plan, checked feeds, and the session (None: it needs none, or only once)."""
        window = program.accumulation
        plan = self._plan(program, names, window is not None and micro_step + 1 < window.steps)
        feeds = plan.feeds.check(feed)
        step = self._step(program, plan, feeds) if plan.runs and not plan.initialises else None
        return plan, feeds, step

    def _plan(self, program: Program, names: tuple[str, ...], spread: bool) -> Plan:
        with self._tables.lock:
            cache = self._tables.programs.get(program)
            if cache is None or cache.version != program.version:
                cache = self._tables.programs[program] = Plans(program.version)
            key = (names, spread, own_rank(), own_size())
            plan = cache.plans.get(key)
            if plan is None:
                plan = cache.plans[key] = make_plan(program, names, spread, self.place)
            cache.last = plan
            return plan

    def _step(self, program: Program, plan: Plan, feeds: Mapping[str, Any]) -> Step | PlainStep:
        key = shapes_of(feeds)
        largest = largest_feeds(key) if plan.uneven else ()
        served = (*key, *largest) if plan.shaped else ()
        if not plan.shaped and key != plan.fed:
            plan.feeds.check_shapes(feeds)
            plan.fed = key
        with self._tables.lock:
            session = plan.sessions.get(served)
            if session is None:
                session = plan.sessions[served] = Session(largest)
            elif session.step is not plan.last:
                plan.sessions.move_to_end(served)
        step = session.step
        if step is None:
            with session.lock:  # of those who come at once, the first makes it
                if session.step is None:
                    self._make(session, program, plan, served, feeds, key)
                step = session.step
            assert step is not None
        plan.last = step
        return step

    def _make(
        self, session: Session, program: Program, plan: Plan, served: Shapes, feeds: Mapping[str, Any], shapes: Shapes
    ) -> None:
        """Compile for feeds of these shapes; the session that was used longest ago goes where there are too many."""
        start = time.monotonic()
        try:
            plan.feeds.check_shapes(feeds)
            with collector_paused():
                session.step = self._compile(program, plan, dict(shapes), dict(session.largest))
        except (GraphError, ExecutionError) as error:
            raise type(error)(f"{error}{fed_together(shapes)}") from None
        finally:
            if session.step is None:  # what cannot be compiled takes no place
                with self._tables.lock:
                    plan.sessions.pop(served, None)
        plan.seconds += time.monotonic() - start
        with self._tables.lock:
            count = drop_oldest(plan, self.max_sessions)
            told, plan.dropped = plan.dropped, plan.dropped or count > 0
        if count and not told:
            warn_user(thrashes(program, plan, self.max_sessions, shapes, count))

    def _compile(
        self, program: Program, plan: Plan, shapes: dict[str, tuple[int, ...]], largest: dict[str, tuple[int, ...]]
    ) -> Step | PlainStep:
        tensors_fed = {n: s for n, s in shapes.items() if plan.shaped and program.var(n).dtype is not None}
        fetches = [program.var(name) for name in plan.outputs]
        (updates, others), sent = run_updates(program, plan.spread), Sent(program, plan.spread)
        at = self.place
        lowered = lower(
            program,
            at.kind,
            tensors_fed,
            fetches,
            updates=updates,
            others=others,
            declared=True,
            arithmetic=arithmetic_of(at),
            cores=cores_of(at, self.settings.threads),
            largest=largest,
        )
        in_place = bool(lowered.updates) and not plan.initialises and place_traits(self.place.kind).in_place
        settings = startup_settings(self.settings, program, self.place) if plan.initialises else self.settings
        settings = replace(settings, tf32=settings.tf32 or lowered.tensor_cores)
        if settings.cuda_graph:
            check_capturable(lowered, program.name)
        startup = program.startup.name if program.startup is not None else ""
        if needs_plain(lowered):
            session, _ = create_session(lowered.model, self.place, settings, program.name)
            return PlainStep(session, lowered, self.place, program.name, startup)
        keep, kind = in_place or plan.open is not None, CapturedStep if settings.cuda_graph else Step

        def make(model: onnx.ModelProto, ports: Lowered) -> tuple[Step, onnx.GraphProto | None]:
            new = {port.tensor for port in ports.updates}
            session, graph = create_session(model, self.place, settings, program.name, keep, True, new)
            step = kind(session, graph, ports, self.place, program.name, startup)
            step.sent = sent
            return step, graph

        if plan.open is None or settings.cuda_graph:
            return make(lowered.model, lowered)[0]
        return plan.open.step(
            lowered, make, partial(check_model, place=self.place, settings=settings, name=program.name)
        )

    # -- running --------------------------------------------------------------------------------------
    def _run(
        self,
        program: Program,
        plan: Plan,
        step: Step | PlainStep | None,
        feeds: Mapping[str, Any],
        scope: Scope,
        return_numpy: bool,
    ) -> list[Any]:
        try:
            results = [] if step is None else step.run(scope, feeds, return_numpy)
        except ExecutionError as error:
            if plan.shaped:  # then these shapes were found to belong together when the session was made
                raise
            raise ExecutionError(f"{error}{fed_together(shapes_of(feeds))}") from None
        return [
            results[s] if isinstance(s, int) else fetched_state(program.var(s), scope, self.place, return_numpy)
            for s in plan.sources
        ]

    def _initialise(
        self, program: Program, plan: Plan, feeds: Mapping[str, Any], scope: Scope, return_numpy: bool
    ) -> list[Any]:
        """Run a program whose operators write persistable variables. Arrays and constants are copied, the rest is run.

        Nothing of it is kept: a startup program runs once. The scope changes when all of it is done.
        """
        with collector_paused():
            parts = startup_parts(program, plan.sources)
        step = None if parts.rest is None else self._step(parts.rest, plan, feeds)
        with self._tables.lock:
            plan.sessions.clear()
            plan.last = None
        with scope.writing(), Uninterrupted():
            staged = Scope()
            staged.hold(scope.ort_values)
            staged.hold(parts.known())
            results = self._run(parts.rest or program, plan, step, feeds, staged, return_numpy)
            values = parts.made(staged.ort_values, scope.ort_values)
            settle(program, values, scope, parts.held)
            begin(program, values, scope)
        if step is not None and self.place.kind == "cpu":
            release_behind(values.values())
        return results
