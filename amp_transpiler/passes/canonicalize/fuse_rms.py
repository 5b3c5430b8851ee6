"""RMS norms that an exporter wrote out become one operator when they are trained.

Written out, the square, the mean and the root need fp32 tensors of the size of the activation, and so do their
gradients. SimplifiedLayerNormalization, onnxruntime's name of what ONNX has as RMSNormalization from opset 23 on, reads
and writes 16 bit and computes in fp32 inside. What is saved for inference has it written out again. Divided by the
root of a sum of n squares and an epsilon, x is such a norm with ``epsilon / n``, times ``1 / sqrt(n)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.infer import static
from amp_transpiler.ir.metadata import FULL, FUSED
from amp_transpiler.ir.nodes import Operator, Shape, Variable
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.passes.canonicalize.matching import (
    added_number,
    factor,
    maker,
    number,
    only_reader,
    put,
    reduced_axes,
    squaring,
)
from amp_transpiler.passes.pipeline import Context, Pass
from amp_transpiler.passes.view.of_type import of_type

TYPE = "SimplifiedLayerNormalization"
_STANDS_FOR = "Mul Pow ReduceMean Sqrt Reciprocal Div"


@dataclass(frozen=True)
class _Norm:
    """The last operator of what was found, what is normalised, over the last of its dimensions, the epsilon, and what
    all is multiplied with."""

    last: Operator
    x: Variable
    size: Shape
    epsilon: float
    factor: float


def fuse_rms_norms(program: Graph) -> list[str]:
    """Put one operator in the place of each ``x / sqrt(mean(x * x) + epsilon) * scale`` over the last dimensions, and
    of those with a sum in the mean's place."""
    count = 0
    for root in of_type(program, "Sqrt"):
        found = None if root.outputs[0] is None or root.outputs[0].producer is not root else _found(root)
        if found is not None:
            _fuse(found)
            count += 1
    return [f"{count} RMS norms that were written out are one operator each"] if count else []


def _found(root: Operator) -> _Norm | None:
    summed, epsilon = added_number(root.input(0))
    if maker(root.input(0), "Add") is None:
        summed, epsilon = root.input(0), 0.0  # an exporter has dropped one that was next to nothing
    mean = maker(summed, "ReduceMean") or maker(summed, "ReduceSum")
    square = None if mean is None else squaring(mean.input(0))
    if mean is None or square is None or epsilon is None:
        return None
    x, axes = square.input(0), reduced_axes(mean)
    if x is None or x.dtype != "float32" or not axes or mean.attrs.get("keepdims", 1) != 1:
        return None
    shape = x.shape or ()
    size = shape[len(shape) - len(axes) :]
    last = _quotient(x, root)
    sizes = static(size)
    if last is None or axes != list(range(len(shape) - len(axes), len(shape))) or sizes is None or 0 in sizes:
        return None
    count = math.prod(sizes) if mean.type == "ReduceSum" else 1
    return _Norm(last, x, size, epsilon / count, 1 / math.sqrt(count))


def _quotient(x: Variable, root: Operator) -> Operator | None:
    """The operator that divides ``x`` by the root, or multiplies it by its inverse."""
    for op in _readers(root):
        if op.type == "Div" and op.input(1) is root.outputs[0] and op.input(0) is x:
            return op
        if op.type == "Reciprocal" or (op.type == "Div" and number(op.input(0), op.input(1)) == 1):
            found = next((product for product in _readers(op) if factor(product, op.outputs[0]) is x), None)
            if found is not None:
                return found
    return None


def _readers(op: Operator) -> list[Operator]:
    made = op.outputs[0]
    return [] if made is None else [reader for reader, _ in made.readers if not reader.domain]


def _fuse(norm: _Norm) -> None:
    program, last, scale = norm.last.program, norm.last, None
    made = last.outputs[0]
    assert made is not None
    reader = only_reader(made)
    if reader is not None:
        other = None if reader.domain else factor(reader, made)
        if norm.factor == 1 and other is not None and other.shape == norm.size and other.dtype == made.dtype:
            last, scale = reader, other
    if scale is None:
        scale = program.add_constant(f"{made.name}.scale", np.full(norm.size, norm.factor, np.float32))
    op = put(last, TYPE, [norm.x, scale], axis=-len(norm.size), epsilon=norm.epsilon)
    op.metadata[FUSED] = _STANDS_FOR


def keep_root_mean_squares(program: Graph) -> list[str]:
    """Let what divides by the root of a mean square (an RMS norm, written out) run in fp32 whatever the lists say.

    Such a norm has no operator before opset 23; as one it would be computed in fp32 inside.
    """
    count = 0
    for root in program.operators:
        summed, epsilon = added_number(root.input(0)) if root.full_type == "Sqrt" else (None, None)
        mean = maker(summed, "ReduceMean")
        square = None if mean is None else squaring(mean.input(0))
        if mean is None or square is None or epsilon is None or FULL in root.metadata:
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


class KeepRootMeanSquares(Pass):
    """An RMS norm that is written out is marked to run in fp32 whatever the lists say."""

    name = "keep-root-mean-squares"

    def run(self, graph: Graph, context: Context) -> bool:
        return bool(keep_root_mean_squares(graph))
