"""A BatchNormalization goes into the weights of the convolution before it, in fp32, before they are rounded.

A runtime does so by itself, of weights that are rounded and with a rounding more, and cannot where casts lie between.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from amp_transpiler.conversion.conversion_options import OPTIONS
from amp_transpiler.conversion.protected import converted, protected
from amp_transpiler.ir.constant_data import constant_array
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.proto_residue import listed_inputs
from amp_transpiler.ir.types import LIMITS
from amp_transpiler.ops.place_gaps import affine_map
from amp_transpiler.passes.canonicalize.matching import alone, only_reader
from amp_transpiler.passes.canonicalize.simplify import remove_dead
from amp_transpiler.passes.pipeline import Context, Pass, Property
from amp_transpiler.passes.view.of_type import of_type
from amp_transpiler.passes.view.typing import programs

_NORM = "BatchNormalization"
#: Elements of the largest weights that are multiplied.
_WEIGHTS = 1 << 24
#: The axis of the channels that they make in the weights of convolutions.
_CHANNELS = {"Conv": 0, "ConvTranspose": 1}


class FoldNorms(Pass):
    """A BatchNormalization of what a convolution makes for it alone goes into the weights of that."""

    name = "fold-norms"
    needs = (Property.TYPED, Property.CONSTANTS, OPTIONS)

    def applies(self, graph: Graph, context: Context) -> bool:
        return not (context[OPTIONS].binds_full(_NORM) or converted(graph))

    def run(self, graph: Graph, context: Context) -> None:
        norms = [norm for each in programs(graph) for norm in of_type(each, _NORM)]
        if norms:
            options = context[OPTIONS]
            names, keep = protected(graph, options)
            convs = tuple(kind for kind in _CHANNELS if not options.binds_full(kind))
            folding = _Folding(names, keep, listed_inputs(graph), convs, LIMITS[options.dtype].largest)
            if any([folding.fold(norm) for norm in norms]):
                remove_dead(graph, names, keep)


@dataclass(frozen=True)
class _Folding:
    """What is folded: not variables among ``names``, operators of ``keep``, or what a caller may give others for
    (``listed``), but convolutions of these types, whose weights pass no ``largest`` number then."""

    names: frozenset[str]
    keep: frozenset[Operator]
    listed: set[Variable]
    convs: tuple[str, ...]
    largest: float

    def fold(self, norm: Operator) -> bool:
        """Let the convolution compute both, where all is constant; whether it does."""
        data, made, affine = norm.input(0), norm.output(0), affine_map(norm)
        conv = alone(data, self.convs, self.names)
        if data is None or made is None or conv is None or affine is None or made.name in self.names:
            return False
        if not self.keep.isdisjoint((conv, norm)) or not self.listed.isdisjoint((*conv.inputs[1:], *norm.inputs[1:])):
            return False
        weights, bias = conv.input(1), conv.input(2)
        kernel = None if weights is None or only_reader(weights) is None else constant_array(weights, _WEIGHTS)
        start = np.zeros(()) if bias is None else constant_array(bias, _WEIGHTS)
        if weights is None or kernel is None or start is None or kernel.dtype != np.float32:
            return False
        (slope, shift), axis = affine, _CHANNELS[conv.type]
        if kernel.shape[axis] != slope.size:  # of a transposed one in groups
            return False
        folded = kernel * slope.reshape(-1, *[1] * (kernel.ndim - axis - 1))
        added = start * slope + shift
        if not all(np.abs(each).max(initial=0) <= self.largest for each in (folded, added)):  # nor is it no number
            return False
        program = norm.program
        conv.set_input(1, program.add_constant(f"{weights.name}.folded", folded.astype(np.float32)))
        conv.set_input(2, program.add_constant(f"{made.name}.bias", added.astype(np.float32)))
        program.remove_operator(norm)
        conv.set_output(0, None)
        conv.set_output(0, made)
        program.remove_variable(data)
        return True
