"""A layer that is called several times has one bias and one norm, also while these are what they were at first."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.nn import functional as F

RNG = np.random.default_rng(0)
CALLS = range(3)
A, B, C = (RNG.normal(size=(4, 4)).astype(np.float32) for _ in range(3))
FILTERS = RNG.normal(size=(2, 2, 3)).astype(np.float32)
ZEROS, ONES = np.zeros(4, np.float32), np.ones(4, np.float32)
X = RNG.normal(size=(3, 4)).astype(np.float32)
Arrays = dict[str, np.ndarray]


def load(text: str, held: Arrays, scopes: str = "") -> amp.Program:
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18]> net {text}')
    for node in model.graph.node if scopes else ():
        node.name = f"{scopes.format(node.output[0][-1])}/{node.op_type}"
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in held.items())
    program = amp.Program.from_onnx(model)
    amp.prepare_training(program)
    return program


def gradients(program: amp.Program, x: np.ndarray) -> Arrays:
    """Of the sum of squares, by parameter."""
    with amp.program_guard(program, program.startup):
        found = {p.name: g for p, g in amp.append_backward(F.sum(program.outputs[0] * program.outputs[0]))}
    scope, exe = amp.Scope(), amp.Executor(threads=1)
    exe.run(program.startup, scope=scope)
    return dict(zip(found, exe.run(program, {"x": x}, list(found.values()), scope), strict=True))


def differences(computed: Callable[[Arrays], np.ndarray], held: Arrays, name: str) -> np.ndarray:
    """The same gradient, by differences in float64."""
    found = np.zeros(held[name].shape)
    for place in np.ndindex(found.shape):
        step = np.zeros(found.shape)
        step[place] = 1e-6
        sides = [(computed(held | {name: held[name] + sign * step}) ** 2).sum() for sign in (1, -1)]
        found[place] = (sides[0] - sides[1]) / 2e-6
    return found


def assert_trained(program: amp.Program, computed: Callable[[Arrays], np.ndarray], held: Arrays) -> None:
    got = gradients(program, X)
    assert got.keys() == held.keys()
    exact = {name: array.astype(np.float64) for name, array in held.items()}
    for name, gradient in got.items():
        np.testing.assert_allclose(
            gradient, differences(computed, exact, name).reshape(gradient.shape), rtol=1e-3, atol=1e-3, err_msg=name
        )


def normal(x: np.ndarray, scale: np.ndarray, shift: np.ndarray) -> np.ndarray:
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale + shift


def blocks(held: Arrays, norm: bool = True) -> np.ndarray:
    x = X.astype(np.float64)
    for _ in CALLS:
        n = normal(x, held["scale"], held["shift"]) if norm else x
        x = x + np.tanh(n @ held["a"] + held["p"]) @ held["b"] + held["q"]
    return x


GEMM = "n{i} = LayerNormalization (x{i}, scale, shift) h{i} = Gemm (n{i}, a, p) t{i} = Tanh (h{i}) "
GEMM += "g{i} = Gemm (t{i}, b, q) x{j} = Add (x{i}, g{i}) "
MATMUL = "n{i} = LayerNormalization (x{i}, scale, shift) m{i} = MatMul (n{i}, a) e{i} = Add (m{i}, p) "
MATMUL += (
    "h{i} = Identity (e{i}) t{i} = Tanh (h{i}) o{i} = MatMul (t{i}, b) g{i} = Add (q, o{i}) x{j} = Add (x{i}, g{i}) "
)


def called(body: str, first: str = "x0 = Identity (x)", last: str = "y = Identity (x3)") -> str:
    calls = "".join(body.format(i=i, j=i + 1) for i in CALLS)
    return f"(float[3,4] x) => (float[3,4] y) {{ {first} {calls} {last} }}"


@pytest.mark.parametrize("body", [GEMM, MATMUL])
def test_the_bias_and_the_norm_of_a_block_stay_one(body: str) -> None:
    held = {"a": A, "b": B, "p": ZEROS, "q": ZEROS, "scale": ONES, "shift": ZEROS}
    program = load(called(body), held)
    assert_trained(program, blocks, held)


def test_biases_that_an_exporter_merged_are_apart_by_the_weights_beside_them() -> None:
    """All vectors of zeros are one tensor here."""
    program = load(called(MATMUL.replace("q", "p").replace("shift", "p")), {"a": A, "b": B, "p": ZEROS, "scale": ONES})
    copies = sorted(v.name for v in program.parameters if v.name.startswith("p."))
    assert len(copies) == 2
    found = gradients(program, X)
    held = {"a": A, "b": B, "p": ZEROS, "q": ZEROS, "scale": ONES, "shift": ZEROS}
    exact = {name: array.astype(np.float64) for name, array in held.items()}
    for name in ("p", "q", "shift"):
        right = differences(blocks, exact, name)
        assert any(np.allclose(found[copy], right, rtol=1e-3, atol=1e-3) for copy in ("p", *copies))


def test_a_norm_behind_the_blocks_is_another() -> None:
    held = {"a": A, "b": B, "c": C, "p": ZEROS, "q": ZEROS, "scale": ONES, "shift": ZEROS}
    last = "f = LayerNormalization (x3, scale, shift) y = MatMul (f, c)"
    program = load(called(GEMM, last=last), held)
    assert {v.name for v in program.parameters} == {*held, "scale.f", "shift.f"}


def test_a_norm_behind_each_block_is_one() -> None:
    """Though what reads the last is another layer."""
    body = "h{i} = Gemm (x{i}, a, p) r{i} = Add (x{i}, h{i}) x{j} = LayerNormalization (r{i}, scale, shift) "
    held = {"a": A, "c": C, "p": ZEROS, "scale": ONES, "shift": ZEROS}
    program = load(called(body, last="y = MatMul (x3, c)"), held)

    def computed(now: Arrays) -> np.ndarray:
        x = X.astype(np.float64)
        for _ in CALLS:
            x = normal(x + x @ now["a"] + now["p"], now["scale"], now["shift"])
        return x @ now["c"]

    assert_trained(program, computed, held)


@pytest.mark.parametrize(("scopes", "count"), [("/layer.{}/fc", 3), ("/layer/fc", 1)])
def test_biases_of_modules_are_apart_though_their_equal_weights_are_merged(scopes: str, count: int) -> None:
    """As those of layers that were copied, of which the exporter has made one: the note says which train as one."""
    body = "m{i} = MatMul (x{i}, a) e{i} = Identity (m{i}) h{i} = Add (e{i}, p) x{j} = Tanh (h{i}) "
    program = load(called(body), {"a": A, "p": ZEROS}, scopes)
    assert len(program.parameters) == 1 + count


def test_what_meets_one_product_several_times_is_of_several_layers() -> None:
    body = "m{i} = MatMul (x{i}, a) e{i} = Add (m{i}, p) f{i} = Add (m{i}, p) x{j} = Mul (e{i}, f{i}) "
    program = load(called(body), {"a": A, "p": ZEROS})
    assert len(program.parameters) == 1 + 2 * len(CALLS)


@pytest.mark.parametrize(("bias", "count"), [(-0.2371294, 1), (0.0, 3), (0.1, 3)])
def test_a_bias_of_one_number_is_one_where_no_parameter_begins_with_it(bias: float, count: int) -> None:
    """Each call has its own transposed weight here, as exports without constant folding do."""
    body = "w{i} = Transpose (a) m{i} = MatMul (x{i}, w{i}) h{i} = Add (p, m{i}) x{j} = Add (x{i}, h{i}) "
    program = load(called(body), {"a": A[:1], "p": np.array([bias], np.float32)}, "/layer_{}/fc")
    assert len(program.parameters) == 1 + count


LOOP = """(float[3,4] x) => (float[3,4] y) <int64 trips = {3}, bool go = {1}> {
    unread, y = Loop (trips, go, p, x) <body = turn (int64 i, bool on, float[4] s, float[3,4] v)
        => (bool again, float[4] kept, float[3,4] w) {
            again = Identity (on) kept = Identity (s) m = READ e = Add (m, s) t = Tanh (e) w = Add (v, t) }> }"""


@pytest.mark.parametrize("read", ["Mul (v, a)", "MatMul (v, a)"])
def test_what_the_turns_of_a_loop_read_stays_one(read: str) -> None:
    """Here the bias goes from turn to turn, as JAX's exporter writes it."""
    held = {"a": A if "Mat" in read else A[0], "p": ZEROS}
    program = load(LOOP.replace("READ", read), held)

    def computed(now: Arrays) -> np.ndarray:
        x = X.astype(np.float64)
        for _ in CALLS:
            x = x + np.tanh((x @ now["a"] if "Mat" in read else x * now["a"]) + now["p"])
        return x

    assert_trained(program, computed, held)


SCAN = """(float[3,4] x) => (float[4] last, float[3,4] y) {
    last, y = Scan <num_scan_inputs = 1, body = turn (float[4] s, float[4] v) => (float[4] t, float[4] w)
        { n = Add (v, p) t = Add (s, n) m = Mul (v, n) w = Add (m, p) }> (start, x) }"""


def test_a_scan_reads_one_parameter_in_each_place() -> None:
    """Two places of the body are two layers, which an exporter may have merged."""
    program = load(SCAN, {"p": ZEROS, "start": np.ones(4, np.float32)})
    assert [len(v.readers) for v in program.parameters if v.name.startswith("p")] == [3, 3]


CONV = "(float[1,2,4] x) => (float[1,2,4] y) { h = Conv <pads = [1, 1]> (x, v, p) r = Tanh (h) "
CONV += "y = Conv <pads = [1, 1]> (r, w, p) }"


@pytest.mark.parametrize(
    ("names", "count"),
    [(("kernel_0", "kernel_1"), 2), (("layer.0.weight", "layer.1.weight"), 4)],
)
def test_filters_that_are_written_for_each_call_are_one(names: tuple[str, str], count: int) -> None:
    """Those of layers that were copied are not."""
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18]> net {CONV}')
    for node in model.graph.node:
        for place, name in enumerate(node.input):
            node.input[place] = {"v": names[0], "w": names[1]}.get(name, name)
    held = {**dict.fromkeys(names, FILTERS), "p": ZEROS[:2]}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in held.items())
    report = amp.prepare_training(amp.Program.from_onnx(model))
    assert len(report.trainable) == count
    assert any("tied again" in note for note in report.notes) == (count == 2)


@pytest.mark.parametrize("trips", ["<int64 trips = {3}>", ""])
def test_what_nothing_in_a_loop_reads_is_not_trained(trips: str) -> None:
    """Whether the loop is unrolled or not."""
    given = "" if trips else ", int64 trips"
    text = f"""(float[3,4] x{given}) => (float[3,4] y) {trips} {{
        y = Loop (trips, , x) <body = turn (int64 i, bool on, float[3,4] v) => (bool again, float[3,4] w)
            <float[4] dead = {{1.0, 2.0, 3.5, 1.0}}, float[4] live = {{1.0, 0.25, 3.0, 1.0}}>
            {{ again = Identity (on) w = Mul (v, live) }}> }}"""
    program = load(text, {})
    assert [v.name for v in program.parameters] == ["live"]
    program.verify()
