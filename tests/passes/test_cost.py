"""What a program costs: against counts by hand, a count of its own, and products of ones; forecasts and verdicts."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import numpy as np
import onnx
import onnx.reference
import pytest

import amp_transpiler as amp
from amp_transpiler.ir.kernel_cost import moved_bytes
from amp_transpiler.ir.opdef import flops_of, traits_of
from amp_transpiler.lists.devices import devices, find_device, parse_devices
from amp_transpiler.passes.lowering.cost_estimate import CostEstimate
from tests.helpers.benchmark_programs import LARGE, MODES, PROGRAMS, step
from tests.helpers.sessions import run
from tests.record.costs import FILE, costs, temporaries

CUDA = amp.CUDAPlace(0)


def estimate(body: str, inputs: str = "float[64, 32] x", outputs: str = "float[64, 32] y") -> CostEstimate:
    text = f'<ir_version: 10, opset_import: ["" : 21]> g ({inputs}) => ({outputs}) {{ {body} }}'
    return amp.Program.from_onnx(onnx.parser.parse_model(text)).cost_estimate(CUDA)


# -- counts ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "mode"), [(name, mode) for name in PROGRAMS for mode in MODES])
def test_costs_are_as_recorded(name: str, mode: str) -> None:
    """Nobody makes a step dearer without saying so in the diff."""
    found, recorded = costs(name, mode), json.loads(FILE.read_text(encoding="utf-8"))[f"{name} {mode}"]
    changed = {key: (recorded[key], found[key]) for key in recorded if recorded[key] != found[key]}
    assert not changed, f"{changed} (before, now): where that is meant, python -m tests.record.costs, and commit it"


@pytest.mark.parametrize("name", LARGE)
def test_pure_16_bit_takes_half_of_the_temporaries(name: str) -> None:
    recorded = json.loads(FILE.read_text(encoding="utf-8"))[f"large {name}"]
    found = {mode: temporaries(name, mode) for mode in ("fp32", "pure")}
    assert found["pure"] <= 0.54 * found["fp32"]
    assert found == recorded, "where that is meant, python -m tests.record.costs, and commit it"


def test_16_bit_brings_nothing_on_webgpu() -> None:
    """As docs/places.md says: more kernels, more bytes, and no less memory."""
    (fp32, loss), (pure, scaled) = step("mlp", "fp32"), step("mlp", "pure")
    full, half = (p.cost_estimate(amp.WebGPUPlace(0), fetch_list=[v]) for p, v in ((fp32, loss), (pure, scaled)))
    assert 1.2 < half.kernels / full.kernels < 2 and 1.1 < half.bytes / full.bytes < 1.5
    assert 0.9 < half.temporaries / full.temporaries < 1.7


SIZES = {1: 4, 2: 1, 3: 1, 6: 4, 7: 8, 9: 1, 10: 2, 11: 8, 12: 4, 13: 8, 16: 2}


@pytest.mark.parametrize(("name", "mode"), [("bert", "pure"), ("resnet", "mixed"), ("mlp", "fp32")])
def test_a_count_of_its_own_agrees(name: str, mode: str) -> None:
    """Sizes by ONNX's inference over the written model, weights and all, and views by name."""
    main, loss = step(name, mode)
    lowered = main.lower(CUDA, fetch_list=[loss])
    model = onnx.shape_inference.infer_shapes(lowered.model, data_prop=True)
    size = {t.name: (t.data_type, math.prod(t.dims)) for t in model.graph.initializer}
    for info in [*model.graph.input, *model.graph.output, *model.graph.value_info]:
        tensor = info.type.tensor_type
        size[info.name] = (tensor.elem_type, math.prod(d.dim_value for d in tensor.shape.dim))
    kernels, sizes = 0, Counter[str]()
    for node in model.graph.node:
        if node.op_type not in ("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Shape"):
            kernels += 1
            for operand in filter(None, [*node.input, *node.output]):
                element, number = size[operand]
                sizes[onnx.TensorProto.DataType.Name(element)] += SIZES[element] * number
    found = main.cost_estimate(CUDA, fetch_list=[loss])
    named = {onnx.helper.np_dtype_to_tensor_dtype(np.dtype(k)): v for k, v in found.bytes_by_type.items()}
    assert (found.kernels, found.bytes) == (kernels, sum(sizes.values()))
    assert {onnx.TensorProto.DataType.Name(k): v for k, v in named.items()} == dict(sizes)
    assert sum(row.kernels for row in found.operators) == kernels
    assert sum(row.bytes for row in found.operators) == found.bytes


def test_counts_by_hand() -> None:
    found = estimate(
        "s = Shape(x)  f = Reshape(x, s)  h = Cast <to = 10> (f)  p = MatMul(h, w)  y = Cast <to = 1> (p)",
        "float[64, 32] x, float16[32, 8] w",
        "float[64, 8] y",
    )
    x, y, w = 64 * 32, 64 * 8, 32 * 8
    assert found.kernels == 3 and found.casts == 2
    assert found.bytes_by_type == {"float16": 2 * (x + x + w + y + y), "float32": 4 * (x + y)}
    assert found.cast_bytes == 6 * (x + y)
    assert (found.flops_16, found.flops_32) == (2 * 64 * 32 * 8, 0)
    assert found.temporaries == 2 * (x + y), "h while p is made"


def test_a_selection_is_forecast_by_what_it_reads() -> None:
    found = estimate("y = Gather(t, i)", "int64[4] i, float[1000, 8] t", "float[4, 8] y")
    assert found.bytes == 4 * 8000 + 8 * 4 + 4 * 32
    assert found.work[0].moved == 4 * 32 + 8 * 4 + 4 * 32 == moved_bytes("Gather", "", [32000, 32], [128])
    assert moved_bytes("Slice", "", [4096], [64]) == 128 and moved_bytes("Reshape", "", [64], [64]) == 0
    assert {name for name in ("Shape", "Size", "Reshape", "Gather") if traits_of(name).shape_only} == {"Shape", "Size"}


LOOP = """b = Constant <value = bool {1}> ()
    y = Loop (n, b, x) <body = body (int64 i, bool c, float[64, 32] s) => (bool d, float[64, 32] t)
        { d = Identity(c)  e = Exp(s)  t = Neg(e) }>"""
SCAN = """y = Scan <num_scan_inputs = 1, body = body (float[32] r) => (float[32] t) { e = Exp(r)  f = Neg(e)
    t = Abs(f) }> (x)"""
IF = """y = If (b) <then_branch = small () => (float[64, 32] t) { t = Exp(x) },
    else_branch = large () => (float[64, 32] u) { e = Exp(x)  u = Neg(e) }>"""


def test_nested_graphs_count_as_often_as_they_run() -> None:
    scan = estimate(SCAN)
    assert (scan.kernels, scan.bytes, scan.unknown) == (64 * 3, 64 * 3 * 2 * 32 * 4, ())
    branch = estimate(IF, "float[64, 32] x, bool b")
    assert (branch.kernels, branch.bytes) == (2, 2 * 2 * 64 * 32 * 4)


def test_branches_with_names_in_common_are_each_counted_for_their_own_operators() -> None:
    branches = """then_branch = large () => (float[64, 32] u) { s = Exp(x)  t = Exp(s)  u = Neg(t) },
        else_branch = small () => (float[64, 32] u) { s = Tanh(x)  u = Sigmoid(s) }"""
    found = estimate(f"y = If (b) <{branches}>", "float[64, 32] x, bool b").operators
    assert [(row.operator, row.kernels) for row in found] == [("Exp", 2), ("Neg", 1)]


def test_a_loop_that_runs_an_unknown_number_of_times_is_named() -> None:
    found = estimate(LOOP, "float[64, 32] x, int64 n")
    assert found.kernels == 2 and [name.split()[0] for name in found.unknown] == ["Loop"]
    assert "not known before the run" in str(found)
    known = estimate(f"n = Constant <value = int64 {{30000}}> ()  {LOOP}")
    assert (known.kernels, known.bytes, known.unknown) == (60_000, 60_000 * 2 * 64 * 32 * 4, ())


def test_sizes_that_data_decide_are_as_large_as_they_can_be() -> None:
    found = estimate("n = NonZero(x)  m = Cast <to = 1> (n)  y = ReduceSum(m)", outputs="float[1, 1] y")
    places = 2 * 2053  # of 2,048 elements; the next prime
    assert found.bytes_by_type["int64"] == 2 * 8 * places
    assert found.bytes_by_type["float32"] == 4 * (64 * 32 + 2 * places + 1)


def test_sizes_that_are_not_known_are_refused() -> None:
    with pytest.raises(amp.AmpError, match="Split 'SplitToSequence -> q.* hang on data or feeds; give the"):
        estimate(
            "q = SplitToSequence(x, sizes)  n = ConcatFromSequence <axis = 0> (q)  y = Relu(n)",
            "float[64, 32] x, int64[2] sizes",
        )


def test_a_sequence_of_known_pieces_counts_as_tensors() -> None:
    body = """half = Constant<value_int = 16>()  last = Constant<value_int = -1>()
        q = SplitToSequence <axis = 1> (x, half)  a = SequenceAt(q, last)  c = ConcatFromSequence <axis = 1> (q)
        n = SequenceLength(q)  f = Cast <to = 1> (n)  b = Mul(a, f)  y = Concat <axis = 1> (b, c)"""
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 17]> g (float[64, 32] x) => (float[64, 48] y) {{ {body} }}'
    )
    lowered = amp.Program.from_onnx(model).lower(amp.CUDAPlace(0)).model
    assert not [node.op_type for node in lowered.graph.node if "Sequence" in node.op_type]
    x = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
    np.testing.assert_array_equal(*(run(each, {"x": x})[0] for each in (model, lowered)))
    pieces = 4 + 4 + 2 + 6  # that Split, the first Concat, Mul and the last one read and write, beside single numbers
    assert estimate(body, outputs="float[64, 48] y").bytes_by_type["float32"] // (4 * 64 * 16) == pieces


def test_a_feed_of_no_dimensions_has_a_shape() -> None:
    assert estimate("y = Mul(x, f)", "float[64, 32] x, float f").feed_shapes["f"] == ()


# -- arithmetic --------------------------------------------------------------------------------------------
ONES: dict[str, tuple[list[tuple[int, ...]], dict[str, Any]]] = {
    "MatMul": ([(3, 1, 4, 5), (2, 5, 6)], {}),
    "Gemm": ([(5, 4), (6, 5)], {"transA": 1, "transB": 1}),
    "Conv": ([(2, 6, 9, 8), (4, 3, 3, 2)], {"group": 2, "strides": [2, 1]}),
    "ConvTranspose": ([(2, 4, 5, 3), (4, 3, 3, 2)], {"strides": [2, 1]}),
    "Einsum": ([(3, 4, 5), (3, 5, 6)], {"equation": "...ij, ...jk -> ...ik"}),
}


@pytest.mark.parametrize("type_", ONES)
def test_products_of_ones_count_themselves(type_: str) -> None:
    """With ones for operands each result is the number of its products."""
    shapes, attributes = ONES[type_]
    names = [f"x{i}" for i in range(len(shapes))]
    node = onnx.helper.make_node(type_, names, ["y"], **attributes)
    infos = [onnx.helper.make_tensor_value_info(name, 1, shape) for name, shape in zip(names, shapes, strict=True)]
    graph = onnx.helper.make_graph([node], "g", infos, [onnx.helper.make_tensor_value_info("y", 1, None)])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)])
    feeds = {name: np.ones(shape, np.float32) for name, shape in zip(names, shapes, strict=True)}
    y = np.asarray(onnx.reference.ReferenceEvaluator(model).run(None, feeds)[0])
    rule = flops_of(type_)
    assert rule is not None and rule(attributes, shapes, [y.shape]) == 2 * int(y.sum())


def test_every_sum_of_products_says_how_many() -> None:
    lists = amp.AutoMixedPrecisionLists()
    named = lists.white_list | lists.black_list | lists.gray_list
    assert not [name for name in named if "::" not in name and traits_of(name).product and flops_of(name) is None]


def test_arithmetic_of_composed_operators() -> None:
    batch, steps, width, hidden, heads, keys = 2, 7, 5, 3, 4, 11
    lstm, attention = flops_of("LSTM"), flops_of("Attention")
    assert lstm is not None and attention is not None
    shapes = [(steps, batch, width), (2, 4 * hidden, width), (2, 4 * hidden, hidden)]
    assert lstm({}, shapes, []) == 2 * steps * batch * 2 * 4 * hidden * (width + hidden)
    scores, sums = heads * steps * keys * width, heads * steps * keys * hidden
    four = [(batch, heads, steps, width), (batch, heads, keys, width), (batch, heads, keys, hidden)]
    assert attention({}, four, [(batch, heads, steps, hidden)]) == 2 * batch * (scores + sums)
    flat = [(batch, steps, heads * width), (batch, keys, heads * width), (batch, keys, heads * hidden)]
    assert attention({"q_num_heads": heads}, flat, [(batch, steps, heads * hidden)]) == 2 * batch * (scores + sums)
    fused = flops_of("FusedMatMul", "com.microsoft")
    assert fused is not None and fused({"transA": 1}, [(7, 5, 4), (7, 5, 6)], [(7, 4, 6)]) == 2 * 7 * 4 * 6 * 5


# -- forecasts ---------------------------------------------------------------------------------------------
WIDE = "float[4096, 4096] x", "float[4096, 4096] y"
TYPES = "float16", "float"


def test_each_kernel_takes_its_longest_term() -> None:
    """On a V100: one kernel bound by arithmetic, one by memory, one by its launch."""
    found = estimate(
        "p = MatMul(x, x)  r = Relu(p)  s = ReduceMean(b)  y = Add(r, s)", f"{WIDE[0]}, float[1, 8] b", WIDE[1]
    )
    v100, pixels = find_device("v100"), 4096**2
    forecast = found.forecast("V100")
    bandwidth, products = v100.reached
    assert 0.5 < products < bandwidth < 1
    assert forecast.arithmetic == pytest.approx(2 * 4096**3 / 15.7e12 / products)
    assert forecast.memory == pytest.approx((2 * 4 * pixels + (2 * 4 * pixels + 4)) / 900e9 / bandwidth)
    assert forecast.launch == v100.launch and forecast.launched == 1 and forecast.bound == "arithmetic"
    assert forecast.seconds == pytest.approx(forecast.arithmetic + forecast.memory + forecast.launch)
    captured = found.forecast("V100", captured=True)
    assert captured.launch == v100.captured < v100.launch and captured.memory == forecast.memory
    assert found.forecast("A100", tf32=True).seconds < found.forecast("A100").seconds
    assert (
        forecast.fits
        and not estimate("y = Relu(x)", "float[65536, 65536] x", "float[65536, 65536] y").forecast("T4").fits
    )


def test_16_bit_products_take_the_rate_of_their_type() -> None:
    half, brain = (
        estimate("y = MatMul(x, x)", *(each.replace("float", dtype) for each in WIDE))
        for dtype in ("float16", "bfloat16")
    )
    products = find_device("V100").reached[1]
    assert half.forecast("V100").arithmetic == pytest.approx(2 * 4096**3 / 125e12 / products)
    assert brain.forecast("V100").arithmetic == pytest.approx(2 * 4096**3 / 15.7e12 / products), "no units for bfloat16"
    assert brain.forecast("A100").seconds == half.forecast("A100").seconds


@pytest.mark.parametrize("device", ["H200", "T4"])
def test_instructions_bind_some_kernels(device: str) -> None:
    """In proportion to the fp32 rate; twice as many bytes take as long, until they bind it."""
    found = {dtype: estimate("y = Gelu(x)", *(each.replace("float", dtype) for each in WIDE)) for dtype in TYPES}
    forecasts = [found[dtype].forecast(device) for dtype in TYPES]
    slower = find_device("H200").rates["float32"] / find_device(device).rates["float32"]
    assert forecasts[0].arithmetic == pytest.approx(4096**2 / 312e9 * slower) and forecasts[0].bound == "arithmetic"
    assert forecasts[1].bound == {"H200": "arithmetic", "T4": "memory"}[device]


def test_a_table_that_is_looked_up_binds_nothing() -> None:
    """What counts is the result, not the tensor of which it is a part."""
    found = estimate("y = Gather(t, i)", "float16[1000000, 64] t, int64[4] i", "float16[4, 64] y").forecast("H200")
    assert found.launched == 1 and found.bound == "launch"


def chain(dtype: str, type_: str = "MatMul", cast: bool = False) -> CostEstimate:
    """Two operators and a Neg, with casts to bfloat16 and back between them, which round."""
    there = {"float": 1, "float16": 10, "bfloat16": 16}[dtype]
    body, last = [], "x"
    for i in range(2):
        body.append(f"a{i} = {type_}({last}, {last})")
        last = f"a{i}"
        if cast:
            body.append(f"b{i} = Cast <to = 16> ({last})  c{i} = Cast <to = {there}> (b{i})")
            last = f"c{i}"
    return estimate(" ".join(body) + f" y = Neg({last})", *(each.replace("float", dtype) for each in WIDE))


SMALL = "y = Exp(x)", "float16[8] x", "float16[8] y"


def test_16_bit_pays_where_it_is_faster() -> None:
    compared = amp.compare_costs({"fp32": chain("float"), "pure": chain("float16")}, ["A100", "T4"])
    assert [each.pays for each in compared.verdicts if each.mode == "pure"] == [True, True]
    assert compared.verdict("pure", "a100").ratio < 0.3 and "pure: pays on A100" in str(compared)
    assert json.loads(json.dumps(compared.to_dict()))["verdicts"][1]["mode"] == "pure"


def test_beside_tf32_16_bit_pays_less() -> None:
    """Of large products: an A100 does 156 TFLOPS of TF32 for 19.5 of fp32; a T4 has no TF32."""
    estimates = {
        name: estimate("y = MatMul(x, x)", *(f"{kind}[16384, 16384] {end}" for end in "xy"))
        for name, kind in (("fp32", "float"), ("pure", "float16"))
    }
    for device, faster in (("A100", 156 / 19.5), ("T4", 1)):
        plain, tf32 = (amp.compare_costs(estimates, [device], tf32=on).verdict("pure", device) for on in (False, True))
        assert tf32.ratio / plain.ratio == pytest.approx(faster, rel=0.02)


@pytest.mark.parametrize(
    ("full", "half", "device", "because"),
    [
        (estimate(SMALL[0], "float[8] x", "float[8] y"), estimate(*SMALL), "A100", "launches bind it: 1 of 1 kernels"),
        (chain("float"), chain("bfloat16"), "V100", "no matrix units for bfloat16"),
        (
            chain("float", "Add"),
            chain("float16", "Add", cast=True),
            "RTX 4090",
            "casts take back what it saves: 4 of them",
        ),
        (
            estimate("p = MatMul(x, x)  y = Neg(p)", *WIDE),
            estimate("p = MatMul(x, x)  y = Exp(p)", *WIDE),
            "V100",
            "100% of its arithmetic is on fp32 operands: MatMul",
        ),
        (estimate("y = Neg(x)", *WIDE), estimate("y = Abs(x)", *WIDE), "V100", "100% of its bytes are fp32 still"),
    ],
    ids=["launches", "units", "casts", "arithmetic", "bytes"],
)
def test_what_stands_in_the_way_is_told(full: CostEstimate, half: CostEstimate, device: str, because: str) -> None:
    compared = amp.compare_costs({"fp32": full, "half": half}, [device])
    verdict = compared.verdict("half", device)
    assert not verdict.pays and because in verdict.because
    assert f"half: will not pay on {device}, because " in str(compared)


def test_wrong_arguments_are_refused() -> None:
    found = estimate(*SMALL)
    on_cpu = amp.Program.from_onnx(
        onnx.parser.parse_model('<ir_version: 10, opset_import: ["" : 21]> g (float[8] x) => (float[8] y) {y = Exp(x)}')
    ).cost_estimate(amp.CPUPlace())
    with pytest.raises(amp.AmpError, match="cost_estimate: place is 'gpu'; expected a place"):
        amp.Program().cost_estimate("gpu")
    shapes, place = {"x": (8,)}, amp.CPUPlace()
    for estimate_of in (amp.Program().memory_estimate, amp.Program().cost_estimate):
        with pytest.raises(amp.AmpError, match=r"place is \{'x'.*feed_shapes=... and place=... may come in any order"):
            estimate_of(*((place, shapes) if "memory" in estimate_of.__name__ else (shapes, place)))
    with pytest.raises(amp.AmpError, match=r"no device 'H10'. Did you mean 'H100'"):
        found.forecast("H10")
    with pytest.raises(amp.AmpError, match="forecasts are of CUDA devices"):
        on_cpu.forecast("A100")
    with pytest.raises(amp.AmpError, match="two estimates at least"):
        amp.compare_costs({"fp32": found})
    with pytest.raises(amp.AmpError, match="mapping of names to CostEstimates"):
        amp.compare_costs({"fp32": 1, "pure": 2})  # type: ignore[dict-item]
    with pytest.raises(amp.AmpError, match="got CostEstimate$"):
        amp.compare_costs(found, found)  # type: ignore[arg-type]
    lines = str(amp.compare_costs({"fp32": found, "mixed, with a long name": found}, ["A100"])).splitlines()
    assert {len(line) for line in lines[:3]} == {len(lines[0])} and len(lines[4]) == len(lines[5])
    with pytest.raises(amp.AmpError, match="no verdict on 'auto'"):
        amp.compare_costs({"a": found, "b": found}, ["A100"]).verdict("auto", "A100")


HEAD = """
launch = {alone = 1, captured = 1}
reached = {bandwidth = 1, products = 1}
numbers = {device = "X"}
[device.X]
name = "X"
source = "s"
"""


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        ("memory = 1\nbandwidth = 1", "float32"),
        ("memory = 0\nbandwidth = 1\nfloat32 = 1", "memory"),
        ("speed = 3", "bandwidth"),
    ],
)
def test_a_device_with_a_wrong_field_is_refused(entry: str, fault: str) -> None:
    with pytest.raises(amp.AmpError, match=f"device 'X' has no good {fault}"):
        parse_devices(HEAD + entry, "mine.toml")


def test_devices_name_their_sources() -> None:
    assert {"V100", "T4", "A100", "A10", "L4", "RTX 4090", "H100", "H200"} <= set(devices())
    for device in devices().values():
        assert device.source and device.launch > device.captured > 0
        assert device.rate("float16") > device.rate("float32"), "16 bit is what the matrix units are for"


def test_a_list_that_keeps_arithmetic_wide_is_named() -> None:
    text = '<ir_version: 10, opset_import: ["" : 21]> g (float[2048, 2048] x) => (float[2048, 2048] y)'
    model = onnx.parser.parse_model(text + "{ h = Relu(x)  m = MatMul(h, h)  y = Relu(m) }")
    kept = amp.convert(model, mode="pure", black_list=["MatMul"], keep_io=False)
    estimates = {"fp32": amp.Program.from_onnx(model).cost_estimate(CUDA), "pure": kept.cost_estimate(CUDA)}
    because = amp.compare_costs(estimates, ["V100"]).verdict("pure", "V100").because
    assert "100% of its arithmetic is on fp32 operands: MatMul (fp32: custom black list)" in because
