"""Tests of the programs in ``demo/``."""
