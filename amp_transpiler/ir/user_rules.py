"""``amp.register_gradient``: gradients of operators that users have, in the table of those of this package."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from amp_transpiler.errors import ArgumentError
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.opdef import Rule, entry, gradient
from amp_transpiler.option_checks import switch

#: The operators whose rule a user has registered.
_OF_USERS: set[str] = set()


def register_gradient(
    full_type: str,
    reads: str,
    *,
    inputs: Sequence[int] | None = None,
    native: bool = False,
    refuse: Callable[[Operator], str] | None = None,
    stops: Sequence[int] = (),
    replace: bool = False,
) -> Callable[[Rule], Rule]:
    """Register the decorated function as the gradient of an operator, for every program of this process.

    It returns one value per forward input, None where there is no gradient; ``e.wants(i)`` says whether the gradient of
    input ``i`` is asked for. docs/operators.md says how a rule is written.

    Args:
        full_type: "Type" or "domain::Type".
        reads: what the rule takes after the emitter and the operator: forward inputs ``x0 x1 …`` (``x*``: all, as a
            list), forward outputs ``y0 …``, output gradients ``dy0 …`` (``dy*``).
        inputs: the slots that have a gradient, by default every float one. A path through any other float input is an
            error at ``append_backward``.
        native: the rule takes 16-bit values as they are; otherwise it gets them widened to fp32, and its results are
            rounded once.
        refuse: says of an operator why the rule does not serve it, "" where it does; a reason is an error there.
        stops: slots at which a path ends: nothing is learned of what they read.
        replace: let it take the place of a rule that this package has, or of its word that there is no gradient. One of
            your own is replaced anyway.

    Raises:
        ArgumentError: this package has a rule for the operator, and ``replace`` is False; or ``reads`` names something
        else. ArgumentTypeError: no text, no function.
    """
    switch("register_gradient: replace", replace)
    found = entry(full_type).gradient
    if found is not None and full_type not in _OF_USERS and not replace:
        what = f"takes the gradient of {full_type} for zero" if found.zero else f"has a rule for {full_type}"
        raise ArgumentError(
            f"register_gradient: this package {what}; give replace=True to let yours take its place, for every program "
            "of this process"
        )
    register = gradient(full_type, reads, inputs=inputs, native=native, refuse=refuse, stops=stops)

    def registered(function: Rule) -> Rule:
        made = register(function)
        _OF_USERS.add(full_type)
        return made

    return registered
