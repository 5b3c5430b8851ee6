"""``amp.check_model``: what a 16-bit model that somebody made computes on a place, and where it first goes wrong."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx

from amp_transpiler.conversion.calibration.measure import Batch
from amp_transpiler.conversion.calibration.samples import load_calibration
from amp_transpiler.conversion.conversion_options import TOLERANCE
from amp_transpiler.conversion.dense_constants import DenseConstants
from amp_transpiler.conversion.leaving import Leaving, leaving_of
from amp_transpiler.conversion.replay import OperatorError, replay
from amp_transpiler.conversion.report.json import plain
from amp_transpiler.conversion.synthetic import SYNTHETIC, synthetic_sample
from amp_transpiler.conversion.verdict import CALIBRATION, beyond
from amp_transpiler.errors import ArgumentError
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.infer import Shapes, static
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.oldest_forms import bring_to_oldest
from amp_transpiler.ir.onnx_in import load
from amp_transpiler.ir.opdef import lookup, lowering_rule_of
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.ir.types import HALF
from amp_transpiler.ir.weights import become_constants
from amp_transpiler.lists import place_traits, roundings
from amp_transpiler.ops.rounded_sums import sum_rule
from amp_transpiler.option_checks import number
from amp_transpiler.passes.canonicalize.inlining import TryInlineFunctions
from amp_transpiler.passes.lowering.arithmetic import Arithmetic
from amp_transpiler.passes.lowering.lowered import needed
from amp_transpiler.passes.lowering.place import Place, check_place
from amp_transpiler.passes.numerics.inner_roundings import inner_roundings
from amp_transpiler.passes.pipeline import Pipeline
from amp_transpiler.passes.view.kernel_faults import fault_at, leaves
from amp_transpiler.passes.view.names import label
from amp_transpiler.passes.view.typing import programs, signature_of
from amp_transpiler.program import Program
from amp_transpiler.runtime.budget import Budget, within


@dataclass(frozen=True)
class ModelCheck:
    """What a 16-bit model computes on a place, beside its own arithmetic in fp32 with the same weights.

    Attributes:
        place: the kind of place.
        dtype: the 16-bit type.
        sample: what it was run on.
        tolerance: relative L2 error that is allowed at an output.
        outputs: that of each output, of probabilities of their own (a Sigmoid's) of a norm of at least 0.5; of
            integers, booleans and strings the share of elements that differ. Infinite where numbers are not finite that
            should be, or are none in fp32 either.
        leaving: the operator at which it first leaves, None where no output is beyond the tolerance.
        operators: every operator that an output depends on, in program order, with its error.
        without_kernel: operators that the place has no kernel for, and why, with their number: they run on CPU; where
            that is the place, nowhere but here.
        faults: operators whose kernel there does not compute what it should, with what it does.
        not_emulated: types of operators whose kernels there compute in 16 bit inside, in a way that the replay does not
            follow, or that have no meaning in fp32 here: their own error is that of one rounding, or none.
        infinite: 16-bit weights with numbers that are not finite, and how many: -inf of a mask, or what was beyond the
            type when somebody converted the model.
    """

    place: str
    dtype: str
    sample: str
    tolerance: float
    outputs: Mapping[str, float]
    leaving: Leaving | None
    operators: tuple[OperatorError, ...] = field(repr=False)
    without_kernel: Mapping[str, int]
    faults: Mapping[str, str]
    not_emulated: tuple[str, ...] = ()
    infinite: Mapping[str, int] = field(default_factory=dict)

    @property
    def missed(self) -> tuple[str, ...]:
        """The outputs beyond the tolerance."""
        return tuple(name for name, error in self.outputs.items() if not beyond(error) <= self.tolerance)

    @property
    def ok(self) -> bool:
        """Whether every output keeps to the tolerance, and every kernel computes what it should."""
        return not self.missed and not self.faults

    def to_dict(self) -> dict[str, Any]:
        """The record as numbers, strings, lists and dictionaries, for JSON; operators by their labels, and the strings
        "NaN", "Infinity" and "-Infinity" for numbers that JSON cannot hold."""
        operators = [
            {"operator": label(each.op), "type": each.op.full_type, "tensor": each.tensor}
            | {"before": each.before, "error": each.error, "summands": each.summands}
            for each in self.operators
        ]
        leaving = None if self.leaving is None else vars(self.leaving) | {"cause": self.leaving.cause.value}
        told = {"ok": self.ok, "missed": self.missed, "leaving": leaving, "operators": operators}
        found: dict[str, Any] = plain(vars(self) | told, "ModelCheck")
        return found

    def __str__(self) -> str:
        at = place_traits(self.place)
        title, runs = at.title, "onnxruntime by itself does not run it" if at.emulates else "on CPU"
        lines = [f"{len(self.operators)} operators, replayed as {title} computes {self.dtype}, on {self.sample}"]
        lines += [
            f"output '{name}': relative error {error:.2g}{f', above {self.tolerance:g}' if name in self.missed else ''}"
            for name, error in self.outputs.items()
        ]
        if self.leaving is not None:
            lines.append(str(self.leaving))
        for what, names in _grouped(self.faults).items():
            rest = f" and {len(names) - 2} more" if len(names) > 2 else ""
            lines.append(f"the kernel of {title} fails at {', '.join(map(repr, names[:2]))}{rest}: {what}")
        lines += [f"{count} x {what}: {runs}" for what, count in self.without_kernel.items()]
        if self.not_emulated:
            lines.append(f"computed in {self.dtype} there, which is not followed here: {', '.join(self.not_emulated)}")
        lines += [
            f"weight '{name}' holds numbers that are not finite: {count}" for name, count in self.infinite.items()
        ]
        return "\n".join(lines)


def check_model(
    model_or_path: onnx.ModelProto | str | os.PathLike[str],
    place: Place | str = "cuda",
    *,
    data: Any = None,
    tolerance: float | None = None,
    time_budget: float | None = None,
) -> ModelCheck:
    """Replay a 16-bit model with the arithmetic of a place, beside fp32 arithmetic on the same weights and inputs.

    The model may come from any converter or exporter. It runs on CPU and needs no device: every 16-bit value is rounded
    where it is stored, and sums are added up as the kernels of the place do: in fp32, or (WebGPU) with a rounding after
    each addition. For "cpu" that is what :class:`.CPUPlace` computes; onnxruntime by itself leaves
    roundings out.

    Args:
        model_or_path: a ModelProto, or the path of one, with float16 or bfloat16 operators.
        place: the place, or its kind ("cuda", "webgpu", "cpu").
        data: feeds, or files of them, as :func:`convert` takes them for calibration; without any, one sample of normal
            numbers (integers: zeros and ones).
        tolerance: relative L2 error that is allowed at an output; 0.01 for float16, 0.05 for bfloat16.
        time_budget: seconds that one run may take. By default there is no end: emulated sums take some nanoseconds for
            each product.

    Returns:
        A :class:`ModelCheck`. Its ``leaving`` names the operator that leaves first on the way to an output that is off:
        by overflow, underflow, or sums that lose their digits.

    Raises:
        ArgumentError: an unknown place, a model without 16-bit tensors, data that does not fit. ModelFileError: not a
        model. ExecutionError: onnxruntime fails, or a run exceeds its budget.
    """
    kind = check_place(place, "check_model: place").kind
    for name, given in (("tolerance", tolerance), ("time_budget", time_budget)):
        if given is not None:
            number(name, given)
    program = load(model_or_path, Program, weights=False)
    bring_to_oldest(program)
    become_constants(program)
    Pipeline((TryInlineFunctions(), DenseConstants())).run(program)
    found = Counter(v.dtype for each in programs(program) for v in each.variables if v.dtype in HALF)
    if not found:
        raise ArgumentError(
            f"check_model: program '{program.name}' has no tensor in float16 or bfloat16, so that nothing is there to "
            "replay; give a converted model"
        )
    dtype = str(found.most_common(1)[0][0])
    arithmetic = Arithmetic(kind, widens=False) if roundings(kind, dtype) is not None else None
    with within(Budget(time_budget if time_budget is not None else math.inf, None)):
        batches = load_calibration(data, program) if data is not None else [synthetic_sample(program)[0]]
        operators = replay(program, batches, arithmetic)
    allowed = TOLERANCE[dtype] if tolerance is None else float(tolerance)
    outputs = {v.name: _error(v, operators) for v in program.outputs if v.producer is not None}
    missed = [v for v in program.outputs if v.name in outputs and not beyond(outputs[v.name]) <= allowed]
    way = set(needed(program, missed))
    steps = [step for step in operators if step.op in way]
    return ModelCheck(
        kind,
        dtype,
        SYNTHETIC if data is None else CALIBRATION,
        allowed,
        outputs,
        leaving_of(steps, {v.name for v in missed}, kind, dtype, allowed) if missed else None,
        tuple(operators),
        _without_kernel(program, kind),
        _faults(program, kind),
        _not_emulated(program, arithmetic, dtype, batches[0]),
        _infinite(program),
    )


def _grouped(faults: Mapping[str, str]) -> dict[str, list[str]]:
    """Operators by what their kernel does."""
    found: dict[str, list[str]] = {}
    for name, what in faults.items():
        found.setdefault(what, []).append(name)
    return found


def _error(variable: Variable, operators: list[OperatorError]) -> float:
    step = next(step for step in operators if step.op is variable.producer)
    return step.errors[variable.name]


def _without_kernel(program: Graph, kind: str) -> dict[str, int]:
    found: Counter[str] = Counter()
    for op in program.walk():
        why = leaves(op, kind)
        if why:
            found[f"{op.full_type} ({why})"] += 1
    return dict(found)


def _faults(program: Graph, kind: str) -> dict[str, str]:
    found = {label(op): fault_at(kind, op) for op in program.walk()}
    return {name: f"{fault.where}: {fault.what}" for name, fault in found.items() if fault is not None}


def _not_emulated(program: Program, arithmetic: Arithmetic | None, dtype: str, batch: Batch) -> tuple[str, ...]:
    """Types of operators that nobody knows in fp32, or that compute in 16 bit inside, which is not followed."""
    shapes: dict[Graph, Shapes | None] = {program: Shapes(program, {name: np.shape(v) for name, v in batch.items()})}
    for nested in programs(program):
        if nested.parent is not None:
            around = shapes[nested.parent.program]
            shapes[nested] = None if around is None else around.within(nested)

    def followed(op: Operator) -> bool:
        found = lookup(op)
        if sum_rule(op.full_type) is None or (found is not None and lowering_rule_of(op) and not found.native):
            return False
        known = [v for v in (*op.inputs, *op.outputs[:1]) if v is not None]
        there = shapes[op.program]
        sizes = [v.shape if there is None else there[v][1] for v in known]
        return all(static(size) is not None for size in sizes)

    def unknown(op: Operator) -> bool:
        if not any(v is not None and v.dtype == dtype for v in op.outputs) or op.attrs.programs:
            return False
        if signature_of(op) is None:
            return True
        return arithmetic is not None and inner_roundings(op, arithmetic, dtype)[1] > 0 and not followed(op)

    return tuple(sorted({op.full_type for op in program.walk() if unknown(op)}))


def _infinite(program: Graph) -> dict[str, int]:
    found = {
        v.name: int((~np.isfinite(as_array(v.data))).sum())
        for each in programs(program)
        for v in each.variables
        if v.dtype in HALF and v.producer is None and v.data is not None
    }
    return {name: count for name, count in found.items() if count}
