"""The learning rate of a step: ``LearningRate(step) -> (rate, next step)``, both scalars, int32 and fp32.

A schedule is data: the attribute ``schedule`` holds its description as JSON, ``{"type": "CosineAnnealingDecay",
"T_max": 100, …}``, other schedules inside it where they wrap one. Every rule is closed-form in the step and is
written once, in arithmetic that both Python numbers (float64) and tensors of the emitted graph (fp32) have.
The formulas are PaddlePaddle's (``paddle.optimizer.lr``), where step 0 is the first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.nodes import Operator, Types
from amp_transpiler.ir.opdef import lowering_rule, own
from amp_transpiler.ir.slots import Slots

LEARNING_RATE = "LearningRate"

Description = Mapping[str, Any]


class Numbers:
    """What rules need beside ``+ - * /``, on Python's floats."""

    cos = staticmethod(math.cos)
    exp = staticmethod(math.exp)
    pow = staticmethod(math.pow)
    floor = staticmethod(math.floor)
    min = staticmethod(min)
    max = staticmethod(max)

    @staticmethod
    def power(base: float, n: float) -> float:
        """A number to the power of what rules are given; infinite beyond all floats, as in a program."""
        try:
            return math.pow(base, n)
        except OverflowError:
            return math.inf

    @staticmethod
    def less(a: Any, b: Any, then: Any, otherwise: Any) -> Any:
        """``then if a < b else otherwise``."""
        return then if a < b else otherwise


class _Tensors:
    """The same functions on scalars of the emitted graph."""

    def __init__(self, e: Emitter) -> None:
        self.e = e

    def value(self, x: Any) -> Value:
        """The graph's value of a tensor, or of a number, which becomes an fp32 constant."""
        return x.value if isinstance(x, _Tensor) else self.e.const(x, "float32")

    def emit(self, type_: str, *operands: Any) -> _Tensor:
        """One operator on tensors and numbers."""
        return _Tensor(self, self.e.op(type_, *map(self.value, operands), shape=()))

    def cos(self, x: Any) -> _Tensor:
        return self.emit("Cos", x)

    def exp(self, x: Any) -> _Tensor:
        return self.emit("Exp", x)

    def power(self, base: float, n: Any) -> _Tensor:
        return self.exp(n * math.log(base))  # Pow of an fp32 base is off by n roundings

    def pow(self, x: Any, power: Any) -> _Tensor:
        return self.emit("Pow", x, power)

    def floor(self, x: Any) -> _Tensor:
        return self.emit("Floor", x)

    def min(self, a: Any, b: Any) -> _Tensor:
        return self.emit("Min", a, b)

    def max(self, a: Any, b: Any) -> _Tensor:
        return self.emit("Max", a, b)

    def less(self, a: Any, b: Any, then: Any, otherwise: Any) -> _Tensor:
        condition = self.e.Less(self.value(a), self.value(b), shape=())
        return _Tensor(self, self.e.Where(condition, self.value(then), self.value(otherwise), shape=()))


class _Tensor:
    """A scalar of the emitted graph, with Python's operators."""

    def __init__(self, functions: _Tensors, value: Value) -> None:
        self.functions, self.value = functions, value

    def __add__(self, other: Any) -> _Tensor:
        return self.functions.emit("Add", self, other)

    def __sub__(self, other: Any) -> _Tensor:
        return self.functions.emit("Sub", self, other)

    def __rsub__(self, other: Any) -> _Tensor:
        return self.functions.emit("Sub", other, self)

    def __mul__(self, other: Any) -> _Tensor:
        return self.functions.emit("Mul", self, other)

    def __truediv__(self, other: Any) -> _Tensor:
        return self.functions.emit("Div", self, other)

    def __rtruediv__(self, other: Any) -> _Tensor:
        return self.functions.emit("Div", other, self)

    __radd__, __rmul__ = __add__, __mul__


#: ``rule(m, t, s)``: the rate at step ``t`` by the description ``s``, with the functions ``m``.
Rule = Callable[[Any, Any, Description], Any]
_RULES: dict[str, Rule] = {}


def rate_at(schedule: Description, step: Any, functions: Any = Numbers) -> Any:
    """The rate that ``schedule`` describes for ``step`` (the first is 0): a float, or what ``functions`` work on."""
    return _RULES[schedule["type"]](functions, step, schedule)


def has_rule(type_: str) -> bool:
    """Whether schedules of this type have a rule."""
    return type_ in _RULES


def _rule(function: Rule) -> Rule:
    _RULES[function.__name__] = function
    return function


@_rule
def Constant(m: Any, t: Any, s: Description) -> Any:
    return s["learning_rate"] + 0 * t


@_rule
def PiecewiseDecay(m: Any, t: Any, s: Description) -> Any:
    rate = s["values"][-1]
    for boundary, value in reversed(list(zip(s["boundaries"], s["values"], strict=False))):
        rate = m.less(t, boundary, value, rate)
    return rate


def _decayed(m: Any, s: Description, times: Any) -> Any:
    """The rate after so many decays; a rate of 0 stays 0 where ``gamma``, above 1, has grown beyond all numbers."""
    return s["learning_rate"] * m.power(s["gamma"], times) if s["learning_rate"] else 0 * times


@_rule
def ExponentialDecay(m: Any, t: Any, s: Description) -> Any:
    return _decayed(m, s, t)


@_rule
def NaturalExpDecay(m: Any, t: Any, s: Description) -> Any:
    return s["learning_rate"] * m.exp(t * -s["gamma"])


@_rule
def InverseTimeDecay(m: Any, t: Any, s: Description) -> Any:
    return s["learning_rate"] / (1 + s["gamma"] * t)


@_rule
def StepDecay(m: Any, t: Any, s: Description) -> Any:
    return _decayed(m, s, m.floor(t / s["step_size"]))


@_rule
def MultiStepDecay(m: Any, t: Any, s: Description) -> Any:
    rate = _decayed(Numbers, s, len(s["milestones"]))
    for index, milestone in reversed(list(enumerate(s["milestones"]))):
        rate = m.less(t, milestone, _decayed(Numbers, s, index), rate)
    return rate


@_rule
def LinearLR(m: Any, t: Any, s: Description) -> Any:
    done = m.min(t, s["total_steps"]) / s["total_steps"]
    return s["learning_rate"] * (s["start_factor"] + (s["end_factor"] - s["start_factor"]) * done)


@_rule
def LinearWarmup(m: Any, t: Any, s: Description) -> Any:
    steps, start = s["warmup_steps"], s["start_lr"]
    ramp = start + (s["end_lr"] - start) * (t / steps)
    return m.less(t, steps, ramp, rate_at(s["learning_rate"], m.max(t - steps, 0), m))


@_rule
def CosineAnnealingDecay(m: Any, t: Any, s: Description) -> Any:
    period = 2 * s["T_max"]
    phase = t - period * m.floor(t / period)  # keeps the argument of the cosine small, so that fp32 is enough
    return s["eta_min"] + (s["learning_rate"] - s["eta_min"]) / 2 * (1 + m.cos(phase * (math.pi / s["T_max"])))


@_rule
def CosineAnnealingWarmRestarts(m: Any, t: Any, s: Description) -> Any:
    first, factor = s["T_0"], s["T_mult"]
    period: Any = first
    if factor == 1:
        begun = first * m.floor(t / first)
    else:
        lengths = [first]
        while sum(lengths) < 2**31:
            lengths.append(lengths[-1] * factor)
        period = lengths.pop()
        while lengths:
            period = m.less(t, sum(lengths), lengths.pop(), period)
        begun = (period - first) / (factor - 1)
    return s["eta_min"] + (s["learning_rate"] - s["eta_min"]) / 2 * (1 + m.cos((t - begun) / period * math.pi))


@_rule
def CyclicLR(m: Any, t: Any, s: Description) -> Any:
    up, down = s["step_size_up"], s["step_size_down"]
    cycles = m.floor(t / (up + down))
    place = t - (up + down) * cycles  # in its cycle
    rise = (s["max_learning_rate"] - s["base_learning_rate"]) * m.less(
        up, place, (up + down - place) / down, place / up
    )
    if s["mode"] == "triangular2":
        rise = rise * m.power(0.5, cycles)
    elif s["mode"] == "exp_range":
        rise = rise * m.power(s["exp_gamma"], t)
    return s["base_learning_rate"] + rise


@_rule
def PolynomialDecay(m: Any, t: Any, s: Description) -> Any:
    steps: Any = s["decay_steps"]
    if s["cycle"]:
        steps = steps * m.max(0 - m.floor((0 - t) / steps), 1)
    else:
        t = m.min(t, steps)
    left = m.max(steps - t, 0) / steps  # the difference of whole numbers is exact
    return s["end_lr"] + (s["learning_rate"] - s["end_lr"]) * m.pow(left, s["power"])


@_rule
def NoamDecay(m: Any, t: Any, s: Description) -> Any:
    peak = s["learning_rate"] * s["d_model"] ** -0.5 * s["warmup_steps"] ** -0.5
    done = t / s["warmup_steps"]
    return peak * m.min(m.pow(m.max(done, 1 / s["warmup_steps"]), -0.5), done)


@_rule
def OneCycleLR(m: Any, t: Any, s: Description) -> Any:
    ends, rates = _phases(s)
    rate = rates[-1]
    for index in reversed(range(len(ends) - 1)):
        done = m.min(m.max((t - ends[index]) / (ends[index + 1] - ends[index]), 0), 1)
        if s["anneal_strategy"] == "cos":
            done = (1 - m.cos(done * math.pi)) / 2
        phase = rates[index] + (rates[index + 1] - rates[index]) * done
        rate = phase if index == len(ends) - 2 else m.less(ends[index + 1], t, rate, phase)
    return rate


def _phases(s: Description) -> tuple[Sequence[float], Sequence[float]]:
    """The steps at which phases of the one-cycle schedule begin and end, and the rates there."""
    last, share, peak = s["total_steps"] - 1, s["phase_pct"] * s["total_steps"], s["max_learning_rate"]
    first, end = peak / s["divide_factor"], s["end_learning_rate"]
    if s["three_phase"]:
        return (0, share - 1, 2 * share - 2, last), (first, peak, first, end)
    return (0, share - 1, last), (first, peak, end)


def _types(op: Operator) -> Types:
    return [("float32", ()), ("int32", ())]


@lowering_rule(own(LEARNING_RATE), infer=_types, slots=Slots(inputs=("step",), outputs=("rate", "step")))
def _learning_rate(e: Emitter, op: Operator, step: Value) -> Sequence[Value]:
    count = e.reshape(step, ())
    functions = _Tensors(e)
    now = _Tensor(functions, e.cast(count, "float32"))
    rate = rate_at(json.loads(op.attrs["schedule"]), now, functions)
    return [rate.value, e.Add(count, e.const(1, "int32"), shape=())]
