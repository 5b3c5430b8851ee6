"""A model for inference in 16 bit: read, rewrite, give back."""

from __future__ import annotations

import os
from collections.abc import Sequence

import onnx

from .errors import ArgumentError
from .ir.program import Program
from .lists import AutoMixedPrecisionLists
from .passes.pure import cast_model_to_fp16
from .passes.rewrite import rewrite_program

MODES = ("pure-fp16", "mixed")


def convert(
    model_or_path: onnx.ModelProto | str | os.PathLike[str],
    *,
    mode: str = "pure-fp16",
    dtype: str = "float16",
    white_list: Sequence[str] | None = None,
    black_list: Sequence[str] | None = None,
    black_varnames: Sequence[str] | None = None,
) -> Program:
    """The program of a model in 16 bit, ready for ``to_onnx``; the model itself is never changed.

    Args:
        model_or_path: a ModelProto, or the path of one.
        mode: "pure-fp16" converts everything but unsupported operators; "mixed" follows the white, black
            and gray lists.
        dtype: "float16" or "bfloat16".
        white_list, black_list: operators to move to a list (ONNX types or Paddle's names).
        black_varnames: variables whose readers and writers stay fp32.

    Inputs and outputs keep their types. Weights that only 16-bit operators read are stored in 16 bit.

    Raises:
        ArgumentError: an unknown mode. ListError: an unknown operator. ModelFileError: not a model.
        PrecisionError: a weight beyond the range of ``dtype``. GraphError: a variable without a type.
    """
    if mode not in MODES:
        raise ArgumentError(f"convert: mode is one of {', '.join(MODES)}, got {mode!r}")
    lists = AutoMixedPrecisionLists(white_list, black_list, black_varnames, dtype)
    program = Program.from_onnx(model_or_path)
    for parameter in program.parameters:  # nobody trains them: they are constants, and stored in 16 bit
        parameter.persistable = parameter.trainable = False
    if mode == "mixed":
        rewrite_program(program, lists)
    else:
        cast_model_to_fp16(program, lists, use_fp16_guard=False)
    return program
