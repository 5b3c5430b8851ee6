"""The optimizers. Formulas are those of PaddlePaddle's kernels, see ``amp_transpiler.ops.training.update``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from amp_transpiler.errors import ArgumentTypeError
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.lists.paddle import paddle_arguments
from amp_transpiler.optimizer.base import Optimizer
from amp_transpiler.optimizer.gradient_clip import GradientClip
from amp_transpiler.optimizer.groups import number
from amp_transpiler.optimizer.lr import LRScheduler
from amp_transpiler.optimizer.update_rule import Parameters
from amp_transpiler.option_checks import strings, switch
from amp_transpiler.regularizer import L1Decay, L2Decay

Rate = float | LRScheduler
Choice = Callable[[str], bool] | None
Penalty = float | L2Decay | L1Decay | None


@paddle_arguments("optimizer.parameters", "optimizer.penalty")
class SGD(Optimizer):
    """``p -= lr * (g + weight_decay * p)``. Arguments: see :class:`Optimizer`.

    With a sparse gradient and without decay it touches the rows of that alone.
    """

    type = "SGD"
    keeps_rows = True


@paddle_arguments("optimizer.parameters", "optimizer.penalty")
class Momentum(Optimizer):
    """``v = momentum * v + g; p -= lr * v``, or ``p -= lr * (g + momentum * v)`` with ``use_nesterov``.

    ``rescale_grad`` multiplies ``g`` first, after clipping. The velocity is fp32. ``lazy_mode``: see :class:`Adam`.
    """

    type = "Momentum"

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        momentum: float = 0.9,
        parameter_list: Parameters = None,
        use_nesterov: bool = False,
        weight_decay: Penalty = None,
        grad_clip: GradientClip | None = None,
        multi_precision: bool = False,
        rescale_grad: float = 1.0,
        name: str | None = None,
        *,
        lazy_mode: bool = False,
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
        self.lazy_mode = switch(f"{type(self).__name__}: lazy_mode", lazy_mode)
        self.momentum, self.rescale_grad = momentum, rescale_grad
        self.use_nesterov = switch(f"{type(self).__name__}: use_nesterov", use_nesterov)
        self._attributes()  # raises for a value out of range

    def _attributes(self) -> dict[str, Any]:
        return {**_momentum_of(self), "use_nesterov": self.use_nesterov}


@paddle_arguments("optimizer.parameters", "optimizer.Lars")
class Lars(Optimizer):
    """Momentum with a rate for each parameter (You et al., 2017), in the form of Paddle's ``LarsMomentum``.

    ``rate = lr * lars_coeff * |p| / (|g| + lars_weight_decay * |p| + epsilon)``, ``lr`` where a norm is 0;
    ``v = momentum * v + rate * (g + lars_weight_decay * p); p -= v``. A parameter whose name holds a string of
    ``exclude_from_weight_decay`` takes Momentum's step, without decay. ``rescale_grad`` multiplies ``g`` first.
    """

    type = "Lars"
    decay_attribute = "lars_weight_decay"
    penalises = False

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        momentum: float = 0.9,
        lars_coeff: float = 0.001,
        lars_weight_decay: float = 0.0005,
        parameter_list: Parameters = None,
        grad_clip: GradientClip | None = None,
        exclude_from_weight_decay: Sequence[str] | None = None,
        epsilon: float = 0.0,
        multi_precision: bool = False,
        rescale_grad: float = 1.0,
        name: str | None = None,
        *,
        weight_decay_exclude: Sequence[str] = (),
    ) -> None:
        super().__init__(
            learning_rate,
            parameter_list,
            lars_weight_decay,
            grad_clip,
            multi_precision,
            name,
            weight_decay_exclude=weight_decay_exclude,
        )
        self.momentum, self.rescale_grad, self.lars_coeff, self.epsilon = momentum, rescale_grad, lars_coeff, epsilon
        self.exclude_from_weight_decay = strings("Lars: exclude_from_weight_decay", exclude_from_weight_decay or ())
        self._attributes()  # raises for a value out of range

    def _attributes(self) -> dict[str, Any]:
        return {
            **_momentum_of(self),
            "lars_coeff": number("Lars", "lars_coeff", self.lars_coeff, 0, open_low=True),
            "epsilon": number("Lars", "epsilon", self.epsilon, 0),
        }

    def _decays(self, name: str) -> bool:
        return not any(part in name for part in self.exclude_from_weight_decay)


@paddle_arguments("optimizer.parameters", "optimizer.penalty")
class Adagrad(Optimizer):
    """``a += g^2; p -= lr * g / (sqrt(a) + epsilon)`` (Duchi et al., 2011). The accumulator is fp32.

    It starts at ``initial_accumulator_value``. ``row_wise`` keeps one for each row of a parameter, to which the mean
    of the squares of that row is added, as recommendation systems do for large tables. With a sparse gradient and
    without decay rows that have none stay as they are.
    """

    type = "Adagrad"
    keeps_rows = True

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        epsilon: float = 1e-6,
        parameter_list: Parameters = None,
        weight_decay: Penalty = None,
        grad_clip: GradientClip | None = None,
        name: str | None = None,
        initial_accumulator_value: float = 0.0,
        multi_precision: bool = False,
        *,
        row_wise: bool = False,
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
        self.epsilon, self.row_wise = epsilon, switch(f"{type(self).__name__}: row_wise", row_wise)
        self.initial_accumulator_value = initial_accumulator_value
        self._attributes()  # raises for a value out of range
        self._accumulator((1,))

    def _attributes(self) -> dict[str, Any]:
        return {"epsilon": number("Adagrad", "epsilon", self.epsilon, 0)}

    def _accumulator(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], float]:
        start = number("Adagrad", "initial_accumulator_value", self.initial_accumulator_value, 0)
        return (*shape[:1], *(1 for _ in shape[1:])) if self.row_wise else shape, start

    @property
    def _operator(self) -> str:
        return "RowWiseAdagrad" if self.row_wise else "Adagrad"


class _Adaptive(Optimizer):
    """Two moments and the powers of their decay rates, one pair of powers for all parameters.

    Paddle keeps a pair of powers for each parameter; they are equal in all of them.
    """

    beta1: float
    beta2: float
    epsilon: float

    def _set_moments(self, beta1: float, beta2: float, epsilon: float) -> None:
        self.beta1, self.beta2, self.epsilon = beta1, beta2, epsilon
        self._attributes()  # raises for a value out of range

    def _initial(self, scalar: str) -> float:
        return self.beta1 if scalar == "beta1_pow_acc" else self.beta2

    def _attributes(self) -> dict[str, Any]:
        owner = type(self).__name__
        return {
            "beta1": number(owner, "beta1", self.beta1, 0, 1),
            "beta2": number(owner, "beta2", self.beta2, 0, 1),
            "epsilon": number(owner, "epsilon", self.epsilon, 0),
        }


@paddle_arguments("optimizer.parameters", "optimizer.penalty", "optimizer.Adam")
class Adam(_Adaptive):
    """Adam (Kingma and Ba, 2014). ``weight_decay`` is an L2 penalty added to the gradient.

    ``m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2;
    p -= lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + epsilon)``. Moments are fp32. With ``lazy_mode`` only
    the rows of a sparse gradient take a step; moments of the others do not decay. Without it, sparse gradients give
    what dense ones give, and a step takes time of the whole table.
    """

    type = "Adam"

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        parameter_list: Parameters = None,
        weight_decay: Penalty = None,
        grad_clip: GradientClip | None = None,
        lazy_mode: bool = False,
        multi_precision: bool = False,
        name: str | None = None,
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
        self.lazy_mode = switch(f"{type(self).__name__}: lazy_mode", lazy_mode)
        self._set_moments(beta1, beta2, epsilon)


@paddle_arguments("optimizer.parameters", "optimizer.penalty", "optimizer.Adam")
class AdamW(_Adaptive):
    """Adam with decoupled decay (Loshchilov and Hutter, 2017): ``p *= 1 - lr * weight_decay`` before the step.

    ``apply_decay_param_fun`` gets a parameter's name and says whether it decays (default: all do). ``lr_ratio`` gets a
    parameter and gives a factor on its learning rate. ``lazy_mode``: see :class:`Adam`.
    """

    type = "AdamW"
    decay_attribute = "coeff"
    penalises = False

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        parameter_list: Parameters = None,
        weight_decay: float = 0.01,
        lr_ratio: Callable[[Variable], float] | None = None,
        apply_decay_param_fun: Choice = None,
        grad_clip: GradientClip | None = None,
        lazy_mode: bool = False,
        multi_precision: bool = False,
        name: str | None = None,
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
        self.lazy_mode = switch(f"{type(self).__name__}: lazy_mode", lazy_mode)
        self._set_moments(beta1, beta2, epsilon)
        self.apply_decay_param_fun = _choice("AdamW", "apply_decay_param_fun", apply_decay_param_fun)
        if lr_ratio is not None and not callable(lr_ratio):
            raise ArgumentTypeError(f"AdamW: lr_ratio is {lr_ratio!r}; expected a function of a parameter")
        self.lr_ratio = lr_ratio

    def _rate_factor(self, parameter: Variable) -> float:
        if self.lr_ratio is None:
            return 1.0
        return number("AdamW", f"lr_ratio of '{parameter.name}'", self.lr_ratio(parameter), 0)

    def _decays(self, name: str) -> bool:
        return self.apply_decay_param_fun is None or bool(self.apply_decay_param_fun(name))


@paddle_arguments("optimizer.parameters", "optimizer.Lamb")
class Lamb(_Adaptive):
    """LAMB (You et al., 2019): Adam's direction plus decay, scaled per parameter by ``|p| / |direction|``.

    A parameter without decay takes Adam's step unscaled, unless ``always_adapt``.
    ``exclude_from_weight_decay_fn`` gets a parameter's name and says whether it goes without decay.
    """

    type = "Lamb"
    decay_attribute = "lamb_weight_decay"
    penalises = False

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        lamb_weight_decay: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-6,
        parameter_list: Parameters = None,
        grad_clip: GradientClip | None = None,
        exclude_from_weight_decay_fn: Choice = None,
        multi_precision: bool = False,
        always_adapt: bool = False,
        name: str | None = None,
        *,
        weight_decay_exclude: Sequence[str] = (),
    ) -> None:
        self.always_adapt = switch(f"{type(self).__name__}: always_adapt", always_adapt)
        super().__init__(
            learning_rate,
            parameter_list,
            lamb_weight_decay,
            grad_clip,
            multi_precision,
            name,
            weight_decay_exclude=weight_decay_exclude,
        )
        self._set_moments(beta1, beta2, epsilon)
        self.exclude_from_weight_decay_fn = _choice(
            "Lamb", "exclude_from_weight_decay_fn", exclude_from_weight_decay_fn
        )

    def _attributes(self) -> dict[str, Any]:
        return super()._attributes() | {"always_adapt": self.always_adapt}

    def _decays(self, name: str) -> bool:
        return self.exclude_from_weight_decay_fn is None or not self.exclude_from_weight_decay_fn(name)


def _momentum_of(optimizer: Momentum | Lars) -> dict[str, Any]:
    """The attributes that Momentum and Lars share; ArgumentError for a value out of range."""
    owner = type(optimizer).__name__
    factor = number(owner, "rescale_grad", optimizer.rescale_grad, 0, open_low=True)
    rescale = {} if factor == 1 else {"rescale_grad": factor}
    return {"mu": number(owner, "momentum", optimizer.momentum, 0), **rescale}


def _choice(owner: str, name: str, function: Choice) -> Choice:
    if function is not None and not callable(function):
        raise ArgumentTypeError(f"{owner}: {name} is {function!r}; expected a function of a parameter's name")
    return function
