"""Tests of the training of imported models."""
