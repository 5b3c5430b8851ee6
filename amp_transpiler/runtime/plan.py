"""What a program does for one list of fetches: found once, before anything is compiled for it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from amp_transpiler.errors import ArgumentTypeError, GraphError, ScopeError
from amp_transpiler.ir.accumulation_window import AccumulationWindow
from amp_transpiler.ir.dealt_rows import held_shapes
from amp_transpiler.ir.nodes import Variable, other_program
from amp_transpiler.ir.opdef import lowering_rule_of
from amp_transpiler.lists import place_traits
from amp_transpiler.ops.training.exchange import meets
from amp_transpiler.passes.lowering.place import Place
from amp_transpiler.passes.view.feed_shapes import has_open_feeds
from amp_transpiler.program import Program, default_main_program
from amp_transpiler.runtime.binding import PlainStep, Step
from amp_transpiler.runtime.collective.current import several
from amp_transpiler.runtime.dealt import dealt_variables
from amp_transpiler.runtime.feeds import Feeds, shape_of
from amp_transpiler.runtime.forks import never_free, tell_of_forks
from amp_transpiler.runtime.largest_feeds import Shapes, has_uneven_exchanges
from amp_transpiler.runtime.open_steps import OpenSteps
from amp_transpiler.runtime.report import ReportRequest
from amp_transpiler.runtime.scope import Scope
from amp_transpiler.warn import warn_user

#: Shapes that are kept for each session that an executor keeps: those that share a session hold a few kilobytes each.
SHAPES = 128


@dataclass(eq=False)
class Session:
    """The place of one session: who needs it first makes it, under ``lock``, and the others wait for that.

    ``largest``: the shapes of feeds on the ranks that are fed most, where others are fed less.
    """

    largest: Shapes = ()
    lock: threading.RLock = field(default_factory=threading.RLock)
    step: Step | PlainStep | None = None


@dataclass(eq=False)
class Plan:
    """What a program does for one list of fetches; compiled once for each set of feed shapes.

    ``sources`` says for each fetch where it comes from: the number of a session output, or the name of a variable
    in the scope. ``outputs`` are the names of the session outputs. ``spread``: a run does not end a window of
    accumulation, and writes the window's updates instead of the program's. ``writes``: a run changes the scope.
    ``shaped``: a session serves the shapes alone that it was made for, unless ``open`` has one that serves more.
    """

    spread: bool
    feeds: Feeds
    sources: list[int | str]
    outputs: list[str]
    runs: bool
    initialises: bool
    writes: bool
    shaped: bool
    open: OpenSteps | None
    sessions: OrderedDict[Shapes, Session] = field(default_factory=OrderedDict)  # that used last stands last
    fed: Shapes | None = None
    last: Step | PlainStep | None = None
    seconds: float = 0.0  # that making sessions took
    uneven: bool = False  # ranks exchange rows, of which some may have more than others
    dropped: bool = False  # a session that may be needed again
    begun: object = None  # what was known of the scope's state when it was last asked whose it is


@dataclass
class Plans:
    """The plans of one program as it is in one version, by the fetched names, ``spread``, rank and number of ranks."""

    version: int
    plans: dict[tuple[tuple[str, ...], bool, int, int], Plan] = field(default_factory=dict)
    last: Plan | None = None


class Tables:
    """The plans of the programs that an executor runs. Who holds ``lock``, which is theirs, waits for nothing."""

    def __init__(self) -> None:
        self.programs: WeakKeyDictionary[Program, Plans] = WeakKeyDictionary()
        self.lock = threading.RLock()
        tell_of_forks(self)

    def forked(self) -> None:
        """In a child process: leave the sessions of the parent alone. They would run on one thread."""
        never_free(list(self.programs.values()))
        self.programs.clear()
        self.lock = threading.RLock()


def make_plan(program: Program, names: tuple[str, ...], spread: bool, place: Place) -> Plan:
    """What ``program`` does when these variables are fetched. GraphError for an unknown one.

    DistributedError: it is for another number of ranks.
    """
    dealt_variables(program)
    _warn_of_lonely_ranks(program)
    updates = program.accumulation.updates if spread and program.accumulation is not None else program.updates
    fetched = {name: _fetched(program, name) for name in names}
    outputs = [name for name, variable in fetched.items() if not variable.persistable]
    number = {name: index for index, name in enumerate(outputs)}
    written = [v for v in program.variables if v.persistable and v.producer is not None]
    targets = [*(fetched[name] for name in outputs), *written, *updates.values()]
    # On a device what computes shapes may have no kernel; for fixed ones it is folded.
    shaped = place_traits(place.kind).device or bool(
        written
        or program.updates
        or program.info.functions
        or held_shapes(program)
        or any(map(lowering_rule_of, program.walk()))
    )
    opens = shaped and place_traits(place.kind).host and not written and has_open_feeds(program)
    return Plan(
        spread=spread,
        feeds=Feeds(program, targets),
        sources=[number.get(name, name) for name in names],
        outputs=outputs,
        runs=bool(targets),
        initialises=bool(written),
        writes=bool(written or program.updates),
        shaped=shaped,
        open=OpenSteps() if opens else None,
        uneven=has_uneven_exchanges(program),
    )


def _warn_of_lonely_ranks(program: Program) -> None:
    """AmpWarning where each of several ranks trains by itself."""
    if several() is None or not any(v.is_parameter for v in program.updates) or any(map(meets, program.operators)):
        return
    warn_user(
        f"program '{program.name}' updates parameters and exchanges nothing with the other ranks: each trains a model "
        "of its own. To train one together, call amp.distributed.init() before minimize, where the program is built"
    )


def _fetched(program: Program, name: str) -> Variable:
    try:
        variable = program.var(name)
    except GraphError as error:
        raise GraphError(f"fetch_list: {error}") from None
    if variable.owner is not None and not variable.is_parameter and several() is not None:
        raise ScopeError(
            f"fetch_list: '{name}' lies in the scope of rank {variable.owner} alone: the optimizer's state is dealt "
            f"out among the ranks. amp.distributed.find_var('{name}') gives it, called on all of them after the run"
        )
    return variable


def names_of(items: Any, what: str, none: str = "") -> tuple[str, ...]:
    """The names in a list of variables and names; ArgumentTypeError for what is none, with ``none`` where it holds
    None."""
    if isinstance(items, (str, Variable)) or not isinstance(items, Sequence):
        raise ArgumentTypeError(f"{what} is a list of variables or names; got {items!r}, write [{items!r}]")
    names = tuple(item.name if isinstance(item, Variable) else item for item in items)
    for name in names:
        if not isinstance(name, str):
            raise ArgumentTypeError(f"{what} holds variables or names, got {name!r}{none if name is None else ''}")
    return names


def fetch_names(fetch_list: Sequence[Variable | ReportRequest | str] | None) -> tuple[str, ...]:
    """The names of what is fetched. ArgumentTypeError for what is no list of variables and names."""
    none = ". get_found_inf() gives None where gradients are not checked: float16 with a static loss scale of 1"
    return () if fetch_list is None else names_of(fetch_list, "fetch_list", none)


def given_program(program: Program | None) -> Program:
    """The program to run, the current main one for None; ArgumentTypeError for anything else."""
    if program is None:
        return default_main_program()
    if not isinstance(program, Program):
        raise ArgumentTypeError(f"expected a Program to run, got {program!r}")
    return program


def next_micro_step(window: AccumulationWindow | None, scope: Scope) -> int:
    """The number of the next run among those of a window of accumulation."""
    return 0 if window is None else int(scope.find_var(window.counter.name))


def check_home(program: Program, fetch_list: Sequence[Variable | ReportRequest | str]) -> None:
    """GraphError for a variable of another program that has no counterpart of its name in ``program``."""
    for item in fetch_list:
        if isinstance(item, Variable) and not program.has_var(item.name):
            raise GraphError(
                f"fetch_list: variable '{item.name}' belongs to {other_program(item.program, program)}; program "
                f"'{program.name}', which is run, has no variable of that name"
            )


def shapes_of(feeds: Mapping[str, Any]) -> Shapes:
    """The shapes of checked feeds, by name."""
    return tuple((name, shape_of(value)) for name, value in sorted(feeds.items()))


def fed_together(shapes: Shapes) -> str:
    """What was fed, for a program that does not take these shapes together."""
    if len(shapes) < 2:
        return ""
    listed = ", ".join(f"'{name}' {list(shape)}" for name, shape in shapes)
    return f". Fed were {listed}: sizes that belong together, such as that of the batch, must be equal"


def drop_oldest(plan: Plan, limit: int) -> int:
    """Let go what was used longest ago: sessions beyond ``limit``, and shapes beyond :data:`SHAPES` for each of them.

    Returns how many shapes there were where any went, else 0.
    """
    count = len(plan.sessions)
    used = dict.fromkeys(id(each.step.session) for each in reversed(plan.sessions.values()) if each.step is not None)
    kept = {*list(used)[:limit]}
    for shapes, each in list(plan.sessions.items()):
        if each.step is not None and id(each.step.session) not in kept:
            del plan.sessions[shapes]
    while len(plan.sessions) > SHAPES * limit:
        plan.sessions.popitem(last=False)
    return count if len(plan.sessions) < count else 0


def thrashes(program: Program, plan: Plan, limit: int, shapes: Shapes, count: int) -> str:
    """What to say when some of ``count`` shapes that it was fed are dropped."""
    listed = ", ".join(f"'{name}' {list(shape)}" for name, shape in shapes)
    return (
        f"program '{program.name}' has been fed {count} different shapes, the last {listed}. Each is compiled, in "
        f"{plan.seconds / count:.2g} s on average, and the executor keeps {limit} sessions; a shape that comes back "
        "after its session went is compiled again. Pad the feeds to a few lengths and batch sizes, or let the executor "
        f"keep more (memory for each): Executor(place, max_sessions={4 * limit})"
    )
