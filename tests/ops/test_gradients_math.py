"""Gradient rules of arithmetic, activations, matrix products, data movement, reductions and losses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from hypothesis import given, settings, strategies as st
from scipy import special

import amp_transpiler as amp
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ops.gpu_kernels import plus_rows
from tests.helpers.forwardcheck import check_forward
from tests.helpers.gradcheck import Case, Gradient, check_gradient, few, gradient_model, gradient_values, seeds
from tests.helpers.node_by_node import node_by_node
from tests.helpers.rules import as_model, run_cpu, tensor_info, typed_feeds
from tests.helpers.slopes import slope

pytestmark = pytest.mark.rules

Shape = tuple[int, ...]


@st.composite
def shapes(draw: st.DrawFn, min_rank: int = 0, max_rank: int = 3) -> Shape:
    return tuple(draw(st.lists(st.integers(1, 4), min_size=min_rank, max_size=max_rank)))


@st.composite
def broadcastable(draw: st.DrawFn, count: int = 2, max_rank: int = 3) -> list[Shape]:
    """Shapes that broadcast against each other: leading dimensions missing, some sizes 1."""
    full = draw(st.lists(st.integers(1, 4), min_size=0, max_size=max_rank))
    shapes = []
    for _ in range(count):
        skip = draw(st.integers(0, len(full)))
        shapes.append(tuple(draw(st.sampled_from([d, 1])) for d in full[skip:]))
    return shapes


def smooth(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    return rng.normal(size=shape)


def positive(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    return rng.uniform(0.3, 3, size=shape)


def away(rng: np.random.Generator, shape: Shape, *kinks: float) -> np.ndarray:
    """Values at least 0.05 from every kink, in 16 bit too."""
    x = rng.uniform(-3.5, 3.5, size=shape)
    for kink in kinks or (0.0,):
        x = np.where(np.abs(x - kink) < 0.05, kink + 0.15, x)
    return x


def distinct(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """Values that differ from each other by at least 1/8, all of which 16 bit holds."""
    size = int(np.prod(shape))
    return (rng.permutation(size) - size // 2).reshape(shape) / 8 + 1 / 16


# -- elementwise --------------------------------------------------------------------------------------
@pytest.mark.parametrize("type_", ["Add", "Sub", "Mul", "Div"])
@few
@given(shapes=broadcastable(), seed=seeds)
def test_binary(type_: str, shapes: list[Shape], seed: int) -> None:
    rng = np.random.default_rng(seed)
    check_gradient(type_, [smooth(rng, shapes[0]), positive(rng, shapes[1])])


#: Operators that the reference evaluator computes in fp32 only, or not at all.
FLOAT64: dict[str, Any] = {
    "Erf": lambda x: [np.vectorize(math.erf, otypes=[np.float64])(x)],
    "Mish": lambda x: [x * np.tanh(np.log1p(np.exp(x)))],
    "Softsign": lambda x: [x / (1 + np.abs(x))],
    "Mean": lambda *xs: [sum(xs) / len(xs)],
}

UNARY: dict[str, Any] = {
    "Neg": smooth,
    "Abs": away,
    "Sqrt": positive,
    "Exp": smooth,
    "Log": positive,
    "Reciprocal": positive,
    "Sin": smooth,
    "Cos": smooth,
    "Erf": smooth,
    "Identity": smooth,
    "Relu": away,
    "Sigmoid": smooth,
    "Tanh": smooth,
    "Softplus": smooth,
    "Mish": smooth,
    "Softsign": away,
    "HardSwish": lambda rng, shape: away(rng, shape, -3, 3),
}


@pytest.mark.parametrize("type_", UNARY)
@few
@given(shape=shapes(), seed=seeds)
def test_unary(type_: str, shape: Shape, seed: int) -> None:
    check_gradient(type_, [UNARY[type_](np.random.default_rng(seed), shape)], forward=FLOAT64.get(type_))


def test_the_logarithm_of_a_softplus_learns_far_below_zero() -> None:
    x = np.float32([-75, -40, -20, -15, -12, -9, -3, 0, 4, 30, 95])
    head = f'<ir_version: 8, opset_import: ["" : 18]> g (float[{x.size}] x) => (float[{x.size}] y)'
    found = amp.Program.from_onnx(onnx.parser.parse_model(f"{head} {{ s = Softplus(x)  y = Log(s) }}"))
    wide = x.astype(np.float64)
    size = np.maximum(wide, 0) + np.log1p(np.exp(-np.abs(wide)))
    expected = np.log(size), 2 * np.log(size) / size / (1 + np.exp(-wide))
    for got, right in zip(slope(found, x), expected, strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-4)


@few
@given(shapes=broadcastable(), seed=seeds)
def test_pow(shapes: list[Shape], seed: int) -> None:
    rng = np.random.default_rng(seed)
    # 16-bit results of large powers overflow or lose the digits that the gradient of the exponent is made of
    check_gradient("Pow", [rng.uniform(0.5, 2, shapes[0]), rng.uniform(-2, 2, shapes[1])])


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, -1, 0.5, 1.7])
@pytest.mark.parametrize("known", [True, False])
def test_pow_of_one_exponent(exponent: float, known: bool) -> None:
    x = positive(np.random.default_rng(0), (2, 3))
    whole = float(exponent).is_integer()
    power = np.array(int(exponent) if whole else exponent)
    check_gradient("Pow", [x if not whole else x * [-1, 1, -1], power], wrt=[0], feeds=() if known else (1,))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the unselected branch
def test_pow_at_zero() -> None:
    """x**0 has slope 0 at 0, and 0**p has slope 0 in p."""
    check_gradient("Pow", [np.zeros(2), np.array([1.0, 2.0])], wrt=[0], step=1e-6, tolerance={"float64": 1e-4})
    program = gradient_values("Pow", [np.zeros(3), np.array([0.0, 1.0, 2.0])])
    np.testing.assert_array_equal(program[0], [0, 1, 0])
    np.testing.assert_array_equal(program[1], [0, 0, 0])


@pytest.mark.parametrize("type_", ["Max", "Min", "Sum", "Mean"])
@few
@given(shapes=st.integers(1, 4).flatmap(broadcastable), seed=seeds)
def test_variadic(type_: str, shapes: list[Shape], seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = distinct(rng, (sum(math.prod(s) for s in shapes),))
    cuts = np.cumsum([math.prod(s) for s in shapes])[:-1]
    inputs = [v.reshape(s) for v, s in zip(np.split(values, cuts), shapes, strict=True)]
    check_gradient(type_, inputs, forward=FLOAT64.get(type_))
    if type_ in ("Sum", "Mean"):
        check_forward(type_, inputs, forward=FLOAT64.get(type_))


def test_ties_of_max_count_once() -> None:
    first, second = gradient_values("Max", [np.array([1.0, 2.0]), np.array([1.0, 3.0])])
    np.testing.assert_array_equal(first != 0, [True, False])
    np.testing.assert_array_equal(second != 0, [False, True])


@few
@given(shapes=broadcastable(3), seed=seeds)
def test_where(shapes: list[Shape], seed: int) -> None:
    rng = np.random.default_rng(seed)
    check_gradient("Where", [rng.random(shapes[0]) < 0.5, smooth(rng, shapes[1]), smooth(rng, shapes[2])], feeds=[0])


@pytest.mark.parametrize("low", [None, -1.0])
@pytest.mark.parametrize("high", [None, 0.75])
@few
@given(shape=shapes(), seed=seeds)
def test_clip(low: float | None, high: float | None, shape: Shape, seed: int) -> None:
    x = away(np.random.default_rng(seed), shape, -1.0, 0.75)
    bounds = [None if b is None else np.array(b) for b in (low, high)]
    check_gradient("Clip", [x, *bounds], wrt=[0])


def test_clip_has_its_slope_at_its_bounds() -> None:
    dx, *_ = gradient_values("Clip", [np.array([-1.0, 0.0, 0.5, 1.0, 2.0]), np.array(0.0), np.array(1.0)])
    assert dx.tolist() == [0, 1, 1, 1, 0]


# -- activations --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "type_, kinks, names",
    [
        ("LeakyRelu", (0.0,), ("alpha",)),
        ("Elu", (0.0,), ("alpha",)),
        ("ThresholdedRelu", (0.75,), ()),
        ("Selu", (0.0,), ("alpha", "gamma")),
        ("HardSigmoid", (-2.5, 2.5), ()),
    ],
)
@few
@given(shape=shapes(), seed=seeds, value=st.sampled_from([None, 0.25, 1.5]))
def test_activation_with_attributes(
    type_: str, kinks: tuple[float, ...], names: tuple[str, ...], shape: Shape, seed: int, value: float | None
) -> None:
    attrs = {"alpha": 0.75} if type_ == "ThresholdedRelu" else {n: value for n in names if value is not None}
    check_gradient(type_, [away(np.random.default_rng(seed), shape, *kinks)], attrs=attrs)


@few
@given(shape=shapes(min_rank=1), seed=seeds)
def test_prelu(shape: Shape, seed: int) -> None:
    rng = np.random.default_rng(seed)
    slope = tuple(d if rng.random() < 0.5 else 1 for d in shape)[rng.integers(0, len(shape) + 1) :]
    check_gradient("PRelu", [away(rng, shape), smooth(rng, slope)])


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@few
@given(shape=shapes(), seed=seeds)
def test_gelu(approximate: str, shape: Shape, seed: int) -> None:
    def exact_gelu(x: np.ndarray) -> list[np.ndarray]:
        return [x * 0.5 * (1 + FLOAT64["Erf"](x / math.sqrt(2))[0])]

    x = smooth(np.random.default_rng(seed), shape)
    oracle = exact_gelu if approximate == "none" else None
    check_gradient("Gelu", [x], attrs={"approximate": approximate}, forward=oracle)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_on_cuda_in_fp32(approximate: str) -> None:
    """In passes that add products as they go, as near float64 as written out; far out the slope is 0 or 1."""
    x = np.concatenate([np.linspace(-12, 12, 4801), [0.0, -0.0, 1e-30, 40.0, -40.0, 3e4, -3e4, 1e9, -1e9]])
    dy = np.random.default_rng(0).normal(size=x.shape)
    x, dy = (a.astype(np.float32).astype(np.float64) for a in (x, dy))
    case = Case("Gelu", [x], {"approximate": approximate}, wrt=(0,), forward=lambda x: [x])
    values = {"x0": x, "y0": x, "dy0": dy}
    model = Gradient(case, "float32", values, (0,)).model("cuda")
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("GatedAdd") == {"none": 1, "tanh": 2}[approximate]
    found = node_by_node(model, typed_feeds(model, values))[model.graph.output[0].name]
    density = np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    wanted = dy * (special.ndtr(x) + x * density)
    if approximate == "tanh":
        share = special.expit(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
        inner = 2 * math.sqrt(2 / math.pi) * (x + 3 * 0.044715 * x**3)
        wanted = dy * (share + share * (1 - share) * inner)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=3e-6 * np.abs(dy).max())


def test_gelu_on_cpu_far_below_zero() -> None:
    """There Φ(x) is next to nothing beside 1, and x φ(x) is all of the slope: added to 1/2 - 1/2 it would be lost."""
    x = np.linspace(-9, -6, 61, dtype=np.float32)
    model = gradient_model("Gelu", [x], "float32", "cpu")
    found = run_cpu(model, typed_feeds(model, {"x0": x, "dy0": np.ones_like(x)}))[0]
    wide = x.astype(np.float64)
    np.testing.assert_allclose(
        found, special.ndtr(wide) + wide * np.exp(-wide * wide / 2) / math.sqrt(2 * math.pi), 0.03
    )


@pytest.mark.parametrize(
    "shape, kinds",
    [((2, 3, 5), ["GatedAdd"]), ((4, 2), ["GatedAdd"]), ((6, 1), ["Mul", "Add"]), ((3, 0), ["Mul", "Add"])],
)
def test_a_multiple_of_rows_is_added_in_one_kernel_on_cpu(shape: Shape, kinds: list[str]) -> None:
    """It has the bits of a product and a sum, and takes no empty rows."""
    e, rng = Emitter("cpu"), np.random.default_rng(0)
    x, b, y = (rng.normal(size=size).astype(np.float32) for size in (shape, (*shape[:-1], 1), shape))
    given = [Value(name, "float32", array.shape) for name, array in zip("xby", (x, b, y), strict=True)]
    e.reserve("xby")
    total = plus_rows(e, *given)
    assert [node.op_type for node in e.nodes] == kinds
    infos = [tensor_info(v.name, v.dtype, v.shape or ()) for v in (*given, total)]
    model = as_model(onnx.helper.make_graph(e.nodes, "rows", infos[:3], infos[3:], list(e.initializers.values())))
    np.testing.assert_array_equal(run_cpu(model, {"x": x, "b": b, "y": y})[0], x + y * b)


@pytest.mark.parametrize("alpha", [1.0, 1.702, 0.5])
@few
@given(shape=shapes(), seed=seeds)
def test_quick_gelu(alpha: float, shape: Shape, seed: int) -> None:
    def oracle(x: np.ndarray) -> list[np.ndarray]:
        return [x / (1 + np.exp(-alpha * x))]

    x = smooth(np.random.default_rng(seed), shape)
    check_gradient("QuickGelu", [x], attrs={"alpha": alpha}, domain="com.microsoft", forward=oracle)


@pytest.mark.parametrize("type_", ["Softmax", "LogSoftmax"])
@few
@given(shape=shapes(min_rank=1), seed=seeds, data=st.data())
def test_softmax(type_: str, shape: Shape, seed: int, data: st.DataObject) -> None:
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    check_gradient(type_, [smooth(np.random.default_rng(seed), shape)], attrs={"axis": axis})


# -- matrix products ----------------------------------------------------------------------------------
@st.composite
def factors(draw: st.DrawFn) -> tuple[Shape, Shape]:
    """Shapes of A and B of a MatMul: 1-D operands, batches, broadcast batches."""
    m, k, n = (draw(st.integers(1, 4)) for _ in range(3))
    batch_a, batch_b = draw(broadcastable(2, 3))
    a = draw(st.sampled_from([(k,), (*batch_a, m, k)]))
    b = draw(st.sampled_from([(k,), (k, n), (*batch_b, k, n)]))
    return a, b


@settings(few, max_examples=60)
@given(operands=factors(), seed=seeds)
def test_matmul(operands: tuple[Shape, Shape], seed: int) -> None:
    rng = np.random.default_rng(seed)
    check_gradient("MatMul", [smooth(rng, shape) for shape in operands])


def test_weight_gradient_of_batched_rows_is_one_product() -> None:
    """x [B, T, D] times w [D, N]: dw is one MatMul over B*T rows, not a sum over batches."""
    rng = np.random.default_rng(0)
    model = gradient_model("MatMul", [smooth(rng, (3, 5, 4)), smooth(rng, (4, 2))], "float16", "cuda", wrt=[1])
    types = [node.op_type for node in model.graph.node]
    assert types.count("Gemm") == 1 and not {"MatMul", "Transpose", "ReduceSum", "Cast"} & set(types), types


@pytest.mark.parametrize("trans_a", [0, 1])
@pytest.mark.parametrize("trans_b", [0, 1])
@few
@given(sizes=st.tuples(*[st.integers(1, 4)] * 3), data=st.data(), seed=seeds)
def test_gemm(trans_a: int, trans_b: int, sizes: tuple[int, int, int], data: st.DataObject, seed: int) -> None:
    rng = np.random.default_rng(seed)
    m, k, n = sizes
    c = data.draw(st.sampled_from([None, (), (1,), (n,), (m, 1), (1, n), (m, n)]))
    attrs = {
        "transA": trans_a,
        "transB": trans_b,
        "alpha": data.draw(st.sampled_from([1.0, 0.5, -1.7])),
        "beta": data.draw(st.sampled_from([1.0, 0.3])),
    }
    a, b = smooth(rng, (k, m) if trans_a else (m, k)), smooth(rng, (n, k) if trans_b else (k, n))
    check_gradient("Gemm", [a, b, *([] if c is None else [smooth(rng, c)])], attrs=attrs)


@pytest.mark.parametrize(
    "equation, sizes",
    [
        ("bhid,bhjd->bhij", [(2, 2, 3, 4), (2, 2, 3, 4)]),
        ("ij,jk->ik", [(2, 3), (3, 4)]),
        ("ij,jk", [(2, 3), (3, 4)]),
        ("ij->ji", [(2, 3)]),
        ("ij->i", [(2, 3)]),
        ("ij,k->ik", [(2, 3), (4,)]),
        ("ij,jk,kl->il", [(2, 3), (3, 4), (4, 2)]),
        ("i,i->", [(3,), (3,)]),
    ],
)
def test_einsum(equation: str, sizes: list[Shape]) -> None:
    rng = np.random.default_rng(0)
    check_gradient("Einsum", [smooth(rng, size) for size in sizes], attrs={"equation": equation})
