"""Passes that say what they are, and lists of passes that are written as text.

    canonicalize,precision{mode=pure numeric-guards=true},autodiff

is a pipeline in MLIR's grammar: names separated by commas, options in braces separated by blanks, lists in an option
by commas, text with blanks in double quotes; an option that is only named is true.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import Enum
from inspect import getdoc
from typing import Any, ClassVar, Generic, TypeVar, dataclass_transform, overload

from amp_transpiler.errors import ArgumentError, ArgumentTypeError, GraphError
from amp_transpiler.ir.clone import clone
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import BACKWARD, FORWARD, UPDATE
from amp_transpiler.ir.rollback import unchanged_on_error
from amp_transpiler.ir.verify import untyped
from amp_transpiler.lists import TARGET_OPSET
from amp_transpiler.option_checks import shown
from amp_transpiler.passes.pipeline_text import NAME, PassText, parse, read_options, written

T = TypeVar("T")
D = TypeVar("D")


class Property(Enum):
    """What holds of a graph, in the words that passes use to say what they need and guarantee."""

    TYPED = "typed"
    INLINED = "functions inlined"
    CONSTANTS = "known weights are constants"
    TARGET_OPSET = "target opset"
    FORWARD = "no gradients"
    PRECISION = "precision decided"
    GRADIENTS = "gradients"
    UPDATES = "updates"

    def __str__(self) -> str:
        return self.value

    def holds(self, graph: Graph) -> bool:
        """Whether it holds of ``graph``."""
        return _HOLDS[self](graph)


_HOLDS: dict[Property, Callable[[Graph], bool]] = {
    Property.TYPED: lambda graph: not untyped(graph),
    Property.INLINED: lambda graph: not graph.info.functions,
    Property.CONSTANTS: lambda graph: not any(v.persistable and v.data is not None for v in graph.variables),
    Property.TARGET_OPSET: lambda graph: graph.opset() == TARGET_OPSET,
    Property.FORWARD: lambda graph: not any(op.role == BACKWARD for op in graph.operators),
    Property.GRADIENTS: lambda graph: any(op.role == BACKWARD for op in graph.operators),
    Property.UPDATES: lambda graph: any(op.role == UPDATE for op in graph.operators),
    Property.PRECISION: lambda graph: all(op.why is not None for op in graph.walk() if op.role == FORWARD),
}


@dataclass(frozen=True, eq=False)
class Value(Generic[T]):
    """What passes are handed beside the graph: by the caller, as the argument ``name`` of a run, or by other passes.

    A caller's is of the type ``kind``, or what ``checked`` (the call, the graph, what is given) makes of it;
    ``expected`` says the same in words. ``changed``: the programs and objects of a value that passes change, beside the
    graph.
    """

    name: str
    kind: type = object
    expected: str = ""
    checked: Callable[[str, Graph, Any], T] | None = None
    changed: Callable[[T], Iterable[object]] = lambda value: ()

    def given(self, call: str, graph: Graph, value: Any) -> Any:
        """What a caller gives for it; an error that names ``call`` where that is something else."""
        if self.checked is not None:
            return self.checked(call, graph, value)
        if not isinstance(value, self.kind):
            expected = self.expected or f"a value of the type {self.kind.__name__}"
            raise ArgumentTypeError(f"{call}: {self.name} is {shown(value)}; expected {expected}")
        return value

    def __str__(self) -> str:
        return f"`{self.name}`"


class Context:
    """The values of one run; ``notes`` are what passes have to say of it."""

    def __init__(self, values: Mapping[Value[Any], Any]) -> None:
        self._values = dict(values)
        self.notes: list[str] = []

    def __contains__(self, value: Value[Any]) -> bool:
        return value in self._values

    def __getitem__(self, value: Value[T]) -> T:
        found: T = self._values[value]
        return found

    def __setitem__(self, value: Value[T], given: T) -> None:
        self._values[value] = given

    @overload
    def get(self, value: Value[T]) -> T | None: ...
    @overload
    def get(self, value: Value[T], default: D) -> T | D: ...
    def get(self, value: Value[T], default: D | None = None) -> T | D | None:
        """The value, or ``default`` where there is none."""
        return self._values.get(value, default)


def option(default: str, *choices: str) -> str:
    """A field of a pass that holds one of some words."""
    made: str = field(default=default, metadata={"choices": choices})
    return made


#: Every pass by its name.
PASSES: dict[str, type[Pass]] = {}


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
@dataclass(frozen=True)
class Pass(ABC):
    """A change of a graph, or a question to it: a frozen dataclass, whose fields are its options, and whose docstring
    is its sentence.

    ``name`` is that of its text. ``needs`` and ``guarantees`` are properties of the graph, or values; ``takes`` are
    values that it can do without. ``invalidates`` are properties that end. A pass that ``reads`` changes no graph;
    one that ``initialises`` adds state, which the startup program sets.
    """

    name: ClassVar[str]
    needs: ClassVar[tuple[Property | Value[Any], ...]] = ()
    guarantees: ClassVar[tuple[Property | Value[Any], ...]] = ()
    takes: ClassVar[tuple[Value[Any], ...]] = ()
    invalidates: ClassVar[tuple[Property, ...]] = ()
    reads: ClassVar[bool] = False
    initialises: ClassVar[bool] = False

    def __init_subclass__(cls, *, base: bool = False) -> None:
        if base:  # what several passes share, and none itself
            return
        called, name = f"{cls.__module__}.{cls.__qualname__}", getattr(cls, "name", None)
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ArgumentError(f"pass {called} has the name {shown(name)}; give it one, as in name = 'fold-constants'")
        known = PASSES.setdefault(name, cls)
        if known.__qualname__ != cls.__qualname__:
            taken = f"{known.__module__}.{known.__qualname__}"
            raise ArgumentError(f"pass {called} is called {name!r}, and so is {taken}; give it another name")
        PASSES[name] = dataclass(frozen=True)(cls)

    @classmethod
    def sentence(cls) -> str:
        """What it does."""
        return " ".join((getdoc(cls) or "").split("\n\n")[0].split())

    def applies(self, graph: Graph, context: Context) -> bool:
        """Whether there is anything to do; asked before a graph that must stay as it is would be copied."""
        return True

    @abstractmethod
    def run(self, graph: Graph, context: Context) -> bool | None:
        """Do it in place; whether anything changed, None where the graph's version tells."""

    def __str__(self) -> str:
        return written(self)


@dataclass(frozen=True)
class Ran:
    """What a pipeline did: each pass with whether it changed anything, and by ``ran["NAME"]`` the values it made."""

    changes: tuple[tuple[Pass, bool], ...]
    values: dict[str, Any] = field(repr=False)
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def __str__(self) -> str:
        return "\n".join(f"{'changed' if changed else '-':>7}  {each}" for each, changed in self.changes)


class Pipeline:
    """A list of passes, by its text or as pass objects.

    ``str(pipeline)`` is its text. ArgumentError, with the position, for text that is none: a wrong character, an
    unknown pass or option, a value that does not fit.
    """

    def __init__(self, passes: str | Iterable[Pass]) -> None:
        given: Any = map(_made, parse(passes)) if isinstance(passes, str) else passes
        self.passes: tuple[Pass, ...] = tuple(given) if isinstance(given, Iterable) else (given,)
        wrong = [each for each in self.passes if not isinstance(each, Pass)]
        if wrong:
            raise ArgumentTypeError(
                f"Pipeline takes passes, or their text, such as 'canonicalize,autodiff'; got {wrong[0]!r:.80}"
            )

    def __str__(self) -> str:
        return ",".join(map(str, self.passes))

    def __repr__(self) -> str:
        return f"Pipeline({str(self)!r})"

    def __iter__(self) -> Iterator[Pass]:
        return iter(self.passes)

    def run(self, program: Graph, **values: Any) -> Ran:
        """Run the passes on ``program``, in place and in order; where one raises, all is as before.

        That is the program, its startup program where passes add state, and what ``values`` hold that they change, such
        as the optimizers of ``training``.

        ``values`` are those that passes take beside the program, such as ``loss`` of ``autodiff``; one that is None is
        left out. Returns what was done: ``ran.changes``, each pass with whether it changed anything;
        ``ran["gradients"]``, the values that passes made, by name; ``ran.notes``, what they have to say. ArgumentError
        for a value that no pass takes, ArgumentTypeError for one of another kind. GraphError where a pass needs what
        neither the program has nor a pass before it guarantees: then nothing has run.
        """
        if not isinstance(program, Graph):
            raise ArgumentTypeError(f"pipeline '{self}' runs on a program, got {program!r:.80}")
        known = {value.name: value for each in self for value in _values(each)}
        for name in values:
            if name not in known:
                raise ArgumentError(f"pipeline '{self}': no pass takes {name!r}{_near(name, known)}")
        given = {known[name]: value for name, value in values.items() if value is not None}
        call = f"pipeline '{self}'"
        context = Context({taken: taken.given(call, program, value) for taken, value in given.items()})
        _check(self, program, context)
        startup = program.startup if any(each.initialises for each in self) else None
        others = [each for taken, value in given.items() for each in taken.changed(value)]
        with unchanged_on_error(program, startup, *others):
            changes = apply(self, program, context)
        made = {name: context[value] for name, value in known.items() if value in context}
        return Ran(changes, made, tuple(context.notes))


def apply(passes: Iterable[Pass], graph: Graph, context: Context) -> tuple[tuple[Pass, bool], ...]:
    """Run passes in place, without checks and transaction, which are the caller's; each with whether it changed
    anything."""
    return tuple((each, each.applies(graph, context) and _run(each, graph, context)) for each in passes)


def apply_to_copy(passes: Iterable[Pass], graph: Graph, context: Context) -> None:
    """The same on a copy of ``graph``, which is made where the first pass has something to change."""
    current = graph
    for each in passes:
        if each.applies(current, context):
            if current is graph and not each.reads:
                current = clone(graph)
            each.run(current, context)


def _check(pipeline: Pipeline, graph: Graph, context: Context) -> None:
    """GraphError where a pass needs what ``graph`` and ``context`` do not have and no pass before it guarantees."""
    held: set[Property | Value[Any]] = set()
    ended: set[Property] = set()
    for position, each in enumerate(pipeline, 1):
        for need in each.needs:
            given = need in context if isinstance(need, Value) else need not in ended and need.holds(graph)
            if need not in held and not given:
                makers = [name for name, other in PASSES.items() if need in other.guarantees]
                way_out = f"pass {need.name}= to run" if isinstance(need, Value) else "give it another program"
                hint = f"put {' or '.join(makers)} before it" if makers else way_out
                raise GraphError(
                    f"pass {position} of pipeline '{pipeline}': {each.name} needs {need}, which program "
                    f"'{graph.name}' does not have and no pass before it guarantees; {hint}"
                )
        held -= set(each.invalidates)
        ended |= set(each.invalidates)
        held |= set(each.guarantees)


def _run(each: Pass, graph: Graph, context: Context) -> bool:
    before = graph.version
    changed = each.run(graph, context)
    return graph.version != before if changed is None else changed


def _values(each: Pass) -> list[Value[Any]]:
    return [value for value in (*each.needs, *each.takes, *each.guarantees) if isinstance(value, Value)]


def _near(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, list(known), 3, 0.5)
    return f"; did you mean {' or '.join(near)}?" if near else f"; known are {', '.join(sorted(known)) or 'none'}"


def _made(text: PassText) -> Pass:
    """The pass that a part of a text stands for."""
    found = PASSES.get(text.name)
    if found is None:
        raise text.error(f"there is no pass {text.name!r}{_near(text.name, PASSES)}")
    return found(**read_options(found, text))
