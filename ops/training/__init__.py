"""Operators of the training step: update, scaling, schedules, randomness."""
