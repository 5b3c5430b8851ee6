"""Random numbers in models that are compared: both draw the same."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import onnx

from amp_transpiler.ir.control import every_node, nested_graphs
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.passes.lowering.lowered import Lowered
from amp_transpiler.program import Program


def draws(operator: Operator) -> bool:
    """Whether an operator draws random numbers, if only where a run tells it to."""
    told = operator.full_type == "Dropout" and operator.input(2) is not None
    return told or traits_of(operator).random


def seed_draws(lowered: Lowered, program: Program) -> None:
    """Give each node that draws random numbers a seed, that of its operator in ``program``, unless it has one.

    Without one onnxruntime draws others in every session. An operator and its conversion have one name; where they
    have none, they are as many in the program, for what they make may be called otherwise.
    """
    unnamed = (op for op in program.walk() if not op.name and draws(op))
    numbers = {op: str(number) for number, op in enumerate(unnamed)}
    for node, op in _nodes(lowered):
        itself = op is not None and draws(op) and (node.op_type, node.domain) == (op.type, op.domain)
        if op is None or not itself or any(attribute.name == "seed" for attribute in node.attribute):
            continue
        known_by = op.name or numbers.get(op) or next(v.name for v in op.outputs if v is not None)
        seed = zlib.crc32(known_by.encode()) & 0xFFFF  # float32 holds it, the type of some seeds
        as_float = not op.domain and op.type != "Dropout"
        node.attribute.append(onnx.helper.make_attribute("seed", float(seed) if as_float else seed))


def _nodes(lowered: Lowered) -> Iterator[tuple[onnx.NodeProto, Operator | None]]:
    """Nodes, those of nested graphs too, with their operators."""
    for node, op in zip(lowered.model.graph.node, lowered.origins, strict=False):
        yield node, op
        for inner in every_node(each for nested in nested_graphs(node) for each in nested.node):
            yield inner, next((lowered.inner[name] for name in inner.output if name in lowered.inner), None)
