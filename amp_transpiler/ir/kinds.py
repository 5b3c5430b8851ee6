"""Types of a program whose operators are of few kinds: each kind is inferred once.

Of most operators ONNX infers what they make from types and attributes alone. A program without others needs one
inference a kind, where onnx would be handed the whole model and hand another one back.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from operator import attrgetter

import onnx

from amp_transpiler.errors import GraphError
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.infer import from_type_proto, node_types
from amp_transpiler.ir.model_info import FREE_INITIALIZERS
from amp_transpiler.ir.node_fields import NodeFields
from amp_transpiler.ir.nodes import Operator, Shape, Variable
from amp_transpiler.ir.onnx_inference import INVENTED, LONG, ONNX_ERRORS
from amp_transpiler.ir.proto_residue import source_of

#: Element type, and a shape of which every size is known or has a name.
_Type = tuple[str, Shape]
#: Operators of a kind, on average, from which on kinds take less time than the whole: one takes as long as several do.
_ALIKE = 32


def typed_by_kind(program: Graph, nodes: Sequence[NodeFields]) -> list[Operator] | None:
    """Put on the variables of a program the types that ONNX infers, where types alone say them; one operator a kind.

    ``nodes``: the program's in the file. Where an operator looks at what its inputs hold, has a graph or is defined
    elsewhere, where the file says another type, or a size is not known, or nodes are not in order, nothing is changed,
    nor where there are many kinds: None.
    """
    if len({(node.type, node.numbers) for node in nodes}) > len(nodes) // _ALIKE:
        return None
    info, source = program.info, source_of(program)
    listed = [entry.variable for entry in source.inputs] if source is not None else []
    if info.functions or info.ir_version < FREE_INITIALIZERS or any(v is None or v.data is not None for v in listed):
        return None
    declared = {entry.variable for entry in (*source.outputs, *source.value_info)} if source is not None else set()
    declared.discard(None)
    kinds = _type(program.added, nodes, declared)
    if kinds is not None:
        return kinds
    for op in program.added:
        for variable in op.outputs:
            if variable is not None and variable not in declared:
                variable.dtype = variable.shape = None
    return None


def _type(
    operators: Iterable[Operator], nodes: Sequence[NodeFields], declared: Container[Variable | None]
) -> list[Operator] | None:
    """Put types on what operators make, as far as that goes; one operator a kind if it goes to the end."""
    known: dict[tuple[object, ...], list[_Type]] = {}
    kinds: list[Operator] = []
    type_of = attrgetter("dtype", "shape")
    for op, node in zip(operators, nodes, strict=True):
        read = map(type_of, op.inputs) if "" not in node.inputs else [v and type_of(v) for v in op.inputs]
        kind = (op.type, op.domain, node.numbers, len(op.outputs), *read)
        made = known.get(kind)
        if made is None:
            made = known[kind] = _made(op) if node.numbers is not None else []
            kinds.append(op)
            if not made or len(known) > len(nodes) // _ALIKE:
                return None
        for variable, (dtype, shape) in zip(op.outputs, made, strict=True):
            if variable not in declared:
                if variable is not None:
                    variable.dtype, variable.shape = dtype, shape
            elif type_of(variable) != (dtype, shape):
                return None
    return kinds


def _made(op: Operator) -> list[_Type]:
    """The types of what an operator makes; none where types alone do not say all of them."""
    if op.domain or any(v is not None and (v.dtype is None or not _known(v.shape)) for v in op.inputs):
        return []
    read = tuple(None if v is None else ((v.dtype, v.shape), None) for v in op.inputs)
    try:
        inferred = node_types(op, read, (True,) * len(op.outputs))
        found = [from_type_proto(inferred[slot], op.label) for slot in range(len(op.outputs))]
    except (*ONNX_ERRORS, KeyError, GraphError, onnx.defs.SchemaError):
        return []
    made = [(dtype, shape) for dtype, shape in found if dtype is not None and shape is not None and _known(shape)]
    return made if len(made) == len(found) else []


def _known(shape: Shape | None) -> bool:
    """Whether each size is known or has a name, and the tensor is none that ONNX's inference is not shown."""
    if shape is None or (len(shape) == 1 and isinstance(shape[0], int) and shape[0] > LONG):
        return False
    return all(isinstance(size, int) or (size is not None and not size.startswith(INVENTED)) for size in shape)
