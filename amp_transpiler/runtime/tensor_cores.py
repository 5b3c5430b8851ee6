"""Which sessions on CUDA may let cuDNN use tensor cores for 16-bit convolutions.

onnxruntime (1.31, conv.cc) takes plans with tensor cores from cuDNN's list unless TF32 is allowed, whatever the element
type. A 16-bit convolution then takes what is left, if anything is: on an H200 convolutions of ResNet-50 that step over
positions took 0.7 to 0.8 ms backwards, and 0.07 to 0.11 ms with TF32 allowed. It changes nothing about 16-bit operands;
but products of fp32 in the same session would be computed in TF32, so a session that has one keeps to fp32. Few of them
are lowered to products of float64 (:mod:`amp_transpiler.passes.lowering.wide_products`).
"""

from __future__ import annotations

from dataclasses import replace

from amp_transpiler.ir.control import every_node
from amp_transpiler.ir.opdef import flops_of
from amp_transpiler.passes.lowering.lowered import Lowered
from amp_transpiler.passes.lowering.place import Place
from amp_transpiler.passes.lowering.tensor_types import inferred, types_within
from amp_transpiler.passes.lowering.wide_products import CONVOLUTIONS
from amp_transpiler.runtime.session import Settings


def with_tensor_cores(settings: Settings, place: Place, lowered: Lowered) -> Settings:
    """The settings of a session that may use them for all that it computes."""
    allows = place.kind == "cuda" and not settings.tf32 and needs_tensor_cores(lowered)
    return replace(settings, tf32=True) if allows else settings


def needs_tensor_cores(lowered: Lowered) -> bool:
    """Whether a lowered model has 16-bit convolutions, and no product of fp32, which TF32 would round."""
    graph = lowered.model.graph
    nodes = [node for node in every_node(graph.node) if flops_of(node.op_type, node.domain) is not None]
    if not any(node.op_type in CONVOLUTIONS for node in nodes):
        return False
    kinds = {name: kind for name, (kind, _) in types_within(inferred(lowered)).items()}
    return "float32" not in {kinds.get(name) or "float32" for node in nodes for name in node.input[:2] if name}
