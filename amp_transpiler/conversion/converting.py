"""A model for inference in 16 bit: read, decide, insert the casts, give back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import onnx

from amp_transpiler.conversion.around_faults import AroundFaults
from amp_transpiler.conversion.auto import ORIGINAL, SEARCHED, Search
from amp_transpiler.conversion.conversion_options import OPTIONS, ConversionOptions, Options
from amp_transpiler.conversion.dense_constants import DenseConstants
from amp_transpiler.conversion.fold_channels import FoldChannels
from amp_transpiler.conversion.fold_constants import FoldConstants
from amp_transpiler.conversion.io_types import NarrowIo
from amp_transpiler.conversion.other_type import WidenOther
from amp_transpiler.conversion.products_first import ProductsFirst
from amp_transpiler.conversion.raise_opset import RaiseOpset
from amp_transpiler.conversion.report.record import Conversion, CutRecord, record_program
from amp_transpiler.conversion.rescale_factors import RescaleFactors
from amp_transpiler.conversion.steps import ASSIGNMENT, CONSTRAINTS, Constrain, FreezeWeights, Partition
from amp_transpiler.conversion.verdict import judge
from amp_transpiler.conversion.write_fused import WriteFused
from amp_transpiler.conversion.write_lacking import WriteLacking
from amp_transpiler.conversion.write_whole import InvertTriangles, WriteHardSwishes, WriteNorms
from amp_transpiler.errors import GraphError
from amp_transpiler.ir.gc_pause import collector_paused
from amp_transpiler.ir.oldest_forms import OLDEST, bring_to_oldest
from amp_transpiler.ir.onnx_in import load
from amp_transpiler.ir.weights import become_constants
from amp_transpiler.lists.paddle import paddle_arguments
from amp_transpiler.passes.canonicalize.inlining import TryInlineFunctions
from amp_transpiler.passes.lowering.place import Place
from amp_transpiler.passes.pipeline import Context, Pipeline, apply
from amp_transpiler.program import Program


class ConvertedProgram(Program):
    """What :func:`convert` returns: a program that knows what was done."""

    conversion: Conversion


@paddle_arguments("convert")
def convert(
    model_or_path: onnx.ModelProto | str | os.PathLike[str],
    *,
    mode: str = ConversionOptions.mode,
    dtype: str = ConversionOptions.dtype,
    place: Place | str = ConversionOptions.place,
    keep_io: bool | Iterable[str] = ConversionOptions.keep_io,
    white_list: Iterable[str] | None = ConversionOptions.white_list,
    black_list: Iterable[str] | None = ConversionOptions.black_list,
    black_varnames: Iterable[str] | None = ConversionOptions.black_varnames,
    only: Iterable[str] | None = ConversionOptions.only,
    exclude: Iterable[str] | None = ConversionOptions.exclude,
    calibration: Any = ConversionOptions.calibration,
    tolerance: float | None = ConversionOptions.tolerance,
    input_ranges: Mapping[str, tuple[float, float]] | None = ConversionOptions.input_ranges,
    numeric_guards: bool = ConversionOptions.numeric_guards,
    record: bool = ConversionOptions.record,
    check: bool = ConversionOptions.check,
    progress: Callable[[str], None] | None = ConversionOptions.progress,
    time_budget: float | None = ConversionOptions.time_budget,
    memory_budget: int | None = ConversionOptions.memory_budget,
) -> ConvertedProgram:
    """The program of a model in 16 bit, ready for ``to_onnx``; the model itself is never changed.

    Args:
        model_or_path: a ModelProto, or the path of one.
        mode: which operators the lists bind. "pure": none but those of ``white_list`` and ``black_list``, so that
            whatever can run in 16 bit may; "mixed": matrix products and convolutions (the white list) run in 16 bit,
            delicate operators (the black list) in fp32; "auto": as "pure", but for what calibration shows to be
            unsafe; without calibration, of the black list only what is proved safe runs in 16 bit. Operators that
            nothing binds run where the whole moves the fewest bytes ("least traffic", a minimum cut).
        dtype: "float16" ("fp16", "half") or "bfloat16" ("bf16"). A model whose weights are of the other of these
            stands for the fp32 one with the same values.
        place: where the model will run, a place or its kind ("cuda", "webgpu"). What has no kernel of the type
            there, or one that fails in 16 bit alone, stays fp32; so does what its kernels would add up or compute in
            16 bit at too great a loss, with weights that are stored in 16 bit all the same. What its kernels compute
            wrongly is written in another way.
        keep_io: True: inputs and outputs keep their types; False: float32 ones become 16 bit, and of the type asked
            for where the model was in the other; or the names of those that keep theirs. Initializers that are inputs
            as well are weights: they, and what may be fed over them, become 16 bit where their readers do.
        white_list, black_list: operators to move to a list (ONNX types or Paddle's names).
        black_varnames: variables whose readers and writers stay fp32; or operators by pattern (``encoder/*``).
        only, exclude: patterns (globs, or regular expressions after "re:") of operator names or scopes that alone
            may become 16 bit, that stay as they are.
        calibration: feeds (a dict, or several), or ``.npz`` files, or folders of them or of ``.npy`` files; see
            :func:`.calibration.samples.load_calibration`. Tensors that leave the format or sink below it on
            this data stay fp32, in every mode.
        tolerance: relative L2 error of each output that auto mode keeps to on the calibration data, and that
            ``check`` judges by; 0.01 for float16, 0.05 for bfloat16.
        input_ranges: the least and the largest value of inputs, for the static range analysis.
        numeric_guards: keep fp32 what is known to leave the format (sums of squares, powers, constants that it does
            not hold, integers held as floats). False takes mode and lists literally.
        record: keep what a report needs.
        check: compare the outputs with those of the model, on the calibration data, without any on one synthetic
            sample; ``program.conversion.verdict`` says what came of it.
        progress: called with a line when a stage begins. Where that is a run on calibration data, the line has the
            attributes ``done`` and ``total``: the number of the run, and of all at most (:class:`.auto.Stage`).
        time_budget: seconds that one run of the model on one sample may take (None: 60 on calibration data, 8 on a
            synthetic sample, and one more for every 2 MB of weights and data): a loop in a model may have no end.
        memory_budget: bytes that such a run may need beyond what the process holds already (None: any number; 700 MiB
            and 16 times the weights for the check on a synthetic sample). It is enforced through a limit of the whole
            process: what its other threads allocate meanwhile counts as well.

    Returns:
        The program; ``program.conversion`` tells what was done (a :class:`.report.record.Conversion`), and its
        ``verdict`` (a :class:`.verdict.Verdict`) what was measured of the outputs and whether that is allowed.
        Weights that only 16-bit operators read are stored in 16 bit.

    Raises:
        ArgumentError: unknown mode, options that contradict each other, patterns or names that match nothing,
        calibration data that does not fit. ListError: an unknown operator. ModelFileError: not a model.
        PrecisionError: a weight beyond the range of ``dtype``, without guards. GraphError: a variable without type, a
        model without outputs.
        ExecutionError: onnxruntime fails on the calibration data, or a run exceeds its budget.
    """
    options = ConversionOptions(
        mode=mode,
        dtype=dtype,
        place=place,
        keep_io=keep_io,
        white_list=white_list,
        black_list=black_list,
        black_varnames=black_varnames,
        only=only,
        exclude=exclude,
        calibration=calibration,
        tolerance=tolerance,
        input_ranges=input_ranges,
        numeric_guards=numeric_guards,
        record=record,
        check=check,
        progress=progress,
        time_budget=time_budget,
        memory_budget=memory_budget,
    )
    return convert_with(options, model_or_path)


def conversion(options: ConversionOptions) -> Pipeline:
    """The passes of a conversion: with calibration data a search decides, without any what is known of the program."""
    decision = (Constrain(), Partition()) if options.calibration is None else (Search(),)
    return Pipeline(
        (
            *(
                Options(),
                FreezeWeights(),
                TryInlineFunctions(),
                DenseConstants(),
                WidenOther(),
                FoldConstants(),
                FoldChannels(),
                RaiseOpset(),
                InvertTriangles(),
                WriteNorms(),
                WriteHardSwishes(),
                WriteFused(),
                WriteLacking(),
                ProductsFirst(),
                AroundFaults(),
                RescaleFactors(),
            ),
            *decision,
            NarrowIo(),
        )
    )


def convert_with(
    options: ConversionOptions, model_or_path: onnx.ModelProto | str | os.PathLike[str]
) -> ConvertedProgram:
    """:func:`convert` with its options made: the model read once, each pass run once, the outcome judged once."""
    path = Path(model_or_path) if isinstance(model_or_path, (str, os.PathLike)) else None
    options.tell("reading")
    with ExitStack() as resting:
        resting.enter_context(collector_paused())
        program = load(model_or_path, ConvertedProgram, weights=False)
        if not program.outputs:
            raise GraphError(
                f"model '{path or program.graph_name}' has no outputs: nothing of it would be left; "
                "declare what it computes as outputs of its graph"
            )
        before = record_program(program, path) if options.record else None
        written = program.opset()
        raised = [f"opset {written} raised to {OLDEST}, the oldest that onnxruntime runs"] * bring_to_oldest(program)
        reference = program.clone() if options.check else None
        if reference is not None:
            become_constants(reference)
        if options.calibration is not None:
            resting.close()  # a search makes garbage
        context = Context({OPTIONS: options} if reference is None else {OPTIONS: options, ORIGINAL: reference})
        changes = apply(conversion(options), program, context)
    assignment, constraints = context[ASSIGNMENT], context[CONSTRAINTS]
    searched = context.get(SEARCHED)
    verdict = searched.verdict if searched else None
    if reference is not None and (changes[-1][1] or searched is None):  # else the search has measured this very program
        options.tell("check")
        measured = (searched.batches, searched.expected) if searched else ()
        verdict = judge(reference, program, options, *measured)
    program.conversion = Conversion(
        source=str(path or ""),
        mode=options.mode,
        dtype=options.dtype,
        before=before,
        after=record_program(program) if options.record else None,
        cut=CutRecord(
            assignment.free,
            assignment.cut.value,
            assignment.all_half,
            assignment.all_full,
            assignment.cut.exact,
            assignment.cut.rounding,
        ),
        constants=tuple(constraints.constants) if constraints else (),
        ranges=searched.ranges() if searched else (),
        verdict=verdict,
        rounds=tuple(searched.rounds) if searched else (),
        notes=(*raised, *context.notes),
    )
    return program
