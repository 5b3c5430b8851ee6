"""Measuring 16 bit beside fp32: statistics against numpy, outputs against the executor, and who is to blame."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.conversion.calibration import measure
from amp_transpiler.conversion.calibration.measure import Measurement, measure as run_measure, outputs_of
from amp_transpiler.errors import ArgumentError, FeedError, FeedTypeError
from amp_transpiler.program import Program
from amp_transpiler.runtime import CPUPlace, Executor, Scope
from amp_transpiler.runtime.session import Settings
from tests.helpers.constraints_of import without_parameters
from tests.helpers.statistics_of import TYPES, by_numpy, check_equal
from tests.helpers.where import TRAPS

HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'

NETWORK = """m (float[N,8] x) => (float[N,8] y) <float[8,8] w = {WEIGHTS}, float[8] b = {0.1, -0.2, 0.3, 0, 0, 1, 2, 3}>
{ h = MatMul(x, w)  a = Add(h, b)  r = Relu(a)  s = Softmax(r)  g = Sigmoid(h)  t = Mul(s, g)  y = Add(t, x) }"""
WEIGHTS = ",".join(f"{v:.4f}" for v in np.random.default_rng(0).normal(0, 1, 64))


def model(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(HEAD + text.replace("WEIGHTS", WEIGHTS))


def reference(proto: onnx.ModelProto) -> Program:
    return without_parameters(Program.from_onnx(proto))


def literal(proto: onnx.ModelProto, dtype: str = "float16", **options: Any) -> Program:
    """All that can be is 16 bit, safe or not."""
    return amp.convert(proto, dtype=dtype, numeric_guards=False, black_list=[], **options)


def measured(text: str, *batches: dict[str, np.ndarray], dtype: str = "float16", **options: Any) -> Measurement:
    proto = model(text)
    return run_measure(reference(proto), literal(proto, dtype, **options), batches, dtype)


def samples(*rows: int, scale: float = 1.0) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    return [{"x": (scale * rng.standard_normal((n, 8))).astype(np.float32)} for n in rows]


# -- statistics against numpy ------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_statistics_are_those_of_the_fetched_tensors(dtype: str) -> None:
    proto, batches = model(NETWORK), samples(3, 5, 3, scale=3)
    fp32, half = reference(proto), literal(proto, dtype)
    found = run_measure(fp32, half, batches, dtype)
    names = ["x", "h", "a", "r", "s", "g", "t", "y"]
    assert list(found.tensors) == names
    exe = Executor(CPUPlace(), optimization_level="basic")
    runs = {p: [exe.run(p, feed=b, fetch_list=names, scope=Scope()) for b in batches] for p in (fp32, half)}
    for i, name in enumerate(names):
        check_equal(found.tensors[name], by_numpy([r[i] for r in runs[fp32]], [r[i] for r in runs[half]], dtype))
    assert half.var("h").dtype == dtype and found.tensors["h"].error > 0


def test_infinity_in_fp32_is_no_overflow_and_hides_none() -> None:
    text = """m (float[1,8] x, float[8] mask) => (float[1,8] y) <float k = {1000.0}>
    { h = Mul(x, k)  m = Add(h, mask)  y = Softmax(m) }"""
    mask = np.array([0, 0, 0, 0, -np.inf, -np.inf, 0, 0], np.float32)
    found = measured(text, {"x": np.full((1, 8), 99, np.float32), "mask": mask})
    assert found.tensors["m"].largest == 99000 and found.tensors["m"].overflow == 1
    found = measured(text, {"x": np.full((1, 8), 9, np.float32), "mask": mask})
    assert found.tensors["m"].largest == 9000 and found.tensors["m"].finite and found.outputs["y"] < 1e-3


# -- outputs ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("keep_io", [True, False])
def test_outputs_are_those_of_the_executor(dtype: str, keep_io: bool) -> None:
    proto, batches = model(NETWORK), samples(3, 4)
    half = literal(proto, dtype, keep_io=keep_io)
    exe = Executor(CPUPlace(), optimization_level="basic")
    given = [{"x": b["x"] if keep_io else b["x"].astype(TYPES[dtype])} for b in batches]
    for got, feed in zip(outputs_of(half, batches), given, strict=True):
        wanted = exe.run(half, feed=feed, fetch_list=["y"], scope=Scope())[0]
        assert got[0].dtype == wanted.dtype == (np.float32 if keep_io else TYPES[dtype])
        assert got[0].tobytes() == wanted.tobytes()
    exact = [exe.run(reference(proto), feed=b, fetch_list=["y"], scope=Scope())[0] for b in batches]
    rounded = [o[0].astype(np.float64) for o in outputs_of(half, batches)]
    off = math.sqrt(sum(((r - e) ** 2).sum() for r, e in zip(rounded, exact, strict=True)))
    found = run_measure(reference(proto), half, batches, dtype, tensors=False)
    norm = math.sqrt(sum((e.astype(np.float64) ** 2).sum() for e in exact))
    assert found.outputs["y"] == pytest.approx(off / norm) and found.tensors == {}


def test_expected_outputs_stand_for_those_of_the_reference() -> None:
    proto, batches = model(NETWORK), samples(2)
    expected = [[2 * outputs_of(reference(proto), batches)[0][0]]]
    found = run_measure(reference(proto), literal(proto), batches, "float16", expected=expected)
    assert found.outputs["y"] == pytest.approx(0.5, rel=1e-2) and found.tensors["y"].error < 1e-2


def test_outputs_of_every_kind() -> None:
    text = """m (float[4] x) => (int64[4] up, bool[4] high, seq(float[4]) both) <float k = {1000.3}, float half = {1000.5}>
    { h = Mul(x, k)  high = Greater(h, half)  r = Floor(h)  up = Cast<to=7>(r)  both = SequenceConstruct(h, x) }"""
    found = measured(text, {"x": np.array([1, 1.0003, 2, 3], np.float32)})
    x32 = np.array([1, 1.0003, 2, 3], np.float32) * np.float32(1000.3)
    x16 = (np.array([1, 1.0003, 2, 3], np.float16).astype(np.float32) * np.float32(np.float16(1000.3))).astype(
        np.float16
    )
    half = np.float16(1000.5)
    assert found.outputs["up"] == (np.floor(x32) != np.floor(x16)).mean() > 0
    assert found.outputs["high"] == ((x32 > 1000.5) != (x16 > half)).mean() > 0
    assert 0 < found.outputs["both"] < 1e-3


# -- what goes wrong in 16 bit shows ----------------------------------------------------------------------------
CHAIN = "m (float[2] x) => (float[2] y) <float up = {UP}, float down = {DOWN}> { h = Mul(x, up)  y = Mul(h, down) }"


def test_overflow_shows_although_the_output_is_small() -> None:
    text = CHAIN.replace("UP", "1000.0").replace("DOWN", "0.001")
    found = measured(text, {"x": np.array([1, 100], np.float32)})
    assert found.tensors["h"].overflow == 0.5 and found.tensors["h"].largest == 100000
    assert not found.tensors["h"].finite and found.tensors["h"].error == math.inf == found.outputs["y"]
    assert measured(text, {"x": np.array([1, 100], np.float32)}, dtype="bfloat16").outputs["y"] < 0.01


def test_underflow_shows_although_the_output_is_large() -> None:
    text = CHAIN.replace("UP", "0.00001").replace("DOWN", "100000.0")
    found = measured(text.replace("100000.0", "50000.0"), {"x": np.array([1e-4, 1e-4], np.float32)})
    assert found.tensors["h"].rounding == 1 and found.outputs["y"] == 1 and found.tensors["h"].overflow == 0
    assert found.tensors["h"].largest == found.tensors["h"].smallest == pytest.approx(1e-9)
    assert found.tensors["x"].rounding < 1e-3


def trap(name: str) -> tuple[Path, dict[str, np.ndarray]]:
    path = TRAPS / f"{name}.onnx"
    return path, dict(np.load(path.with_suffix(".npz")))


def test_a_trap_of_sums_overflows() -> None:
    path, batch = trap("p09_reducesum_overflow")
    fp32 = reference(onnx.load(path))
    found = run_measure(fp32, literal(onnx.load(path)), [batch], "float16")
    a, s = found.tensors["a"], found.tensors["s"]
    assert (a.overflow, s.overflow) == (2 / 32, 1) and not a.finite and math.isnan(found.outputs["y"])
    assert run_measure(fp32, amp.convert(path), [batch], "float16").outputs["y"] < 1e-2


def test_a_trap_of_a_tiny_eps_sinks() -> None:
    path, batch = trap("p07_eps_1e-12_add")
    fp32 = reference(onnx.load(path))
    found = run_measure(fp32, literal(onnx.load(path)), [batch], "float16")
    assert found.tensors["a"].smallest < 2**-23
    zero = {"x": np.zeros((4, 8), np.float32)}
    assert math.isnan(run_measure(fp32, literal(onnx.load(path)), [batch, zero], "float16").outputs["y"])
    assert run_measure(fp32, amp.convert(path), [batch, zero], "float16").outputs["y"] < 1e-3


def test_a_trap_of_a_large_variance_is_none_while_statistics_stay_fp32() -> None:
    path, batch = trap("p21_batchnorm_large_var")
    found = run_measure(reference(onnx.load(path)), literal(onnx.load(path)), [batch], "float16")
    assert found.outputs["y"] < 1e-3 and found.tensors["y"].overflow == 0


# -- sessions ----------------------------------------------------------------------------------------------------
@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each session that is made: the number of its outputs."""
    made: list[int] = []
    create = measure.create_session

    def counted(proto: onnx.ModelProto, place: Any, settings: Settings, name: str) -> Any:
        # from "extended" on, the runtime computes several operators as one: on some shapes other bits
        assert settings.optimization_level == "basic"
        made.append(len(proto.graph.output))
        return create(proto, place, settings, name)

    monkeypatch.setattr(measure, "create_session", counted)
    return made


def test_one_session_serves_every_shape(sessions: list[int]) -> None:
    proto = model(NETWORK)
    run_measure(reference(proto), literal(proto), samples(2, 3, 5, 2), "float16")
    assert sessions == [1, 1, 8, 8]


def equal(one: Measurement, other: Measurement) -> bool:
    def plain(found: Measurement) -> Any:
        names = ("largest", "smallest", "overflow", "rounding", "error", "finite")
        return found.outputs, {n: [getattr(t, name) for name in names] for n, t in found.tensors.items()}

    return bool(plain(one) == plain(other))


def test_activations_that_do_not_fit_come_a_part_at_a_time(
    sessions: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    proto, batches = model(NETWORK), samples(2, 4)
    whole = run_measure(reference(proto), literal(proto), batches, "float16")
    sessions.clear()
    monkeypatch.setattr(measure, "GROUP", 3 * 4 * 8 * 4)  # three tensors of the larger batch
    monkeypatch.setattr(measure, "_FIRST", 3)
    parts = run_measure(reference(proto), literal(proto), batches, "float16")
    assert sessions == [1, 1, 3, 3, 3, 3, 2, 2] and equal(whole, parts)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_that_fit_no_session_are_fed(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    proto, batches = model(NETWORK), samples(3)
    fp32, half = reference(proto), literal(proto, dtype)
    plain = run_measure(fp32, half, batches, dtype)
    before = half.to_onnx().SerializeToString()
    monkeypatch.setattr(measure, "EMBEDDED", 0)
    monkeypatch.setattr(measure, "_LARGE", 100)
    assert equal(plain, run_measure(fp32, half, batches, dtype))
    assert half.to_onnx().SerializeToString() == before


def test_fixed_shapes_that_fit_come_at_once(sessions: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_FIRST", 1)
    monkeypatch.setattr(measure, "GROUP", 8 * 4 * 8 * 4)
    measured(NETWORK.replace("N,8", "4,8"), *samples(4))
    assert sessions == [1, 1, 8, 8]
    sessions.clear()
    monkeypatch.setattr(measure, "GROUP", 8 * 4 * 8 * 4 - 1)
    measured(NETWORK.replace("N,8", "4,8"), *samples(4))
    assert sessions == [1, 1, 1, 1, 7, 7]


@pytest.mark.parametrize("limit, bound", [(4 * 72, 0), (4 * 72 - 1, 1)])
def test_weights_in_16_bit_count_as_the_fp32_that_carries_them(
    limit: int, bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = literal(model(NETWORK))
    assert [v.dtype for v in half.variables if v.is_constant] == ["float16", "float16"]
    monkeypatch.setattr(measure, "_LARGE", 100)
    monkeypatch.setattr(measure, "EMBEDDED", limit)
    assert len(measure._bound_weights(half)[2]) == bound


def test_feeds_are_checked() -> None:
    proto = model(NETWORK)
    with pytest.raises(FeedError, match="needs the input 'x'"):
        run_measure(reference(proto), literal(proto), [{}], "float16")
    with pytest.raises(FeedError, match="dimension 1 is declared as 8"):
        run_measure(reference(proto), literal(proto), [{"x": np.zeros((2, 7), np.float32)}], "float16")
    integers = model("m (int64[2] i) => (float[2] y) { f = Cast<to=1>(i)  y = Neg(f) }")
    with pytest.raises(FeedTypeError, match="int64"):
        run_measure(reference(integers), literal(integers), [{"i": np.zeros(2, np.int32)}], "float16")
    with pytest.raises(ArgumentError, match="bfloat16, float16"):
        run_measure(reference(proto), literal(proto), samples(1), "float32")


# -- nested graphs, shapes that depend on data --------------------------------------------------------------------
@pytest.mark.parametrize("c", [True, False])
def test_tensors_of_branches_are_covered_by_what_the_branch_gives(c: bool) -> None:
    text = """m (float[2,8] x, bool c) => (float[2,8] y) <float[8,8] w = {WEIGHTS}>
    { h = MatMul(x, w)
      z = If<then_branch = t () => (float[2,8] p) { q = MatMul(h, w)  p = Relu(q) },
             else_branch = e () => (float[2,8] n) { n = Neg(h) }>(c)
      y = Add(z, x) }"""
    found = measured(text, {**samples(2)[0], "c": np.array(c)})
    assert list(found.tensors) == ["x", "h", "z", "y"]
    assert 0 < found.tensors["z"].error < 1e-2 and found.tensors["z"].finite
    assert (found.tensors["z"].error != found.tensors["h"].error) == c


def test_rounding_may_change_a_shape() -> None:
    text = """m (float[4] x) => (float[K] y) <float one = {1.0}, int64[1] last = {-1}>
    { d = Sub(x, one)  n = NonZero(d)  i = Reshape(n, last)  y = Gather(x, i) }"""
    found = measured(text, {"x": np.array([1, 1.0001, 2, 3], np.float32)})
    assert found.tensors["y"].error == 1 == found.outputs["y"]


# -- randomness ------------------------------------------------------------------------------------------------
DROPS = """m (float[N,8] x) => (float[N,8] y) <float[8,8] w = {WEIGHTS}, float half = {0.5}, bool train = {1}>
{ h = MatMul(x, w)  d = Dropout(h, half, train)  y = Relu(d) }"""


def test_an_import_in_training_mode_draws_the_same_in_fp32_and_16_bit() -> None:
    """Exported to be trained on, it has dropouts, and no state for their randomness."""
    found = measured(DROPS, *samples(16, 5))
    assert 0 < found.outputs["y"] < 2e-3
    (values,) = outputs_of(reference(model(DROPS)), samples(64))
    assert 0.6 < (values[0] == 0).mean() < 0.9, "half of it is dropped, and half of the rest negative"


def test_a_run_that_is_to_draw_anew_each_time_needs_a_state() -> None:
    program = Program.from_onnx(model(DROPS))
    with pytest.raises(amp.errors.GraphError, match="draws random numbers.*minimize"):
        Executor(CPUPlace()).run(program, feed=samples(2)[0], fetch_list=["y"], scope=Scope())


def test_sparse_constants_are_not_compared() -> None:
    """onnxruntime computes with them, and gives them as no array."""
    values = onnx.numpy_helper.from_array(np.array([1, 2, 3], np.float32))
    places = onnx.numpy_helper.from_array(np.array([0, 17, 34]))
    kept = onnx.helper.make_sparse_tensor(values, places, [16, 16])
    proto = model("m (float[2,16] x) => (float[2,16] y) { w = Neg(x) y = MatMul(x, w) }")
    proto.graph.node[0].CopyFrom(onnx.helper.make_node("Constant", [], ["w"], sparse_value=kept))
    data = {"x": np.ones((2, 16), np.float32)}
    verdict = amp.convert(proto, calibration=data).conversion.verdict
    assert verdict is not None and verdict.met and list(verdict.errors) == ["y"]


def test_sequences_out_of_a_branch_are_compared_at_an_old_opset() -> None:
    """Identity, which lowering puts before what a branch gives, takes sequences from opset 14 on."""
    branches = [
        f"{name}_branch = {name} () => (seq(float[2]) {name}s) {{ a = Constant<value=float[2]{{{number},2}}>() "
        f"{name}s = SequenceConstruct(a) }}"
        for number, name in enumerate(("then", "else"))
    ]
    text = f"g (bool c) => (seq(float[2]) s) {{ s = If(c) <{', '.join(branches)}> }}"
    proto = onnx.parser.parse_model(f'<ir_version: 7, opset_import: ["" : 13]> {text}')
    verdict = amp.convert(proto, calibration={"c": np.array(True)}).conversion.verdict
    assert verdict is not None and verdict.met
