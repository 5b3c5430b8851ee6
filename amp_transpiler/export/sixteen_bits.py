"""Which fp32 tensors of a model hold 16-bit numbers: products of two such numbers are exact in fp32."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx

from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.ir.types import HALF, numpy_dtype
from amp_transpiler.passes.lowering.tensor_types import Type

#: How many inputs of a body stand before those of the node that it is nested in, and how many of its outputs before
#: those that the node's states take.
_BODIES = {"Loop": (2, 1), "Scan": (0, 0)}


class SixteenBits:
    """Asked of a graph, with the one around it where it is nested, and the node there that it is the body of."""

    def __init__(
        self,
        graph: onnx.GraphProto,
        types: Mapping[str, Type],
        outer: SixteenBits | None = None,
        node: onnx.NodeProto | None = None,
    ) -> None:
        self.graph, self.types, self.outer, self.node = graph, types, outer, node
        self.makers = {name: made for made in graph.node for name in made.output}
        self.constants = {tensor.name: tensor for tensor in graph.initializer}
        self.inputs = {info.name: slot for slot, info in enumerate(graph.input)}
        self._known: dict[str, bool] = {}

    def holds(self, name: str) -> bool:
        """Whether each number of the tensor is one of a 16-bit type."""
        if name not in self._known:
            self._known[name] = True  # until something speaks against it: a loop may hand on what it is given
            self._known[name] = self._decide(name)
        return self._known[name]

    def _decide(self, name: str) -> bool:
        dtype = self.types.get(name, ("", None))[0]
        if dtype in HALF or dtype == "bool":
            return True
        if dtype != "float32":
            return False
        if name in self.constants:
            array = onnx.numpy_helper.to_array(self.constants[name])
            with np.errstate(over="ignore"):
                return any(np.array_equal(array.astype(numpy_dtype(kind)), array, equal_nan=True) for kind in HALF)
        if name in self.inputs:
            return self._handed_in(self.inputs[name])
        made = self.makers.get(name)
        if made is None:
            return self.outer is not None and self.outer.holds(name)
        if made.domain:
            return False
        if made.op_type == "Cast":
            return self.holds(made.input[0])
        traits = traits_of(made.op_type)
        if not traits.exact and traits.moves == ():
            return False
        slots = range(len(made.input)) if traits.moves in (None, ()) else traits.moves
        read = [made.input[slot] for slot in slots if slot < len(made.input) and made.input[slot]]
        return all(self.holds(each) for each in read if self.types.get(each, ("", None))[0] == "float32")

    def _handed_in(self, slot: int) -> bool:
        if self.outer is None or self.node is None or self.node.op_type not in _BODIES:
            return False
        before, after = _BODIES[self.node.op_type]
        if slot < before:
            return False
        given = self.node.input[slot - before + (2 if self.node.op_type == "Loop" else 0)]
        states = len(self.graph.input) - before
        if self.node.op_type == "Scan":
            states -= next(each.i for each in self.node.attribute if each.name == "num_scan_inputs")
        again = self.graph.output[slot - before + after].name if slot - before < states else ""
        return self.outer.holds(given) and (not again or self.holds(again))
