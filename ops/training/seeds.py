"""Where the random numbers of a program begin: a seed and the number of the step, which are state."""

from __future__ import annotations

import numpy as np

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import FORWARD, OWN, Variable

SEED, STEP = "@rng_seed", "@rng_step"

_default_seed = 0


def rng_state(program: Graph, startup: Graph | None = None) -> tuple[Variable, Variable]:
    """The program's persistable uint32 scalars (seed, step), made on the first call.

    ``startup`` (default: ``program.startup``) sets them to its seed and to 0. Every run of the program
    advances the step by one, a step that is skipped for overflow included.
    """
    if program.has_var(STEP):
        return program.var(SEED), program.var(STEP)
    startup = startup or program.ensure_startup()
    known = program.has_var(SEED)  # a clone for testing keeps the seed, but not the step
    seed = program.var(SEED) if known else program.add_variable(SEED, "uint32", (), persistable=True)
    step = program.add_variable(STEP, "uint32", (), persistable=True)
    startup_seed(startup)
    if not startup.has_var(STEP):
        first = startup.add_variable(STEP, "uint32", (), persistable=True)
        startup.add_operator("ConstantInitializer", [], [first], domain=OWN, attrs={"value": np.zeros((), np.uint32)})
    one = program.add_constant(f"{STEP}.one", np.ones((), np.uint32))
    after = program.add_variable(f"{STEP}@NEW", "uint32", ())
    advance = program.add_operator("Add", [step, one], [after], role=FORWARD)
    advance.guard, advance.scope = False, ""  # wherever the first dropout stands, this belongs to the program
    program.set_update(step, after)
    return seed, step


def set_default_seed(seed: int) -> None:
    """The seed of startup programs that have none of their own when their first initialiser is added."""
    global _default_seed
    _default_seed = seed


def startup_seed(startup: Graph) -> Variable:
    """The seed variable of a startup program: what ``startup.seed`` is when it is lowered."""
    if startup.has_var(SEED):
        return startup.var(SEED)
    startup.seed = startup.seed or _default_seed
    seed = startup.add_variable(SEED, "uint32", (), persistable=True)
    startup.add_operator("SeedInitializer", [], [seed], domain=OWN)
    return seed
