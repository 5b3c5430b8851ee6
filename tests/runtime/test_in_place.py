"""State updated where it lies: the proof, and that what it allows is right whatever order the runtime chooses."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import parser

from amp_transpiler.ir.types import NAMES
from amp_transpiler.passes.lowering.in_place import refusals
from amp_transpiler.passes.lowering.lowered import Lowered, Port
from amp_transpiler.passes.lowering.place import Place
from amp_transpiler.runtime import CPUPlace, Scope
from amp_transpiler.runtime.binding import Step
from amp_transpiler.runtime.session import Settings, create_session
from tests.corpora.in_place_corpus import ROWS, SAFE, SCAN, UNSAFE
from tests.helpers.on_places import IN_PLACE
from tests.helpers.sessions import session

SGD = """
<ir_version: 10, opset_import: ["" : 21]>
step (float[4, 3] x, float[3, 3] w, float[3, 2] v) => (float[3, 3] w_new, float[3, 2] v_new, float loss)
{
    h = MatMul(x, w)
    y = MatMul(h, v)
    loss = ReduceSumSquare <keepdims = 0> (y)
    ht = Transpose <perm = [1, 0]> (h)
    dv = MatMul(ht, y)
    vt = Transpose <perm = [1, 0]> (v)
    dh = MatMul(y, vt)
    xt = Transpose <perm = [1, 0]> (x)
    dw = MatMul(xt, dh)
    rate = Constant <value_float = 0.001> ()
    sw = Mul(dw, rate)
    sv = Mul(dv, rate)
    w_step = Sub(w, sw)
    v_step = Sub(v, sv)
    UPDATE
}
"""
PLAIN = "w_new = Identity(w_step)\n v_new = Identity(v_step)"
GATED = """
    zero = Constant <value_float = 0.0> ()
    sum_w = ReduceSum <keepdims = 0> (dw)
    sum_v = ReduceSum <keepdims = 0> (dv)
    nothing_w = Mul(sum_w, zero)
    nothing_v = Mul(sum_v, zero)
    nothing = Add(nothing_w, nothing_v)
    ok = Equal(nothing, zero)
    w_new = Where(ok, w_step, w)
    v_new = Where(ok, v_step, v)
"""
Values = dict[str, np.ndarray]
STATES = {"w": "w_new", "v": "v_new"}


def model(body: str, signature: str = "(float[4] s, float[4] x) => (float[4] s_new, float[4] seen)") -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> step {signature} {{ {body} }}')


def verdict(body: str, signature: str = "(float[4] s, float[4] x) => (float[4] s_new, float[4] seen)") -> str:
    return refusals(model(body, signature).graph, [("s", "s_new")])[0]


# -- the proof, case by case ---------------------------------------------------------------------------
@pytest.mark.parametrize("case", SAFE)
def test_proved_safe(case: str) -> None:
    assert verdict(SAFE[case]) == ""


@pytest.mark.parametrize("case", UNSAFE)
def test_refused_with_the_reason(case: str) -> None:
    body, reason = UNSAFE[case]
    assert reason in verdict(body)


def test_broadcast_state_is_refused() -> None:
    assert "shape" in verdict("s_new = Add(s, x)", "(float[1] s, float[4] x) => (float[4] s_new)")
    assert "shape" in verdict("s_new = Add(s, x)", "(float[N] s, float[N] x) => (float[N] s_new)")


@pytest.mark.parametrize(
    ("more", "read", "body", "reason"),
    [
        ("", "s, y", "n = Exp(r)  p = Add(r, n)", ""),
        ("", "y, v", "p = Add(q, r)", "Scan 's_new', which makes the update, is not elementwise in it"),
        ("", "s, s", "p = Add(r, q)", "Scan 's_new', which makes the update, is not elementwise in it"),
        ("", "s, y", "p = Sum(r, q, q)", "Sum 'p', which makes the update, is not elementwise in it"),
        ("", "s, y", "e = Exp(q)  p = Add(e, r)", ""),
        ("", "s, y", "a = ReduceSum <keepdims = 0> (s)  p = Add(r, a)", "reads more of it than a slice"),
        ("", "s, y", "a = ReduceSum <keepdims = 0> (v)  p = Add(r, a)", "reads more of it than a slice"),
        (", scan_output_directions = [1]", "s, y", "p = Add(r, q)", "Scan 's_new', which makes the update, is not"),
    ],
)
def test_row_by_row(more: str, read: str, body: str, reason: str) -> None:
    view = "v = Identity(s)  " if "v" in read + body else ""
    text = view + SCAN.format(read, more, body)
    found = verdict(text, ROWS)
    assert reason in found and bool(reason) == bool(found)
    for level in ("basic", "all"):
        agrees(model(text, ROWS), {"s": "s_new"}, np.random.default_rng(3), level, CPUPlace())


def test_rows_that_another_output_reads_late() -> None:
    """Each output is asked for by itself: the first may be written before the second reads the row."""
    signature = "(float[4, 1] s, float[4, 1] m) => (float[4, 1] s_new, float[4, 1] m_new)"
    body = "p = Exp(r)  o = Add(q, r)"
    graph = f"b (float[1] r, float[1] q) => (float[1] p, float[1] o) {{ {body} }}"
    text = f"s_new, m_new = Scan (s, m) <num_scan_inputs = 2, body = {graph}>"
    first, second = refusals(model(text, signature).graph, [("s", "s_new"), ("m", "m_new")])
    assert "Add 'o' may read it after the update" in first and second == ""


def test_one_state_of_another_update() -> None:
    signature = "(float[4] s, float[4] m, float[4] x) => (float[4] s_new, float[4] m_new)"
    graph = model("m_new = Mul(m, x)  s_new = Sub(s, m)", signature)
    first, second = refusals(graph.graph, [("s", "s_new"), ("m", "m_new")])
    assert first == "" and "Sub 's_new' may read it after" in second


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("y = Exp(s)  s_new = Sub(s, x)", ""),
        ("s_new = Sub(s, x)  y = Exp(s)", "Exp 'y' may read it after"),
        ("y = Exp(x)  z = Mul(s, y)  s_new = Sub(s, x)", "Mul 'z' may read it after"),
        ("y = Exp(s)  z = Mul(s, y)  s_new = Sub(s, z)", ""),
    ],
)
def test_what_an_earlier_part_reads_has_been_read(body: str, reason: str) -> None:
    graph = model(body, "(float[4] s, float[4] x) => (float[4] s_new)").graph
    (found,) = refusals(graph, [("s", "s_new")], ends=[1, len(graph.node)])
    assert reason in found and bool(reason) == bool(found)


# -- what the runtime does with it -----------------------------------------------------------------------
def shuffled(source: onnx.ModelProto, rng: np.random.Generator) -> onnx.ModelProto:
    """The same graph with its nodes in another topological order and its outputs in another order."""
    copy = onnx.ModelProto()
    copy.CopyFrom(source)
    del copy.graph.node[:]
    done = {value.name for value in [*source.graph.input, *source.graph.initializer]}
    waiting = list(source.graph.node)
    while waiting:
        ready = [node for node in waiting if all(name in done for name in node.input)]
        node = ready[rng.integers(len(ready))]
        waiting.remove(node)
        copy.graph.node.append(node)
        done.update(node.output)
    del copy.graph.output[:]
    copy.graph.output.extend(source.graph.output[i] for i in rng.permutation(len(source.graph.output)))
    return copy


def port(info: onnx.ValueInfoProto, variable: str | None = None) -> Port:
    tensor = info.type.tensor_type
    return Port(variable or info.name, info.name, NAMES[tensor.elem_type], tuple(d.dim_value for d in tensor.shape.dim))


@pytest.fixture(params=IN_PLACE)
def place(request: pytest.FixtureRequest) -> Place:
    return request.param  # type: ignore[no-any-return]


def step_of(source: onnx.ModelProto, states: dict[str, str], level: str, place: Place) -> Step:
    """A step in which ``states`` maps state inputs to their update outputs; all else is fed and fetched."""
    graph, news = source.graph, {new: state for state, new in states.items()}
    lowered = Lowered(
        source,
        place.kind,
        feeds=[port(i) for i in graph.input if i.name not in states],
        states=[port(i) for i in graph.input if i.name in states],
        fetches=[port(o) for o in graph.output if o.name not in news],
        updates=[port(o, news[o.name]) for o in graph.output if o.name in news],
    )
    session, optimized = create_session(source, place, Settings(level, threads=1), "test", keep_graph=True)
    return Step(session, optimized, lowered, place, "test", "")


def functional(
    source: onnx.ModelProto, states: dict[str, str], values: Values, feeds: Values, steps: int
) -> tuple[Values, list[list[np.ndarray]]]:
    """The same steps with every value in memory of its own."""
    running = session(source, "DISABLE_ALL")
    fetched = []
    for _ in range(steps):
        names = [o.name for o in source.graph.output]
        results = dict(zip(names, running.run(names, values | feeds), strict=True))
        fetched.append([results[n] for n in names if n not in states.values()])
        values = {state: results[new] for state, new in states.items()}
    return values, fetched


def agrees(
    source: onnx.ModelProto,
    states: dict[str, str],
    rng: np.random.Generator,
    level: str,
    place: Place,
    steps: int = 3,
    trusting: bool = False,
) -> Step:
    """Runs ``source`` bound and functionally from random values, asserts equality, and returns the step.

    ``trusting`` binds every update in place, whatever the proof says.
    """
    made = {i.name: rng.standard_normal(port(i).shape).astype(np.float32) for i in source.graph.input}  # type: ignore[arg-type]
    scope = Scope()
    for name in states:
        scope.set_var(name, made[name])
    feeds = {name: array for name, array in made.items() if name not in states}
    step = step_of(source, states, level, place)
    for update in step.updates if trusting else ():
        update.refusal = ""
    expected, seen = functional(source, states, {name: made[name] for name in states}, feeds, steps)
    for wanted in seen:
        for got, want in zip(step.run(scope, feeds, True), wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    for name, want in expected.items():
        np.testing.assert_allclose(scope.find_var(name), want, rtol=1e-5, atol=1e-5)
    return step


@pytest.mark.parametrize("level", ["basic", "all"])
@pytest.mark.parametrize("update", [PLAIN, GATED], ids=["plain", "gated"])
@pytest.mark.parametrize("seed", range(15))
def test_training_step_in_any_node_order(seed: int, update: str, level: str, place: Place) -> None:
    rng = np.random.default_rng(seed)
    source = parser.parse_model(SGD.replace("UPDATE", update))
    step = agrees(shuffled(source, rng), STATES, rng, level, place)
    refused = {u.port.variable: u.refusal for u in step.updates}
    if update is GATED:
        assert refused == {"w": "", "v": ""}  # found_inf makes every reader an ancestor of every update
    else:
        assert "may read it after" in refused["v"]  # dh reads v, and nothing orders it before v's update


@pytest.mark.parametrize("level", ["basic", "all"])
def test_every_case_runs_right(level: str, place: Place) -> None:
    rng = np.random.default_rng(3)
    for case, body in {**SAFE, **{k: v for k, (v, _) in UNSAFE.items()}}.items():
        if case in ("unknown operator", "given, not made"):
            continue
        agrees(model(body), {"s": "s_new"}, rng, level, place)


def random_program(rng: np.random.Generator) -> onnx.ModelProto:
    """A few states, updates that read any state or value, views among them, and some values fetched."""
    count = int(rng.integers(1, 4))
    states, lines, values = [f"s{i}" for i in range(count)], [], [f"s{i}" for i in range(count)] + ["x"]
    for i in range(int(rng.integers(2, 9))):
        a, b = (values[rng.integers(len(values))] for _ in range(2))
        kind = rng.choice(["Add", "Sub", "Max", "Tanh", "Identity", "Reshape", "Transpose", "MatMul", "Flatten", "Sum"])
        name = f"t{i}"
        lines.append(
            {
                "Tanh": f"{name} = Tanh({a})",
                "Identity": f"{name} = Identity({a})",
                "Flatten": f"{name} = Flatten({a})",
                "Reshape": f"{name} = Reshape({a}, square)",
                "Transpose": f"{name} = Transpose <perm = [1, 0]> ({a})",
                "Sum": f"{name} = Sum({a}, {b}, x)",
            }.get(kind, f"{name} = {kind}({a}, {b})")
        )
        values.append(name)
    for i, state in enumerate(states):
        a, b = (values[rng.integers(len(values))] for _ in range(2))
        kind = rng.choice(["Sub", "Mul", "MatMul", "Where", "Max", "Tanh"])
        binary = f"{kind}({state if i % 2 else b}, {a})"
        lines.append(f"n{i} = " + {"Where": f"Where(ok, {a}, {state})", "Tanh": f"Tanh({a})"}.get(kind, binary))
    lines += [f"f{i} = Tanh({values[rng.integers(len(values))]})" for i in range(2)]
    inputs = ", ".join(f"float[3, 3] {v}" for v in [*states, "x"])
    outputs = ", ".join([f"float[3, 3] n{i}" for i in range(count)] + ["float[3, 3] f0", "float[3, 3] f1"])
    head = "square = Constant <value_ints = [3, 3]> ()  limit = Constant <value_float = 0.0> ()  ok = Greater(x, limit)"
    return model("\n".join([head, *lines]), f"({inputs}) => ({outputs})")


@pytest.mark.parametrize("level", ["basic", "all"])
def test_random_programs_in_random_orders(level: str, place: Place) -> None:
    rng = np.random.default_rng(11)
    in_place = 0
    for _ in range(150):
        source = random_program(rng)
        states = {i.name: f"n{i.name[1:]}" for i in source.graph.input if i.name != "x"}
        step = agrees(shuffled(source, rng), states, rng, level, place, steps=2)
        in_place += sum(not u.refusal for u in step.updates)
    assert in_place > 20  # the proof is no empty one


HAZARDS = {
    "late reader": (SGD.replace("UPDATE", PLAIN), STATES),
    "not elementwise": (
        """<ir_version: 10, opset_import: ["" : 21]>
        step (float[8, 8] s, float[8, 8] x) => (float[8, 8] s_new, float[8, 8] seen)
        {
            t = Transpose <perm = [1, 0]> (s)
            s_new = Identity(t)
            seen = Relu(x)
        }""",
        {"s": "s_new"},
    ),
    "late reader of a view": (
        """<ir_version: 10, opset_import: ["" : 21]>
        step (float[4, 4] s, float[4, 4] x) => (float[4, 4] s_new, float[16] seen)
        {
            flat = Constant <value_ints = [16]> ()
            view = Reshape(s, flat)
            sum = ReduceSum <keepdims = 0> (view)
            part = Mul(x, sum)
            s_new = Sub(s, part)
            a = Tanh(view)
            seen = Tanh(a)
        }""",
        {"s": "s_new"},
    ),
}


@pytest.mark.parametrize("case", HAZARDS)
def test_aliasing_without_the_proof_goes_wrong(case: str) -> None:
    """The hazards are real here: with every update bound in place, some node order gives wrong results."""
    text, states = HAZARDS[case]
    rng = np.random.default_rng(7)
    wrong = 0
    for _ in range(20):
        source = shuffled(parser.parse_model(text), rng)
        assert any(u.refusal for u in agrees(source, states, rng, "basic", CPUPlace()).updates)
        try:
            agrees(source, states, rng, "basic", CPUPlace(), trusting=True)
        except AssertionError:
            wrong += 1
    assert wrong


def test_in_place_state_keeps_its_buffer_and_two_buffers_alternate(place: Place) -> None:
    scope = Scope()
    scope.set_var("s", np.zeros(4, np.float32))
    feeds = {"x": np.ones(4, np.float32)}
    first = scope.ort_value_on(place, "s").data_ptr()
    step = step_of(model(SAFE["elementwise"]), {"s": "s_new"}, "all", place)
    for _ in range(3):
        step.run(scope, feeds, True)
        assert scope.ort_values["s"].data_ptr() == first
    assert scope.find_var("s").tolist() == [-3.0] * 4

    step = step_of(model(UNSAFE["late reader"][0]), {"s": "s_new"}, "all", place)
    pointers = []
    for _ in range(4):
        step.run(scope, feeds, True)
        pointers.append(scope.ort_values["s"].data_ptr())
    assert pointers[0] == pointers[2] != pointers[1] == pointers[3] == first
    assert scope.find_var("s").tolist() == [-7.0] * 4


@pytest.mark.parametrize("body", [SAFE["elementwise"], UNSAFE["late reader"][0]])
def test_one_step_serves_two_scopes_and_a_replaced_value(body: str, place: Place) -> None:
    step = step_of(model(body), {"s": "s_new"}, "all", place)
    a, b = Scope(), Scope()
    a.set_var("s", np.zeros(4, np.float32))
    b.set_var("s", np.full(4, 10, np.float32))
    feeds = {"x": np.ones(4, np.float32)}
    for scope in (a, b, a, a, b):
        step.run(scope, feeds, True)
    assert a.find_var("s").tolist() == [-3.0] * 4 and b.find_var("s").tolist() == [8.0] * 4
    a.set_var("s", np.full(4, 5, np.float32))
    step.run(a, feeds, True)
    assert a.find_var("s").tolist() == [4.0] * 4 and b.find_var("s").tolist() == [8.0] * 4
