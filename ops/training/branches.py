"""Values of which a scalar decides: an If, of whose branches one is run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import onnx

from amp_transpiler.ir.control import every_node
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.types import HALF, ONNX_TYPES


def chosen(e: Emitter, condition: Value, new: Callable[[], Sequence[Value]], old: Sequence[Value]) -> list[Value]:
    """``new()`` where a scalar holds, else ``old`` bit for bit; both are alike, with known shapes.

    A value that emulates 16 bit is a 16-bit tensor on the way, where its old one has such a tensor.
    """
    real = [as_tensor(e, value) for value in old]
    then_branch = _branch(e, "then", lambda: [_as_real(e, v, r) for v, r in zip(new(), real, strict=True)])
    else_branch = _branch(e, "else", lambda: [e.op("Identity", v, dtype=v.dtype, shape=v.shape) for v in real])
    return [emulating(e, r, v) for r, v in zip(_if(e, condition, then_branch, else_branch, real), old, strict=True)]


def either(
    e: Emitter, condition: Value, one: Callable[[], Sequence[Value]], other: Callable[[], Sequence[Value]]
) -> list[Value]:
    """``one()`` where a scalar holds, else ``other()``: alike, with known shapes."""
    made = list[Value]()

    def tensors(write: Callable[[], Sequence[Value]]) -> list[Value]:
        made[:] = write()
        return [as_tensor(e, value) for value in made]

    then_branch, else_branch = _branch(e, "then", partial(tensors, one)), _branch(e, "else", partial(tensors, other))
    real = [as_tensor(e, value) for value in made]
    return [emulating(e, r, v) for r, v in zip(_if(e, condition, then_branch, else_branch, real), made, strict=True)]


def _if(
    e: Emitter, condition: Value, then_branch: onnx.GraphProto, else_branch: onnx.GraphProto, like: Sequence[Value]
) -> list[Value]:
    names = [e.name("If") for _ in like]
    node = onnx.helper.make_node(
        "If", [condition.name], names, names[0], then_branch=then_branch, else_branch=else_branch
    )
    e.nodes.append(node)
    return [Value(name, value.dtype, value.shape) for name, value in zip(names, like, strict=True)]


def _held(e: Emitter, value: Value) -> Value:
    """The tensor itself."""
    return Value(value.name, e.tensor_type(value), value.shape)


def _as_real(e: Emitter, value: Value, like: Value) -> Value:
    """The tensor of an element type that holds this value."""
    return e.narrow[value.name] if like.dtype in HALF and e.emulates else _held(e, value)


def _branch(e: Emitter, name: str, write: Callable[[], Sequence[Value]]) -> onnx.GraphProto:
    """The nodes that ``write`` emits, but for those that nothing reads, as a graph of what it gives.

    A branch gives nothing as it stands that was made outside of it, and nothing twice: onnxruntime refuses both.
    """
    with e.nested():
        results = list(write())
        own = {output for node in e.nodes for output in node.output}
        for place, v in enumerate(results):
            if v.name not in own:
                results[place] = e.op("Identity", v, dtype=v.dtype, shape=v.shape)
            own.discard(v.name)
        outputs = [onnx.helper.make_tensor_value_info(v.name, ONNX_TYPES[v.dtype], v.shape) for v in results]
        return onnx.helper.make_graph(needed(e.nodes, results), name, [], outputs)


def needed(nodes: Sequence[onnx.NodeProto], results: Sequence[Value]) -> list[onnx.NodeProto]:
    """The nodes but for those that the results, and graphs nested in the nodes, do not need."""
    wanted, kept = {v.name for v in results}, list[onnx.NodeProto]()
    for node in reversed(nodes):
        if not wanted.isdisjoint(node.output):
            wanted.update(*(inner.input for inner in every_node([node])))
            kept.append(node)
    return kept[::-1]


def as_tensor(e: Emitter, value: Value) -> Value:
    """The tensor that holds a value: of a rounded one that emulates 16 bit, the 16-bit one."""
    return e.narrow.get(value.name) or _held(e, value)


def emulating(e: Emitter, made: Value, like: Value) -> Value:
    """A tensor that was made as a value like this one."""
    if made.dtype not in HALF or not e.emulates:
        return Value(made.name, like.dtype, like.shape)
    wide = e.name("Cast")
    e.nodes.append(onnx.helper.make_node("Cast", [made.name], [wide], wide, to=ONNX_TYPES["float32"]))
    e.narrow[wide] = made
    return Value(wide, like.dtype, like.shape)
