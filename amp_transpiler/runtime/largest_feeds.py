"""What the ranks are fed: as many examples each, or some more than others, as in the last batch of an epoch."""

from __future__ import annotations

from typing import Any

from amp_transpiler.errors import FeedError
from amp_transpiler.ir.graph import Graph
from amp_transpiler.passes.lowering.room_for_rows import exchanged_rows
from amp_transpiler.runtime.collective.current import several

#: Shapes of feeds, by name.
Shapes = tuple[tuple[str, tuple[int, ...]], ...]


def has_uneven_exchanges(program: Graph) -> bool:
    """Whether several ranks exchange rows of tables here, of which each may have more or fewer."""
    return several() is not None and any(exchanged_rows(op) is not None for op in program.operators)


def largest_feeds(fed: Shapes) -> Shapes:
    """The largest size of each dimension that a rank is fed; nothing where all are fed the same. All ranks call it.

    FeedError: ranks feed other inputs, or other dimensions.
    """
    engine = several()
    assert engine is not None
    mine: list[list[Any]] = [[name, list(shape)] for name, shape in fed]
    if engine.agree(mine):
        return ()
    of_all = engine.all_gather_object(mine)
    for rank, each in enumerate(of_all):
        if [(name, len(shape)) for name, shape in each] != [(name, len(shape)) for name, shape in mine]:
            raise FeedError(f"rank {rank} is fed {dict(each)}, and rank {engine.rank} {dict(mine)}: other inputs")
    sizes = [zip(*(each[number][1] for each in of_all), strict=True) for number in range(len(mine))]
    return tuple((name, tuple(map(max, each))) for (name, _), each in zip(fed, sizes, strict=True))
