"""Paddle's spelling of arguments and names, from ``paddle_names.toml``, made to work on functions, classes, modules."""

import importlib
import inspect
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence, Set
from functools import cache, partial, wraps
from types import CodeType, MappingProxyType
from typing import Any, TypeVar, cast

from amp_transpiler.errors import ArgumentError, ArgumentTypeError, ListError, MissingNameError
from amp_transpiler.lists._schemas import read_text
from amp_transpiler.spelling import near_names

FILE = "paddle_names.toml"
Called = TypeVar("Called", bound=Callable[..., Any])
#: Our name, or a table with ``unused``, or ``takes`` and ``otherwise``; for an attribute perhaps its ``value``.
Entry = str | Mapping[str, Any]
_KEYS = ({"unused"}, {"otherwise"}, {"takes", "otherwise"}, {"value"})
#: Tables of arguments that a function or class carries.
carried: set[str] = set()


def parse_names(text: str) -> Mapping[str, Mapping[str, Mapping[str, Entry]]]:
    """The tables ``arguments`` and ``names`` of a TOML text; ListError for an entry of another form."""
    tables = tomllib.loads(text)
    for kind, sections in tables.items():
        for section, entries in sections.items():
            for name, entry in entries.items():
                form = isinstance(entry, str) or (isinstance(entry, dict) and set(entry) in _KEYS)
                if kind not in ("arguments", "names") or not form:
                    raise ListError(
                        f"{FILE}, {kind}.{section}: '{name}' is {entry!r}; expected our name, or a table "
                        "with unused, or with otherwise and perhaps takes"
                    )
    return MappingProxyType(tables)


@cache
def paddle_names() -> Mapping[str, Mapping[str, Mapping[str, Entry]]]:
    """The tables of ``paddle_names.toml``."""
    return parse_names(read_text(FILE))


def paddle_arguments(*tables: str) -> Callable[[Called], Called]:
    """Let a function, or a class, take the keywords of these tables of ``paddle_names.toml`` besides its own.

    ListError where a table is missing, or names an argument that the function does not have. Its callers get
    ArgumentTypeError for an argument given twice or unknown, ArgumentError for a value that the table refuses.
    """

    def carry(called: Called) -> Called:
        function = called.__init__ if isinstance(called, type) else called  # type: ignore[misc]
        parameters = parameter_names(inspect.unwrap(function))
        entries: dict[str, Entry] = {}
        for table in tables:
            found = paddle_names()["arguments"].get(table)
            if found is None:
                raise ListError(f"{FILE} has no table arguments.{table}, which {called.__qualname__} carries")
            entries |= found
        carried.update(tables)
        wrong = [e for name, e in entries.items() if name in parameters or (isinstance(e, str) and e not in parameters)]
        if wrong:
            raise ListError(
                f"{FILE}, arguments.{tables}: {called.__qualname__} does not have argument {wrong[0]!r}, "
                "or has Paddle's itself"
            )

        takes = _keywords(function) | entries.keys()

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if takes and not takes.issuperset(kwargs):
                owner = type(args[0]).__name__ if function.__name__ == "__init__" else called.__name__
                wrong = next(name for name in kwargs if name not in takes)
                raise ArgumentTypeError(
                    f"{owner}: there is no argument '{wrong}'; the arguments are "
                    f"{', '.join(name for name in parameters if name != 'self')}"
                )
            if not entries.keys().isdisjoint(kwargs):
                kwargs = _ours(called.__name__, entries, parameters[: len(args)], kwargs)
            return function(*args, **kwargs)

        call.paddle_keywords = takes  # type: ignore[attr-defined]
        if isinstance(called, type):
            called.__init__ = call  # type: ignore[misc]
            return called
        return cast(Called, call)

    return carry


def _keywords(function: Callable[..., Any]) -> Set[str]:
    """The keywords that a function takes, those of a function that it wraps too; none where it takes any."""
    own = getattr(function, "paddle_keywords", None)
    if own is not None:
        return cast(Set[str], own)
    found = frozenset(parameter_names(function))
    if found >= {"args", "kwargs"} and hasattr(function, "__wrapped__"):
        return _keywords(function.__wrapped__) | found - {"args", "kwargs"}
    return frozenset() if _code(function).co_flags & inspect.CO_VARKEYWORDS else found


def parameter_names(function: Callable[..., Any]) -> Sequence[str]:
    """The parameters of a Python function, ``*args`` and ``**kwargs`` last; of a partial, those that are open.

    ``inspect.signature`` takes twenty times as long, and hundreds of functions are asked while the package is imported.
    """
    code, bound = _code(function), len(function.args) if isinstance(function, partial) else 0
    more = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return code.co_varnames[bound : code.co_argcount + code.co_kwonlyargcount + more]


def _code(function: Callable[..., Any]) -> CodeType:
    """The code of a Python function, or of the one that a partial calls."""
    return (function.func if isinstance(function, partial) else function).__code__


def _ours(owner: str, entries: Mapping[str, Entry], given: Sequence[str], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments by our names; ``given`` are the names of the positional ones."""
    found: dict[str, Any] = {}
    for name, value in kwargs.items():
        entry = entries.get(name, name)
        if not isinstance(entry, str):
            _check_value(owner, name, value, entry)
        elif entry in found or (entry != name and (entry in kwargs or entry in given)):
            raise ArgumentTypeError(f"{owner}: '{name}' is another name of '{entry}', which is given as well")
        else:
            found[entry] = value
    return found


def _check_value(owner: str, name: str, value: Any, entry: Mapping[str, Any]) -> None:
    if "unused" in entry or value is None:
        return
    if not any(type(value) is type(taken) and value == taken for taken in entry.get("takes", ())):
        raise ArgumentError(f"{owner}: {name}={value!r} is Paddle's, and not offered: {entry['otherwise']}")


def paddle_attributes(owner: str) -> Callable[..., Any]:
    """The ``__getattr__`` of a module, or of a class: the names that its table in ``paddle_names.toml`` adds.

    A function that the table of a class names is a method: it takes the object as its first argument.
    It raises MissingNameError, an AttributeError, for any other, with the way out where the table has one, else with
    the names near it.
    """
    entries = paddle_names()["names"][owner]

    def near(name: str, home: Any) -> str:
        own = getattr(home, "__all__", None) or dir(home)
        leading = (known for known, entry in entries.items() if isinstance(entry, str) or "value" in entry)
        return near_names(name, (known for known in (*own, *leading) if not known.startswith("_")), "; ")

    def attribute(*object_and_name: Any) -> Any:
        name = object_and_name[-1]
        entry = entries.get(name)
        if isinstance(entry, str):
            found: Any = importlib.import_module("amp_transpiler")
            for part in entry.split("."):
                found = getattr(found, part)
            return partial(found, *object_and_name[:-1]) if len(object_and_name) > 1 else found
        if entry is not None and "value" in entry:
            return entry["value"]
        if entry is not None:
            why = f": {entry['otherwise']}"
        elif name.startswith("_"):  # asked for by Python and by tools
            why = ""
        else:
            why = near(name, object_and_name[0] if len(object_and_name) > 1 else sys.modules.get(owner))
        raise MissingNameError(f"'{owner}' has no attribute '{name}'{why}")

    return attribute


def add_paddle_names(module: dict[str, Any]) -> None:
    """Let a module, by its ``globals()``, have Paddle's names; to a type checker an unknown name stays an error."""
    module["__getattr__"] = paddle_attributes(module["__name__"])
