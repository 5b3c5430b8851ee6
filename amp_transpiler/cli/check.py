"""``--check``: the written file checked, loaded, and compared with the original."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from amp_transpiler.cli.terminal import complain, printable
from amp_transpiler.conversion.calibration.measure import measure
from amp_transpiler.conversion.calibration.samples import load_calibration
from amp_transpiler.errors import AmpError, FeedError, ModelFileError
from amp_transpiler.ir.tensors import byte_size
from amp_transpiler.ir.types import FLOATS, numpy_dtype
from amp_transpiler.ir.weights import become_constants
from amp_transpiler.program import Program
from amp_transpiler.runtime.budget import (
    available_memory,
    calibration_budget,
    check_budget,
    unbounded_optimizers,
    within,
)

#: Bytes of a synthetic sample; larger inputs are the user's to give.
_SAMPLE = 1 << 28


def check(
    source: str,
    output: str,
    program: Program,
    calibration: Any,
    tolerance: float,
    seconds: float | None = None,
    memory: int | None = None,
) -> int:
    """Print what was found; 3 where something failed.

    The file passes ``onnx.checker`` with full checks and loads in onnxruntime on CPU (without bfloat16 alone: it
    has no such arithmetic there). Then the original runs in fp32 and the conversion in faithful 16 bit, on the
    calibration data or on one synthetic sample, and every output stays within ``tolerance``.

    ``seconds``, ``memory`` (bytes): of one run, None: see :mod:`~amp_transpiler.runtime.budget`. A run that exceeds
    them is a failure.
    """
    reference = Program.from_onnx(source)
    become_constants(reference)
    batches = load_calibration(calibration, reference) if calibration else None
    if batches is None:
        budget = check_budget(reference, seconds, memory)
    else:
        budget = calibration_budget(reference, batches, seconds, memory or available_memory() * 9 // 10)
    with within(budget):
        failures = [*_unusable(output, program), *_compared(reference, program, batches, tolerance)]
    for failure in failures:
        told = failure.replace(output, os.path.basename(output))  # it lies where it waits for its name
        complain(f"check failed: {told}")
    return 3 if failures else 0


def _unusable(output: str, program: Program) -> list[str]:
    """Who refuses the file."""
    failures = []
    try:
        onnx.checker.check_model(output, full_check=True)
        print("  check: onnx.checker accepts the file")
    except Exception as error:  # onnx raises classes of its own, and those of pybind
        failures.append(f"onnx.checker refuses the file: {_first_line(error)}")
    if program.conversion.dtype == "float16" and not any(v.dtype == "bfloat16" for v in program.variables):
        settings = ort.SessionOptions()
        settings.log_severity_level = 4
        try:
            ort.InferenceSession(
                output, settings, providers=["CPUExecutionProvider"], disabled_optimizers=unbounded_optimizers()
            )
            print("  check: onnxruntime loads it")
        except Exception as error:  # onnxruntime raises classes of its own, without a common base
            failures.append(f"onnxruntime does not load the file: {_first_line(error)}")
    return failures


def _compared(reference: Program, program: Program, batches: Any, tolerance: float) -> list[str]:
    """Which outputs are off by more than ``tolerance``; ``batches`` None: on a synthetic sample."""
    told = "a synthetic sample" if batches is None else "the calibration data"
    try:
        samples = [_sample(reference)] if batches is None else batches
        found = measure(reference, program, samples, program.conversion.dtype, tensors=False)
    except AmpError as error:
        if batches is not None or isinstance(error, ModelFileError):
            raise
        return [f"the model does not run on {told}; give --calibration ({_first_line(error)})"]
    failures = []
    for name, off in found.outputs.items():
        print(f"  check: output '{printable(name)}' is off by {off:.3g} on {told}")
        if not off <= tolerance:
            failures.append(f"output '{name}' is off by {off:.3g}, above {tolerance:g}")
    return failures


def _sample(program: Program) -> dict[str, np.ndarray]:
    """One input of each: normal numbers, zeros and ones, unknown dimensions 1. FeedError where they are too large."""
    rng = np.random.default_rng(0)
    feeds = {}
    left = _SAMPLE
    for variable in program.inputs:
        if variable.data is not None or variable.dtype is None:
            continue
        shape = [size if isinstance(size, int) else 1 for size in variable.shape or ()]
        size = byte_size(variable.dtype, shape)
        if size > left:
            raise FeedError(
                f"input '{variable.name}', {variable.dtype}{shape}, takes {size:,} bytes, and a synthetic "
                f"sample at most {_SAMPLE:,}"
            )
        left -= size
        if variable.dtype in FLOATS:
            made = rng.standard_normal(shape, np.float32)
        else:
            made = rng.integers(0, 2, shape, np.int8)
        feeds[variable.name] = made.astype(numpy_dtype(variable.dtype))
    return feeds


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
