"""Which startup programs have begun the state of training steps in a scope, and what a step shares by that."""

from __future__ import annotations

import weakref
from collections.abc import Container
from types import MappingProxyType

from amp_transpiler.ops.training.master_names import mastered
from amp_transpiler.option_checks import listed
from amp_transpiler.passes.view.training_step import training_step
from amp_transpiler.program import Program
from amp_transpiler.runtime.plan import Plan
from amp_transpiler.runtime.scope import Scope
from amp_transpiler.warn import warn_user


def begin(program: Program, made: Container[str], scope: Scope) -> None:
    """Let a scope know whose state it has: what a startup program has ``made`` there."""
    begun = dict(scope.begun)
    for variable in program.variables:
        if variable.startup is not None and variable.name in made:
            own = weakref.ref(variable.startup)
            others = (one for one in begun.get(variable.name, ()) if one() is not None and one != own)
            begun[variable.name] = (*others, own)
    scope.begun = MappingProxyType(begun)


def warn_of_shared(program: Program, plan: Plan, scope: Scope) -> None:
    """AmpWarning where another startup program has begun the state of a step anew, after the step's own.

    Each of the two steps then goes on with what the other has left, by one learning rate, that of the last startup.
    Parameters and their masters are shared on purpose.
    """
    if plan.begun is scope.begun:
        return
    plan.begun = scope.begun
    shared = {}
    for state in (*program.updates, *training_step(program).learning_rates):
        begun = [startup() for startup in scope.begun.get(state.name, ())]
        if state.startup in begun[:-1] and mastered(state.name) is None:
            shared[state.name] = begun[-1]
    if not shared:
        return
    name, other = next(iter(shared.items()))
    own = program.var(name).startup
    assert own is not None and other is not None
    warn_user(
        f"program '{program.name}' trains with {listed(shared, 1)}, which startup program '{other.name}' began anew in "
        f"this scope after its own, '{own.name}': the programs that these two begin share moments, counts and rates, "
        "and each step goes on with what the other's has left. Begin both by one startup program, "
        "program_guard(main, startup) and minimize(loss, startup), where each gets moments of its own; or give each a "
        "scope"
    )
