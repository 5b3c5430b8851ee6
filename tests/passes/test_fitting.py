"""Programs lowered for WebGPU use kernels that it has, and say what the CPU lowering says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import GraphError
from amp_transpiler.ir.control import every_node
from amp_transpiler.ir.signature import signature
from amp_transpiler.lists import kernel_types, place_traits
from amp_transpiler.nn import functional as F
from amp_transpiler.ops.place_bodies import body_of
from amp_transpiler.passes.lowering.lowered import Lowered
from amp_transpiler.passes.lowering.lowering import lower
from amp_transpiler.passes.lowering.tensor_types import inferred, types_in
from tests.corpora.nested_bodies import TEXTS, nested
from tests.corpora.place_bodies import CASES, PLAIN, alone, compared, model_of
from tests.helpers import benchmark_programs
from tests.helpers.recorded_layers import built
from tests.helpers.sessions import session

SIZES: dict[str, dict[str, Any]] = {
    "mlp": {"batch": 8},
    "cnn": {"batch": 4},
    "lstm": {"batch": 4, "length": 4},
    "bert": {"batch": 2, "length": 16, "width": 64, "layers": 1, "words": 100},
    "resnet": {"batch": 2, "size": 32},
    "ctc": {"batch": 2, "length": 12},
}
SPELLED = {"float32": "float", "float64": "double"}
#: Kernels that are registered, and fail or are wrong: type parameter and element types; largest rank.
FAILING = {"MaxPool": ("I", {"int64"}), "ReduceLogSumExp": ("T", {"float", "float16"}), "Where": ("T", {"bool"})}
RANKS = {"Conv": 4, "ConvTranspose": 4}

#: Operators of one input that are decomposed.
PART = """<ir_version: 10, opset_import: ["" : 20]> m (float[{size}] x) => (float[A, B, C, D] y)
    <int64 step = {{4}}, int64 frame = {{8}}, int64[4] sizes = {{2, 3, 4, 5}}> {{ {text} }}"""
PARTS = [
    ("2, 9, 5, 1", "y = DFT <onesided = 1> (x)", (2, 9, 5, 1)),
    ("2, 32, 1", 'y = STFT (x, step, "", frame)', (2, 32, 1)),
    ("2, 2, 3", "y = AffineGrid (x, sizes)", (2, 2, 3)),
]


def without_kernel(lowered: Lowered) -> list[str]:
    """The nodes of a model for WebGPU that have no kernel there for the types of their tensors."""
    at = place_traits("webgpu")
    graph = onnx.shape_inference.infer_shapes(lowered.model, check_type=True, strict_mode=True).graph
    infos = [*graph.value_info, *graph.input, *graph.output]
    kinds = {info.name: info.type.tensor_type.elem_type for info in infos}
    ranks = {info.name: info.type.tensor_type.shape.dim for info in infos}
    kinds |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    found = []
    for node in graph.node:
        kernel, slots = kernel_types(at.provider, node.op_type, 21, node.domain), signature(node.op_type, 21, "")
        assert slots is not None
        types = [(slots.input(i), name) for i, name in enumerate(node.input) if name]
        types += [(slots.output(i), name) for i, name in enumerate(node.output) if name]
        named = {p: SPELLED.get(n := onnx.TensorProto.DataType.Name(kinds[t]).lower(), n) for p, t in types}
        failing, types_that_fail = FAILING.get(node.op_type, ("", ()))
        grouped = any(each.name == "group" and each.i > 1 for each in node.attribute)
        rank = RANKS.get(node.op_type, 9) if node.op_type != "Conv" or grouped else 9
        lacks = (
            kernel is None
            or len(ranks.get(node.input[0], ())) > rank
            or any(k not in kernel.get(p, {k}) for p, k in named.items())
            or named.get(failing) in types_that_fail
            or (node.op_type == "Split" and len(node.output) > at.most_pieces)
        )
        if lacks:
            found.append(f"{node.op_type} {named}")
    return found


@pytest.mark.parametrize(
    ("name", "mode"),
    [("mlp", "mixed"), ("cnn", "pure"), ("lstm", "fp32"), ("bert", "pure"), ("resnet", "pure"), ("ctc", "mixed")],
)
def test_training_steps_use_kernels_that_are_there(name: str, mode: str) -> None:
    main, _, loss, _ = benchmark_programs.training(name, mode, **SIZES[name])
    lowered = lower(main, "webgpu", {}, [loss])
    assert without_kernel(lowered) == []
    assert len(lowered.origins) == len(lowered.model.graph.node)


@pytest.mark.parametrize("norm", [amp.nn.layer_norm, amp.nn.instance_norm, lambda x: amp.nn.group_norm(x, 2)])
def test_gradients_of_norms_normalise_in_fp32(norm: Any) -> None:
    """What they normalise may be zeros, as of what is masked: the kernel of 16 bit makes NaN of those."""
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        h = norm(amp.nn.conv2d(amp.data("x", [2, 3, 4, 4], "float32"), 4, 3, padding=1))
        loss = F.mean(F.square(F.cast(h, "float32")))
        optimizer = amp.decorate(amp.optimizer.SGD(0.1, multi_precision=True), use_pure_fp16=True, use_fp16_guard=False)
        optimizer.minimize(loss, startup)
    lowered = lower(main, "webgpu", {}, [loss])
    types, found = types_in(inferred(lowered)), set()
    for node in lowered.model.graph.node:
        if any(attribute.name == "epsilon" and attribute.f < 1e-10 for attribute in node.attribute):
            found.add((node.op_type, types[node.input[0]][0]))
    assert found == {("LayerNormalization", "float32")}


def test_integers_hold_32_bits_and_ports_say_so() -> None:
    main = amp.Program("main")
    with amp.program_guard(main):
        x = amp.data("x", [3], "int64")
        twice = x + x
        y = F.cast(twice, "float32")
    lowered = lower(main, "webgpu", {}, [twice, y])
    assert [(p.dtype, p.holds) for p in (*lowered.feeds, *lowered.fetches)] == [
        ("int32", "int64"),
        ("int32", "int64"),
        ("float32", ""),
    ]
    doubled, wide = session(lowered.model).run(None, {"x": np.array([1, -2, 3], np.int32)})
    assert doubled.tolist() == wide.tolist() == [2, -4, 6]
    assert x.dtype == "int64"


def test_a_constant_beyond_32_bits_is_refused() -> None:
    main = amp.Program("main")
    with amp.program_guard(main):
        x = amp.data("x", [3], "int64")
        y = F.cast(x + 2**40, "float32")
    with pytest.raises(GraphError, match=r"1099511627776.*no 64-bit integers.*CPU"):
        lower(main, "webgpu", {}, [y])


def test_indices_of_a_kernel_are_compared_in_32_bits() -> None:
    main = amp.Program("main")
    with amp.program_guard(main):
        x, label = amp.data("x", [4, 7], "float32"), amp.data("label", [4], "int64")
        right = F.equal(F.argmax(x, axis=1), label)
    lowered = lower(main, "webgpu", {}, [right])
    assert without_kernel(lowered) == []
    rows = np.random.default_rng(0).standard_normal((4, 7)).astype(np.float32)
    (found,) = session(lowered.model).run(None, {"x": rows, "label": np.array([0, 3, 6, 1], np.int32)})
    assert found.tolist() == (rows.argmax(1) == [0, 3, 6, 1]).tolist()


@pytest.mark.parametrize(("dtype", "other"), [("bfloat16", "float16"), ("float64", "float32")])
def test_float_types_that_the_place_lacks_are_refused(dtype: str, other: str) -> None:
    main = amp.Program("main")
    with amp.program_guard(main):
        loss = F.mean(amp.nn.fc(F.cast(amp.data("x", [2, 3], "float32"), dtype), 4))
    with pytest.raises(GraphError, match=rf"'.+' computes with {dtype} .*WebGPU tensors are float16 or.* with {other}"):
        lower(main, "webgpu", {}, [loss])


def test_an_operator_of_a_branch_is_named_though_the_other_branch_has_its_name() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]> net (bfloat16[2] x, bool c) => (float[2] y) {
        y = If (c) <then_branch = yes () => (float[2] t) { s = Abs(x)  t = Cast <to = 1> (s) },
                    else_branch = no () => (float[2] t) { s = Neg(x)  t = Cast <to = 1> (s) }> }"""
    with pytest.raises(GraphError, match="'Abs -> s' computes with bfloat16"):
        lower(amp.Program.from_onnx(onnx.parser.parse_model(text)), "webgpu", {})


# -- bodies ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("type_", "inputs", "attrs"), CASES, ids=[f"{n}-{c[0]}" for n, c in enumerate(CASES)])
def test_a_body_gives_what_the_operator_gives(type_: str, inputs: Sequence[np.ndarray], attrs: dict[str, Any]) -> None:
    model, feed, wanted = model_of(type_, inputs, attrs)
    lowered = lower(amp.Program.from_onnx(model), "webgpu")
    assert without_kernel(lowered) == []
    written = [(node.op_type, [*node.attribute]) for node in lowered.model.graph.node]
    assert body_of(type_) is not None and written != [(type_, [*model.graph.node[0].attribute])]
    held = {port.tensor: port.dtype for port in lowered.feeds}
    found = alone(lowered.model, type_, inputs).run(
        [port.tensor for port in lowered.fetches], {n: a.astype(held[n]) for n, a in feed.items()}
    )
    compared(type_, found, wanted, 1e-6)
    for port, got, want in zip(lowered.fetches, found, wanted, strict=True):
        assert (port.holds or got.dtype.name) == want.dtype.name


@pytest.mark.parametrize(("size", "text", "shape"), PARTS)
def test_what_has_no_kernel_and_no_body_is_decomposed(size: str, text: str, shape: tuple[int, ...]) -> None:
    model = onnx.parser.parse_model(PART.format(size=size, text=text))
    lowered = lower(amp.Program.from_onnx(model), "webgpu")
    assert without_kernel(lowered) == []
    feed = {"x": np.random.default_rng(0).standard_normal(shape).astype(np.float32)}
    (wanted,), (found,) = (session(each, "DISABLE_ALL").run(None, feed) for each in (model, lowered.model))
    np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_what_cannot_be_decomposed_stays() -> None:
    model = onnx.parser.parse_model(PART.format(size="N, T, 1", text="y = DFT (x)"))
    assert [node.op_type for node in lower(amp.Program.from_onnx(model), "webgpu").model.graph.node] == ["DFT"]


@pytest.mark.parametrize("name", TEXTS)
def test_nested_graphs_fit_too(name: str) -> None:
    for chosen in (True, False):
        model, feed, wanted, type_ = nested(name, chosen)
        lowered = lower(amp.Program.from_onnx(model), "webgpu")
        steps = [each.input[4:] for each in every_node(lowered.model.graph.node) if each.op_type == type_]
        assert not any(steps) if type_ == "Slice" else not steps
        held = {port.tensor: port.dtype for port in lowered.feeds}
        fed = {n: a.astype(held[n]) for n, a in feed.items()} | {n: np.zeros((), np.float32) for n in lowered.scalars}
        found = session(lowered.model).run([port.tensor for port in lowered.fetches], fed)
        for got, want in zip(found, wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("type_", ["AveragePool", "MaxPool"])
def test_windows_that_begin_behind_the_end_are_none(type_: str) -> None:
    """ONNX's inference counts them, and no runtime has them."""
    attrs = {"kernel_shape": [1, 2], "strides": [1, 4], "pads": [0, 1, 0, 0], "ceil_mode": 1}
    model, feed, wanted = model_of(type_, [PLAIN], attrs)
    assert [d.dim_value for d in model.graph.output[0].type.tensor_type.shape.dim] == [1, 2, 5, 5]
    found = session(lower(amp.Program.from_onnx(model), "webgpu").model, "DISABLE_ALL").run(None, feed)
    assert wanted[0].shape == (1, 2, 5, 4)
    compared(type_, found, wanted, 1e-6)


@pytest.mark.parametrize(("pieces", "axis"), [(7, 0), (8, 1), (49, -1), (50, 0), (130, 1)])
@pytest.mark.parametrize("dtype", ["float32", "bool"])
def test_a_split_into_many_pieces_is_a_tree_of_splits(pieces: int, axis: int, dtype: str) -> None:
    sizes = [1 + i % 3 for i in range(pieces)]
    shape = [2, 2]
    shape[axis] = sum(sizes)
    program = amp.Program()
    with amp.program_guard(program, amp.Program()):
        x = amp.data("x", shape, dtype)
        parts = [tuple(size if i == axis % 2 else 2 for i in range(2)) for size in sizes]
        made = [program.add_variable(f"y{i}", dtype, part) for i, part in enumerate(parts)]
        program.add_operator(
            "Split", [x, program.add_constant("sizes", np.array(sizes, np.int64))], made, attrs={"axis": axis}
        )
    lowered = lower(program, "webgpu", {"x": tuple(shape)}, made)
    splits = [node for node in lowered.model.graph.node if node.op_type == "Split"]
    most = place_traits("webgpu").most_pieces
    assert max(len(node.output) for node in splits) <= most and (len(splits) == 1) == (pieces <= most)
    numbers = np.arange(2 * sum(sizes), dtype=np.float32).reshape(shape)
    values = numbers if dtype == "float32" else numbers % 3 == 0
    found = session(lowered.model).run([fetch.tensor for fetch in lowered.fetches], {lowered.feeds[0].tensor: values})
    expected = np.split(values, np.cumsum(sizes)[:-1], axis)
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("type_", "dtype", "shapes", "attrs"),
    [
        ("Split", "uint8", [(4,), (2,), (2,)], {"num_outputs": 2}),
        ("Gemm", "uint64", [(2, 2), (2, 2)], {}),
        ("Conv", "float32", [(1, 1, 3, 3), (1, 1, 1, 1)], {"strides": [2, 2], "pads": [0, 0, 1, 1]}),  # not read
    ],
)
def test_what_no_body_serves_stays(
    type_: str, dtype: str, shapes: list[tuple[int, ...]], attrs: dict[str, Any]
) -> None:
    program = amp.Program()
    with amp.program_guard(program, amp.Program()):
        x = amp.data("x", shapes[0], dtype)
    made = [program.add_variable(f"y{i}", dtype, shape) for i, shape in enumerate(shapes[1:])]
    program.add_operator(type_, [x] * (1 if type_ == "Split" else 2), made, attrs=attrs)
    assert [node.op_type for node in lower(program, "webgpu", {}, made).model.graph.node] == [type_]


def test_kernels_that_fail_are_not_used_where_shapes_are_not_fixed() -> None:
    def lowered(type_: str, weights: tuple[int, ...], group: int = 0) -> list[str]:
        program, rank = amp.Program(), max(len(weights), 2)
        with amp.program_guard(program, amp.Program()):
            x, w = amp.data("x", [None, 6, *[8] * (rank - 2)], "float32"), amp.data("w", weights, "float32")
        y = program.add_variable("y", "float32", (None,) * max(len(weights), 1))
        program.add_operator(type_, [x, w], [y], attrs={"group": group} if group else {})
        return [node.op_type for node in lower(program, "webgpu", {}, [y]).model.graph.node]

    assert lowered("Conv", (8, 6, 3, 3), 1) == ["Pad", "Pad", "Conv"]
    assert lowered("MatMul", (6,)) == ["Reshape", "MatMul", "Squeeze"]
    assert lowered("Conv", (6, 2, 3, 3, 3), 3) == ["Split", "Split", "Conv", "Conv", "Conv", "Concat"]
    with pytest.raises(GraphError, match=r"kernel of ConvTranspose on WebGPU .*'y'.* as zero.* give the shapes of all"):
        lowered("ConvTranspose", (6, 1, 3, 3), 3)


def test_an_input_that_is_left_out_by_name_is_left_out() -> None:
    infos = [
        onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, s)
        for n, s in (("x", (1, 2, 5)), ("w", (3, 2, 2)))
    ]
    node = onnx.helper.make_node("Conv", ["x", "w", ""], ["y"])
    graph = onnx.helper.make_graph([node], "one", infos, [onnx.helper.make_empty_tensor_value_info("y")])
    model = onnx.helper.make_model(graph, ir_version=10, opset_imports=[onnx.helper.make_opsetid("", 21)])
    lowered = lower(amp.Program.from_onnx(onnx.shape_inference.infer_shapes(model)), "webgpu")
    assert [list(each.input) for each in lowered.model.graph.node] == [["x", "w"]]


@pytest.mark.parametrize("type_", ["GRU", "LSTM"])
def test_recurrent_operators_are_composed_where_there_is_no_kernel(type_: str) -> None:
    gates, rng = {"GRU": 3, "LSTM": 4}[type_], np.random.default_rng(0)
    weights = [rng.standard_normal((1, gates * 4, n)).astype(np.float32) for n in (3, 4)]
    x = rng.standard_normal((5, 2, 3)).astype(np.float32)
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node("Constant", [], ["w"], value=onnx.numpy_helper.from_array(weights[0])),
            onnx.helper.make_node(type_, ["x", "w", "r"], ["y"], hidden_size=4),
        ],
        "one",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, x.shape)],
        [onnx.helper.make_empty_tensor_value_info("y")],
        [onnx.numpy_helper.from_array(weights[1], "r")],
    )
    model = onnx.helper.make_model(graph, ir_version=10, opset_imports=[onnx.helper.make_opsetid("", 21)])
    wanted = session(model).run(None, {"x": x})
    lowered = lower(amp.Program.from_onnx(onnx.shape_inference.infer_shapes(model)), "webgpu")
    assert without_kernel(lowered) == []
    values = {port.tensor: weights[1] for port in lowered.states} | {"x": x}
    values |= {name: np.zeros((), np.float32) for name in lowered.scalars}
    assert np.allclose(session(lowered.model).run(None, values)[0], wanted[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["float", "float16"])
def test_sizes_that_are_fed_resize(kind: str) -> None:
    text = f'g ({kind}[1,1,2,2] x, int64[4] k) => ({kind}[1,1,a,b] y) {{ y = Resize <mode = "linear"> (x, , , k) }}'
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {text}')
    lowered = lower(amp.Program.from_onnx(model), "webgpu")
    x = np.arange(4).reshape(1, 1, 2, 2).astype("float32" if kind == "float" else kind)
    found = session(lowered.model).run(None, {"x": x, "k": np.array([1, 1, 4, 4], np.int32)})[0]
    ends = np.array([0, 0.25, 0.75, 1])  # half pixels: (i + 0.5) / 2 - 0.5, within 0 to 1
    np.testing.assert_array_equal(found[0, 0], 2 * ends[:, None] + ends)


@pytest.mark.parametrize("bias", [False, True])
def test_groups_of_two_channels_to_one_are_not_left_to_the_kernel(bias: bool) -> None:
    rng = np.random.default_rng(0)
    arrays = {"x": rng.random((2, 4, 5, 6)), "w": rng.random((4, 1, 3, 3)), "b": rng.random(2)}
    arrays = {name: array.astype(np.float32) for name, array in arrays.items() if bias or name != "b"}
    program = amp.Program()
    inputs = [program.add_input(name, "float32", array.shape) for name, array in arrays.items()]
    y = program.add_variable("y", "float32", (2, 2, 11, 13))
    program.add_operator("ConvTranspose", inputs, [y], attrs={"group": 2, "strides": [2, 2]})
    models = [lower(program, place, {}, [y]) for place in ("cpu", "webgpu")]
    assert all(node.op_type != "ConvTranspose" for node in models[1].model.graph.node)
    results = [
        session(each.model).run(None, {feed.tensor: arrays[feed.variable] for feed in each.feeds})[0] for each in models
    ]
    np.testing.assert_allclose(results[1], results[0], rtol=1e-6)


def test_no_two_nodes_have_one_name() -> None:
    """Not even those named as what a node made before it became an output; onnxruntime refuses such a model."""
    main, _, feeds, y, grads = built("conv3d")
    model = main.lower("webgpu", {name: array.shape for name, array in feeds.items()}, [y, *grads.values()]).model
    names = [node.name for node in model.graph.node]
    assert len(set(names)) == len(names)
