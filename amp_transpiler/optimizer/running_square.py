"""RMSProp, by Paddle's formula; see ``amp_transpiler.ops.training.rmsprop``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amp_transpiler.lists.paddle import paddle_arguments
from amp_transpiler.optimizer.base import Optimizer
from amp_transpiler.optimizer.gradient_clip import GradientClip
from amp_transpiler.optimizer.groups import number
from amp_transpiler.optimizer.optimizers import Penalty, Rate
from amp_transpiler.optimizer.update_rule import Parameters
from amp_transpiler.option_checks import switch


@paddle_arguments("optimizer.parameters", "optimizer.penalty")
class RMSProp(Optimizer):
    """``s = rho s + (1 - rho) g^2; v = momentum * v + lr * g / sqrt(s + epsilon); p -= v`` (Hinton, 2012).

    ``centered`` divides by the root of the running variance instead, ``s - m^2 + epsilon`` with
    ``m = rho m + (1 - rho) g``. ``s``, ``m`` and ``v`` are fp32; without momentum there is no ``v``.
    """

    type = "RMSProp"

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        rho: float = 0.95,
        epsilon: float = 1e-6,
        momentum: float = 0.0,
        centered: bool = False,
        parameter_list: Parameters = None,
        weight_decay: Penalty = None,
        grad_clip: GradientClip | None = None,
        name: str | None = None,
        multi_precision: bool = False,
        *,
        weight_decay_exclude: Sequence[str] = (),
    ) -> None:
        super().__init__(
            learning_rate,
            parameter_list,
            weight_decay,
            grad_clip,
            multi_precision,
            name,
            weight_decay_exclude=weight_decay_exclude,
        )
        self.rho, self.epsilon, self.momentum = rho, epsilon, momentum
        self.centered = switch("RMSProp: centered", centered)
        self._attributes()  # raises for a value out of range

    def _attributes(self) -> dict[str, Any]:
        return {
            "rho": number("RMSProp", "rho", self.rho, 0, 1),
            "epsilon": number("RMSProp", "epsilon", self.epsilon, 0, open_low=True),
            "mu": number("RMSProp", "momentum", self.momentum, 0),
        }

    @property
    def _operator(self) -> str:
        return f"{'Centered' if self.centered else ''}RMSProp{'Momentum' if self.momentum else ''}"
