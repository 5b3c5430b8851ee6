"""Sizes that names of dimensions stand for, and what names compute of others (``past + 1``), as exporters write."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

_COMPUTES: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_COMPUTED = re.compile(r"[\w ()+*-]{3,100}", re.ASCII)


def size_of(size: int | str | None, chosen: Callable[[str | None], int]) -> int:
    """The size of a dimension: its own, or what is ``chosen`` for its name (None where it has none), or what the name
    computes of others."""
    if not isinstance(size, str):
        return chosen(None) if size is None else size
    if not _COMPUTED.fullmatch(size):
        return chosen(size)
    try:
        return max(_computed(ast.parse(size, mode="eval").body, chosen), 0)
    except (SyntaxError, ValueError):  # a name like any other
        return chosen(size)


def _computed(term: ast.expr, chosen: Callable[[str | None], int]) -> int:
    """The value of a sum or a product of names and numbers; ValueError for anything else."""
    if isinstance(term, ast.Name):
        return chosen(term.id)
    if isinstance(term, ast.Constant) and type(term.value) is int:
        return term.value
    if isinstance(term, ast.BinOp) and type(term.op) in _COMPUTES:
        return _COMPUTES[type(term.op)](_computed(term.left, chosen), _computed(term.right, chosen))
    raise ValueError
