"""The record of a conversion: what a report shows, whatever its form."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from amp_transpiler.conversion.verdict import Verdict
from amp_transpiler.ir.locations import model_size
from amp_transpiler.ir.nodes import Operator, Variable, origin
from amp_transpiler.ir.reasons import Reason
from amp_transpiler.ir.types import FLOATS
from amp_transpiler.passes.numerics.constraints import ConstantNote
from amp_transpiler.passes.view.constants import stored_bytes
from amp_transpiler.passes.view.counted_shapes import counted, counted_shapes
from amp_transpiler.passes.view.names import label
from amp_transpiler.passes.view.typing import programs
from amp_transpiler.program import Program


@dataclass(frozen=True)
class TensorRecord:
    """A tensor: element type, shape as declared, the operator that makes it (None for an input or initializer).

    ``elements``: numbers in it, open sizes counting as in the minimum cut.
    """

    name: str
    dtype: str
    shape: tuple[int | str | None, ...] | None
    producer: int | None  # index of an OperatorRecord
    constant: bool
    bytes: int  # of its content, for a constant
    elements: int


@dataclass(frozen=True)
class OperatorRecord:
    """An operator. ``program`` is the name of the graph that holds it; tensors are named as in that graph.

    ``reads`` and ``makes`` are the same tensors as indices into the tensors of the record, those of enclosing graphs
    included; ``holder`` is the index of the operator (If, Loop, Scan) whose nested graph holds this one.
    """

    index: int
    name: str
    type: str
    scope: str
    program: str
    precision: str
    why: Reason | None
    inserted: bool  # a cast that the conversion inserted
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    holder: int | None

    @property
    def reason(self) -> str:
        """The text of ``why``; "" where there is none."""
        return "" if self.why is None else str(self.why)


@dataclass(frozen=True)
class ProgramRecord:
    """A program: operators in their order (nested graphs after the operator that holds them), tensors, totals.

    ``weights``: bytes of constant content. ``file``: bytes on disk with those of its data, 0 where there is no file.
    """

    opset: int
    operators: tuple[OperatorRecord, ...]
    tensors: tuple[TensorRecord, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    casts: int
    weights: int
    file: int


@dataclass(frozen=True)
class CutRecord:
    """The minimum cut: bytes that operators and casts move for one input of nominal size.

    ``free``: operators whose precision was free. ``value``: the least traffic of any assignment of them.
    ``all_half``, ``all_full``: the traffic with every free operator in 16 bit, in fp32. ``exact``: whether
    capacities went into the solver unrounded; else ``rounding`` states how.
    """

    free: int
    value: int
    all_half: int
    all_full: int
    exact: bool
    rounding: str = ""


@dataclass(frozen=True)
class RangeRecord:
    """What calibration measured of a tensor in fp32, and of the same tensor in the converted program.

    ``largest``, ``smallest``: magnitude of the largest and of the smallest number that is not zero.
    ``rounding``: relative L2 error of storing it in 16 bit; ``error``: of the converted program's value.
    """

    name: str
    largest: float
    smallest: float
    rounding: float
    error: float
    finite: bool


@dataclass
class Conversion:
    """A conversion.

    ``before``, ``after``: the programs, where the conversion was asked to keep a record of them.
    ``verdict``: what was measured of the outputs, None where nothing was. ``outputs``: the error of each.
    ``rounds``: what auto mode did, a line a run. ``notes``: what the user should know.
    """

    source: str
    mode: str
    dtype: str
    before: ProgramRecord | None = None
    after: ProgramRecord | None = None
    cut: CutRecord | None = None
    constants: tuple[ConstantNote, ...] = ()
    ranges: tuple[RangeRecord, ...] = ()
    verdict: Verdict | None = None
    rounds: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def outputs(self) -> dict[str, float]:
        """The error of each output that was measured."""
        return {} if self.verdict is None else dict(self.verdict.errors)

    @property
    def tolerance(self) -> float | None:
        """What the errors were judged by, None where by nothing."""
        return None if self.verdict is None else self.verdict.tolerance


def record_program(program: Program, path: str | os.PathLike[str] | None = None) -> ProgramRecord:
    """The record of a program as it stands, and of the file it came from or went to."""
    number = {op: i for i, op in enumerate(program.walk())}
    index: dict[Variable, int] = {}
    tensors: list[TensorRecord] = []
    shape_of = counted_shapes(program)
    for each in programs(program):
        for v in each.variables:
            if v.outer is not None:
                continue
            index[v] = len(tensors)
            stored = stored_bytes(v)
            tensors.append(
                TensorRecord(
                    v.name,
                    v.dtype or "",
                    v.shape,
                    number.get(v.producer) if v.producer else None,
                    bool(stored),
                    sum(stored.values()),
                    math.prod(counted(shape_of(v))),
                )
            )
    operators = [_operator(op, number, index) for op in number]
    return ProgramRecord(
        program.opset(),
        tuple(operators),
        tuple(tensors),
        tuple(v.name for v in program.inputs),
        tuple(v.name for v in program.outputs),
        sum(op.type == "Cast" for op in operators),
        sum(t.bytes for t in tensors),
        0 if path is None else model_size(path),
    )


def _operator(op: Operator, number: dict[Operator, int], index: dict[Variable, int]) -> OperatorRecord:
    inputs, outputs = ([v for v in slots if v is not None] for slots in (op.inputs, op.outputs))
    precision = op.precision or next((str(v.dtype) for v in (*outputs, *inputs) if v.dtype in FLOATS), "")
    holder = op.program.parent
    return OperatorRecord(
        number[op],
        op.name or label(op),
        op.full_type,
        op.scope,
        op.program.name,
        precision,
        op.why,
        op.inserted,
        tuple(v.name for v in inputs),
        tuple(v.name for v in outputs),
        tuple(index[origin(v)] for v in inputs),
        tuple(index[v] for v in outputs),
        number[holder] if holder is not None else None,
    )
