"""The equation of an Einsum: the labels of its operands' axes and of its result's, and their sizes."""

from __future__ import annotations

import string
from collections.abc import Sequence

from amp_transpiler.ir.emitter import Value
from amp_transpiler.ops.common import size_of


def labels_of(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """The labels of each operand and of the result; the axes of an ellipsis get labels of their own."""
    equation = equation.replace(" ", "")
    left, arrow, result = equation.partition("->")
    terms = left.split(",")
    hidden = [rank - len(term) + 3 if "..." in term else 0 for term, rank in zip(terms, ranks, strict=True)]
    free = [label for label in string.ascii_letters if label not in equation]
    dots = free[: max(hidden)]
    terms = [term.replace("...", "".join(dots[len(dots) - n :])) for term, n in zip(terms, hidden, strict=True)]
    if arrow:
        return terms, result.replace("...", "".join(dots))
    letters = left.replace(".", "").replace(",", "")
    return terms, "".join([*dots, *sorted(label for label in set(letters) if letters.count(label) == 1)])


def sizes_of(terms: Sequence[str], shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    """The size of each label; an operand may have 1 there, and is repeated."""
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=True):
        for label, size in zip(term, shape, strict=True):
            sizes[label] = size if sizes.get(label, 1) == 1 else sizes[label]
    return sizes


def unrepeated(term: str, value: Value, sizes: dict[str, int]) -> str:
    """The labels along which an operand is not repeated."""
    return "".join(k for k, size in zip(term, size_of(value), strict=True) if size == sizes[k])
