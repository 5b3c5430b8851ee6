"""A model for inference in 16 bit: read, decide, insert the casts, give back."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from amp_transpiler.conversion.auto import Outcome, Steps, search
from amp_transpiler.conversion.calibration.samples import load_calibration
from amp_transpiler.conversion.io_types import narrow_io
from amp_transpiler.conversion.raise_opset import raise_for
from amp_transpiler.conversion.report.record import Conversion, CutRecord, record_program
from amp_transpiler.errors import ArgumentError, ArgumentTypeError, GraphError
from amp_transpiler.ir.gc_pause import collector_paused
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.patterns import matching
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.ir.types import FLOATS, LIMITS
from amp_transpiler.ir.weights import become_constants
from amp_transpiler.lists import AutoMixedPrecisionLists
from amp_transpiler.passes.canonicalize.inlining import inline_functions
from amp_transpiler.passes.canonicalize.opset import check_age
from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.passes.numerics.known import known_constraints
from amp_transpiler.passes.numerics.ranges import Ranges
from amp_transpiler.passes.partition.assign_precision import MODES, Assignment, assign
from amp_transpiler.passes.precision.rules import check_variables
from amp_transpiler.passes.view.names import written_name
from amp_transpiler.passes.view.typing import operator_name
from amp_transpiler.program import Program
from amp_transpiler.runtime.budget import calibration_budget, within

#: Relative L2 error of an output that auto mode allows where the caller names none.
TOLERANCE = {"float16": 0.01, "bfloat16": 0.05}

#: In the reasons of operators that cannot run in 16 bit whatever the mode.
_GAPS = (Kind.NO_KERNEL, Kind.NOT_TAKEN, Kind.NO_CAST)


def convert(
    model_or_path: onnx.ModelProto | str | os.PathLike[str],
    *,
    mode: str = "pure-fp16",
    dtype: str = "float16",
    keep_io: bool | Sequence[str] = True,
    white_list: Sequence[str] | None = None,
    black_list: Sequence[str] | None = None,
    black_varnames: Sequence[str] | None = None,
    only: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    calibration: Any = None,
    tolerance: float | None = None,
    input_ranges: Mapping[str, tuple[float, float]] | None = None,
    numeric_guards: bool = True,
    record: bool = False,
    progress: Callable[[str], None] | None = None,
    time_budget: float | None = None,
    memory_budget: int | None = None,
) -> Program:
    """The program of a model in 16 bit, ready for ``to_onnx``; the model itself is never changed.

    Args:
        model_or_path: a ModelProto, or the path of one.
        mode: "pure-fp16": whatever can run in 16 bit and gains by it; "mixed": matrix products and convolutions
            (the white list) in 16 bit, delicate operators (the black list) in fp32; "auto": what calibration
            shows to be safe; without calibration, of the black list only what is proved safe.
        dtype: "float16" or "bfloat16".
        keep_io: True: inputs and outputs keep their types; False: float32 ones become 16 bit; or the names of
            those that keep theirs.
        white_list, black_list: operators to move to a list (ONNX types or Paddle's names).
        black_varnames: variables whose readers and writers stay fp32; or operators by pattern (``encoder/*``).
        only, exclude: patterns (globs, or regular expressions after "re:") of operator names or scopes that alone
            may become 16 bit, that stay as they are.
        calibration: feeds (a dict, or several), or ``.npz`` files, or folders of them or of ``.npy`` files; see
            :func:`.runtime.calibration.load_calibration`. Tensors that leave the format or sink below it on
            this data stay fp32, in every mode.
        tolerance: relative L2 error of each output that auto mode, and it alone, keeps to on the calibration
            data; 0.01 for float16, 0.05 for bfloat16.
        input_ranges: the least and the largest value of inputs, for the static range analysis.
        numeric_guards: keep fp32 what is known to leave the format (sums of squares, powers, constants that it does
            not hold, integers held as floats). False takes mode and lists literally.
        record: keep what a report needs.
        progress: called with a line when a stage begins. Where that is a run on calibration data, the line has the
            attributes ``done`` and ``total``: the number of the run, and of all at most (:class:`.auto.Stage`).
        time_budget: seconds that one run of the model on one sample of the calibration data may take (None: 60, and
            one more for every 2 MB of weights and data): a loop in a model may have no end.
        memory_budget: bytes that such a run may need beyond what the process holds already (None: any number). It is
            enforced through a limit of the whole process.

    Returns:
        The program; ``program.conversion`` tells what was done (a :class:`.report.record.Conversion`).
        Weights that only 16-bit operators read are stored in 16 bit.

    Raises:
        ArgumentError: unknown mode, options that contradict each other, patterns or names that match nothing,
        calibration data that does not fit. ListError: an unknown operator. ModelFileError: not a model.
        PrecisionError: a weight beyond the range of ``dtype``, without guards. GraphError: a variable without type.
        ExecutionError: onnxruntime fails on the calibration data, or a run exceeds its budget.
    """
    _check(mode, keep_io, calibration, tolerance, only, exclude)
    lists = AutoMixedPrecisionLists(white_list, black_list, black_varnames, dtype)
    job = _Job(
        model_or_path,
        mode,
        lists,
        keep_io,
        only,
        exclude,
        input_ranges or {},
        numeric_guards,
        progress or (lambda line: None),
        (time_budget, memory_budget),
    )
    return job.run(calibration, tolerance if tolerance is not None else TOLERANCE[lists.dtype], record)


def _check(mode: str, keep_io: Any, calibration: Any, tolerance: float | None, only: Any, exclude: Any) -> None:
    if mode not in MODES:
        raise ArgumentError(f"convert: mode is one of {', '.join(MODES)}, got {mode!r}")
    if isinstance(keep_io, str):
        raise ArgumentTypeError(f"convert: keep_io is True, False or a list of names, got {keep_io!r}")
    if tolerance is not None and (calibration is None or mode != "auto"):
        given = "none" if calibration is None else "given"
        raise ArgumentError(
            f"convert: a tolerance is kept to in mode 'auto', on calibration data; mode is {mode!r}, "
            f"calibration data {given}"
        )
    if tolerance is not None and not tolerance > 0:
        raise ArgumentError(f"convert: tolerance is a relative error above 0, got {tolerance}")
    for name, patterns in (("only", only), ("exclude", exclude)):
        if isinstance(patterns, str):
            raise ArgumentTypeError(f"convert: {name} takes a list of patterns, got the string {patterns!r}")


@dataclass
class _Job:
    """One conversion."""

    model_or_path: Any
    mode: str
    lists: AutoMixedPrecisionLists
    keep_io: bool | Sequence[str]
    only: Sequence[str] | None
    exclude: Sequence[str] | None
    input_ranges: Mapping[str, tuple[float, float]]
    numeric_guards: bool
    progress: Callable[[str], None]
    #: Seconds and bytes of one run, None: the default.
    budget: tuple[float | None, int | None]

    @property
    def dtype(self) -> str:
        """The 16-bit type."""
        return self.lists.dtype

    def run(self, calibration: Any, tolerance: float, record: bool) -> Program:
        """The converted program."""
        self.progress("reading")
        with collector_paused():
            original = Program.from_onnx(self.model_or_path)
            before = record_program(original, _path(self.model_or_path)) if record else None
            program, notes = self._prepared(original)
            narrow = self._narrow_io(program)
        batches = load_calibration(calibration, program) if calibration is not None else []
        if batches:
            steps = Steps(
                lambda p: self.constraints(p, measured=True), lambda p, e: self.assign(p, e, narrow), self.progress
            )
            with within(calibration_budget(program, batches, *self.budget)):
                outcome = search(program, batches, self.dtype, tolerance if self.mode == "auto" else math.inf, steps)
        else:
            with collector_paused():
                constraints = self.constraints(program, measured=False)
                outcome = Outcome(program, constraints, self.assign(program, constraints, narrow))
        program, assignment = outcome.program, outcome.assignment
        notes += _gaps(program, self.dtype)
        if self.mode == "auto" and not batches:
            proved, tensors = Ranges(program, self.input_ranges).proved(self.dtype)
            notes.append(
                f"static ranges prove that {proved} of {tensors} tensors fit {self.dtype}; of the others only "
                "calibration data would tell"
            )
        narrow_io(program, narrow, self.dtype)
        cut = CutRecord(
            assignment.free,
            assignment.cut.value,
            assignment.all_half,
            assignment.all_full,
            assignment.cut.exact,
            assignment.cut.rounding,
        )
        program.conversion = Conversion(
            source=str(_path(self.model_or_path) or ""),
            mode=self.mode,
            dtype=self.dtype,
            before=before,
            after=record_program(program) if record else None,
            cut=cut,
            constants=tuple(outcome.constraints.constants) if outcome.constraints else (),
            ranges=outcome.ranges(),
            outputs=outcome.outputs,
            tolerance=tolerance if batches and self.mode == "auto" else None,
            rounds=tuple(outcome.rounds),
            notes=tuple(notes),
        )
        return program

    def _prepared(self, program: Program) -> tuple[Program, list[str]]:
        """The program without functions and parameters, at the opset that the type needs."""
        check_age(program, oldest=6)  # the first that casts as the casts that are put in
        become_constants(program)  # and are stored in 16 bit
        notes = []
        try:
            inline_functions(program)
        except GraphError as error:
            notes.append(f"the model's functions stay as they are, in float32: {error}")
        notes.append(raise_for(program, self.dtype))
        check_variables(program, self.lists, "convert")
        return program, [note for note in notes if note]

    def _narrow_io(self, program: Program) -> frozenset[str]:
        """Names of the inputs and outputs that become 16 bit."""
        every = {v.name: v for v in (*program.inputs, *program.outputs)}
        if isinstance(self.keep_io, bool):
            kept: Iterable[str] = every if self.keep_io else ()
        else:
            kept = self.keep_io
            unknown = sorted(set(kept) - set(every))
            if unknown:
                raise ArgumentError(
                    f"convert: keep_io names '{unknown[0]}', which is no input or output of the model; "
                    f"it has {', '.join(map(repr, every))}"
                )
        return frozenset(n for n, v in every.items() if n not in set(kept) and v.dtype == "float32")

    def _outside(self, program: Program) -> Callable[[Operator], Reason | None]:
        """Why patterns keep an operator as it is."""
        ops = list(program.walk())
        only = matching(ops, self.only, "only") if self.only else None
        exclude = matching(ops, self.exclude, "except") if self.exclude else {}
        both = [op for op in exclude if only and op in only]
        if only is not None and len(both) == len(only):
            raise ArgumentError(
                f"convert: every operator that {list(self.only or ())} selects is excepted by "
                f"{list(self.exclude or ())}; nothing is left to convert"
            )

        def outside(op: Operator) -> Reason | None:
            inner: Operator | None = op
            chosen = only is None
            while inner is not None:
                if inner in exclude:
                    return Reason(Kind.EXCEPTED, detail=(repr(exclude[inner]),))
                chosen = chosen or (only is not None and inner in only)
                inner = inner.program.parent
            return None if chosen else Reason(Kind.OUTSIDE_ONLY)

        return outside

    def constraints(self, program: Program, *, measured: bool) -> Constraints | None:
        """What is known against 16 bit without running the program; ``measured``: it will be run."""
        ranges = Ranges(program, self.input_ranges)
        if not self.numeric_guards:
            return Constraints() if self.mode == "auto" else None
        constraints = known_constraints(program, self.dtype, ranges, self.progress)
        if self.mode == "auto" and not measured:
            self._keep_unproved(program, ranges, constraints)
        return constraints

    def _keep_unproved(self, program: Program, ranges: Ranges, constraints: Constraints) -> None:
        """Without data, an operator of the black list runs in 16 bit only where its range is proved."""
        limit = LIMITS[self.dtype].largest
        for op in program.walk():
            if operator_name(op) not in self.lists.black_list:
                continue
            tensors = [v for v in (*op.inputs, *op.outputs) if v is not None and v.dtype in FLOATS]
            unproved = next((v for v in tensors if not ranges.within(v, limit)), None)
            if unproved is not None:
                name = written_name(unproved)
                constraints.keep(op, Reason(Kind.UNPROVED, name, (self.dtype,)))

    def assign(self, program: Program, constraints: Constraints | None, narrow: frozenset[str]) -> Assignment:
        """Decide every operator and insert the casts."""
        self.progress("minimum cut and casts")
        return assign(program, self.lists, self.mode, constraints, outside=self._outside(program), narrow_io=narrow)


def _gaps(program: Program, dtype: str) -> list[str]:
    """What stays fp32 for want of a kernel or a schema, in one line."""
    types = Counter(op.full_type for op in program.walk() if op.why is not None and op.why.kind in _GAPS)
    listed = ", ".join(f"{name} ({count})" for name, count in sorted(types.items()))
    return (
        [f"without a {dtype} kernel on CUDA, or {dtype} in their schema at opset {program.opset()}: {listed}"]
        if listed
        else []
    )


def _path(model_or_path: Any) -> Path | None:
    return None if isinstance(model_or_path, onnx.ModelProto) else Path(model_or_path)
