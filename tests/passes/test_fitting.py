"""Programs lowered for WebGPU use kernels that it has, and say what the CPU lowering says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

import amp_transpiler as amp
from amp_transpiler.errors import GraphError
from amp_transpiler.ir.signature import signature
from amp_transpiler.lists import kernel_types, place_traits
from amp_transpiler.nn import functional as F
from amp_transpiler.ops.place_bodies import body_of
from amp_transpiler.passes.lowering.lowered import Lowered
from amp_transpiler.passes.lowering.lowering import lower
from tests.helpers import benchmark_programs
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
        fails = at.fails.get(node.op_type, {})
        grouped = any(each.name == "group" and each.i > 1 for each in node.attribute)
        rank = at.ranks.get(node.op_type, 9) if node.op_type != "Conv" or grouped else 9
        lacks = (
            kernel is None
            or len(ranks.get(node.input[0], ())) > rank
            or any(k not in kernel.get(p, {k}) or k in fails.get(p, ()) for p, k in named.items())
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


# -- bodies ---------------------------------------------------------------------------------------------
F32 = np.array([[0.0, -0.0, 1.5], [-2.0, np.inf, -np.inf], [np.nan, 3e38, -1e-40]], np.float32)
F16 = np.array([[0.0, -0.0, 1.5], [-2.0, np.inf, -np.inf], [np.nan, 6e4, -1e-7]], np.float16)
TRUTH = np.array([[True, False, True], [False, False, True], [True, True, False]])
WHOLE = np.array([[3, -4, 5], [2**31 - 1, -(2**31) + 1, 0], [7, 7, -7]], np.int32)
PLAIN = np.random.default_rng(0).permutation(150).reshape(1, 2, 5, 15).astype(np.float32)

WIDE = np.random.default_rng(0).standard_normal((2, 4, 2, 3, 2)).astype(np.float32)
WAVES = np.linspace(-3, 3, 31, dtype=np.float32)

CASES: list[tuple[str, Sequence[np.ndarray], dict[str, Any]]] = [
    ("Sum", [F32, F32[::-1], F32[:1]], {}),
    ("Mean", [F32, F32[::-1]], {}),
    ("Max", [F32, F32[::-1]], {}),
    ("Min", [F32, F32[::-1], F32.T], {}),
    ("Max", [WHOLE, WHOLE.T], {}),
    ("Min", [F16, F16.T], {}),
    ("Clip", [WHOLE, np.array(-3, np.int32), np.array(5, np.int32)], {}),
    ("IsNaN", [F32], {}),
    ("IsNaN", [F16], {}),
    ("IsInf", [F32], {}),
    ("IsInf", [F32], {"detect_negative": 0}),
    ("LogSoftmax", [PLAIN], {"axis": 2}),
    ("LogSoftmax", [PLAIN.astype(np.float16)], {}),
    ("ReduceLogSumExp", [-20 * PLAIN, np.array([2, -1])], {"keepdims": 0}),
    ("ReduceLogSumExp", [np.array([[-np.inf, -np.inf], [np.inf, 1], [1e3, np.nan]], np.float32), np.array([1])], {}),
    ("ReduceLogSumExp", [PLAIN.astype(np.float16)], {"keepdims": 0}),
    ("Neg", [WHOLE], {}),
    ("Abs", [WHOLE], {}),
    ("Sign", [F32], {}),
    ("Sign", [WHOLE], {}),
    ("Or", [TRUTH, TRUTH.T], {}),
    ("Xor", [TRUTH, TRUTH.T], {}),
    ("Equal", [TRUTH, TRUTH.T], {}),
    ("Where", [TRUTH, TRUTH.T, TRUTH[:1]], {}),
    ("Reshape", [TRUTH, np.array([9, 1])], {}),
    ("Squeeze", [TRUTH[:1], np.array([0])], {}),
    ("Transpose", [TRUTH], {"perm": [1, 0]}),
    ("Concat", [TRUTH, TRUTH], {"axis": 1}),
    ("Split", [TRUTH, np.array([1, 2])], {"axis": 1}),
    ("Slice", [TRUTH, np.array([1]), np.array([3]), np.array([1])], {}),
    ("Slice", [WHOLE, np.array([2, -2]), np.array([-9, 2**31]), np.array([0, 1]), np.array([-1, 1])], {}),
    ("Tile", [WHOLE, np.array([2, 3])], {}),
    ("CumSum", [WHOLE, np.array(1)], {}),
    ("CumSum", [np.arange(7, dtype=np.int32).reshape(7, 1), np.array(-2)], {"exclusive": 1}),
    ("CumSum", [np.arange(10, dtype=np.int32), np.array(0)], {"exclusive": 1, "reverse": 1}),
    ("TopK", [np.array([5, 2**24 + 1, -(2**30), 5, 2**24, 0, -1, 5, 4096]), np.array([9])], {"largest": 0}),
    ("TopK", [np.array([5, 2**31 - 1, -(2**30), 5, 2**24, 0, -1, 5, 4096]), np.array([4])], {}),
    ("OneHot", [np.array([[0, -1], [2, 7]]), np.array(3), np.array([1, 9], np.float32)], {"axis": 1}),
    ("GatherElements", [WHOLE, np.array([[0, -1], [2, 1]])], {"axis": -1}),
    ("GatherElements", [TRUTH, np.array([[2, 0, 1]])], {}),
    ("GatherND", [TRUTH, np.array([[0, 2], [1, 1]])], {}),
    ("GatherND", [PLAIN, np.array([[[0, 1], [0, -2]]])], {}),
    ("ScatterND", [F32.T, np.array([[2], [0]]), F32[:2]], {}),
    ("ScatterND", [PLAIN[0, 0], np.array([[2, 1], [-1, 3], [2, 1]]), np.ones(3, np.float32)], {"reduction": "add"}),
    *[(name, [WAVES], {}) for name in ("HardSwish", "Mish", "Softsign")],
    ("Celu", [WAVES], {"alpha": 0.7}),
    ("Selu", [WAVES.astype(np.float16)], {}),
    ("Shrink", [WAVES], {"lambd": 0.4, "bias": 0.1}),
    ("PRelu", [F32, np.array([0.5, -2, 1], np.float32)], {}),
    ("Round", [np.array([0.5, 1.5, -2.5, 2.4, -0.2, 3e9, -np.inf, np.nan, 8388609, 4194303.5], np.float32)], {}),
    ("Trilu", [PLAIN, np.array(2)], {}),
    ("Trilu", [WHOLE], {"upper": 0}),
    ("AveragePool", [PLAIN], {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1], "ceil_mode": 1}),
    ("AveragePool", [PLAIN], {"kernel_shape": [2, 2], "pads": [1, 1, 0, 0], "count_include_pad": 1}),
    (
        "ConvTranspose",
        [WIDE, np.random.default_rng(1).standard_normal((4, 3, 2, 3, 1)).astype(np.float32), np.ones(6, np.float32)],
        {
            "group": 2,
            "strides": [2, 1, 3],
            "pads": [1, 0, 0, 0, 1, 0],
            "output_padding": [1, 0, 2],
            "dilations": [1, 2, 1],
        },
    ),
    ("Conv", [WIDE, WIDE[:, :2], np.ones(2, np.float32)], {"group": 2, "pads": [1, 0, 1, 0, 1, 0]}),
    ("Gemm", [PLAIN[0, 0], PLAIN[0, 1].T, np.array([3], np.float32)], {"beta": 0.5, "alpha": 2.0}),
    ("MatMul", [PLAIN[0, 0, 0], PLAIN[0, 1].T], {}),
    ("MatMul", [PLAIN[0], PLAIN[0, 0, 0]], {}),
    ("MatMul", [PLAIN[0, 0, 0], PLAIN[0, 0, 0]], {}),
    ("MatMul", [np.zeros((3, 0), np.float32), np.zeros((0, 2), np.float32)], {}),
    ("MaxPool", [PLAIN % 40], {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ("MaxPool", [PLAIN % 7], {"kernel_shape": [2, 3], "dilations": [2, 1], "pads": [1, 0, 1, 2]}),
    ("MaxPool", [PLAIN % 7], {"kernel_shape": [2, 3], "strides": [2, 1], "auto_pad": "SAME_LOWER"}),
]


INEXACT = frozenset(
    [
        "AveragePool",
        "Celu",
        "ConvTranspose",
        "HardSwish",
        "LogSoftmax",
        "Mean",
        "Mish",
        "ReduceLogSumExp",
        "Selu",
        "Softsign",
    ]
)
#: Inputs that say sizes, axes and places: constants.
SAID = {
    "Reshape": 1,
    "Squeeze": 1,
    "Split": 1,
    "Slice": 1,
    "Tile": 1,
    "OneHot": 1,
    "CumSum": 1,
    "TopK": 1,
    "Trilu": 1,
    "ReduceLogSumExp": 1,
}


@pytest.mark.parametrize(("type_", "inputs", "attrs"), CASES, ids=[f"{n}-{c[0]}" for n, c in enumerate(CASES)])
def test_a_body_gives_what_the_operator_gives(type_: str, inputs: Sequence[np.ndarray], attrs: dict[str, Any]) -> None:
    names = [f"x{i}" for i in range(len(inputs))]
    made = [f"y{i}" for i in range({"Split": 2, "MaxPool": 2, "TopK": 2}.get(type_, 1))]
    fed = SAID.get(type_, len(inputs))
    infos = [
        onnx.helper.make_tensor_value_info(n, onnx.helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for n, a in zip(names[:fed], inputs[:fed], strict=True)
    ]
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node(type_, names, made, **attrs)],
        "one",
        infos,
        [onnx.helper.make_empty_tensor_value_info(name) for name in made],
        [onnx.numpy_helper.from_array(a, n) for n, a in zip(names[fed:], inputs[fed:], strict=True)],
    )
    opset = onnx.helper.make_opsetid("", 21)
    model = onnx.shape_inference.infer_shapes(onnx.helper.make_model(graph, ir_version=10, opset_imports=[opset]))
    feed = dict(zip(names[:fed], inputs[:fed], strict=True))
    alone = ReferenceEvaluator(model) if type_ == "Where" else session(model, "DISABLE_ALL")  # which has none for truth
    wanted = alone.run(None, feed)
    lowered = lower(amp.Program.from_onnx(model), "webgpu")
    assert without_kernel(lowered) == []
    assert body_of(type_) is not None and [n.op_type for n in lowered.model.graph.node] != [type_]
    held = {port.tensor: port.dtype for port in lowered.feeds}
    running = session(lowered.model, "DISABLE_ALL")
    found = dict(zip(made, running.run(made, {n: a.astype(held[n]) for n, a in feed.items()}), strict=True))
    for name, want in zip(made, wanted, strict=True):
        exact = type_ not in INEXACT
        assert np.allclose(found[name], want, rtol=0 if exact else 1e-6, atol=0 if exact else 1e-6, equal_nan=True)
        assert found[name].dtype == want.dtype or want.dtype == np.int64


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
