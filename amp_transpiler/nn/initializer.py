"""Initialisers: how a parameter starts. Each adds one operator to the startup program.

Random ones draw from (seed, name of the parameter): the same seed gives the same parameter whatever else
the program holds, and in whatever order it was built.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx

from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.ir.nodes import OWN, Variable
from amp_transpiler.ir.seeded import LARGEST_SEED
from amp_transpiler.ir.types import NAMES, element_type
from amp_transpiler.lists.paddle import add_paddle_names, paddle_arguments
from amp_transpiler.nn.building import typed
from amp_transpiler.ops.training.seeds import set_default_seed, startup_seed
from amp_transpiler.option_checks import is_real, number, shown, whole


def set_seed(seed: int) -> None:
    """Set the seed, 0 … 2**32 - 1, of programs whose first parameter is built after this call (also ``amp.seed``).

    A startup program with a ``seed`` of its own keeps it. Without any, the seed is 0: trainings repeat. What an
    imported model draws in evaluation (RandomNormalLike) is onnxruntime's own.
    """
    whole("seed", seed, 0, LARGEST_SEED)
    set_default_seed(int(seed))


class Initializer:
    """Base class: ``operator`` gives the type and attributes of the operator of the startup program."""

    #: Whether the operator reads the seed.
    random = True

    def operator(self, shape: tuple[int, ...], dtype: str) -> tuple[str, dict[str, Any]]:
        """Operator type and attributes for a parameter of this shape and element type."""
        raise NotImplementedError

    def initialize(self, variable: Variable) -> None:
        """Append the operator that writes ``variable``, which belongs to a startup program."""
        assert variable.dtype is not None and variable.shape is not None
        type_, attrs = self.operator(tuple(int(d) for d in variable.shape if d is not None), variable.dtype)
        inputs = [startup_seed(variable.program)] if self.random else []
        variable.program.add_operator(type_, inputs, [variable], attrs=attrs, domain=OWN)


@paddle_arguments("nn.constant", "nn.named")
class Constant(Initializer):
    """Every element is ``value``."""

    random = False

    def __init__(self, value: float = 0.0) -> None:
        if not is_real(value):
            raise ArgumentTypeError(f"Constant: value is {shown(value)}; expected a number (Assign takes arrays)")
        self.value = value

    def operator(self, shape: tuple[int, ...], dtype: str) -> tuple[str, dict[str, Any]]:
        return "ConstantInitializer", {"value": _held("Constant: value", self.value, dtype)}


@paddle_arguments("nn.initializer")
class Uniform(Initializer):
    """Uniform in [``low``, ``high``)."""

    def __init__(self, low: float = -1.0, high: float = 1.0) -> None:
        number("Uniform: low", low, -math.inf)
        number("Uniform: high", high, -math.inf)
        if low > high:
            raise ArgumentError(f"Uniform: low {low} is above high {high}")
        self.low, self.high = low, high

    def operator(self, shape: tuple[int, ...], dtype: str) -> tuple[str, dict[str, Any]]:
        return "UniformInitializer", {"low": float(self.low), "high": float(self.high)}


@paddle_arguments("nn.normal", "nn.initializer")
class Normal(Initializer):
    """Normal with this ``mean`` and standard deviation ``std``."""

    def __init__(self, mean: float = 0.0, std: float = 1.0) -> None:
        number(f"{type(self).__name__}: mean", mean, -math.inf)
        number(f"{type(self).__name__}: std", std, taken=True)
        self.mean, self.std = mean, std

    def operator(self, shape: tuple[int, ...], dtype: str) -> tuple[str, dict[str, Any]]:
        return "NormalInitializer", {"mean": float(self.mean), "std": float(self.std)}


@paddle_arguments("nn.normal", "nn.initializer", "nn.truncated")
class TruncatedNormal(Normal):
    """Normal with this ``mean`` and standard deviation ``std``, drawn again beyond two of them on either side."""

    def operator(self, shape: tuple[int, ...], dtype: str) -> tuple[str, dict[str, Any]]:
        return "TruncatedNormalInitializer", super().operator(shape, dtype)[1]


@paddle_arguments("nn.assign", "nn.named")
class Assign(Initializer):
    """The content of ``array`` (numpy array, list or TensorProto), of the parameter's shape."""

    random = False

    def __init__(self, array: Any) -> None:
        self.array = array if isinstance(array, onnx.TensorProto) else np.asarray(array)

    def operator(self, shape: tuple[int, ...], dtype: str) -> tuple[str, dict[str, Any]]:
        return "ArrayInitializer", {}

    def initialize(self, variable: Variable) -> None:
        shape = tuple(self.array.dims) if isinstance(self.array, onnx.TensorProto) else self.array.shape
        if shape != variable.shape:
            raise ArgumentError(
                f"the initial value of '{variable.name}' has shape {shape}, the parameter {variable.shape}"
            )
        if isinstance(self.array, onnx.TensorProto):
            if NAMES[self.array.data_type] != variable.dtype:
                raise ArgumentError(
                    f"the initial value of '{variable.name}' is {NAMES[self.array.data_type]}, the "
                    f"parameter {variable.dtype}"
                )
            variable.data = self.array
        else:
            assert variable.dtype is not None
            if self.array.dtype.kind not in "biuf" and element_type(self.array.dtype) != "bfloat16":
                raise ArgumentTypeError(f"the initial value of '{variable.name}' has element type {self.array.dtype}")
            # a copy: later changes do not reach it
            variable.data = _held(f"the initial value of '{variable.name}'", self.array, variable.dtype)
        super().initialize(variable)


def _held(called: str, value: Any, dtype: str) -> np.ndarray:
    """A copy of ``value`` in the element type of a parameter; ArgumentError where that does not hold it."""
    try:
        with np.errstate(over="ignore"):
            array = typed(value, dtype)
    except ValueError:
        raise ArgumentError(f"{called} is {shown(value)}, which is no {dtype}") from None
    if not np.array_equal(np.isinf(array), np.isinf(np.asarray(value))):
        raise ArgumentError(f"{called} is {shown(value)}, beyond the range of {dtype}")
    return array


def _fan(called: str, given: int | None, of_shape: int) -> int:
    """Fan in or fan out: as it is given, else that of the shape."""
    if given is None:
        return of_shape
    whole(called, given, 1)
    return int(given)


def _fans(shape: tuple[int, ...]) -> tuple[int, int]:
    """(fan in, fan out): [in, out] for matrices, [out, in / groups, …] for filters."""
    if len(shape) < 2:
        size = math.prod(shape)
        return size, size
    if len(shape) == 2:
        return shape[0], shape[1]
    receptive = math.prod(shape[2:])
    return shape[1] * receptive, shape[0] * receptive


class _Scaled(Initializer):
    """Uniform or normal with a standard deviation that follows from the shape."""

    def __init__(self, uniform: bool) -> None:
        self.uniform = uniform

    def deviation(self, shape: tuple[int, ...]) -> float:
        """The standard deviation."""
        raise NotImplementedError

    def operator(self, shape: tuple[int, ...], dtype: str) -> tuple[str, dict[str, Any]]:
        deviation = self.deviation(shape)
        if self.uniform:
            limit = math.sqrt(3.0) * deviation
            return "UniformInitializer", {"low": -limit, "high": limit}
        return "NormalInitializer", {"mean": 0.0, "std": deviation}


@paddle_arguments("nn.initializer", "nn.xavier")
class Xavier(_Scaled):
    """Standard deviation sqrt(2 / (fan in + fan out)) (Glorot & Bengio 2010)."""

    def __init__(self, uniform: bool = True, fan_in: int | None = None, fan_out: int | None = None) -> None:
        super().__init__(uniform)
        self.fan_in, self.fan_out = fan_in, fan_out
        self.deviation((1, 1))  # raises for what is none

    def deviation(self, shape: tuple[int, ...]) -> float:
        fan_in, fan_out = _fans(shape)
        fans = _fan("Xavier: fan_in", self.fan_in, fan_in), _fan("Xavier: fan_out", self.fan_out, fan_out)
        return math.sqrt(2.0 / max(sum(fans), 1))


@paddle_arguments("nn.initializer", "nn.xavier")
class XavierUniform(Xavier):
    """:class:`Xavier`, uniform."""

    def __init__(self, fan_in: int | None = None, fan_out: int | None = None) -> None:
        super().__init__(True, fan_in, fan_out)


@paddle_arguments("nn.initializer", "nn.xavier")
class XavierNormal(Xavier):
    """:class:`Xavier`, normal."""

    def __init__(self, fan_in: int | None = None, fan_out: int | None = None) -> None:
        super().__init__(False, fan_in, fan_out)


@paddle_arguments("nn.kaiming", "nn.initializer")
class Kaiming(_Scaled):
    """Standard deviation sqrt(2 / (1 + slope**2) / fan in) (He et al. 2015); ``slope`` of a leaky relu, 0 for relu."""

    def __init__(self, uniform: bool = True, fan_in: int | None = None, slope: float = 0.0) -> None:
        super().__init__(uniform)
        self.fan_in, self.slope = fan_in, slope
        number("Kaiming: slope", slope, -math.inf)
        self.deviation((1, 1))  # raises for what is no fan in

    def deviation(self, shape: tuple[int, ...]) -> float:
        fan_in = _fan("Kaiming: fan_in", self.fan_in, _fans(shape)[0])
        return math.sqrt(2.0 / (1.0 + self.slope**2) / max(fan_in, 1))


@paddle_arguments("nn.kaiming", "nn.initializer")
class KaimingUniform(Kaiming):
    """:class:`Kaiming`, uniform."""

    def __init__(self, fan_in: int | None = None, slope: float = 0.0) -> None:
        super().__init__(True, fan_in, slope)


@paddle_arguments("nn.kaiming", "nn.initializer")
class KaimingNormal(Kaiming):
    """:class:`Kaiming`, normal."""

    def __init__(self, fan_in: int | None = None, slope: float = 0.0) -> None:
        super().__init__(False, fan_in, slope)


add_paddle_names(globals())
__all__ = [
    "Assign",
    "Constant",
    "Initializer",
    "Kaiming",
    "KaimingNormal",
    "KaimingUniform",
    "Normal",
    "TruncatedNormal",
    "Uniform",
    "Xavier",
    "XavierNormal",
    "XavierUniform",
    "set_seed",
]
