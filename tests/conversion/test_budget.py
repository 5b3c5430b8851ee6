"""Running a model that nobody trusts: a loop without end, and sizes beyond memory, end in time and in bounds."""

from __future__ import annotations

import contextvars
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.cli import main
from amp_transpiler.conversion.calibration import as_given
from amp_transpiler.conversion.calibration.measure import outputs_of
from amp_transpiler.conversion.synthetic import synthetic_sample
from amp_transpiler.errors import ExecutionError
from amp_transpiler.passes.canonicalize import control_flow
from amp_transpiler.runtime.budget import (
    Budget,
    OverBudget,
    calibration_budget,
    check_budget,
    unbounded_optimizers,
    within,
)
from tests.helpers.where import ROOT

HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'
FOREVER = (
    HEAD
    + """forever (float[4] x) => (float[4] y) <int64 n = {4611686018427387904}, bool on = {1}> {
    y = Loop (n, on, x) <body = b (int64 i, bool c, float[4] a) => (bool go, float[4] o) { go = Identity(c)  o = Neg(a) }> }"""
)
FLOOD = (
    HEAD
    + """flood (float[4] x) => (float y) <int64[2] shape = {60000, 60000}, float one = {1}> {
    r = ReduceSum<keepdims = 0>(x)  o = Add(r, one)  e = Expand(o, shape)  y = ReduceSum<keepdims = 0>(e) }"""
)
FEED = {"x": np.ones(4, np.float32)}


def saved(text: str, path: Path) -> Path:
    onnx.save(onnx.parser.parse_model(text), path)
    return path


def test_a_loop_without_end_ends_with_its_budget() -> None:
    program = amp.Program.from_onnx(onnx.parser.parse_model(FOREVER))
    start = time.perf_counter()
    with pytest.raises(
        ExecutionError,
        match=r"program 'forever' was ended: it takes longer than 0\.3 seconds.*time_budget and memory_budget",
    ):
        with within(Budget(0.3)):
            outputs_of(program, [FEED])
    assert time.perf_counter() - start < 5


def test_a_run_within_its_budget_is_left_alone() -> None:
    program = amp.Program.from_onnx(onnx.parser.parse_model(FOREVER.replace("4611686018427387904", "7")))
    with within(Budget(30.0)):
        assert outputs_of(program, [FEED])[0][0].tolist() == [-1, -1, -1, -1]


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_the_last_block_of_any_thread_lifts_the_limit() -> None:
    import resource

    def soft() -> int:
        return resource.getrlimit(resource.RLIMIT_DATA)[0]

    before = soft()
    blocks = [(contextvars.Context(), within(Budget(9.0, size << 30))) for size in (64, 128)]
    for thread, block in blocks:  # as two threads may enter and leave them
        thread.run(block.__enter__)
    limited = soft()
    (first, narrow), (second, wide) = blocks
    first.run(narrow.__exit__, None, None, None)
    assert limited == soft() != before, "the wider one counts, and is still open"
    second.run(wide.__exit__, None, None, None)
    assert soft() == before


def test_budgets_grow_with_weights_and_data() -> None:
    small = amp.Program.from_onnx(onnx.parser.parse_model(FLOOD))
    assert 8 <= check_budget(small).seconds < 9 and check_budget(small).memory in range(700 << 20, 701 << 20)
    assert check_budget(small, 3.0, 5) == Budget(3.0, 5)
    assert calibration_budget(small, [{"x": np.zeros(10_000_000, np.float32)}]).seconds == pytest.approx(80, abs=1)


def test_check_of_a_loop_without_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = saved(FOREVER, tmp_path / "m.onnx"), tmp_path / "o.onnx"
    assert main(["convert", str(model), str(out), "--check", "--time-budget", "0.3"]) == 3
    assert "check failed: the model does not run on a synthetic sample" in capsys.readouterr().err


def test_a_sample_that_takes_too_long_is_not_made_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[tuple[int, ...]] = []
    session = as_given.ort.InferenceSession

    class Counted(session):
        def run(self, names: list[str], feeds: dict[str, np.ndarray], options: object) -> list[np.ndarray]:
            runs.append(feeds["x"].shape)
            return super().run(names, feeds, options)

    monkeypatch.setattr(as_given.ort, "InferenceSession", Counted)
    program = amp.Program.from_onnx(onnx.parser.parse_model(FOREVER.replace("float[4]", "float[N]")))
    with pytest.raises(OverBudget), within(Budget(0.3)):
        synthetic_sample(program)
    assert runs == [(1,)]


def test_what_is_done_with_results_keeps_to_the_budget_too() -> None:
    """An input of 50 million numbers: the run fits, and comparing its outputs does not."""
    with pytest.raises(OverBudget, match="measuring was ended: it needs more than 8 MiB"), within(Budget(9, 8 << 20)):
        np.zeros(1 << 50, np.int8)
    with pytest.raises(MemoryError), within(Budget(9)):
        np.zeros(1 << 50, np.int8)


def test_calibration_of_a_loop_without_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = saved(FOREVER, tmp_path / "m.onnx")
    np.savez(tmp_path / "s.npz", **FEED)
    arguments = [
        "convert",
        str(model),
        str(tmp_path / "o.onnx"),
        "--mode",
        "auto",
        "--calibration",
        str(tmp_path / "s.npz"),
    ]
    assert main([*arguments, "--time-budget", "0.3"]) == 1
    assert "it takes longer than 0.3 seconds" in capsys.readouterr().err and not (tmp_path / "o.onnx").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_sizes_beyond_memory_are_refused_by_the_check(tmp_path: Path) -> None:
    """In a process of its own, whose largest size is measured."""
    model = saved(FLOOD, tmp_path / "m.onnx")
    script = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from amp_transpiler.cli import main
status = main(["convert", {str(model)!r}, {str(tmp_path / "o.onnx")!r}, "--check", "--quiet"])
largest = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))  # ru_maxrss remembers the parent
print("status", status, "MiB", int(largest.split()[1]) >> 10)
"""
    done = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True, timeout=120)
    assert "it needs more than 700 MiB of memory, the budget" in done.stderr, done.stderr
    status, mebibytes = done.stdout.split()[-3], int(done.stdout.split()[-1])
    assert status == "3" and mebibytes < 1024


@pytest.mark.parametrize("shape", ["4611686018427387904", "200000,200000"])
def test_inputs_too_large_to_make_up_are_named(shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = saved(
        HEAD + f"g (float[{shape}] image) => (float[M] y) {{ y = Relu(image) }}".replace("[M]", f"[{shape}]"),
        tmp_path / "m.onnx",
    )
    assert main(["convert", str(model), str(tmp_path / "o.onnx"), "--check"]) == 3
    assert "input 'image', float32[" in (err := capsys.readouterr().err) and "give --calibration" in err


def test_long_tensors_of_one_dimension_do_not_take_inferences_memory() -> None:
    """A size of two billion was a list of two billion elements inside onnx."""
    text = (
        HEAD
        + """g (float[2147483647] x, int64[90000] n) => (float[2147483647] y, int64[90000] m) <int64[1] long = {1000000000}> {
        k = Mul(x, x)  y = Add(k, x)  m = Add(n, n)  f = ConstantOfShape(long)  g = Mul(f, f) }"""
    )
    program = amp.Program.from_onnx(onnx.parser.parse_model(text))
    assert program.var("k").shape == (2147483647,) and program.var("m").shape == (90000,)
    assert program.var("f").shape == (10**9,)


def test_shape_arithmetic_is_not_folded_into_what_exceeds_memory() -> None:
    text = (
        HEAD
        + """g (float[2,3] x) => (int64[A] r) <int64 zero = {0}, int64[1] many = {1000000000000}, int64 one = {1}> {
        s = Shape(x)  f = ConstantOfShape<value = int64[1] {7}>(many)  r = Add(f, one) }"""
    )
    program = amp.Program.from_onnx(onnx.parser.parse_model(text))
    from amp_transpiler.ir.infer import Shapes

    assert Shapes(program)[program.var("f")][1] == (10**12,)


def test_tolerance_0_means_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        HEAD + "g (float[2,3] x) => (float[2,2] y) <float[3,2] w = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6}> { y = MatMul(x, w) }"
    )
    model = saved(text, tmp_path / "m.onnx")
    assert main(["convert", str(model), str(tmp_path / "o.onnx"), "--check"]) == 0
    assert main(["convert", str(model), str(tmp_path / "o.onnx"), "--check", "--tolerance", "0"]) == 3
    assert "above 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--time-budget", "0"], "--time-budget is 0; expected a number above 0"),
        (["--time-budget", "nan"], "is nan; expected a number"),
        (["--memory-budget", "-1"], "--memory-budget is -1; expected a number above 0"),
        (["--memory-budget", "inf"], "is inf; expected a number"),
        (["--tolerance", "nan", "--check"], "is nan; expected a number"),
        (["--tolerance", "inf", "--check"], "is inf; expected a number"),
    ],
)
def test_numbers_that_mean_nothing(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = saved(FLOOD, tmp_path / "m.onnx")
    assert main(["convert", str(model), str(tmp_path / "o.onnx"), *arguments]) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "o.onnx").exists()


def test_loops_in_loops_are_unrolled_within_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of three loops of 30 turns, one in the other, is within the limit by itself; together they make 27,000."""
    monkeypatch.setattr(control_flow, "UNROLL_LIMIT", 500)
    inner = "o{n} = Loop(n, on, a{p})<body = b{n} (int64 i{n}, bool c{n}, float[4] a{n}) => (bool g{n}, float[4] {out}) {{ g{n} = Identity(c{n})  {what} }}>"
    third = inner.format(n=3, p=2, out="z", what="z = Neg(a3)")
    second = inner.format(n=2, p=1, out="o3", what=third)
    text = (
        HEAD
        + f"""g (float[4] a0, float[4] w) => (float[4] y) <int64 n = {{30}}, bool on = {{1}}> {{
        {inner.format(n=1, p=0, out="o2", what=second)}  y = Mul(o1, w) }}"""
    )
    program = amp.Program.from_onnx(onnx.parser.parse_model(text))
    control_flow.expand_control_flow(program)
    assert 60 <= len(list(program.walk())) < 2_000


def test_sessions_under_a_budget_fold_nothing_while_they_are_made() -> None:
    """Folding runs operators where no budget can end them; outside of budgets sessions are made as ever."""
    text = (
        HEAD
        + """g (float[1] x) => (float y) <int64[2] s = {3000, 3000}> {
        a = ConstantOfShape<value = float[1] {0.5}>(s)  b = MatMul(a, a)  c = MatMul(b, a)  d = MatMul(c, a)  k = MatMul(d, a)
        r = ReduceSum<keepdims = 0>(k)  z = ReduceSum<keepdims = 0>(x)  y = Add(r, z) }"""
    )
    program = amp.Program.from_onnx(onnx.parser.parse_model(text))
    with (
        within(Budget(0.2)),
        pytest.raises(ExecutionError, match=r"program 'g' was ended: it takes longer than 0\.2 seconds"),
    ):
        outputs_of(program, [{"x": np.ones(1, np.float32)}])
    assert unbounded_optimizers() == []
