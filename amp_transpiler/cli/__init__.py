"""The ``amp-transpile`` command."""

from amp_transpiler.cli.main import main

__all__ = ["main"]
