"""The IR: programs on one networkx graph, ONNX in and out, the operator table and the emitter."""
