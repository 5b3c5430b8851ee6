"""A 16-bit program beside its own arithmetic in fp32: what each operator adds to the error."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from amp_transpiler.conversion.calibration.measure import Batch, Runner
from amp_transpiler.conversion.calibration.statistics import TensorStats
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.ir.types import FLOATS, HALF
from amp_transpiler.passes.lowering.arithmetic import Arithmetic, summands
from amp_transpiler.passes.lowering.lowered import needed, static
from amp_transpiler.passes.view.typing import operator_name
from amp_transpiler.program import Program

#: Tensors that one run hands out.
_PART = 256


@dataclass
class Replayed:
    """A tensor over all batches.

    ``exact``: of the place's value beside the fp32 one. ``stored``: of the value with sums in fp32, rounded where it is
    stored and nowhere else. ``nonfinite``: how many numbers are not finite that are in fp32, ``nan`` of them no
    numbers. ``vanished``: the share of the tensor (relative L2) that sank to zero.
    """

    exact: TensorStats = field(default_factory=TensorStats)
    stored: TensorStats = field(default_factory=TensorStats)
    nonfinite: int = 0
    nan: int = 0
    shape: tuple[int, ...] = ()
    _lost: float = 0.0
    _whole: float = 0.0

    @property
    def vanished(self) -> float:
        """The share that sank to zero."""
        return math.sqrt(self._lost / self._whole) if self._whole else 0.0

    def add(self, exact: np.ndarray, got: np.ndarray, stored: np.ndarray, dtype: str) -> None:
        """Take in another batch."""
        self.exact.add(exact, got, dtype)
        self.stored.add(exact, stored, dtype)
        self.shape = got.shape
        if exact.shape != got.shape:
            return
        with np.errstate(over="ignore", invalid="ignore"):
            wide, finite = exact.astype(np.float64), np.isfinite(exact)
            broken = finite & ~np.isfinite(got)
            self.nonfinite += int(broken.sum())
            self.nan += int((finite & np.isnan(got)).sum())
            self._whole += float(np.square(wide[finite]).sum())
            self._lost += float(np.square(wide[finite & (got == 0)]).sum())


@dataclass(frozen=True)
class OperatorError:
    """What an operator makes of what it reads.

    ``before``, ``error``: largest relative L2 error of the float tensors that it reads and makes, infinite where one is
    not finite. ``tensor``: what it makes with the largest; ``found`` what was measured of it, None where nothing was.
    ``errors``: by what it makes. ``summands``: how many it adds up, where it does and that is known.
    """

    op: Operator
    tensor: str
    before: float
    error: float
    found: Replayed | None
    errors: Mapping[str, float] = field(default_factory=dict, repr=False)
    summands: int | None = None

    @property
    def sums(self) -> bool:
        """Whether it adds up."""
        traits = traits_of(self.op)
        return bool(traits.product or traits.reduces)

    @property
    def growth(self) -> float:
        """What it adds to the error."""
        return self.error - self.before if math.isfinite(self.before) else 0.0


def replay(
    program: Program, twin: Program, batches: Sequence[Batch], dtype: str, arithmetic: Arithmetic | None
) -> list[OperatorError]:
    """Every operator of ``program`` that an output depends on, in program order.

    Args:
        program: with 16-bit operators. What nested graphs make inside is not looked at.
        twin: the same with the same weights in fp32 (:func:`.widen.widen`).
        batches: feeds of both.
        dtype: the 16-bit type.
        arithmetic: how the place's kernels round inside; None where they round each result once.
    """
    operators = needed(program, program.outputs)
    pairs = [
        (v.name, origin)
        for v in [*program.inputs, *(v for op in operators for v in op.outputs if v is not None)]
        if v.dtype in FLOATS and (origin := _in_twin(v, twin)) is not None
    ]
    found: dict[str, Replayed] = {name: Replayed() for name, _ in pairs}
    for start in range(0, len(pairs), _PART):
        part = pairs[start : start + _PART]
        names = [name for name, _ in part]
        origins = list(dict.fromkeys(origin for _, origin in part))
        exact, stored = Runner(twin, origins), Runner(program, names)
        own = stored if arithmetic is None else Runner(program, names, arithmetic=arithmetic)
        for batch in batches:
            plain, wanted = stored.run(batch), dict(zip(origins, exact.run(batch), strict=True))
            made = plain if own is stored else own.run(batch)
            for (name, origin), got, rounded in zip(part, made, plain, strict=True):
                found[name].add(wanted[origin], got, rounded, dtype)
    return list(_errors(operators, program.inputs, found))


def _errors(
    operators: Sequence[Operator], inputs: Sequence[Variable], found: dict[str, Replayed]
) -> Iterator[OperatorError]:
    errors = {v.key: found[v.name].exact.error for v in inputs if v.name in found}
    for op in operators:
        read = [errors.get(v.key, 0.0) for v in (*op.inputs, *op.captures) if v is not None]
        before = max(read, default=0.0)
        made = [v for v in op.outputs if v is not None]
        for variable in made:  # what was not measured, a sequence or integers, has the error of what it comes from
            measured = found.get(variable.name)
            errors[variable.key] = before if measured is None else measured.exact.error
        if made:
            worst = max(made, key=lambda v: errors[v.key])
            yield OperatorError(
                op,
                worst.name,
                before,
                errors[worst.key],
                found.get(worst.name),
                {v.name: errors[v.key] for v in made},
                _summands(op, found),
            )


def _in_twin(variable: Variable, twin: Program) -> str | None:
    """The tensor of the fp32 program that a variable should be; None where it has none."""
    while True:
        wide = f"{variable.name}.fp32"  # behind an input and before an output that keep their 16-bit type
        if variable.dtype in HALF and variable in variable.program.outputs and twin.has_var(wide):
            return wide
        if twin.has_var(variable.name):
            return variable.name
        op = variable.producer
        if op is None or operator_name(op) != "Cast" or op.inputs[0] is None or op.inputs[0].dtype not in FLOATS:
            return None
        variable = op.inputs[0]


def _summands(op: Operator, found: dict[str, Replayed]) -> int | None:
    count = summands(op.full_type, op.attrs, *([_shape(v, found) for v in each] for each in (op.inputs, op.outputs)))
    return None if count is None else round(count)


def _shape(variable: Variable | None, found: dict[str, Replayed]) -> tuple[int, ...] | None:
    """The shape that a variable had, or that it is declared with."""
    if variable is None:
        return None
    return found[variable.name].shape if variable.name in found else static(variable.shape)
