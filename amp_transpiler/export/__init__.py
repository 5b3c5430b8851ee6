"""Training steps for other runtimes: a folder of ONNX files, their state, and a manifest that says how they fit."""
