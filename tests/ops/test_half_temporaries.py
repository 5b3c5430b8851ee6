"""In a pure float16 program no operator stores a tensor in fp32 that is as large as its own, forward or backward.

Every operator that has a gradient is lowered with it for CUDA. Those that may are listed with the reason.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx

import amp_transpiler as amp
from amp_transpiler.ir import opdef
from amp_transpiler.passes.lowering.lowering import lower

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(0)
HALF = onnx.TensorProto.FLOAT16

#: Rows, channels and columns: no reduction over one of them is of the size of the whole.
X = RNG.uniform(0.1, 0.9, (4, 6, 32)).astype(np.float16)
IMAGE = RNG.uniform(0.1, 0.9, (2, 6, 8, 8)).astype(np.float16)
VECTOR = np.linspace(0.5, 1.5, 6).astype(np.float16)
LABELS = RNG.integers(0, 32, (4 * 6,))
ROWS = X.reshape(24, 32)


def ints(*numbers: int) -> Array:
    return np.array(numbers, np.int64)


#: Inputs (integers and flags are constants) and attributes; others take X.
CASES: dict[str, tuple[list[Array | None], dict[str, Any]]] = {
    **{name: ([X, X + 1], {}) for name in ("Add", "Sub", "Mul", "Div", "Max", "Min", "Sum", "Mean", "Pow", "PRelu")},
    "Acosh": ([X + 1], {}),
    "Mod": ([X + 3, X + 1], {"fmod": 1}),
    "AveragePool": ([IMAGE], {"kernel_shape": [2, 2], "strides": [2, 2]}),
    "BatchNormalization": ([IMAGE, VECTOR, VECTOR, VECTOR, VECTOR], {"training_mode": 1}),
    "Cast": ([X], {"to": HALF}),
    "CastLike": ([X, X], {}),
    "Clip": ([X, np.array(0.2, np.float16), np.array(0.8, np.float16)], {}),
    "Concat": ([X, X], {"axis": 0}),
    "Conv": ([IMAGE, RNG.normal(size=(6, 6, 3, 3)).astype(np.float16), VECTOR], {"pads": [1, 1, 1, 1]}),
    "ConvTranspose": ([IMAGE, RNG.normal(size=(6, 6, 3, 3)).astype(np.float16), VECTOR], {"pads": [1, 1, 1, 1]}),
    "CumSum": ([X, np.array(1)], {}),
    "DepthToSpace": ([IMAGE[:, :4]], {"blocksize": 2}),
    "DeformConv": (
        [IMAGE, RNG.normal(size=(6, 6, 1, 1)).astype(np.float16), IMAGE[:, :2]],
        {"offset_group": 1},
    ),
    "Det": ([X[..., :6]], {}),
    "Dropout": ([X, np.array(0.25, np.float16), np.array(True)], {}),
    "Einsum": ([X, X], {"equation": "abc,adc->abd"}),
    "Expand": ([X[:1], ints(4, 6, 32)], {}),
    "Gather": ([ROWS, ints(*reversed(range(24)))], {}),
    "GatherElements": ([ROWS, np.zeros((24, 32), np.int64)], {}),
    "GatherND": ([ROWS, np.arange(24)[::-1, None]], {}),
    "Gemm": ([ROWS, ROWS, RNG.normal(size=24).astype(np.float16)], {"transB": 1}),
    "GlobalAveragePool": ([IMAGE], {}),
    "GlobalLpPool": ([IMAGE], {"p": 2}),
    "GlobalMaxPool": ([IMAGE], {}),
    "GridSample": ([IMAGE, RNG.uniform(-1, 1, (2, 8, 8, 2)).astype(np.float16)], {}),
    "GroupNormalization": ([IMAGE, VECTOR, VECTOR], {"num_groups": 3}),
    "InstanceNormalization": ([IMAGE, VECTOR, VECTOR], {}),
    "LayerNormalization": ([X, X[0, 0], X[0, 0]], {}),
    "LRN": ([IMAGE], {"size": 3}),
    "SimplifiedLayerNormalization": ([X, X[0, 0]], {}),
    "LSTM": (
        [X[..., :4], X[:1, :, :4].repeat(4, 1)[:, :24], RNG.normal(size=(1, 24, 6)).astype(np.float16)],
        {"hidden_size": 6},
    ),
    "GRU": (
        [X[..., :4], X[:1, :, :4].repeat(3, 1)[:, :18], RNG.normal(size=(1, 18, 6)).astype(np.float16)],
        {"hidden_size": 6},
    ),
    "RNN": ([X[..., :4], X[:1, :, :4], RNG.normal(size=(1, 6, 6)).astype(np.float16)], {"hidden_size": 6}),
    "MatMul": ([X, X.swapaxes(1, 2)], {}),
    "MaxPool": ([IMAGE], {"kernel_shape": [2, 2], "strides": [2, 2]}),
    "MaxRoiPool": ([IMAGE, np.array([[i % 2, 0, 1, 6, 7] for i in range(40)], np.float16)], {"pooled_shape": [4, 4]}),
    "MaxUnpool": (
        [IMAGE, np.arange(IMAGE.size).reshape(IMAGE.shape) * 4 % (4 * IMAGE.size)],
        {
            "kernel_shape": [2, 2],
            "strides": [2, 2],
        },
    ),
    "NegativeLogLikelihoodLoss": ([ROWS, LABELS], {}),
    "OneHot": ([LABELS, np.array(32), X[0, 0, :2]], {}),
    "Pad": ([X, ints(0, 0, 1, 0, 0, 1)], {"mode": "reflect"}),
    **{
        f"Reduce{how}": ([X, ints(1)], {})
        for how in ("Sum", "Mean", "Max", "Min", "L1", "L2", "LogSum", "LogSumExp", "Prod", "SumSquare")
    },
    "Reshape": ([X, ints(24, 32)], {}),
    "Resize": ([IMAGE, None, np.array([1, 1, 2, 2], np.float32)], {"mode": "linear"}),
    "ReverseSequence": ([X, ints(*[4] * 6)], {}),
    "RoiAlign": (
        [IMAGE, np.array([[0.5, 1, 6, 7]] * 40, np.float16), np.arange(40) % 2],
        {"output_height": 4, "output_width": 4, "sampling_ratio": 2},
    ),
    "ScatterElements": ([ROWS, np.zeros((1, 32), np.int64), ROWS[:1]], {}),
    "ScatterND": ([ROWS, ints(1)[:, None], ROWS[:1]], {}),
    "Slice": ([X, ints(0), ints(3)], {}),
    "SoftmaxCrossEntropyLoss": ([ROWS, LABELS], {}),
    "SpaceToDepth": ([IMAGE], {"blocksize": 2}),
    "Split": ([X], {"num_outputs": 2}),
    "Squeeze": ([X[:1], ints(0)], {}),
    "Tile": ([X, ints(2, 1, 1)], {}),
    "TopK": ([X, ints(16)], {}),
    "Transpose": ([X], {"perm": [1, 0, 2]}),
    "Trilu": ([X], {}),
    "Unsqueeze": ([X, ints(0)], {}),
    "Where": ([X > 0.5, X, X], {}),
    "Col2Im": ([RNG.normal(size=(2, 12, 24)).astype(np.float16), ints(5, 7), ints(2, 2)], {}),
}

_SUMS = "rows that meet are added up in fp32"
_NO_KERNEL = "CUDA has no kernel of it in 16 bit"
_PLACES = "regions and offsets are fp32, and what it reads there has their type"
_INSIDE = "nobody says in which type CUDA's kernel multiplies or exponentiates inside"
_RECURRENT = "gates are computed in fp32, a step after the other"
#: Operators that store large tensors in fp32, and why.
ALLOWED: dict[str, str] = {
    **dict.fromkeys(("Gather", "GatherElements", "GatherND"), _SUMS),
    **dict.fromkeys(("CumSum", "Det", "GridSample", "Tan"), _NO_KERNEL),
    **dict.fromkeys(("DeformConv", "MaxRoiPool", "RoiAlign"), _PLACES),
    **dict.fromkeys(("ReduceLogSum", "ReduceProd"), _INSIDE),
    **dict.fromkeys(("GRU", "LSTM", "RNN"), _RECURRENT),
    "OneHot": "each of its two numbers is in half of the elements or more, which are added up in fp32",
}


def program_of(type_: str) -> tuple[amp.Program, list[str]]:
    """The operator with the gradient of sum(y * g), y its first output; what has a gradient."""
    inputs, attrs = CASES.get(type_, ([X], {}))
    rule = opdef.entry(type_).gradient
    assert rule is not None
    names = ["" if a is None else f"x{i}" for i, a in enumerate(inputs)]
    outputs = ["y", "y1"] if type_ in ("Split", "TopK") else ["y", "mean", "var"] if "Batch" in type_ else ["y"]
    if type_ in ("LSTM", "GRU", "RNN"):
        outputs = ["y"]
    node = onnx.helper.make_node(type_, names, outputs, **attrs)
    infos, constants = [], []
    for name, array in zip(names, inputs, strict=True):
        if array is not None and array.dtype == np.float16 and array.ndim:
            infos.append(onnx.helper.make_tensor_value_info(name, HALF, array.shape))
        elif array is not None:
            constants.append(onnx.numpy_helper.from_array(array, name))
    graph = onnx.helper.make_graph(
        [node], type_, infos, [onnx.helper.make_tensor_value_info("y", HALF, None)], constants
    )
    program = amp.Program.from_onnx(
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    )
    leaves = [info.name for i, info in enumerate(infos) if rule.inputs is None or names.index(info.name) in rule.inputs]
    for leaf in leaves:
        program.var(leaf).stop_gradient = False
    with amp.program_guard(program, amp.Program("startup")), amp.unique_name.guard():
        y = program.var("y")
        y.shape = y.shape or inputs[0].shape  # of GroupNormalization ONNX infers none
        weighed = y * amp.data("g", list(y.shape or ()), "float16")
        loss = amp.nn.functional.sum(weighed)
    amp.append_backward(loss, parameter_list=leaves)
    return program, leaves


def wide_temporaries(type_: str) -> dict[str, int]:
    """Tensors in fp32 of a lowered operator with its gradient, at least as large as the largest in 16 bit."""
    program, leaves = program_of(type_)
    fetches = [program.var(f"{leaf}@GRAD") for leaf in leaves]
    model = onnx.shape_inference.infer_shapes(lower(program, "cuda", {}, fetches).model, data_prop=True)
    sizes: dict[int, dict[str, int]] = {onnx.TensorProto.FLOAT: {}, HALF: {}}
    for info in [*model.graph.value_info, *model.graph.input, *model.graph.output]:
        tensor = info.type.tensor_type
        if tensor.elem_type in sizes:
            sizes[tensor.elem_type][info.name] = math.prod(d.dim_value for d in tensor.shape.dim)
    largest = max(math.prod(a.shape) for a in CASES.get(type_, ([X], {}))[0] if a is not None)
    return {name: size for name, size in sizes[onnx.TensorProto.FLOAT].items() if size >= largest}


def test_nothing_as_large_as_the_operands_is_stored_in_fp32() -> None:
    types = {
        type_
        for (domain, type_), each in opdef._TABLE.items()
        if not domain and each.gradient is not None and not each.gradient.zero
        if type_ != "Range"  # ONNX has it in 32 and 64 bits alone
    }
    found = {type_: wide for type_ in sorted(types) if (wide := wide_temporaries(type_))}
    assert {type_: wide for type_, wide in found.items() if type_ not in ALLOWED} == {}
    assert set(ALLOWED) <= set(found), f"{sorted(set(ALLOWED) - set(found))} store nothing large"
