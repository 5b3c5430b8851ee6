"""The two parts of a head that rotary positions turn against each other, and how exporters put them together again.

The parts are the halves of the head, or its even and odd numbers ("interleaved": Cohere, GLM, GPT-J, ERNIE, EVA), which
are cut out by slices with a step of two, or as the two columns of a view of pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from amp_transpiler.ir.constant_data import constant_array, constant_number
from amp_transpiler.ir.infer import one_element
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.tensors import as_array, tensor_type
from amp_transpiler.passes.canonicalize.matching import added_axes, added_number, maker, only_reader
from amp_transpiler.passes.view.constants import constant_content

#: What makes a repeated table of a repeated one, of one operand.
_OF_REPEATED = frozenset({"Cast", "Cos", "Expand", "Identity", "Neg", "Reshape", "Sin", "Unsqueeze"})
#: Operators that are looked at to show that a table is repeated.
_STEPS = 12


@dataclass(frozen=True)
class Part:
    """The first or ``second`` part of the heads of ``x``: a half, or, of ``pairs``, every second number."""

    x: Variable
    second: bool
    pairs: bool


@dataclass(frozen=True)
class Joined:
    """Two parts that ``last`` puts together: behind each other, or in ``pairs``."""

    first: Variable
    second: Variable
    last: Operator
    pairs: bool


def part_of(variable: Variable | None) -> Part | None:
    """Which part of which fp32 tensor with four axes a variable is."""
    op = None if variable is None else variable.producer
    if op is None or op.domain:
        return None
    if op.type == "Split":
        return _half(op, variable)
    if op.type == "Slice":
        return _every_second(op)
    if op.type == "Gather":
        at = constant_array(op.input(1))
        column = None if at is None or at.ndim or int(at) not in (-2, -1, 0, 1) else int(at) % 2
        return _column(op.input(0), column) if int(op.attrs.get("axis", 0)) in (-1, 4) else None
    if op.type == "Squeeze":
        split = maker(op.input(0), "Split")
        if split is None or len(split.outputs) != 2 or int(split.attrs.get("axis", 0)) not in (-1, 4):
            return None
        return _column(split.input(0), split.outputs.index(op.inputs[0]))
    return None


def joined(concat: Operator) -> Joined | None:
    """What a Concat of two puts together: along the last axis, or along a new one that a Reshape merges with it."""
    out = concat.output(0)
    if out is None or len(concat.inputs) != 2 or None in concat.inputs:
        return None
    first, second = concat.inputs
    rank, axis = len(out.shape or ()), int(concat.attrs["axis"])
    if rank == 4 and axis in (-1, 3):
        return Joined(first, second, concat, False)  # type: ignore[arg-type]
    apart = [maker(v, "Unsqueeze") for v in (first, second)]
    last = only_reader(out)
    if rank != 5 or axis not in (-1, 4) or last is None or last.full_type != "Reshape" or last.input(0) is not out:
        return None
    one, other = (None if op is None or added_axes(op) != [4] else op.input(0) for op in apart)
    shape, made = out.shape or (), last.output(0)
    if one is None or other is None or made is None or not isinstance(shape[3], int):
        return None
    return Joined(one, other, last, True) if made.shape == (*shape[:3], 2 * shape[3]) else None


def negated(variable: Variable | None) -> Variable | None:
    """What the variable is the negative of: Paddle's exporter writes a factor of -1."""
    negative = maker(variable, "Neg")
    if negative is not None:
        return negative.input(0)
    value, number = added_number(variable, "Mul")
    return value if number == -1 else None


def repeats(variable: Variable, pairs: bool, steps: int = _STEPS) -> bool:
    """Whether the second part of the last axis is known to hold what the first does."""
    data, op, shape = constant_content(variable), variable.producer, variable.shape or ()
    if data is not None:
        return bool(tensor_type(data)[1]) and _has_equal_parts(as_array(data), pairs)
    if op is None or op.domain or not steps or not shape or not isinstance(shape[-1], int):
        return False
    if op.type == "Concat":
        alone = int(op.attrs["axis"]) in (-1, len(shape) - 1) and len(op.inputs) == 2
        return not pairs and alone and op.inputs[0] is op.inputs[1]
    if op.type == "Mul":
        return all(v is not None and (one_element(v.shape) or repeats(v, pairs, steps - 1)) for v in op.inputs)
    source = op.input(0)
    if op.type not in _OF_REPEATED or source is None:
        return False
    if (source.shape or (None,))[-1] != shape[-1]:
        return pairs and op.type == "Reshape" and _is_doubled(source, shape)
    if op.type == "Unsqueeze" and len(shape) - 1 in (added_axes(op) or [len(shape) - 1]):  # of 1, not of its size
        return False
    return repeats(source, pairs, steps - 1)


# -- parts -----------------------------------------------------------------------------------------------
def _half(split: Operator, variable: Variable | None) -> Part | None:
    first, x = split.outputs[0], split.inputs[0]
    if len(split.outputs) != 2 or int(split.attrs.get("axis", 0)) not in (-1, 3) or not _has_heads(x):
        return None
    second = split.outputs[1]
    equal = first is not None and second is not None and first.shape == second.shape
    return Part(x, variable is second, False) if equal and x is not None else None


def _every_second(op: Operator) -> Part | None:
    x, made = op.input(0), op.output(0)
    numbers = [constant_number(v) for v in op.inputs[1:]]
    if x is None or made is None or not _has_heads(x) or len(numbers) != 4 or None in numbers:
        return None
    start, _, axis, step = map(int, numbers)
    size, left = (x.shape or ())[-1], (made.shape or ())[-1]
    whole = isinstance(size, int) and not size % 2 and left == size // 2
    return Part(x, start == 1, True) if whole and axis in (-1, 3) and step == 2 and start in (0, 1) else None


def _column(view: Variable | None, column: int | None) -> Part | None:
    """A column of a view of the pairs of a tensor."""
    reshape = maker(view, "Reshape")
    x = None if reshape is None else reshape.input(0)
    if x is None or view is None or column is None or not _has_heads(x) or view.shape is None:
        return None
    *rows, size = x.shape or ()
    whole = isinstance(size, int) and not size % 2 and list(view.shape) == [*rows, size // 2, 2]
    return Part(x, bool(column), True) if whole else None


def _has_heads(x: Variable | None) -> bool:
    return x is not None and len(x.shape or ()) == 4 and x.dtype == "float32"


# -- tables ----------------------------------------------------------------------------------------------
def _is_doubled(source: Variable, shape: tuple[object, ...]) -> bool:
    """Whether the tensor, seen as one with this shape, has each number of another twice behind each other."""
    op, held = source.producer, source.shape or ()
    if op is None or op.domain or len(held) < 2 or held[-1] != 2 or shape[-1] != 2 * held[-2]:  # type: ignore[operator]
        return False
    single = op.input(0) is not None and (op.inputs[0].shape or (None,))[-1] == 1  # type: ignore[union-attr]
    same = op.type == "Concat" and int(op.attrs["axis"]) in (-1, len(held) - 1) and len(set(op.inputs)) == 1
    return single and (op.type in ("Expand", "Tile") or same)


def _has_equal_parts(array: np.ndarray, pairs: bool) -> bool:
    half, odd = divmod(array.shape[-1], 2)
    parts = (array[..., ::2], array[..., 1::2]) if pairs else (array[..., :half], array[..., half:])
    return not odd and bool((parts[0] == parts[1]).all())
