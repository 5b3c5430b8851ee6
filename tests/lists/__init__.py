"""Tests of the operator lists and named recipes."""
