"""Gradient clipping: objects to hand to an optimizer as ``grad_clip``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from amp_transpiler.errors import ArgumentError
from amp_transpiler.ir.nodes import OWN, Variable
from amp_transpiler.lists.paddle import paddle_arguments
from amp_transpiler.ops.training.clip import GLOBAL_NORM, NORM, VALUE
from amp_transpiler.ops.training.scaling import master_type
from amp_transpiler.option_checks import is_real, number
from amp_transpiler.passes.autodiff.sparse_gradient import replacement


class GradientClip:
    """Appends one clipping operator over all gradients; they are fp32 and unscaled by then."""

    _type: str
    _attrs: dict[str, Any]

    def append(self, grads: Sequence[Variable]) -> list[Variable]:
        """Clipped gradients, fp32 (fp64 for fp64), in order; appended to the gradients' program."""
        program = grads[0].program
        clipped = [replacement(grad, f"{grad.name}@CLIP", master_type(grad.dtype)) for grad in grads]
        dealt = [int(grad.grad_of is not None and grad.grad_of.dealt is not None) for grad in grads]
        attrs = {**self._attrs, "dealt": dealt} if any(dealt) else self._attrs
        program.add_operator(self._type, grads, clipped, attrs=attrs, domain=OWN)
        return clipped


def _limit(owner: GradientClip, name: str, value: Any) -> float:
    number(f"{type(owner).__name__}: {name}", value)
    return float(value)


class _ByNorm(GradientClip):
    """A clip that limits a norm."""

    def __init__(self, clip_norm: float) -> None:
        self._attrs = {"clip_norm": _limit(self, "clip_norm", clip_norm)}


@paddle_arguments("optimizer.clip")
class ClipGradByGlobalNorm(_ByNorm):
    """Multiply all gradients by ``clip_norm / max(norm, clip_norm)``, norm over all of them together."""

    _type = GLOBAL_NORM


@paddle_arguments("optimizer.clip")
class ClipGradByNorm(_ByNorm):
    """Multiply each gradient by ``clip_norm / max(norm, clip_norm)``, norm of that gradient."""

    _type = NORM


@paddle_arguments("optimizer.clip")
class ClipGradByValue(GradientClip):
    """Limit every element to ``[min, max]``; ``min`` is ``-max`` by default."""

    _type = VALUE

    def __init__(self, max: float, min: float | None = None) -> None:
        for name, value in (("max", max), ("min", min)) if min is not None else ():
            if not is_real(value) or math.isnan(value):
                raise ArgumentError(f"ClipGradByValue: {name} is {value!r}; expected a number")
        high = _limit(self, "max", max) if min is None else float(max)
        low = -high if min is None else float(min)
        if not low < high:
            raise ArgumentError(f"ClipGradByValue: min {low} is not below max {high}")
        self._attrs = {"max": high, "min": low}
