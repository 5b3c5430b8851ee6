"""What onnxruntime makes of a model as it was given: what its conversion is judged by.

Nothing here touches the model: what reading or lowering gets wrong would be wrong in both programs that are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from amp_transpiler.conversion.calibration.draws import draws
from amp_transpiler.conversion.calibration.measure import EMBEDDED, Batch, outputs_of
from amp_transpiler.errors import FeedError
from amp_transpiler.file_targets import is_utf8
from amp_transpiler.ir.onnx_out import model_of
from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.ir.proto_residue import source_of
from amp_transpiler.ir.tensors import byte_size, tensor_type
from amp_transpiler.ir.types import HALF, numpy_dtype
from amp_transpiler.passes.view.kernel_faults import fault_at
from amp_transpiler.passes.view.typing import programs
from amp_transpiler.program import Program
from amp_transpiler.runtime.budget import OverBudget, unbounded_optimizers, watched
from amp_transpiler.runtime.feeds import Feeds


def session_as_given(program: Program) -> Any:
    """A session for the file of ``program``; None where that is no reference, or not taken by onnxruntime."""
    return _session(program) if _comparable(program) else None


def outputs_as_given(program: Program, batches: Sequence[Batch], session: Any) -> list[list[Any]]:
    """The outputs of ``program``, which nothing has changed since it was read, on each batch, computed on CPU.

    They are those of its file in onnxruntime, in the ``session`` that :func:`session_as_given` makes. Where that is no
    reference (16-bit operators, which it does not round there, operands that it rounds to 8 bits, random numbers, a
    kernel that fails), or does not take the model, they are those of the program, as :func:`.outputs_of` gives them; so
    they are of a large model that is in no file, which would be copied. Raises what that raises.
    """
    if session is None:
        return outputs_of(program, batches)
    feeds, names = Feeds(program, program.outputs), [*dict.fromkeys(v.name for v in program.outputs)]
    found = []
    for batch in batches:
        checked = feeds.check(batch)
        feeds.check_shapes(checked)
        try:
            with watched(f"program '{program.name}'") as options:
                found.append(list(session.run(names, {**batch, **checked}, options)))
        except OverBudget:
            raise
        except Exception:  # onnxruntime's errors have no common base class
            return outputs_of(program, batches)
    return found


def refused(program: Program) -> bool:
    """Whether onnxruntime does not even load the model as it was given, so that it runs on no data."""
    try:
        return _comparable(program) and _content(program) is not None and _session(program) is None
    except OverBudget:
        return False


def undefined(outputs: Sequence[Any]) -> bool:
    """Whether outputs hold floats, and all of these are NaN."""
    floats = [value for value in outputs if isinstance(value, np.ndarray) and value.dtype.kind == "f"]
    return any(map(np.size, floats)) and all(np.isnan(value).all() for value in floats)


def measurable(program: Program, outputs: Sequence[Sequence[Any]], sample: str) -> None:
    """FeedError where ``outputs``, those of ``program`` on each batch, hold no number that errors could be measured
    by: all floats are NaN."""
    if undefined([value for batch in outputs for value in batch]):
        raise FeedError(
            f"every floating-point output of program '{program.name}' is NaN in float32 too on {sample}, so that "
            "nothing can be measured; give data on which it gives numbers"
        )


def _comparable(program: Program) -> bool:
    """Whether onnxruntime computes on CPU what the model means, no coarser than elsewhere, the same in every run."""
    if any(v.dtype in HALF for each in programs(program) for v in each.variables):
        return False
    if any(draws(op) or op.attrs.get(traits_of(op).coarse, 0) > 1 or fault_at("cpu", op) for op in program.walk()):
        return False
    return not any(v.dtype and numpy_dtype(v.dtype).kind == "V" for v in (*program.inputs, *program.outputs))


def _content(program: Program) -> str | bytes | None:
    """The model's file, or its bytes; None where these are too many."""
    source = source_of(program)
    if source is not None and source.path is not None and is_utf8(source.path):
        return str(source.path)
    held = (tensor_type(v.data) for v in program.variables if v.data is not None)
    return None if sum(byte_size(*each) for each in held) > EMBEDDED else model_of(program).SerializeToString()


def _session(program: Program) -> Any:
    """A session for the model; None where onnxruntime does not take it, or it would have to be copied."""
    content = _content(program)
    if content is None:
        return None
    settings = ort.SessionOptions()
    settings.log_severity_level = 4
    settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if any(op.type == "ScatterND" for op in program.walk()):  # where several write to one place, the last one wins
        settings.intra_op_num_threads = 1
    try:
        with watched(f"making a session for program '{program.name}'"):
            return ort.InferenceSession(
                content, settings, providers=["CPUExecutionProvider"], disabled_optimizers=unbounded_optimizers()
            )
    except OverBudget:
        raise
    except Exception:  # onnxruntime's errors have no common base class
        return None
