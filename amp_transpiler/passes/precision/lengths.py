"""Vectors that a training program divides by their lengths, and shares of a sum, in float16."""

from __future__ import annotations

from amp_transpiler.ir.graph import Graph
from amp_transpiler.lists import AutoMixedPrecisionLists
from amp_transpiler.passes.canonicalize.floored_sums import write_shares
from amp_transpiler.passes.canonicalize.unit_vectors import write_unit_vectors
from amp_transpiler.passes.precision.rules import black_operators
from amp_transpiler.passes.view.typing import programs


def write_lengths(program: Graph, lists: AutoMixedPrecisionLists, use_fp16_guard: bool) -> None:
    """Let them be divided by an operator that squares in fp32 inside, in place, where the lists and the guard put all
    of it in float16: written out, and with a least length of 1e-12, it is fp32 tensors between casts."""
    if lists.dtype != "float16":
        return
    kept = {op for op in program.walk() if op.full_type in lists.custom_black_list or (use_fp16_guard and not op.guard)}
    keep = frozenset(kept | black_operators(program, lists).keys())
    for each in list(programs(program)):
        write_unit_vectors(each, frozenset(lists.black_varnames), keep)
        write_shares(each, frozenset(lists.black_varnames), keep)
