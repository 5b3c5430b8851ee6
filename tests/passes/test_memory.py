"""The forecast of memory: liveness against hand-counted graphs, the record, and a measured training step."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.passes.lowering.arena import FIRST_REGION, LARGEST_REGION, REGION, Arena
from amp_transpiler.passes.lowering.liveness import Liveness, plan
from amp_transpiler.passes.lowering.lowered import Lowered
from tests.helpers.places import change_place
from tests.helpers.programs import build
from tests.tools.memory_run import measured


def planned(body: str, inputs: str = "float[256] x", outputs: str = "float[1] y", place: str = "cpu") -> Liveness:
    text = f'<ir_version: 10, opset_import: ["" : 21]> g ({inputs}) => ({outputs}) {{ {body} }}'
    return plan(Lowered(onnx.parser.parse_model(text), place))


KIB = 1024  # bytes of float[256]

CHAINS = {
    # a and b at a time; the result is counted to the end
    "own buffers": ("a = Exp(x)  b = Exp(a)  c = Exp(b)  y = ReduceSum(c)", 2 * KIB),
    "written over": ("a = Exp(x)  b = Relu(a)  c = Tanh(b)  y = ReduceSum(c)", KIB + 4),
    "not over what is still read": ("a = Exp(x)  b = Relu(a)  c = Mul(a, b)  y = ReduceSum(c)", 3 * KIB),
    "not over a feed": ("a = Relu(x)  y = ReduceSum(a)", KIB + 4),
    "a view": (
        "s = Constant <value = int64[2] {16, 16}> ()  a = Exp(x)  b = Reshape(a, s)  c = Exp(b)  y = ReduceSum(c)",
        2 * KIB,
    ),
    "a view keeps its source": (
        "s = Constant <value = int64[2] {16, 16}> ()  a = Exp(x)  b = Reshape(a, s)  c = ReduceSum <keepdims = 0> (a)"
        "  d = Mul(b, c)  e = Mul(d, d)  f = ReduceSum <keepdims = 0> (e)  t = Constant <value = int64[1] {1}> ()"
        "  y = Reshape(f, t)",
        2 * KIB + 4,
    ),
    "equal ones are one": ("a = Exp(x)  b = Exp(x)  c = Mul(a, b)  y = ReduceSum(c)", 2 * KIB),
    "constants are folded": (
        "k = Constant <value = float[1] {2.0}> ()  l = Mul(k, k)  a = Mul(x, l)  y = ReduceSum(a)",
        KIB + 4,
    ),
    "a cast to half the size": (
        "a = Exp(x)  b = Cast <to = 10> (a)  c = Cast <to = 1> (b)  y = ReduceSum(c)",
        KIB * 3 // 2,
    ),
    "selections": (
        "z = Constant <value = float {0.0}> ()  c = Less(z, x)  a = Where(c, x, z)  y = ReduceSum(a)",
        256 + KIB + 2 * KIB,
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_peak_of_small_graphs(name: str) -> None:
    body, peak = CHAINS[name]
    assert max(planned(body).totals()) == peak


@pytest.mark.parametrize("draw", ["Multinomial <sample_size = 256>", "RandomNormalLike", "Bernoulli"])
def test_two_draws_are_two_tensors(draw: str) -> None:
    columns, kind = (4, "int32") if draw.startswith("Multinomial") else (256, "float")
    live = planned(
        f"a = {draw} (x)  b = {draw} (x)  c = Mul(a, b)  y = ReduceSum <keepdims = 0> (c)",
        inputs=f"float[1,{columns}] x",
        outputs=f"{kind} y",
    )
    assert max(live.totals()) == 3 * KIB


def test_the_order_is_the_runtimes() -> None:
    """Depth first, from the last node that nobody reads, the last producer first."""
    live = planned(
        "a = Exp(x)  b = Log(x)  c = Mul(a, b)  y = ReduceSum(c)  d = Neg(x)  z = ReduceMax(d)",
        outputs="float[1] y, float[1] z",
    )
    assert [node.proto.output[0] for node in live.order] == ["d", "z", "b", "a", "c", "y"]


def test_cuda_writes_activations_over_their_input_and_nothing_else() -> None:
    body = "a = Exp(x)  b = {} (a)  c = Mul(x, b)  y = ReduceSum(c)"
    for type_, on_cuda in (("Relu", 3), ("Tanh", 3), ("Softmax", 4), ("Sqrt", 4)):
        on_cpu = 4 if type_ == "Sqrt" else 3
        found = [len(planned(body.format(type_), place=place).buffers) for place in ("cpu", "cuda")]
        assert found == [on_cpu, on_cuda], type_


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_a_dead_buffer_is_not_kept_for_a_later_tensor(place: str) -> None:
    body = "a = Exp(x)  b = ReduceSum <keepdims = 0> (a)  c = Mul(x, b)  y = ReduceSum(c)"
    live = planned(body, place=place)
    assert [(b.first, b.last) for b in live.buffers] == [(0, 1), (1, 2), (2, 3), (3, 3)]


def test_an_unknown_shape_is_named() -> None:
    with pytest.raises(amp.AmpError, match="shape of tensor 'n' is not known before the run"):
        planned("n = NonZero(x)  m = Cast <to = 1> (n)  y = ReduceSum(m)", outputs="float[1, 1] y")


def test_a_model_that_computes_its_shapes() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]> g (float[N, 8] x) => (float[N, M] y)
    <int64[1] zero = {0}> {
        four = Constant <value = int64[1] {4}> ()
        s = Shape(x)
        t = Concat <axis = 0> (four, s)
        wide = Expand(x, t)
        y = ReduceSum <keepdims = 0> (wide, zero)
    }"""
    estimate = amp.Program.from_onnx(onnx.parser.parse_model(text)).memory_estimate({"x": (16, 8)})
    assert estimate.largest[0].shape == (4, 16, 8) and estimate.activations == 0
    assert estimate.peak >= estimate.feeds + 5 * 16 * 8 * 4


def fed(batch: int) -> dict[str, tuple[int, ...]]:
    return {"image": (batch, 784), "label": (batch, 1)}


def test_a_symbolic_size_is_given_once() -> None:
    main = amp.Program()
    with amp.program_guard(main, amp.Program("startup")), amp.unique_name.guard():
        amp.nn.fc(amp.data("x", ["N", 8], "float32") + amp.data("z", ["N", 8], "float32"), 4)
    assert main.memory_estimate({"x": (3, 8)}).feed_shapes == {"x": (3, 8), "z": (3, 8)}


@pytest.mark.parametrize("chunks", [(), ((0, 2**17, 2**15),)])
@pytest.mark.parametrize("mode, half", [("fp32", False), ("pure-fp16", True)])
def test_state_of_a_training_program(
    mode: str, half: bool, chunks: tuple[tuple[int, int, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients that an update reads in chunks, through a view, are gradients until then."""
    change_place(monkeypatch, "cpu", chunks=chunks)
    net = build("mlp", mode)
    sizes = {v.name: int(np.prod(v.shape)) * (2 if v.dtype == "float16" else 4) for v in net.main.parameters}
    numbers = sum(int(np.prod(v.shape)) for v in net.main.parameters)
    estimate = net.main.memory_estimate(fed(64))
    assert estimate.parameters == sum(sizes.values()) == numbers * (2 if half else 4)
    assert estimate.master_weights == (4 * numbers if half else 0)
    assert estimate.moments == 8 * numbers + 8
    assert estimate.feeds == 64 * 784 * 4 + 64 * 8
    assert estimate.gradients >= 4 * numbers if half else estimate.gradients >= 4 * 784 * 512
    kept = 64 * (512 + 512 + 10) * 4  # both hidden layers and the scores, as fp32 tensors where they are 16 bit
    weights = 4 * (numbers + 64 * 784) if half else 0  # fp32 tensors of 16-bit weights and of the rounded feed
    assert kept <= estimate.activations <= 1.5 * kept + weights
    assert estimate.peak > estimate.parameters + estimate.master_weights + estimate.moments + estimate.activations
    assert estimate.second_buffers <= estimate.parameters if not half else estimate.second_buffers == 0
    device = net.main.memory_estimate(fed(64), amp.WebGPUPlace(0))  # where nothing is updated in place
    updated = device.parameters + device.master_weights + device.moments
    assert device.second_buffers >= updated == estimate.parameters + estimate.master_weights + estimate.moments


def test_the_record() -> None:
    net = build("transformer")
    estimate = net.main.memory_estimate(fetch_list=[net.loss])
    text = str(estimate)
    assert "activations kept for backward" in text and "MiB" in text and estimate.peak_node in text
    record = json.loads(json.dumps(estimate.to_dict()))
    assert record["peak"] == estimate.peak and len(record["largest"]) == 5
    assert [t["bytes"] for t in record["largest"]] == sorted((t["bytes"] for t in record["largest"]), reverse=True)
    assert estimate.feed_shapes == {"ids": (2, 16), "label": (32, 1)}
    larger = build("mlp").main
    assert larger.memory_estimate(fed(256)).activations == pytest.approx(
        4 * larger.memory_estimate(fed(64)).activations, rel=0.01
    )


def test_cuda_is_forecast_without_a_gpu() -> None:
    net = build("resnet", "pure-fp16")
    on_cpu, on_cuda = (
        net.main.memory_estimate({"image": (4, 3, 16, 16), "label": (4, 1)}, place)
        for place in (amp.CPUPlace(), amp.CUDAPlace(0))
    )
    assert on_cuda.place == "CUDAPlace(0)" and 0.3 < on_cuda.activations / on_cpu.activations < 0.7


@pytest.mark.parametrize(
    "shapes, message",
    [
        (None, r"feed 'image' of program 'program_\d+' has shape .*; give its size, as in feed_shapes=\{'image'"),
        ({"picture": (4, 784)}, r"'picture' is no feed of program 'program_\d+'; its feeds are image, label"),
        ({"image": (4, 785)}, r"gives 'image' the shape \[4, 785\]; it is declared as"),
        ({"image": (784,)}, r"gives 'image' the shape \[784\]; it is declared as"),
        ({"image": (4, 784), "label": ("N", 1)}, "gives 'label' the shape"),
        ([4, 784], "expected a mapping"),
    ],
)
def test_wrong_shapes_are_named(shapes: object, message: str) -> None:
    with pytest.raises(amp.AmpError, match=message):
        build("mlp").main.memory_estimate(shapes)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
@pytest.mark.parametrize(
    "arguments",
    [("mlp", "fp32"), ("pooled", "pure-fp16"), ("bert", "amp"), ("gru", "amp"), ("ctc", "amp"), ("residual", "amp")],
    ids=" ".join,
)
def test_against_a_real_step(arguments: tuple[str, ...]) -> None:
    """Matrix products, convolutions, attention, recurrence with CTC: within 10 % of what the process takes."""
    forecast, found = measured(*arguments)
    assert 0.9 * found < forecast < 1.1 * found, (forecast, found)


def test_a_product_takes_on_its_bias_and_a_transposition() -> None:
    """No tensor is allocated for the product alone, nor for the transposed matrix."""
    body = "a = Exp(x)  t = Transpose <perm = [1, 0]> (a)  m = MatMul(t, x)  c = Add(m, b)  y = ReduceSum(c)"
    live = planned(body, "float[16, 16] x, float[16] b")
    assert [node.proto.op_type for node in live.order] == ["Exp", "MatMul", "ReduceSum"]
    assert max(live.totals()) == 2 * KIB


def test_pooling_runs_in_blocks_of_channels() -> None:
    """One copy into blocks serves all that pool a tensor; what they make is copied back, with axes turned on the way."""
    body = """a = Exp(x)  p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (a)
              q = AveragePool <kernel_shape = [4, 4]> (a)  t = Transpose <perm = [0, 2, 3, 1]> (p)
              u = Exp(t)  v = Exp(q)  r = ReduceSum(u)  y = ReduceSum(v)"""
    live = planned(body, "float[1, 8, 4, 4] x", "float[1, 1, 1, 1] r, float[1, 1, 1, 1] y")
    kinds = [node.proto.op_type for node in live.order]
    assert sorted(kinds) == sorted(
        [
            "Exp",
            "ReorderInput",
            "MaxPool",
            "AveragePool",
            "ReorderOutput",
            "Transpose",
            "Exp",
            "Exp",
            "ReduceSum",
            "ReduceSum",
        ]
    )
    odd = planned("a = Exp(x)  b = MaxPool <kernel_shape = [2, 2]> (a)  y = ReduceSum(b)", "float[1, 7, 4, 4] x")
    assert [node.proto.op_type for node in odd.order] == ["Exp", "MaxPool", "ReduceSum"]


@pytest.mark.parametrize("type_, gates", [("LSTM", 4), ("GRU", 3)])
@pytest.mark.parametrize("direction, count", [("forward", 1), ("bidirectional", 2)])
def test_recurrent_kernels_hold_the_gates_of_all_steps(direction: str, count: int, type_: str, gates: int) -> None:
    wide = gates * 16
    body = f'a, b = {type_} <hidden_size = 16, direction = "{direction}"> (x, w, r)  c = Exp(a)  y = ReduceSum(c)'
    live = planned(body, f"float[5, 2, 8] x, float[{count}, {wide}, 8] w, float[{count}, {wide}, 16] r")
    turned = (5 * 2 * 8 * 4, 5 * 2 * 16 * 4) if count == 2 else ()
    assert live.workspace[0] == (*turned, *(5 * 2 * wide * 4,) * count)


# -- the arena ------------------------------------------------------------------------------------------------
MIB = 1 << 20


def test_an_arena_fills_holes_before_it_takes_more() -> None:
    arena = Arena()
    first, second, third = (arena.take(size * MIB) for size in (4, 2, 4))
    assert arena.resident == 10 * MIB
    arena.give(first)
    assert arena.take(3 * MIB).start == first.start  # what is left of the hole serves others
    assert arena.take(MIB).start == first.start + 3 * MIB
    arena.give(third)
    arena.give(second)
    assert arena.take(6 * MIB).start == second.start  # neighbours became one
    assert arena.resident == 10 * MIB
    arena.take(MIB)
    assert arena.resident == 11 * MIB


def test_an_arena_grows_by_regions_of_which_pages_count_once_they_are_used() -> None:
    arena = Arena()
    arena.take(100)
    assert arena.resident == 4096
    small = arena.table
    arena.take(REGION)
    assert arena.resident == 4096 + REGION and arena.table == small + REGION // 32  # 8 bytes for each 256


@pytest.mark.parametrize("requests", [[(1, 1), (1, 2), (1, 0), (3, 4)], [(3, 4), (3, 4), (4, 8)]])
def test_regions_are_twice_as_large_as_the_last(requests: list[tuple[int, int]]) -> None:
    """As onnxruntime's are: a region that was raised for a large request is followed by one as large."""
    arena = Arena()
    for size, added in requests:
        before = arena.table
        arena.take(size * REGION)
        assert arena.table - before == pytest.approx(added * REGION // 32, rel=1e-6)


def test_a_later_step_writes_to_no_memory_that_the_first_did_not_take() -> None:
    """Of regions of one size the second step would fill the one first that the first step took last."""
    first, second = measured("--steps")
    assert first > 300 and second < 1.05 * first, (first, second)


def test_sessions_take_their_memory_from_one_arena_and_give_it_back() -> None:
    """Eight shapes take little more than one; ``close`` frees what they took."""
    one, eight, closed = measured("--shapes")
    assert one > 40 and eight < 1.5 * one and closed < 0.5 * one, (one, eight, closed)


def test_large_state_takes_its_size_once_it_is_made() -> None:
    """And little more meanwhile: a table is drawn in chunks, and the arena gives back what it was computed in."""
    taken, most, size = measured("--state")
    assert 500 < size < 520 and taken < 1.1 * size and most < 1.8 * size, (taken, most, size)


def test_regions_are_whole_units() -> None:
    """onnxruntime's arena refuses another one, once a program needs so much: some gigabytes here."""
    assert all(size % 256 == 0 and size < 2**31 for size in (FIRST_REGION, REGION, LARGEST_REGION))
