"""The optimizers. Formulas are those of PaddlePaddle's kernels, see ``amp_transpiler.ops.update``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..errors import ArgumentTypeError
from ..lists.paddle import paddle_arguments
from .base import Optimizer, Parameters
from .clip import GradientClip
from .groups import number
from .lr import LRScheduler

Rate = float | LRScheduler
Choice = Callable[[str], bool] | None


@paddle_arguments("optimizer")
class SGD(Optimizer):
    """``p -= lr * (g + weight_decay * p)``. Arguments: see :class:`Optimizer`."""

    type = "SGD"


@paddle_arguments("optimizer")
class Momentum(Optimizer):
    """``v = momentum * v + g; p -= lr * v``, or ``p -= lr * (g + momentum * v)`` with ``use_nesterov``.

    ``weight_decay`` adds ``weight_decay * p`` to ``g``. The velocity is fp32.
    """

    type = "Momentum"

    def __init__(self, learning_rate: Rate = 0.001, momentum: float = 0.9, parameter_list: Parameters = None,
                 use_nesterov: bool = False, weight_decay: float | None = None, grad_clip: GradientClip | None = None,
                 multi_precision: bool = False, name: str | None = None, *,
                 weight_decay_exclude: Sequence[str] = ()) -> None:  # fmt: skip
        super().__init__(learning_rate, parameter_list, weight_decay, grad_clip, multi_precision, name,
                         weight_decay_exclude=weight_decay_exclude)  # fmt: skip
        self.momentum = number("Momentum", "momentum", momentum, 0)
        self.use_nesterov = bool(use_nesterov)

    def _attributes(self) -> dict[str, Any]:
        return {"mu": self.momentum, "use_nesterov": self.use_nesterov}


class _Adaptive(Optimizer):
    """Two moments and the powers of their decay rates, one pair of powers for all parameters.

    Paddle keeps a pair of powers for each parameter; they are equal in all of them.
    """

    def __init__(self, learning_rate: Rate, beta1: float, beta2: float, epsilon: float, parameter_list: Parameters,
                 weight_decay: float | None, grad_clip: GradientClip | None, multi_precision: bool,
                 name: str | None, weight_decay_exclude: Sequence[str]) -> None:  # fmt: skip
        super().__init__(learning_rate, parameter_list, weight_decay, grad_clip, multi_precision, name,
                         weight_decay_exclude=weight_decay_exclude)  # fmt: skip
        owner = type(self).__name__
        self.beta1 = number(owner, "beta1", beta1, 0, 1)
        self.beta2 = number(owner, "beta2", beta2, 0, 1)
        self.epsilon = number(owner, "epsilon", epsilon, 0)

    def _initial(self, scalar: str) -> float:
        return self.beta1 if scalar == "beta1_pow_acc" else self.beta2

    def _attributes(self) -> dict[str, Any]:
        return {"beta1": self.beta1, "beta2": self.beta2, "epsilon": self.epsilon}


@paddle_arguments("optimizer")
class Adam(_Adaptive):
    """Adam (Kingma and Ba, 2014). ``weight_decay`` is an L2 penalty added to the gradient.

    ``m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2;
    p -= lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + epsilon)``. Moments are fp32.
    """

    type = "Adam"

    def __init__(self, learning_rate: Rate = 0.001, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8,
                 parameter_list: Parameters = None, weight_decay: float | None = None,
                 grad_clip: GradientClip | None = None, multi_precision: bool = False,
                 name: str | None = None, *, weight_decay_exclude: Sequence[str] = ()) -> None:  # fmt: skip
        super().__init__(learning_rate, beta1, beta2, epsilon, parameter_list, weight_decay, grad_clip,
                         multi_precision, name, weight_decay_exclude)  # fmt: skip


@paddle_arguments("optimizer")
class AdamW(_Adaptive):
    """Adam with decoupled decay (Loshchilov and Hutter, 2017): ``p *= 1 - lr * weight_decay`` before the step.

    ``apply_decay_param_fun`` gets a parameter's name and says whether it decays (default: all do).
    """

    type = "AdamW"
    decay_attribute = "coeff"

    def __init__(self, learning_rate: Rate = 0.001, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8,
                 parameter_list: Parameters = None, weight_decay: float = 0.01, apply_decay_param_fun: Choice = None,
                 grad_clip: GradientClip | None = None, multi_precision: bool = False,
                 name: str | None = None, *, weight_decay_exclude: Sequence[str] = ()) -> None:  # fmt: skip
        super().__init__(learning_rate, beta1, beta2, epsilon, parameter_list, weight_decay, grad_clip,
                         multi_precision, name, weight_decay_exclude)  # fmt: skip
        self.apply_decay_param_fun = _choice("AdamW", "apply_decay_param_fun", apply_decay_param_fun)

    def _decays(self, name: str) -> bool:
        return self.apply_decay_param_fun is None or bool(self.apply_decay_param_fun(name))


class Lamb(_Adaptive):
    """LAMB (You et al., 2019): Adam's direction plus decay, scaled per parameter by ``|p| / |direction|``.

    A parameter without decay takes Adam's step unscaled, unless ``always_adapt``.
    ``exclude_from_weight_decay_fn`` gets a parameter's name and says whether it goes without decay.
    """

    type = "Lamb"
    decay_attribute = "lamb_weight_decay"

    def __init__(self, learning_rate: Rate = 0.001, lamb_weight_decay: float = 0.01, beta1: float = 0.9,
                 beta2: float = 0.999, epsilon: float = 1e-6, parameter_list: Parameters = None,
                 grad_clip: GradientClip | None = None, exclude_from_weight_decay_fn: Choice = None,
                 always_adapt: bool = False, multi_precision: bool = False,
                 name: str | None = None, *, weight_decay_exclude: Sequence[str] = ()) -> None:  # fmt: skip
        super().__init__(learning_rate, beta1, beta2, epsilon, parameter_list, lamb_weight_decay, grad_clip,
                         multi_precision, name, weight_decay_exclude)  # fmt: skip
        self.exclude_from_weight_decay_fn = _choice(
            "Lamb", "exclude_from_weight_decay_fn", exclude_from_weight_decay_fn
        )
        self.always_adapt = bool(always_adapt)

    def _attributes(self) -> dict[str, Any]:
        return super()._attributes() | {"always_adapt": self.always_adapt}

    def _decays(self, name: str) -> bool:
        return self.exclude_from_weight_decay_fn is None or not self.exclude_from_weight_decay_fn(name)


def _choice(owner: str, name: str, function: Choice) -> Choice:
    if function is not None and not callable(function):
        raise ArgumentTypeError(f"{owner}: {name} is {function!r}; expected a function of a parameter's name")
    return function
