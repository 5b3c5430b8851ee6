"""A 16-bit program beside its own arithmetic in fp32: what each operator adds to the error."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from amp_transpiler.conversion.calibration.measure import Batch, Runner, floors
from amp_transpiler.conversion.calibration.statistics import Difference, TensorStats, relative
from amp_transpiler.conversion.verdict import beyond
from amp_transpiler.ir.infer import static
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.ir.types import FLOATS, LIMITS, NAMES, numpy_dtype
from amp_transpiler.passes.lowering.arithmetic import Arithmetic, summands
from amp_transpiler.passes.lowering.lowered import needed
from amp_transpiler.passes.precision.widen import widen
from amp_transpiler.program import Program
from amp_transpiler.runtime.binding import UNBOUND

#: Tensors that one run hands out.
_PART = 256


@dataclass
class Replayed:
    """A float tensor, or the tensors of a sequence, over all batches.

    ``dtype``: what it is stored in. ``floor``: the least L2 norm that it counts as. ``exact``: of the place's value
    beside the fp32 one. ``stored``: of the value with sums in fp32, rounded where it is stored and nowhere else.
    ``nonfinite``: how many numbers are not finite that are in fp32, ``nan`` of them no numbers; ``undefined``: how many
    are no numbers in fp32 either. ``zeros``: how many are zero that are not in fp32, ``sunk`` of them too small for the
    type. ``vanished``: the share of the tensor (relative L2) that sank.
    """

    dtype: str
    floor: float = 0.0
    exact: TensorStats = field(init=False)
    stored: TensorStats = field(init=False)
    nonfinite: int = 0
    nan: int = 0
    undefined: int = 0
    zeros: int = 0
    sunk: int = 0
    shape: tuple[int, ...] = ()
    _lost: float = 0.0
    _whole: float = 0.0

    def __post_init__(self) -> None:
        self.exact, self.stored = TensorStats(self.floor), TensorStats(self.floor)

    @property
    def error(self) -> float:
        """Relative L2 error; infinite where a number is not finite that should be, or should be none."""
        return math.inf if self.undefined else self.exact.error

    @property
    def vanished(self) -> float:
        """The share that sank to zero."""
        return relative(self._lost, max(self._whole, self.floor**2))

    def add(self, exact: Any, got: Any, stored: Any) -> None:
        """Take in another batch: arrays, or sequences of them."""
        exact, got, stored = _one(exact), _one(got), _one(stored)
        self.exact.add(exact, got, self.dtype)
        self.stored.add(exact, stored, self.dtype)
        self.shape = got.shape
        self.undefined += int(np.isnan(exact).sum())
        if exact.shape != got.shape:
            return
        with np.errstate(over="ignore", invalid="ignore"):
            wide, finite = exact.astype(np.float64), np.isfinite(exact)
            broken = finite & ~np.isfinite(got)
            self.nonfinite += int(broken.sum())
            self.nan += int((finite & np.isnan(got)).sum())
            zero = finite & (got == 0) & (wide != 0)
            sunk = zero & (np.abs(wide) <= LIMITS[self.dtype].vanish)
            self.zeros += int(zero.sum())
            self.sunk += int(sunk.sum())
            self._whole += float(np.square(wide[finite]).sum())
            self._lost += float(np.square(wide[sunk]).sum())


@dataclass(frozen=True)
class OperatorError:
    """What an operator makes of what it reads.

    ``before``, ``error``: largest error of what it reads and makes: of floats relative L2, infinite where one is not
    finite; of all else the share that differs. ``tensor``: what it makes with the largest; ``found`` what was measured
    of it, None of integers and where nothing was. ``errors``: by what it makes. ``summands``: how many it adds up,
    where it does and that is known.
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


def replay(program: Program, batches: Sequence[Batch], arithmetic: Arithmetic | None) -> list[OperatorError]:
    """Every operator of ``program`` that an output depends on, in program order.

    Args:
        program: with 16-bit operators; it runs beside the same with the same weights in fp32. What nested graphs make
            inside is not looked at.
        batches: feeds.
        arithmetic: how the place's kernels round inside; None where they round each result once.
    """
    operators = needed(program, program.outputs)
    twin, moved = program.clone(), dict[str, str]()
    widen(twin, moved)
    found: dict[str, Replayed | Difference] = {}
    least = floors(program)
    #: The names here and there: of tensors, and of what no bfloat16 is handed out beside.
    pairs: tuple[list[tuple[str, str]], list[tuple[str, str]]] = [], []
    for v in [*program.inputs, *(v for op in operators for v in op.outputs if v is not None)]:
        measure, origin = _measure(v, least.get(v.name, 0.0)), v.name
        while origin in moved:
            origin = moved[origin]
        if measure is not None and twin.has_var(origin):
            found[v.name] = measure
            pairs[(v.dtype or "") in UNBOUND].append((v.name, origin))
    for part in (each[start : start + _PART] for each in pairs for start in range(0, len(each), _PART)):
        names = [name for name, _ in part]
        origins = list(dict.fromkeys(origin for _, origin in part))
        exact, stored = Runner(twin, origins), Runner(program, names)
        own = stored if arithmetic is None else Runner(program, names, arithmetic=arithmetic)
        for batch in batches:
            plain, wanted = stored.run(batch), dict(zip(origins, exact.run(batch), strict=True))
            made = plain if own is stored else own.run(batch)
            for (name, origin), got, rounded in zip(part, made, plain, strict=True):
                measured = found[name]
                if isinstance(measured, Replayed):
                    measured.add(wanted[origin], got, rounded)
                else:
                    measured.add(wanted[origin], got)
    return list(_errors(operators, program.inputs, found))


def _measure(variable: Variable, floor: float) -> Replayed | Difference | None:
    """What takes in the values of a variable, which count as a norm of ``floor`` at least; None where they are not
    handed out (optionals, inner strings)."""
    dtype, kind = variable.dtype, variable.type_proto
    if dtype is None and kind is not None and kind.WhichOneof("value") == "sequence_type":
        dtype = NAMES.get(kind.sequence_type.elem_type.tensor_type.elem_type)
        return Replayed(dtype, floor) if dtype in FLOATS else None
    if dtype is None:
        return None
    if dtype in FLOATS:
        return Replayed(dtype, floor)
    whole = np.dtype(numpy_dtype(dtype)).kind in "biu"
    return Difference() if whole or variable in variable.program.outputs else None


def _one(value: Any) -> np.ndarray:
    """An array; of a sequence all numbers one after the other."""
    if not isinstance(value, list):
        return np.asarray(value)
    return np.concatenate([np.reshape(each, -1) for each in value]) if value else np.zeros(0, np.float32)


def _errors(
    operators: Sequence[Operator], inputs: Sequence[Variable], found: Mapping[str, Replayed | Difference]
) -> Iterator[OperatorError]:
    floats = {name: each for name, each in found.items() if isinstance(each, Replayed)}
    errors = {v.key: floats[v.name].exact.error for v in inputs if v.name in floats}
    for op in operators:
        before = max((errors.get(v.key, 0.0) for v in (*op.inputs, *op.captures) if v is not None), default=0.0)
        made = [v for v in op.outputs if v is not None]
        for variable in made:  # what was not measured has the error of what it comes from
            measured = found.get(variable.name)
            errors[variable.key] = before if measured is None else beyond(measured.error)
        if made:
            worst = max(made, key=lambda v: errors[v.key])
            yield OperatorError(
                op,
                worst.name,
                before,
                errors[worst.key],
                floats.get(worst.name),
                {v.name: errors[v.key] for v in made},
                _summands(op, floats),
            )


def _summands(op: Operator, found: dict[str, Replayed]) -> int | None:
    count = summands(op.full_type, op.attrs, *([_shape(v, found) for v in each] for each in (op.inputs, op.outputs)))
    return None if count is None else round(count)


def _shape(variable: Variable | None, found: dict[str, Replayed]) -> tuple[int, ...] | None:
    """The shape that a variable had, or that it is declared with."""
    if variable is None:
        return None
    return found[variable.name].shape if variable.name in found else static(variable.shape)
