"""The fixed shapes of a program's feeds, for what has to know them before a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.infer import static
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.option_checks import is_whole, shown


def given_shapes(call: str, program: Graph, given: Mapping[str, Sequence[int]] | None) -> dict[str, tuple[int, ...]]:
    """The fixed shape of every feed that an operator reads.

    ``given`` has those that are not declared; a size under a symbolic name is needed once. ArgumentTypeError where it
    is no mapping, ArgumentError naming a feed that is unknown, missing, or declared otherwise. ``call`` is the caller,
    for messages.
    """
    shapes = checked_shapes(call, program, given)
    sizes: dict[str, int] = {}
    for name, shape in shapes.items():
        declared = program.var(name).shape
        sizes |= {d: n for d, n in zip(declared or (), shape, strict=False) if isinstance(d, str)}
    for feed in program.inputs:
        if feed.name in shapes or not feed.readers or feed.dtype is None:
            continue
        declared = (None,) if feed.shape is None else feed.shape
        known = static(tuple(sizes.get(d, d) if isinstance(d, str) else d for d in declared))
        if known is None:
            shape_text = "an unknown shape" if feed.shape is None else f"shape {list(feed.shape)}"
            raise ArgumentError(
                f"{call}: feed '{feed.name}' of program '{program.name}' has {shape_text}; give its "
                f"size, as in feed_shapes={{'{feed.name}': (...)}}"
            )
        shapes[feed.name] = known
    return shapes


def checked_fetches(call: str, program: Graph, fetches: Sequence[Variable | str]) -> list[Variable]:
    """Variables of ``program``, given as they are or by name. GraphError for a name that it does not have."""
    if not isinstance(fetches, (list, tuple)):
        raise ArgumentTypeError(f"{call}: what to fetch is {shown(fetches)}; expected a list of variables or names")
    for each in fetches:
        if not isinstance(each, (str, Variable)):
            raise ArgumentTypeError(f"{call}: fetches are variables or names, not {shown(each)}")
    return [program.var(each) if isinstance(each, str) else each for each in fetches]


def checked_shapes(call: str, program: Graph, given: Mapping[str, Sequence[int]] | None) -> dict[str, tuple[int, ...]]:
    """The shapes that are given of some feeds; errors as of :func:`given_shapes`."""
    if not isinstance(given, (Mapping, type(None))):
        raise ArgumentTypeError(f"{call}: feed_shapes is {given!r}; expected a mapping of names to shapes")
    feeds = {feed.name: feed for feed in program.inputs}
    shapes = {}
    for name, shape in (given or {}).items():
        if name not in feeds:
            known = ", ".join(feeds) or "none"
            raise ArgumentError(f"{call}: '{name}' is no feed of program '{program.name}'; its feeds are {known}")
        if not isinstance(shape, Iterable) or isinstance(shape, str):
            raise ArgumentTypeError(f"{call}: feed_shapes gives '{name}' the shape {shown(shape)}; expected sizes")
        sizes, declared = tuple(shape), feeds[name].shape
        fits = declared is None or (
            len(declared) == len(sizes)
            and all(not isinstance(d, int) or d == n for d, n in zip(declared, sizes, strict=True))
        )
        if not fits or not all(is_whole(n) and n >= 0 for n in sizes):
            raise ArgumentError(
                f"{call}: feed_shapes gives '{name}' the shape {list(sizes)}; it is declared as {list(declared or ())}"
            )
        shapes[name] = tuple(map(int, sizes))
    return shapes


def has_open_feeds(program: Graph) -> bool:
    """Whether the sizes of a feed are known in the run alone."""
    return any(static(variable.shape) is None for variable in program.inputs)
