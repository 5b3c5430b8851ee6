"""Layer norms that an exporter wrote out become one operator again.

Before opset 17 there was no LayerNormalization: exports hold ReduceMean, Sub, Pow, ReduceMean, Add, Sqrt, Div, Mul and
Add. TensorFlow writes x s + (b - m s), where s is the scale by the deviation, at any opset; Flax takes the square of
the mean off the mean of squares. As one operator it is computed in fp32 inside, whatever it reads; written out, in pure
16 bit, the square of a deviation overflows beyond 255, an epsilon of 1e-12 is 0, and x s and m s cancel out.
"""

from __future__ import annotations

from dataclasses import dataclass

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.infer import static
from amp_transpiler.ir.metadata import FULL
from amp_transpiler.ir.nodes import Operator, Shape, Variable
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.passes.canonicalize.matching import added_number, maker, number, reduced_axes, remove, squares
from amp_transpiler.passes.pipeline import Context, Pass
from amp_transpiler.passes.view.constants import content
from amp_transpiler.passes.view.of_type import of_type

#: What takes a mean; the second one over all dimensions but two.
MEANS = ("ReduceMean", "GlobalAveragePool")


@dataclass(frozen=True)
class _Norm:
    """What was found: the last operator, what is normalised, scale, bias, epsilon."""

    last: Operator
    x: Variable
    scale: Variable
    bias: Variable
    epsilon: float
    axis: int


def fuse_layer_norms(
    program: Graph, names: frozenset[str] = frozenset(), keep: frozenset[Operator] = frozenset()
) -> list[str]:
    """Put one LayerNormalization in the place of each that is written out over the last dimensions; in place."""
    count = 0
    for op in of_type(program, "Add") if any(of_type(program, mean) for mean in MEANS) else ():
        found = _found(op)
        if found is not None and not _protected(found, names, keep):
            _fuse(found)
            count += 1
    return [f"{count} layer norms that were written out are one operator each"] if count else []


def has_layer_norms(program: Graph) -> bool:
    """Whether there is a layer norm that is written out."""
    return any(_found(op) is not None for op in of_type(program, "Add"))


def _protected(norm: _Norm, names: frozenset[str], keep: frozenset[Operator]) -> bool:
    """Whether an operator of the norm has to stay, or a variable inside it."""
    if not names and not keep:
        return False
    pending, seen = [norm.last], {norm.last}
    while pending:
        op = pending.pop()
        read = [v.producer for v in op.inputs if v is not None and v not in (norm.x, norm.scale, norm.bias)]
        pending += [maker for maker in dict.fromkeys(read) if maker is not None and maker not in seen]
        seen.update(pending)
    return bool(keep & seen) or any(v is not None and v.name in names for op in seen for v in op.outputs)


def keep_root_mean_squares(program: Graph) -> list[str]:
    """Let what divides by the root of a mean square (an RMS norm, written out) run in fp32 whatever the lists say.

    Such a norm has no operator before opset 23; as one it would be computed in fp32 inside.
    """
    count = 0
    for root in program.operators:
        summed, epsilon = added_number(root.input(0)) if root.type == "Sqrt" and not root.domain else (None, None)
        mean = maker(summed, "ReduceMean")
        square = None if mean is None else maker(mean.input(0), "Pow") or maker(mean.input(0), "Mul")
        if mean is None or square is None or epsilon is None or not squares(square) or FULL in root.metadata:
            continue
        made = root.outputs[0]
        assert made is not None and root.inputs[0] is not None and root.inputs[0].producer is not None
        behind = [op for op, _ in made.readers if op.type in ("Div", "Reciprocal")]
        inverses = [op.outputs[0] for op in behind if op.type == "Reciprocal" or op.input(1) is made]
        products = [
            op for v in inverses if v is not None and v.shape == made.shape for op, _ in v.readers if op.type == "Mul"
        ]
        for op in (square, mean, root.inputs[0].producer, root, *behind, *products):
            op.metadata[FULL] = str(Reason(Kind.STATISTICS))
        count += 1
    program.touch()
    return [f"{count} RMS norms that are written out keep their statistics in fp32"] if count else []


def _fuse(norm: _Norm) -> None:
    program, out = norm.last.program, norm.last.outputs[0]
    remove(norm.last, {norm.x, norm.scale, norm.bias})
    attrs = {"axis": norm.axis, "epsilon": norm.epsilon}
    weights = [_of_rank(weight, -norm.axis) for weight in (norm.scale, norm.bias)]
    program.add_operator(
        "LayerNormalization", [norm.x, *weights], [out], attrs=attrs, name=norm.last.name, like=norm.last
    )


def _of_rank(weight: Variable, rank: int) -> Variable:
    """A scale or bias without the 1s before its last ``rank`` dimensions: a parameter itself, of a constant another."""
    if len(weight.shape or ()) == rank:
        return weight
    array = as_array(content(weight))
    array = array.reshape(array.shape[array.ndim - rank :])
    if not weight.persistable:
        return weight.program.add_constant(weight.name, array)
    weight.data, weight.shape = array, array.shape
    return weight


def _found(last: Operator) -> _Norm | None:
    """The norm that ends in this Add."""
    scaled = _divided(last) or _shifted(last)
    if scaled is None:
        return None
    x, mean, root, scale, bias = scaled
    summed, epsilon = added_number(root.input(0))
    variance = _variance(summed, x, mean.output(0))
    if variance is None or epsilon is None or mean.input(0) is not x:
        return None
    axes, shape = reduced_axes(mean) or [], x.shape or ()
    if reduced_axes(variance) != axes:
        return None
    over_last = bool(axes) and axes == list(range(len(shape) - len(axes), len(shape)))
    size = shape[len(shape) - len(axes) :]
    if not (over_last and _keeps(mean) and _keeps(variance)) or static(size) is None:
        return None
    if not (_fits(scale, size) and _fits(bias, size)) or scale.dtype != x.dtype:
        return None
    return _Norm(last, x, scale, bias, epsilon, -len(axes))


#: What is normalised, its mean, the root of its variance, scale and bias.
_Scaled = tuple[Variable, Operator, Operator, Variable, Variable]


def _divided(last: Operator) -> _Scaled | None:
    """(x - mean) / root * scale + bias."""
    scaled, bias = _split(last, "Mul")
    normal, scale = _split(scaled, "Div")
    deviation = None if normal is None else _deviation(normal.input(0))
    if deviation is None or normal is None:
        return None
    return _complete(deviation.input(0), _mean(deviation.input(1)), maker(normal.input(1), "Sqrt"), scale, bias)


def _shifted(last: Operator) -> _Scaled | None:
    """x * s + (-mean * s + bias), where s is scale / root; or bias - mean * s."""
    for slot in (0, 1):
        product, shift = maker(last.input(slot), "Mul"), last.input(1 - slot)
        plus, minus = maker(shift, "Add"), maker(shift, "Sub")
        moved, bias = _split(plus, "Mul") if minus is None else (maker(minus.input(1), "Mul"), minus.input(0))
        for first, second in ((0, 1), (1, 0)) if product is not None and moved is not None else ():
            assert product is not None and moved is not None
            factor = maker(product.input(second), "Mul")
            inverse, scale = _split(factor, "Reciprocal")
            if factor is None or inverse is None or product.input(second) not in moved.inputs:
                continue
            centre = moved.input(1 if moved.input(0) is product.input(second) else 0)
            negative = maker(centre, "Neg")
            mean = centre if minus is not None else None if negative is None else negative.input(0)
            return _complete(product.input(first), _mean(mean), maker(inverse.input(0), "Sqrt"), scale, bias)
    return None


def _complete(
    x: Variable | None, mean: Operator | None, root: Operator | None, scale: Variable | None, bias: Variable | None
) -> _Scaled | None:
    if x is None or mean is None or root is None or scale is None or bias is None:
        return None
    return x, mean, root, scale, bias


def _mean(variable: Variable | None) -> Operator | None:
    """The operator that makes the variable, where that takes a mean."""
    return next((op for op in (maker(variable, type_) for type_ in MEANS) if op is not None), None)


def _fits(weight: Variable, size: Shape) -> bool:
    """Whether a scale or a bias is of this size, or can be: TensorFlow puts dimensions of 1 before it."""
    if weight.shape == size:
        return True
    ones = len(weight.shape or ()) - len(size)
    alone = not weight.persistable or len(weight.readers) == 1
    return ones > 0 and weight.shape == (1,) * ones + size and content(weight) is not None and alone


def _split(op: Operator | None, type_: str) -> tuple[Operator | None, Variable | None]:
    """Of a commutative operator: the operator of ``type_`` that makes one operand, and the other operand."""
    for slot in (0, 1) if op is not None else ():
        made = maker(op.input(slot), type_) if op is not None else None
        if made is not None and op is not None:
            return made, op.input(1 - slot)
    return None, None


def _variance(variable: Variable | None, x: Variable, mean: Variable | None) -> Operator | None:
    """The mean in a variance of ``x``: of (x - mean)²; or of x², from which Flax takes mean², to 0 at least."""
    found = _mean(_before_cast(variable, "float64"))
    deviation = None if found is None else _deviation(_squared(_before_cast(found.input(0), "float32")))
    if found is not None:
        return found if deviation is not None and list(deviation.inputs) == [x, mean] else None
    difference, least = added_number(variable, "Max")
    moved = maker(difference if least == 0 else variable, "Sub")
    found = None if moved is None or _squared(moved.input(1)) is not mean else _mean(moved.input(0))
    return found if found is not None and _squared(found.input(0)) is x else None


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
    if found is None or both is None or number(chosen.input(1)) != 0:
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
    if equal is None or number(equal.input(1)) != 0:
        return False
    nothing = maker(equal.input(0), "Sub")
    return nothing is not None and list(nothing.inputs) == [mean, mean]


def _squared(variable: Variable | None) -> Variable | None:
    """What the variable is the square of."""
    power = maker(variable, "Pow") or maker(variable, "Mul")
    return power.input(0) if power is not None and squares(power) else None


def _keeps(op: Operator) -> bool:
    """Whether a reduction keeps the dimensions that it is over."""
    return bool(op.attrs.get("keepdims", 1) == 1)


@dataclass(frozen=True)
class FuseLayerNorms(Pass):
    """A layer norm over the last dimension that is written out becomes one operator."""

    name = "fuse-layer-norms"

    def run(self, graph: Graph, context: Context) -> bool:
        return bool(fuse_layer_norms(graph))


@dataclass(frozen=True)
class KeepRootMeanSquares(Pass):
    """An RMS norm that is written out is marked to run in fp32 whatever the lists say."""

    name = "keep-root-mean-squares"

    def run(self, graph: Graph, context: Context) -> bool:
        return bool(keep_root_mean_squares(graph))
