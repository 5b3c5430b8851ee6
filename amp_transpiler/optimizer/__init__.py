"""Optimizers, gradient clipping, loss scaling and ``decorate``."""

from ..lists.paddle import paddle_attributes
from . import lr
from .amp_optimizer import OptimizerWithMixedPrecision
from .base import Optimizer
from .clip import ClipGradByGlobalNorm, ClipGradByNorm, ClipGradByValue
from .decorate import decorate
from .ema import ExponentialMovingAverage
from .loss_scale_optimizer import LossScaleOptimizer
from .optimizers import SGD, Adam, AdamW, Lamb, Lars, Momentum
from .policy import Policy, get_global_policy, policy_scope, set_global_policy
from .scaler import LossScale, LossScaler
from .scaling import check_finite_and_unscale, update_loss_scaling
from .schedule import enable_static

__getattr__ = paddle_attributes("amp_transpiler.optimizer")

__all__ = [
    "SGD", "Momentum", "Lars", "Adam", "AdamW", "Lamb", "Optimizer", "ExponentialMovingAverage",
    "ClipGradByGlobalNorm", "ClipGradByNorm", "ClipGradByValue",
    "LossScale", "LossScaleOptimizer", "LossScaler", "Policy", "OptimizerWithMixedPrecision", "decorate",
    "enable_static", "lr",
    "check_finite_and_unscale", "get_global_policy", "policy_scope", "set_global_policy", "update_loss_scaling",
]  # fmt: skip
