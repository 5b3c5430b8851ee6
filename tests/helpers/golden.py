"""Golden programs in ONNX text: parse one, and compare a program with the one expected."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import onnx
import onnx.parser

from amp_transpiler.program import Program
from tests.helpers import sessions
from tests.helpers.node_tests import node_tests


def model(text: str, opset: int = 21, domains: str = "") -> onnx.ModelProto:
    """A model from the text of its graph."""
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}{domains}]>\n{text}')


def program(text: str, opset: int = 21, domains: str = "") -> Program:
    """A program from the text of its graph; float initializers of more than one element are parameters."""
    return Program.from_onnx(model(text, opset, domains))


def lines(graph: onnx.GraphProto, indent: str = "") -> list[str]:
    """A graph line by line: inputs, outputs and initializers with their types, and the nodes in order."""
    found = [
        f"{indent}{kind} {_type(v.type)} {v.name}"
        for kind, values in (("in", graph.input), ("out", graph.output))
        for v in values
    ]
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
        slots = [[None if v is None else (v.name, v.dtype) for v in side] for side in (op.inputs, op.outputs)]
        found.append((op.full_type, op.name, *slots, op.precision, op.reason))
    return found


def reasons(program: Program) -> dict[str, str]:
    """Reason by first output, without the casts that the pass inserted."""
    return {op.outputs[0].name: op.reason for op in program.walk() if not op.reason.startswith("cast: ")}


#: Every kind of decision in one program.
DEEP = """main (float[2,2] x, float[2,2] w, float[2,2] u, int64[2] ids) => (float[2,2] y, float[1,1] z, int64[2] n)
<float[2,2] table = {1, 2, 3, 4}, float[2] scale = {1, 1}>
{
  m = MatMul(x, w)
  g = Gather(table, ids)
  a = Add(m, u)
  b = Add(a, g)
  l = LayerNormalization(a, scale)
  s = Softmax(l)
  t = Transpose(l)
  c = Concat<axis = 0>(t, m)
  k = MatMul(s, t)
  y = Add(k, b)
  z = ReduceMean<keepdims = 1>(c)
  n = Shape(k)
}"""


def shuffled(p: Program, seed: int) -> Program:
    """The same program, its operators and variables added in another order."""
    rng, new = random.Random(seed), Program(p.name)
    new.info.opsets = dict(p.info.opsets)
    for v in p.inputs:
        new.add_input(v.name, v.dtype, v.shape)
    rest = [v for v in p.variables if not v.is_input]
    for v in rng.sample(rest, len(rest)):
        new.add_variable(v.name, v.dtype, v.shape, persistable=v.persistable, trainable=v.trainable, data=v.data)
    for op in rng.sample(p.operators, len(p.operators)):
        new.add_operator(
            op.type, [new.var(v.name) for v in op.inputs], [new.var(v.name) for v in op.outputs], attrs=op.attrs.copy()
        )
    new.outputs = [new.var(v.name) for v in p.outputs]
    return new


def run(p: Program, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The program's outputs, by onnxruntime on the CPU."""
    return sessions.run(p.to_onnx(), feeds)


def backend_models() -> Iterator[tuple[str, onnx.ModelProto]]:
    """Every twelfth node test of onnx."""
    for case in node_tests()[::12]:
        yield case.name, case.model
