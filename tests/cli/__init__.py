"""Tests of the ``amp-transpile`` command."""
