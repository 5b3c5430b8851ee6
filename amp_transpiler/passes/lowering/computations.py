"""What a graph computes: its kernels and what they read, but for views and the order of axes.

Two graphs of one meaning that compute the same give the same bits, however they move elements about.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import onnx

from amp_transpiler.ir.control import nested_graphs
from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.passes.lowering.open_sizes import content, settings

_MOVED = frozenset({"Expand", "Transpose"})


def computations(graph: onnx.GraphProto, known: Mapping[str, onnx.TensorProto]) -> Counter[int]:
    """How often a graph computes what. ``known``: the numbers of inputs that stand for constants."""
    return _computations(graph, {name: _constant(tensor) for name, tensor in known.items()})


def _constant(tensor: onnx.TensorProto) -> int:
    """What tells a constant from others; it is the same one where it is repeated along an axis."""
    if tensor.data_type == onnx.TensorProto.STRING:
        return hash(content(tensor))
    array = onnx.numpy_helper.to_array(tensor)
    if array.itemsize > 8:
        return hash(content(tensor))
    bits = array.view(f"u{array.itemsize}")
    for axis in range(bits.ndim):
        if bits.shape[axis] and (bits == (first := bits.take([0], axis))).all():
            bits = first
    return hash((tensor.data_type, tuple(size for size in bits.shape if size != 1), bits.tobytes()))


def _computations(graph: onnx.GraphProto, outer: Mapping[str, int]) -> Counter[int]:
    made = dict(outer)
    made |= {tensor.name: _constant(tensor) for tensor in graph.initializer}
    found: Counter[int] = Counter()
    for node in graph.node:
        traits = traits_of(node.op_type, node.domain)
        read = [made.get(name, hash(name)) for name in node.input]
        if traits.shape_only:
            made.update((name, hash("shape")) for name in node.output)
            continue
        if traits.view or (node.op_type in _MOVED and not node.domain):
            made[node.output[0]] = read[0]
            continue
        inner = [hash(frozenset(_computations(nested, made).items())) for nested in nested_graphs(node)]
        key = hash((node.op_type, node.domain, *read, *sorted(settings(node)), *inner))
        found[key] += 1
        made.update((name, hash((key, place))) for place, name in enumerate(node.output))
    found.update(made.get(info.name, 0) for info in graph.output)
    return found
