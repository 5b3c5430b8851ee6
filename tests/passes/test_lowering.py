"""Lowering of imported programs: nested graphs, functions, constants, aliased and repeated outputs."""

from __future__ import annotations

import lzma
from pathlib import Path

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.opdef import lowering_rule
from amp_transpiler.passes.lowering.lowering import lower
from tests.helpers.sessions import run
from tests.helpers.where import DATA, NO_DATA

IF = """<ir_version: 10, opset_import: ["" : 21]>
net (float[2,4] x, bool c) => (float[2,4] y) <float[4,4] w = {1,0,0,1, 0,1,0,0, 0,0,1,0, 2,0,0,1}>
{
  h = MatMul(x, w)
  y = If (c) <then_branch = yes () => (float[2,4] a) { t = Mul(h, h)  a = Add(t, x) },
              else_branch = no () => (float[2,4] b) { b = Tanh(h) }>
}"""
LOOP = """<ir_version: 10, opset_import: ["" : 21]>
net (float[2,2] x, int64 n) => (float[2,2] y) <bool go = {1}, float[2,2] w = {0.5, 0.25, -0.5, 0.75}>
{
  h = Relu(x)
  y = Loop (n, go, h) <body = step (int64 i, bool ci, float[2,2] s) => (bool co, float[2,2] r)
      { co = Identity(ci)  m = MatMul(s, w)  r = Add(m, h) }>
}"""
SCAN = """<ir_version: 10, opset_import: ["" : 21]>
net (float[3,2] xs) => (float[2] last, float[3,2] ys) <float[2] zero = {0, 0}, float[2] k = {1.5, -0.5}>
{
  last, ys = Scan <num_scan_inputs = 1, body = add (float[2] s, float[2] x) => (float[2] t, float[2] o)
      { p = Mul(x, k)  t = Add(s, p)  o = Identity(t) }> (zero, xs)
}"""
FUNCTION = """<ir_version: 10, opset_import: ["" : 21, "our" : 1]>
net (float[2,4] x) => (float[2,4] y) { h = our.twice(x)  y = Exp(h) }
<domain: "our", opset_import: ["" : 21]> twice (a) => (b) { b = Add(a, a) }"""
SEQUENCE = """<ir_version: 10, opset_import: ["" : 21]>
net (float[2,4] x) => (float[4,4] y)
{ h = Relu(x)  s = SequenceConstruct(h, x)  y = ConcatFromSequence <axis = 0> (s) }"""
RNG = np.random.default_rng(0)
X24, X22, X32 = (RNG.standard_normal(shape).astype(np.float32) for shape in ((2, 4), (2, 2), (3, 2)))
CASES = {
    "if, taken": (IF, {"x": X24, "c": np.array(True)}),
    "if, not taken": (IF, {"x": X24, "c": np.array(False)}),
    "loop": (LOOP, {"x": X22, "n": np.array(3)}),
    "scan": (SCAN, {"xs": X32}),
    "function": (FUNCTION, {"x": X24}),
    "sequence": (SEQUENCE, {"x": X24}),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("mode", ["pure-fp16", "mixed"])
@pytest.mark.parametrize("name", CASES)
def test_imported_programs_run_in_16_bit(name: str, mode: str, dtype: str) -> None:
    text, feeds = CASES[name]
    model = onnx.parser.parse_model(text)
    program = amp.convert(model, mode=mode, dtype=dtype)
    lowered = lower(program, "cpu", {k: v.shape for k, v in feeds.items()}, program.outputs)
    onnx.checker.check_model(lowered.model, full_check=True)
    want = run(model, feeds)
    results = [run(lowered.model, feeds, level) for level in ("DISABLE_ALL", "ENABLE_BASIC", "ENABLE_ALL")]
    for got in results:
        for a, b, c in zip(got, want, results[0], strict=True):
            np.testing.assert_allclose(a, b, rtol=0.04 if dtype == "bfloat16" else 4e-3, atol=2e-2)
            assert np.array_equal(a, c), "the same bits at every optimisation level"


def test_rounding_happens_inside_branches() -> None:
    program = amp.convert(onnx.parser.parse_model(IF))
    feeds = {"x": np.full((2, 4), 300, np.float32), "c": np.array(True)}
    lowered = lower(program, "cpu", {}, program.outputs)
    assert np.isinf(run(lowered.model, feeds)[0]).all(), "300 * 300 is beyond fp16"


def test_an_operator_that_nobody_knows_reads_its_fp32_operand_in_fp32_after_a_cast_from_16_bit() -> None:
    """Such a cast is nothing on CPU, where an fp32 tensor holds the 16-bit numbers."""
    text = """<ir_version: 8, opset_import: ["" : 17, "com.microsoft.nchwc" : 1]>
    net (float[1,16,4,4] x) => (float[1,16,4,4] y) {
      h = Cast<to=10>(x)  s = Mul(h, h)  w = Cast<to=1>(s)
      a = com.microsoft.nchwc.ReorderInput(w)  y = com.microsoft.nchwc.ReorderOutput<channels=16>(a)
    }"""
    program = amp.Program.from_onnx(onnx.parser.parse_model(text))
    x = np.linspace(-4, 4, 256, dtype=np.float32).reshape(1, 16, 4, 4)
    (y,) = run(lower(program, "cpu", {}, program.outputs).model, {"x": x})
    np.testing.assert_array_equal(y, np.square(x.astype(np.float16)))


def test_a_function_is_kept_in_a_file_and_inlined_where_it_runs() -> None:
    program = amp.Program.from_onnx(onnx.parser.parse_model(FUNCTION))
    assert [f.name for f in program.to_onnx().functions] == ["twice"]
    assert not lower(program, "cpu", {}, program.outputs).model.functions


def test_branches_that_the_shapes_never_take_need_not_fit_them() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
    net (float[N,M] x, bool c) => (float[K] y) <int64[1] three = {3}>
    {
      y = If (c) <then_branch = yes () => (float[K] a) <int64[1] flat = {-1}> { a = Reshape(x, flat) },
                  else_branch = no () => (float[L] b) <int64[1] one = {1}> { b = Squeeze(x, one) }>
    }"""
    program = amp.Program.from_onnx(onnx.parser.parse_model(text))
    (got,) = amp.Executor().run(program, feed={"x": X24, "c": np.array(True)}, fetch_list=["y"])
    assert np.array_equal(got, X24.ravel())


@pytest.mark.parametrize("place", ["cpu", "cuda"])
@pytest.mark.parametrize("chosen", [True, False])
def test_a_constant_of_one_branch_may_have_the_name_of_a_tensor_of_the_other(chosen: bool, place: str) -> None:
    tensor = "graph () => (float[2] t) { k = Neg(x)  t = Exp(k) }"
    constant = "graph () => (float[2] t) <float[2] k = {3, 5}> { t = Mul(x, k) }"
    for yes, no in ((tensor, constant), (constant, tensor)):
        model = onnx.parser.parse_model(
            f"""<ir_version: 10, opset_import: ["" : 21]> net (float[2] x, bool c) => (float[2] y) {{
                y = If (c) <then_branch = {yes.replace("graph", "yes")}, else_branch = {no.replace("graph", "no")}> }}"""
        )
        feeds = {"x": np.array([-1, 0.5], np.float32), "c": np.array(chosen)}
        lowered = lower(amp.Program.from_onnx(model), place, {}).model
        np.testing.assert_array_equal(run(lowered, feeds), run(model, feeds))


def test_outputs_may_be_inputs_constants_repeated_or_aliases() -> None:
    program = amp.Program()
    x = program.add_input("x", "float16", (2,))
    k = program.add_constant("k", np.array([1, 2], np.float16))
    y, z, u = (program.add_variable(n, "float16", (2,)) for n in ("y", "a b/c:0", "u"))
    program.add_operator("Relu", [x], [y])
    program.add_operator("Identity", [y], [z])
    program.add_operator("Identity", [x], [u])
    feed = {"x": np.array([-1, 3], np.float16)}
    got = amp.Executor().run(program, feed=feed, fetch_list=[x, k, y, z, y, u])
    for value, want in zip(got, ([-1, 3], [1, 2], [0, 3], [0, 3], [0, 3], [-1, 3]), strict=True):
        assert value.dtype == np.float16 and value.tolist() == want


@pytest.mark.parametrize("place", [amp.CPUPlace(), amp.CUDAPlace(0)], ids=repr)
def test_lower_is_public(place: amp.CPUPlace | amp.CUDAPlace, tmp_path: Path) -> None:
    program = amp.convert(onnx.parser.parse_model(IF))
    path = tmp_path / "lowered.onnx"
    program.lower(place, feed_shapes={"x": (2, 4)}, fetch_list=["y"]).to_onnx(str(path))
    onnx.checker.check_model(onnx.load(path), full_check=True)
    earlier = {"fetches": ["y"]}  # the name up to 0.1.0
    assert program.lower(place, feed_shapes={"x": (2, 4)}, **earlier).model == onnx.load(path)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="'z' is no feed"):
        program.lower(place, feed_shapes={"z": (2, 4)})
    with pytest.raises(ArgumentTypeError, match="lower: place is None; expected a place"):
        program.lower(None)  # type: ignore[arg-type]
    for shape in ([1, 2, 3], [-5, 4], [2, 4.5], "ab"):
        with pytest.raises(amp.AmpError, match="lower: feed_shapes gives 'x' the shape"):
            program.lower(place, {"x": shape})  # type: ignore[dict-item]
    for fetches in (None, "y", [3]):
        with pytest.raises(ArgumentTypeError, match="lower: .* variables or names"):
            program.lower(place, {"x": (2, 4)}, fetches)  # type: ignore[arg-type]


#: (file, feeds) of trained models with control flow, recurrence, quantisation-free detectors and classifiers.
def trained() -> dict[str, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)

    def image(*shape: int) -> np.ndarray:
        return rng.random(shape).astype(np.float32)

    return {
        "mnist_cntk": {"Input3": image(1, 1, 28, 28)},
        "ultraface_rfb320": {"input": image(1, 3, 240, 320)},
        "ppocr_cls": {"x": image(1, 3, 48, 192)},
        "silero_vad": {"input": image(1, 512), "state": np.zeros((2, 1, 128), np.float32), "sr": np.array(16000)},
    }


@pytest.mark.parametrize("mode", ["pure-fp16", "mixed"])
@pytest.mark.parametrize("name", trained())
def test_trained_models_in_fp16(name: str, mode: str) -> None:
    file = DATA / "onnx_models" / f"{name}.onnx.xz"
    if not file.exists():
        pytest.skip(NO_DATA)
    model = onnx.load_model_from_string(lzma.decompress(file.read_bytes()))
    feeds = trained()[name]
    program = amp.convert(model, mode=mode)
    half = program.to_onnx()
    onnx.checker.check_model(half, full_check=True)
    run(half, feeds)
    got = amp.Executor(threads=1).run(program, feed=feeds, fetch_list=[v.name for v in program.outputs])
    for a, b in zip(got, run(model, feeds), strict=True):
        error = np.linalg.norm(a.astype(np.float64) - b) / max(np.linalg.norm(b.astype(np.float64)), 1e-9)
        assert error < (3e-2 if name == "silero_vad" else 1e-2)  # its spectrum leaves few bits to a quiet frame


def test_a_rule_may_write_operators_of_the_runtime() -> None:
    """Their domain is imported, and their results carry the types that ONNX's inference does not find."""

    @lowering_rule("docs.lowering::GatedSum", infer=lambda op: [(op.inputs[0].dtype, op.inputs[0].shape)])
    def gated_sum(e: Emitter, op: Operator, x: Value, y: Value, gate: Value) -> list[Value]:
        total = e.op("GatedAdd", x, y, gate, domain="com.microsoft", shape=x.shape)
        return [e.Neg(e.Abs(total))]

    program = amp.Program()
    with amp.program_guard(program, amp.Program("startup")), amp.unique_name.guard():
        x, y = (amp.data(name, [4, 8], "float32") for name in "xy")
        gate = amp.data("gate", [4, 1], "float32")
        out = program.add_variable("out", "float32", (4, 8))
        program.add_operator("GatedSum", [x, y, gate], [out], domain="docs.lowering")
    lowered = program.lower(amp.CPUPlace(), fetch_list=[out])
    cost = program.cost_estimate(amp.CPUPlace(), fetch_list=[out])
    assert (cost.kernels, cost.bytes) == (3, 4 * (3 * 32 + 4 + 2 * 32 + 2 * 32))
    rng = np.random.default_rng(0)
    feeds = {
        name: rng.standard_normal((4, 8 if name != "gate" else 1)).astype(np.float32) for name in ("x", "y", "gate")
    }
    (found,) = run(lowered.model, feeds)
    np.testing.assert_allclose(found, -abs(feeds["x"] + feeds["y"] * feeds["gate"]), rtol=1e-6)
