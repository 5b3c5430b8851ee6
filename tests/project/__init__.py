"""Tests of README, documentation and packaging."""
