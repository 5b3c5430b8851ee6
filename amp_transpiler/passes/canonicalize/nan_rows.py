"""What exports of attention put in the place of rows that a softmax made NaN: 0, where a mask forbids all of them.

Where every score is the sum of a product and of finite numbers, as those are that exporters mask with, no row is NaN
unless the scores are: what selects then hides what training has to see, as it does in PyTorch. Elsewhere a row is
forbidden where all that masks it is -inf, and such a row of the mask becomes 0 before the softmax: of a row of NaN the
gradient is NaN, also where nothing of it counts. PyTorch, whose gradient of that row is 0, asks the same.
"""

from __future__ import annotations

import numpy as np

from amp_transpiler.ir.decompose import Parts
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.infer import one_element
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.passes.canonicalize.matching import drop_unread, maker, only_reader, sides
from amp_transpiler.passes.view.constants import content
from amp_transpiler.passes.view.of_type import of_type

#: What makes finite numbers of a first operand of such, and of operands that all are, as far as its type holds them.
_FINITE = frozenset({"Cast", "Expand", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
_FINITE_OF_ALL = frozenset({"Add", "Mul", "Sub", "Where"})
#: Sums of products: scores.
_SCORES = frozenset({"Einsum", "Gemm", "MatMul"})
#: Operators that are looked at to show that scores are finite.
_STEPS = 12


def free_nan_rows(program: Graph) -> list[str]:
    """Let no selection hide NaN of scores, and rows of a softmax be 0 where they are masked, never NaN; in place.

    For programs of opset 13 or later, whose softmax is along one axis.
    """
    freed = masked = 0
    known: dict[Variable, tuple[Variable, Variable]] = {}
    for op in of_type(program, "IsNaN"):
        rows, made = op.inputs[0], op.outputs[0]
        softmax = None if rows is None or made is None or made in program.outputs else _softmax(rows)
        if softmax is None or rows is None or made is None or not all(_selects(*read, rows) for read in made.readers):
            continue
        if _is_finite(softmax.inputs[0], _STEPS):
            _free(op, rows)
            freed += 1
        else:
            _ask_mask(op, *_masked_by(softmax), known)
            masked += 1
    notes = [f"{freed} times NaN of attention's scores is no longer taken for a row that is masked"] if freed else []
    return notes + ([f"{masked} times a softmax is told before which of its rows are masked"] if masked else [])


def _softmax(rows: Variable) -> Operator | None:
    """The softmax along the last axis that makes a variable."""
    op, rank = rows.producer, len(rows.shape or ())
    if op is None or op.full_type != "Softmax" or op.program is not rows.program or rank == 0:
        return None
    return op if op.attrs.get("axis", -1) in (-1, rank - 1) else None


def _selects(reader: Operator, slot: object, rows: Variable) -> bool:
    """Whether an operator puts something of one number in the place of the rows, where this is its condition."""
    if reader.full_type != "Where" or slot != 0 or reader.inputs[2] is not rows or reader.outputs[0] is None:
        return False
    other = reader.inputs[1]
    return other is not None and one_element(other.shape) and len(other.shape or ()) <= len(rows.shape or ())


def _is_finite(variable: Variable | None, steps: int) -> bool:
    """Whether there is no infinity in a tensor but what does not fit its type."""
    if variable is None or not steps:
        return False
    data, op = content(variable), variable.producer
    if data is not None:
        return bool(np.isfinite(as_array(data)).all())
    if op is None or op.domain:
        return False
    if op.type in _SCORES:
        return True
    if op.type in _FINITE:
        return _is_finite(op.inputs[0], steps - 1)
    chosen = op.inputs[op.type == "Where" :]
    return op.type in _FINITE_OF_ALL and all(_is_finite(v, steps - 1) for v in chosen)


def _free(op: Operator, rows: Variable) -> None:
    program, made = op.program, op.outputs[0]
    assert made is not None
    for reader in dict.fromkeys(reader for reader, _ in made.readers):
        other, selected = reader.inputs[1], reader.outputs[0]
        program.remove_operator(reader)
        if selected in program.outputs:
            program.add_operator("Identity", [rows], [selected], name=reader.name, like=reader)
        elif selected is not None:
            program.replace_uses(selected, rows)
            program.remove_variable(selected)
        if other is not None:
            drop_unread(other)
    program.remove_operator(op)
    program.remove_variable(made)


def _masked_by(softmax: Operator) -> tuple[Operator, int]:
    """Where infinities come to a softmax: the operator that reads them, and its slot. A mask, beside finite scores."""
    x = softmax.inputs[0]
    added, width = maker(x, "Add"), None if x is None else x.shape and x.shape[-1]
    if added is not None and only_reader(x) is softmax:
        for slot, (mask, scores) in enumerate(sides(added)):
            if mask is not None and mask.shape and mask.shape[-1] == width is not None and _is_finite(scores, _STEPS):
                return added, slot
    return softmax, 0


def _ask_mask(op: Operator, reader: Operator, slot: int, known: dict[Variable, tuple[Variable, Variable]]) -> None:
    """Rows are forbidden where all is -inf; NaN is not. Of a maximum, NaN would be passed over on the CPU."""
    program, made, mask = op.program, op.output(0), reader.input(slot)
    assert made is not None and mask is not None
    if mask not in known:
        d = Parts(reader)
        hidden = d.cast(d.Equal(mask, d.const(-np.inf, mask.dtype)), "int32")
        blind = d.cast(d.ReduceMin(hidden, d.const(np.array([-1])), keepdims=1), "bool")
        known[mask] = blind, d.Where(blind, d.const(0, mask.dtype), mask)
    blind, shown = known[mask]
    reader.set_input(slot, shown)
    for selecting, _ in list(made.readers):
        selecting.set_input(0, blind)
    program.remove_operator(op)
    program.remove_variable(made)
