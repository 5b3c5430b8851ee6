"""A text detector in small: a residual backbone, two scales joined, and a sigmoid so sharp that 16 bit shows."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper


class _Net:
    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def op(self, type_: str, *inputs: str, **attributes: object) -> str:
        name = f"{type_.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(type_, list(inputs), [name], name, **attributes))
        return name

    def const(self, array: np.ndarray) -> str:
        name = f"w_{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(array, np.float32), name))
        return name

    def conv(self, x: str, i: int, o: int, k: int, stride: int = 1, group: int = 1, act: bool = True) -> str:
        weight = self.rng.standard_normal((o, i // group, k, k)) / np.sqrt(k * k * i / group) * (1.3 if act else 0.4)
        y = self.op("Conv", x, self.const(weight), strides=[stride] * 2, pads=[k // 2] * 4, group=group)
        offset = [
            self.const(a) for a in (1 + self.rng.random(o), self.rng.standard_normal(o) / 5, np.zeros(o), np.ones(o))
        ]
        y = self.op("BatchNormalization", y, *offset)
        return self.op("HardSwish", y) if act else y

    def up(self, x: str) -> str:
        return self.op("Resize", x, "", self.const(np.array([1, 1, 2, 2])), mode="nearest")

    def model(self, inputs: list[onnx.ValueInfoProto], output: str) -> onnx.ModelProto:
        out = helper.make_tensor_value_info(output, TensorProto.FLOAT, None)
        graph = helper.make_graph(self.nodes, "detector", inputs, [out], self.weights)
        return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 17)])


def detector(
    blocks: int, size: int = 48, seed: int = 0, k: float = 50.0
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """The model, with ``blocks`` residual blocks of eight operators at each scale, and noise to calibrate it on."""
    net, width = _Net(seed), 8
    x = fine = net.conv("x", 3, width, 3, 2)
    for number in range(2 * blocks):
        stride = 2 if number == blocks else 1
        fine = x if number <= blocks else fine
        y = net.conv(x, width, 2 * width, 1)
        y = net.conv(y, 2 * width, 2 * width, 3, stride, 2 * width)
        y = net.conv(y, 2 * width, width, 1, act=False)
        x = y if stride == 2 else net.op("Add", x, y)
    y = net.op("Concat", fine, net.up(x), axis=1)
    y = net.conv(net.up(net.conv(y, 2 * width, width, 3)), width, 4, 3)
    logits = net.op("Conv", y, net.const(net.rng.standard_normal((1, 4, 1, 1))))
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, size, size])]
    feeds = {"x": np.random.default_rng(seed + 1).standard_normal((1, 3, size, size)).astype(np.float32)}
    session = onnxruntime.InferenceSession(net.model(inputs, logits).SerializeToString())
    found = session.run(None, feeds)[0]
    # of noise a trained detector says "no" nearly everywhere
    moved = net.op(
        "Add", net.op("Mul", logits, net.const(0.05 / found.std())), net.const(-0.1 - 0.05 * found.mean() / found.std())
    )
    return net.model(inputs, net.op("Sigmoid", net.op("Mul", moved, net.const(k)))), feeds
