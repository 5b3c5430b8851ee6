"""Passes: one a file, Program to Program (or, in the lowering, Program to ONNX)."""
