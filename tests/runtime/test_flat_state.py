"""Parameters of a group in one buffer, as on a GPU, run here on CPU: the same step, seen by names as ever."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.lists import place_traits
from amp_transpiler.nn import functional as F
from amp_transpiler.ops.training import scaling
from amp_transpiler.passes.lowering import flat_layout, lowering
from amp_transpiler.passes.lowering.place import cores_of
from amp_transpiler.passes.lowering.wanted import Cores
from amp_transpiler.runtime import device_tensors, executor
from amp_transpiler.runtime.scope import Scope
from tests.helpers.node_by_node import node_by_node
from tests.helpers.places import change_place
from tests.helpers.ports import fed, taken

RNG = np.random.default_rng(5)
FEEDS = {"x": RNG.normal(size=(8, 20)).astype(np.float32), "y": RNG.normal(size=(8, 3)).astype(np.float32)}
BAD = FEEDS | {"x": np.full((8, 20), 1e5, np.float32)}


def built(optimizer: Any, mode: str = "pure", **options: Any) -> tuple[Any, Any, Any, Any]:
    main, startup = amp.Program(), amp.Program("startup")
    main.random_seed = startup.random_seed = 3
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x, y = amp.data("x", [8, 20], "float32"), amp.data("y", [8, 3], "float32")
        with amp.fp16_guard():
            hidden = amp.nn.layer_norm(amp.nn.fc(x, 40, act="relu"))
            out = amp.nn.fc(amp.nn.batch_norm(amp.nn.fc(amp.nn.batch_norm(hidden), 17, act="tanh")), 3)
        loss = F.mean((out - y) * (out - y))
        opt = amp.decorate(optimizer, use_pure_fp16=mode == "pure", **options) if mode != "fp32" else optimizer
        opt.minimize(loss, startup)
    return main, startup, loss, opt


def started(main: Any, startup: Any, opt: Any, mode: str, scope: Scope) -> amp.Executor:
    exe = amp.Executor(amp.CPUPlace(), threads=1)
    exe.run(startup, scope=scope)
    if mode == "pure":
        opt.amp_init(amp.CPUPlace(), scope)
    return exe


def values(scope: Scope) -> dict[str, np.ndarray[Any, Any]]:
    return {name: scope.find_var(name) for name in scope.var_names()}


@pytest.fixture
def flat(monkeypatch: pytest.MonkeyPatch) -> None:
    change_place(monkeypatch, "cpu", flat_fewest=2, flat_largest=0)


def trained(feeds: list[dict[str, Any]], *args: Any, **options: Any) -> dict[str, np.ndarray[Any, Any]]:
    scope = Scope()
    main, startup, loss, opt = built(*args, **options)
    exe = started(main, startup, opt, args[1], scope)
    for feed in feeds:
        exe.run(main, feed=feed, fetch_list=[loss], scope=scope)
    return values(scope)


def together(monkeypatch: pytest.MonkeyPatch) -> None:
    change_place(monkeypatch, "cpu", flat_fewest=2, flat_largest=0)


def in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    change_place(monkeypatch, "cpu", chunks=((0, 50, 20),))


def huge_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    together(monkeypatch)
    monkeypatch.setattr(flat_layout, "_HUGE", 50)


CLIP = amp.optimizer.ClipGradByValue(0.1)  # before all updates alike: with one kind that has moments, one that has none


@pytest.mark.parametrize("mode", ["fp32", "mixed", "pure"])
@pytest.mark.parametrize(
    ("kind", "clip"),
    [*((kind, None) for kind in ("SGD", "Momentum", "Adam", "AdamW", "Lamb")), ("SGD", CLIP), ("Adam", CLIP)],
)
def test_a_flat_step_is_the_step_of_single_parameters(
    kind: str, clip: Any, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: the same operations on every element, and a loss scale that is a power of two."""

    def run() -> dict[str, np.ndarray[Any, Any]]:
        extra = {"momentum": 0.9} if kind == "Momentum" else {}
        optimizer = getattr(amp.optimizer, kind)(0.01, multi_precision=mode != "fp32", grad_clip=clip, **extra)
        return trained([FEEDS, FEEDS, BAD if mode == "pure" else FEEDS, FEEDS], optimizer, mode)

    expected = run()
    for layout in (together, in_chunks, huge_apart):
        with monkeypatch.context() as changes:
            layout(changes)
            found = run()
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert value.tobytes() == found[name].tobytes(), (layout.__name__, name)


@pytest.mark.usefixtures("flat")
def test_a_bad_step_changes_nothing_and_others_see_what_is_written(tmp_path: Path) -> None:
    main, startup, loss, opt = built(amp.optimizer.Adam(0.01, multi_precision=True))
    amp.check_step(main, amp.CPUPlace(), {})
    scope = Scope()
    exe = started(main, startup, opt, "pure", scope)
    assert scope.find_var("fc_0.w_0").dtype == np.float16
    odd = np.where(np.arange(800).reshape(20, 40) % 7 == 0, np.float32(-0.0), scope.find_var("fc_0.w_0_fp32_master_0"))
    scope.set_var("fc_0.w_0_fp32_master_0", odd)  # -0.0, which adding 0.0 would change
    test = main.clone(for_test=True)
    exe.run(main, feed=FEEDS, scope=scope)
    wholes = {name: device_tensors.whole(value) for name, value in scope.ort_values.items()}
    assert wholes["fc_0.w_0"] is wholes["fc_2.b_0"] is not wholes["fc_0.w_0_fp32_master_0"]
    assert wholes["fc_0.w_0_fp32_master_0_moment1_0"] is wholes["fc_1.w_0_fp32_master_0_moment1_0"] is not None
    assert wholes["batch_norm_0.w_1"] is wholes["batch_norm_1.w_1"] is not wholes["batch_norm_0.w_2"]
    assert set(exe.memory_report(main).in_place) >= {
        "batch_norm_1.w_2",
        "fc_0.w_0",
        "fc_0.w_0_fp32_master_0_moment2_0",
        "fc_1.w_0_fp32_master_0",
    }

    before = values(scope)
    (seen,) = exe.run(test, feed=FEEDS, fetch_list=[loss.name], scope=scope)
    exe.run(main, feed=BAD, scope=scope)
    after = values(scope)
    changed = {name for name in before if before[name].tobytes() != after[name].tobytes()}
    assert changed == {"num_good_steps_0", "num_bad_steps_0"}
    assert exe.run(test, feed=FEEDS, fetch_list=[loss.name], scope=scope)[0] == seen

    amp.save_checkpoint(tmp_path / "state", main, scope)
    exe.run(main, feed=FEEDS, scope=scope)
    expected = values(scope)
    amp.load_checkpoint(tmp_path / "state", main, scope)
    exe.run(main, feed=FEEDS, scope=scope)
    assert all(expected[name].tobytes() == value.tobytes() for name, value in values(scope).items())


@pytest.mark.parametrize("mode", ["fp32", "mixed", "pure"])
def test_large_parameters_are_worked_on_in_chunks_where_they_lie(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    in_chunks(monkeypatch)
    main, startup, _, opt = built(amp.optimizer.Adam(0.01, multi_precision=True), mode, init_loss_scaling=128.0)
    scope = Scope()
    exe = started(main, startup, opt, mode, scope)
    nodes = every_node(main.lower(amp.CPUPlace()).model.graph)
    assert [node.op_type for node in nodes].count("Scan") == 3, "of 800, 680 and 51 elements"
    assert "Sqrt" in {inner.op_type for node in nodes if node.op_type == "Scan" for inner in node.attribute[0].g.node}
    kept = {name: scope.ort_value(name) for name in ("fc_0.w_0", "fc_2.b_0")}
    before = values(scope)
    exe.run(main, feed=FEEDS, scope=scope)
    large = {name for name, value in before.items() if value.size in (800, 680)}
    assert len(large) == {"fp32": 6, "mixed": 6, "pure": 8}[mode]
    late = {"fc_1.w_0"} if mode == "fp32" else set()  # too small for what reads it to be waited for
    assert large - late <= set(exe.memory_report(main).in_place)
    assert all(scope.ort_value(name) is value for name, value in kept.items()), "nothing is copied for it"
    assert not {name for name in large if scope.find_var(name).tobytes() == before[name].tobytes()}
    before = values(scope)
    if mode != "fp32":
        exe.run(main, feed=BAD, scope=scope)
        assert all(scope.find_var(name).tobytes() == before[name].tobytes() for name in large)


@pytest.mark.parametrize("layout", [together, in_chunks])
def test_what_runs_without_an_executor_is_fed_by_names(layout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layout(monkeypatch)
    main, startup, _, opt = built(amp.optimizer.Adam(0.01), "fp32")
    scope = Scope()
    started(main, startup, opt, "fp32", scope)
    states = main.lower(amp.CPUPlace()).states
    assert any(port.segments for port in states)
    given = fed(states, scope.find_var)
    assert all(given[port.tensor].shape == port.shape for port in states)
    for name, value in taken(states, given).items():
        np.testing.assert_array_equal(value, scope.find_var(name))


@pytest.mark.parametrize("mode", ["mixed", "pure"])
def test_an_update_on_cpu_takes_its_gradient_scaled(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The inverse scale is part of its factors where the gradient is in 16 bit: no pass over the gradient is for it."""
    monkeypatch.setattr(scaling, "_LARGE", range(600, 900))
    main, _, _, _ = built(amp.optimizer.Adam(0.01, multi_precision=True), mode)
    graph = onnx.shape_inference.infer_shapes(main.lower(amp.CPUPlace()).model).graph
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in (*graph.value_info, *graph.input)}
    whole = {node.op_type for node in graph.node if shapes.get(node.output[0]) in ([20, 40], [40, 17])}
    assert whole - ({"Mul"} if mode == "mixed" else set()) == {"Cast", "MatMul"}, (
        "weights and gradients in 16 bit and fp32, and the products that give them"
    )


@pytest.mark.usefixtures("flat")
def test_a_value_that_is_set_is_what_the_next_step_starts_from_and_old_ones_stay() -> None:
    main, startup, _, opt = built(amp.optimizer.SGD(0.5), "fp32")
    scope = Scope()
    exe = started(main, startup, opt, "fp32", scope)
    exe.run(main, feed=FEEDS, scope=scope)
    old = scope.ort_value("fc_1.w_0")
    held, beside = device_tensors.to_array(old), scope.find_var("fc_0.w_0")
    scope.set_var("fc_1.w_0", np.zeros((40, 17), np.float32))
    exe.run(main, feed=FEEDS, scope=scope)
    assert device_tensors.to_array(old).tobytes() == held.tobytes(), "somebody's value was written over"
    assert np.array_equal(scope.find_var("fc_0.w_0"), beside), "no gradient goes through zeros"
    first = scope.find_var("fc_1.w_0")
    assert np.any(scope.find_var("fc_1.b_0")) and not np.any(first[:, 0] == held[:, 0])
    scope.drop("fc_1.w_0")
    with pytest.raises(amp.errors.ScopeError, match="'fc_1.w_0' of program .* is not in the scope"):
        exe.run(main, feed=FEEDS, scope=scope)


@pytest.mark.gpu
def test_parameters_come_on_cuda_with_the_first_step_into_their_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    main, startup, _, opt = built(amp.optimizer.Adam(0.01, multi_precision=True), "pure", init_loss_scaling=128.0)
    scope, exe, place = Scope(), amp.Executor(amp.CUDAPlace(0)), amp.CUDAPlace(0)
    exe.run(startup, scope=scope)
    opt.amp_init(place, scope)
    before = values(scope)
    assert {scope.ort_value(name).device_name() for name in before} == {"cpu"}
    taken: list[tuple[int, ...]] = []
    allocate = device_tensors.allocate
    monkeypatch.setattr(
        device_tensors, "allocate", lambda shape, *rest: taken.append(tuple(shape)) or allocate(shape, *rest)
    )
    exe.run(main, feed=FEEDS, scope=scope)
    flat = {s.variable: s.shape for p in main.lower(place).states if len(p.segments) > 1 for s in p.segments}
    assert flat and not {shape for shape in flat.values() if len(shape) > 1} & set(taken), "never there by itself"
    assert {scope.ort_value(name).device_name() for name in flat} == {"cuda"}
    assert any(scope.find_var(name).tobytes() != before[name].tobytes() for name in flat)


def on_gpu(main: Any, scope: Scope, feed: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """New values of the states by the lowering for CUDA, walked node by node."""
    lowered = main.lower(amp.CUDAPlace(0), feed_shapes={name: a.shape for name, a in feed.items()})
    given = dict(feed) | {name: np.zeros((), np.float32) for name in lowered.scalars}
    for port in lowered.states:
        if port.segments:
            given[port.tensor] = np.zeros(port.shape, port.dtype)
            for part in port.segments:
                value = scope.find_var(part.variable)
                given[port.tensor][0, part.offset : part.offset + value.size] = value.ravel()
        else:
            given[port.tensor] = scope.find_var(port.variable)
    known, found = node_by_node(lowered.model, given), {}
    for port in lowered.updates:
        for part in port.segments:
            size = int(np.prod(part.shape))
            found[part.variable] = known[port.tensor].ravel()[part.offset :][:size].reshape(part.shape)
        if not port.segments:
            found[port.variable] = known[port.tensor]
    return found


@pytest.mark.parametrize("kind", ["Adam", "Momentum"])
@pytest.mark.parametrize("mode", ["pure", "mixed"])
def test_moments_in_one_kernel(kind: str, mode: str) -> None:
    """As on CPU but for what 16-bit gradients differ by; a bad step leaves every bit, of masters -0.0 too."""
    optimizer = getattr(amp.optimizer, kind)(0.01, multi_precision=True)
    main, startup, _, opt = built(optimizer, mode, init_loss_scaling=128.0)
    scope = Scope()
    exe = started(main, startup, opt, mode, scope)
    exe.run(main, feed=FEEDS, scope=scope)
    name = "fc_0.w_0_fp32_master_0" if mode == "pure" else "fc_0.w_0"
    scope.set_var(name, np.where(np.arange(800).reshape(20, 40) % 7 == 0, np.float32(-0.0), scope.find_var(name)))
    before = values(scope)
    bad, good = on_gpu(main, scope, BAD), on_gpu(main, scope, FEEDS)
    counters = {"num_good_steps_0", "num_bad_steps_0"}
    assert {n for n, value in bad.items() if value.tobytes() != before[n].tobytes()} == counters
    exe.run(main, feed=FEEDS, scope=scope)
    for n, value in values(scope).items():
        # Before a batch norm a scale and a shift have gradients of noise.
        if n in good and value.dtype == np.float32 and not n.startswith("layer_norm"):
            assert np.abs(good[n] - value).max() <= 1e-2 * np.abs(value).max() + 1e-7, n


def test_views_share_memory_and_keep_it() -> None:
    for dtype in ("float16", "float32", "bfloat16"):
        whole = device_tensors.from_array(np.arange(12, dtype=np.float32))
        if dtype != "float32":
            whole = device_tensors.from_array(np.arange(12).astype(device_tensors.numpy_dtype(dtype)))
        view = device_tensors.view(whole, 3, (2, 4))
        single = device_tensors.view(whole, 11, ())
        view.update_inplace(device_tensors.from_array(np.full((2, 4), 7).astype(device_tensors.numpy_dtype(dtype))))
        assert device_tensors.to_array(whole).astype(int).tolist() == [0, 1, 2, *[7] * 8, 11]
        del whole
        assert device_tensors.to_array(single) == 11 and device_tensors.whole(view).shape() == [12]


def every_node(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    nested = [a.g for node in graph.node for a in node.attribute if a.HasField("g")]
    return [*graph.node, *(node for each in nested for node in every_node(each))]


def test_many_small_parameters_lie_together_on_cpu_and_large_ones_by_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run() -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, Any], int]:
        main, startup = amp.Program(), amp.Program("startup")
        main.random_seed = startup.random_seed = 3
        with amp.program_guard(main, startup), amp.unique_name.guard():
            hidden = amp.nn.fc(amp.data("x", [8, 20], "float32"), 1024)
            for _ in range(4):
                hidden = amp.nn.fc(hidden, 17, act="tanh")
            opt = amp.decorate(amp.optimizer.Adam(0.01, multi_precision=True), use_pure_fp16=True, use_fp16_guard=False)
            opt.minimize(F.mean(hidden * hidden), startup)
        scope = Scope()
        exe = started(main, startup, opt, "pure", scope)
        for x in (FEEDS["x"], np.full((8, 20), 1e38, np.float32), FEEDS["x"] * 3):
            exe.run(main, feed={"x": x}, scope=scope)
        wholes = {name: device_tensors.whole(value) for name, value in scope.ort_values.items()}
        return values(scope), wholes, len(every_node(main.lower(amp.CPUPlace()).model.graph))

    expected, wholes, nodes = run()
    assert set(wholes.values()) == {None}, "8 small ones are too few"
    change_place(monkeypatch, "cpu", flat_fewest=8)
    found, wholes, fewer = run()
    assert fewer < nodes - 80
    assert wholes["fc_0.w_0"] is wholes["fc_1.w_0"] is None, "20480 and 17408 elements"
    assert wholes["fc_0.b_0"] is wholes["fc_4.w_0"] is not None
    assert all(value.tobytes() == found[name].tobytes() for name, value in expected.items())


@pytest.mark.parametrize(
    ("size", "found", "start", "chunk"),
    [
        ("512K", 2**19, 2**19, 2**18),
        ("2048K", 2**21, 2**17, 2**15),
        ("1280K", 5 * 2**18, 2**19, 2**18),
        ("2M", 0, 2**19, 2**18),
    ],
)
def test_chunks_are_those_of_the_cache_that_a_core_has(
    size: str, found: int, start: int, chunk: int, tmp_path: Path
) -> None:
    for number, (level, bytes_) in enumerate([("1", "48K"), ("1", "32K"), ("2", size), ("3", "32768K")]):
        (tmp_path / f"index{number}").mkdir()
        (tmp_path / f"index{number}" / "level").write_text(f"{level}\n")
        (tmp_path / f"index{number}" / "size").write_text(f"{bytes_}\n")
    assert cores_of(amp.CPUPlace(), 3, tmp_path) == Cores(found, 3)
    assert cores_of(amp.CPUPlace(), None, tmp_path / "none") == Cores(0, os.cpu_count() or 1)
    assert cores_of(amp.CUDAPlace(0), 3, tmp_path) == Cores()
    assert place_traits("cpu").chunk(found, 1) == (start, chunk) and place_traits("cuda").chunk(found, 1) == (0, 0)
    assert place_traits("cpu").chunk(found, 3) == (start, chunk)
    assert place_traits("cpu").chunk(found, 4) == (2**19, min(2**18, 4 * chunk))
    assert place_traits("cpu").chunk(found, 64) == (2**19, 2**18)


def chunks_in(graph: onnx.GraphProto) -> set[int]:
    """Elements of a chunk of what updates go over."""
    scans = [node for node in every_node(graph) if node.op_type == "Scan"]
    return {node.attribute[0].g.input[0].type.tensor_type.shape.dim[0].dim_value for node in scans}


def test_a_file_has_the_chunks_of_no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    change_place(monkeypatch, "cpu", chunks=((0, 600, 400), (1000, 50, 20)))
    results: list[dict[str, np.ndarray[Any, Any]]] = []
    for cache, chunks in ((0, {400, 340}), (1000, {20, 17})):
        made: list[set[int]] = []

        def lowered(*args: Any, made: list[set[int]] = made, **wanted: Any) -> Any:
            found = lowering.lower(*args, **wanted)
            made.append(chunks_in(found.model.graph))
            return found

        monkeypatch.setattr(executor, "cores_of", lambda place, threads, cache=cache: Cores(cache, threads))
        monkeypatch.setattr(executor, "lower", lowered)
        results.append(trained([FEEDS, FEEDS], amp.optimizer.Adam(0.01), "fp32"))
        assert made[-1] == chunks, "of 800, 680 and 51 elements"
    assert all(value.tobytes() == results[1][name].tobytes() for name, value in results[0].items())
    assert chunks_in(built(amp.optimizer.Adam(0.01), "fp32")[0].lower(amp.CPUPlace()).model.graph) == {400, 340}
