"""Few fp32 products beside many 16-bit convolutions, on CUDA: they are computed in float64.

onnxruntime (1.31, conv.cc) takes plans with tensor cores from cuDNN's list unless TF32 is allowed, whatever the element
type. A 16-bit convolution then takes what is left, if anything is: on an H200 convolutions of ResNet-50 that step over
positions took 0.7 to 0.8 ms backwards, and 0.07 to 0.11 ms with TF32 allowed. That changes nothing about 16-bit
operands, but would round those of an fp32 product in the same session, such as a head outside ``fp16_guard``, to ten
bits. One in float64 it leaves alone. GPUs compute in float64 up to 64 times slower than in fp32: so that is for
products that are next to nothing beside the convolutions.
"""

from __future__ import annotations

from itertools import zip_longest

import onnx

from amp_transpiler.errors import GraphError
from amp_transpiler.ir.control import every_node
from amp_transpiler.ir.infer import type_proto
from amp_transpiler.ir.opdef import flops_of
from amp_transpiler.ir.types import FLOATS, HALF, ONNX_TYPES
from amp_transpiler.passes.lowering.kernels import Types, kernels_of
from amp_transpiler.passes.lowering.lowered import Lowered
from amp_transpiler.passes.lowering.tensor_types import inferred, types_within

_CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})
#: What has a kernel of float64 there.
_PRODUCTS = frozenset({"MatMul", "Gemm", "FusedMatMul"})
#: The arithmetic of convolutions is so many times that of the fp32 products at least.
_LEAST_SHARE = 1000


def widened(lowered: Lowered) -> Lowered:
    """The same, changed in place where tensor cores are to be had by it; it says whether they are."""
    nodes = [node for node in every_node(lowered.model.graph.node) if flops_of(node.op_type, node.domain) is not None]
    narrow = any(value.dtype in HALF for value in lowered.tensors.values())
    if not narrow or all(node.op_type not in _CONVOLUTIONS for node in nodes):
        return lowered
    graph = inferred(lowered)
    types = types_within(graph)
    kinds = {types[name][0] if name in types else "float32" for node in nodes for name in node.input[:2] if name}
    lowered.tensor_cores = "float32" not in kinds or _changed(lowered, graph, types)
    return lowered


def _changed(lowered: Lowered, graph: onnx.GraphProto, types: Types) -> bool:
    """Whether the fp32 products were few beside 16-bit convolutions, and are of float64 now."""
    try:
        kernels, _ = kernels_of(lowered, graph, types)
    except GraphError:  # of sizes that are not known
        return False
    products = [kernel for kernel in kernels if kernel.flops]
    wide = [kernel for kernel in products if kernel.dtype in FLOATS - HALF]
    convolved = sum(k.flops * k.times for k in products if k.type in _CONVOLUTIONS and k.dtype in HALF)
    alone = all(lowered.model.graph.node[kernel.node].op_type == kernel.type in _PRODUCTS for kernel in wide)
    done = bool(wide) and alone and convolved >= _LEAST_SHARE * sum(kernel.flops for kernel in wide)
    if done:
        _widen(lowered, {kernel.node for kernel in wide if kernel.dtype == "float32"}, types)
    return done


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
