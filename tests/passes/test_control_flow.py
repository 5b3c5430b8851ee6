"""If, Loop and Scan in training: known ones become straight lines, an If of the run has a gradient of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.nn import functional as F
from amp_transpiler.passes.canonicalize.control_flow import expand_control_flow
from tests.helpers.sessions import session


def load(text: str, opset: int = 17) -> amp.Program:
    return amp.Program.from_onnx(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]>\n{text}'))


def run(program: amp.Program, feed: dict[str, Any], *fetches: Any) -> list[np.ndarray]:
    scope, exe = amp.Scope(), amp.Executor(threads=1)
    exe.run(program.startup, scope=scope)
    return [np.asarray(v) for v in exe.run(program, feed=feed, fetch_list=list(fetches), scope=scope)]


#: A recurrent loop: h = tanh(h w + x), every h is kept; it always goes on.
LOOP = """
net (float[2,3] x, float[2,3] h0, int64 n) => (float[2,3] h, float[k,2,3] all)
  <float[3,3] w = {0.1, 0.2, 0.3, -0.4, 0.5, 0.6, 0.7, -0.8, 0.9}, bool yes = {1}>
{
  h, all = Loop (n, yes, h0) <body = turn (int64 i, bool on, float[2,3] h_in) => (bool go, float[2,3] h_out, float[2,3] row) {
    go = Identity(on)
    p = MatMul(h_in, w)
    q = Add(p, x)
    h_out = Tanh(q)
    row = Identity(h_out)
  }>
}"""
#: The same as a Scan over rows of x, backwards, with the results put in reverse as well.
SCAN = """
net (float[4,2,3] x, float[2,3] h0) => (float[2,3] h, float[4,2,3] all)
  <float[3,3] w = {0.1, 0.2, 0.3, -0.4, 0.5, 0.6, 0.7, -0.8, 0.9}>
{
  h, all = Scan <num_scan_inputs = 1, scan_input_directions = [1], scan_output_directions = [1],
    body = turn (float[2,3] h_in, float[2,3] x_in) => (float[2,3] h_out, float[2,3] row) {
    p = MatMul(h_in, w)
    q = Add(p, x_in)
    h_out = Tanh(q)
    row = Identity(h_out)
  }> (h0, x)
}"""
W = np.array([0.1, 0.2, 0.3, -0.4, 0.5, 0.6, 0.7, -0.8, 0.9]).reshape(3, 3)


def recurrence(w: np.ndarray, xs: list[np.ndarray], h: np.ndarray) -> list[np.ndarray]:
    rows = []
    for x in xs:
        h = np.tanh(h @ w + x)
        rows.append(h)
    return rows


def numerical(loss: Any, at: np.ndarray) -> np.ndarray:
    """d loss / d at by central differences in float64."""
    grad = np.zeros_like(at)
    for index in np.ndindex(at.shape):
        for sign in (1, -1):
            moved = at.copy()
            moved[index] += sign * 1e-6
            grad[index] += sign * loss(moved) / 2e-6
    return grad


def gradient_of_w(program: amp.Program, feed: dict[str, Any], outputs: list[str]) -> np.ndarray:
    """The gradient of the sum of squares of outputs."""
    with amp.program_guard(program, program.startup), amp.unique_name.guard():
        parts = [F.sum(program.var(name) * program.var(name)) for name in outputs]
        loss = parts[0] if len(parts) == 1 else parts[0] + parts[1]
        ((_, grad),) = amp.append_backward(loss, ["w"])
    program.verify()
    return run(program, feed, grad)[0]


def test_a_loop_of_known_length_unrolls_and_trains() -> None:
    rng = np.random.default_rng(0)
    feed = {name: rng.normal(size=(2, 3)).astype(np.float32) for name in ("x", "h0")}
    before = run(load(LOOP), {**feed, "n": np.array(3)}, "h", "all")
    program = load(LOOP)
    assert amp.prepare_training(program, values={"n": 3}).notes
    assert not program.nesting and sum(op.type == "Tanh" for op in program.operators) == 3
    for found, expected in zip(run(program, feed, "h", "all"), before, strict=True):
        np.testing.assert_array_equal(found, expected)
    found = gradient_of_w(program, feed, ["h", "all"])

    def loss(w: np.ndarray) -> float:
        rows = recurrence(w, [feed["x"]] * 3, feed["h0"])
        return float((rows[-1] ** 2).sum() + sum((row**2).sum() for row in rows))

    np.testing.assert_allclose(found, numerical(loss, W), rtol=1e-4, atol=1e-5)


def test_a_loop_that_goes_on_by_a_constant_around_it_unrolls() -> None:
    """As EmbeddingBag is exported."""
    program = load(LOOP.replace("go = Identity(on)", "go = Cast <to = 9> (yes)"))
    amp.prepare_training(program, values={"n": 2})
    assert not program.nesting and sum(op.type == "Tanh" for op in program.operators) == 2
    once = load(LOOP.replace("go = Identity(on)", "go = Cast <to = 9> (i)"))  # stops after a turn: i is 0
    amp.prepare_training(once, values={"n": 2})
    assert not once.nesting and sum(op.type == "Tanh" for op in once.operators) == 1


#: The same turns as a ``while`` of TensorFlow: two counters, of which the lower one decides.
WHILE = """
net (float[2,3] x, float[2,3] h0, int64 n) => (float[2,3] h, float[k,2,3] all)
  <float[3,3] w = {0.1, 0.2, 0.3, -0.4, 0.5, 0.6, 0.7, -0.8, 0.9}, bool yes = {1}, int32 zero = {0}, float two = {2.0}>
{
  count, last, h, all = Loop (n, yes, zero, zero, h0) <
    body = turn (int64 i, bool on, int32 c_in, int32 last_in, float[2,3] h_in)
      => (bool go, int32 c_out, int32 last_out, float[2,3] h_out, float[2,3] row) {
    one = Constant <value = int32 {1}> ()
    c_out = Add(c_in, one)
    last_out = Identity(last_in)
    real = Cast <to = 1> (c_out)
    soon = Cast <to = 1> (i)
    first = Less(real, limit)
    limit = Constant <value = float {4.0}> ()
    second = Less(soon, two)
    go = And(first, second)
    p = MatMul(h_in, w)
    q = Add(p, x)
    h_out = Tanh(q)
    row = Identity(h_out)
  }>
}"""


def test_a_loop_whose_counters_decide_unrolls_and_trains() -> None:
    """As tf2onnx writes the recurrent layers of Keras that it does not recognise."""
    rng = np.random.default_rng(0)
    feed = {name: rng.normal(size=(2, 3)).astype(np.float32) for name in ("x", "h0")}
    before = run(load(WHILE), {**feed, "n": np.array(9)}, "h", "all")
    assert len(before[1]) == 3, "of the turns that the counters allow, not those of the trip count"
    program = load(WHILE)
    amp.prepare_training(program, values={"n": 9})
    assert not program.nesting and sum(op.type == "Tanh" for op in program.operators) == 3
    for found, expected in zip(run(program, feed, "h", "all"), before, strict=True):
        np.testing.assert_array_equal(found, expected)

    def loss(w: np.ndarray) -> float:
        return float((recurrence(w, [feed["x"]] * 3, feed["h0"])[-1] ** 2).sum())

    np.testing.assert_allclose(gradient_of_w(program, feed, ["h"]), numerical(loss, W), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "change, trips",
    [
        (("yes", "yes"), 3),
        ((", yes, zero", ", , zero"), 3),
        ((", yes, zero", "two_turns, yes, zero"), 2),
        ((", yes, zero", "n, yes, zero"), None),  # what is fed decides
        (("float {4.0}", "float {-1.0}"), 1),  # the body runs before it says
        (("And(first, second)", "Or(first, second)"), 4),
        (("yes = {1}", "yes = {0}"), None),  # no turn makes no row to stack
        (("last_out = Identity(last_in)", "last_out = Identity(c_in)"), 3),
        (("soon = Cast <to = 1> (i)", "soon = ReduceMax <keepdims = 0> (h_in)"), None),  # data decide
        (("float {4.0}", "float {1e9}"), 3),
        (("soon = Cast <to = 1> (i)", "soon = RandomUniformLike(real)"), None),
        (("And(first, second)", "Not(never)\n never = Cast <to = 9> (zero)"), None),  # no end
    ],
)
def test_how_often_a_while_without_a_trip_count_runs(change: tuple[str, str], trips: int | None) -> None:
    text = WHILE.replace("n, yes, zero", ", yes, zero").replace("bool yes", "int64 two_turns = {2}, bool yes")
    assert change[0] in text
    program = load(text.replace(*change))
    expand_control_flow(program)
    unrolled = not program.nesting
    assert (sum(op.type == "Tanh" for op in program.operators) if unrolled else None) == trips


def test_a_number_of_the_turn_that_is_a_vector_unrolls() -> None:
    """As tf2onnx crops each box of an image."""
    text = """
    net (float[3,4] x) => (float[K,1,4] y) <int64 n = {3}, bool yes = {1}, int64[1] one = {1}, int64[1] zero = {0},
      float[4,4] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}> {
      y = Loop (n, yes) <body = turn (int64[1] i, bool[1] on) => (bool[1] go, float[1,4] row) {
        go = Identity(on)  next = Add(i, one)  part = Slice(x, i, next, zero)  row = MatMul(part, w) }>
    }"""
    x = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    program = load(text)
    assert expand_control_flow(program)
    (y,) = run(program, {"x": x}, "y")
    np.testing.assert_allclose(y[:, 0], x @ np.arange(1, 17, dtype=np.float32).reshape(4, 4), rtol=1e-5)


def test_a_scan_unrolls_and_trains() -> None:
    rng = np.random.default_rng(1)
    feed = {"x": rng.normal(size=(4, 2, 3)).astype(np.float32), "h0": rng.normal(size=(2, 3)).astype(np.float32)}
    before = run(load(SCAN), feed, "h", "all")
    for opset in (11, 17):  # sizes and axes are attributes before opset 13
        program = load(SCAN, opset)
        assert expand_control_flow(program) and not program.nesting
        for found, expected in zip(run(program, feed, "h", "all"), before, strict=True):
            np.testing.assert_array_equal(found, expected)
    found = gradient_of_w(load(SCAN), feed, ["h", "all"])  # append_backward unrolls by itself

    def loss(w: np.ndarray) -> float:
        rows = recurrence(w, list(feed["x"][::-1]), feed["h0"])
        return float((rows[-1] ** 2).sum() + sum((row**2).sum() for row in rows))

    np.testing.assert_allclose(found, numerical(loss, W), rtol=1e-4, atol=1e-5)


#: Both branches read w and h; only one reads v; one passes x through as it is.
IF = """
net (float[2,3] x) => (float[2,3] y, float[2,3] z)
  <float[3,3] w = {0.1, 0.2, 0.3, -0.4, 0.5, 0.6, 0.7, -0.8, 0.9}, float[1,3] v = {0.5, -1.0, 2.0}, float limit = {0.0}>
{
  h = MatMul(x, w)
  total = ReduceSum <keepdims = 0> (h)
  on = Greater(total, limit)
  y, z = If (on) <
    then_branch = yes () => (float[2,3] t, float[2,3] tz) { s = Sigmoid(h)  u = Mul(s, v)  t = MatMul(u, w)  tz = Tanh(h) },
    else_branch = no () => (float[2,3] e, float[2,3] ez) { e = Mul(h, h)  ez = Identity(h) }>
}"""
V = np.array([[0.5, -1.0, 2.0]])


def branches(x: np.ndarray, w: np.ndarray, v: np.ndarray) -> float:
    h = x @ w
    if h.sum() > 0:
        y, z = (1 / (1 + np.exp(-h)) * v) @ w, np.tanh(h)
    else:
        y, z = h * h, h
    return float((y * y).sum() + (z * z).sum())


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("mode", ["fp32", "pure-fp16"])
def test_an_if_of_the_run_has_a_gradient(sign: int, mode: str) -> None:
    x = np.random.default_rng(2).normal(size=(2, 3))
    x = (x if (x @ W).sum() * sign > 0 else -x).astype(np.float32)
    program = load(IF)
    with amp.program_guard(program, program.startup), amp.unique_name.guard():
        if mode == "pure-fp16":
            amp.cast_model_to_fp16(program, use_fp16_guard=False)
        loss = F.sum(program.outputs[0] * program.outputs[0]) + F.sum(program.outputs[1] * program.outputs[1])
        pairs = dict((p.name, g) for p, g in amp.append_backward(loss))
    program.verify()
    scope, exe = amp.Scope(), amp.Executor(threads=1)
    exe.run(program.startup, scope=scope)
    if mode == "pure-fp16":
        amp.cast_parameters_to_fp16(amp.CPUPlace(), program, scope)
    dw, dv = exe.run(program, feed={"x": x}, fetch_list=[pairs["w"], pairs["v"]], scope=scope)
    limits = {"rtol": 1e-4, "atol": 1e-5} if mode == "fp32" else {"rtol": 1e-2, "atol": 2e-2}
    np.testing.assert_allclose(dw, numerical(lambda w: branches(x, w, V), W), **limits)
    np.testing.assert_allclose(dv, numerical(lambda v: branches(x, W, v), V), **limits)
    assert (dv == 0).all() == (sign < 0), "the branch that is not taken gives nothing"


def test_a_program_with_an_if_trains_through_decorate() -> None:
    program = load(IF)
    with amp.program_guard(program, program.startup), amp.unique_name.guard():
        loss = F.mean(program.outputs[0] * program.outputs[0])
        optimizer = amp.decorate(
            amp.optimizer.Adam(0.05, multi_precision=True), use_pure_fp16=True, use_fp16_guard=False
        )
        optimizer.minimize(loss)
    scope, exe = amp.Scope(), amp.Executor(threads=1)
    exe.run(program.startup, scope=scope)
    optimizer.amp_init(amp.CPUPlace(), scope=scope)
    feed = {"x": np.ones((2, 3), np.float32)}
    losses = [exe.run(program, feed=feed, fetch_list=[loss], scope=scope)[0].item() for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]


def test_an_if_on_a_known_shape_is_inlined() -> None:
    program = load("""
      net (float[2,3] x) => (float[2,3] y)
        <float[3,3] w = {0.1, 0.2, 0.3, -0.4, 0.5, 0.6, 0.7, -0.8, 0.9}, int64 two = {2}>
      {
        s = Shape <start = 0, end = 1> (x)
        r = Squeeze(s)
        same = Equal(r, two)
        y = If (same) <
          then_branch = yes () => (float[2,3] t) {
            d = If (same) <then_branch = a () => (float[2,3] p) { p = MatMul(x, w) },
                           else_branch = b () => (float[2,3] q) { q = Identity(x) }>
            t = Tanh(d) },
          else_branch = no () => (float[2,3] e) { e = Relu(x) }>
      }""")
    assert expand_control_flow(program)
    assert [op.type for op in program.operators if op.type in ("If", "MatMul", "Tanh", "Relu")] == ["MatMul", "Tanh"]
    program.verify()


@pytest.mark.parametrize(
    "change, told",
    [
        (("n)", "n, bool never)"), "trip count 'n' is not known before the run.*prepare_training"),
        (
            (
                "go = Identity(on)",
                "go = Greater(mean, low) mean = ReduceMean <keepdims = 0> (h_in) low = Constant <value = float {0.0}> ()",
            ),
            "decides in the run whether to go on",
        ),
    ],
)
def test_a_loop_of_unknown_length_is_named(change: tuple[str, str], told: str) -> None:
    program = load(LOOP.replace(*change, 1))
    before = program.to_onnx().SerializeToString()
    with amp.program_guard(program, program.startup), amp.unique_name.guard():
        loss = F.sum(program.var("h"))
        before = program.to_onnx().SerializeToString()
        with pytest.raises(amp.AmpError, match=f"through 'Loop -> h'.*{told}"):
            amp.append_backward(loss)
    assert program.to_onnx().SerializeToString() == before


@pytest.mark.parametrize("middle", [1, 3])
def test_an_if_that_the_fed_shapes_decide_trains(middle: int) -> None:
    """As exporters write ``squeeze``: the branch that is not taken does not even fit these shapes."""
    w = np.random.default_rng(0).normal(0, 1, (4, 1)).astype(np.float32)
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
    net (float[N,M,4] x) => (float[R,1] y) {
      h = MatMul(x, w)
      size = Shape <start = 1, end = 2> (h)
      one = Constant <value_ints = [1]> ()
      single = Equal(size, one)
      chosen = If (single) <then_branch = yes () => (float[] a) { twice = Add(h, h)  a = Squeeze(twice, one) },
                       else_branch = no () => (float[] b) { half = Constant <value_float = 0.5> ()
                                                            scaled = Mul(h, half)  b = Tanh(scaled) }>
      rows = Constant <value_ints = [-1, 1]> ()
      y = Reshape(chosen, rows)
    }""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    program = amp.Program.from_onnx(model)
    amp.prepare_training(program)
    shape = [2 * middle, 1]
    with amp.program_guard(program, program.startup), amp.unique_name.guard():
        loss = F.mse_loss(program.outputs[0], amp.data("t", shape, "float32"))
        amp.optimizer.SGD(0.1).minimize(loss)
    executor, scope = amp.Executor(), amp.Scope()
    executor.run(program.startup, scope=scope)
    rng = np.random.default_rng(1)
    x, t = rng.normal(0, 1, (2, middle, 4)).astype(np.float32), rng.normal(0, 1, shape).astype(np.float32)
    (value,) = executor.run(program, feed={"x": x, "t": t}, fetch_list=[loss], scope=scope)
    h = x.astype(np.float64) @ w
    y = (2 * h if middle == 1 else np.tanh(h / 2)).reshape(shape)
    inner = (2 * (y - t) / t.size).reshape(h.shape) * (2 if middle == 1 else (1 - np.tanh(h / 2) ** 2) / 2)
    np.testing.assert_allclose(value, ((y - t) ** 2).mean(), rtol=1e-5)
    expected = w - 0.1 * np.einsum("nmk,nmo->ko", x, inner)
    np.testing.assert_allclose(scope.find_var("w"), expected, rtol=1e-4, atol=1e-6)


def test_branches_may_call_their_initializers_alike() -> None:
    program = load("""net (float[2] x, bool c) => (float[2] y) {
      y = If (c) <then_branch = yes () => (float[2] a) <float[1] k = {2}> { a = Mul(x, k) },
                  else_branch = no () => (float[2] a) <float[1] k = {3}> { a = Mul(x, k) }>
    }""")
    x = np.ones(2, np.float32)
    found = [run(program, {"x": x, "c": np.array(c)}, *program.outputs)[0].tolist() for c in (True, False)]
    assert found == [[2, 2], [3, 3]]


def test_a_loop_unrolls_where_the_place_has_no_kernel_for_what_is_in_it() -> None:
    """WebGPU computes an LSTM as its parts, whose sizes the loop's body leaves open."""
    text = """net (float[3,2,4] x) => (float[3,2,4] y) <int64 n = {2}, bool yes = {1}, float[1,16,4] w, float[1,16,4] r> {
        y = Loop (n, yes, x) <body = b (int64 i, bool on, float[A,B,C] s) => (bool go, float[A,B,C] t) {
            go = Identity(on) h, hn, cn = LSTM<hidden_size=4>(s, w, r) one = Constant<value_ints=[1]>() t = Squeeze(h, one)
    }> }"""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]>\n{text}')
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(size=(1, 16, 4)).astype(np.float32) for name in "wr"}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
    feed, lowered = {"x": rng.normal(size=(3, 2, 4)).astype(np.float32)}, {}
    for place in (amp.CPUPlace(), amp.WebGPUPlace(0)):
        lowered[place.kind] = amp.Program.from_onnx(model).lower(place)
    assert {kind: "Loop" in {n.op_type for n in each.model.graph.node} for kind, each in lowered.items()} == {
        "cpu": True,
        "webgpu": False,
    }
    held, zero = lowered["webgpu"], np.zeros((), np.float32)
    given = {
        **feed,
        **{port.tensor: weights[port.variable] for port in held.states},
        **dict.fromkeys(held.scalars, zero),
    }
    np.testing.assert_allclose(session(held.model).run(None, given)[0], session(model).run(None, feed)[0], atol=1e-6)
