"""The order of what is fed, and the side of a bound on which it lies, are told in fp32."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
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
