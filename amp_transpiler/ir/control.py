"""The graphs of If, Loop, Scan and SequenceMap against what their node says: how many values go in, and come out."""

from __future__ import annotations

from collections.abc import Callable

import onnx

from ..errors import GraphError


def _graph(node: onnx.NodeProto, name: str) -> onnx.GraphProto:
    return next(attribute.g for attribute in node.attribute if attribute.name == name)


def _number(node: onnx.NodeProto, name: str) -> int:
    return next(attribute.i for attribute in node.attribute if attribute.name == name)


def _demand(graph: str, kind: str, found: int, wanted: int, what: str) -> None:
    if found != wanted:
        raise GraphError(f"{what}: its graph '{graph}' has {found} {kind}; the node's own ask for {wanted}")


def _if(node: onnx.NodeProto, what: str) -> None:
    for name in ("then_branch", "else_branch"):
        branch = _graph(node, name)
        _demand(name, "inputs", len(branch.input), 0, what)
        _demand(name, "outputs", len(branch.output), len(node.output), what)


def _loop(node: onnx.NodeProto, what: str) -> None:
    body, carried = _graph(node, "body"), max(len(node.input) - 2, 0)
    _demand("body", "inputs", len(body.input), 2 + carried, what)
    _demand("body", "outputs", len(body.output), 1 + len(node.output), what)
    _check_states(node, carried, what)


def _scan(node: onnx.NodeProto, what: str) -> None:
    body, scanned = _graph(node, "body"), _number(node, "num_scan_inputs")
    given = len(node.input)
    if len(body.input) != given - 1:  # in opset 8 the lengths of sequences come first
        _demand("body", "inputs", len(body.input), given, what)
    states = len(body.input) - scanned
    if scanned < 1 or states < 0:
        raise GraphError(f"{what} has num_scan_inputs={scanned}; its graph 'body' has {len(body.input)} inputs")
    _demand("body", "outputs", len(body.output), len(node.output), what)
    _check_states(node, states, what)
    stacked = len(node.output) - states
    for name, wanted in (("scan_input_axes", scanned), ("scan_input_directions", scanned), ("directions", scanned),
                         ("scan_output_axes", stacked), ("scan_output_directions", stacked)):  # fmt: skip
        entries = next((len(attribute.ints) for attribute in node.attribute if attribute.name == name), 0)
        if entries not in (0, wanted):
            raise GraphError(f"{what} has {entries} entries in '{name}'; its inputs and outputs ask for {wanted}")


def _check_states(node: onnx.NodeProto, states: int, what: str) -> None:
    if len(node.output) < states:
        raise GraphError(f"{what} carries {states} states and has {len(node.output)} outputs; each state is an output")


def _sequence_map(node: onnx.NodeProto, what: str) -> None:
    body = _graph(node, "body")
    _demand("body", "inputs", len(body.input), len(node.input), what)
    _demand("body", "outputs", len(body.output), len(node.output), what)


#: Operators of ai.onnx with graphs -> the check of one, which is known to fit its schema; GraphError.
CONTROL: dict[str, Callable[[onnx.NodeProto, str], None]] = {
    "If": _if, "Loop": _loop, "Scan": _scan, "SequenceMap": _sequence_map,
}  # fmt: skip
