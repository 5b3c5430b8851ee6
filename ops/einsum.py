"""The equation of an Einsum: the labels of its operands' axes and of its result's, and their sizes."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any

from amp_transpiler.ir.emitter import Emitter, Value
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


def terms_of(attrs: Mapping[str, Any], shapes: Sequence[Sequence[int]]) -> tuple[list[str], str, dict[str, int]]:
    """The labels of each operand and of the result of an Einsum with these attributes, and the size of each label; an
    operand may have 1 there, and is repeated."""
    terms, result = labels_of(str(attrs["equation"]), [len(shape) for shape in shapes])
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=True):
        for label, size in zip(term, shape, strict=True):
            sizes[label] = size if sizes.get(label, 1) == 1 else sizes[label]
    return terms, result, sizes


def unrepeated(
    e: Emitter, terms: Sequence[str], values: Sequence[Value], sizes: Mapping[str, int]
) -> tuple[list[str], list[Value]]:
    """The labels along which operands are not repeated, and the operands without the others."""
    read = [
        "".join(k for k, size in zip(term, size_of(v), strict=True) if size == sizes[k])
        for term, v in zip(terms, values, strict=True)
    ]
    return read, [e.reshape(v, [sizes[label] for label in term]) for term, v in zip(read, values, strict=True)]
