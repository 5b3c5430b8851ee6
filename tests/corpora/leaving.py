"""16-bit models made to go wrong: a sample of their inputs, and where and why they leave on each place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx

HEAD = '<ir_version: 8, opset_import: ["" : 17]>\n'


@dataclass(frozen=True)
class Case:
    """``leaves``: by kind of place the operator's type and the cause, "" for none; one for all. Weights and inputs are
    normal numbers, of which mean and width are given."""

    text: str
    feeds: dict[str, tuple[float, float]]
    leaves: dict[str, str] | str
    weights: dict[str, tuple[float, float]] = field(default_factory=dict)

    def on(self, kind: str) -> str:
        """Where and why it leaves on a place."""
        return self.leaves if isinstance(self.leaves, str) else self.leaves.get(kind, "")

    def model(self) -> onnx.ModelProto:
        """The model."""
        model, random = onnx.parser.parse_model(HEAD + self.text), np.random.default_rng(0)
        for weight in model.graph.value_info:
            array = _numbers(weight, self.weights[weight.name], random)
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, weight.name))
        del model.graph.value_info[:]
        return model

    def sample(self) -> dict[str, Any]:
        """Inputs."""
        random = np.random.default_rng(1)
        return {value.name: _numbers(value, self.feeds[value.name], random) for value in self.model().graph.input}


def _numbers(value: onnx.ValueInfoProto, of: tuple[float, float], random: np.random.Generator) -> Any:
    shape = [size.dim_value for size in value.type.tensor_type.shape.dim]
    dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
    return np.asarray(of[0] + of[1] * random.standard_normal(shape)).astype(dtype)


CASES = {
    "sums": Case(
        "m (float16[2,8192] x) => (float16[2,8] y) <float16[8192,8] w, float16[8] b>"
        " { a = Neg(x) g = Gemm(a, w, b) y = Relu(g) }",
        {"x": (0, 30)},
        {"webgpu": "Gemm lost sums"},
        {"w": (0, 0.1), "b": (0, 1)},
    ),
    "between": Case(  # of the first half of the summands the sum is 122,880, and the second half takes it off again
        "m (float16[2,8192] x) => (float16[2,8] y) <float16[8192,8] w, float16[8] b>"
        " { h, r = Split<axis=1>(x) n = Neg(r) a = Concat<axis=1>(h, n) g = Gemm(a, w, b) y = Neg(g) }",
        {"x": (30, 1)},
        {"webgpu": "Gemm overflow of a partial sum"},
        {"w": (1, 0), "b": (100, 1)},
    ),
    "harmless": Case(  # the product overflows, and the output is 1 all the same
        "m (float16[4,512] x) => (float16[4,16] y) <float16[512,16] w> { a = Relu(x) p = MatMul(a, w) y = Sigmoid(p) }",
        {"x": (40, 1)},
        "",
        {"w": (10, 0.1)},
    ),
    "softmax": Case(
        "m (float16[4,64] x) => (float16[4,64] y) <int64[1] axes>"
        " { e = Exp(x) s = ReduceSum(e, axes) d = Div(e, s) y = Neg(d) }",
        {"x": (12, 2)},
        "Exp overflow",
        {"axes": (1, 0)},
    ),
    "norm": Case(
        "m (float16[4,64] x) => (float16[4,64] y)"
        " { m = ReduceMean<axes=[1]>(x) d = Sub(x, m) q = Mul(d, d) v = ReduceMean<axes=[1]>(q) r = Sqrt(v) y = Div(d, r) }",
        {"x": (0, 400)},
        "Mul overflow",
    ),
    "mean": Case(
        "m (float16[4,256] x) => (float16[4,1] y) { a = Abs(x) m = ReduceMean<axes=[1]>(a) y = Neg(m) }",
        {"x": (1000, 10)},
        {"webgpu": "ReduceMean overflow of a partial sum"},
    ),
    "small": Case(
        "m (float16[4,64] x) => (float16[4,64] y) { q = Mul(x, x) c = Cast<to=1>(q) s = Sqrt(c) y = Cast<to=10>(s) }",
        {"x": (0, 1e-4)},
        "Mul underflow",
    ),
    "cast": Case(  # of a fp32 number beyond the format
        "m (float[4,64] x) => (float16[4,64] y) { q = Mul(x, x) c = Cast<to=10>(q) y = Sqrt(c) }",
        {"x": (300, 1)},
        "Cast overflow",
    ),
    "tail": Case(  # as converters write it that keep the type of outputs
        "m (float[4,64] x) => (float[4,8] y) <float16[64,8] w> { h = Cast<to=10>(x) g = MatMul(h, w) y = Cast<to=1>(g) }",
        {"x": (300, 1)},
        "MatMul overflow",
        {"w": (10, 1)},
    ),
    "narrowed": Case(  # at the very end
        "m (float[4,64] x) => (float16[4,64] y) { q = Mul(x, x) y = Cast<to=10>(q) }", {"x": (300, 1)}, "Cast overflow"
    ),
    "masked": Case(  # the mask overflows and does no harm, and what comes after it does
        "m (float16[1,4096] x) => (float16[1,2] y) <float16[1,4096] large, float16[4096,2] w>"
        " { a = Sub(x, large) e = Sigmoid(a) d = Add(x, e) y = MatMul(d, w) }",
        {"x": (-10000, 1000)},
        {"webgpu": "MatMul lost sums"},
        {"large": (60000, 100), "w": (2e-4, 1e-4)},
    ),
    "compared": Case(  # what overflows is above the rest all the same
        "m (float16[4,64] x) => (bool[4,64] y) <float16[64,64] w> { p = MatMul(x, w) y = Greater(p, x) }",
        {"x": (100, 1)},
        "",
        {"w": (20, 0.1)},
    ),
    "apart": Case(
        "m (float16[4,64] x) => (float16[4,64] y) <float16 one> { a = Add(x, one) y = Sub(a, one) }",
        {"x": (0, 1e-4)},
        "Sub rounding",
        {"one": (1, 0)},
    ),
    "divisor": Case(  # one row in four sinks: too little to be seen in the error, before it divides
        "m (float16[1,64] t, float16[3,64] x) => (float16[4,64] y) <int64[1] axes>"
        " { a = Concat<axis=0>(t, x) q = Mul(a, a) s = ReduceSum(q, axes) r = Sqrt(s) y = Div(a, r) }",
        {"t": (0, 1e-5), "x": (0, 1)},
        "Mul underflow",
        {"axes": (1, 0)},
    ),
    "undefined": Case(
        "m (float16[4,64] x) => (float16[4,64] y) { l = Log(x) y = Neg(l) }",
        {"x": (0, 1)},
        "Log no numbers in fp32 either",
    ),
}
