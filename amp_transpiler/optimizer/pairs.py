"""Pairs of a parameter and its gradient, on their way from the backward pass to the update."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any

from amp_transpiler.errors import ArgumentError, ArgumentTypeError, GraphError
from amp_transpiler.ir.infer import differ
from amp_transpiler.ir.nodes import OWN, Variable
from amp_transpiler.ir.types import FLOATS
from amp_transpiler.ops.training.all_reduce import ALL_REDUCE
from amp_transpiler.ops.training.average import AVERAGE
from amp_transpiler.ops.training.scaling import CHECK
from amp_transpiler.optimizer.given_rows import keep_rows
from amp_transpiler.option_checks import listed, shown
from amp_transpiler.program import Program, program_of
from amp_transpiler.warn import warn_user

#: Operators whose output in a slot is the gradient in this slot, reduced over ranks or unscaled.
_SLOT_BY_SLOT = frozenset({ALL_REDUCE, CHECK})
ParamsGrads = list[tuple[Variable, Variable]]
GivenGrads = Sequence[tuple[Variable, Variable | None]]
#: Code of the user's on the gradients of a step.
Callback = Callable[[ParamsGrads], ParamsGrads]
Names = Collection[Variable | str]


def latest_first(params_grads: ParamsGrads) -> ParamsGrads:
    """The pairs in the order for operators that read many gradients: the gradient that is computed last comes first.

    onnxruntime computes what a node reads from its last input on. So each gradient is computed when the backward pass
    reaches it, and frees the activations it reads; in another order, such as that of an exporter's initializers, they
    are kept until the whole pass has gone by.
    """
    return sorted(params_grads, key=lambda pair: made_at(pair[1]), reverse=True)


def made_at(grad: Variable) -> int:
    """Where in the program a gradient is computed; for one that was reduced or unscaled, where it was before that."""
    op = grad.producer
    while op is not None and op.domain == OWN and op.type in _SLOT_BY_SLOT:
        source = op.input(grad.producer_slot)
        assert source is not None
        grad, op = source, source.producer
    return -1 if op is None else op.key


def split(params_grads: ParamsGrads, key: Callable[[Variable], Hashable]) -> list[ParamsGrads]:
    """The pairs in parts of equal ``key(parameter)``, in order."""
    parts: dict[Hashable, ParamsGrads] = {}
    for parameter, grad in params_grads:
        parts.setdefault(key(parameter), []).append((parameter, grad))
    return list(parts.values())


def called(callbacks: Sequence[Callback] | None, params_grads: ParamsGrads, what: str) -> ParamsGrads:
    """What callbacks make of the pairs, one after the other. ArgumentTypeError: no list of functions, or of pairs."""
    if not (callbacks is None or (isinstance(callbacks, list | tuple) and all(map(callable, callbacks)))):
        raise ArgumentTypeError(f"{what} is {callbacks!r}; expected a list of functions of [(parameter, gradient)]")
    for callback in callbacks or ():
        made = callback(list(params_grads))
        if not isinstance(made, list | tuple):
            raise ArgumentTypeError(f"{what}: {callback!r} returned {made!r}; expected [(parameter, gradient)]")
        checked_pairs(list(made))
        params_grads = list(made)
    return params_grads


def in_parameter_order(params_grads: ParamsGrads) -> ParamsGrads:
    """The pairs in the order of the program's parameters, as ``backward`` gives them."""
    numbers = {v.key: i for pair in params_grads[:1] for i, v in enumerate(pair[0].program.parameters)}
    return sorted(params_grads, key=lambda pair: numbers.get(pair[0].key, -1))


def without_none(params_grads: Any) -> ParamsGrads:
    """The pairs with a gradient, with one warning that names the others; ArgumentError where all are None.

    ArgumentTypeError: no list.
    """
    if not isinstance(params_grads, Iterable):
        raise ArgumentTypeError(f"params_grads is {shown(params_grads)}; expected a list of (parameter, gradient)")
    pairs = list(params_grads)
    none = [isinstance(pair, tuple) and len(pair) == 2 and pair[1] is None for pair in pairs]
    if any(none):
        names = ", ".join(
            f"'{getattr(pair[0], 'name', pair[0])}'" for pair, bad in zip(pairs, none, strict=True) if bad
        )
        if all(none):
            raise ArgumentError(f"params_grads: every gradient is None ({names}); there is nothing to update")
        warn_user(f"parameters without a gradient (None) are not updated: {names}")
    return [pair for pair, bad in zip(pairs, none, strict=True) if not bad]


def checked_pairs(params_grads: ParamsGrads) -> Program:
    """The program of [(parameter, gradient)]; errors for anything else, an empty list, a parameter given twice.

    What code of the user's computes of the rows of a sparse gradient is of these rows from here on.
    """
    pairs = list(params_grads)
    if not all(
        isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(v, Variable) for v in pair) for pair in pairs
    ):
        raise ArgumentTypeError(f"params_grads must be a list of (parameter, gradient) variables, not {params_grads!r}")
    for parameter, grad in pairs:
        if grad.is_parameter and not parameter.is_parameter:
            raise ArgumentError(
                f"params_grads: the pair ('{parameter.name}', '{grad.name}') is reversed; a pair is "
                f"(parameter, gradient), here ('{grad.name}', '{parameter.name}')"
            )
    if not pairs:
        raise ArgumentError("params_grads is empty: there is no parameter to update")
    keys = [parameter.key for parameter, _ in pairs]
    if len(set(keys)) < len(keys):
        twice = next(p.name for p, _ in pairs if keys.count(p.key) > 1)
        raise ArgumentError(f"params_grads names parameter '{twice}' twice")
    for parameter, grad in pairs:
        if parameter.program is not pairs[0][0].program or grad.program is not parameter.program:
            raise GraphError(f"parameter '{parameter.name}' and gradient '{grad.name}' belong to different programs")
        keep_rows(parameter, grad)
        _check_fit(parameter, grad)
    return program_of(pairs[0][0])


def _check_fit(parameter: Variable, grad: Variable) -> None:
    """ArgumentError where a gradient is known not to be one of the parameter, by its type or shape."""
    whole, given = parameter.shape, grad.shape
    other = grad.rows is None and whole is not None and given is not None and differ(whole, given)
    if other or grad.dtype not in (None, *FLOATS):
        raise ArgumentError(
            f"gradient {_typed(grad)} does not fit parameter {_typed(parameter)}: it is a float tensor of its shape"
        )


def _typed(variable: Variable) -> str:
    return f"'{variable.name}' ({variable.dtype} {'of any shape' if variable.shape is None else list(variable.shape)})"


def warn_untrained(wanted: Sequence[Variable], params_grads: ParamsGrads, no_grad_set: Names | None) -> None:
    """One warning that names the ``wanted`` parameters without a gradient, those of ``no_grad_set`` left out."""
    left = {item.name if isinstance(item, Variable) else item for item in no_grad_set or ()}
    left |= {parameter.name for parameter, _ in params_grads}
    names = [parameter.name for parameter in wanted if parameter.name not in left]
    if names:
        warn_user(
            f"trainable parameters get no gradient from this loss, and are not updated: {listed(names, 10)}. Where "
            "that is meant, create them with trainable=False, name those to train in parameter_list, or freeze them "
            "(--freeze)"
        )


def warn_unaveraged(program: Program, parameters: Sequence[Variable]) -> None:
    """One warning that names the ``parameters`` to be updated where moving averages of others stand in the program."""
    if any(op.type == AVERAGE for op in program.operators):
        warn_user(
            "parameters are updated that ExponentialMovingAverage.update, called before, gave no average: "
            f"{listed([parameter.name for parameter in parameters], 10)}. Call it after the last minimize or "
            "apply_gradients, where they are to have one"
        )
