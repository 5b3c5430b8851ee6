"""Passes: one a file, Graph to Graph (or, in the lowering, Graph to ONNX)."""
