"""Few fp32 products beside many 16-bit convolutions, on CUDA: they are computed in float64.

cuDNN's tensor cores are for a session that allows TF32 (:mod:`amp_transpiler.runtime.tensor_cores`), which would round
the operands of an fp32 product in the same session, such as a head outside ``fp16_guard``, to ten bits. One in float64
it leaves alone. GPUs compute in float64 up to 64 times slower than in fp32: so that is for products that are next to
nothing beside the convolutions.
"""

from __future__ import annotations

from itertools import zip_longest

import onnx

from amp_transpiler.errors import GraphError
from amp_transpiler.ir.infer import type_proto
from amp_transpiler.ir.types import HALF, ONNX_TYPES
from amp_transpiler.passes.lowering.kernels import Types, kernels_of
from amp_transpiler.passes.lowering.lowered import Lowered
from amp_transpiler.passes.lowering.tensor_types import inferred, types_within

CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})
#: What has a kernel of float64 there.
_PRODUCTS = frozenset({"MatMul", "Gemm", "FusedMatMul"})
#: The arithmetic of convolutions is so many times that of the fp32 products at least.
_LEAST_SHARE = 1000


def widened(lowered: Lowered) -> Lowered:
    """The same, changed in place where tensor cores are to be had by it."""
    graph = lowered.model.graph
    narrow = any(value.dtype in HALF for value in lowered.tensors.values())
    if not narrow or all(node.op_type not in CONVOLUTIONS for node in graph.node):
        return lowered
    light = inferred(lowered)
    types = types_within(light)
    try:
        kernels, _ = kernels_of(lowered, light, types)
    except GraphError:  # of sizes that are not known
        return lowered
    products = [kernel for kernel in kernels if kernel.flops]
    wide = [kernel for kernel in products if kernel.dtype == "float32"]
    convolved = sum(k.flops * k.times for k in products if k.type in CONVOLUTIONS and k.dtype in HALF)
    alone = all(graph.node[kernel.node].op_type == kernel.type in _PRODUCTS for kernel in wide)
    if wide and alone and convolved >= _LEAST_SHARE * sum(kernel.flops for kernel in wide):
        _widen(lowered, {kernel.node for kernel in wide}, types)
    return lowered


def _widen(lowered: Lowered, chosen: set[int], types: Types) -> None:
    """Let these nodes read and make float64, between casts."""
    graph, cast = lowered.model.graph, dict[str, str]()
    pairs = [*zip_longest(graph.node, lowered.origins)]
    nodes, lowered.origins = list[onnx.NodeProto](), []

    def add(node: onnx.NodeProto, number: int) -> None:
        nodes.append(node)
        lowered.origins.append(pairs[number][1])

    def wide(name: str) -> str:
        made = f"{name}/float64"
        while made in types:
            made += "_"
        cast[name] = made
        graph.value_info.append(onnx.ValueInfoProto(name=made, type=type_proto("float64", types[name][1])))
        return made

    for number, (node, _) in enumerate(pairs):
        if number not in chosen:
            add(node, number)
            continue
        for name in dict.fromkeys(node.input):
            if name and name not in cast:
                add(onnx.helper.make_node("Cast", [name], [wide(name)], to=ONNX_TYPES["float64"]), number)
        (result,) = node.output
        product = onnx.NodeProto()
        product.CopyFrom(node)
        product.input[:] = [cast.get(name, "") for name in node.input]
        product.output[:] = [wide(result)]
        add(product, number)
        add(onnx.helper.make_node("Cast", [cast[result]], [result], to=ONNX_TYPES["float32"]), number)
    del graph.node[:]
    graph.node.extend(nodes)
