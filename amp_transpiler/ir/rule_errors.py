"""The error of a rule that an operator does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from amp_transpiler.errors import AmpError, GraphError, MissingKeyError
from amp_transpiler.ir.nodes import Operator


@contextmanager
def rule_of(op: Operator) -> Iterator[None]:
    """GraphError where a rule for an operator fails inside: it has not the form that the rule is written for.

    Files may hold operators of this package's domain, or of onnxruntime's, from anybody, and ONNX has no schema that
    would check them when they are read.
    """
    try:
        yield
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, AmpError) and not isinstance(error, MissingKeyError):
            raise
        said = f"{type(error).__name__} {' '.join(str(error).split())}".strip()
        raise GraphError(
            f"operator '{op.label}' ({op.full_type}): its inputs, outputs or attributes do not fit what "
            f"is known of it ({said})"
        ) from error
