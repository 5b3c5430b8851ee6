"""Keras's ``mixed_precision`` by its own names::

amp.mixed_precision.set_global_policy("mixed_float16")
optimizer = amp.mixed_precision.LossScaleOptimizer(amp.optimizer.Adam(), initial_scale=2.0**10)
"""

from amp_transpiler.optimizer.loss_scale_optimizer import LossScaleOptimizer
from amp_transpiler.optimizer.policy import Policy, get_global_policy as global_policy, set_global_policy

__all__ = ["LossScaleOptimizer", "Policy", "global_policy", "set_global_policy"]
