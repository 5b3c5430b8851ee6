"""Tests of exported training steps."""
