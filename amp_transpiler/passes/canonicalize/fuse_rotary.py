"""Rotary positions that an exporter wrote out become one operator when they are trained.

Written out, ``x * cos + concat(-b, a) * sin``, where a and b are the halves of x or its even and odd numbers
(:mod:`.rotary_parts`), takes seven operators and more, and their gradients as many; ``concat(a * cos - b * sin,
a * sin + b * cos)``, which the operator of ONNX stands for, too. RotaryEmbedding of onnxruntime reads queries or keys
once and writes them once; its gradient is the turn back. What is saved for inference has them written out again.
DeepSeek turns neighbours and puts them together as halves: there a transposition follows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from amp_transpiler.ir.contrib_types import DOMAIN
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.metadata import FUSED
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.types import FLOATS
from amp_transpiler.passes.canonicalize.matching import computed, factor, maker, only_reader, remove
from amp_transpiler.passes.canonicalize.rotary_parts import Joined, Part, joined, negated, part_of, repeats
from amp_transpiler.passes.view.of_type import of_type
from amp_transpiler.passes.view.reached import reached

TYPE = "RotaryEmbedding"
_STANDS_FOR = "Mul Add Concat Neg Sub"


@dataclass(frozen=True)
class _Turn:
    """The operator that ends it, what is turned, and the cosines and sines beside it, for half of it or all.

    ``pairs``: neighbours are turned against each other, not halves; ``apart``: and are halves behind that.
    """

    last: Operator
    x: Variable
    cos: Variable
    sin: Variable
    pairs: bool
    apart: bool = False


@dataclass(frozen=True)
class _Layout:
    """[batch, heads, places, size], or, where ``heads`` is given, [batch, places, heads, size].

    ``examples``: of the tables, 1 or the batch.
    """

    examples: int
    places: int | str
    heads: int | None
    size: int


def fuse_rotations(program: Graph) -> list[str]:
    """Put one operator in the place of each rotation of pairs, a head's halves or neighbours, by angles that are not
    trained."""
    tables: dict[Variable, Variable] = {}
    count = 0
    for concat in of_type(program, "Concat"):
        found = joined(concat)
        turn = None if found is None else _of_both_parts(found) or _part_by_part(found)
        layout = None if turn is None or not _fixed(turn.cos) or not _fixed(turn.sin) else _layout(turn)
        if turn is not None and layout is not None:
            _fuse(turn, layout, tables)
            count += 1
    return [f"{count} rotations by position that were written out are one operator each"] if count else []


def _of_both_parts(found: Joined) -> _Turn | None:
    """x * cos + concat(-b, a) * sin, whose tables hold the same for both parts."""
    second, first, turned = part_of(negated(found.first)), part_of(found.second), found.last.output(0)
    if first is None or second != Part(first.x, True, found.pairs) or first != Part(first.x, False, found.pairs):
        return None
    product = only_reader(turned)
    sin = None if product is None else factor(product, turned)
    total = None if product is None or sin is None else only_reader(product.outputs[0])
    if product is None or sin is None or total is None or total.full_type != "Add":
        return None
    beside = maker(total.input(1) if total.input(0) is product.outputs[0] else total.input(0), "Mul")
    cos = None if beside is None else factor(beside, first.x)
    if cos is None or not repeats(cos, found.pairs) or not repeats(sin, found.pairs):
        return None
    return _Turn(total, first.x, cos, sin, found.pairs)


def _part_by_part(found: Joined) -> _Turn | None:
    """concat(a * cos - b * sin, a * sin + b * cos)."""
    real, imaginary = maker(found.first, "Sub"), maker(found.second, "Add")
    if real is None or imaginary is None:
        return None
    products = [_of_part(v) for v in (*real.inputs, *imaginary.inputs)]
    if None in products:
        return None
    (a, cos), (b, sin), (c, crossed), (d, straight) = products  # type: ignore[misc]
    if c.second:
        (c, crossed), (d, straight) = (d, straight), (c, crossed)
    same = a == c == Part(a.x, False, a.pairs) and b == d == Part(a.x, True, a.pairs) and a.pairs >= found.pairs
    apart = a.pairs and not found.pairs
    return _Turn(found.last, a.x, cos, sin, a.pairs, apart) if same and crossed is sin and straight is cos else None


def _of_part(variable: Variable | None) -> tuple[Part, Variable] | None:
    """The part of a head that a product multiplies, and with what."""
    product = maker(variable, "Mul")
    for half in product.inputs if product is not None else ():
        part, table = part_of(half), None if product is None else factor(product, half)
        if part is not None and table is not None:
            return part, table
    return None


def _fixed(variable: Variable) -> bool:
    """Whether no parameter is behind its numbers, and nothing fed that may have a gradient."""

    def behind(at: Variable) -> Iterable[Variable]:
        read = () if at.producer is None else (*at.producer.inputs, *at.producer.captures)
        return (v for v in read if v is not None and v.dtype in FLOATS)

    return not any(v.is_parameter or (v.is_input and not v.stop_gradient) for v in reached([variable], behind))


def _layout(turn: _Turn) -> _Layout | None:
    """How queries or keys and their tables lie; None where the operator does not have them so."""
    shape, given = turn.x.shape or (), turn.cos.shape or ()
    size, table = shape[3], (1,) * (4 - len(given)) + given
    if turn.sin.shape != given or len(table) != 4 or not given:
        return None
    if not isinstance(size, int) or table[3] not in (size, size // 2):
        return None
    for axis in (2, 1):
        examples, places, heads = table[0], table[axis], shape[3 - axis]
        if places is None or places != shape[axis] or table[3 - axis] != 1 or not isinstance(examples, int):
            continue
        if examples == 1 or (examples == shape[0] and isinstance(places, int)):
            if axis == 2 or isinstance(heads, int):
                return _Layout(examples, places, heads if axis == 1 else None, size)  # type: ignore[arg-type]
    return None


def _fuse(turn: _Turn, layout: _Layout, tables: dict[Variable, Variable]) -> None:
    program, last, x, heads = turn.last.program, turn.last, turn.x, layout.heads
    cos, sin = (_as_rows(table, turn, layout, tables) for table in (turn.cos, turn.sin))
    attrs = {"interleaved": 1} if turn.pairs else {}
    at: np.ndarray = np.zeros(1, np.int64)  # consecutive ones, from the first on
    if layout.examples != 1 and isinstance(layout.places, int):
        at = np.arange(layout.examples * layout.places).reshape(layout.examples, layout.places)
    read, out = [program.add_constant(f"{x.name}.positions", at), cos, sin], last.outputs[0]
    remove(last, {x, turn.cos, turn.sin})
    if turn.apart:
        paired = program.fresh_variable(f"{x.name}.tmp", x.dtype, x.shape)
        _part(paired, out, layout.size, last)
        out = paired
    if heads is None:
        _add(program, [x, *read], out, last, attrs)
        return
    width, (batch, places, *_) = heads * layout.size, x.shape or ()
    rows, turned = (program.fresh_variable(f"{x.name}.tmp", x.dtype, (batch, places, width)) for _ in range(2))
    _reshape(x, rows, [0, 0, width], last)
    _add(program, [rows, *read], turned, last, {"num_heads": heads, **attrs})
    _reshape(turned, out, [0, 0, heads, layout.size], last)


def _add(program: Graph, read: list[Variable], out: Variable | None, like: Operator, attrs: dict[str, Any]) -> None:
    op = program.add_operator(TYPE, read, [out], domain=DOMAIN, attrs=attrs, name=like.name, like=like)
    op.metadata[FUSED] = _STANDS_FOR


def _reshape(source: Variable, target: Variable | None, sizes: list[int], like: Operator) -> None:
    program = source.program
    program.add_operator(
        "Reshape", [source, program.add_constant(f"{source.name}.sizes", np.array(sizes))], [target], like=like
    )


def _part(paired: Variable, out: Variable | None, size: int, like: Operator) -> None:
    """Put the first of all neighbours before the second ones."""
    program, rows = paired.program, (paired.shape or ())[:3]
    columns = program.fresh_variable(f"{paired.name}.tmp", paired.dtype, (*rows, size // 2, 2))
    halves = program.fresh_variable(f"{paired.name}.tmp", paired.dtype, (*rows, 2, size // 2))
    _reshape(paired, columns, [0, 0, 0, size // 2, 2], like)
    program.add_operator("Transpose", [columns], [halves], attrs={"perm": [0, 1, 2, 4, 3]}, like=like)
    _reshape(halves, out, [0, 0, 0, size], like)


def _as_rows(table: Variable, turn: _Turn, layout: _Layout, tables: dict[Variable, Variable]) -> Variable:
    """One part of a table, or what is one already, as a matrix with a row for each place."""
    if table not in tables:
        program, part, width, shape = table.program, table, layout.size // 2, table.shape or ()
        if shape[-1] != width:
            numbers = (0, layout.size, -1, 2) if turn.pairs else (0, width, -1, 1)
            bounds = [program.add_constant(f"{table.name}.part", np.array([n])) for n in numbers]
            part = computed(turn.last, "Slice", [table, *bounds], f"{table.name}.tmp", (*shape[:-1], width))
        places: int | str = layout.places
        if layout.examples != 1 and isinstance(places, int):
            places *= layout.examples
        tables[table] = program.fresh_variable(f"{table.name}.tmp", table.dtype, (places, width))
        _reshape(part, tables[table], [-1, width], turn.last)
    return tables[table]
