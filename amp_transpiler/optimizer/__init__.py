"""Optimizers, gradient clipping, loss scaling and ``decorate``."""

from amp_transpiler.lists.paddle import add_paddle_names
from amp_transpiler.optimizer import lr
from amp_transpiler.optimizer.amp_optimizer import OptimizerWithMixedPrecision
from amp_transpiler.optimizer.base import Optimizer
from amp_transpiler.optimizer.decorating import decorate
from amp_transpiler.optimizer.ema import ExponentialMovingAverage
from amp_transpiler.optimizer.gradient_clip import ClipGradByGlobalNorm, ClipGradByNorm, ClipGradByValue
from amp_transpiler.optimizer.loss_scale_optimizer import LossScaleOptimizer
from amp_transpiler.optimizer.loss_scaling import check_finite_and_unscale, update_loss_scaling
from amp_transpiler.optimizer.lr_schedule import enable_static
from amp_transpiler.optimizer.optimizers import SGD, Adagrad, Adam, AdamW, Lamb, Lars, Momentum
from amp_transpiler.optimizer.policy import Policy, get_global_policy, policy_scope, set_global_policy
from amp_transpiler.optimizer.running_square import RMSProp
from amp_transpiler.optimizer.scaler import LossScale, LossScaler

add_paddle_names(globals())

__all__ = [
    "SGD",
    "Momentum",
    "Lars",
    "Adagrad",
    "RMSProp",
    "Adam",
    "AdamW",
    "Lamb",
    "Optimizer",
    "ExponentialMovingAverage",
    "ClipGradByGlobalNorm",
    "ClipGradByNorm",
    "ClipGradByValue",
    "LossScale",
    "LossScaleOptimizer",
    "LossScaler",
    "Policy",
    "OptimizerWithMixedPrecision",
    "decorate",
    "enable_static",
    "lr",
    "check_finite_and_unscale",
    "get_global_policy",
    "policy_scope",
    "set_global_policy",
    "update_loss_scaling",
]
