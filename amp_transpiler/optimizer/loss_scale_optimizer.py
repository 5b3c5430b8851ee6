"""Keras's ``LossScaleOptimizer``: ``decorate`` with the rule of tf_keras and the precision of the global policy."""

from __future__ import annotations

from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.optimizer.amp_optimizer import OptimizerWithMixedPrecision
from amp_transpiler.optimizer.base import Optimizer
from amp_transpiler.optimizer.decorating import decorate
from amp_transpiler.optimizer.policy import POLICIES, get_global_policy
from amp_transpiler.optimizer.scaler import LossScaler
from amp_transpiler.optimizer.update_rule import UpdateRule


class LossScaleOptimizer(OptimizerWithMixedPrecision):
    """What ``decorate(inner_optimizer, scaler=LossScaler.tf_keras(...))`` returns, with Keras's names beside.

    Args:
        inner_optimizer: an optimizer of this package, not yet used.
        dynamic: adapt the scale: twice as large after ``dynamic_growth_steps`` good steps in a row, half after a bad
            one, never below 1.
        initial_scale: the scale of the first step; 2**15 where it is left out of a dynamic one.
        dynamic_growth_steps: see ``dynamic``; 2000 where it is left out.

    Operators run in the type of the global policy; under "float32" in float16, since fp32 needs no scale.

    Raises:
        ArgumentError: a static scale without ``initial_scale`` or with ``dynamic_growth_steps``, a number out of range.
        ArgumentTypeError: no optimizer, ``dynamic`` neither True nor False.
    """

    def __init__(
        self,
        inner_optimizer: Optimizer,
        dynamic: bool = True,
        initial_scale: float | None = None,
        dynamic_growth_steps: int | None = None,
    ) -> None:
        if not isinstance(dynamic, bool):
            raise ArgumentTypeError(
                f"LossScaleOptimizer: dynamic is {dynamic!r}; expected True or False. A scale is "
                f"given by name, initial_scale={dynamic!r}"
            )
        if not dynamic and (initial_scale is None or dynamic_growth_steps is not None):
            raise ArgumentError(
                "LossScaleOptimizer: a static scale (dynamic=False) needs initial_scale, and takes no "
                "dynamic_growth_steps"
            )
        given = {} if dynamic_growth_steps is None else {"growth_every": dynamic_growth_steps}
        scale = 2.0**15 if initial_scale is None else initial_scale
        scaler = LossScaler.tf_keras(init_scale=scale, **given) if dynamic else LossScaler.fixed(scale)
        made = decorate(inner_optimizer, dtype=POLICIES[get_global_policy()] or "float16", scaler=scaler)
        vars(self).update(vars(made))

    @property
    def inner_optimizer(self) -> UpdateRule:
        """The optimizer that was wrapped."""
        return self.optimizers[0]

    @property
    def dynamic(self) -> bool:
        """Whether the scale changes."""
        return self.loss_scaler.dynamic

    @property
    def initial_scale(self) -> float:
        """The scale of the first step."""
        return self.loss_scaler.init_scale

    @property
    def dynamic_growth_steps(self) -> int | None:
        """Good steps in a row to a growth; None for a static scale."""
        return self.loss_scaler.growth_every if self.dynamic else None

    @property
    def loss_scale(self) -> float:
        """The scale that the current scope holds. OrderError before ``minimize``, ScopeError before the startup."""
        return self.get_loss_scale_state().scale
