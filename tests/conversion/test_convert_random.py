"""Random models converted: typed, nested, with shared, unnamed and fed-over tensors, in every mode.

Values stay near 1 (every step is bounded), so that a 16-bit result can be compared with the fp32 one.
``pytest tests/conversion/test_convert_random.py --examples 5000`` takes as many as asked for.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import amp_transpiler as amp
from tests.helpers.converting import faithful, graphs, off, well_formed
from tests.helpers.sessions import session

SIZE = 6
SHAPE = [SIZE, SIZE]
OPSETS = [9, 11, 13, 16, 17, 18, 20, 21, 22, 23]


class Graph:
    """A random graph of tensors [6, 6]."""

    def __init__(self, rng: random.Random, opset: int, outer: Graph | None = None) -> None:
        self.rng, self.opset, self.outer = rng, opset, outer
        self.root: Graph = outer.root if outer is not None else self
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: list[str] = []
        if outer is None:
            self.count = 0
            self.initializers: list[onnx.TensorProto] = []
            self.weights: list[str] = []

    def name(self, prefix: str) -> str:
        self.root.count += 1
        return f"{prefix}_{self.root.count}"

    def any(self) -> str:
        """A tensor of this graph, or one that it captures."""
        known = list(self.tensors)
        around = self.outer
        while around is not None:
            known += around.tensors
            around = around.outer
        return self.rng.choice(known[-8:])

    def weight(self) -> str:
        """A weight, often one that is used already."""
        root = self.root
        if root.weights and self.rng.random() < 0.4:
            return self.rng.choice(root.weights)
        name = self.name("w")
        values = np.random.default_rng(root.count).uniform(-1, 1, SHAPE).astype(np.float32) / 2
        root.initializers.append(numpy_helper.from_array(values, name))
        root.weights.append(name)
        return name

    def add(self, op: str, inputs: list[str], outputs: int = 1, **attributes: Any) -> str:
        made = [self.name("t") for _ in range(outputs)]
        named = self.rng.random() < 0.5
        self.nodes.append(helper.make_node(op, inputs, made, name=self.name(f"n/{op}") if named else "", **attributes))
        return made[0]

    def step(self, depth: int) -> None:
        """One more tensor, by one operator or a few that belong together."""
        kinds = (
            ["unary"] * 4
            + ["binary"] * 4
            + ["matmul"] * 4
            + ["norm", "softmax", "move", "reduce", "cast", "where", "split", "statistics", "copy", "quantised"]
        )
        kinds += ["if", "loop", "scan"] if depth < 2 else []
        self.tensors.append(getattr(self, f"_{self.rng.choice(kinds)}")(depth))

    # -- steps -----------------------------------------------------------------------------------------------
    def _unary(self, depth: int) -> str:
        kinds = ["Relu", "Sigmoid", "Tanh", "Neg", "Abs", "Softsign", "Identity", "HardSigmoid", "Erf", "Sin"]
        return self.add(self.rng.choice(kinds), [self.any()])

    def _binary(self, depth: int) -> str:
        other = self.weight() if self.rng.random() < 0.3 else self.any()
        bounded = self.add("Tanh", [self.any()])
        return self.add(self.rng.choice(["Add", "Sub", "Mul", "Max", "Min"]), [bounded, other])

    def _matmul(self, depth: int) -> str:
        inputs = [self.any(), self.weight()]
        if self.rng.random() < 0.3:
            return self.add("Gemm", [*inputs, self.weight()], transB=1)
        return self.add("MatMul", inputs)

    def _norm(self, depth: int) -> str:
        centred = self.add("Sub", [(x := self.any()), self._mean(x)])
        squares = self.add("Mul", [centred, centred])
        deviation = self.add("Sqrt", [self.add("Add", [self._mean(squares), self._scalar(0.1)])])
        return self.add("Div", [centred, deviation])

    def _statistics(self, depth: int) -> str:
        near = [self._vector() for _ in range(4)]
        return self.add("BatchNormalization", [self.add("Tanh", [self.any()]), *near])

    def _vector(self) -> str:
        """Numbers around 1, in an initializer or a Constant."""
        name = self.name("v")
        values = np.random.default_rng(self.root.count).uniform(0.5, 1.5, SIZE).astype(np.float32)
        tensor = numpy_helper.from_array(values, name)
        if self.rng.random() < 0.3:
            return self.add("Constant", [], value=tensor)
        self.root.initializers.append(tensor)
        return name

    def _copy(self, depth: int) -> str:
        return self.add("Identity", [self.any()])

    def _quantised(self, depth: int) -> str:
        scale = [self._scalar(0.01), self._zero()]
        bounded = self.add("QuantizeLinear", [self.add("Sin", [self.weight()]), *scale])
        return self.add("DequantizeLinear", [bounded, *scale])

    def _zero(self) -> str:
        name = self.name("z")
        self.root.initializers.append(numpy_helper.from_array(np.array(0, np.int8), name))
        return name

    def _mean(self, x: str) -> str:
        if self.opset < 18:
            return self.add("ReduceMean", [x], axes=[1], keepdims=1)
        return self.add("ReduceMean", [x, self._integers([1])], keepdims=1)

    def _scalar(self, value: float) -> str:
        name = self.name("c")
        tensor = numpy_helper.from_array(np.array(value, np.float32), name)
        if self.rng.random() < 0.5:
            self.root.initializers.append(tensor)
            return name
        return self.add("Constant", [], value=tensor)

    def _integers(self, values: list[int]) -> str:
        name = self.name("i")
        self.root.initializers.append(numpy_helper.from_array(np.array(values, np.int64), name))
        return name

    def _softmax(self, depth: int) -> str:
        return self.add("Softmax", [self.any()], axis=1)

    def _move(self, depth: int) -> str:
        if self.rng.random() < 0.5:
            return self.add("Transpose", [self.any()], perm=[1, 0])
        flat = self.add("Reshape", [self.any(), self._integers([SIZE * SIZE])])
        return self.add("Reshape", [flat, self._integers(SHAPE)])

    def _reduce(self, depth: int) -> str:
        return self.add("Add", [self._mean(self.any()), self.any()])

    def _cast(self, depth: int) -> str:
        target = self.rng.choice([TensorProto.FLOAT16, TensorProto.DOUBLE])
        return self.add("Cast", [self.add("Cast", [self.any()], to=target)], to=TensorProto.FLOAT)

    def _where(self, depth: int) -> str:
        # of a weight: a number that a model computes may round to zero, and then another one is chosen
        chosen = self.add("Cast", [self.add("Relu", [self.weight()])], to=TensorProto.BOOL)
        return self.add("Where", [chosen, self.any(), self.any()])

    def _split(self, depth: int) -> str:
        shape = {"num_outputs": 2} if self.opset >= 18 else {}
        self.add("Split", [self.any()], 2, axis=1, **shape)
        first, second = self.nodes[-1].output
        return self.add("Concat", [second, first], axis=1)

    # -- nested graphs ----------------------------------------------------------------------------------------
    def _body(self, depth: int, given: list[str]) -> Graph:
        body = Graph(self.rng, self.opset, self)
        body.tensors = list(given)
        for _ in range(self.rng.randint(1, 3)):
            body.step(depth + 1)
        return body

    def _graph(
        self, body: Graph, inputs: list[onnx.ValueInfoProto], outputs: list[onnx.ValueInfoProto]
    ) -> onnx.GraphProto:
        return helper.make_graph(body.nodes, self.name("g"), inputs, outputs)

    def _if(self, depth: int) -> str:
        branches = {}
        for name in ("then_branch", "else_branch"):
            body = self._body(depth, [])
            branches[name] = self._graph(body, [], [value(body.tensors[-1])])
        return self.add("If", ["flag"], **branches)

    def _loop(self, depth: int) -> str:
        state, count, going = self.name("s"), self.name("k"), self.name("b")
        body = self._body(depth, [state])
        kept = body.add("Identity", [going])
        new = body.add("Tanh", [body.tensors[-1]])
        infos = [
            helper.make_tensor_value_info(count, TensorProto.INT64, []),
            helper.make_tensor_value_info(going, TensorProto.BOOL, []),
        ]
        graph = self._graph(
            body, [*infos, value(state)], [helper.make_tensor_value_info(kept, TensorProto.BOOL, []), value(new)]
        )
        trips = self._integers([2])
        scalar = self.add("Squeeze", [trips]) if self.opset >= 13 else self.add("Squeeze", [trips], axes=[0])
        return self.add("Loop", [scalar, "", self.any()], body=graph)

    def _scan(self, depth: int) -> str:
        row, state = self.name("r"), self.name("s")
        body = Graph(self.rng, self.opset, self)
        new = body.add("Tanh", [body.add("Add", [state, row])])
        made = body.add("Sigmoid", [new])
        graph = self._graph(body, [value(state, [SIZE]), value(row, [SIZE])], [value(new, [SIZE]), value(made, [SIZE])])
        start = (
            self.add("ReduceMax", [self.any(), self._integers([0])], keepdims=0)
            if self.opset >= 18
            else self.add("ReduceMax", [self.any()], axes=[0], keepdims=0)
        )
        self.add("Scan", [start, self.any()], 2, body=graph, num_scan_inputs=1)
        return self.nodes[-1].output[1]


def value(name: str, shape: list[int] | None = None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, SHAPE if shape is None else shape)


def random_model(seed: int) -> onnx.ModelProto:
    """The model of a seed."""
    rng = random.Random(seed)
    opset = rng.choice(OPSETS)
    graph = Graph(rng, opset)
    graph.tensors = ["x", "y"]
    for _ in range(rng.randint(2, 12)):
        graph.step(0)
    outputs = sorted({graph.tensors[-1], *rng.sample(graph.tensors[2:], k=min(2, len(graph.tensors) - 2))})
    inputs = [value("x"), value("y"), helper.make_tensor_value_info("flag", TensorProto.BOOL, [])]
    if rng.random() < 0.2 and graph.weights:  # an initializer that the caller may feed over
        inputs.append(value(graph.weights[0]))
    proto = helper.make_graph(graph.nodes, "random", inputs, [value(name) for name in outputs], graph.initializers)
    return helper.make_model(proto, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def check(seed: int) -> bool:
    """Convert the model of a seed in a way of that seed, and put it to the proof; False for no runnable model."""
    rng = random.Random(-seed)
    model = random_model(seed)
    data = np.random.default_rng(seed)
    feed = {
        "x": data.uniform(-1, 1, SHAPE).astype(np.float32),
        "y": data.uniform(-1, 1, SHAPE).astype(np.float32),
        "flag": np.array(rng.random() < 0.5),
    }
    given = {i.name for i in model.graph.initializer}
    try:
        wanted = session(model).run(None, feed)
    except Exception:  # onnxruntime's errors have no common base; a model that it cannot run is no test of ours
        return False
    mode, dtype = rng.choice(["pure", "mixed", "auto"]), rng.choice(["float16", "float16", "bfloat16"])
    options: dict[str, Any] = {"mode": mode, "dtype": dtype, "keep_io": rng.random() < 0.7}
    if mode == "auto" and rng.random() < 0.5:
        options["calibration"] = feed
    program = amp.convert(model, **options)
    converted = program.to_onnx()
    well_formed(converted, dtype)
    read = {name for graph in graphs(converted.graph) for node in graph.node for name in node.input}
    read |= {value.name for graph in graphs(converted.graph) for value in (*graph.output, *converted.graph.input)}
    assert {tensor.name for graph in graphs(converted.graph) for tensor in graph.initializer} <= read
    typed = {i.name: i.type.tensor_type.elem_type for i in converted.graph.input}
    fed = {name: _like(feed[name], typed[name]) for name in feed if name not in given}
    error = max(
        off(np.asarray(got).astype(np.float32), want) for got, want in zip(faithful(program, fed), wanted, strict=True)
    )
    steps = len(model.graph.node)
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    assert error <= 40 * unit * (1 + steps) ** 0.5, f"seed {seed}: {options}, off by {error:.3g}"
    if "calibration" not in options:
        again = amp.convert(converted, **options).to_onnx()
        assert again.SerializeToString(deterministic=True) == converted.SerializeToString(deterministic=True)
    return True


def _like(array: np.ndarray, kind: int) -> np.ndarray:
    return array.astype(onnx.helper.tensor_dtype_to_np_dtype(kind))


def test_random_models(request: pytest.FixtureRequest) -> None:
    failures, run, examples = [], 0, request.config.getoption("--examples")
    for seed in range(examples):
        try:
            run += check(seed)
        except Exception as error:  # whatever it is, the seed is what a reader needs
            failures.append(f"seed {seed}: {type(error).__name__}: {error}")
    assert not failures, "\n".join(failures[:10])
    assert run >= 0.95 * examples
