"""Imported programs train in 16 bit as safely as they convert: what is known to leave the type stays fp32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.cli.main import main
from amp_transpiler.errors import FeedError
from amp_transpiler.nn import functional as F
from tests.corpora.spectra import WINDOW, bands, basis, model

CLASSES, SAMPLES = 4, 1600
MODES = pytest.mark.parametrize("mode", ["amp", "pure-fp16"])


#: The front end: short-time Fourier transform, power, logarithm. Then a small CNN.
SPECTRUM = """
  framed = Unsqueeze(wave, one)
  spectrum = Conv <strides = [64]> (framed, stft)
  re, im = Split <axis = 1> (spectrum, halves)
"""
POWERS = {
    "pow": "re2 = Pow(re, two)  im2 = Pow(im, two)  power = Add(re2, im2)  banded = Identity(power)",
    "mul": "re2 = Mul(re, re)  im2 = Mul(im, im)  power = Add(re2, im2)  banded = Identity(power)",
    "root": "re2 = Mul(re, re)  im2 = Mul(im, im)  sum2 = Add(re2, im2)  banded = Sqrt(sum2)",
    "summed": """pairs = Reshape(spectrum, apart)
                 banded = ReduceSumSquare <axes = [1], keepdims = 0> (pairs)""",
    "bands": """re2 = Mul(re, re)  im2 = Mul(im, im)  power = Add(re2, im2)  turned = Transpose <perm = [0, 2, 1]> (power)
                summed = MatMul(turned, filters)  banded = Transpose <perm = [0, 2, 1]> (summed)""",
}
NETWORK = """
  above = Add(banded, eps)
  logged = Log(above)
  image = Unsqueeze(logged, one)
  c = Conv <strides = [2, 2], pads = [1, 1, 1, 1]> (image, w1, b1)
  r = Relu(c)
  pooled = GlobalAveragePool(r)
  flat = Flatten(pooled)
  scores = Gemm <transB = 1> (flat, w2, b2)
}"""


def audio(powers: str) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    filters = {"filters": bands(20, WINDOW // 2 + 1)} if powers == "bands" else {}
    exponent = {"two": np.float32(2)} if powers == "pow" else {}
    if powers == "summed":
        exponent = {"apart": np.array([8, 2, WINDOW // 2 + 1, -1])}
    head = f'<ir_version: 8, opset_import: ["" : 17]> net (float[8,{SAMPLES}] wave) => (float[8,{CLASSES}] scores) {{'
    return model(
        head + SPECTRUM + POWERS[powers] + NETWORK,
        stft=basis()[:, None],
        eps=np.float32(1e-9),
        one=np.array([1]),
        halves=np.array([WINDOW // 2 + 1] * 2),
        w1=rng.normal(0, 0.1, (8, 1, 3, 3)),
        b1=np.zeros(8),
        w2=rng.normal(0, 0.3, (CLASSES, 8)),
        b2=np.zeros(CLASSES),
        **filters,
        **exponent,
    )


def sounds(steps: int) -> list[dict[str, np.ndarray]]:
    """Tones of the class's frequency, loud and soft, of which half end in silence."""
    rng, time = np.random.default_rng(1), np.arange(SAMPLES) / 8000
    feeds = []
    for _ in range(steps):
        label = rng.integers(0, CLASSES, (8, 1))
        wave = np.sin(2 * np.pi * (300 + 700 * label) * time + 6 * rng.random((8, 1))) * 10 ** rng.uniform(
            -2, 1, (8, 1)
        )
        wave[:, SAMPLES // 2 :] *= rng.integers(0, 2, (8, 1))
        feeds.append({"wave": wave.astype(np.float32), "label": label})
    return feeds


def labelled(program: amp.Program) -> amp.Variable:
    return F.cross_entropy(program.outputs[0], amp.data("label", [8, 1], "int64"))


def trained(
    program: amp.Program,
    loss: Callable[[amp.Program], amp.Variable],
    feeds: list[dict[str, np.ndarray]],
    mode: str,
    scale: float = 1024.0,
    **options: object,
) -> tuple[np.ndarray, int]:
    """The losses, and how many steps were skipped."""
    pure = mode == "pure-fp16"
    with amp.program_guard(program, program.startup), amp.unique_name.guard():
        value = loss(program)
        optimizer = amp.optimizer.Adam(3e-3, multi_precision=pure)
        if mode != "fp32":
            optimizer = amp.decorate(
                optimizer, use_pure_fp16=pure, use_fp16_guard=False, init_loss_scaling=scale, **options
            )
        optimizer.minimize(value)
    executor, scope, fetches = amp.Executor(), amp.Scope(), [value]
    executor.run(program.startup, scope=scope)
    if mode != "fp32":
        optimizer.amp_init(amp.CPUPlace(), scope=scope)
        fetches.append(optimizer.get_found_inf())
    values = [executor.run(program, feed=feed, fetch_list=fetches, scope=scope) for feed in feeds]
    return np.array([float(np.ravel(v[0])[0]) for v in values]), sum(bool(v[1].any()) for v in values if mode != "fp32")


def prepared(exported: onnx.ModelProto, **options: object) -> amp.Program:
    program = amp.Program.from_onnx(exported)
    amp.prepare_training(program, **options)
    return program


@pytest.mark.parametrize("powers", POWERS)
def test_a_log_spectrum_trains_as_in_fp32(powers: str) -> None:
    feeds = sounds(100)
    exact, _ = trained(prepared(audio(powers)), labelled, feeds, "fp32")
    assert exact[-20:].mean() < 0.6 * exact[0], "the network learns"
    for mode in ("amp", "pure-fp16"):
        losses, skipped = trained(prepared(audio(powers)), labelled, feeds, mode)
        assert skipped == 0, (mode, skipped)
        np.testing.assert_allclose(losses, exact, rtol=0.01, atol=0.01)


def test_the_literal_lists_lose_the_spectrum() -> None:
    """What guards are for: without them the same model never makes a step."""
    losses, skipped = trained(prepared(audio("mul"), numeric_guards=False), labelled, sounds(5), "pure-fp16")
    assert skipped == 5 or not np.isfinite(losses).all()
    losses, skipped = trained(prepared(audio("mul")), labelled, sounds(5), "pure-fp16", numeric_guards=False)
    assert skipped == 5 or not np.isfinite(losses).all()


def test_reasons_are_on_the_operators_and_in_explain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = prepared(audio("mul"))
    trained(program, labelled, sounds(1), "pure-fp16")
    made = {v.name: op for op in program.operators for v in op.outputs if v is not None}
    for name, why in {
        "spectrum": "logarithm",
        "re2": "logarithm",
        "power": "logarithm",
        "above": "'eps' holds 1e-09",
    }.items():
        assert made[name].precision == "float32" and why in made[name].reason, (name, made[name].reason)
    assert made["c"].precision == "float16"
    assert program.has_var("stft") and not program.var("stft").persistable, "a Fourier basis is not trained"
    path = str(tmp_path / "audio.onnx")
    program.to_onnx(path)
    assert main(["explain", path, "re2"]) == 0
    assert "a square before a logarithm: x*x leaves fp16 beyond 255" in capsys.readouterr().out


@MODES
def test_a_test_program_runs_in_the_precision_of_training(mode: str) -> None:
    """The loss alone keeps the product fp32, with its weight; the test program, which has no loss, follows."""
    exported = model(
        """<ir_version: 8, opset_import: ["" : 17]> net (float[4,6] x) => (float[4,2] y)
                        { h = MatMul(x, w)  r = Relu(h)  y = MatMul(r, v) }""",
        w=np.random.default_rng(0).normal(0, 1, (6, 5)),
        v=np.random.default_rng(1).normal(0, 1, (5, 2)),
    )
    program, pure = prepared(exported), mode == "pure-fp16"
    test = program.clone(for_test=True)
    with amp.program_guard(program, program.startup), amp.unique_name.guard():
        y = program.outputs[0]
        loss = F.mean(F.log(y * y + np.float32(1e-6)))
        optimizer = amp.decorate(
            amp.optimizer.SGD(0.01, multi_precision=True), use_pure_fp16=pure, use_fp16_guard=False
        )
        optimizer.minimize(loss)
    executor, scope = amp.Executor(), amp.Scope()
    executor.run(program.startup, scope=scope)
    optimizer.amp_init(amp.CPUPlace(), scope, test, use_fp16_test=True)
    for variable in test.parameters:
        assert variable.dtype == program.var(variable.name).dtype, variable.name
    assert test.var("v").dtype == "float32" and program.var("w").dtype == ("float16" if pure else "float32")
    x = np.random.default_rng(2).normal(0, 1, (4, 6)).astype(np.float32)
    for each in (test, program):
        precision = {v.name: op.precision for op in each.operators for v in op.outputs if v is not None}
        assert precision["y"] == "float32", each.name
    assert np.isfinite(executor.run(test, feed={"x": x}, fetch_list=["y"], scope=scope)[0]).all()


@pytest.mark.parametrize("asked, expected", [(None, "float16"), (True, "float32")])
def test_built_programs_keep_the_literal_rule(asked: bool | None, expected: str) -> None:
    main_program, startup = amp.Program(), amp.Program()
    with amp.program_guard(main_program, startup), amp.unique_name.guard():
        y = amp.nn.fc(amp.data("x", [4, 3], "float32"), 2)
        loss = F.mean(F.log(y * y + np.float32(1e-6)))
        amp.decorate(
            amp.optimizer.SGD(0.1, multi_precision=True),
            use_pure_fp16=True,
            use_fp16_guard=False,
            numeric_guards=asked,
        ).minimize(loss)
    squares = [op for op in main_program.operators if op.type == "Mul" and op.inputs[0] is op.inputs[1]]
    assert [op.precision for op in squares] == [expected]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_loss_behind_a_cast_to_float32_is_computed_in_float32(dtype: str) -> None:
    main_program, startup = amp.Program(), amp.Program()
    with amp.program_guard(main_program, startup), amp.unique_name.guard():
        hidden = amp.nn.fc(amp.data("x", [8, 6], "float32"), 16, act="relu")
        logits = amp.nn.fc(hidden, 5)
        wide = F.cast(logits, "float32")
        loss = F.cross_entropy(wide * np.float32(3), amp.data("label", [8, 1], "int64"))
        after = amp.nn.fc(wide, 2)
        optimizer = amp.decorate(
            amp.optimizer.SGD(0.0, multi_precision=True), use_pure_fp16=True, use_fp16_guard=False, dtype=dtype
        )
        optimizer.minimize(loss + 0 * F.mean(after))
    executor, scope = amp.Executor(), amp.Scope()
    executor.run(startup, scope=scope)
    optimizer.amp_init(amp.CPUPlace(), scope=scope)
    rng = np.random.default_rng(0)
    feed = {"x": rng.normal(0, 3, (8, 6)).astype(np.float32), "label": rng.integers(0, 5, (8, 1))}
    value, read = executor.run(main_program, feed=feed, fetch_list=[loss, wide], scope=scope)
    scores = 3 * read.astype(np.float64)
    logs = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    expected = -np.take_along_axis(logs, feed["label"], 1).mean()
    assert value.dtype == np.float32 and read.dtype == np.float32
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    precision = {v.name: op.precision for op in main_program.operators for v in op.outputs if v is not None}
    made = {op.type: op for op in main_program.operators if op.role == "forward"}
    assert "follows" in made["SoftmaxCrossEntropyLoss"].reason and "float32" in made["SoftmaxCrossEntropyLoss"].reason
    assert after.producer is not None and precision[hidden.name] == dtype
    assert [op.precision for op in main_program.operators if op.type == "MatMul" and op.role == "forward"] == [
        dtype
    ] * 3


def test_a_variance_as_a_difference_of_means_starts_as_in_fp32() -> None:
    """The layer norm of jax: mean(x*x) - mean(x)**2, after tiny activations. In fp16 all of its squares vanish."""
    rng = np.random.default_rng(0)
    exported = model(
        """<ir_version: 8, opset_import: ["" : 17]> net (float[8,12] x) => (float[8,3] y) {
      h = MatMul(x, w)
      total = ReduceSum <keepdims = 1> (h, last)  mean = Mul(total, share)
      squares = Mul(h, h)  sum2 = ReduceSum <keepdims = 1> (squares, last)  mean2 = Mul(sum2, share)
      square = Mul(mean, mean)  difference = Sub(mean2, square)  variance = Max(difference, zero)
      above = Add(variance, eps)  root = Sqrt(above)  inverse = Reciprocal(root)
      centred = Sub(h, mean)  scaled = Mul(centred, inverse)  y = MatMul(scaled, v)
    }""",
        w=rng.normal(0, 5e-4, (12, 16)),
        v=rng.normal(0, 1, (16, 3)),
        last=np.array([1]),
        share=np.array(1 / 16),
        zero=np.array(0.0),
        eps=np.array(1e-12),
    )
    feeds = [
        {"x": rng.normal(0, 0.1, (8, 12)).astype(np.float32), "label": rng.normal(0, 1, (8, 3)).astype(np.float32)}
    ] * 3

    def squared(program: amp.Program) -> amp.Variable:
        return F.mse_loss(program.outputs[0], amp.data("label", [8, 3], "float32"))

    exact, _ = trained(prepared(exported), squared, feeds, "fp32")
    literal, _ = trained(prepared(exported, numeric_guards=False), squared, feeds, "pure-fp16")
    assert not abs(literal[0] / exact[0] - 1) < 0.5, "what the guards are for"
    for mode in ("amp", "pure-fp16"):
        losses, skipped = trained(prepared(exported), squared, feeds, mode, scale=1.0)
        assert skipped == 0
        np.testing.assert_allclose(losses, exact, rtol=0.01)


#: Losses of some 70,000 of numbers that fp16 holds.
LARGE: dict[str, Callable[[amp.Variable, amp.Variable], amp.Variable]] = {
    "squares": lambda y, label: F.mse_loss(y, label) * np.float32(6),
    "sum": lambda y, label: F.sum(F.relu(y - label)) * np.float32(3),
}


@MODES
@pytest.mark.parametrize("kind", LARGE)
def test_a_large_loss_is_finite(kind: str, mode: str) -> None:
    rng = np.random.default_rng(0)
    exported = model(
        """<ir_version: 8, opset_import: ["" : 17]> net (float[8,4] x) => (float[8,40] y)
                        { h = MatMul(x, w)  y = Relu(h) }""",
        w=rng.normal(0, 1, (4, 40)),
    )
    feeds = [{"x": rng.normal(0, 130, (8, 4)).astype(np.float32), "label": np.zeros((8, 40), np.float32)}] * 5

    def loss(program: amp.Program) -> amp.Variable:
        return LARGE[kind](program.outputs[0], amp.data("label", [8, 40], "float32"))

    exact, _ = trained(prepared(exported), loss, feeds, "fp32")
    assert exact[0] > 65504
    losses, skipped = trained(prepared(exported), loss, feeds, mode, scale=1.0)
    assert skipped == 0
    np.testing.assert_allclose(losses, exact, rtol=0.005)
    literal, _ = trained(prepared(exported), loss, feeds, mode, scale=1.0, numeric_guards=False)
    assert mode == "amp" or not np.isfinite(literal[0]), "what the guards are for"


#: Nothing in it says that its products leave fp16; the data does.
UNITS = """<ir_version: 8, opset_import: ["" : 17]> net (float[8,8] x) => (float[8,2] y) {
  h = MatMul(x, w)  shifted = Add(h, b)  small = Mul(shifted, scale)  t = Tanh(small)  y = MatMul(t, v)
}"""


def physical() -> tuple[onnx.ModelProto, list[dict[str, np.ndarray]]]:
    rng = np.random.default_rng(0)
    exported = model(
        UNITS, w=rng.normal(0, 20, (8, 6)), b=np.zeros(6), v=rng.normal(0, 1, (6, 2)), scale=np.array(1e-5)
    )
    feeds = [
        {"x": rng.normal(0, 3000, (8, 8)).astype(np.float32), "label": rng.normal(0, 1, (8, 2)).astype(np.float32)}
    ]
    return exported, feeds * 10


def squared_error(program: amp.Program) -> amp.Variable:
    return F.mse_loss(program.outputs[0], amp.data("label", [8, 2], "float32"))


@MODES
def test_calibration_keeps_what_was_measured(mode: str, tmp_path: Path) -> None:
    exported, feeds = physical()
    exact, _ = trained(prepared(exported), squared_error, feeds, "fp32")
    without, _ = trained(prepared(exported), squared_error, feeds, mode)
    assert not np.allclose(without, exact, rtol=0.05), "what the calibration is for"
    np.savez(tmp_path / "feeds.npz", x=feeds[0]["x"])
    for calibration in ({"x": feeds[0]["x"]}, [{"x": feeds[0]["x"]}] * 2, tmp_path / "feeds.npz"):
        program = prepared(exported, calibration=calibration)
        losses, skipped = trained(program, squared_error, feeds, mode)
        assert skipped == 0
        np.testing.assert_allclose(losses, exact, rtol=0.01)
        made = {v.name: op for op in program.operators for v in op.outputs if v is not None}
        assert "measured: 'h' reaches" in made["h"].reason and made["h"].precision == "float32"
        assert "measured" in made["small"].reason
        assert made["y"].precision == "float16" or made["y.fp16"].precision == "float16"


def test_calibration_that_does_not_fit_changes_nothing() -> None:
    exported, feeds = physical()
    program = amp.Program.from_onnx(exported)
    before = program.to_onnx().SerializeToString()
    with pytest.raises(FeedError, match="sample 1: .*'z'"):
        amp.prepare_training(program, calibration={"z": feeds[0]["x"]})
    assert program.to_onnx().SerializeToString() == before
