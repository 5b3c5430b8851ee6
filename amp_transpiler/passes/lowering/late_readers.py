"""Updates that wait for who reads their state, so that it can be written where it lies.

The gradient of a layer's input reads the layer's weight, and the update of that weight does not depend on it: so the
weight would need a second buffer (see :mod:`.in_place`). Where no verdict on the gradients stands between the two, as
in fp32, the update is made to depend on such readers by how many elements they compute, which changes nothing in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import onnx

from amp_transpiler.ir.control import nested_graphs
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.nodes import OWN
from amp_transpiler.ir.opdef import slots_of
from amp_transpiler.passes.lowering.in_place import inputs_within, late_readers
from amp_transpiler.passes.lowering.lowered import Lowered, Port, Row, row

#: Elements of a state from which on a second buffer is worth some small operators.
_LARGE = 4096
#: By tensor where the node is that makes it, and the node.
Made = Mapping[str, tuple[int, onnx.NodeProto]]
#: What reads a weight in a backward pass; an update waits for no others.
_PRODUCTS = frozenset({"Conv", "ConvTranspose", "FusedMatMul", "Gemm", "MatMul"})


def waiting(e: Emitter, emitted: Lowered, rows: Sequence[Row]) -> Sequence[Row]:
    """The rows of what was emitted with the updates among them waiting, on CPU.

    On a GPU place parameters lie in flat buffers, whose updates wait for the last of the gradients anyway.
    """
    steps = dict.fromkeys(each.origin for each in rows if each.origin is not None and each.origin.domain == OWN)
    slots = [(op, slots_of(op.type)) for op in steps] if e.at.host else []
    if not any(each is not None and each.gated and op.input(0) is None for op, each in slots):
        return rows
    own = {port.variable: port.tensor for port in emitted.states if len(port.segments) < 2}
    made = {name: (place, each.node) for place, each in enumerate(rows) for name in each.makes}
    large = [u for u in emitted.updates if u.variable in own and u.tensor in made and _size(u) >= _LARGE]
    pairs = [(own[update.variable], update.tensor) for update in large]
    late = late_readers(rows, pairs, inputs_within(emitted.states))
    waits: dict[int, tuple[onnx.NodeProto, list[str]]] = {}
    for update, readers in zip(large, late, strict=True):
        place, scaling = _scaling(made, update.tensor)
        names = [node.output[0] for node in readers if node.op_type in _PRODUCTS and made[node.output[0]][0] < place]
        if scaling is not None and names and len(names) == len(readers):
            waits[place] = scaling, names
    kept: list[Row] = []
    for place, each in enumerate(rows):
        if place not in waits:
            kept.append(each)
            continue
        scaling, names = waits[place]
        e.nodes = []
        scaling.input[-1] = _after(e, made, scaling.input[-1], names)
        kept += (row(node, each.origin) for node in (*e.nodes, each.node))
    return kept


def _scaling(made: Made, tensor: str) -> tuple[int, onnx.NodeProto | None]:
    """The operator that reads the factor of an update ``old + change * factor``, the last that it reads.

    And where in the graph it is, perhaps in the body of a Scan there; (-1, None) of any other update.
    """
    place, last = made[tensor]
    if last.op_type == "Scan":
        (body,) = nested_graphs(last)
        name = body.output[list(last.output).index(tensor)].name
        inner = {out: (place, node) for node in body.node for out in node.output}
        place, last = inner[name]
        return (place, last) if last.op_type == "GatedAdd" and last.input[2] not in inner else (-1, None)
    if last.op_type == "Add":
        place, last = made.get(last.input[1], (-1, last))
        return (place, last) if last.op_type == "Mul" else (-1, None)
    return (place, last) if last.op_type == "GatedAdd" else (-1, None)


def _after(e: Emitter, made: Made, factor: str, names: Sequence[str]) -> str:
    """The factor, once these tensors are there. Of one that was expanded, what it was before waits."""
    maker = made[factor][1] if factor in made else None
    if maker is not None and maker.op_type == "Expand":
        single = Value(_after(e, made, maker.input[0], names), "float32")
        return e.Expand(single, Value(maker.input[1], "int64")).name
    value = Value(factor, "float32")
    for name in names:
        size = e.op("Size", Value(name, "float32"), dtype="int64", shape=())  # which waits for it, and reads none of it
        value = e.Where(e.cast(size, "bool"), value, value)  # either is the same, bit for bit
    return value.name


def _size(port: Port) -> int:
    sizes = port.shape or ()
    return math.prod(d for d in sizes if isinstance(d, int)) if sizes else 0
