"""Tests of executors, scopes, checkpoints and models for serving."""
