"""Batch normalisations that take their statistics over the batches of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from amp_transpiler.errors import ArgumentError, OrderError
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.metadata import ASKED, BY_RANKS, SYNCHRONIZED
from amp_transpiler.ir.patterns import matching


def mark_synchronized(program: Graph, patterns: Sequence[str]) -> int:
    """Ask for that of those whose name or scope fits; ``Program.synchronize_batch_norm`` says the rest."""
    if any(v.grad_of is not None for v in program.variables):
        raise OrderError(f"program '{program.name}' has gradients already; synchronise before minimize")
    norms = [op for op in program.operators if op.full_type == "BatchNormalization"]
    if not norms:
        raise ArgumentError(f"program '{program.name}' has no batch normalisation to be synchronised")
    marked = matching(norms, patterns, "synchronize_batch_norm")
    for op in marked:
        op.metadata[SYNCHRONIZED] = ASKED
    program.touch()
    return len(marked)


def synchronize(program: Graph) -> None:
    """Let those for which that was asked do so from now on."""
    for op in program.operators:
        if op.metadata.get(SYNCHRONIZED) == ASKED:
            op.metadata[SYNCHRONIZED] = BY_RANKS
            program.touch()
