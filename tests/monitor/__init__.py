"""Tests of what looks at training steps."""
