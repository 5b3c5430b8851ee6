"""Tables whose rows are dealt out among ranks (``ir/dealt_rows.py``): who looks rows up gets them, and sends gradients.

``SendRows(rows, values) -> (rows, values)``: a merged sparse gradient goes to the ranks that hold its rows. There is
room for as many from each rank, those of rank 0 first; what is left of it are zeros for the spare row.

A lookup asks the ranks for the rows that it names, each once, and gets them. What is exchanged has room for all that a
rank may be asked; only what is asked travels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from amp_transpiler.errors import FeedError
from amp_transpiler.ir.dealt_rows import spare_row
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.exchange_call import Ranks
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.opdef import lowering_rule, own
from amp_transpiler.ops.common import size_of, sliced
from amp_transpiler.ops.training.all_reduce import room_of, types_of_ranks
from amp_transpiler.ops.training.exchange import exchange, exchanged
from amp_transpiler.ops.training.sparse import named_rows, numbered, picked

ASK, ANSWER, SEND = "AskForRows", "AnswerWithRows", "SendRows"
Attrs = Mapping[str, Any]


def look_up_dealt(e: Emitter, op: Operator, table: Value, indices: Value, ranks: int, rows: int, name: str) -> Value:
    """Rows of a table of ``rows`` rows that are dealt out, of which ``table`` is what this rank holds."""
    ids, width = named_rows(e, indices, rows), size_of(table)[1:]
    count = size_of(ids)[0]
    room = room_of(op, count)
    distinct, whose = numbered(e, ids)
    attrs = {"ranks": ranks, "rows": rows, "room": room, "table": name}
    (asked,) = exchanged(e, ASK, [distinct], [(ranks + ranks * room,)], **attrs)
    given = picked(e, table, sliced(e, asked, 0, ranks, ranks + ranks * room))
    (found,) = exchanged(e, ANSWER, [given, asked, distinct], [(count, *width)], ranks=ranks)
    return e.Gather(found, e.reshape(whose, size_of(indices)), axis=0, shape=(*size_of(indices), *width))


@exchange(own(ASK), uneven=True)
def _ask(ranks: Ranks, sent: Sequence[Any], received: Sequence[Any], attrs: Attrs) -> None:
    """Sent are ids that ascend, the last one repeated; received are how many rows each rank asks for, and which."""
    ids, rows, count = _each_once(sent[0]), attrs["rows"], attrs["ranks"]
    outside, room = ids[(ids < 0) | (ids >= rows)], attrs["room"]
    if outside.size:  # every rank gets to know, and all stop alike
        asked = ranks.all_to_all([np.array([-1, outside[-1]], np.int64)] * count)
    else:
        asked = ranks.all_to_all([np.append(np.int64(room), part // count) for part in _by_owner(ids, ids, count)])
    table = attrs["table"]
    for rank, part in enumerate(asked):
        if part[0] < 0:
            wrong = int(part[1]) if part[1] >= 0 else int(part[1]) - rows
            raise FeedError(f"id {wrong} on rank {rank} is out of range for table '{table}', which has {rows} rows")
    for rank, part in enumerate(asked):
        if part[0] != room:
            raise FeedError(
                f"rank {rank} looks {part[0]} ids up in table '{table}', and rank {ranks.rank} {room}; a table whose "
                "rows are dealt out is looked up by one program on each, with other numbers only where it is fed others"
            )
    received[0][:count] = [part.size - 1 for part in asked]
    _fill(received[0][count:], [part[1:] for part in asked], spare_row(rows, count))


@exchange(own(ANSWER), uneven=True)
def _answer(ranks: Ranks, sent: Sequence[Any], received: Sequence[Any], attrs: Attrs) -> None:
    """Sent are the rows that were asked for, what :func:`_ask` received, and the ids that were asked for here."""
    count = attrs["ranks"]
    by_rank = np.split(sent[0], count)
    parts = ranks.all_to_all([rows[:size] for rows, size in zip(by_rank, sent[1], strict=False)])
    ids = _each_once(sent[2])
    places = _by_owner(np.arange(ids.size), ids, count)
    for place, part in zip(places, parts, strict=True):
        received[0][place] = part


@lowering_rule(own(SEND), native=True, infer=types_of_ranks)
def send_rows(e: Emitter, op: Operator, rows: Value, values: Value) -> Sequence[Value]:
    """``size``: the rows of the whole table. ``precision``: the element type in which the values travel."""
    ranks, precision = int(op.attrs["ranks"]), str(op.attrs.get("precision") or values.dtype)
    room = ranks * room_of(op, size_of(rows)[0])
    there, new = exchanged(
        e,
        SEND,
        [rows, e.cast(values, precision)],
        [(room,), (room, *size_of(values)[1:])],
        ranks=ranks,
        rows=int(op.attrs["size"]),
    )
    return [there, e.cast(new, values.dtype)]


@exchange(own(SEND), uneven=True)
def _send(ranks: Ranks, sent: Sequence[Any], received: Sequence[Any], attrs: Attrs) -> None:
    count = attrs["ranks"]
    ids = _each_once(sent[0])
    places = _by_owner(np.arange(ids.size), ids, count)
    rows = ranks.all_to_all([ids[place] // count for place in places])
    values = ranks.all_to_all([sent[1][place] for place in places])
    _fill(received[0], rows, spare_row(attrs["rows"], count))
    _fill(received[1], values, 0)


def _each_once(rows: Any) -> Any:
    """The first of rows that ascend, without those that repeat the last one."""
    return rows[: 1 + int(np.count_nonzero(rows[1:] > rows[:-1]))] if rows.size else rows


def _by_owner(values: Any, ids: Any, ranks: int) -> list[Any]:
    """``values``, one for each id, by the rank that holds the id's row."""
    owner = ids % ranks
    return [values[owner == rank] for rank in range(ranks)]


def _fill(target: Any, parts: Sequence[Any], rest: int) -> None:
    """Put what came from each rank into its share of an array, and a number into what is left of that."""
    target[...] = rest
    for share, part in zip(np.split(target, len(parts)), parts, strict=True):
        share[: len(part)] = part
