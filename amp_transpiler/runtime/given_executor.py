"""The executor that a caller means."""

from __future__ import annotations

from typing import Any

from amp_transpiler.errors import ArgumentTypeError
from amp_transpiler.runtime.executor import Executor


def given_executor(executor: Any, refusal: str) -> Executor:
    """An executor, or the one that ``amp.watch`` watches; ArgumentTypeError, which begins with ``refusal``, else."""
    plain = executor if isinstance(executor, Executor) else getattr(executor, "executor", None)
    if not isinstance(plain, Executor):
        raise ArgumentTypeError(f"{refusal}, got {executor!r:.200}")
    return plain
