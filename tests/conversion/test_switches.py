"""One session in which operators return to fp32: what it gives is what a conversion with these operators gives."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.conversion.calibration.measure import measure, outputs_of
from amp_transpiler.conversion.calibration.trials import Trials
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.ir.weights import become_constants
from amp_transpiler.lists import AutoMixedPrecisionLists
from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.passes.partition.assign_precision import assign
from tests.helpers.detectors import detector

HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'
RNG = np.random.default_rng(0)
W = ", ".join(f"{v:.4f}" for v in RNG.standard_normal(64) / 3)
X = RNG.standard_normal((4, 8)).astype(np.float32)

SMALL = {
    "two outputs, integers too": f"""net (float[4,8] x) => (float[4,8] y, int64[4] z, float[4,4] v) <float[8,8] w = {{{W}}}>
        {{ a = MatMul(x, w) b = Tanh(a) y = Add(b, a) z = ArgMax<axis=1, keepdims=0>(y) t = Transpose<perm=[1,0]>(b)
           v = MatMul(b, t) }}""",
    "only moved": f"""net (float[4,8] x) => (float[8,4] y) <float[8,8] w = {{{W}}}>
        {{ a = MatMul(x, w) r = Relu(a) t = Transpose<perm=[1,0]>(r) c = Concat<axis=0>(t, t) n = Neg(c)
           s, u = Split<axis=0, num_outputs=2>(n) e = Exp(s) y = Add(e, u) }}""",
    "probabilities near 0": f"""net (float[4,8] x) => (float[4,8] y, float[4,8] z) <float[8,8] w = {{{W}}}, float far = {{-12}}>
        {{ a = MatMul(x, w) b = Add(a, far) y = Sigmoid(b) c = MatMul(b, w) z = Exp(b) }}""",
    "a constant operator": f"""net (float[4,8] x) => (float[4,8] y) <float[8,8] w = {{{W}}}>
        {{ k = Constant<value_float = 0.3>() a = MatMul(x, w) b = Mul(a, k) c = MatMul(b, w) d = Add(c, k)
           y = MatMul(d, w) }}""",
    "moved constants": f"""net (float[4,8] x) => (float[4,8] y) <float[8,8] w = {{{W}}}>
        {{ t = Transpose<perm=[1,0]>(w) u = Concat<axis=1>(t, w) v = Concat<axis=0>(w, t) a = MatMul(x, u) b = Tanh(a)
           c = MatMul(b, v) y = MatMul(c, t) }}""",
    "constant operators in a branch": f"""net (float[4,8] x, bool c) => (float[4,8] y) <float[8,8] w = {{{W}}}>
        {{ a = MatMul(x, w)
           b = If (c) <then_branch = one () => (float[4,8] p) {{ k = Constant<value_float = 0.3>() q = MatMul(a, w)
                                                                 r = Mul(q, k) p = MatMul(r, w) }},
                       else_branch = two () => (float[4,8] s) {{ s = Exp(a) }}>
           y = MatMul(b, w) }}""",
    "branches that share names": f"""net (float[4,8] x, bool c) => (float[4,8] y) <float[8,8] w = {{{W}}}, float k = {{0.3}}>
        {{ a = MatMul(x, w)
           b = If (c) <then_branch = one () => (float[4,8] p) {{ q = MatMul(a, w) r = Tanh(q) p = Mul(r, k) }},
                       else_branch = two () => (float[4,8] p) {{ q = MatMul(a, w) p = Exp(q) }}>
           y = MatMul(b, w) }}""",
    "a branch": f"""net (float[4,8] x, bool c) => (float[4,8] y) <float[8,8] w = {{{W}}}, float k = {{0.3}}>
        {{ a = MatMul(x, w)
           b = If (c) <then_branch = one () => (float[4,8] p) {{ q = MatMul(a, w) r = Tanh(q) p = Mul(r, k) }},
                       else_branch = two () => (float[4,8] s) {{ s = Mul(a, k) }}>
           y = MatMul(b, w) }}""",
    "a scan": f"""net (float[8] h, float[4,8] x) => (float[8] g, float[4,8] y) <float[8,8] w = {{{W}}}>
        {{ x1 = MatMul(x, w)
           g, y = Scan <num_scan_inputs = 1,
                        body = step (float[8] s, float[8] e) => (float[8] t, float[8] o)
                               {{ m = MatMul(e, w) n = Add(m, s) t = Tanh(n) o = Mul(t, e) }}>(h, x1) }}""",
}
BRANCH = {"x": X, "c": np.array(True)}
FEEDS: dict[str, dict[str, Any]] = {"a scan": {"h": X[0] / 9, "x": X}} | {
    n: BRANCH for n in SMALL if "bool c" in SMALL[n]
}


class Case:
    """The fp32 program, its literal conversion with some operators kept, and the trials on it."""

    def __init__(self, model: onnx.ModelProto, feeds: dict[str, np.ndarray], dtype: str) -> None:
        self.program, self.feeds, self.dtype = amp.Program.from_onnx(model), feeds, dtype
        become_constants(self.program)
        self.expected = outputs_of(self.program, [feeds])
        program, after = self.converted(set())
        _, last = self.converted(set(range(len(after))))
        free = [i for i, op in enumerate(after) if op.precision == dtype != last[i].precision]
        names = [v.name for v in self.program.outputs]
        before = list(self.program.walk())
        self.trials = Trials(before, after, free, program, dtype, [feeds], self.expected, names)

    def converted(self, kept: set[int]) -> tuple[amp.Program, list[Any]]:
        copy = self.program.clone()
        operators, constraints = list(copy.walk()), Constraints()
        for i in kept:
            constraints.keep(operators[i], Reason(Kind.EXCEPTED, detail=("asked for",)))
        assign(copy, AutoMixedPrecisionLists(dtype=self.dtype), "auto", constraints)
        return copy, operators

    def agrees(self, kept: set[int]) -> bool | None:
        """None where the conversion keeps others in fp32 as well, as it may."""
        tried = self.trials.errors(kept)
        asked = self.trials.closed(kept)
        program, after = self.converted(asked)
        every = set(self.trials.closed(self.trials.units)) | asked
        if {i for i in every if after[i].precision != self.dtype} != asked:
            return None
        real = measure(self.program, program, [self.feeds], self.dtype, expected=self.expected, tensors=False).outputs
        return all(abs(real[name] - tried[name]) <= 0.02 * real[name] + 1e-6 for name in real)


def some(units: list[int], seed: int) -> set[int]:
    """Neighbours, or units anywhere."""
    rng = random.Random(seed)
    if seed % 2:
        return set(rng.sample(units, rng.randint(0, len(units))))
    low, high = sorted(rng.randint(0, len(units)) for _ in range(2))
    return set(units[low:high])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", SMALL)
def test_trials_give_what_conversions_give(name: str, dtype: str) -> None:
    case = Case(onnx.parser.parse_model(HEAD + SMALL[name]), FEEDS.get(name, {"x": X}), dtype)
    assert case.trials.units
    found = [case.agrees(set()), *(case.agrees(some(case.trials.units, seed)) for seed in range(12))]
    assert False not in found and True in found
    assert max(case.trials.errors(set(case.trials.units)).values()) < 1e-6, "all of them back: nothing is rounded"


def test_trials_on_a_detector() -> None:
    case = Case(*detector(3, 16), "float16")
    found = [case.agrees(set()), *(case.agrees(some(case.trials.units, 2 * seed)) for seed in range(8))]
    assert False not in found and found.count(True) >= 3
    assert max(case.trials.errors(set(case.trials.units)).values()) < 1e-5


def test_one_session_serves_all_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(*detector(1, 16), "float16")
    case.trials.errors(set())
    monkeypatch.setattr("amp_transpiler.conversion.calibration.measure.create_session", None)
    for seed in range(4):
        case.trials.errors(some(case.trials.units, seed))
    assert case.trials.runs == 5


def test_large_constants_are_switched_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amp_transpiler.conversion.calibration.measure._LARGE", 16)
    case = Case(onnx.parser.parse_model(HEAD + SMALL["only moved"]), {"x": X}, "float16")
    assert case.agrees(set()) and max(case.trials.errors(set(case.trials.units)).values()) < 1e-6


def test_a_program_before_the_operator_that_switches() -> None:
    text = SMALL["only moved"].replace("s, u = Split<axis=0, num_outputs=2>(n)", "s, u = Split<axis=0>(n)")
    model = onnx.parser.parse_model(f'<ir_version: 4, opset_import: ["" : 8]>\n{text}')
    case = Case(model, {"x": X}, "float16")
    assert case.agrees(set()) and max(case.trials.errors(set(case.trials.units)).values()) < 1e-6
