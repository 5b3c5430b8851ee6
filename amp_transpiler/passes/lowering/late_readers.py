"""Updates that wait for who reads their state, so that it can be written where it lies.

The gradient of a layer's input reads the layer's weight, and the update of that weight does not depend on it: so the
weight would need a second buffer (see :mod:`.in_place`). Where no verdict on the gradients stands between the two, as
in fp32, the update is made to depend on such readers by one element of what they compute, which changes nothing in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest

import onnx

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.nodes import OWN, Operator
from amp_transpiler.ir.opdef import slots_of
from amp_transpiler.passes.lowering.in_place import late_readers
from amp_transpiler.passes.lowering.lowered import Lowered, Port

#: Elements of a state from which on a second buffer is worth some small operators.
_LARGE = 4096
#: What reads a weight in a backward pass; an update waits for no others.
_PRODUCTS = frozenset({"Conv", "ConvTranspose", "FusedMatMul", "Gemm", "MatMul"})


def waiting(e: Emitter, emitted: Lowered) -> list[Operator | None]:
    """Let the updates among the nodes emitted wait, on CPU; gives the operator of each node.

    On a GPU place parameters lie in flat buffers, whose updates wait for the last of the gradients anyway.
    """
    steps = dict.fromkeys(op for op in emitted.origins if op is not None and op.domain == OWN)
    slots = [(op, slots_of(op.type)) for op in steps] if e.place == "cpu" else []
    if not any(each is not None and each.gated and op.input(0) is None for op, each in slots):
        return list(emitted.origins)
    own = {port.variable: port.tensor for port in emitted.states if not port.segments}
    made = {name: (place, node) for place, node in enumerate(e.nodes) for name in node.output}
    large = [u for u in emitted.updates if u.variable in own and u.tensor in made and _size(u) >= _LARGE]
    late = late_readers(onnx.GraphProto(node=e.nodes), [(own[update.variable], update.tensor) for update in large])
    waits: dict[int, list[str]] = {}
    for update, readers in zip(large, late, strict=True):
        place = _scales(made, *made[update.tensor])
        names = [node.output[0] for node in readers if node.op_type in _PRODUCTS and made[node.output[0]][0] < place]
        if names and len(names) == len(readers):
            waits[place] = names
    nodes, kept, e.nodes = list(e.nodes), list[Operator | None](), []
    for place, (node, origin) in enumerate(zip_longest(nodes, emitted.origins)):
        if place in waits:
            slot = len(node.input) - 1
            node.input[slot] = _after(e, node.input[slot], waits[place])
        e.nodes.append(node)
        kept += [origin] * (len(e.nodes) - len(kept))
    return kept


def _scales(made: Mapping[str, tuple[int, onnx.NodeProto]], place: int, last: onnx.NodeProto) -> int:
    """Where the operator is that reads the factor of an update ``old + change * factor``; -1 of any other update."""
    if last.op_type == "Add":
        place, last = made.get(last.input[1], (-1, last))
        return place if last.op_type == "Mul" else -1
    return place if last.op_type == "GatedAdd" else -1


def _after(e: Emitter, factor: str, names: Sequence[str]) -> str:
    """The factor, once these tensors are there."""
    value = Value(factor, "float32")
    for name in names:
        flat = e.Reshape(Value(name, "float32"), e.ints(-1))
        one = e.reshape(e.Slice(flat, e.ints(0), e.ints(1), shape=(1,)), ())
        value = e.Where(e.Less(one, one), value, value)  # never less: it is the second, bit for bit
    return value.name


def _size(port: Port) -> int:
    sizes = port.shape or ()
    return math.prod(d for d in sizes if isinstance(d, int)) if sizes else 0
