"""What a benchmark of forms times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from amp_transpiler.ir.emitter import Value

Form = Callable[..., Value]


@dataclass(frozen=True)
class Case:
    """Forms of one result: the shapes of what they read, and each as a rule writes it."""

    title: str
    shapes: Sequence[tuple[int, ...]]
    forms: dict[str, Form]
    dtypes: Sequence[str] = ()
