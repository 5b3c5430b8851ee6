"""The rules of the static range analysis: the interval of what an operator makes, from those of what it reads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.ir.types import FLOATS
from amp_transpiler.passes.view.names import source
from amp_transpiler.passes.view.typing import operator_name

Interval = tuple[float, float]


class Ranges(Protocol):
    """What rules ask of the analysis, which is :class:`~amp_transpiler.passes.numerics.ranges.Ranges`."""

    def bound(self, variable: Variable | None) -> Interval | None:
        """The interval of a variable; None where nothing is known."""
        ...

    def content(self, variable: Variable | None) -> Any:
        """What a constant holds; None where that is not known."""
        ...

    def row_sums(self, weight: Variable | None, axis: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Sums of the positive and of the negative parts of a constant, over all that one output adds up."""
        ...


Rule = Callable[[Operator, Ranges], Interval | None]

#: By operator; None is "nothing is known".
RULES: dict[str, Rule] = {}
_INF = math.inf
#: Integers whose range is small enough to say something.
_INTEGERS = {
    "bool": (0.0, 1.0),
    "uint8": (0.0, 255.0),
    "int8": (-128.0, 127.0),
    "uint16": (0.0, 65535.0),
    "int16": (-32768.0, 32767.0),
}


def _rule(*types: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        for type_ in types:
            RULES[type_] = function
        return function

    return register


def _hull(intervals: list[Interval | None]) -> Interval | None:
    if not intervals or any(interval is None for interval in intervals):
        return None
    return min(i[0] for i in intervals if i), max(i[1] for i in intervals if i)


def _increasing(function: Callable[[float], float], low: float = -_INF, high: float = _INF) -> Rule:
    """A function that grows with its argument and stays in an interval whatever that is."""

    def rule(op: Operator, ranges: Ranges) -> Interval | None:
        found = ranges.bound(op.input(0)) or (-_INF, _INF)
        return max(low, function(found[0])), min(high, function(found[1]))

    return rule


def _product(one: Interval, other: Interval) -> Interval:
    ends = [0.0 if 0.0 in (a, b) else a * b for a in one for b in other]
    return min(ends), max(ends)


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else _INF


RULES |= {
    "Relu": _increasing(lambda x: max(x, 0.0), 0.0),
    "Sigmoid": lambda op, ranges: (0.0, 1.0),
    "HardSigmoid": lambda op, ranges: (0.0, 1.0),
    "Softmax": lambda op, ranges: (0.0, 1.0),
    "Hardmax": lambda op, ranges: (0.0, 1.0),
    "Tanh": lambda op, ranges: (-1.0, 1.0),
    "Softsign": lambda op, ranges: (-1.0, 1.0),
    "Erf": lambda op, ranges: (-1.0, 1.0),
    "Sin": lambda op, ranges: (-1.0, 1.0),
    "Cos": lambda op, ranges: (-1.0, 1.0),
    "Sign": lambda op, ranges: (-1.0, 1.0),
    "Exp": _increasing(_exp, 0.0),
    "LogSoftmax": lambda op, ranges: (-_INF, 0.0),
    "Sqrt": _increasing(lambda x: math.sqrt(max(x, 0.0)), 0.0),
    "Softplus": _increasing(lambda x: max(x, 0.0) + math.log1p(math.exp(-abs(x))), 0.0),
}


@_rule("Floor", "Ceil", "Round")
def _rounded(op: Operator, ranges: Ranges) -> Interval | None:
    return _widened(ranges.bound(op.input(0)), 1.0)


def _widened(interval: Interval | None, by: float) -> Interval | None:
    return None if interval is None else (interval[0] - by, interval[1] + by)


@_rule(
    "Identity",
    "Reshape",
    "Flatten",
    "Squeeze",
    "Unsqueeze",
    "Transpose",
    "Expand",
    "Tile",
    "Slice",
    "Gather",
    "GatherElements",
    "GatherND",
    "DepthToSpace",
    "SpaceToDepth",
    "MaxPool",
    "GlobalMaxPool",
    "GlobalAveragePool",
    "ReduceMax",
    "ReduceMin",
    "ReduceMean",
    "ReverseSequence",
    "Compress",
    "Split",
)
def _same(op: Operator, ranges: Ranges) -> Interval | None:
    return ranges.bound(op.input(0))


@_rule("AveragePool", "Trilu", "CenterCropPad")
def _or_zero(op: Operator, ranges: Ranges) -> Interval | None:
    return _hull([ranges.bound(op.input(0)), (0.0, 0.0)])


@_rule("Concat", "Max", "Min", "Mean", "Where", "Pad", "Scatter", "ScatterElements", "ScatterND")
def _any_of(op: Operator, ranges: Ranges) -> Interval | None:
    read = [v for v in op.inputs if v is not None and v.dtype in FLOATS]
    if op.type.startswith("Scatter") and op.attrs.get("reduction", "none") not in ("none", b"none"):
        return None
    found = [ranges.bound(v) for v in read]
    if op.type in ("Max", "Min"):
        pick = max if op.type == "Max" else min
        ends = [i or (-_INF, _INF) for i in found]
        return pick(i[0] for i in ends), pick(i[1] for i in ends)
    if op.type == "Pad" and len(read) < 2:
        found.append((0.0, 0.0) if "value" not in op.attrs else (float(op.attrs["value"]),) * 2)
    return _hull(found)


@_rule("Cast", "CastLike")
def _cast(op: Operator, ranges: Ranges) -> Interval | None:
    read = op.input(0)
    return (
        None if read is None else _INTEGERS.get(str(read.dtype), ranges.bound(read) if read.dtype in FLOATS else None)
    )


@_rule("Neg")
def _neg(op: Operator, ranges: Ranges) -> Interval | None:
    found = ranges.bound(op.input(0))
    return found and (-found[1], -found[0])


@_rule("Abs")
def _abs(op: Operator, ranges: Ranges) -> Interval | None:
    found = ranges.bound(op.input(0)) or (-_INF, _INF)
    least = 0.0 if found[0] <= 0 <= found[1] else min(abs(found[0]), abs(found[1]))
    return least, max(abs(found[0]), abs(found[1]))


@_rule("Add", "Sum")
def _sum(op: Operator, ranges: Ranges) -> Interval | None:
    found = [ranges.bound(v) for v in op.inputs if v is not None]
    return None if None in found else (sum(i[0] for i in found if i), sum(i[1] for i in found if i))


@_rule("Sub")
def _sub(op: Operator, ranges: Ranges) -> Interval | None:
    one, other = ranges.bound(op.input(0)), ranges.bound(op.input(1))
    return (one[0] - other[1], one[1] - other[0]) if one and other else None


@_rule("Mul")
def _mul(op: Operator, ranges: Ranges) -> Interval | None:
    one, other = ranges.bound(op.input(0)), ranges.bound(op.input(1))
    a, b = op.input(0), op.input(1)
    if a is not None and b is not None and source(a) is source(b):
        least, largest = _abs(op, ranges) or (0.0, _INF)
        return least * least, largest * largest
    return _product(one, other) if one and other else None


@_rule("Div")
def _div(op: Operator, ranges: Ranges) -> Interval | None:
    one, other = ranges.bound(op.input(0)), ranges.bound(op.input(1))
    if one is None or other is None or other[0] <= 0 <= other[1]:
        return None
    return _product(one, (1 / other[1], 1 / other[0]))


@_rule("Reciprocal")
def _reciprocal(op: Operator, ranges: Ranges) -> Interval | None:
    found = ranges.bound(op.input(0))
    return None if found is None or found[0] <= 0 <= found[1] else (1 / found[1], 1 / found[0])


@_rule("Log")
def _log(op: Operator, ranges: Ranges) -> Interval | None:
    found = ranges.bound(op.input(0))
    if found is None or found[1] <= 0:
        return None
    return (math.log(found[0]) if found[0] > 0 else -_INF), (math.log(found[1]) if found[1] < _INF else _INF)


@_rule("Pow")
def _pow(op: Operator, ranges: Ranges) -> Interval | None:
    found, exponent = ranges.bound(op.input(0)), ranges.bound(op.input(1))
    if exponent is None or exponent[0] != exponent[1]:
        return None
    power = exponent[0]
    if power == 2:
        least, largest = _abs(op, ranges) or (0.0, _INF)
        return least * least, largest * largest
    if found is None or power <= 0 or (found[0] < 0 and power != int(power)):
        return None
    try:
        ends = [math.copysign(1.0, x) ** int(power) * abs(x) ** power if x < 0 else x**power for x in found]
    except OverflowError:
        return None
    return min(*ends, 0.0) if found[0] < 0 < found[1] else min(ends), max(ends)


@_rule("Clip")
def _clip(op: Operator, ranges: Ranges) -> Interval | None:
    low, high = ranges.bound(op.input(0)) or (-_INF, _INF)
    if op.program.opset() < 11:
        least, largest = float(op.attrs.get("min", -_INF)), float(op.attrs.get("max", _INF))
    else:
        bounds = [ranges.bound(op.input(slot)) if op.input(slot) is not None else None for slot in (1, 2)]
        least, largest = (bounds[0] or (-_INF, _INF))[0], (bounds[1] or (-_INF, _INF))[1]
    return min(max(low, least), largest), min(max(high, least), largest)


@_rule("LeakyRelu", "Elu", "Selu", "Gelu", "HardSwish", "Swish", "Mish", "ThresholdedRelu", "PRelu")
def _activation(op: Operator, ranges: Ranges) -> Interval | None:
    """Between a fixed multiple of the negative part (or -2) and of the positive part of the argument."""
    found = ranges.bound(op.input(0))
    if op.type == "PRelu":
        slope = ranges.bound(op.input(1))
        return _hull([_product(found, slope), found, (0.0, 0.0)]) if found and slope else None
    factor = {
        "LeakyRelu": abs(float(op.attrs.get("alpha", 0.01))),
        "Elu": abs(float(op.attrs.get("alpha", 1.0))),
        "Selu": 2.0,
    }.get(op.type, 1.0)
    if op.type == "Selu" and {"alpha", "gamma"} & set(op.attrs):
        return None
    if op.type == "Swish" and float(op.attrs.get("alpha", 1.0)) != 1.0:
        return None
    if found is None:
        return None if op.type in ("LeakyRelu",) else (-2.0 * max(factor, 1.0), _INF)
    return min(found[0] * max(factor, 1.0), -2.0 * factor, 0.0), max(found[1], 0.0) * (
        1.06 if op.type == "Selu" else 1.0
    )


# -- sums over many elements --------------------------------------------------------------------------
@_rule("ReduceSum", "ReduceL1", "ReduceSumSquare", "ReduceL2", "CumSum")
def _reduced(op: Operator, ranges: Ranges) -> Interval | None:
    found, many = ranges.bound(op.input(0)), _summed(op)
    if op.type in ("ReduceL1", "ReduceL2", "ReduceSumSquare") and (found is None or many is None):
        return 0.0, _INF
    if found is None or many is None:
        return None
    low, high = min(found[0], 0.0), max(found[1], 0.0)
    largest = max(-low, high)
    if op.type in ("ReduceSum", "CumSum"):
        return (low * many, high * many) if op.type == "CumSum" else (found[0] * many, found[1] * many)
    return 0.0, {
        "ReduceL1": largest * many,
        "ReduceSumSquare": largest**2 * many,
        "ReduceL2": largest * math.sqrt(many),
    }[op.type]


def _summed(op: Operator) -> int | None:
    """Elements that go into one sum, from the shapes; None where they do not say."""
    read, made = op.input(0), op.output(0)
    if read is None or made is None or read.shape is None or not all(isinstance(d, int) for d in read.shape):
        return None
    elements = math.prod(int(d or 0) for d in read.shape)
    if op.type == "CumSum":
        return max((int(d or 0) for d in read.shape), default=1)
    if made.shape is None or not all(isinstance(d, int) for d in made.shape):
        return None
    return elements // max(math.prod(int(d or 0) for d in made.shape), 1)


@_rule("MatMul", "Gemm")
def _matmul(op: Operator, ranges: Ranges) -> Interval | None:
    left, right = op.input(0), op.input(1)
    if op.type == "Gemm":
        last = "last" if op.attrs.get("transB", 0) else "second last"
        product = _weighted(ranges.bound(left), ranges, right, last)
        product = product and _product(product, (float(op.attrs.get("alpha", 1.0)),) * 2)
        beta, bias = float(op.attrs.get("beta", 1.0)), ranges.bound(op.input(2))
        if product is None or op.input(2) is None:
            return product
        scaled = bias and _product(bias, (beta, beta))
        return scaled and (product[0] + scaled[0], product[1] + scaled[1])
    if _is_softmax(left):  # weights that add up to 1: between the least and the largest row
        return ranges.bound(right)
    if ranges.content(left) is not None:
        return _weighted(ranges.bound(right), ranges, left, "last")
    return _weighted(ranges.bound(left), ranges, right, "second last")


def _is_softmax(variable: Variable | None) -> bool:
    op = source(variable).producer if variable is not None else None
    if op is None or operator_name(op) != "Softmax" or op.outputs[0] is None:
        return False
    axis = int(op.attrs.get("axis", -1 if op.program.opset() >= 13 else 1))
    shape = op.outputs[0].shape
    return axis == -1 or (shape is not None and axis == len(shape) - 1)


def _weighted(data: Interval | None, ranges: Ranges, weight: Variable | None, axis: str) -> Interval | None:
    """Sums of data times constant weights: the positive parts take one end of the interval, the negative the other."""
    if data is None or not all(map(math.isfinite, data)):
        return None
    sums = ranges.row_sums(weight, axis)
    if sums is None:
        return None
    up, down = sums
    return float((up * data[0] - down * data[1]).min(initial=0)), float((up * data[1] - down * data[0]).max(initial=0))


@_rule("Conv", "ConvTranspose")
def _conv(op: Operator, ranges: Ranges) -> Interval | None:
    data = _hull([ranges.bound(op.input(0)), (0.0, 0.0)])  # padding
    if op.type == "ConvTranspose" and int(op.attrs.get("group", 1)) != 1:
        return None
    product = _weighted(data, ranges, op.input(1), "first" if op.type == "Conv" else "second")
    if product is None or op.input(2) is None:
        return product
    bias = ranges.bound(op.input(2))
    return bias and (product[0] + bias[0], product[1] + bias[1])


@_rule("LayerNormalization", "InstanceNormalization", "GroupNormalization", "RMSNormalization")
def _normalised(op: Operator, ranges: Ranges) -> Interval | None:
    """No element of n numbers with mean square 1 is larger than the root of n."""
    read = op.input(0)
    if read is None or read.shape is None:
        return None
    rank = len(read.shape)
    if op.type in ("LayerNormalization", "RMSNormalization"):
        axis = int(op.attrs.get("axis", -1))
        sizes = read.shape[axis if axis >= 0 else rank + axis :]
    else:
        sizes = read.shape[1:]
    if not all(isinstance(size, int) for size in sizes):
        return None
    largest = math.sqrt(math.prod(int(size or 0) for size in sizes))
    scale = ranges.bound(op.input(1))
    found = scale and _product((-largest, largest), scale)
    if found is None or op.input(2) is None:
        return found
    bias = ranges.bound(op.input(2))
    return bias and (found[0] + bias[0], found[1] + bias[1])


@_rule("BatchNormalization")
def _batch_normalised(op: Operator, ranges: Ranges) -> Interval | None:
    data = ranges.bound(op.input(0))
    contents = [ranges.content(v) for v in op.inputs[1:5]]
    if data is None or not all(map(math.isfinite, data)) or op.attrs.get("training_mode", 0):
        return None
    if len(contents) < 4 or any(content is None for content in contents):
        return None
    scale, bias, mean, variance = (as_array(content).astype(np.float64) for content in contents)
    factor = scale / np.sqrt(variance + float(op.attrs.get("epsilon", 1e-5)))
    ends = np.stack([(data[0] - mean) * factor + bias, (data[1] - mean) * factor + bias])
    return (float(ends.min()), float(ends.max())) if np.isfinite(ends).all() and ends.size else None


@_rule("ConstantOfShape")
def _filled(op: Operator, ranges: Ranges) -> Interval | None:
    value = float(as_array(op.attrs["value"]).reshape(-1)[0]) if "value" in op.attrs else 0.0
    return (value, value) if math.isfinite(value) else None
