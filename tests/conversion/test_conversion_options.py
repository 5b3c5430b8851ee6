"""Options of a conversion: one set of refusals for Python and the command line; one verdict for all that judge."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import amp_transpiler as amp
from amp_transpiler.cli import main
from amp_transpiler.conversion import converting
from amp_transpiler.conversion.calibration import as_given, measure
from amp_transpiler.conversion.conversion_options import ConversionOptions
from amp_transpiler.conversion.verdict import Verdict
from amp_transpiler.errors import ArgumentError, ArgumentTypeError, GraphError, ListError, ListTypeError
from amp_transpiler.ir import onnx_in

TEXT = """<ir_version: 10, opset_import: ["" : 21]>
net (float[2,3] x) => (float[2,2] y) <float[3,2] w = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6}> { y = MatMul(x, w) }"""
X = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    onnx.save(onnx.parser.parse_model(TEXT), tmp_path / "m.onnx")
    np.savez(tmp_path / "x.npz", x=X)
    return tmp_path / "m.onnx"


DATA = {"mode": "auto", "calibration": {"x": X}}
DATA_FLAGS = ["--mode", "auto", "--calibration", "{data}"]


@pytest.mark.parametrize(
    ("keywords", "flags", "error", "said"),
    [
        ({"mode": "fast"}, ["--mode", "fast"], ArgumentError, "{mode} is 'fast'; expected one of pure, mixed, auto"),
        ({"mode": ""}, ["--mode", ""], ArgumentError, "{mode} is ''; expected one of"),
        ({"dtype": "int8"}, ["--dtype", "int8"], ListError, "{dtype} is 'int8'; expected 'float16' or 'bfloat16'"),
        ({"tolerance": 0.1}, ["--tolerance", "0.1"], ArgumentError, "0.1 needs what it is measured on: give {mode}"),
        (
            {"tolerance": 0.1, "calibration": {"x": X}},
            ["--tolerance", "0.1", "--calibration", "{data}"],
            ArgumentError,
            "which keep to it, or {check}, which judges by it",
        ),
        ({"tolerance": "x"}, ["--tolerance", "x"], ArgumentTypeError, "{tolerance} is 'x'; expected a number"),
        (
            {"tolerance": math.nan, "check": True},
            ["--tolerance", "nan", "--check"],
            ArgumentError,
            "{tolerance} is nan; expected a number from 0 on",
        ),
        (
            {"tolerance": -1, **DATA},
            ["--tolerance", "-1", *DATA_FLAGS],
            ArgumentError,
            "{tolerance} is -1; expected a number above 0",
        ),
        ({"tolerance": 0, **DATA}, ["--tolerance", "0", *DATA_FLAGS], ArgumentError, "expected a number above 0"),
        (
            {"tolerance": math.inf, **DATA},
            ["--tolerance", "inf", *DATA_FLAGS],
            ArgumentError,
            "{tolerance} is inf; expected a number above 0",
        ),
        ({"time_budget": 0}, ["--time-budget", "0"], ArgumentError, "{time_budget} is 0; expected a number above 0"),
        (
            {"memory_budget": -1},
            ["--memory-budget", "-1"],
            ArgumentError,
            "{memory_budget} is -1; expected a number above 0",
        ),
        (
            {"memory_budget": "much"},
            ["--memory-budget", "much"],
            ArgumentTypeError,
            "{memory_budget} is 'much'; expected a number",
        ),
        ({"keep_io": ["q"]}, ["--keep-io", "q"], ArgumentError, "{keep_io} names 'q', which is no input or output"),
        ({"only": ["q*"]}, ["--only", "q*"], ArgumentError, "{only}: pattern 'q*' matches no operator name or scope"),
        ({"exclude": ["re:("]}, ["--except", "re:("], ArgumentError, "{exclude}: '(' is no regular expression"),
        (
            {"black_varnames": ["q"]},
            ["--black-varnames", "q"],
            ArgumentError,
            "has no variable 'q', which {black_varnames} names",
        ),
        (
            {"white_list": ["MatMul"], "black_list": ["MatMul"]},
            ["--white-list", "MatMul", "--black-list", "MatMul"],
            ListError,
            "{white_list} and {black_list} overlap in MatMul",
        ),
        (
            {"input_ranges": {"x": (1, 0)}},
            ["--input-range", "x=1:0"],
            ArgumentError,
            "{input_ranges}: the range of 'x' is (1.0, 0.0); give the least value first",
        ),
    ],
)
def test_python_and_the_command_line_refuse_in_the_same_words(
    keywords: dict[str, Any],
    flags: list[str],
    error: type[Exception],
    said: str,
    model: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = {field.name: field.name for field in dataclasses.fields(ConversionOptions)}
    spelled = {name: "--" + name.replace("_", "-") for name in names}
    spelled |= {"exclude": "--except", "input_ranges": "--input-range"}
    with pytest.raises(error) as refused:
        amp.convert(model, **keywords)
    assert said.format(**names) in str(refused.value) and type(refused.value) is error
    given = [flag.replace("{data}", str(model.parent / "x.npz")) for flag in flags]
    assert main(["convert", str(model), str(model.parent / "o.onnx"), *given]) == 2
    assert said.format(**spelled) in capsys.readouterr().err and not (model.parent / "o.onnx").exists()


@pytest.mark.parametrize(
    ("keywords", "error"),
    [
        ({"mode": 3}, ArgumentError),
        ({"mode": ["pure"]}, ArgumentError),
        ({"dtype": np.float16}, ListError),
        ({"keep_io": 5}, ArgumentTypeError),
        ({"keep_io": [1]}, ArgumentTypeError),
        ({"white_list": "MatMul"}, ListTypeError),
        ({"only": {"a": 1}}, ArgumentTypeError),
        ({"exclude": [b"a"]}, ArgumentTypeError),
        ({"tolerance": True, **DATA}, ArgumentTypeError),
        ({"input_ranges": [("x", 0, 1)]}, ArgumentTypeError),
        ({"input_ranges": {"x": 1}}, ArgumentTypeError),
        ({"input_ranges": {1: (0, 1)}}, ArgumentTypeError),
        ({"input_ranges": {"x": (0, 10**400)}}, ArgumentTypeError),
        ({"input_ranges": np.zeros(2)}, ArgumentTypeError),
        ({"only": np.array(1.0)}, ArgumentTypeError),
        ({"white_list": np.array(1.0)}, ListTypeError),
        ({"tolerance": 10**6000, "check": True}, ArgumentError),
        ({"input_ranges": {"x": ("a", "b")}}, ArgumentTypeError),
        ({"numeric_guards": "no"}, ArgumentTypeError),
        ({"check": 1}, ArgumentTypeError),
        ({"progress": "bar"}, ArgumentTypeError),
        ({"memory_budget": True}, ArgumentTypeError),
        ({"memory_budget": 1.5}, ArgumentTypeError),
        ({"calibration": 3}, ArgumentTypeError),
    ],
)
def test_wrong_types(keywords: dict[str, Any], error: type[Exception], model: Path) -> None:
    with pytest.raises(error) as refused:
        amp.convert(model, **keywords)
    assert type(refused.value) is error and next(iter(keywords)) in str(refused.value)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400


@pytest.mark.parametrize(
    ("mode", "dtype", "read"),
    [
        ("pure-fp16", "fp16", ("pure", "float16")),
        ("PURE", "half", ("pure", "float16")),
        ("amp", "bf16", ("mixed", "bfloat16")),
        ("auto", "BFloat16", ("auto", "bfloat16")),
    ],
)
def test_other_spellings(
    mode: str, dtype: str, read: tuple[str, str], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program, plain = amp.convert(model, mode=mode, dtype=dtype), amp.convert(model, mode=read[0], dtype=read[1])
    assert (program.conversion.mode, program.conversion.dtype) == read
    assert program.to_onnx() == plain.to_onnx()
    out = model.parent / "o.onnx"
    assert main(["convert", str(model), str(out), "--mode", mode, "--dtype", dtype]) == 0
    assert onnx.load(out) == plain.to_onnx() and read[1] in capsys.readouterr().out


# -- the verdict -----------------------------------------------------------------------------------------
def test_a_verdict_counts_what_is_no_number_as_beyond() -> None:
    found = Verdict({"a": 0.5, "b": math.nan, "c": 0.01}, tolerance=0.01)
    assert found.worst[0] == "b" and found.missed == ("a", "b") and not found.met
    assert Verdict({"a": 0.5}).met and not Verdict({}, why="it does not run").met
    assert Verdict({"a": 0.0}, tolerance=0.0).met


@pytest.mark.parametrize("keywords", [{}, {"calibration": {"x": X}}, {"calibration": {"x": X}, "keep_io": False}])
def test_the_verdict_is_the_error_of_what_the_file_computes(keywords: dict[str, Any], model: Path) -> None:
    """Compared with onnxruntime's own fp32 result and the rounding of numpy, of weights, inputs and outputs."""
    verdict = amp.convert(model, check=True, tolerance=1e-6, **keywords).conversion.verdict
    w = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], np.float32).reshape(3, 2)
    x = X if "calibration" in keywords else np.random.default_rng(0).standard_normal((2, 3), np.float32)
    session = onnxruntime.InferenceSession(model.read_bytes(), providers=["CPUExecutionProvider"])
    (exact,) = session.run(None, {"x": x})
    rounded = (x.astype(np.float16).astype(np.float32) @ w.astype(np.float16).astype(np.float32)).astype(np.float16)
    assert verdict.errors["y"] == pytest.approx(
        np.linalg.norm(rounded.astype(np.float64) - exact) / np.linalg.norm(exact.astype(np.float64)), rel=1e-3
    )
    assert not verdict.met and verdict.tolerance == 1e-6
    assert ("synthetic" in verdict.sample) == ("calibration" not in keywords)


@pytest.mark.parametrize(("flags", "sessions"), [([], 2), (["--calibration", "{data}"], 4)])
def test_a_check_reads_the_model_once_and_measures_it_once(
    flags: list[str], sessions: int, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sessions of the model and of the conversion; with data two more, for what is inside of both."""
    counts = {"read": 0, "session": 0}
    read, create, given_one = onnx_in.load, measure.create_session, as_given._session

    def reading(*given: Any, **more: Any) -> Any:
        counts["read"] += 1
        return read(*given, **more)

    def creating(*given: Any, **more: Any) -> Any:
        counts["session"] += 1
        return create(*given, **more)

    monkeypatch.setattr(onnx_in, "load", reading)
    monkeypatch.setattr(converting, "load", reading)

    def opening(program: amp.Program) -> Any:
        counts["session"] += 1
        return given_one(program)

    monkeypatch.setattr(measure, "create_session", creating)
    monkeypatch.setattr(as_given, "_session", opening)
    given = [flag.replace("{data}", str(model.parent / "x.npz")) for flag in flags]
    assert main(["convert", str(model), str(model.parent / "o.onnx"), "--check", *given]) == 0
    assert counts == {"read": 1, "session": sessions}


def test_a_range_where_no_input_is_a_float() -> None:
    text = "net (int64[n] ids) => (float[n] y) { x = Cast <to = 1> (ids) y = Exp (x) }"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {text}')
    with pytest.raises(amp.errors.ArgumentError, match="'ids', which is no floating-point input of the model$"):
        amp.convert(model, input_ranges={"ids": (0, 9)})


def test_a_model_that_gives_nothing_is_not_converted(model: Path) -> None:
    empty = onnx.load(model)
    empty.graph.ClearField("output")
    onnx.save(empty, model)
    with pytest.raises(GraphError, match=f"model '{model}' has no outputs"):
        amp.convert(model)
