"""The ``amp-transpile`` command."""

from .main import main

__all__ = ["main"]
