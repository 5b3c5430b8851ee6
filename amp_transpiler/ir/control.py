"""The graphs of If, Loop, Scan and SequenceMap: what goes in and comes out, and whether the node says as much."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import onnx

from amp_transpiler.ir.nodes import Operator, Variable


def nested_graphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The graphs that a node holds as attributes."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        else:
            yield from attribute.graphs


def every_node(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """The nodes, and those of the graphs nested in them."""
    for node in nodes:
        yield node
        for graph in nested_graphs(node):
            yield from every_node(graph.node)


def carried_slots(op: Operator) -> range:
    """The slots that a Loop or Scan (of opset 9 and later) begins its carried states with; none of other operators."""
    if op.type == "Loop":
        return range(2, max(len(op.inputs), 2))
    return range(len(op.inputs) - int(op.attrs["num_scan_inputs"])) if op.type == "Scan" else range(0)


class Crossings(NamedTuple):
    """Pairs of variables: what is handed into the nested graphs of an operator, with what it is called inside; what
    they make, with what it is called outside; and what they make, with the state that it is in the next turn."""

    entries: list[tuple[Variable | None, Variable]]
    results: list[tuple[Variable, Variable | None]]
    turns: list[tuple[Variable, Variable]]


def crossings(op: Operator) -> Crossings:
    """What an If, Loop or Scan hands into its graphs and out of them; nothing of other operators."""
    if op.full_type == "If":
        made = [pair for nested in op.attrs.programs for pair in zip(nested.outputs, op.outputs, strict=False)]
        return Crossings([], made, [])
    if op.full_type not in ("Loop", "Scan"):
        return Crossings([], [], [])
    body = op.attrs["body"]
    if op.type == "Loop":  # trip count and condition come first
        read, inside, given, states = op.inputs[2:], body.inputs[2:], body.outputs[1:], len(op.inputs) - 2
    else:  # in opset 8 the lengths of sequences come first
        read, inside, given = op.inputs[op.program.opset() < 9 :], body.inputs, body.outputs
        states = len(read) - int(op.attrs["num_scan_inputs"])
    entries, results = zip(read, inside, strict=False), zip(given, op.outputs, strict=False)
    return Crossings([*entries], [*results], [*zip(given[:states], inside[:states], strict=False)])


def _graph(node: onnx.NodeProto, name: str) -> onnx.GraphProto:
    found: onnx.GraphProto = next(attribute.g for attribute in node.attribute if attribute.name == name)
    return found


def _number(node: onnx.NodeProto, name: str) -> int:
    found: int = next(attribute.i for attribute in node.attribute if attribute.name == name)
    return found


def _counts(graph: onnx.GraphProto, name: str, inputs: int, outputs: int) -> str:
    """Where a graph has another number of inputs or outputs than its node hands in and takes out."""
    for kind, found, wanted in (("inputs", len(graph.input), inputs), ("outputs", len(graph.output), outputs)):
        if found != wanted:
            return f"has a graph '{name}' with {found} {kind}; the node's own ask for {wanted}"
    return ""


def _if(node: onnx.NodeProto) -> str:
    branches = ("then_branch", "else_branch")
    problems = [_counts(_graph(node, name), name, 0, len(node.output)) for name in branches]
    return next(filter(None, problems), "")


def _loop(node: onnx.NodeProto) -> str:
    carried = max(len(node.input) - 2, 0)
    return _counts(_graph(node, "body"), "body", 2 + carried, 1 + len(node.output)) or _states(node, carried)


def _scan(node: onnx.NodeProto) -> str:
    body, scanned, given = _graph(node, "body"), _number(node, "num_scan_inputs"), len(node.input)
    given -= len(body.input) == given - 1  # in opset 8 the lengths of sequences come first
    if not 1 <= scanned <= given:
        return f"has num_scan_inputs={scanned}, and {given} inputs"
    problem = _counts(body, "body", given, len(node.output)) or _states(node, given - scanned)
    if problem:
        return problem
    stacked = len(node.output) - (given - scanned)
    for name, wanted in (
        ("scan_input_axes", scanned),
        ("scan_input_directions", scanned),
        ("directions", scanned),
        ("scan_output_axes", stacked),
        ("scan_output_directions", stacked),
    ):
        entries = next((len(attribute.ints) for attribute in node.attribute if attribute.name == name), 0)
        if entries not in (0, wanted):
            return f"has {entries} entries in '{name}'; its inputs and outputs ask for {wanted}"
    return ""


def _states(node: onnx.NodeProto, states: int) -> str:
    found = len(node.output)
    return f"carries {states} states and has {found} outputs; each state is an output" if found < states else ""


def _sequence_map(node: onnx.NodeProto) -> str:
    return _counts(_graph(node, "body"), "body", len(node.input), len(node.output))


#: Operators of ai.onnx with graphs -> what is wrong with a node that fits its schema, as the rest of a sentence.
CONTROL: dict[str, Callable[[onnx.NodeProto], str]] = {
    "If": _if,
    "Loop": _loop,
    "Scan": _scan,
    "SequenceMap": _sequence_map,
}
