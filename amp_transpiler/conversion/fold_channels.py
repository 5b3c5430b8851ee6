"""What is done to each channel after a convolution goes into its weights, in fp32, before they are rounded.

A runtime does so by itself, of weights that are rounded and with a rounding more, and cannot where casts lie between.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from amp_transpiler.conversion.conversion_options import ConversionOptions
from amp_transpiler.conversion.simplification import Simplification
from amp_transpiler.ir.constant_data import constant_array
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.proto_residue import listed_inputs
from amp_transpiler.ir.types import LIMITS
from amp_transpiler.ops.place_gaps import affine_map
from amp_transpiler.passes.canonicalize.matching import alone, only_reader
from amp_transpiler.passes.view.of_type import of_type
from amp_transpiler.passes.view.typing import programs

#: What goes into weights.
_AFTER = ("BatchNormalization", "Add", "Sub")
#: Elements of the largest weights that are multiplied.
_WEIGHTS = 1 << 24
#: The axis of the channels that they make in the weights of convolutions.
_CHANNELS = {"Conv": 0, "ConvTranspose": 1}


class FoldChannels(Simplification):
    """A BatchNormalization of what a convolution makes for it alone, or a number of each channel that is added to that,
    goes into the weights of the convolution."""

    name = "fold-channels"

    def simplify(
        self, graph: Graph, names: frozenset[str], keep: frozenset[Operator], options: ConversionOptions
    ) -> None:
        convs, after = ([kind for kind in kinds if not options.binds_full(kind)] for kinds in (_CHANNELS, _AFTER))
        folding = _Folding(names, keep, listed_inputs(graph), tuple(convs), LIMITS[options.dtype].largest)
        for each in programs(graph):
            for op in of_type(each, *after) if of_type(each, *convs) else ():
                folding.fold(op)


@dataclass(frozen=True)
class _Folding:
    """What is folded: not variables among ``names``, operators of ``keep``, or what a caller may give others for
    (``listed``), but into convolutions of these types, whose weights pass no ``largest`` number then."""

    names: frozenset[str]
    keep: frozenset[Operator]
    listed: set[Variable]
    convs: tuple[str, ...]
    largest: float

    def fold(self, op: Operator) -> None:
        """Let the convolution compute both, where all is constant."""
        conv = next((each for v in op.inputs[:2] if (each := alone(v, self.convs, self.names)) is not None), None)
        made = op.output(0)
        if conv is None or made is None or made.name in self.names or not self.keep.isdisjoint((conv, op)):
            return
        data, weights, bias = conv.outputs[0], conv.input(1), conv.input(2)
        others = [v for v in (*conv.inputs[1:], *op.inputs) if v is not data]
        if not self.listed.isdisjoint(others) or any(v is not None and v.name in self.names for v in others):
            return
        kernel = constant_array(weights, _WEIGHTS)
        start = np.zeros(()) if bias is None else constant_array(bias, _WEIGHTS)
        if data is None or weights is None or kernel is None or start is None or kernel.dtype != np.float32:
            return
        axis = _CHANNELS[conv.type]
        count = kernel.shape[axis] * (int(conv.attrs.get("group", 1)) if axis else 1)
        affine = affine_map(op) if op.type == "BatchNormalization" else _sum(op, data, count, kernel.ndim)
        if affine is None:
            return
        slope, shift = affine
        added = start * slope + shift
        same = bool((slope == 1).all())
        if not same and (only_reader(weights) is None or slope.size != kernel.shape[axis]):  # of groups
            return
        folded = kernel if same else kernel * slope.reshape(-1, *[1] * (kernel.ndim - axis - 1))
        if not all(np.abs(each).max(initial=0) <= self.largest for each in (folded, added)):  # nor is it no number
            return
        program = op.program
        if not same:
            conv.set_input(1, program.add_constant(f"{weights.name}.folded", folded.astype(np.float32)))
        conv.set_input(2, program.add_constant(f"{made.name}.bias", added.astype(np.float32)))
        program.remove_operator(op)
        conv.set_output(0, None)
        conv.set_output(0, made)
        program.remove_variable(data)


def _sum(op: Operator, data: Variable, count: int, rank: int) -> tuple[np.ndarray, np.ndarray] | None:
    """The factor of each channel of ``data``, 1 or -1, and what an Add or Sub adds; None where that is no constant, or
    not the same in a channel."""
    slot = 0 if op.input(0) is data else 1
    other = op.input(1 - slot)
    number = constant_array(other, _WEIGHTS) if other is not None and other is not data else None
    if number is None or number.ndim > rank or number.dtype != np.float32:
        return None
    shape = (*[1] * (rank - number.ndim), *number.shape)
    if number.size != max(shape[1], 1) or shape[1] not in (1, count):
        return None
    added = np.broadcast_to(number.reshape(-1), count).astype(np.float64)
    if op.type == "Add":
        return np.ones(count), added
    return (np.ones(count), -added) if slot == 0 else (-np.ones(count), added)
