"""Tests of paths, of files that appear whole or not at all, and of files that are none."""
