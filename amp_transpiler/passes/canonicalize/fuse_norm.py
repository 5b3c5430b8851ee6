"""Layer norms that an exporter wrote out become one operator again.

Before opset 17 there was no LayerNormalization: exports hold ReduceMean, Sub, Pow, ReduceMean, Add, Sqrt, Div, Mul and
Add. As one operator it is computed in fp32 inside, whatever it reads; written out, in pure 16 bit, the square of a
deviation overflows beyond 255 and an epsilon of 1e-12 is 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from amp_transpiler.ir.adjacency import successors
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.infer import constant_array, static
from amp_transpiler.ir.metadata import FULL
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.ir.tensors import as_array, tensor_type
from amp_transpiler.passes.pipeline import Context, Pass
from amp_transpiler.passes.view.constants import content
from amp_transpiler.passes.view.of_type import of_type


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
    for op in of_type(program, "Add") if of_type(program, "ReduceMean") else ():
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


def squares(op: Operator) -> bool:
    """Whether a Mul or Pow squares its first operand."""
    if op.type == "Mul":
        return op.input(0) is op.input(1)
    data = None if op.input(1) is None else content(op.inputs[1])  # type: ignore[arg-type]
    return data is not None and bool((as_array(data).reshape(-1) == 2).all())


def _fuse(norm: _Norm) -> None:
    program, out = norm.last.program, norm.last.outputs[0]
    marks = norm.last.role, norm.last.guard, norm.last.scope
    remove(norm.last, {norm.x, norm.scale, norm.bias})
    attrs = {"axis": norm.axis, "epsilon": norm.epsilon}
    name = norm.last.name
    new = program.add_operator("LayerNormalization", [norm.x, norm.scale, norm.bias], [out], attrs=attrs, name=name)
    new.role, new.guard, new.scope = marks


def remove(last: Operator, needed: set[Variable]) -> None:
    """Take out an operator, and those before it that nothing else needs then."""
    program = last.program
    kept, uses = needed | {*program.outputs, *program.updates.values()}, successors(program.graph)
    queue = [last]
    while queue:
        op = queue.pop()
        read = [v for v in op.inputs if v is not None]
        program.remove_operator(op)
        if op is not last:
            for made in op.outputs:
                if made is not None:
                    program.remove_variable(made)
        for variable in dict.fromkeys(read):
            maker = variable.producer
            if maker is not None and not any([v is not None and (uses[v.key] or v in kept) for v in maker.outputs]):
                queue.append(maker)


def _found(last: Operator) -> _Norm | None:
    """The norm that ends in this Add of a bias."""
    scaled, bias = _split(last, "Mul")
    normal, scale = _split(scaled, "Div")
    if bias is None or scale is None or normal is None:
        return None
    deviation, root = maker(normal.input(0), "Sub"), maker(normal.input(1), "Sqrt")
    if deviation is None or root is None:
        return None
    x, mean = deviation.input(0), maker(deviation.input(1), "ReduceMean")
    summed, epsilon = added_number(root.input(0))
    variance = maker(summed, "ReduceMean")
    if x is None or mean is None or variance is None or epsilon is None or mean.input(0) is not x:
        return None
    axes, shape = reduced_axes(mean) or [], x.shape or ()
    if not _is_square(variance.input(0), deviation) or reduced_axes(variance) != axes:
        return None
    over_last = bool(axes) and axes == list(range(len(shape) - len(axes), len(shape)))
    size = shape[len(shape) - len(axes) :]
    if not (over_last and _keeps(mean) and _keeps(variance)) or static(size) is None:
        return None
    if scale.shape != size or bias.shape != size or scale.dtype != x.dtype:
        return None
    return _Norm(last, x, scale, bias, epsilon, -len(axes))


def maker(variable: Variable | None, type_: str) -> Operator | None:
    """The operator of this type that makes the variable."""
    op = None if variable is None else variable.producer
    return op if op is not None and op.type == type_ and not op.domain else None


def _split(op: Operator | None, type_: str) -> tuple[Operator | None, Variable | None]:
    """Of a commutative operator: the operator of ``type_`` that makes one operand, and the other operand."""
    for slot in (0, 1) if op is not None else ():
        made = maker(op.input(slot), type_) if op is not None else None
        if made is not None and op is not None:
            return made, op.input(1 - slot)
    return None, None


def added_number(variable: Variable | None) -> tuple[Variable | None, float | None]:
    """What a number is added to, and the number."""
    op = maker(variable, "Add")
    for slot in (0, 1) if op is not None else ():
        other = op.input(slot) if op is not None else None
        data = None if other is None else content(other)
        if data is not None and math.prod(tensor_type(data)[1]) == 1 and op is not None:
            return op.input(1 - slot), float(as_array(data).reshape(-1)[0])
    return None, None


def _is_square(variable: Variable | None, deviation: Operator) -> bool:
    """Whether the variable is the square of the deviation, or of another one from the same operands."""
    power = maker(variable, "Pow") or maker(variable, "Mul")
    return power is not None and squares(power) and _alike(power.input(0), deviation)


def _alike(variable: Variable | None, deviation: Operator) -> bool:
    made = maker(variable, "Sub")
    return made is not None and list(made.inputs) == list(deviation.inputs)


def _keeps(op: Operator) -> bool:
    """Whether a reduction keeps the dimensions that it is over."""
    return bool(op.attrs.get("keepdims", 1) == 1)


def reduced_axes(op: Operator) -> list[int] | None:
    """The axes that an operator reduces, counted from the first and in order; None where they are not known."""
    read = op.inputs[0]
    if read is None or read.shape is None:
        return None
    given = op.attrs.get("axes")
    axes = None if op.input(1) is None else constant_array(op.inputs[1])  # type: ignore[arg-type]
    if given is None and axes is None:
        return None
    rank = len(read.shape)
    return sorted({int(axis) % rank for axis in (given if given is not None else axes.reshape(-1))})  # type: ignore[union-attr]


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
