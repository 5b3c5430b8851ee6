"""Sequences of known length become tensors: no 16-bit type runs through a sequence, and no kernel of CUDA reads one.

So does what is read at a known place of a tensor that is split into pieces of one size, however many these are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from amp_transpiler.ir.constant_data import constant_array, constant_number
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.passes.canonicalize.matching import maker
from amp_transpiler.passes.canonicalize.opset import add_operator
from amp_transpiler.passes.pipeline import Context, Pass

#: Pieces that one sequence may have.
_MOST = 256
#: What makes a sequence of one.
_CHANGES = frozenset({"SequenceInsert", "SequenceErase", "Identity"})
_READERS = _CHANGES | {"SequenceAt", "SequenceLength", "ConcatFromSequence"}
#: The opset from which on Split reads the sizes of its pieces.
_SPLIT_INPUT = 13
_END = np.iinfo(np.int64).max


def expand_sequences(program: Graph) -> bool:
    """Let what is read of sequences whose pieces are known be read of tensors, in place; whether there was any.

    What made the sequences stays, read by nobody.
    """
    known: dict[Variable, list[Variable]] = {}
    changed = False
    for op in program.operators if any([v.type_proto is not None for v in program.variables]) else ():
        if op.domain or op.attrs.programs:
            continue
        pieces = known.get(op.inputs[0]) if op.inputs and op.inputs[0] is not None else None
        made = op.output(0)
        if made is None:
            continue
        if made.type_proto is not None:
            found = _pieces(op, pieces) if _only_read(made) else None
            if found is not None and len(found) <= _MOST:
                known[made] = found
        elif pieces is not None:
            changed |= _read(op, pieces, made)
        elif op.type == "SequenceAt":
            changed |= _cut(op, made)
    return changed


def _only_read(sequence: Variable) -> bool:
    """Whether only operators that know what they read of it do."""
    program, seen, pending = sequence.program, {sequence}, [sequence]
    while pending:
        variable = pending.pop()
        if variable in program.outputs:
            return False
        for op, slot in variable.readers:
            if slot != 0 or op.full_type not in _READERS:
                return False
            position = {"SequenceAt": 1, "SequenceErase": 1, "SequenceInsert": 2}.get(op.type)
            index = None if position is None else op.input(position)
            if index is not None and constant_array(index) is None:
                return False
            if op.type in _CHANGES and op.outputs[0] not in seen and op.outputs[0]:
                seen.add(op.outputs[0])
                pending.append(op.outputs[0])
    return True


def _pieces(op: Operator, before: list[Variable] | None) -> list[Variable] | None:
    """The tensors that a sequence holds; None where they are not known."""
    if op.type == "SequenceConstruct":
        return [v for v in op.inputs if v is not None]
    if op.type == "SequenceEmpty":
        return []
    if op.type == "SplitToSequence":
        return _split(op)
    if before is None or op.type == "Identity":
        return before
    if op.type == "SequenceInsert" and op.inputs[1] is not None:
        where = constant_number(op.input(2))
        place = len(before) if where is None else where + len(before) * (where < 0)
        return [*before[:place], op.inputs[1], *before[place:]] if 0 <= place <= len(before) else None
    if op.type == "SequenceErase":
        where = constant_number(op.input(1))
        place = -1 if where is None else where
        return (
            [v for i, v in enumerate(before) if i != place % len(before)]
            if -len(before) <= place < len(before)
            else None
        )
    return None


def _read(op: Operator, pieces: list[Variable], made: Variable) -> bool:
    """Let an operator read tensors instead."""
    if op.type == "SequenceAt":
        where = constant_number(op.input(1))
        if where is None or not -len(pieces) <= where < len(pieces):
            return False
        _instead(op, "Identity", [pieces[where]], made)
    elif op.type == "SequenceLength":
        _instead(op, "Identity", [op.program.add_constant(f"{made.name}.length", np.array(len(pieces)))], made)
    elif op.type == "ConcatFromSequence" and pieces:
        axis = int(op.attrs["axis"])
        if op.attrs.get("new_axis", 0):
            if axis < 0 and pieces[0].shape is None:
                return False
            axis %= len(pieces[0].shape or ()) + 1 if axis < 0 else axis + 1
            pieces = [_thin(op, v, axis) for v in pieces]
        _instead(op, "Concat", pieces, made, axis=axis)
    else:
        return False
    return True


def _cut(op: Operator, made: Variable) -> bool:
    """Let an operator read a piece of a tensor, where one split it into pieces of one size."""
    split, where = maker(op.inputs[0], "SplitToSequence"), constant_number(op.input(1))
    if split is None or where is None or split.inputs[0] is None:
        return False
    x, each, axis, program = split.inputs[0], split.input(1), int(split.attrs.get("axis", 0)), op.program
    if each is None and not split.attrs.get("keepdims", 1):
        _instead(op, "Gather", [x, program.add_constant(f"{made.name}.place", np.array(where))], made, axis=axis)
        return True
    one = np.array(1) if each is None else constant_array(each)
    if each is not None and (each.shape != () or each.dtype != "int64" or where < 0):
        return False  # the last pieces begin where it hangs on the size

    def edge(place: int) -> Variable:
        if one is not None:
            return program.add_constant(f"{made.name}.edge", one.reshape(1) * place)
        number = program.fresh_variable(f"{made.name}.edge", "int64", (1,))
        add_operator(op, "Mul", [each, program.add_constant(f"{made.name}.place", np.array([place]))], [number])
        return number

    end = program.add_constant(f"{made.name}.edge", np.array([_END])) if where == -1 else edge(where + 1)
    axes = program.add_constant(f"{made.name}.axes", np.array([axis]))
    _instead(op, "Slice", [x, edge(where), end, axes], made)
    return True


def _split(op: Operator) -> list[Variable] | None:
    """The pieces that a tensor is split into, by one Split."""
    x, given, program = op.inputs[0], op.input(1), op.program
    axis = int(op.attrs.get("axis", 0))
    if x is None or x.shape is None or not -len(x.shape) <= axis < len(x.shape):
        return None
    axis %= len(x.shape)
    sizes = _sizes(x.shape[axis], given)
    if sizes is None:
        return None
    shapes = [(*x.shape[:axis], n, *x.shape[axis + 1 :]) for n in sizes]
    made = [program.fresh_variable(f"{op.label}/{i}", x.dtype, shape) for i, shape in enumerate(shapes)]
    if None in sizes:
        program.add_operator("Split", [x, given], made, attrs={"axis": axis}, like=op)
    else:
        add_operator(op, "Split", [x], made, axis=axis, split=sizes)
    if given is None and not op.attrs.get("keepdims", 1):
        made = [_changed(op, "Squeeze", v, axis, (*x.shape[:axis], *x.shape[axis + 1 :])) for v in made]
    return made


def _sizes(size: int | str | None, given: Variable | None) -> list[int | None] | None:
    """The sizes of the pieces, None of each that is computed in the run; None where it is not known how many."""
    known = constant_array(given)
    if given is not None and known is None:
        number = given.shape[0] if given.shape else None
        taken = given.dtype == "int64" and given.program.opset() >= _SPLIT_INPUT
        return [None] * number if taken and isinstance(number, int) and 0 < number <= _MOST else None
    sizes: list[int | None]
    if known is not None and known.ndim:
        sizes = [int(n) for n in known]
        fits = size is None or isinstance(size, str) or sum(known) == size
        return sizes if fits and 0 < len(sizes) <= _MOST and min(known) >= 0 else None
    each = 1 if known is None else int(known)
    if not isinstance(size, int) or each < 1 or not 0 < size <= _MOST * each:
        return None
    return [min(each, size - at) for at in range(0, size, each)]


def _thin(op: Operator, x: Variable, axis: int) -> Variable:
    shape = None if x.shape is None else (*x.shape[:axis], 1, *x.shape[axis:])
    return _changed(op, "Unsqueeze", x, axis, shape)


def _changed(op: Operator, type_: str, x: Variable, axis: int, shape: tuple[int | str | None, ...] | None) -> Variable:
    """The tensor with one dimension more or less."""
    program = op.program
    out = program.fresh_variable(f"{x.name}.{type_.lower()}", x.dtype, shape)
    add_operator(op, type_, [x], [out], axes=[axis])
    return out


def _instead(op: Operator, type_: str, inputs: Sequence[Variable], out: Variable, **attrs: object) -> None:
    """Another operator makes what ``op`` made."""
    op.program.remove_operator(op)
    op.program.add_operator(type_, inputs, [out], attrs=attrs, name=op.name, like=op)


class ExpandSequences(Pass):
    """What is read of sequences whose pieces are known is read of tensors."""

    name = "expand-sequences"

    def applies(self, graph: Graph, context: Context) -> bool:
        return any(v.type_proto is not None for v in graph.variables)

    def run(self, graph: Graph, context: Context) -> bool:
        return expand_sequences(graph)
