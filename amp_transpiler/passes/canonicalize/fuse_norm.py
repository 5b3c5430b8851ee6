"""Layer norms that an exporter wrote out become one operator again.

Before opset 17 there was no LayerNormalization: exports hold ReduceMean, Sub, Pow, ReduceMean, Add, Sqrt, Div, Mul and
Add. TensorFlow writes x s + (b - m s), where s is the scale by the deviation, at any opset; Flax takes the square of
the mean off the mean of squares. Norms of channels (SAM, ConvNeXt, much hand-written code) are written out at any opset
too: the operator normalises last dimensions, so that it stands between two transpositions. As one operator it is
computed in fp32 inside, whatever it reads; written out, in pure 16 bit, the square of a deviation overflows beyond 255,
an epsilon of 1e-12 is 0, and x s and m s cancel out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.infer import static
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.ir.types import numpy_dtype
from amp_transpiler.passes.canonicalize.matching import (
    added_number,
    computed,
    factor,
    maker,
    number,
    only_reader,
    reduced_axes,
    remove,
    sides,
    squaring,
)
from amp_transpiler.passes.pipeline import Context, Pass, Property
from amp_transpiler.passes.view.constants import constant_content
from amp_transpiler.passes.view.of_type import of_type
from amp_transpiler.passes.view.reached import reached

#: The opset of LayerNormalization.
LAYER_NORM = 17
#: What takes a mean; the second one over all dimensions but two.
MEANS = ("ReduceMean", "GlobalAveragePool")
#: What ends a norm: a quotient, a product with the inverse of the deviation, TensorFlow's sum.
_ENDS = ("Div", "Mul", "Add")


@dataclass(frozen=True)
class _Norm:
    """What was found: the last operator, what is normalised and its mean, the root of its variance, scale and bias.

    Where there are none, the last operator makes what is neither scaled nor moved. The variance is ``factor`` times the
    mean of squares: torch's own divides by one less than there are elements.
    """

    last: Operator
    x: Variable
    mean: Variable
    root: Operator
    scale: Variable | None = None
    bias: Variable | None = None
    epsilon: float = 0.0
    factor: float = 1.0
    axes: tuple[int, ...] = ()

    @property
    def weights(self) -> list[Variable]:
        return [weight for weight in (self.scale, self.bias) if weight is not None]


def fuse_layer_norms(
    program: Graph, names: frozenset[str] = frozenset(), keep: frozenset[Operator] = frozenset()
) -> list[str]:
    """Put one LayerNormalization in the place of each norm that is written out; in place."""
    count = 0
    for op in of_type(program, *_ENDS) if any(of_type(program, mean) for mean in MEANS) else ():
        found = _found(op)
        if found is not None and not _protected(found, names, keep):
            _fuse(found)
            count += 1
    return [f"{count} layer norms that were written out are one operator each"] if count else []


def has_layer_norms(program: Graph) -> bool:
    """Whether there is a layer norm that is written out."""
    return any(_found(op) is not None for op in of_type(program, *_ENDS))


def _protected(norm: _Norm, names: frozenset[str], keep: frozenset[Operator]) -> bool:
    """Whether an operator of the norm has to stay, or a variable inside it."""
    if not names and not keep:
        return False
    ends = (norm.x, *norm.weights)
    inside = set(reached([norm.last], lambda op: (v.producer for v in op.inputs if v is not None and v not in ends)))
    return bool(keep & inside) or any(v is not None and v.name in names for op in inside for v in op.outputs)


def _fuse(norm: _Norm) -> None:
    last, x, out = norm.last, norm.x, norm.last.outputs[0]
    program, rank = last.program, len(norm.x.shape or ())
    assert out is not None and x.shape is not None
    size = static(tuple(x.shape[axis] for axis in norm.axes)) or ()
    weights = [None if weight is None else _source(weight, size) for weight in (norm.scale, norm.bias)]
    remove(last, {x, *(weight for weight in weights if weight is not None)})
    scale, bias = (None if weight is None else _of_size(weight, size, last) for weight in weights)
    order = [axis for axis in range(rank) if axis not in norm.axes] + list(norm.axes)
    moved = order != sorted(order)
    read = _transposed(x, order, last) if moved else x
    made = program.fresh_variable(f"{out.name}.tmp", out.dtype, read.shape) if moved else out
    inputs = [read, _scale(norm, scale, size), *([] if bias is None else [bias])]
    attrs = {"axis": -len(norm.axes), "epsilon": norm.epsilon / norm.factor}
    program.add_operator("LayerNormalization", inputs, [made], attrs=attrs, name=last.name, like=last)
    if moved:
        back = {"perm": [order.index(axis) for axis in range(rank)]}
        program.add_operator("Transpose", [made], [out], attrs=back, like=last)


def _scale(norm: _Norm, scale: Variable | None, size: tuple[int, ...]) -> Variable:
    """The scale of a norm by the mean of squares itself."""
    program, x, by = norm.last.program, norm.x, norm.factor**-0.5
    if scale is not None and by == 1:
        return scale
    held = constant_content(scale)
    if scale is None or held is not None:
        array = np.ones(size, numpy_dtype(x.dtype or "float32")) if held is None else as_array(held)
        return program.add_constant(f"{x.name}.scale", (array * by).astype(array.dtype))
    constant = program.add_constant(f"{scale.name}.factor", np.array(by, numpy_dtype(x.dtype or "float32")))
    return computed(norm.last, "Mul", [scale, constant], f"{scale.name}.tmp", size)


def _transposed(x: Variable, order: list[int], like: Operator) -> Variable:
    shape = x.shape or ()
    return computed(like, "Transpose", [x], f"{x.name}.tmp", [shape[axis] for axis in order], perm=order)


def _source(weight: Variable, size: tuple[int, ...]) -> Variable:
    """What dimensions of 1 were put into, where that is what makes the scale or bias; else this itself."""
    ones = maker(weight, "Unsqueeze") or maker(weight, "Reshape")
    read = None if ones is None else ones.input(0)
    return read if read is not None and read.shape == size else weight


def _of_size(weight: Variable, size: tuple[int, ...], like: Operator) -> Variable:
    """A scale or bias without dimensions of 1, as another constant or reshaped."""
    program = weight.program
    if weight.shape == size:
        return weight
    array = constant_content(weight)
    if array is not None:
        return program.add_constant(weight.name, as_array(array).reshape(size))
    sizes = program.add_constant(f"{weight.name}.sizes", np.array(size, np.int64))
    return computed(like, "Reshape", [weight, sizes], f"{weight.name}.tmp", size)


def _found(op: Operator) -> _Norm | None:
    """The norm whose quotient this operator makes; TensorFlow's ends in it."""
    norm = _divided(op) or _shifted(op)
    if norm is None:
        return None
    mean, x = _mean(norm.mean), norm.x
    summed, epsilon = added_number(norm.root.input(0))
    variance, factor = _variance(summed, x, norm.mean)
    if mean is None or mean.input(0) is not x or variance is None or epsilon is None or x.shape is None:
        return None
    axes, over = reduced_axes(mean) or [], _average(variance)[0]
    if not axes or axes != list(range(axes[0], axes[-1] + 1)) or over is None or reduced_axes(over) != axes:
        return None
    ones = tuple(1 if axis in axes else size for axis, size in enumerate(x.shape))
    if norm.mean.shape != ones or variance.shape != ones or static(tuple(x.shape[axis] for axis in axes)) is None:
        return None
    norm = replace(norm, axes=tuple(axes), epsilon=epsilon, factor=factor)
    return _with_weights(norm) if all(_fits(weight, norm) for weight in norm.weights) else None


def _with_weights(norm: _Norm) -> _Norm:
    """The norm with the scale and the bias that nothing but its quotient meets."""
    if norm.scale is None and (found := _next(norm, "Mul")) is not None:
        norm = replace(norm, last=found[0], scale=found[1])
    if norm.bias is None and (found := _next(norm, "Add")) is not None:
        norm = replace(norm, last=found[0], bias=found[1])
    return norm


def _next(norm: _Norm, type_: str) -> tuple[Operator, Variable] | None:
    """The operator that alone reads what the norm made so far, if of this type, and its weight."""
    made = norm.last.outputs[0]
    op = only_reader(made)
    if op is None or op.full_type != type_ or len(op.inputs) != 2:
        return None
    weight = next(other for operand, other in sides(op) if operand is made)
    return (op, weight) if weight is not None and weight is not made and _fits(weight, norm) else None


def _divided(op: Operator) -> _Norm | None:
    """(x - mean) / root, or times the inverse of the root; x - mean is scaled or not.

    What else reads the root (series are scaled back by it in the end) wants it to stay, and then nothing is gained.
    """
    for above, other in sides(op)[: {"Mul": 2, "Div": 1}.get(op.type, 0)]:
        below = other if op.type == "Div" else _inverted(other)
        root = maker(below, "Sqrt")
        if root is None or only_reader(below) is None or only_reader(other) is not op:
            continue
        for side, scale in ((above, None), *sides(maker(above, "Mul"))):
            deviation = _deviation(side)
            x, mean = (None, None) if deviation is None else (deviation.input(0), deviation.input(1))
            if x is not None and mean is not None:
                return _Norm(op, x, mean, root, scale)
    return None


def _inverted(variable: Variable | None) -> Variable | None:
    """What the variable is the inverse of."""
    inverse, quotient = maker(variable, "Reciprocal"), maker(variable, "Div")
    if inverse is not None:
        return inverse.input(0)
    return quotient.input(1) if quotient is not None and number(quotient.input(0), quotient.input(1)) == 1 else None


def _shifted(last: Operator) -> _Norm | None:
    """x * s + (-mean * s + bias), where s is scale / root; or bias - mean * s; a bias of zeros may be left out."""
    for side, shift in sides(last) if last.type == "Add" else ():
        plus, minus = maker(shift, "Add"), maker(shift, "Sub")
        moved, bias = _split(plus, "Mul") if minus is None else (maker(minus.input(1), "Mul"), minus.input(0))
        if plus is None and minus is None:
            moved = maker(shift, "Mul")
        for x, slope in sides(maker(side, "Mul")) if moved is not None else ():
            inverse, scale = _split(maker(slope, "Mul"), "Reciprocal")
            centre = None if moved is None else factor(moved, slope)
            if inverse is None or centre is None:
                continue
            negative = maker(centre, "Neg")
            mean = centre if minus is not None else None if negative is None else negative.input(0)
            root = maker(inverse.input(0), "Sqrt")
            if x is not None and mean is not None and root is not None and scale is not None:
                return _Norm(last, x, mean, root, scale, bias)
    return None


def _mean(variable: Variable | None) -> Operator | None:
    """The operator that takes the mean that the variable is."""
    op, factor = _average(variable)
    return op if abs(factor - 1) < 1e-6 else None


def _average(variable: Variable | None) -> tuple[Operator | None, float]:
    """The reduction whose mean, times a number, the variable is, with dimensions of 1 put in or not; the number."""
    factor = 1.0
    while variable is not None and (op := variable.producer) is not None and not op.domain:
        if op.type in MEANS:
            return op, factor
        if op.type == "ReduceSum":
            shape, axes = op.inputs[0].shape if op.inputs[0] is not None else None, reduced_axes(op)
            size = None if shape is None or axes is None else static(tuple(shape[axis] for axis in axes))
            return (None, factor) if size is None else (op, factor * math.prod(size))
        by, variable = 1.0 if op.type in ("Reshape", "Unsqueeze") else None, op.input(0)
        if op.type == "Mul":
            variable, by = added_number(op.output(0), "Mul")
        elif op.type == "Div" and (below := number(op.input(1), op.input(0))):
            by = 1 / below
        if by is None or by <= 0:
            break
        factor *= by
    return None, factor


def _fits(weight: Variable, norm: _Norm) -> bool:
    """Whether a scale or a bias has a number for each element along the norm's axes, and differs along no other."""
    given, shape = weight.shape, norm.x.shape or ()
    if given is None or len(given) > len(shape) or weight.dtype != norm.x.dtype:
        return False
    want = tuple(size if axis in norm.axes else 1 for axis, size in enumerate(shape))
    return (1,) * (len(shape) - len(given)) + given == want


def _split(op: Operator | None, type_: str) -> tuple[Operator | None, Variable | None]:
    """Of a commutative operator: the operator of ``type_`` that makes one operand, and the other operand."""
    return next(((made, other) for operand, other in sides(op) if (made := maker(operand, type_))), (None, None))


def _variance(variable: Variable | None, x: Variable, mean: Variable) -> tuple[Variable | None, float]:
    """The mean in a variance of ``x``, and what it is multiplied with: of (x - mean)²; or of x², from which Flax takes
    mean², to 0 at least."""
    before = _before_cast(variable, "float64")
    found, factor = _average(before)
    if found is not None:
        deviation = _deviation(_squared(_before_cast(found.input(0), "float32")))
        own = deviation is not None and deviation.input(0) is x and _equal_means(deviation.input(1), mean)
        return (before, factor) if own else (None, 1.0)
    difference, least = added_number(variable, "Max")
    moved = maker(difference if least == 0 else variable, "Sub")
    found = None if moved is None or _squared(moved.input(1)) is not mean else _mean(moved.input(0))
    own = moved is not None and found is not None and _squared(found.input(0)) is x
    return (moved.input(0) if moved is not None and own else None, 1.0)


def _equal_means(variable: Variable | None, mean: Variable) -> bool:
    """Whether a variable is this mean, or is taken once more as it is."""
    if variable is mean:
        return True
    one, other = _mean(variable), _mean(mean)
    if variable is None or one is None or other is None or variable.shape != mean.shape:
        return False
    return one.input(0) is other.input(0) and reduced_axes(one) == reduced_axes(other)


def _before_cast(variable: Variable | None, dtype: str) -> Variable | None:
    """What the variable was cast from, if that is of this type: jax2onnx takes the mean of squares in float64."""
    cast = maker(variable, "Cast")
    read = None if cast is None else cast.input(0)
    return read if read is not None and read.dtype == dtype else variable


def _deviation(variable: Variable | None) -> Operator | None:
    """The Sub that makes the variable, or what jax2onnx selects from where it is not 0: rows of unequal numbers."""
    chosen = maker(variable, "Where")
    if chosen is None:
        return maker(variable, "Sub")
    found, both = maker(chosen.input(2), "Sub"), maker(chosen.input(0), "And")
    if found is None or both is None or number(chosen.input(1), chosen.input(2)) != 0:
        return None
    equal, finite = maker(both.input(0), "Equal"), maker(both.input(1), "Equal")
    return found if _all_equal(equal, found) and _none_infinite(finite, found.input(1)) else None


def _all_equal(equal: Operator | None, deviation: Operator) -> bool:
    """Whether what is asked is if the smallest of the numbers that a mean was taken of is the largest."""
    mean = maker(deviation.input(1), "ReduceMean")
    if equal is None or mean is None:
        return False
    ends = maker(equal.input(0), "ReduceMin"), maker(equal.input(1), "ReduceMax")
    return all(e is not None and e.input(0) is mean.input(0) and reduced_axes(e) == reduced_axes(mean) for e in ends)


def _none_infinite(equal: Operator | None, mean: Variable | None) -> bool:
    """Whether what is asked is if a mean less itself is 0."""
    if equal is None or number(equal.input(1), equal.input(0)) != 0:
        return False
    nothing = maker(equal.input(0), "Sub")
    return nothing is not None and list(nothing.inputs) == [mean, mean]


def _squared(variable: Variable | None) -> Variable | None:
    """What the variable is the square of."""
    power = squaring(variable)
    return None if power is None else power.input(0)


class FuseLayerNorms(Pass):
    """A layer norm that is written out, along whichever axes, becomes one operator."""

    name = "fuse-layer-norms"
    needs = (Property.TARGET_OPSET,)

    def run(self, graph: Graph, context: Context) -> bool:
        return bool(fuse_layer_norms(graph))
