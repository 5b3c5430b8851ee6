"""Warnings that point at the user's line, whatever lies between it and the place that warns."""

from __future__ import annotations

import inspect
import warnings


class AmpWarning(UserWarning):
    """A warning of this package, about what its caller asked for."""


def warn_user(message: str) -> None:
    """An AmpWarning at the innermost line outside this package."""
    frame, level = inspect.currentframe(), 1
    while frame and frame.f_back and frame.f_globals.get("__name__", "").startswith("amp_transpiler"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, AmpWarning, stacklevel=level)
