"""Rows of an operator of the training step, worked on together where the lowering says so.

``joined`` makes one tensor of theirs, and ``parts`` takes one apart again. Both remember what is what, so that a rule
which joins the parts that another rule has made gets the tensor of which they are the parts, and nobody pays for taking
it apart.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from amp_transpiler.ir.emitter import Emitter, Maker, Value
from amp_transpiler.ir.flat import Rows
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ops.common import grouped, once, pieces, unviewed

#: Elements up to which launching a kernel costs more than what it moves.
_FEW = 2**18
#: Elements from which on moving them once more costs more than launching a kernel.
_MUCH = 2**20
#: States of one length from which on they are cast together where a Split makes pieces of one length alone.
_MANY = 4
#: Operators that make zeros of zeros, by which of their inputs are as large as what they make.
_KEEPS_ZEROS = {
    "Cast": ([True],),
    "Neg": ([True],),
    "Mul": ([True, False], [False, True], [True, True]),
    "Div": ([True, False], [True, True]),
    "Add": ([True, True],),
    "Sub": ([True, True],),
    "Where": ([False, True, True],),
}


def rows_of(e: Emitter, op: Operator, count: int) -> list[Rows]:
    """The ``count`` rows of an operator as they are worked on: those together first, then each other, in order."""
    found = list(e.rows.get(op.key, ()))
    taken = {number for rows in found for number in rows.numbers}
    found += [Rows((number,)) for number in range(count) if number not in taken]
    return sorted(found, key=lambda rows: rows.numbers[0] if rows.chunks > 1 or not rows.shapes else -1)


def joined(e: Emitter, rows: Rows, values: Sequence[Value]) -> Value:
    """One tensor for ``values``, which belong to the rows; zeros fill what lies between them."""
    if not rows.shapes:
        return values[0]
    found = once(e, _key(values), lambda: _together(e, rows, values) or _side_by_side(e, rows, values))
    return Value(found.name, values[0].dtype, found.shape)


def _side_by_side(e: Emitter, rows: Rows, values: Sequence[Value], between: float = 0.0) -> Value:
    """One tensor for ``values``, with this number between them."""
    if all(value.name in e.initializers for value in values):
        return _constant(e, rows, values, between)
    pieces, end = list[tuple[int, Value | None]](), 0
    for value, offset, shape in zip(values, rows.offsets, rows.shapes, strict=True):
        if offset > end:
            pieces.append((offset - end, None))
        pieces.append((math.prod(shape), value))
        end = offset + math.prod(shape)

    def chained(part: Sequence[tuple[int, Value | None]]) -> Value:
        """One row of several. What stands last in the file is made first, so pieces stand there in their order."""
        if len(part) > 1:
            runs = [chained(run) for run in _runs(part, e.at.most_tensors or len(part))]
            return e.Concat(*runs, axis=1, shape=(1, sum(size for size, _ in part)))
        ((size, value),) = part
        return e.reshape(value or e.const(np.full((1, size), between), values[0].dtype), (1, size))

    return e.reshape(chained(pieces), rows.shape)


def _runs(pieces: Sequence[tuple[int, Any]], most: int) -> list[Sequence[tuple[int, Any]]]:
    """Sized pieces in at most ``most`` runs of neighbours, as many large ones by themselves as can be: what is in a run
    of several is moved once more."""
    count = len(pieces)
    if count <= most:
        return [pieces[at : at + 1] for at in range(count)]
    large = sorted((at for at in range(count) if pieces[at][0] >= _MUCH), key=lambda at: -pieces[at][0])
    for alone in range(min(len(large), most // 2), 0, -1):
        ends = [0, *itertools.chain.from_iterable((at, at + 1) for at in sorted(large[:alone])), count]
        found = [run for begin, end in itertools.pairwise(ends) for run in grouped(pieces[begin:end], most)]
        if len(found) <= most:
            return found
    return grouped(pieces, most)


def _constant(e: Emitter, rows: Rows, values: Sequence[Value], between: float) -> Value:
    """The same of constants, of which one number stands for a whole row."""
    whole = np.full(rows.shape, between)
    for value, offset, shape in zip(values, rows.offsets, rows.shapes, strict=True):
        whole[0, offset : offset + math.prod(shape)] = e.content(value).ravel()
    return e.const(whole, values[0].dtype)


def _together(e: Emitter, rows: Rows, values: Sequence[Value]) -> Value | None:
    """``values`` as what one operator makes of the tensors that were read to make each of them, joined.

    None where they were not made alike, or where that would move more bytes. Zeros between rows stay zeros.
    """
    makers = _alike(e, rows, values)
    first = makers[0]
    if first is None or first.type not in _KEEPS_ZEROS or len(makers) == 1:
        return None
    kinds = {maker and (maker.type, len(maker.inputs), str(maker.attrs)) for maker in makers}
    columns = list(zip(*(maker.inputs for maker in makers if maker is not None), strict=False))
    one = [len({v and v.name for v in column}) == 1 and math.prod(_size(column[0])) == 1 for column in columns]
    wide = [not single for single in one]
    if len(kinds) > 1 or wide not in _KEEPS_ZEROS[first.type] or (sum(wide) > 1 and rows.size > _FEW):
        return None
    read = []
    for place, (column, single) in enumerate(zip(columns, one, strict=True)):
        known = [v for v in column if v is not None and v.dtype == column[0].dtype]
        if len(known) < len(column) or not (single or _fills(e, rows, known)):
            return None
        below = first.type == "Div" and place == 1
        read.append(known[0] if single else (_side_by_side(e, rows, known, 1.0) if below else joined(e, rows, known)))
    whole: Value = e.op(first.type, *read, dtype=values[0].dtype, shape=rows.shape, **first.attrs)
    for number, value in enumerate(values):
        made_of = (column[number] for column, single in zip(columns, one, strict=True) if not single)
        e.joined_through[value.name] = (whole.name, tuple(v.name for v in made_of if v is not None))
    return whole


def _alike(e: Emitter, rows: Rows, values: Sequence[Value]) -> list[Maker | None]:
    """What made each value. Where most are small quotients, the others are themselves by ones, bit for bit, if dividing
    all of them at once takes fewer kernels."""
    makers = [e.makers.get(unviewed(e, value).name) for value in values]
    divided = [
        maker is not None and maker.type == "Div" and len({math.prod(_size(v)) for v in maker.inputs}) == 1
        for maker in makers
    ]
    most = e.at.most_tensors or len(values)
    joining = 1 if len(values) <= most else 1 + math.ceil(len(values) / most)
    if all(divided) or sum(divided) <= 1 + joining or rows.size > _FEW:
        return makers
    return [
        maker if quotient else Maker("Div", (value, e.const(np.ones(shape), value.dtype)), {})
        for maker, quotient, value, shape in zip(makers, divided, values, rows.shapes, strict=True)
    ]


def _fills(e: Emitter, rows: Rows, values: Sequence[Value]) -> bool:
    """Whether tensors have the sizes of the rows, or are constants of which one number stands for a row."""
    sizes = [(math.prod(_size(v)), math.prod(shape)) for v, shape in zip(values, rows.shapes, strict=True)]
    constant = all(v.name in e.initializers for v in values)
    return all(size == wanted or (constant and size == 1) for size, wanted in sizes)


def _size(value: Value | None) -> tuple[int, ...]:
    """The shape, one that nothing has where it is not known."""
    return (-1,) if value is None or value.shape is None else value.shape


def parts(e: Emitter, rows: Rows, value: Value) -> list[Value]:
    """The tensors of the rows, out of the one for all of them."""
    if not rows.shapes:
        return [value]
    sizes = [math.prod(shape) for shape in rows.shapes]
    ends = [*rows.offsets[1:], rows.size]
    gaps = [end - offset - size for offset, size, end in zip(rows.offsets, sizes, ends, strict=True)]
    lengths = [length for pair in zip(sizes, gaps, strict=True) for length in pair if length]
    apart = iter(pieces(e, value, 1, lengths))
    found = []
    for size, gap, shape in zip(sizes, gaps, rows.shapes, strict=True):
        piece = next(apart)
        found.append(e.reshape(Value(piece.name, piece.dtype, (1, size)), shape))
        if gap:
            next(apart)
    remember(e, found, value)
    return found


def state_as(e: Emitter, value: Value, dtype: str) -> Value:
    """A state in another element type. The vectors of a flat state are cast together, or all that is in it; where a
    Split makes pieces of one length alone, the small ones of a length that many have: taking them apart takes a Slice
    and a Split for each length."""
    key, lies = f"{value.name} as {dtype}", e.shared.get(_lies_with(value), ())
    if value.dtype != dtype and key not in e.shared:
        if e.at.by_address:
            lengths = Counter(math.prod(_size(v)) for v in lies)
            some = {length for length, count in lengths.items() if length <= _FEW and count >= _MANY}
            lies = tuple(v for v in _by_size(lies) if math.prod(_size(v)) in some)
        rows = Rows(tuple(range(len(lies))), tuple(v.shape or () for v in lies))
        if value not in lies:
            return e.cast(value, dtype)
        low = parts(e, rows, e.cast(joined(e, rows, lies), dtype))
        e.shared |= {f"{v.name} as {dtype}": (part,) for v, part in zip(lies, low, strict=True)}
    return value if value.dtype == dtype else e.shared[key][0]


def _by_size(values: Iterable[Value]) -> list[Value]:
    """Values in order of their sizes, so that those of one length lie beside each other."""
    return sorted(values, key=lambda v: math.prod(_size(v)))


def products(e: Emitter, pairs: Sequence[tuple[Value, Value]]) -> list[Value]:
    """The products of pairs of small vectors, each of two alike."""
    if len(pairs) == 1:
        return [e.Mul(*pairs[0])]
    rows = Rows(tuple(range(len(pairs))), tuple(a.shape or () for a, _ in pairs))
    left, right = (joined(e, rows, column) for column in zip(*pairs, strict=True))
    return parts(e, rows, e.Mul(left, right))


def remember_state(e: Emitter, values: Sequence[Value], whole: Value, cast_whole: bool) -> None:
    """That ``values`` are the parts of a flat state, and whether all of them are cast together."""
    remember(e, values, whole)
    together = tuple(v for v in values if cast_whole or len(v.shape or ()) == 1)
    e.shared |= {_lies_with(v): together for v in together}


def _lies_with(value: Value) -> str:
    return f"what lies with {value.name}"


def remember(e: Emitter, values: Sequence[Value], whole: Value) -> None:
    """That ``values`` are the parts of ``whole``."""
    e.shared[_key(values)] = (whole,)


def alone(part: Value) -> str:
    """The key of what a part of several was made of, for itself."""
    return f"alone: {part.name}"


def are_joined(e: Emitter, values: Sequence[Value]) -> bool:
    """Whether there is one tensor of which ``values`` are the parts, all of them."""
    return _key(values) in e.shared


def _key(values: Sequence[Value]) -> str:
    return "\0".join(["one of", *(value.name for value in values)])
