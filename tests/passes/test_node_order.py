"""The order of a lowered model's nodes and the links of its hot scalars: results are the same bits, few nodes wait."""

import heapq
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import amp_transpiler as amp
from amp_transpiler.nn import functional as F
from amp_transpiler.passes.lowering import node_order
from amp_transpiler.passes.lowering.liveness import plan
from amp_transpiler.passes.lowering.lowered import row
from amp_transpiler.runtime.graph_optimizers import useless_optimizers
from tests.helpers.benchmark_programs import step as benchmark


def _waiting(nodes: list[onnx.NodeProto]) -> int:
    """The most nodes that wait at one time, beside those ready from the start, where the first ready one goes first."""
    producer = {name: i for i, node in enumerate(nodes) for name in node.output}
    sources = [{producer[name] for name in node.input if name in producer} for node in nodes]
    readers: list[list[int]] = [[] for _ in nodes]
    for i, found in enumerate(sources):
        for source in found:
            readers[source].append(i)
    left, most = [len(found) for found in sources], 0
    ready = [i for i, count in enumerate(left) if not count]
    start = set(ready)
    while ready:
        i = heapq.heappop(ready)
        assert not any(left[s] for s in sources[i])
        for reader in readers[i]:
            left[reader] -= 1
            if not left[reader]:
                heapq.heappush(ready, reader)
        most = max(most, len(set(ready) - start))
    assert not any(left)
    return most


@pytest.mark.parametrize(
    ("kind", "number"),
    [("float32", v) for v in (-0.0, 0.0, 1.5, np.inf, -np.inf, np.nan, 1e-45)] + [("bool", True), ("bool", False)],
)
def test_a_scalar_that_is_handed_on_stays_the_same_bits(kind: str, number: float) -> None:
    count, expected = 700, number
    make = helper.make_node("Identity" if kind == "bool" else "Abs", ["x"], ["s"])
    if kind == "float32" and np.signbit(number):
        make = helper.make_node("Neg", ["x"], ["s"])
        number = -number
    reads = [helper.make_node("Reshape", ["s", "shape"], [f"y{i}"]) for i in range(count)]
    nodes = [each.node for each in node_order.handed_on([*map(row, [make, *reads])], {"s": kind}, _fresh())]
    readers: dict[str, int] = {}
    for node in nodes:
        for name in set(node.input) & ({"s"} | {n for n in node.input if n.startswith("link")}):
            readers[name] = readers.get(name, 0) + 1
    assert max(readers.values()) < 100
    type_ = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", type_, [])],
        [helper.make_tensor_value_info(f"y{i}", type_, [1]) for i in range(count)],
        [helper.make_tensor("shape", TensorProto.INT64, [1], [1])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    fed = np.array(number, kind)
    results = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": fed})
    plain = np.array([expected], kind)
    assert {r.tobytes() for r in results} == {plain.tobytes()}


def _fresh() -> Callable[[str], str]:
    """Gives new names."""
    numbers = iter(range(10**6))
    return lambda hint: f"link{next(numbers)}_{hint}"


def _mlp(layers: int) -> tuple[amp.Program, amp.Program, amp.Variable, object]:
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x, label = amp.data("x", [4, 8], "float32"), amp.data("label", [4, 1], "int64")
        with amp.fp16_guard():
            for _ in range(layers):
                x = x + amp.nn.fc(amp.nn.layer_norm(x), 8, act="relu")
        loss = F.cross_entropy(x, label)
        adam = amp.optimizer.Adam(0.01, multi_precision=True)
        optimizer = amp.decorate(adam, use_pure_fp16=True, init_loss_scaling=2.0**20)
        optimizer.minimize(loss, startup)
    return main, startup, loss, optimizer


def _trained() -> tuple[list[bytes], dict[str, bytes]]:
    main, startup, loss, optimizer = _mlp(3)
    startup.random_seed = main.random_seed = 3
    scope, exe = amp.Scope(), amp.Executor(threads=1)
    exe.run(startup, scope=scope)
    optimizer.amp_init(amp.CPUPlace(), scope)  # type: ignore[attr-defined]
    rng = np.random.default_rng(0)
    losses = []
    for _ in range(6):
        feed = {"x": rng.standard_normal((4, 8)).astype(np.float32), "label": rng.integers(0, 8, (4, 1))}
        losses.append(np.asarray(exe.run(main, feed, [loss], scope)[0]).tobytes())
    assert not exe.memory_report(main).two_buffers
    return losses, {n: np.asarray(scope.find_var(n)).tobytes() for n in scope.var_names()}


def test_a_step_gives_the_same_bits_as_in_the_order_of_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bad steps included: the scale begins too high."""
    with monkeypatch.context() as patch:
        patch.setattr(node_order, "listed", lambda rows, feeds: rows)
        patch.setattr(node_order, "handed_on", lambda rows, scalars, fresh: rows)
        patch.setattr(node_order, "fetched_last", lambda rows, updates: rows)
        expected = _trained()
    for limit in ("_HOT", "_GROUP", "_ROWS"):
        monkeypatch.setattr(node_order, limit, 3)
    found = _trained()
    assert found[0] == expected[0]
    assert found[1] == expected[1]


def test_few_nodes_wait_in_a_step_of_many_parameters() -> None:
    main, _, loss, _ = _mlp(140)
    lowered = main.lower(amp.CPUPlace(), fetch_list=[loss])
    assert _waiting(list(lowered.model.graph.node)) < 600  # in the order of the rules 1125


def test_gradients_are_made_as_soon_as_they_can_be() -> None:
    """Those of weights in a group of their own, and of many: what they are made of is not kept for the end."""
    main, _, loss, _ = _mlp(80)  # 1601 tensors in Adam; norms are a second group, of float32
    lowered = main.lower(amp.CUDAPlace(0), fetch_list=[loss])
    live = plan(lowered)
    sums = [lowered.tensors[f"fc_{i}.tmp_1@GRAD"].name for i in range(1, 80)]
    kept = [live.spans[live.merged.get(name, name)] for name in sums]
    assert max(last - first for first, last in kept) < 40


def test_what_fetches_alone_need_runs_first() -> None:
    """So the scores go as soon as the loss and its gradient have read them."""
    main, loss = benchmark("mlp", "pure")
    lowered = main.lower(amp.CUDAPlace(0), fetch_list=[loss])
    live = plan(lowered)
    step = {name: number for number, node in enumerate(live.order) for name in node.outputs}
    first_gradient = min(step[name] for name in step if name.startswith("fc_1.tmp_1@GRAD"))
    assert step[lowered.fetches[0].tensor] < first_gradient
    scores = next(node.inputs[0] for node in live.order if node.proto.op_type == "LogSoftmax")
    assert live.spans[scores][1] < first_gradient


def test_a_feed_is_cast_again_for_the_backward_pass(tmp_path: Path) -> None:
    """And stays so: onnxruntime does not make one cast of two. A feed that only one of them reads is cast once."""
    main, loss = benchmark("mlp", "pure")
    lowered = main.lower(amp.CUDAPlace(0), fetch_list=[loss])
    live, views, nodes = plan(lowered), {"image"}, []
    for node in lowered.model.graph.node:
        if node.op_type in ("Cast", "Reshape") and node.input[0] in views:
            nodes.append(node)
            views.add(node.output[0])
    assert [node.op_type for node in nodes] == ["Cast", "Reshape", "Cast", "Reshape"]
    step = {node.proto.name: number for number, node in enumerate(live.order)}
    read = {name: number for number, node in enumerate(live.order) for name in node.inputs}
    narrow, again = nodes[0], nodes[3]
    assert read[narrow.output[0]] - step[narrow.name] < 5 and read[again.output[0]] - step[again.name] < 5
    assert read[again.output[0]] - read[narrow.output[0]] > 20
    outputs = [helper.make_tensor_value_info(n.output[0], TensorProto.FLOAT16, [256, 784]) for n in (narrow, again)]
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, [256, 784])
    graph = helper.make_graph(nodes, "g", [image], outputs, lowered.model.graph.initializer)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    assert [n.op_type for n in onnx.load(tmp_path / "optimized.onnx").graph.node].count("Cast") == 2
    fed = np.random.default_rng(0).standard_normal((256, 784)).astype(np.float32)
    fed[0, :5] = 7e4, -0.0, np.inf, np.nan, 6e-8
    one, two = session.run(None, {"image": fed})
    with np.errstate(over="ignore"):
        assert one.tobytes() == two.tobytes() == fed.astype(np.float16).tobytes()


@pytest.mark.parametrize(("name", "mode"), [("bert", "fp32"), ("cnn", "mixed"), ("lstm", "pure"), ("mlp", "pure")])
def test_an_optimizer_that_is_left_out_would_have_changed_nothing(name: str, mode: str, tmp_path: object) -> None:
    main, loss = benchmark(name, mode)
    model = main.lower(amp.CPUPlace(), fetch_list=[loss]).model
    useless = useless_optimizers(model)
    assert len(useless) > 10
    found = []
    for left_out in ([], useless):
        options = ort.SessionOptions()
        options.optimized_model_filepath = f"{tmp_path}/{len(left_out)}.onnx"
        data, providers = model.SerializeToString(), ["CPUExecutionProvider"]
        ort.InferenceSession(data, options, providers=providers, disabled_optimizers=left_out)
        found.append(_unnamed(onnx.load(options.optimized_model_filepath).graph.node))
    assert found[0] == found[1]


def _unnamed(nodes: Iterable[onnx.NodeProto]) -> list[bytes]:
    """The nodes with tensors named by where they come up first; the runtime's own names count what was looked at."""
    names: dict[str, str] = {}
    for node in nodes:
        for slots in (node.input, node.output):
            slots[:] = [names.setdefault(name, str(len(names))) for name in slots]
        node.name = ""
    return [node.SerializeToString() for node in nodes]


def test_an_optimizer_stays_where_its_operators_are_nested() -> None:
    inner = helper.make_graph(
        [helper.make_node("Erf", ["x"], ["y"])], "i", [], [helper.make_empty_tensor_value_info("y")]
    )
    node = helper.make_node("If", ["c"], ["z"], then_branch=inner, else_branch=inner)
    model = helper.make_model(helper.make_graph([node], "g", [], []))
    assert "GeluFusionL1" not in useless_optimizers(model)
    assert "AttentionFusion" in useless_optimizers(model)
