"""The order of what is fed, and the side of a bound on which it lies, are told in fp32."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.ir.reasons import Kind
from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.passes.numerics.fed import Fed
from amp_transpiler.passes.numerics.fed_orders import keep_fed_orders
from amp_transpiler.passes.view.flow import Flow
from tests.helpers.constraints_of import run_faithful
from tests.helpers.sessions import session

NUMBERS = """float[1,9] years = {3000.5, 3001.5, 3002.5, 3003.5, 3004.5, 3005.5, 3006.5, 3007.5, 3008.5}, int64[1] three = {3},
  int64[1] last = {-1}, int64[1] first = {1}, float half = {0.5}, int64 zero = {0}, float[1,9] gains = {1, 2, 1, 3, 1, 2, 1, 2, 1},
  float[9,3] w = {1, -1, 2, 0, 3, 1, -2, 1, 1, 1, -1, 2, 0, 3, 1, -2, 1, 1, 1, -1, 2, 0, 3, 1, -2, 1, 1},
  float[20,9] rows = {"""
NUMBERS += ", ".join(str(n % 7) for n in range(180)) + "}"
ORDERS = {
    "the latest": ("v, i = TopK(x, three)  y = GatherElements<axis = 1>(z, i)", {"v"}),
    "the place of the least": ("i = ArgMin<axis = 1>(x)  y = GatherElements<axis = 1>(z, i)", {"i"}),
    "the nearest": (
        "d = Sub(x, z)  q = Mul(d, d)  v, i = TopK<largest = 0>(q, three)  y = GatherElements<axis = 1>(z, i)",
        {"d", "q", "v"},
    ),
    "the nearest of products that add up few": (
        """a = Unsqueeze(x, last)  b = Unsqueeze(x, first)  p = MatMul(a, b)  f = Flatten(p)  v, i = TopK(f, three)
        y = GatherElements<axis = 1>(f, i)""",
        {"a", "b", "p", "f", "v"},
    ),
    "of what is scaled": ("s = Mul(x, gains)  v, i = TopK(s, three)  y = GatherElements<axis = 1>(z, i)", {"s", "v"}),
    "the largest alone": ("v, i = TopK(x, three)  y = Mul(v, half)", set()),
    "of what a layer computes": (
        "h = MatMul(x, w)  v, i = TopK(h, three)  y = GatherElements<axis = 1>(z, i)",
        set(),
    ),
    "of rows of a table": (
        "e = Gather(rows, k)  m = Mul(e, e)  v, i = TopK(m, three)  y = GatherElements<axis = 1>(z, i)",
        set(),
    ),
}
BOUNDS = {
    "bounds that are held": ("b = GreaterOrEqual(x, years)  y = Cast<to = 1>(b)", {"b"}),
    "another input": ("b = Less(x, z)  y = Cast<to = 1>(b)", {"b"}),
    "a bound that is looked up": ("r = Gather(years, k)  b = Greater(x, r)  y = Cast<to = 1>(b)", {"r", "b"}),
    "of a moved sum": ("s = Add(x, half)  b = Greater(s, years)  y = Cast<to = 1>(b)", {"s", "b"}),
    "what a layer computes": ("h = LpNormalization(x)  b = Greater(h, half)  y = Cast<to = 1>(b)", set()),
    "rows of a table": ("e = Gather(rows, k)  b = Greater(e, half)  y = Cast<to = 1>(b)", set()),
}


@pytest.mark.parametrize("mode", ["pure", "mixed"])
@pytest.mark.parametrize("name", [*ORDERS, *BOUNDS])
def test_orders_and_bounds_of_what_is_fed(name: str, mode: str) -> None:
    text, expected = (ORDERS | BOUNDS)[name]
    head = '<ir_version: 10, opset_import: ["" : 21]>\n'
    model = onnx.parser.parse_model(
        head + f"m (float[N,9] x, float[N,9] z, int64[N] k) => (float[N,K] y) <{NUMBERS}> {{ {text} }}"
    )
    program, constraints = amp.Program.from_onnx(model), Constraints()
    keep_fed_orders(Fed(program, Flow(program)), constraints)
    assert {op.outputs[0].name for op in constraints.operators if op.outputs[0]} == expected
    rng = np.random.default_rng(0)
    x, z = (3000 + 9 * rng.random((64, 9), np.float32) for _ in range(2))
    feed = {"x": x, "z": z, "k": np.zeros(64, np.int64)}
    (wanted,), (got,) = session(model).run(None, feed), run_faithful(amp.convert(model, mode=mode), feed)
    if expected:  # a fifth of the places were others
        np.testing.assert_allclose(got, wanted, rtol=1e-3)


DISTANCES = {
    "of distances": ("d = Sqrt(s)  v, y = TopK<largest = 0>(d, three)", {"v"}),
    "of distances by one product": (
        """z = Mul(h, h)  n = ReduceSum(z, last)  c = Concat<axis = 1>(h, n)  m = MatMul(c, f)  b = Clip(m, zero)
        d = Sqrt(b)  v, y = TopK<largest = 0>(d, three)""",
        {"b", "d", "v"},
    ),
    "of distances of which some are taken off": ("d = Sub(r, k)  v, y = TopK<largest = 0>(d, three)", set()),
    "of distances, whose places nobody reads": ("v, i = TopK<largest = 0>(s, three)  y = Cast<to = 7>(v)", set()),
}


@pytest.mark.parametrize("again", [False, True], ids=["once", "again"])
@pytest.mark.parametrize("name", DISTANCES)
def test_the_order_of_what_is_fp32_anyway(name: str, again: bool) -> None:
    """Distances from a row of a table were cast to 16 bit before the nearest were chosen: others were."""
    text, expected = DISTANCES[name]
    numbers = "int64[1] three = {3}, int64[1] last = {-1}, float zero = {0}"
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21]> m (float[4,8] x) => (int64[4,3] y) <{numbers}> {{
        h = MatMul(x, w)  u = Unsqueeze(h, last)  a = Transpose<perm = [0, 2, 1]>(u)  e = Sub(a, t)  q = Mul(e, e)
        s = ReduceSum<keepdims = 0>(q, last)  r = MatMul(x, g)  k = Relu(s)  {text} }}"""
    )
    rng = np.random.default_rng(0)
    for key, shape in {"w": (8, 6), "t": (1, 2000, 6), "g": (8, 2000), "f": (7, 2000)}.items():
        held = rng.normal(size=shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(held, key))
    done = amp.convert(model)
    found = amp.convert(done.to_onnx()) if again else done
    kept = {op.outputs[0].name for op in found.operators if op.outputs[0] and op.why and op.why.kind is Kind.ORDER}
    assert kept == expected
    x = rng.normal(size=(4, 8)).astype(np.float32)
    (wanted,), (got,) = session(model).run(None, {"x": x}), run_faithful(found, {"x": x})
    if name == "of distances":
        distances = _distances(model, x)
        worst = [np.take_along_axis(distances, np.asarray(i), 1).max(1) for i in (wanted, got)]
        np.testing.assert_allclose(worst[1], worst[0], rtol=2e-3)


def _distances(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    """From each row of the table, in float64."""
    held = {each.name: onnx.numpy_helper.to_array(each).astype(np.float64) for each in model.graph.initializer}
    return np.square((x @ held["w"])[:, None] - held["t"]).sum(-1)
