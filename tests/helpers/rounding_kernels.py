"""Single kernels of onnxruntime's WebGPU provider, fed with sums of known rounding or compared with float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper
from scipy import special

from tests.helpers.webgpu_sessions import session

Array = np.ndarray[Any, Any]
AXIS = {"axes": np.array([1], np.int64)}
_CONTRIB = "com.microsoft"


def opset_of(operator: str) -> int:
    """The opset of a model of this operator alone: 18, or the first that has it."""
    return 20 if operator == "Gelu" else 18


def run(operator: str, feeds: Mapping[str, Array], /, domain: str = "", **attrs: Any) -> Array:
    """The first result of one operator on the device; integers become constants. The session refuses the CPU."""
    return kernel(operator, feeds, domain, **attrs)(feeds)


def kernel(
    operator: str, feeds: Mapping[str, Array], /, domain: str = "", **attrs: Any
) -> Callable[[Mapping[str, Array]], Array]:
    """The same for feeds of these shapes."""
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(each.dtype), each.shape)
        for name, each in feeds.items()
        if each.dtype != np.int64
    ]
    constants = [onnx.numpy_helper.from_array(each, name) for name, each in feeds.items() if each.dtype == np.int64]
    node = helper.make_node(operator, list(feeds), ["y"], domain=domain, **attrs)
    made = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT16, None)
    opsets = [helper.make_opsetid("", opset_of(operator)), helper.make_opsetid(_CONTRIB, 1)]
    graph = helper.make_graph([node], "kernel", inputs, [made], constants)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    made_of = session(model, strict=True)
    return lambda feeds: np.asarray(made_of.run(None, {each.name: feeds[each.name] for each in inputs})[0])


@dataclass(frozen=True)
class Sum:
    """A kernel that adds up ``count`` summands: ``add(rows, weights)`` gives the sum of each row, times the weights.

    A row has its summands in the order in which kernels that add in turn come to them. ``where``: what the data file
    says of the operands of such a kernel. ``atomic``: threads add with atomic operations, each when its turn comes, which
    may be in another order each time.
    """

    operator: str
    label: str
    count: int
    add: Callable[..., Array]
    where: str = ""
    atomic: bool = False


def _ones(*shape: int) -> Array:
    return np.ones(shape, np.float16)


def _columns(weights: Array | None, count: int, width: int) -> Array:
    column = _ones(count) if weights is None else weights
    return np.repeat(column[:, None], width, 1)


def _matmul(width: int, batch: tuple[int, ...] = (), rows_at_once: int = 0) -> Callable[..., Array]:
    def add(rows: Array, weights: Array | None = None) -> Array:
        right = _columns(weights, rows.shape[1], width)
        size = rows_at_once or len(rows)
        made = []
        for start in range(0, len(rows), size):
            left = np.zeros((size, rows.shape[1]), np.float16)
            part = rows[start : start + size]
            left[: len(part)] = part
            whole = np.broadcast_to(left, (*batch, *left.shape)), np.broadcast_to(right, (*batch, *right.shape))
            result = run("MatMul", dict(zip("ab", map(np.ascontiguousarray, whole), strict=True)))
            made.append(result.reshape(-1, *result.shape[-2:])[-1][: len(part), -1])
        return np.concatenate(made)

    return add


def _gemm(width: int, trans_a: int, trans_b: int) -> Callable[..., Array]:
    def add(rows: Array, weights: Array | None = None) -> Array:
        count = 4 * -(-len(rows) // 4)
        left, right = np.zeros((count, rows.shape[1]), np.float16), _columns(weights, rows.shape[1], width)
        left[: len(rows)] = rows
        feeds = {"a": left.T.copy() if trans_a else left, "b": right.T.copy() if trans_b else right}
        return run("Gemm", feeds, transA=trans_a, transB=trans_b)[: len(rows), -1]

    return add


def _conv(outputs: int, kernel: tuple[int, ...], group: int = 1) -> Callable[..., Array]:
    def add(rows: Array, weights: Array | None = None) -> Array:
        shape, last = (len(rows), *kernel, -1), len(kernel) + 1
        x = np.moveaxis(rows.reshape(shape), last, 1)
        w = np.moveaxis((_ones(rows.shape[1]) if weights is None else weights).reshape(1, *kernel, -1), last, 1)
        x, w = np.concatenate([x] * group, 1), np.repeat(w, outputs * group, 0)
        made = run("Conv", {"x": np.ascontiguousarray(x), "w": w}, group=group)
        return made.reshape(*made.shape[:2], -1)[:, -1, 0]

    return add


def _conv_transpose(outputs: int, kernel: tuple[int, ...], group: int = 1) -> Callable[..., Array]:
    def add(rows: Array, weights: Array | None = None) -> Array:
        shape, last = (len(rows), *kernel, -1), len(kernel) + 1
        x = np.moveaxis(rows.reshape(shape), last, 1)
        w = (_ones(rows.shape[1]) if weights is None else weights).reshape(*kernel, -1)
        w = np.flip(np.moveaxis(w, -1, 0)[:, None], range(2, last + 1))
        x, w = np.concatenate([x] * group, 1), np.concatenate([np.repeat(w, outputs, 1)] * group, 0)
        made = run("ConvTranspose", {"x": np.ascontiguousarray(x), "w": np.ascontiguousarray(w)}, group=group)
        return made[(slice(None), -1, *(k - 1 for k in kernel))]

    return add


def _einsum(rows: Array, weights: Array | None = None) -> Array:
    return run("Einsum", {"a": rows, "b": _columns(weights, rows.shape[1], 8)}, equation="ik,kj->ij")[:, -1]


def _reduce(operator: str, first: bool = False) -> Callable[..., Array]:
    def add(rows: Array) -> Array:
        x, axes = (np.ascontiguousarray(rows.T), np.array([0], np.int64)) if first else (rows, AXIS["axes"])
        sums = run(operator, {"x": x, "axes": axes}, keepdims=0).astype(np.float64)
        return sums * rows.shape[1] if operator == "ReduceMean" else sums

    return add


def _to_one(operator: str) -> Callable[..., Array]:
    """The reduction of each row by itself."""

    def add(rows: Array) -> Array:
        to_one = kernel(operator, {"x": rows[0]}, keepdims=0)
        return np.array([to_one({"x": row}) for row in rows], np.float64)

    return add


def _pool(operator: str, side: int, **attrs: Any) -> Callable[..., Array]:
    def add(rows: Array) -> Array:
        x = rows.reshape(-1, 1, side, side)  # few at a time: of many results other kernels may add up otherwise
        means = [run(operator, {"x": x[n : n + 64]}, **attrs) for n in range(0, len(x), 64)]
        return np.concatenate(means).reshape(-1).astype(np.float64) * rows.shape[1]

    return add


def _cumsum(rows: Array) -> Array:
    return run("CumSum", {"x": rows, "axis": np.array(1, np.int64)})[:, -1]


def _scattered(rows: Array) -> Array:
    updates = np.ascontiguousarray(rows.T)
    feeds = {"x": np.zeros((2, len(rows)), np.float16), "at": np.zeros(updates.shape, np.int64), "updates": updates}
    return kernel("ScatterElements", feeds, axis=0, reduction="add")(feeds)[0]


#: Operators whose summands are products.
PRODUCTS = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum"})
_FOURS = "b transposed, vectors of four"
_FEW_LARGE = "large windows, few results"
ONE = "one result"
SUMS = (
    *(Sum("MatMul", f"MatMul, width {n}, {k}", k, _matmul(n)) for n, k in ((64, 64), (8, 96), (7, 63), (4, 5), (3, 4))),
    *(Sum("MatMul", f"MatMul, {m} rows at once", 64, _matmul(64, (), m)) for m in (1, 3, 8, 64)),
    *(Sum("MatMul", f"MatMul, batch {b}", 64, _matmul(16, b)) for b in ((3,), (2, 2))),
    Sum("MatMul", "MatMul, 300 summands", 300, _matmul(40)),
    *(Sum("Gemm", f"Gemm, width 64, transA {t}", 64, _gemm(64, t, 0)) for t in (0, 1)),
    *(Sum("Gemm", f"Gemm, width 7, transA {t}", 63, _gemm(7, t, 0)) for t in (0, 1)),
    *(Sum("Gemm", f"Gemm, width {n}, transB, transA {t}", 63, _gemm(n, t, 1)) for t in (0, 1) for n in (64, 7)),
    *(Sum("Gemm", f"Gemm, width {n}, transB, {t}", 64, _gemm(n, t, 1), _FOURS) for t in (0, 1) for n in (64, 6)),
    *(Sum("Conv", f"Conv 1 x 1 to {o}", k, _conv(o, (1, 1))) for o, k in ((16, 64), (7, 63))),
    *(Sum("Conv", f"Conv 3 x 3 to {o}", k, _conv(o, (3, 3))) for o, k in ((16, 144), (8, 72), (8, 27), (5, 63))),
    Sum("Conv", "Conv 3 x 3, 2 groups", 72, _conv(4, (3, 3), 2)),
    *(Sum("Conv", f"Conv {k} x {k}, depthwise", k * k, _conv(1, (k, k), 8)) for k in (3, 5)),
    Sum("Conv", "Conv of 3 in one dimension", 24, _conv(8, (3,))),
    Sum("ConvTranspose", "ConvTranspose 1 x 1", 64, _conv_transpose(8, (1, 1))),
    *(Sum("ConvTranspose", f"ConvTranspose 3 x 3, {o}", k, _conv_transpose(o, (3, 3))) for o, k in ((8, 72), (5, 63))),
    Sum("ConvTranspose", "ConvTranspose 3 x 3, 2 groups", 72, _conv_transpose(4, (3, 3), 2)),
    Sum("Einsum", "Einsum", 64, _einsum),
    *(Sum("ReduceSum", f"ReduceSum of {k}, {f}", k, _reduce("ReduceSum", f)) for k in (5, 60, 64, 300) for f in (0, 1)),
    *(Sum("ReduceMean", f"ReduceMean of {k}", k, _reduce("ReduceMean")) for k in (60, 64, 256)),
    Sum("ReduceSum", "ReduceSum of 260 to one number", 260, _to_one("ReduceSum"), ONE),
    Sum("GlobalAveragePool", "GlobalAveragePool", 64, _pool("GlobalAveragePool", 8)),
    Sum("GlobalAveragePool", "GlobalAveragePool of 144", 144, _pool("GlobalAveragePool", 12), _FEW_LARGE),
    Sum("AveragePool", "AveragePool", 16, _pool("AveragePool", 4, kernel_shape=[4, 4])),
    Sum("AveragePool", "AveragePool of 144", 144, _pool("AveragePool", 12, kernel_shape=[12, 12]), _FEW_LARGE),
    Sum("CumSum", "CumSum", 64, _cumsum),
    Sum("ScatterElements", "ScatterElements, add", 64, _scattered, atomic=True),
)

#: By operator: what its kernel does with each summand before, and with the sum after.
SUMS_OF_FUNCTIONS: dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    "ReduceL1": (np.abs, np.positive),
    "ReduceL2": (np.square, np.sqrt),
    "ReduceLogSum": (np.abs, np.log),
    "ReduceLogSumExp": (np.exp, np.log),
    "ReduceSumSquare": (np.square, np.positive),
}

_Compared = Callable[[np.random.Generator], tuple[Array, Array]]


def _positive(x: Array) -> Array:
    return np.abs(x) + np.float16(0.01)


def _from_one(x: Array) -> Array:
    return 1 + np.abs(x)


def _within_one(x: Array) -> Array:
    return np.float16(0.98) * np.sin(x)


def _function(
    operator: str, exact: Callable[[Array], Array], among: Callable[[Array], Array] = np.positive, domain: str = ""
) -> _Compared:
    def compare(random: np.random.Generator) -> tuple[Array, Array]:
        x = among((2 * random.standard_normal(4096)).astype(np.float16))
        return run(operator, {"x": x}, domain=domain), exact(x.astype(np.float64))

    return compare


def _softmax(random: np.random.Generator) -> tuple[Array, Array]:
    x = random.standard_normal((64, 256)).astype(np.float16)
    return run("Softmax", {"x": x}, axis=-1), special.softmax(x.astype(np.float64), -1)


def _norm(operator: str, centred: bool, axes: tuple[int, ...]) -> _Compared:
    def compare(random: np.random.Generator) -> tuple[Array, Array]:
        x = random.standard_normal((8, 8, 64) if len(axes) > 1 else (8, 64, 64)).astype(np.float16)
        width = x.shape[1] if operator == "InstanceNormalization" else x.shape[-1]
        feeds = {"x": x, "scale": _ones(width)}
        if centred:
            feeds["bias"] = np.zeros(width, np.float16)
        wide = x.astype(np.float64)
        wide = wide - wide.mean(axes, keepdims=True) if centred else wide
        exact = wide / np.sqrt(np.square(wide).mean(axes, keepdims=True) + 1e-5)
        return run(operator, feeds, epsilon=1e-5), exact

    return compare


def _skip_norm(operator: str, centred: bool) -> _Compared:
    def compare(random: np.random.Generator) -> tuple[Array, Array]:
        x, skip = (random.standard_normal((4, 16, 64)).astype(np.float16) for _ in range(2))
        feeds = {"x": x, "skip": skip, "scale": _ones(64)} | ({"bias": np.zeros(64, np.float16)} if centred else {})
        wide = x.astype(np.float64) + skip
        wide = wide - wide.mean(-1, keepdims=True) if centred else wide
        exact = wide / np.sqrt(np.square(wide).mean(-1, keepdims=True) + 1e-5)
        return run(operator, feeds, domain=_CONTRIB, epsilon=1e-5), exact

    return compare


def _attention(random: np.random.Generator) -> tuple[Array, Array]:
    """Two heads of 32, 8 positions: the kernel is wrong with more, see lists/faults.toml."""
    q, k, v = (random.standard_normal((32, 8, 64)).astype(np.float16) for _ in range(3))
    made = run("MultiHeadAttention", {"q": q, "k": k, "v": v}, domain=_CONTRIB, num_heads=2)
    heads = [each.astype(np.float64).reshape(32, 8, 2, 32).transpose(0, 2, 1, 3) for each in (q, k, v)]
    shares = special.softmax(heads[0] @ np.swapaxes(heads[1], -1, -2) / np.sqrt(32), -1)
    return made, (shares @ heads[2]).transpose(0, 2, 1, 3).reshape(32, 8, 64)


def _batch_norm(random: np.random.Generator) -> tuple[Array, Array]:
    x, scale, bias, mean, var = (random.standard_normal(s).astype(np.float16) for s in ((2, 8, 9, 9), 8, 8, 8, 8))
    var = np.abs(var) + np.float16(0.5)
    made = run("BatchNormalization", {"x": x, "scale": scale, "bias": bias, "mean": mean, "var": var}, epsilon=1e-5)
    s, b, m, v = (each.astype(np.float64)[None, :, None, None] for each in (scale, bias, mean, var))
    return made, (x.astype(np.float64) - m) / np.sqrt(v + 1e-5) * s + b


def _pow(exponent: float) -> _Compared:
    def compare(random: np.random.Generator) -> tuple[Array, Array]:
        x = np.abs(random.standard_normal(4096)).astype(np.float16)
        return run("Pow", {"x": x, "exponent": np.array(exponent, np.float16)}), x.astype(np.float64) ** exponent

    return compare


#: By operator: what its kernel makes of random operands, and the same in float64.
KERNELS: dict[str, _Compared] = {
    "Acos": _function("Acos", np.arccos, _within_one),
    "Acosh": _function("Acosh", np.arccosh, _from_one),
    "Asin": _function("Asin", np.arcsin, _within_one),
    "Asinh": _function("Asinh", np.arcsinh),
    "Atan": _function("Atan", np.arctan),
    "Atanh": _function("Atanh", np.arctanh, _within_one),
    "Cos": _function("Cos", np.cos),
    "Cosh": _function("Cosh", np.cosh),
    "Elu": _function("Elu", lambda x: np.where(x > 0, x, np.expm1(x))),
    "Erf": _function("Erf", special.erf),
    "Exp": _function("Exp", np.exp),
    "Gelu": _function("Gelu", lambda x: x * special.ndtr(x)),
    "HardSigmoid": _function("HardSigmoid", lambda x: np.clip(0.2 * x + 0.5, 0, 1)),
    "HardSwish": _function("HardSwish", lambda x: x * np.clip(x / 6 + 0.5, 0, 1)),
    "LeakyRelu": _function("LeakyRelu", lambda x: np.where(x > 0, x, 0.01 * x)),
    "Log": _function("Log", np.log, _positive),
    "Mish": _function("Mish", lambda x: x * np.tanh(np.log1p(np.exp(x)))),
    "Reciprocal": _function("Reciprocal", lambda x: 1 / x, _positive),
    "Selu": _function("Selu", lambda x: 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * np.expm1(x))),
    "Sigmoid": _function("Sigmoid", special.expit),
    "Sin": _function("Sin", np.sin),
    "Sinh": _function("Sinh", np.sinh),
    "Softplus": _function("Softplus", lambda x: np.log1p(np.exp(x))),
    "Softsign": _function("Softsign", lambda x: x / (1 + np.abs(x))),
    "Sqrt": _function("Sqrt", np.sqrt, _positive),
    "Tan": _function("Tan", np.tan, _within_one),
    "Tanh": _function("Tanh", np.tanh),
    "Pow": _pow(1.7),
    "Softmax": _softmax,
    "LayerNormalization": _norm("LayerNormalization", True, (2,)),
    "InstanceNormalization": _norm("InstanceNormalization", True, (2,)),
    "SimplifiedLayerNormalization": _norm("SimplifiedLayerNormalization", False, (2,)),
    "BatchNormalization": _batch_norm,
    "com.microsoft::BiasGelu": lambda random: _bias_gelu(random),
    "com.microsoft::FastGelu": _function(
        "FastGelu", lambda x: 0.5 * x * (1 + np.tanh(0.7978845608028654 * (x + 0.044715 * x**3))), domain=_CONTRIB
    ),
    "com.microsoft::Gelu": _function("Gelu", lambda x: x * special.ndtr(x), domain=_CONTRIB),
    "com.microsoft::MultiHeadAttention": _attention,
    "com.microsoft::SkipLayerNormalization": _skip_norm("SkipLayerNormalization", True),
    "com.microsoft::SkipSimplifiedLayerNormalization": _skip_norm("SkipSimplifiedLayerNormalization", False),
    "com.microsoft::QuickGelu": _function("QuickGelu", lambda x: x * special.expit(1.702 * x), domain=_CONTRIB),
}


def _bias_gelu(random: np.random.Generator) -> tuple[Array, Array]:
    x, bias = random.standard_normal((64, 64)).astype(np.float16), np.zeros(64, np.float16)
    wide = x.astype(np.float64)
    return run("BiasGelu", {"x": x, "bias": bias}, domain=_CONTRIB), wide * special.ndtr(wide)


def worth(operator: str) -> float:
    """How many roundings of the result the error of an operator's kernel is worth, in mean squares."""
    made, exact = KERNELS[operator](np.random.default_rng(0))
    stored = exact.astype(np.float16).astype(np.float64)
    return float(np.square(made.astype(np.float64) - exact).mean() / np.square(stored - exact).mean())
