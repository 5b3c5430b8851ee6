"""A training step that gathers the gradients of several runs."""

from __future__ import annotations

from dataclasses import dataclass

from amp_transpiler.ir.nodes import Variable


@dataclass(frozen=True)
class AccumulationWindow:
    """A step that is spread over ``steps`` runs of its program.

    ``counter``, a persistable int32 scalar, counts the runs since the last whole step; the executor moves it. Every
    run but the last writes ``updates`` in the place of the program's.
    """

    steps: int
    counter: Variable
    updates: dict[Variable, Variable]
