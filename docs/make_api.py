"""Write ``docs/api.md`` from the docstrings: ``python docs/make_api.py``; ``--check`` only says whether it is current.

What is public is what ``__all__`` of :data:`MODULES` names, the classes of ``errors``, and of classes every member
without a leading underscore. The test suite fails where one of them has no docstring, or is missing from the page.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

PAGE = Path(__file__).resolve().parent / "api.md"
#: Public modules, by the name that users write.
MODULES = {
    "amp": "amp_transpiler",
    "amp.nn": "amp_transpiler.nn",
    "amp.nn.functional": "amp_transpiler.nn.functional",
    "amp.nn.initializer": "amp_transpiler.nn.initializer",
    "amp.optimizer": "amp_transpiler.optimizer",
    "amp.optimizer.lr": "amp_transpiler.optimizer.lr",
    "amp.distributed": "amp_transpiler.distributed",
    "amp.regularizer": "amp_transpiler.regularizer",
    "amp.mixed_precision": "amp_transpiler.mixed_precision",
    "amp.static.amp.bf16": "amp_transpiler.static.amp.bf16",
    "amp.unique_name": "amp_transpiler.ir.unique_name",
    "amp.errors": "amp_transpiler.errors",
}
HEAD = """# API

Made from the docstrings by `docs/make_api.py`; do not edit. `import amp_transpiler as amp`. Signatures show names and
defaults; the types are in the source, and the package carries `py.typed`. Names of other frameworks that lead here are
in [coming_from.md](coming_from.md).
"""


def public(module: ModuleType) -> list[str]:
    """The public names of a module: its ``__all__``, or what is defined in it."""
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return sorted(listed)
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    return sorted(name for name in own if not name.startswith("_"))


@cache
def exported() -> frozenset[type]:
    """The classes that the public modules name."""
    modules = [importlib.import_module(full) for full in MODULES.values()]
    found = (getattr(module, name) for module in modules for name in public(module))
    return frozenset(thing for thing in found if isinstance(thing, type))


def members(cls: type) -> dict[str, Any]:
    """Public functions and properties that a class adds to its public bases."""
    found: dict[str, Any] = {}
    named = [base for base in cls.__mro__[1:] if base in exported()]
    for base in cls.__mro__:
        if not base.__module__.startswith("amp_transpiler") or any(issubclass(each, base) for each in named):
            continue
        for name, value in vars(base).items():
            called = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            told = inspect.ismemberdescriptor(value) and inspect.getdoc(value)
            again = called.__doc__ is None and any(hasattr(base, name) for base in named)  # its base's entry says it
            if not name.startswith("_") and (callable(called) or told) and not again:
                found.setdefault(name, called if not isinstance(value, property) else value)
    return dict(sorted(found.items()))


def said(thing: Any, owner: type | None = None, name: str = "") -> str:
    """The docstring of a thing, or of what it overrides; "" where there is none."""
    text = inspect.getdoc(thing)
    for base in owner.__mro__[1:] if owner is not None and not text else ():
        text = text or inspect.getdoc(vars(base).get(name))
    return text or ""


def signature(thing: Any) -> str:
    """Names and defaults of the arguments, without types; "" for what is not called."""
    if isinstance(thing, property) or not callable(thing):
        return ""
    if isinstance(thing, type) and issubclass(thing, BaseException):
        return ""
    found = inspect.signature(thing)
    bare = [p.replace(annotation=p.empty) for p in found.parameters.values() if p.name != "self"]
    return str(found.replace(parameters=bare, return_annotation=found.empty))


def entries() -> Iterator[tuple[str, str, str, str]]:
    """Every public thing: the module it stands under, its name there, its signature, its docstring."""
    seen: dict[int, str] = {}
    for short, full in MODULES.items():
        module = importlib.import_module(full)
        for name in public(module):
            thing = getattr(module, name)
            if isinstance(thing, ModuleType):
                continue
            before = seen.setdefault(id(thing), f"{short}.{name}")
            if before != f"{short}.{name}":
                yield short, name, "", f"The same as `{before}`."
                continue
            yield short, name, signature(thing), said(thing)
            if isinstance(thing, type):
                for member, value in members(thing).items():
                    yield short, f"{name}.{member}", signature(value), said(value, thing, member)


def contents() -> str:
    """A line for each module, with its first sentence."""
    lines = []
    for short, full in MODULES.items():
        sentence = " ".join((inspect.getdoc(importlib.import_module(full)) or "").split("\n\n")[0].split())
        lines.append(f"- [{short}](#{short.replace('.', '')}): {sentence.rstrip(':')}\n")
    return "".join(lines)


def page() -> str:
    """The whole page."""
    lines, current = [HEAD, contents()], ""
    for module, name, arguments, text in entries():
        if module != current:
            lines.append(f"## {module}\n\n{inspect.getdoc(importlib.import_module(MODULES[module]))}\n")
            current = module
        level = "####" if "." in name else "###"
        body = text if text.startswith("The same as `") else f"```text\n{name}{arguments}\n\n{text}\n```"
        lines.append(f"{level} {name}\n\n{body}\n")
    return "\n".join(lines)


if __name__ == "__main__":
    made = page()
    if "--check" in sys.argv[1:]:
        current = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""
        sys.exit(0 if current == made else "docs/api.md is not current: run python docs/make_api.py")
    PAGE.write_text(made, encoding="utf-8")
