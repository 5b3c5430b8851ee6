"""Golden programs in ONNX text: parse one, and compare a program with the one expected."""

from __future__ import annotations

import onnx
import onnx.parser

from amp_transpiler.ir.program import Program


def model(text: str, opset: int = 21, domains: str = "") -> onnx.ModelProto:
    """A model from the text of its graph."""
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}{domains}]>\n{text}')


def program(text: str, opset: int = 21, domains: str = "") -> Program:
    """A program from the text of its graph; float initializers of more than one element are parameters."""
    return Program.from_onnx(model(text, opset, domains))


def lines(graph: onnx.GraphProto, indent: str = "") -> list[str]:
    """A graph line by line: inputs, outputs and initializers with their types, and the nodes in order."""
    found = [f"{indent}{kind} {_type(v.type)} {v.name}" for kind, values in (("in", graph.input), ("out", graph.output))
             for v in values]  # fmt: skip
    for tensor in graph.initializer:
        values = onnx.numpy_helper.to_array(tensor).astype("float64").ravel().tolist()
        found.append(f"{indent}{onnx.TensorProto.DataType.Name(tensor.data_type)} {tensor.name} = {values}")
    for node in graph.node:
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        nested = {name: value for name, value in attributes.items() if isinstance(value, onnx.GraphProto)}
        shown = {name: _shown(value) for name, value in sorted(attributes.items()) if name not in nested}
        call = f"{node.op_type}({', '.join(node.input)})"
        found.append(f"{indent}{', '.join(node.output)} = {call} {shown or ''}".rstrip())
        for name, inner in sorted(nested.items()):
            found.append(f"{indent}  {name}:")
            found += lines(inner, indent + "    ")
    return found


def _type(proto: onnx.TypeProto) -> str:
    return onnx.TensorProto.DataType.Name(proto.tensor_type.elem_type)


def _shown(value: object) -> object:
    if isinstance(value, onnx.TensorProto):
        return onnx.TensorProto.DataType.Name(value.data_type), onnx.numpy_helper.to_array(value).tolist()
    return value


def assert_becomes(changed: Program, expected: str, opset: int = 21, domains: str = "") -> None:
    """``changed`` is the program of the text ``expected``, is sound, and ONNX's full check passes on it."""
    changed.verify()
    result, wanted = changed.to_onnx(), model(expected, opset, domains)
    onnx.checker.check_model(wanted, full_check=not domains)
    assert lines(result.graph) == lines(wanted.graph)
    onnx.checker.check_model(result, full_check=not domains)


def state(program: Program) -> list[object]:
    """Everything that a precision pass may change."""
    found: list[object] = []
    for op in program.walk():
        slots = [[v and (v.name, v.dtype) for v in side] for side in (op.inputs, op.outputs)]
        found.append((op.full_type, op.name, *slots, op.precision, op.reason))
    return found
