"""Control flow whose course is known before the run becomes straight-line operators.

An If on a constant becomes the branch that is taken. A Loop whose turns are known, and a Scan over a known length,
are unrolled, so that they have gradients and can be captured in a CUDA graph. Everything else stays.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from amp_transpiler.ir.clone import insert_graph
from amp_transpiler.ir.constant_data import constant_array, constant_number
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.infer import Shapes, infer_operator
from amp_transpiler.ir.nodes import Operator, Shape, Variable
from amp_transpiler.ir.opdef import has_lowering_rule
from amp_transpiler.lists import place_kinds, place_traits
from amp_transpiler.passes.canonicalize.opset import add_operator
from amp_transpiler.passes.canonicalize.trip_count import trip_count
from amp_transpiler.passes.pipeline import Context, Pass, Value, option
from amp_transpiler.passes.view.feed_shapes import checked_shapes

#: Shapes of feeds that the program does not declare itself.
FEED_SHAPES: Value[Mapping[str, tuple[int, ...]]] = Value("feed_shapes", checked=checked_shapes)
#: Operators that the unrolled iterations of all loops of a program may have together: a loop in a loop multiplies.
UNROLL_LIMIT = 20_000


def expand_control_flow(
    program: Graph,
    feed_shapes: Mapping[str, tuple[int, ...]] | None = None,
    turns: dict[Operator, Hashable] | None = None,
) -> bool:
    """Inline and unroll what is known, in place, whatever comes out of it included; whether anything changed.

    ``feed_shapes``: shapes of feeds that the program does not declare itself. ``turns`` gets, for each operator that
    came out of a nested graph, what is equal for its copies of all turns of a loop, and of no other operator.
    """
    if not program.nesting:
        return False
    known = Shapes(program, feed_shapes)
    env = _Known(known, {op.name for op in program.walk()}, UNROLL_LIMIT, {} if turns is None else turns)
    pending = list(program.nesting)
    changed = False
    for op in pending:
        first = program.next_key
        if not _expand(op, env):
            continue
        changed = True
        made = program.added_since(first)  # each after those that make what it reads
        env.left -= len(made)
        for new in made:
            infer_operator(new, env.shapes)
        pending += [new for new in made if new.attrs.programs]
    return changed


def inline_known_branches(program: Graph) -> bool:
    """Let each If whose condition is a constant be the branch that is taken, in place, those in branches included;
    whether there was any."""
    found = False
    pending = [op for op in program.nesting if op.full_type == "If"]
    names = {op.name for op in program.walk()} if pending else set()
    while pending:
        op = pending.pop()
        taken = constant_number(op.input(0))
        if taken is None:
            for nested in op.attrs.programs:
                found |= inline_known_branches(nested)
            continue
        first, found = program.next_key, True
        _inline(op, bool(taken), names, {})
        pending += [new for new in program.added_since(first) if new.full_type == "If"]
    return found


def why_not_known(op: Operator) -> str:
    """Why control flow that is still there was not expanded, in words for an error, with the way out."""
    way_out = "Give its value before the run: amp.prepare_training(program, values={'INPUT': NUMBER})"
    sizes = "feed_shapes={'INPUT': [None, SIZE, ...]}, where sizes decide that"
    if op.type == "If":
        return f"its condition '{_name(op.input(0))}' is computed in the run. {way_out}, or {sizes}"
    if op.type == "Scan":
        return (
            f"the length that it scans is not known, or unrolls to more than {UNROLL_LIMIT} operators. Fix "
            "the sizes of inputs: amp.prepare_training(program, feed_shapes={'INPUT': [None, SIZE, ...]})"
        )
    if op.type == "Loop":
        if not _goes_on(op.attrs["body"]):
            return (
                f"its body decides in the run whether to go on (or it unrolls to more than {UNROLL_LIMIT} operators). "
                f"{way_out}, or {sizes}; else rewrite it with a trip count"
            )
        return (
            f"its trip count '{_name(op.input(0))}' is not known before the run (or unrolls to more than "
            f"{UNROLL_LIMIT} operators). {way_out}, or {sizes}"
        )
    return "it holds a nested graph"


def _name(variable: Variable | None) -> str:
    return variable.name if variable is not None else "(none)"


def _expand(op: Operator, env: _Known) -> bool:
    if op.full_type not in ("If", "Loop", "Scan"):
        return False
    return {"If": _inline_if, "Loop": _unroll_loop, "Scan": _unroll_scan}[op.type](op, env)


@dataclass
class _Known:
    """What is known of a program: shapes and small values, and the names of its operators."""

    shapes: Shapes
    names: set[str]
    #: Operators that may still be unrolled.
    left: int
    #: What is equal for the copies of one operator of a nested graph.
    turns: dict[Operator, Hashable]

    def number(self, variable: Variable | None) -> Any:
        """The one number that a variable holds, None where that is not known."""
        value = None if variable is None else self.shapes.value(variable)
        return None if value is None or value.size != 1 else value.reshape(-1)[0]

    def shape(self, variable: Variable) -> Shape:
        """The shape, () where it is not known."""
        return self.shapes[variable][1] or ()


def _replace(op: Operator, results: Sequence[Variable | None]) -> None:
    """Let the operator's outputs be these variables."""
    program, outputs = op.program, list(op.outputs)
    program.remove_operator(op)
    for old, new in zip(outputs, results, strict=False):
        if old is not None and new is not None:
            program.add_operator("Identity", [new], [old], like=op)


def _add(
    like: Operator, type_: str, inputs: Sequence[Variable | None], outputs: Sequence[Variable], **attrs: Any
) -> None:
    like.program.add_operator(type_, inputs, outputs, attrs=attrs, like=like)


def _inline_if(op: Operator, env: _Known) -> bool:
    taken = env.number(op.input(0))
    if taken is None:
        return False
    _inline(op, bool(taken), env.names, env.turns)
    return True


def _inline(op: Operator, taken: bool, names: set[str], turns: dict[Operator, Hashable]) -> None:
    _replace(op, _insert(op, "then_branch" if taken else "else_branch", {}, op.label, names, turns))


def _insert(
    op: Operator,
    which: str,
    given: dict[Variable, Variable],
    prefix: str,
    names: set[str],
    turns: dict[Operator, Hashable],
) -> list[Variable]:
    """Copy the operators of one nested graph of ``op`` into the program around it; what its outputs are there."""
    first = op.program.next_key
    made = insert_graph(op.attrs[which], op.program, given, prefix, names)
    for place, new in enumerate(op.program.added_since(first)):
        turns[new] = (turns.get(op, op), which, place)
    return made


def _shared(body: Graph, program: Graph, label: str) -> dict[Variable, Variable]:
    """Constants of a loop body, put into the program once, for all iterations; those that nothing reads go."""
    shared = {}
    for variable in list(body.variables):
        if variable.outer is not None or variable.producer is not None or variable.data is None:
            continue
        if not variable.readers and variable not in body.outputs:
            body.remove_variable(variable)
        else:
            name = variable.name if not program.has_var(variable.name) else f"{label}/{variable.name}"
            made = program.fresh_variable(name, variable.dtype, variable.shape, data=variable.data)
            made.persistable, made.trainable = variable.persistable, variable.trainable
            shared[variable] = made
    return shared


def _fits(body: Graph, trips: int, env: _Known) -> bool:
    return trips * sum(1 for _ in body.walk()) <= env.left


def _goes_on(body: Graph) -> bool:
    """Whether the loop's body always says that it goes on."""
    says: Variable | None = body.outputs[0]
    while says is not None and (says.outer is not None or (says.producer and _same_truth(says.producer))):
        says = says.outer or (says.producer.inputs[0] if says.producer else None)
    if says is body.inputs[1]:
        return True
    value = constant_array(says)
    return value is not None and bool(value.all())


def _same_truth(op: Operator) -> bool:
    """Whether what it makes is as true as what it reads."""
    return op.type == "Identity" or (op.type == "Cast" and op.attrs["to"] == onnx.TensorProto.BOOL)


def _trips(op: Operator, body: Graph, env: _Known) -> int | None:
    """The turns of a loop, None where they are not known."""
    if not _goes_on(body):
        return trip_count(op, env.shapes.value, env.left // max(1, sum(1 for _ in body.walk())))
    trips, start = env.number(op.input(0)), env.number(op.input(1))
    if trips is None or (op.input(1) is not None and start is None):
        return None
    return max(int(trips), 0) if start is None or start else 0


def _unroll_loop(op: Operator, env: _Known) -> bool:
    body: Graph = op.attrs["body"]
    trips = _trips(op, body, env)
    if trips is None:
        return False
    states = [v for v in op.inputs[2:] if v is not None]
    scanned = len(op.outputs) - len(states)
    if not _fits(body, trips, env) or (trips == 0 and any(v is not None for v in op.outputs[len(states) :])):
        return False
    program, shared = op.program, _shared(body, op.program, op.label)
    going = program.add_constant(f"{op.label}/going_on", _as_declared(body.inputs[1], np.array(True)))
    rows: list[list[Variable]] = [[] for _ in range(scanned)]
    for trip in range(trips):
        number = _as_declared(body.inputs[0], np.array(trip, np.int64))
        count = program.add_constant(f"{op.label}/{trip}/count", number)
        given = shared | dict(zip(body.inputs, [count, going, *states], strict=True))
        made = _insert(op, "body", given, f"{op.label}/{trip}", env.names, env.turns)[1:]
        states = made[: len(states)]
        for row, value in zip(rows, made[len(states) :], strict=True):
            row.append(value)
    stacked = [
        _stack(op, row, 0) if row and out is not None else None
        for row, out in zip(rows, op.outputs[len(states) :], strict=True)
    ]
    _replace(op, [*states, *stacked])
    return True


def _as_declared(variable: Variable, number: np.ndarray) -> np.ndarray:
    """A number as a loop's body takes it: TensorFlow's exporter wants vectors of one, which onnxruntime gives it."""
    return number.reshape(1) if variable.shape == (1,) else number


def _unroll_scan(op: Operator, env: _Known) -> bool:
    body: Graph = op.attrs["body"]
    count = int(op.attrs["num_scan_inputs"])
    if op.program.opset() < 9 or any(v is None for v in op.inputs):
        return False
    read = [v for v in op.inputs if v is not None]
    states, sequences = read[: len(read) - count], read[len(read) - count :]
    if not all(env.shape(v) for v in sequences):
        return False
    along = op.attrs.get("scan_input_axes", [0] * count)
    axes = [a % len(env.shape(v)) for a, v in zip(along, sequences, strict=True)]
    shape = env.shape(sequences[0])
    trips = shape[axes[0]]
    if not isinstance(trips, int) or trips == 0 or not _fits(body, trips, env):
        return False
    pieces = [_pieces(op, v, axis, trips, env) for v, axis in zip(sequences, axes, strict=True)]
    for i, backwards in enumerate(op.attrs.get("scan_input_directions", [])):
        pieces[i] = pieces[i][::-1] if backwards else pieces[i]
    shared = _shared(body, op.program, op.label)
    rows: list[list[Variable]] = [[] for _ in range(len(body.outputs) - len(states))]
    for trip in range(trips):
        given = shared | dict(zip(body.inputs, [*states, *(piece[trip] for piece in pieces)], strict=True))
        made = _insert(op, "body", given, f"{op.label}/{trip}", env.names, env.turns)
        states = made[: len(states)]
        for row, value in zip(rows, made[len(states) :], strict=True):
            row.append(value)
    for i, backwards in enumerate(op.attrs.get("scan_output_directions", [])):
        rows[i] = rows[i][::-1] if backwards else rows[i]
    along = op.attrs.get("scan_output_axes", [0] * len(rows))
    _replace(op, [*states, *(_stack(op, row, axis) for row, axis in zip(rows, along, strict=True))])
    return True


def _pieces(op: Operator, sequence: Variable, axis: int, trips: int, env: _Known) -> list[Variable]:
    """The elements of a sequence along ``axis``: one Split, whose gradient is one Concat."""
    program, shape = op.program, env.shape(sequence)
    thin = (*shape[:axis], 1, *shape[axis + 1 :])
    slices = [program.fresh_variable(f"{op.label}/{sequence.name}.{i}", sequence.dtype, thin) for i in range(trips)]
    add_operator(op, "Split", [sequence], slices, axis=axis, split=[1] * trips)
    where = program.add_constant(f"{op.label}/axis", np.array([axis], np.int64))
    found = []
    for piece in slices:
        one = program.fresh_variable(f"{piece.name}.value", sequence.dtype, (*shape[:axis], *shape[axis + 1 :]))
        _with_axis(op, "Squeeze", piece, where, axis, one)
        found.append(one)
    return found


def _with_axis(op: Operator, type_: str, x: Variable, where: Variable, axis: int, out: Variable) -> None:
    """A Squeeze or Unsqueeze: all those of one value in all turns share ``where``, which holds the axis."""
    if op.program.opset() >= 13:
        _add(op, type_, [x, where], [out])
    else:
        _add(op, type_, [x], [out], axes=[axis])


def _stack(op: Operator, row: list[Variable], axis: int) -> Variable:
    """The values of all iterations, along a new axis."""
    program, first = op.program, row[0]
    shape = first.shape
    if shape is not None:
        axis %= len(shape) + 1
    where = program.add_constant(f"{op.label}/new_axis", np.array([axis], np.int64))
    apart = []
    for value in row:
        size = None if shape is None else (*shape[:axis], 1, *shape[axis:])
        thin = program.fresh_variable(f"{value.name}.row", first.dtype, size)
        _with_axis(op, "Unsqueeze", value, where, axis, thin)
        apart.append(thin)
    whole = None if shape is None else (*shape[:axis], len(row), *shape[axis:])
    out = program.fresh_variable(f"{first.name}.rows", first.dtype, whole)
    _add(op, "Concat", apart, [out], axis=axis)
    return out


class ExpandControlFlow(Pass):
    """An If on a constant becomes the branch that is taken, loops and scans of known length are unrolled.

    ``place``: only in a graph in whose bodies an operator has a lowering rule there.
    """

    name = "expand-control-flow"
    takes = (FEED_SHAPES,)

    place: str = option("", *place_kinds())

    def applies(self, graph: Graph, context: Context) -> bool:
        if not self.place:
            return bool(graph.nesting)
        traits = place_traits(self.place)
        return any(has_lowering_rule(op, traits) for op in graph.nesting)

    def run(self, graph: Graph, context: Context) -> bool:
        return expand_control_flow(graph, context.get(FEED_SHAPES))
