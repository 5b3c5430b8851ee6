"""``--check``: whether the written file can be used, beside the verdict on what it computes."""

from __future__ import annotations

import re

import onnx
import onnxruntime as ort

from amp_transpiler.cli.terminal import printable
from amp_transpiler.conversion.conversion_options import ConversionOptions
from amp_transpiler.file_targets import is_utf8
from amp_transpiler.lists import NEWEST_OPSET
from amp_transpiler.program import Program
from amp_transpiler.runtime.budget import check_budget, unbounded_optimizers, within

#: What a conversion may change in a refusal: the opset, which it raises, and at which operator a shape that the model
#: declares is found wrong, where it takes that out.
_CHANGED = re.compile(r"domain_version of \d+|\(op_type:[^()]*\)")


def check(output: str, program: Program, options: ConversionOptions) -> list[str]:
    """Print what was found; what failed, a sentence each.

    The file passes ``onnx.checker`` with full checks, or is refused for what the model itself is refused for, and
    loads in onnxruntime on CPU (without bfloat16 alone: it has no such arithmetic there), or neither of them does, and
    the verdict of the conversion is met.
    """
    with within(check_budget(program, options.time_budget, options.memory_budget)):
        failures = _unusable(output, program)
    verdict = program.conversion.verdict
    for name, error in verdict.errors.items():
        print(f"  check: output '{printable(name)}' is off by {error:.3g} on {verdict.sample}")
    return [*failures, *verdict.failures]


def _unusable(output: str, program: Program) -> list[str]:
    """Who refuses the file."""
    if not is_utf8(output):
        return ["neither onnx.checker nor onnxruntime opens the file: its path is not UTF-8 (in this locale)"]
    failures = []
    refused = _refused(output)
    if not refused:
        print("  check: onnx.checker accepts the file")
    elif _alike(refused, _refused(program.conversion.source)):
        print(f"  check: onnx.checker refuses the file, and the model too: {printable(refused)}")
    else:
        failures.append(f"onnx.checker refuses the file: {refused}")
    if program.conversion.dtype == "float16" and not any(v.dtype == "bfloat16" for v in program.variables):
        unloaded = _unloaded(output)
        if not unloaded:
            print("  check: onnxruntime loads it")
        elif is_utf8(program.conversion.source) and (why := _unloaded(program.conversion.source)):
            print(f"  check: onnxruntime {ort.__version__} does not load the file, nor the model: {printable(why)}")
            if program.opset() > NEWEST_OPSET:
                print(f"  check: export the model at opset {NEWEST_OPSET} or before, or take a newer onnxruntime")
        else:
            failures.append(f"onnxruntime does not load the file: {unloaded}")
    return failures


def _unloaded(path: str) -> str:
    """Why onnxruntime does not load a file; empty where it does."""
    settings = ort.SessionOptions()
    settings.log_severity_level = 4
    try:
        ort.InferenceSession(
            path, settings, providers=["CPUExecutionProvider"], disabled_optimizers=unbounded_optimizers()
        )
    except Exception as error:  # onnxruntime raises classes of its own, without a common base
        return _first_line(error)
    return ""


def _refused(path: str) -> str:
    """Why onnx.checker refuses a file; empty where it does not."""
    try:
        onnx.checker.check_model(path, full_check=True)
    except Exception as error:  # onnx raises classes of its own, and those of pybind
        return _first_line(error)
    return ""


def _alike(one: str, other: str) -> bool:
    """Whether two refusals are of one kind."""
    return _CHANGED.sub("", one) == _CHANGED.sub("", other)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
