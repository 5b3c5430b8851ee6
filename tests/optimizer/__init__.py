"""Tests of optimizers, loss scales, schedules, groups and averages."""
