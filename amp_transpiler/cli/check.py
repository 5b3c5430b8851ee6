"""``--check``: the written file checked, loaded, and compared with the original."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from ..errors import AmpError, ModelFileError
from ..ir.program import Program
from ..ir.types import FLOATS, numpy_dtype
from ..ir.weights import become_constants
from ..runtime.calibration import load_calibration
from ..runtime.measure import measure


def check(source: str, output: str, program: Program, calibration: Any, tolerance: float) -> int:
    """Print what was found; 3 where something failed.

    The file passes ``onnx.checker`` with full checks and loads in onnxruntime on CPU (float16 alone: it has no
    bfloat16 arithmetic there). Then the original runs in fp32 and the conversion in faithful 16 bit, on the
    calibration data or on one made-up sample, and every output stays within ``tolerance``.
    """
    failures = []
    try:
        onnx.checker.check_model(output, full_check=True)
        print("  check: onnx.checker accepts the file")
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        failures.append(f"onnx.checker refuses the file: {_first_line(error)}")
    if program.conversion.dtype == "float16":
        settings = ort.SessionOptions()
        settings.log_severity_level = 4
        try:
            ort.InferenceSession(output, settings, providers=["CPUExecutionProvider"])
            print("  check: onnxruntime loads it")
        except Exception as error:  # onnxruntime raises classes of its own, without a common base
            failures.append(f"onnxruntime does not load the file: {_first_line(error)}")
    failures += _compared(source, program, calibration, tolerance)
    for failure in failures:
        told = failure.replace(output, os.path.basename(output))  # it lies where it waits for its name
        print(f"amp-transpile: check failed: {told}", file=sys.stderr)
    return 3 if failures else 0


def _compared(source: str, program: Program, calibration: Any, tolerance: float) -> list[str]:
    reference = Program.from_onnx(source)
    become_constants(reference)
    if calibration:
        batches, told = load_calibration(calibration, reference), "the calibration data"
    else:
        batches, told = [_sample(reference)], "a made-up sample"
    try:
        found = measure(reference, program, batches, program.conversion.dtype, tensors=False)
    except AmpError as error:
        if calibration or isinstance(error, ModelFileError):
            raise
        return [f"the model does not run on {told}; give --calibration ({_first_line(error)})"]
    failures = []
    for name, off in found.outputs.items():
        print(f"  check: output '{name}' is off by {off:.3g} on {told}")
        if not off <= tolerance:
            failures.append(f"output '{name}' is off by {off:.3g}, above {tolerance:g}")
    return failures


def _sample(program: Program) -> dict[str, np.ndarray]:
    """One input of each: normal numbers, zeros and ones, unknown dimensions 1."""
    rng = np.random.default_rng(0)
    feeds = {}
    for variable in program.inputs:
        if variable.data is not None or variable.dtype is None:
            continue
        shape = [size if isinstance(size, int) else 1 for size in variable.shape or ()]
        if variable.dtype in FLOATS:
            feeds[variable.name] = rng.standard_normal(shape).astype(numpy_dtype(variable.dtype))
        else:
            feeds[variable.name] = rng.integers(0, 2, shape).astype(numpy_dtype(variable.dtype))
    return feeds


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
