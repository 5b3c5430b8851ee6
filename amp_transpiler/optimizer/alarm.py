"""The alarm of a loss scaler: what is wrong when step after step is bad, and the way out."""

from __future__ import annotations

import math
from typing import NoReturn

from amp_transpiler.errors import LossScaleError


def raise_alarm(scale: float, bad_in_a_row: int, loss_finite: bool, at_floor: bool) -> NoReturn:
    """Raise LossScaleError for a run of bad steps.

    Args:
        scale: the loss scale now.
        bad_in_a_row: how many steps up to now were bad.
        loss_finite: whether the loss itself, not scaled, was finite in the last step.
        at_floor: the scale is at its floor, and cannot be decreased.
    """
    steps = f"the last {bad_in_a_row} steps were bad" if bad_in_a_row != 1 else "the last step was bad"
    where = f"the loss scale {scale:g} is at its floor" if at_floor else f"the loss scale is {scale:g}"
    raise LossScaleError(f"{steps}, and {where}: {_cause(scale, loss_finite, at_floor)}")


def _cause(scale: float, loss_finite: bool, at_floor: bool) -> str:
    fp32 = "in fp32, with custom_black_list or custom_black_varnames"
    if not loss_finite:
        return (
            "the loss itself is not finite, which no scale can fix. Look at the data and the learning rate; where "
            f"the same step is finite in fp32, keep the operators that overflow {fp32}"
        )
    if not math.isfinite(scale) or scale == 0:
        return (
            "the loss is finite, but no gradient can be unscaled by this scale. Use a scaler with a floor and "
            "finite_growth, and set the scale anew"
        )
    if at_floor or scale <= 1:
        return (
            "the loss is finite, but its gradients are not even at this scale. Keep the operators whose gradients "
            f"overflow {fp32}; or let the scale sink, with a lower floor"
        )
    return (
        "the loss is finite, its gradients at this scale are not: only the scale is too high. Start with a smaller "
        "init_scale, or let it decrease faster, with a smaller backoff_factor or backoff_after; a fixed scale has "
        "to be chosen smaller"
    )
