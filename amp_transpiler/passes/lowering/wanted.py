"""What is asked of a lowered model."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.passes.lowering.arithmetic import Arithmetic
from amp_transpiler.passes.pipeline import Value


@dataclass(frozen=True)
class Cores:
    """Bytes of the cache that a core has for itself, 0 where that is not known, and how many threads a session has."""

    cache: int = 0
    threads: int = 1


@dataclass(frozen=True)
class Wanted:
    """What a lowered model gives, by the names of variables.

    ``fetches``: with neither these nor updates, the graph's outputs. ``updates``: those of the graph (True), none
    (False), or others, {state: its new value}. ``keep_fp32`` (on "cpu" alone): 16-bit variables that keep their fp32
    value, as if the operators that make them ran in fp32; an operator that makes none of them reads the rounded value.
    ``others``: new values that other ranks take, of state that is dealt out among them. What is exchanged on the way to
    these is exchanged here too, and rows of updates that nobody needs here are left to them.
    ``declared``: a fetch comes out in the type that the variable was declared with, not the one that it is held in.
    ``arithmetic``: whose 16-bit arithmetic it has; None for that of the place that runs it.
    ``cores``: of the machine that runs it, where that is known: the same program gives the same file on every machine.
    ``largest``: the largest shapes of feeds on any rank, where some are fed more than others.
    """

    fetches: tuple[str, ...] = ()
    updates: bool | Mapping[str, str] = True
    keep_fp32: Container[str] = frozenset()
    others: tuple[str, ...] = ()
    declared: bool = True
    arithmetic: Arithmetic | None = None
    cores: Cores = field(default_factory=Cores)
    largest: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def replays(self) -> bool:
        """Whether it computes as the program's own file does elsewhere, operator by operator."""
        return self.arithmetic is not None and not self.arithmetic.widens

    def written(self, graph: Graph) -> dict[Variable, Variable]:
        """The updates as variables of ``graph``."""
        if isinstance(self.updates, Mapping):
            return {graph.var(state): graph.var(new) for state, new in self.updates.items()}
        if not self.updates:
            return {}
        return {v: v for v in graph.variables if v.persistable and v.producer is not None} | graph.updates


#: What the model has to give, by default updates and outputs.
WANTED: Value[Wanted] = Value("wanted", Wanted)
