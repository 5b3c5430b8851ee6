"""Integer-valued floats (shapes, lengths, positions): 16 bit holds integers exactly only to 2048 (bfloat16: 256).

Forwards, from integers that become floats: while an operator reads nothing but such numbers and constants, it
counts. A comparison of them ends the chain; one with small integers is right in any format. Data that a model
computes, and weights, end it too; so do sine and cosine, which bring integers into [-1, 1], and a mask in which
every integer but 0 became another number. Sums of integer products (a quantised layer) leave float16 at once: the
float that they become is not stored in 16 bit, before the scale brings it back. Backwards, from floats that become
integers: elementwise arithmetic and sums on the way to an index or a size, as that of a mask is a length, or to what is
quantised by a scale that is computed.
What rounding took off such a float is the weight by which neighbours are mixed: that difference is computed in fp32
too.
"""

from __future__ import annotations

import math

import numpy as np

from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import moves, traits_of
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.ir.types import FLOATS, INTEGERS
from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.passes.view.constants import content, is_constant
from amp_transpiler.passes.view.flow import Flow
from amp_transpiler.passes.view.names import source
from amp_transpiler.passes.view.typing import is_float

#: Integers that images do not come in.
_COUNTS = INTEGERS - {"int8", "uint8"}
#: What a float may become: an index, a size, or a number that is quantised by hand.
_TARGETS = INTEGERS
#: In what words exporters compute positions and sizes.
_ARITHMETIC = frozenset(
    """
    Abs Add Ceil Clip Div Exp Floor Log Max Min Mod Mul Neg Pow Range Reciprocal Round Sign Sqrt Sub Sum CumSum
    ReduceMax ReduceMin ReduceSum
    """.split()  # noqa: SIM905
)
#: What computes between a float and the integer that it becomes.
_ROUNDS = _ARITHMETIC - {"Exp", "Log", "Pow", "Sqrt"}
#: What makes a float one of the integers beside it, and what still says which one.
_TO_INTEGER = frozenset({"Floor", "Ceil", "Round"})
_BESIDE = frozenset({"Add", "Sub", "Clip", "Max", "Min"})
#: What makes floats of integers, and integers of floats.
_CASTS = frozenset({"Cast", "CastLike"})
#: What adds up products of integers.
_INTEGER_SUMS = frozenset({"ConvInteger", "MatMulInteger"})
#: Integers below this are exact in every 16-bit format, and none above becomes one of them.
_EXACT = 256
#: Elements of a constant that may still count: beyond, it is a weight.
_SMALL = 1 << 16


def keep_integer_valued(flow: Flow, constraints: Constraints) -> None:
    """Add to ``constraints`` the operators of a program, nested graphs included, that compute with such floats.

    What an earlier conversion did to the program makes no difference. Linear in its size.
    """
    ops = [op for op, _, _ in flow.steps] if flow.of(*_CASTS, "QuantizeLinear") else []
    _forwards(ops, constraints)
    becomes = _backwards(ops, constraints)
    if becomes:
        _fractions(ops, becomes, constraints)


def _forwards(ops: list[Operator], constraints: Constraints) -> None:
    counted: dict[Variable, str] = {}
    sums: set[Variable] = set()
    for op in ops:
        name = op.full_type
        if name in _CASTS:
            read, made = op.input(0), op.output(0)
            if made is not None and is_float(made) and read is not None and read.dtype in _COUNTS:
                counted[made] = read.name
                if read in sums:
                    constraints.keep_tensor(made, Reason(Kind.COUNTS, read.name))
            continue
        if name in _INTEGER_SUMS or (sums and any(v in sums for v in op.inputs)):
            sums.update(v for v in op.outputs if v is not None and v.dtype in _COUNTS)
        if not counted:
            continue
        compares = traits_of(op).compares
        if not (name in _ARITHMETIC or compares or _ends(op) or moves(op) or _outer_product(op, name)):
            continue
        read_floats = [source(v) for v in operands(op)]
        origin = next((counted[v] for v in read_floats if v in counted), None)
        if origin is None or not all(v in counted or _is_number(v) for v in read_floats):
            continue
        if compares and any(_is_small(v) for v in read_floats):
            continue
        constraints.keep(op, Reason(Kind.COUNTS, origin))
        if not _ends(op):
            counted.update((v, origin) for v in op.outputs if v is not None and is_float(v))


def _ends(op: Operator) -> bool:
    """Whether it turns a position into a number that 16 bit holds: it stays fp32 itself, and ends the chain."""
    traits = traits_of(op)
    return (traits.periodic and traits.bounded is not None) or _leaves_zeros(op)


def _leaves_zeros(op: Operator) -> bool:
    """Whether it puts another number in the place of every integer but 0, as a mask of attention is made."""
    if op.full_type != "Where" or op.inputs[0] is None or op.inputs[2] is None:
        return False
    maker = source(op.inputs[0]).producer
    tested = maker.input(0) if maker is not None and maker.full_type == "Cast" else None
    return tested is not None and source(tested) is source(op.inputs[2])


def operands(op: Operator) -> list[Variable]:
    """The floats that it computes with, or moves."""
    moved = moves(op)
    return [v for slot, v in enumerate(op.inputs) if v is not None and is_float(v) and (not moved or moves(op, slot))]


def _is_computed_size(op: Operator, name: str) -> bool:
    """Whether it computes with constants alone: a size that an exporter left to compute, as the root of a count."""
    return name in _ARITHMETIC and all(_is_number(source(v)) for v in operands(op))


def _computes_scale(op: Operator) -> bool:
    """Whether the scale by which it quantises comes of the data, as rounding decides about the integers then."""
    scale = op.input(1)
    return scale is not None and not is_constant(source(scale))


def _is_number(variable: Variable) -> bool:
    """Whether it is a constant, and no weight."""
    return is_constant(variable) and math.prod(int(d or 0) for d in variable.shape or (0,)) <= _SMALL


def _is_small(variable: Variable) -> bool:
    """Whether it is a constant of integers that no integer becomes by rounding to a 16-bit format."""
    if not _is_number(variable):
        return False
    array = as_array(content(variable)).astype(np.float64)
    return bool((np.abs(array) < _EXACT).all() and (array == np.rint(array)).all())


def _outer_product(op: Operator, name: str) -> bool:
    """Whether a matrix product sums nothing: its inner dimension is 1 (positions times frequencies)."""
    if name != "MatMul":
        return False
    shapes = [v.shape if v is not None else None for v in op.inputs[:2]]
    return any(
        shape is not None and len(shape) >= 2 and shape[axis] == 1 for shape, axis in zip(shapes, (-1, -2), strict=True)
    )


def _backwards(ops: list[Operator], constraints: Constraints) -> dict[Variable, str]:
    """What is found to become an integer, and the name of that."""
    becomes: dict[Variable, str] = {}
    for op in reversed(ops):
        name = op.full_type
        if name in _CASTS:
            read, made = op.input(0), op.output(0)
            if read is not None and read.dtype in FLOATS and made is not None and made.dtype in _TARGETS:
                becomes.setdefault(source(read), made.name)
            continue
        if name == "QuantizeLinear" and _computes_scale(op):
            made = op.outputs[0]
            assert made is not None
            constraints.keep(op, Reason(Kind.BECOMES_INTEGER, made.name))
            becomes.update((source(v), made.name) for v in op.inputs[:2] if v is not None)
            continue
        if not becomes:
            continue
        target = next((becomes[v] for v in op.outputs if v is not None and v in becomes), None)
        if target is None or not (name in _ROUNDS or moves(op) or _is_computed_size(op, name)):
            continue
        constraints.keep(op, Reason(Kind.BECOMES_INTEGER, target))
        for variable in operands(op):
            if not is_constant(source(variable)):
                becomes.setdefault(source(variable), target)
    return becomes


def _fractions(ops: list[Operator], becomes: dict[Variable, str], constraints: Constraints) -> None:
    """Keep the differences between a float and the integers beside it, of which one is what it becomes."""
    #: Of which float a tensor is an integer beside it, or the float itself.
    beside: dict[Variable, Variable] = {}
    for op in ops:
        name, made, read = op.full_type, op.output(0), [source(v) for v in op.inputs if v is not None]
        if made is None or not read:
            continue
        first = read[0]
        of = {beside[v] for v in read if v in beside}
        if name == "Sub" and len(read) == 2:
            for float_, integer in (read, read[::-1]):
                if _moved(float_) in becomes and beside.get(integer) is _moved(float_):
                    constraints.keep(op, Reason(Kind.FRACTION, becomes[_moved(float_)]))
        rounds = name in _TO_INTEGER or (name in _CASTS and first.dtype in FLOATS and made.dtype in _TARGETS)
        if rounds and (first in beside or _moved(first) in becomes):
            beside[made] = beside.get(first, _moved(first))
        elif len(of) == 1:
            counts = name in _BESIDE and all(v in beside or _is_number(v) for v in read)
            if counts or moves(op) or name in _CASTS:
                beside.update((v, next(iter(of))) for v in op.outputs if v is not None)


def _moved(variable: Variable) -> Variable:
    """What a tensor was before it was moved about."""
    while (op := variable.producer) is not None and traits_of(op).moves == (0,) and op.inputs[0] is not None:
        variable = source(op.inputs[0])
    return variable
