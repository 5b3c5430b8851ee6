"""Tests of the graph: reading, writing, checking."""
