"""Auto mode: calibration data read and checked, both precisions measured, the tolerance kept."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest

import amp_transpiler as amp
from amp_transpiler.conversion.auto import Stage
from amp_transpiler.conversion.calibration.measure import measure, outputs_of
from amp_transpiler.conversion.calibration.samples import load_calibration
from amp_transpiler.errors import AmpError, ArgumentError, ArgumentTypeError, FeedError, FeedTypeError
from amp_transpiler.ir.types import LIMITS, numpy_dtype
from amp_transpiler.ir.weights import become_constants
from amp_transpiler.passes.numerics.ranges import Ranges
from tests.helpers.detectors import detector

HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'
W = ", ".join(f"{v:.4f}" for v in np.random.default_rng(0).standard_normal(64) / 3)
NET = (
    HEAD
    + f"""net (float[N,8] x) => (float[N,8] y) <float[8,8] w = {{{W}}}, float big = {{3000}}, float small = {{0.001}}>
{{ a = MatMul(x, w) b = Mul(a, big) c = Mul(b, small) d = MatMul(c, w) y = Tanh(d) }}"""
)
X = np.random.default_rng(1).standard_normal((16, 8)).astype(np.float32)


def program_of(text: str) -> amp.Program:
    program = amp.Program.from_onnx(onnx.parser.parse_model(text))
    become_constants(program)
    return program


def kept(program: amp.Program) -> list[str]:
    return [op.type for op in program.walk() if op.reason.startswith("fp32: measured")]


# -- what was measured -----------------------------------------------------------------------------------
def test_measured_outputs_are_those_of_the_executor() -> None:
    reference, converted = program_of(NET), amp.convert(onnx.parser.parse_model(NET), numeric_guards=False)
    found = measure(reference, converted, [{"x": X}], "float16")
    want, got = outputs_of(reference, [{"x": X}])[0][0], outputs_of(converted, [{"x": X}])[0][0]
    assert found.outputs["y"] == pytest.approx(np.linalg.norm(got - want) / np.linalg.norm(want), rel=1e-6)
    assert list(found.tensors) == ["x", "a", "b", "c", "d", "y"]
    assert found.tensors["b"].largest == pytest.approx(np.abs(outputs(reference, "b")).max())


def outputs(program: amp.Program, name: str) -> np.ndarray:
    return amp.Executor(amp.CPUPlace()).run(program, feed={"x": X}, fetch_list=[name])[0]


# -- the outcome ------------------------------------------------------------------------------------------
def test_what_overflows_on_the_data_stays_fp32_and_the_rest_does_not() -> None:
    model = onnx.parser.parse_model(NET)
    hot = X * 20  # b reaches 1e5
    literal = amp.convert(model, numeric_guards=False)
    assert (
        not np.isfinite(outputs_of(literal, [{"x": hot}])[0][0]).all()
        or measure(program_of(NET), literal, [{"x": hot}], "float16").outputs["y"] > 0.1
    )
    program = amp.convert(model, mode="auto", calibration={"x": hot})
    assert program.conversion.outputs["y"] <= 0.01
    assert kept(program) == ["Mul", "Mul"], "what makes and what reads the tensor"
    assert {op.type for op in program.walk() if op.precision == "float16" and op.type != "Cast"} == {"MatMul", "Tanh"}
    reason = next(op.reason for op in program.walk() if op.type == "Mul")
    assert "reaches" in reason and "65504" in reason
    assert len(program.conversion.rounds) == 2 and "within 0.01" in program.conversion.rounds[-1]


def test_what_sinks_below_the_format_stays_fp32() -> None:
    text = (
        NET.replace("{3000}", "{2e-5}")
        .replace("{0.001}", "{50000}")
        .replace("Mul(a, big)", "Mul(a0, big)")
        .replace("b =", "a0 = Mul(a, big) b =")
    )
    model = onnx.parser.parse_model(text)
    program = amp.convert(model, mode="auto", calibration={"x": X}, numeric_guards=False)
    assert program.conversion.outputs["y"] <= 0.01
    assert any("sinks below float16" in op.reason for op in program.walk())


def test_a_tight_tolerance_returns_operators_to_fp32() -> None:
    model = onnx.parser.parse_model(NET.replace("{3000}", "{3}").replace("{0.001}", "{0.3}"))
    loose = amp.convert(model, mode="auto", calibration={"x": X}, tolerance=0.1)
    tight = amp.convert(model, mode="auto", calibration={"x": X}, tolerance=1e-5)
    assert not kept(loose) and kept(tight)
    assert tight.conversion.outputs["y"] <= 1e-5 and tight.conversion.tolerance == 1e-5
    assert "return to float32" in tight.conversion.rounds[0]
    assert len(tight.conversion.rounds) <= 9


def test_a_tolerance_that_cannot_be_met_is_said_so() -> None:
    model = onnx.parser.parse_model(NET.replace("{3000}", "{3}").replace("{0.001}", "{0.3}"))
    program = amp.convert(model, mode="auto", calibration={"x": X}, tolerance=1e-12)
    if program.conversion.outputs["y"] > 1e-12:
        assert "cannot be met" in program.conversion.rounds[-1]
    nan = {"x": np.full((2, 8), np.inf, np.float32)}
    with pytest.raises(FeedError, match="every floating-point output of program .* is NaN in float32 too"):
        amp.convert(model, mode="auto", calibration=nan)


def test_bfloat16() -> None:
    program = amp.convert(onnx.parser.parse_model(NET), mode="auto", dtype="bfloat16", calibration={"x": X * 20})
    assert not kept(program) and program.conversion.outputs["y"] <= 0.05


# -- a model that enlarges what 16 bit rounds off ------------------------------------------------------------
@pytest.fixture(scope="module")
def sharp() -> tuple[amp.Program, dict[str, np.ndarray], list[str]]:
    model, feeds = detector(12, 32)
    lines: list[str] = []
    return amp.convert(model, mode="auto", calibration=feeds, progress=lines.append), feeds, lines


def test_a_detector_keeps_to_the_tolerance_with_most_operators_in_16_bit(
    sharp: tuple[amp.Program, dict[str, np.ndarray], list[str]],
) -> None:
    program, feeds, _ = sharp
    model, _ = detector(12, 32)
    output = model.graph.output[0].name
    exact = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)[0]
    pure = outputs_of(amp.convert(model), [feeds])[0][0]
    got = outputs_of(program, [feeds])[0][0]
    assert relative(pure, exact) > 0.013, "pure 16 bit misses the tolerance"
    assert relative(got, exact) <= 0.01 and program.conversion.outputs[output] <= 0.01
    operators = [op for op in program.walk() if op.type != "Cast"]
    assert sum(op.precision == "float16" for op in operators) >= 0.5 * len(operators)


def relative(value: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(value.astype(np.float64) - exact) / np.linalg.norm(exact))


def test_what_stays_fp32_says_what_it_adds(sharp: tuple[amp.Program, dict[str, np.ndarray], list[str]]) -> None:
    program, _, _ = sharp
    reasons = [
        op.reason for op in program.walk() if op.reason.startswith("fp32: measured") and "reaches" not in op.reason
    ]
    assert reasons
    told = re.compile(
        r"fp32: measured: (adds [\d.e-]+ % to output 'sigmoid_\d+' (by itself|with \d+ operators? beside it)"
        r"|hands numbers on between operators that stay float32)"
    )
    assert not [reason for reason in reasons if not told.fullmatch(reason)]
    *before, last = program.conversion.rounds
    assert any("above 0.01" in line for line in before) and re.search(r"within 0\.01 \(\d+ runs\)", last)


def test_progress_counts_runs_up_to_a_budget(sharp: tuple[amp.Program, dict[str, np.ndarray], list[str]]) -> None:
    stages = [line for line in sharp[2] if isinstance(line, Stage)]
    assert [stage.done for stage in stages] == list(range(1, len(stages) + 1))
    assert {stage.total for stage in stages} == {stages[0].total} and len(stages) <= stages[0].total
    assert stages[0] == f"run 1 of at most {stages[0].total} on 1 sample: 157 operators in float16"


def test_one_operator_that_enlarges_its_rounding_returns_alone() -> None:
    """A difference of large numbers: what both lose in 16 bit is all of the rest. Before and behind nothing is lost."""
    chain = " ".join(f"t{i} = MatMul(a{i}, w) a{i + 1} = Tanh(t{i})" for i in range(12))
    text = (
        HEAD
        + f"""net (float[16,8] x) => (float[16,8] y) <float[8,8] w = {{{W}}}, float far = {{900}}, float k = {{0.01}}>
    {{ a0 = Mul(x, k) {chain} up = Add(a6, far) down = Sub(up, far) z = Add(down, a12) y = MatMul(z, w) }}"""
    )
    program = amp.convert(onnx.parser.parse_model(text), mode="auto", calibration={"x": X}, tolerance=0.005)
    assert program.conversion.outputs["y"] <= 0.005
    returned = {op.output(0).name for op in program.walk() if op.reason.startswith("fp32: measured")}
    assert {"up", "down"} <= returned and len(returned) <= 4
    assert sum(op.precision == "float16" for op in program.walk() if op.type != "Cast") >= 23


def test_a_tolerance_that_only_fp32_keeps_to_is_said_so() -> None:
    text = (
        HEAD
        + f"""net (float[16,8] x) => (float[16,8] y) <float[8,8] w = {{{W}}}, float k = {{1000}}>
    {{ a = MatMul(x, w) s = Sin(a) b = Mul(s, k) y = Sin(b) }}"""
    )
    program = amp.convert(onnx.parser.parse_model(text), mode="auto", calibration={"x": X * 9}, tolerance=1e-3)
    assert program.conversion.outputs["y"] <= 1e-3
    assert not any(op.precision == "float16" for op in program.walk())
    assert re.search(r"no choice that leaves more does: .* adds [\d.]+ % by itself", program.conversion.rounds[-1])


def test_samples_of_many_shapes_and_more_than_the_search_takes() -> None:
    model = onnx.parser.parse_model(NET.replace("{3000}", "{3}").replace("{0.001}", "{0.3}"))
    samples = [{"x": np.random.default_rng(i).standard_normal((1 + i % 3, 8)).astype(np.float32)} for i in range(20)]
    program = amp.convert(model, mode="auto", calibration=samples, tolerance=2e-4)
    assert program.conversion.outputs["y"] <= 2e-4 and kept(program)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "masking",
    [
        "m = Where(c, a, low)",
        "k = Where(c, zero, low) m = Add(a, k)",
        "f = Cast<to=1>(c) i = Sub(one, f) k = Mul(i, low) m = Add(k, a)",
    ],
)
@pytest.mark.parametrize("below", [0, 40])
def test_a_saturated_mask_is_no_overflow(masking: str, dtype: str, below: float) -> None:
    text = (
        HEAD
        + f"""net (float[4,8] x, bool[4,8] c) => (float[4,8] y)
    <float[8,8] w = {{{W}}}, float low = {{-3.4028234e38}}, float zero = {{0}}, float one = {{1}}>
    {{ a = MatMul(x, w) {masking} p = Softmax(m) y = MatMul(p, w) }}"""
    )
    mask = np.random.default_rng(0).random((4, 8)) > 0.5
    mask[0] = False  # a row that is masked altogether, but where scores are far below 0
    mask[0, 3] = bool(below)
    feeds = {"x": X[:4] - below, "c": mask}
    program = amp.convert(onnx.parser.parse_model(text), mode="auto", dtype=dtype, calibration=feeds)
    assert program.conversion.outputs["y"] <= 0.05 and not kept(program), [op.reason for op in program.walk()]
    assert [op.precision for op in program.walk() if op.type == "Softmax"] == [dtype]
    share = float(ml_dtypes.finfo(dtype).max) / (2 if "Add" in masking else 1)
    assert f"-{share:g}" in program.conversion.constants[0].action


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_one_table_knows_where_a_type_ends(dtype: str) -> None:
    limits = LIMITS[dtype]

    def stored(number: float) -> float:
        with np.errstate(over="ignore"):
            return float(np.float32(number).astype(numpy_dtype(dtype)))

    assert all(stored(x) == x for x in (limits.largest, limits.normal, limits.smallest, 1 + limits.epsilon))
    assert stored(1 + limits.epsilon / 2) == 1
    assert np.isinf(stored(limits.overflow)) and stored(limits.vanish) == 0
    assert stored(np.nextafter(np.float32(limits.overflow), np.float32(0))) == limits.largest
    assert stored(np.nextafter(np.float32(limits.vanish), np.float32(1))) == limits.smallest


def test_ranges_are_proved_up_to_the_same_limit() -> None:
    text = HEAD + "net (float[4] x) => (float[4] y) { a = Relu(x) y = Tanh(a) }"
    limit = float(ml_dtypes.finfo("bfloat16").max)
    program = program_of(text)
    assert Ranges(program, {"x": (0.0, limit)}).proved("bfloat16") == (2, 2)
    assert Ranges(program, {"x": (0.0, float(np.nextafter(limit, np.inf)))}).proved("bfloat16") == (1, 2)


def test_without_data_only_what_is_proved_leaves_the_black_list() -> None:
    text = (
        HEAD
        + f"""net (float[4,8] x) => (float[4,8] y, float[4,8] z) <float[8,8] w = {{{W}}}>
    {{ a = MatMul(x, w) s = Sigmoid(a) p = Softmax(s) e = Exp(a) y = MatMul(p, w) z = MatMul(e, w) }}"""
    )
    program = amp.convert(onnx.parser.parse_model(text), mode="auto")
    found = {op.type: (op.precision, op.reason) for op in program.walk()}
    assert found["Softmax"][0] == "float16" and found["Exp"][0] == "float32"
    known = amp.convert(onnx.parser.parse_model(text), mode="auto", input_ranges={"x": (-1, 1)})
    assert {op.type: op.precision for op in known.walk()}["Exp"] == "float16"


# -- the data ---------------------------------------------------------------------------------------------
def test_every_form_of_calibration_data(tmp_path: Path) -> None:
    program = program_of(NET)
    np.savez(tmp_path / "one.npz", x=X)
    (tmp_path / "many").mkdir()
    (tmp_path / "arrays").mkdir()
    for number in range(3):
        np.savez(tmp_path / "many" / f"{number}.npz", x=X[number : number + 1])
        np.save(tmp_path / "arrays" / f"x_{number}.npy", X[number : number + 1])
    np.save(tmp_path / "x.npy", X.astype(np.float64))
    for source, count in [
        ({"x": X}, 1),
        ([{"x": X}, {"x": X[:1]}], 2),
        (tmp_path / "one.npz", 1),
        (str(tmp_path / "many"), 3),
        ([tmp_path / "one.npz", tmp_path / "many"], 4),
        (tmp_path / "arrays", 3),
    ]:
        samples = load_calibration(source, program)
        assert len(samples) == count and all(s["x"].dtype == np.float32 for s in samples)
    np.testing.assert_array_equal(load_calibration(tmp_path / "arrays", program)[2]["x"], X[2:3])


@pytest.mark.parametrize(
    ("source", "error", "complaint"),
    [
        ({"y": X}, FeedError, "'y' is no input and 'x' is missing"),
        ({"x": X, "extra": X}, FeedError, "extra"),
        ({}, FeedError, "needs the input 'x'"),
        ({"x": X[:, :4]}, FeedError, r"dimension 1 is declared as 8"),
        ({"x": X[0]}, FeedError, "2 dimensions"),
        ({"x": np.full((2, 8), 2**24 + 1)}, FeedTypeError, "int64"),
        ([], ArgumentError, "empty"),
        (3, ArgumentTypeError, "got int"),
        ([3], ArgumentTypeError, "got int"),
        ("nowhere.npz", ArgumentError, "no file or folder 'nowhere.npz'"),
    ],
)
def test_wrong_calibration_data_is_named(source: Any, error: type[AmpError], complaint: str) -> None:
    with pytest.raises(error, match=complaint) as caught:
        amp.convert(onnx.parser.parse_model(NET), mode="auto", calibration=source)
    assert "calibration" in str(caught.value)


def test_broken_files_are_named(tmp_path: Path) -> None:
    program = program_of(NET)
    np.savez(tmp_path / "good.npz", x=X)
    whole = (tmp_path / "good.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.npz").write_text("not an archive")
    (tmp_path / "data.csv").write_text("1,2")
    with zipfile.ZipFile(tmp_path / "objects.npz", "w") as archive:
        np.save(tmp_path / "o.npy", np.array([{}], object), allow_pickle=True)
        archive.write(tmp_path / "o.npy", "x.npy")
    (tmp_path / "empty").mkdir()
    for name in ("cut.npz", "text.npz", "data.csv", "objects.npz", "empty"):
        with pytest.raises(ArgumentError, match=name):
            load_calibration(tmp_path / name, program)
    with pytest.raises(ArgumentError, match="keep one kind"):
        load_calibration(tmp_path, program)


def test_a_cube_that_is_infinite_below_a_tanh_is_no_overflow() -> None:
    """What is measured of it is beyond float16, where the tanh is 1."""
    text = (
        HEAD
        + f"""net (float[16,8] x) => (float[16,8] y)
    <float[8,8] w = {{{W}}}, float three = {{3}}, float c = {{0.044715}}, float r = {{0.7978846}}, float one = {{1}},
     float half = {{0.5}}>
    {{ h = MatMul(x, w) p = Pow(h, three) q = Mul(c, p) s = Add(h, q) a = Mul(r, s) t = Tanh(a) g = Add(t, one)
       k = Mul(half, h) m = Mul(k, g) y = MatMul(m, w) }}"""
    )
    model, feeds = onnx.parser.parse_model(text), {"x": 60 * X}
    for mode in ("auto", "pure"):
        program = amp.convert(model, mode=mode, calibration=feeds)
        assert not kept(program) and program.conversion.outputs["y"] <= 2e-3
        assert {op.precision for op in program.walk() if op.type != "Cast"} == {"float16"}
