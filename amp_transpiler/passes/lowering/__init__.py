"""From a program to the ONNX model that a place runs, and what it will take."""
