"""Tests of checkpoints: content, damage, faults, modes, resume, forgeries."""
