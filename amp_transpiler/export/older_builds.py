"""Kernels that newer builds of onnxruntime alone have, as operators of ONNX: older builds refuse files with them."""

from __future__ import annotations

from dataclasses import replace

import onnx

from amp_transpiler.ir.contrib_types import DOMAIN
from amp_transpiler.ir.control import every_node, nested_graphs
from amp_transpiler.passes.lowering.lowered import Lowered


def for_older_builds(lowered: Lowered) -> Lowered:
    """The same computation with the same bits. For what processors run, where that takes a few percent longer."""
    model = onnx.ModelProto()
    model.CopyFrom(lowered.model)
    _write_out(model.graph)
    domains = {"", *(node.domain for node in every_node(model.graph.node))}
    imports = [each for each in model.opset_import if each.domain in domains]
    del model.opset_import[:]
    model.opset_import.extend(imports)
    return replace(lowered, model=model)


def _write_out(graph: onnx.GraphProto) -> None:
    nodes = []
    for node in graph.node:
        for nested in nested_graphs(node):
            _write_out(nested)
        if node.op_type == "GatedAdd" and node.domain == DOMAIN:  # the product is rounded before the sum
            x, y, factor = node.input
            product = f"{node.output[0]}/product"
            nodes.append(onnx.helper.make_node("Mul", [y, factor], [product], product))
            nodes.append(onnx.helper.make_node("Add", [x, product], node.output, node.name))
        else:
            nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
