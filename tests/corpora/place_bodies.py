"""Single operators for which a place may have no kernel: what the bodies that stand for them are tried on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from amp_transpiler.lists import split_name
from tests.helpers.sessions import session

F32 = np.array([[0.0, -0.0, 1.5], [-2.0, np.inf, -np.inf], [np.nan, 3e38, -1e-40]], np.float32)
F16 = np.array([[0.0, -0.0, 1.5], [-2.0, np.inf, -np.inf], [np.nan, 6e4, -1e-7]], np.float16)
TRUTH = np.array([[True, False, True], [False, False, True], [True, True, False]])
WHOLE = np.array([[3, -4, 5], [2**31 - 1, -(2**31) + 1, 0], [7, 7, -7]], np.int32)
PLAIN = np.random.default_rng(0).permutation(150).reshape(1, 2, 5, 15).astype(np.float32)

WIDE = np.random.default_rng(0).standard_normal((2, 4, 2, 3, 2)).astype(np.float32)
WAVES = np.linspace(-3, 3, 31, dtype=np.float32)
CUBIC = {"mode": "cubic"}

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
    ("IsInf", [F32], {"detect_negative": 0, "detect_positive": 0}),
    ("LogSoftmax", [PLAIN], {"axis": 2}),
    ("LogSoftmax", [PLAIN.astype(np.float16)], {}),
    ("ReduceLogSumExp", [-20 * PLAIN, np.array([2, -1])], {"keepdims": 0}),
    ("ReduceLogSumExp", [np.array([[-np.inf, -np.inf], [np.inf, 1], [1e3, np.nan]], np.float32), np.array([1])], {}),
    ("ReduceLogSumExp", [PLAIN.astype(np.float16)], {"keepdims": 0}),
    ("ReduceLogSumExp", [PLAIN[:, :, :1]], {"keepdims": 0, "noop_with_empty_axes": 1}),
    *[
        (f"Reduce{name}", [PLAIN[0] + 1, *axes], {"noop_with_empty_axes": 1})
        for name in ("L1", "L2", "LogSum", "SumSquare")
        for axes in ([], [np.array([], np.int64)])
    ],
    ("Pow", [PLAIN[0, :, :, :8] % 5, np.array([[2.0], [0.5], [3.0], [1.0], [0.0]], np.float32)], {}),
    ("Pow", [np.array([[2.0]], np.float32), (PLAIN[0, :, :, :8] % 5).astype(np.int32)], {}),
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
    ("Slice", [WHOLE, np.array([0]), np.array([-9]), np.array([1])], {}),
    ("Slice", [WHOLE, np.array([-9]), np.array([-10]), np.array([1]), np.array([-1])], {}),
    ("Slice", [PLAIN, np.array([3, 9]), np.array([-9, 2]), np.array([2, -1]), np.array([-2, -1])], {}),
    ("Tile", [WHOLE, np.array([2, 3])], {}),
    ("CumSum", [WHOLE, np.array(1)], {}),
    ("CumSum", [np.arange(7, dtype=np.int32).reshape(7, 1), np.array(-2)], {"exclusive": 1}),
    ("CumSum", [np.arange(10, dtype=np.int32), np.array(0)], {"exclusive": 1, "reverse": 1}),
    ("TopK", [np.array([5, 2**24 + 1, -(2**30), 5, 2**24, 0, -1, 5, 4096]), np.array([9])], {"largest": 0}),
    ("TopK", [np.array([5, 2**31 - 1, -(2**30), 5, 2**24, 0, -1, 5, 4096]), np.array([4])], {}),
    ("TopK", [np.array([4097, 5, 4099]), np.array([1])], {"sorted": 0}),
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
    ("Shrink", [WAVES], {}),
    ("LayerNormalization", [WIDE, WIDE[0, 0, 0, 0], WIDE[0, 0, 0, 1]], {}),
    ("LayerNormalization", [WIDE + 3, WIDE[0, 0]], {"axis": 2, "epsilon": 1e-3}),
    ("InstanceNormalization", [WIDE + 3, WIDE[0, :, 0, 0, 0], WIDE[0, :, 0, 0, 1]], {}),
    ("ThresholdedRelu", [F16], {"alpha": 0.3}),
    ("Resize", [PLAIN.astype(np.float16), np.array([], np.float32), np.array([1, 1, 2, 1.5], np.float32)], CUBIC),
    ("PRelu", [F32, np.array([0.5, -2, 1], np.float32)], {}),
    ("Round", [np.array([0.5, 1.5, -2.5, 2.4, -0.2, 3e9, -np.inf, np.nan, 8388609, 4194303.5], np.float32)], {}),
    ("Trilu", [PLAIN, np.array(2)], {}),
    ("Trilu", [WHOLE], {"upper": 0}),
    ("Trilu", [TRUTH], {"upper": 0}),
    ("Dropout", [PLAIN], {}),
    ("Dropout", [PLAIN, np.array(0.3, np.float32), np.array(False)], {}),
    ("CenterCropPad", [PLAIN, np.array([4, 8, 1])], {"axes": [-1, 2, 1]}),
    ("CenterCropPad", [WHOLE, np.array([6, 2])], {}),
    ("SpaceToDepth", [PLAIN[:, :, :4, :6]], {"blocksize": 2}),
    ("Mod", [WHOLE, np.array([[5, -7, 2]], np.int32)], {}),
    ("Mod", [np.arange(-4, 5), np.array(-3)], {"fmod": 1}),
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
    ("Conv", [WIDE.reshape(1, 8, 2, 3, 2), WIDE.reshape(8, 1, 2, 3, 2)], {"group": 8, "pads": [1, 0, 1, 0, 1, 0]}),
    ("Conv", [PLAIN[:, :1, :2, :2], PLAIN.reshape(-1)[:24].reshape(6, 1, 2, 2), np.arange(6, dtype=np.float32)], {}),
    ("Conv", [PLAIN, PLAIN.reshape(-1)[:12].reshape(6, 2, 1, 1), np.arange(6, dtype=np.float32)], {}),
    ("Conv", [PLAIN, PLAIN.reshape(-1)[:10].reshape(5, 2, 1, 1)], {"pads": [0, 0, 1, 2]}),
    ("Conv", [PLAIN[:, :, :2, :2], PLAIN.reshape(-1)[:32].reshape(4, 2, 2, 2)], {"auto_pad": "SAME_UPPER"}),
    ("Conv", [PLAIN, PLAIN.reshape(-1)[:90].reshape(10, 1, 3, 3)], {"group": 2, "strides": [2, 1]}),
    ("Einsum", [PLAIN[0], PLAIN[0, 0, :4].T], {"equation": "...k,kj->...j"}),
    ("Einsum", [WIDE, WIDE[0, 0]], {"equation": "ab...,...->b...a"}),
    ("Einsum", [WIDE, WIDE[:, :, :1]], {"equation": " abcij, abcij -> cab"}),
    ("Gemm", [WHOLE % 97, WHOLE.T % 89, WHOLE[:1] % 7], {"alpha": 0.75, "beta": -1.5, "transA": 1}),
    ("Gemm", [WHOLE % 97, WHOLE % 89], {"alpha": -0.75}),
    ("Gemm", [PLAIN[0, 0], PLAIN[0, 1].T, np.array([3], np.float32)], {"beta": 0.5, "alpha": 2.0}),
    ("MatMul", [PLAIN[0, 0, 0], PLAIN[0, 1].T], {}),
    ("MatMul", [PLAIN[0], PLAIN[0, 0, 0]], {}),
    ("MatMul", [PLAIN[0, 0, 0], PLAIN[0, 0, 0]], {}),
    ("MatMul", [WHOLE, WHOLE.T], {}),
    ("MatMul", [np.arange(-3, 3), np.arange(24).reshape(2, 1, 6, 2)], {}),
    ("MatMul", [np.zeros((3, 0), np.float32), np.zeros((0, 2), np.float32)], {}),
    ("MaxPool", [PLAIN % 40], {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ("MaxPool", [PLAIN % 7], {"kernel_shape": [2, 3], "dilations": [2, 1], "pads": [1, 0, 1, 2]}),
    ("MaxPool", [PLAIN % 7], {"kernel_shape": [2, 3], "strides": [2, 1], "auto_pad": "SAME_LOWER"}),
    ("AveragePool", [PLAIN], {"kernel_shape": [2, 3], "strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    ("AveragePool", [PLAIN], {"kernel_shape": [2, 3], "auto_pad": "SAME_LOWER", "count_include_pad": 1}),
    ("LpPool", [WIDE], {"kernel_shape": [2, 2, 1], "pads": [1, 0, 0, 0, 1, 0]}),
    ("LpPool", [-PLAIN], {"kernel_shape": [3, 2], "p": 1, "dilations": [2, 1], "strides": [1, 3]}),
    ("LpPool", [PLAIN.astype(np.float16)], {"kernel_shape": [2, 3], "p": 3, "auto_pad": "SAME_UPPER"}),
    ("Hardmax", [PLAIN % 7], {"axis": 1}),
    ("Hardmax", [PLAIN.astype(np.float16) % 7], {}),
    ("TopK", [np.stack([WHOLE, WHOLE[::-1] + 4096 * TRUTH]), np.array([2])], {"axis": 1}),
    ("TopK", [WHOLE[:, [1, 0, 2]].astype(np.int64), np.array([3])], {"largest": 0}),
    ("ReduceMax", [TRUTH, np.array([1])], {}),
    ("ReduceMin", [TRUTH[:, :1]], {"keepdims": 0}),
    ("EyeLike", [WHOLE[:2]], {"k": 1, "dtype": onnx.TensorProto.FLOAT}),
    ("EyeLike", [WHOLE], {}),
    ("GatherND", [WIDE, np.array([[[0], [3], [-1]], [[2], [2], [1]]])], {"batch_dims": 1}),
    ("GatherND", [WIDE, np.array([[[1, 2], [0, -2]]] * 2)[:, :, None].repeat(4, 2)[:, 0]], {"batch_dims": 2}),
    ("Mod", [np.array([7.5, -7.5, 0.3, -409, 5, np.inf, 2, 0], np.float32), np.float32([0.1])], {"fmod": 1}),
    ("Mod", [WAVES, -WAVES[::-1] * np.float32(0.37) + np.float32(0.01)], {"fmod": 1}),
    ("Mod", [F16, np.array([0.3, np.inf, -0.7], np.float16)], {"fmod": 1}),
]


INEXACT = frozenset(
    [
        "AveragePool",
        "com.microsoft::Inverse",
        "DeformConv",
        "Det",
        "LpPool",
        "RoiAlign",
        "Celu",
        "Conv",
        "ConvTranspose",
        "Einsum",
        "HardSwish",
        "InstanceNormalization",
        "LayerNormalization",
        "LogSoftmax",
        "Mean",
        "BatchNormalization",
        "GridSample",
        "LRN",
        "Mish",
        "Pow",
        "ReduceLogSum",
        "ReduceLogSumExp",
        "Selu",
        "Softsign",
    ]
)
PLACES = np.random.default_rng(1).uniform(-1.4, 1.4, (2, 3, 4, 3)).astype(np.float32)
CASES += [
    ("GridSample", [WIDE[..., 0], PLACES[..., :2]], {"mode": mode, "padding_mode": padding, "align_corners": aligned})
    for mode in ("linear", "nearest", "cubic")
    for padding in ("zeros", "border", "reflection")
    for aligned in (0, 1)
]
CASES += [("GridSample", [WIDE, PLACES[:, None]], {"mode": mode}) for mode in ("linear", "nearest")]
VECTORS = [np.random.default_rng(k).uniform(0.5, 2, 15).astype(np.float32) for k in range(4)]
CASES += [("BatchNormalization", [PLAIN[0, 0] + 40, *VECTORS], {"epsilon": 0.1})]
CASES += [("LRN", [WIDE[..., 0]], {"size": size, "alpha": 0.5, "beta": 0.8, "bias": 1.5}) for size in (1, 3, 5)]
#: Inside, across borders, outside, smaller than an element, empty; of images of 5 rows and 15 columns.
REGIONS = np.array([[1.2, 0.7, 6.9, 3.1], [-3.3, -2.4, 4.2, 3.7], [8, 7, 12, 9], [2.3, 2.4, 2.5, 2.6], [3, 3, 3, 3]])
OF_IMAGES = np.array([0, 1, 1, 0, 1])
BINS: dict[str, Any] = {"output_height": 2, "output_width": 3}
CASES += [
    ("RoiAlign", [np.concatenate([PLAIN, -PLAIN]).astype(kind), REGIONS.astype(kind), OF_IMAGES], BINS | more)
    for kind, more in (
        (np.float32, {}),
        (np.float32, {"coordinate_transformation_mode": "output_half_pixel", "spatial_scale": 0.5}),
        (np.float16, {"sampling_ratio": 2}),
    )
]
_OFFSETS = np.random.default_rng(2).uniform(-2, 2, (2, 12, 2, 3)).astype(np.float32)
CASES += [
    ("DeformConv", [WIDE[..., 0], *rest], {"kernel_shape": [2, 3], "pads": [0, 1, 1, 1]} | attrs)
    for rest, attrs in (
        ([WIDE.reshape(4, 4, 2, 3), _OFFSETS], {}),
        ([WIDE.reshape(-1)[:48].reshape(4, 2, 2, 3), np.tile(_OFFSETS, (1, 2, 1, 1))], {"group": 2, "offset_group": 2}),
        ([WIDE.reshape(4, 4, 2, 3), _OFFSETS, WIDE[0, 0, 0, 0, :1].repeat(4), np.abs(_OFFSETS[:, 6:])], {}),
    )
]
MATRICES = np.random.default_rng(3).standard_normal((2, 3, 7, 7)).astype(np.float32)
UPSIDE_DOWN = MATRICES[0, :, ::-1] * np.tri(7, 7, 3, np.float32)[::-1]
CASES += [
    (name, [matrices], {})
    for name in ("Det", "com.microsoft::Inverse")
    for matrices in (MATRICES, MATRICES[0, 0, :1, :1], UPSIDE_DOWN)
]
SINGULAR = np.array([[0, 0, 1], [2, 0, 0], [3, 0, 1]], np.float32)
CASES += [("Det", [matrices], {}) for matrices in (SINGULAR, MATRICES[0, :, :2, :2].astype(np.float16))]
#: Inputs that say sizes, axes and places: constants.
SAID = {
    "ReduceMax": 1,
    "Reshape": 1,
    "CenterCropPad": 1,
    "Dropout": 1,
    "Squeeze": 1,
    "Split": 1,
    "Slice": 1,
    "Tile": 1,
    "OneHot": 1,
    "CumSum": 1,
    "TopK": 1,
    "Trilu": 1,
    "ReduceLogSumExp": 1,
    "ReduceL1": 1,
    "ReduceL2": 1,
    "ReduceLogSum": 1,
    "ReduceSumSquare": 1,
}


def model_of(
    type_: str, inputs: Sequence[np.ndarray], attrs: dict[str, Any]
) -> tuple[onnx.ModelProto, dict[str, np.ndarray], list[np.ndarray]]:
    """A model of one operator, its feeds, and what it gives on CPU."""
    domain, name = split_name(type_)
    names = [f"x{i}" for i in range(len(inputs))]
    made = [
        f"y{i}"
        for i in range({"Split": 2, "Dropout": 2, "MaxPool": 2, "TopK": 2, "LayerNormalization": 3}.get(type_, 1))
    ]
    fed = SAID.get(type_, len(inputs))
    infos = [
        onnx.helper.make_tensor_value_info(n, onnx.helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for n, a in zip(names[:fed], inputs[:fed], strict=True)
    ]
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node(name, names, made, domain=domain, **attrs)],
        "one",
        infos,
        [onnx.helper.make_empty_tensor_value_info(name) for name in made],
        [onnx.numpy_helper.from_array(a, n) for n, a in zip(names[fed:], inputs[fed:], strict=True)],
    )
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.shape_inference.infer_shapes(onnx.helper.make_model(graph, ir_version=10, opset_imports=opsets))
    feed = dict(zip(names[:fed], inputs[:fed], strict=True))
    return model, feed, list(alone(model, type_, inputs).run(None, feed))


def alone(model: onnx.ModelProto, type_: str, inputs: Sequence[np.ndarray]) -> Any:
    """What runs a model of one operator, or of its body, on CPU."""
    lacks = type_ in ("Where", "Trilu") or (type_ == "Gemm" and inputs[0].dtype == np.int32)  # or has a wrong one
    return ReferenceEvaluator(model) if lacks else session(model, "DISABLE_ALL")


def compared(type_: str, found: Sequence[np.ndarray], wanted: Sequence[np.ndarray], tolerance: float) -> None:
    """AssertionError where results are other than those of the operator: by any bit, or more than a tolerance."""
    for got, want in zip(found, wanted, strict=True):
        near, finite = tolerance if type_ in INEXACT else 0, want[np.isfinite(want)]
        least = near * max(1, np.abs(finite).max(initial=0)) if near else 0
        assert got.shape == want.shape
        assert np.allclose(got, want, rtol=near, atol=least, equal_nan=True), (got, want)
