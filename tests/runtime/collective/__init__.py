"""Tests of engines: sums, algorithms, faults, real ranks."""
