"""Whose 16-bit arithmetic a lowered model has: kernels of some places round sums after each addition, and some fail.

What that costs is counted in roundings of the result (mean squares). Where it is more than :data:`MOST`, the operator
takes its operands widened, computes in fp32, and its result is stored in 16 bit. Splitting a sum instead, with partial
results added up in fp32, moves more bytes than widening as soon as parts are short enough to help.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.opdef import flops_of, traits_named, traits_of
from amp_transpiler.ir.result_shape import result_shape
from amp_transpiler.ir.types import HALF
from amp_transpiler.lists import TARGET_OPSET, faults, parts_of, roundings, split_name
from amp_transpiler.ops.rounded_sums import LANES, Summed, reduced_shape, sum_rule
from amp_transpiler.passes.view.kernel_faults import Call, fault_of

#: As many roundings of its result may the error of a kernel be worth. A sum of products in turn has 1 for the products
#: and 1/2 for each addition; with operands that were rounded too, 4 are 1.2 to 1.5 times the error of storing alone.
#: Gradients of small convolutional nets were 8 and more times further off with 6: maxima and signs flip.
MOST = 4.0
#: From so many elements on, and up to so many results, lanes share the windows of a pool.
_LARGE_WINDOW, _FEW_RESULTS = 128, 2048
_Shapes = Sequence[tuple[int, ...] | None]


@dataclass(frozen=True)
class Arithmetic:
    """The 16-bit arithmetic of the kernels of places of this kind.

    ``widens``: operators of which these kernels would lose too much compute in fp32 between 16-bit tensors, as programs
    are lowered for such a place; otherwise each runs as it stands, as it does in a model file.
    """

    kind: str
    widens: bool = True

    def treats(self, full_type: str, dtype: str, attrs: Mapping[str, Any], shapes: _Shapes, made: _Shapes) -> str:
        """How a kernel rounds inside: the order of a sum that is rounded after each addition, "inside" where no sum is
        told apart, "widened" where it is to compute in fp32, "" where it rounds once. Shapes are of inputs, results.
        """
        order, worth = self.rounds(full_type, dtype, attrs, shapes, made)
        if self.widens and worth > MOST:
            return "widened"
        return order or ("inside" if worth else "")

    def emulated(self, full_type: str, dtype: str, how: str) -> str:
        """How what an operator runs as rounds inside, ``how`` being what a kernel of its own does: of one without it is
        "parts" in a model file, which onnxruntime makes up of several, and "" where a body in fp32 stands for it."""
        if dtype not in HALF or "::" in full_type or not parts_of(full_type, dtype, TARGET_OPSET, self.kind):
            return how
        return "" if self.widens else "parts"

    def rounds(
        self, full_type: str, dtype: str, attrs: Mapping[str, Any], shapes: _Shapes, made: _Shapes
    ) -> tuple[str, float]:
        """The order in which the kernel of an operator adds up, rounding after each addition, "" for none; and how many
        roundings of its result its error is worth (mean squares): 0 where it rounds once."""
        found = roundings(self.kind, dtype)
        if found is None:
            return "", 0.0
        order = next((o for where, o in found.orders.get(full_type, ()) if _HOLDS[where](attrs, shapes, made)), "")
        if order:
            return order, _worth(order, full_type, attrs, shapes, made)
        return "", found.inside.get(full_type, 0.0)


def _worth(order: str, full_type: str, attrs: Mapping[str, Any], shapes: _Shapes, made: _Shapes) -> float:
    """How many roundings of its result the error of a sum is worth; infinity where nobody knows of how many summands,
    or where it is larger than the result and may leave the range of the type on the way."""
    traits = traits_named(full_type)
    if traits.reduces in ("mean", "norm", "log-sum"):
        return math.inf
    count = summands(full_type, attrs, shapes, made)
    if count is None:
        return math.inf
    if order in LANES:
        return -(-count // LANES[order]) / 2 + math.log2(max(min(count, LANES[order]), 1))
    return traits.product + (count / 2 if order == "in turn" else count / 8 + 1.5)


def summands(full_type: str, attrs: Mapping[str, Any], shapes: _Shapes, made: _Shapes) -> float | None:
    """How many summands a sum or a sum of products has; None where that is not known."""
    domain, type_ = split_name(full_type)
    traits, flops = traits_of(type_, domain), flops_of(type_, domain)
    result, first = next(iter(made), None), next(iter(shapes), None)
    if result is None or first is None or traits.over == "axis":  # the axis is not among the shapes
        return None
    if traits.product and flops is not None:
        return None if None in shapes[:2] else flops(attrs, shapes, made) / (2 * max(math.prod(result), 1))
    if attrs.get("kernel_shape"):
        return float(math.prod(attrs["kernel_shape"]))
    return math.prod(first) / max(math.prod(result), 1) if traits.reduces else None


def _always(attrs: Mapping[str, Any], shapes: _Shapes, made: _Shapes) -> bool:
    return True


def _few_large(attrs: Mapping[str, Any], shapes: _Shapes, made: _Shapes) -> bool:
    """Of a pool: windows that a group of threads shares. The 1.27 wheel does so up to 128 results."""
    x, result = shapes[0], made[0]
    if x is None or result is None:
        return False
    return math.prod(attrs.get("kernel_shape") or x[2:]) >= _LARGE_WINDOW and math.prod(result) <= _FEW_RESULTS


def _to_one(attrs: Mapping[str, Any], shapes: _Shapes, made: _Shapes) -> bool:
    """Of a reduction: to one number, on which a larger group of threads works."""
    return made[0] is not None and math.prod(made[0]) == 1


def _reads_fours(attrs: Mapping[str, Any], shapes: _Shapes, made: _Shapes) -> bool:
    """Of a Gemm that reads B along its rows: four at once, where sizes allow."""
    a, b = shapes[0], shapes[1]
    if not attrs.get("transB") or a is None or b is None or b[1] % 4:
        return False
    return not attrs.get("transA") or a[1] % 4 == 0


_HOLDS: Mapping[str, Callable[[Mapping[str, Any], _Shapes, _Shapes], bool]] = {
    "": _always,
    "large windows, few results": _few_large,
    "one result": _to_one,
    "b transposed, vectors of four": _reads_fours,
}


def _padded_channels(e: Emitter, value: Value, rank: int, more: int) -> Value:
    """So many channels of zeros more."""
    after = [more if axis == 1 else 0 for axis in range(rank)]
    shape = None if value.shape is None else [n + p for n, p in zip(value.shape, after, strict=True)]
    return e.Pad(value, e.ints(*[0] * rank, *after), shape=shape)


def kernels_of(arithmetic: Arithmetic) -> Kernels | None:
    """What emits operators as kernels with this arithmetic compute them; None where all do as they stand."""
    rounds = any(roundings(arithmetic.kind, dtype) is not None for dtype in HALF)
    fails = any(row.around != "held" for rows in faults(arithmetic.kind).values() for row in rows)
    return Kernels(arithmetic) if rounds or fails else None


class Kernels:
    """Emits operators as the kernels of a place compute them; see :class:`Arithmetic`."""

    def __init__(self, arithmetic: Arithmetic) -> None:
        self.arithmetic = arithmetic

    def __call__(
        self,
        e: Emitter,
        full_type: str,
        inputs: Sequence[Value | None],
        kinds: Sequence[str],
        shape: tuple[int, ...] | None,
        attrs: Mapping[str, Any],
    ) -> tuple[Value, ...] | None:
        """The results, of these element types, of an operator on 16-bit values; None where it is emitted as it stands.

        ``shape``: that of the first result, where it is known.
        """
        first = next((v for v in inputs if v is not None), None)
        if first is None:
            return None
        shapes = [None if v is None else v.shape for v in inputs]
        if shape is None:
            traits = traits_named(full_type)
            reduced = reduced_shape(e, attrs, inputs) if traits.over == "axes" else None
            shape = reduced or result_shape(full_type, traits, [v.shape for v in inputs if v is not None])
        dtypes = [None if v is None else v.dtype for v in inputs]
        call = Call(self.arithmetic.kind, attrs, dtypes, shapes, len(kinds))
        fault = fault_of(full_type, call)
        if fault is not None and fault.channels and shapes[1] is not None and not e.at.emulates:
            rank, more = len(shapes[1]), -shapes[1][1] % fault.channels
            whole = [
                _padded_channels(e, v, rank, more) if slot < 2 and v is not None else v for slot, v in enumerate(inputs)
            ]
            return e.op(full_type, *whole, outputs=len(kinds), dtype=list(kinds), shape=shape, **attrs)
        how = self.arithmetic.treats(full_type, first.dtype, attrs, shapes, [shape])
        if fault is not None and fault.around == "fp32" and self.arithmetic.widens:
            how = "widened"
        if how == "widened" and not e.emulates:
            domain, type_ = split_name(full_type)
            wide = [None if v is None else e.f32(v) for v in inputs]
            types = ["float32" if kind == first.dtype else kind for kind in kinds]
            made = e.op(type_, *wide, outputs=len(kinds), domain=domain, dtype=types, shape=shape, **attrs)
            return tuple(e.cast(value, kind) for value, kind in zip(made, kinds, strict=True))
        rule = sum_rule(full_type) if e.emulates and how != "widened" else None
        how = self.arithmetic.emulated(full_type, first.dtype, how) if rule is not None else ""
        if rule is None or not how:
            return None
        read = [v.shape for v in inputs if v is not None]
        given = len(kinds) == 1 and None not in (*read, shape)
        given = given and all(0 not in each for each in read if each is not None)  # of nothing no sum is rounded
        summed = rule(e, Summed(how, attrs, shape or ()), *inputs) if given else None
        return None if summed is None else (summed,)
