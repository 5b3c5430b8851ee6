"""A small stateful program for the tests of the runtime."""

from __future__ import annotations

import numpy as np
from onnx import parser

from amp_transpiler.program import Program
from amp_transpiler.runtime import Executor, Scope

LINEAR = """
<ir_version: 10, opset_import: ["" : 21]>
linear (float[N, 2] x, int64[N] row) => (float[N, 3] y, float[N, 3] picked, float[2, 3] w_new, float[2, 3] total_new)
<float[2, 3] w = {1, 2, 3, 4, 5, 6}, float[2, 3] total = {0, 0, 0, 0, 0, 0}, float rate = {0.5}>
{
    y = MatMul(x, w)
    picked = Gather(y, row)
    scaled = Mul(w, rate)
    w_new = Sub(w, scaled)
    total_new = Sum(total, w, w)
}
"""
W = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
X = np.array([[1, 2], [3, 4], [5, 6], [7, 8]], np.float32)
ROW = np.arange(4)
FEED = {"x": X, "row": ROW}


def program_of(text: str, **updates: str) -> Program:
    """A program in ONNX text; ``updates``: state variable -> the variable that it becomes."""
    program = Program.from_onnx(parser.parse_model(text))
    for state, new in updates.items():
        program.set_update(program.var(state), program.var(new))
    return program


def linear() -> Program:
    """y = x w; each step halves w and adds the old w twice to the total. Nothing here can be proved safe in place."""
    return program_of(LINEAR, w="w_new", total="total_new")


def started(exe: Executor, scope: Scope) -> Program:
    program = linear()
    assert program.startup is not None
    exe.run(program.startup, scope=scope)
    return program
