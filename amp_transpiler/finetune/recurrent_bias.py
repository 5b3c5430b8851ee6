"""Recurrent layers with one bias, or none, where ONNX has room for two."""

from __future__ import annotations

import re
from collections.abc import Collection

import numpy as np
import onnx

from amp_transpiler.ir.nodes import Variable
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.ops.rnn.gates import adds_both_biases
from amp_transpiler.program import Program

#: How TensorFlow's exporter names the biases that it puts together, perhaps followed by what a copy is read for.
_TENSORFLOW = re.compile(r"B\d*__\d+(\..*)?")


def one_bias(program: Program, named: Collection[str]) -> list[str]:
    """Let the halves of recurrent biases that exporters filled with zeros be constants again, but for ``named`` ones.

    Keras has one bias and TensorFlow's exporter writes zeros as the other, which is added to it: trained too, the bias
    would move twice as fast. Of an LSTM without any the exporter writes zeros alone; one with a bias begins with ones
    at its forget gate. PyTorch and Paddle have two biases, and may begin with zeros in both.
    """
    halved, none = [], []
    for variable in program.parameters:
        uses = variable.readers
        if variable.name in named or not _TENSORFLOW.fullmatch(variable.name):
            continue
        if not uses or not all(slot == 3 and adds_both_biases(op) for op, slot in uses):
            continue
        first, second = np.split(np.asarray(as_array(variable.data)), 2, axis=1)
        if second.any():
            continue
        if first.any() or any(op.type != "LSTM" for op, _ in uses):
            _halve(variable, first, second)
            halved.append(variable.name)
        else:
            variable.persistable = variable.trainable = False
            none.append(variable.name)
    notes = []
    if halved:
        notes.append(f"{', '.join(map(repr, halved))}: one bias of a recurrent layer, the other is zeros for good")
    if none:
        notes.append(
            f"{', '.join(map(repr, none))}: zeros, as of a layer without bias, not trained; trainable names one"
        )
    return notes


def _halve(variable: Variable, first: np.ndarray, second: np.ndarray) -> None:
    program = variable.program
    joined = program.fresh_variable(f"{variable.name}.both", variable.dtype, variable.shape)
    program.replace_uses(variable, joined)
    zeros = program.add_constant(f"{variable.name}.zeros", second)
    variable.data = onnx.numpy_helper.from_array(np.ascontiguousarray(first), variable.name)
    variable.shape = first.shape
    program.add_operator("Concat", [variable, zeros], [joined], attrs={"axis": 1})
