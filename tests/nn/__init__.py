"""Tests of the layer builder."""
