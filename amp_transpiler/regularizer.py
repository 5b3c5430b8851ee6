"""Penalties on parameters, as an optimizer's ``weight_decay`` takes them; a number there is an L2 penalty."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.option_checks import is_finite


@dataclass(frozen=True)
class _Penalty:
    coeff: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "coeff", _coefficient(type(self).__name__, "coeff", self.coeff))


class L1Decay(_Penalty):
    """Adds ``coeff * sign(p)`` to the gradient, after clipping. ArgumentError: a coefficient below 0."""


class L2Decay(_Penalty):
    """Adds ``coeff * p`` to the gradient, after clipping: what a number does. ArgumentError: a coefficient below 0."""


#: The coefficient of an L2 penalty, or an L1 penalty.
Decay = float | L1Decay


def _coefficient(owner: str, name: str, value: Any) -> float:
    if not is_finite(value) or value < 0:
        raise ArgumentError(f"{owner}: {name} is {value!r}; expected a number >= 0")
    return float(value)


def checked_decay(owner: str, value: Any, penalties: bool = True) -> Decay:
    """``weight_decay`` of an optimizer called ``owner``: 0 for None, a number for an L2 penalty.

    ArgumentTypeError: a penalty although ``penalties`` says that this optimizer decays in a way of its own.
    ArgumentError: neither a penalty nor a number >= 0.
    """
    if isinstance(value, _Penalty):
        if not penalties:
            raise ArgumentTypeError(
                f"{owner}: weight_decay is {value!r}, a penalty that is added to the gradient; this optimizer decays "
                f"apart from the gradient: pass the number {value.coeff:g}, or use Adam, which takes a penalty"
            )
        return value if isinstance(value, L1Decay) else value.coeff
    return 0.0 if value is None else _coefficient(owner, "weight_decay", value)


__all__ = ["L1Decay", "L2Decay"]
