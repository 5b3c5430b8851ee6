"""Operators that onnxruntime's optimisers write, each with inputs and attributes, and a model of one."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

Array = np.ndarray[Any, Any]
MS = "com.microsoft"
rng = np.random.default_rng(0)


def normal(*shape: int) -> Array:
    return rng.normal(size=shape).astype(np.float32)


def of_one(
    type_: str, inputs: list[Array | None], attrs: dict[str, Any], outputs: str, domain: str, dynamic: bool
) -> onnx.ModelProto:
    """A model of one operator; ``outputs``: 1 for each output that it gives, 0 for one left out."""
    names = ["" if a is None else f"x{i}" for i, a in enumerate(inputs)]
    results = [f"y{i}" if wanted == "1" else "" for i, wanted in enumerate(outputs)]
    node = onnx.helper.make_node(type_, names, results, name="block/one", domain=domain, **attrs)
    infos = []
    for name, array in zip(names, inputs, strict=True):
        if array is not None:
            # Batch and sequence: the sizes that are left open.
            shape = [
                f"{name}_{i}" if dynamic and array.ndim > 1 and i < 2 and array.dtype != np.float32 else d
                for i, d in enumerate(array.shape)
            ]
            if dynamic and array.ndim >= 3 and array.dtype == np.float32:
                shape[0] = "batch"
                shape[2 if array.ndim == 4 else 1] = f"sequence_{name}"
            if dynamic and type_ == "Attention" and array.dtype == np.int32:
                shape[0] = "batch"
            kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
            infos.append(onnx.helper.make_tensor_value_info(name, kind, shape))
    outs = [onnx.helper.make_empty_tensor_value_info(n) for n in results if n]
    graph = onnx.helper.make_graph([node], "one", infos, outs)
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid(MS, 1)]
    return onnx.helper.make_model(graph, ir_version=10, opset_imports=opsets)


B, S, N, D = 2, 5, 3, 4
H = N * D
X = normal(B, S, H)
TABLES = [normal(16, D // 2) for _ in range(2)]
POSITIONS = np.array([[0, 1, 2, 3, 4], [3, 7, 1, 0, 2]], np.int64)
IDS = rng.integers(0, 9, (B, S)).astype(np.int32)
KEPT = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32)
EMBEDDING = [normal(9, H), normal(7, H), normal(2, H), normal(H), normal(H)]
PACKED = [X, normal(H, 3 * H), normal(3 * H)]
QKV = [X, normal(B, 7, H), normal(B, 7, H)]

#: operator, inputs, attributes, outputs
ONE: list[tuple[str, list[Any], dict[str, Any], str]] = [
    ("FusedMatMul", [normal(2, 3, 4), normal(2, 4, 5)], {"alpha": 0.3}, "1"),
    ("FusedMatMul", [normal(2, 4, 3), normal(2, 5, 4)], {"transA": 1, "transB": 1, "alpha": 2.0}, "1"),
    ("FusedMatMul", [normal(3, 2, 4), normal(2, 4, 5)], {"transBatchA": 1}, "1"),
    ("FusedMatMul", [normal(2, 3, 4), normal(5, 2, 4)], {"transBatchB": 1, "transB": 1}, "1"),
    (
        "FusedGemm",
        [normal(3, 4), normal(5, 4), normal(5)],
        {"activation": "LeakyRelu", "activation_alpha": 0.2, "transB": 1, "alpha": 0.5, "beta": 2.0},
        "1",
    ),
    ("FusedGemm", [normal(3, 4), normal(4, 5)], {"activation": "Tanh"}, "1"),
    (
        "FusedConv",
        [normal(1, 2, 5, 5), normal(3, 2, 3, 3), normal(3)],
        {"activation": "Relu", "pads": [1, 1, 1, 1], "strides": [2, 2], "kernel_shape": [3, 3]},
        "1",
    ),
    ("FusedConv", [normal(1, 2, 5, 5), normal(2, 2, 1, 1), normal(2), normal(1, 2, 5, 5)], {"activation": "Relu"}, "1"),
    (
        "FusedConv",
        [normal(1, 2, 5, 5), normal(2, 1, 3, 3)],
        {"activation": "Clip", "activation_params": [-0.5, 0.75], "group": 2},
        "1",
    ),
    (
        "FusedConv",
        [normal(1, 2, 5, 5), normal(2, 2, 3, 3)],
        {"activation": "HardSigmoid", "activation_params": [0.1, 0.4]},
        "1",
    ),
    ("FusedConv", [normal(1, 2, 6, 7), normal(2, 2, 3, 2)], {"auto_pad": "SAME_UPPER", "strides": [2, 3]}, "1"),
    ("Gelu", [X], {}, "1"),
    ("BiasGelu", [X, normal(H)], {}, "1"),
    ("FastGelu", [X], {}, "1"),
    ("FastGelu", [X, normal(H)], {}, "1"),
    ("QuickGelu", [X], {}, "1"),
    ("QuickGelu", [X], {"alpha": 0.7}, "1"),
    ("SkipLayerNormalization", [X, normal(B, S, H), normal(H), normal(H), normal(H)], {"epsilon": 1e-5}, "1001"),
    ("SkipLayerNormalization", [X, normal(S, H), normal(H)], {}, "1"),
    ("SkipSimplifiedLayerNormalization", [X, normal(B, S, H), normal(H), normal(H)], {"epsilon": 1e-5}, "1001"),
    ("SkipSimplifiedLayerNormalization", [X, normal(B, S, H), normal(H)], {}, "1"),
    ("EmbedLayerNormalization", [IDS, KEPT, *EMBEDDING], {}, "11"),
    ("EmbedLayerNormalization", [IDS, None, *EMBEDDING[:2], None, *EMBEDDING[3:], KEPT], {"epsilon": 1e-3}, "111"),
    ("EmbedLayerNormalization", [IDS, None, *EMBEDDING[:2], None, *EMBEDDING[3:], None, IDS % 7], {}, "11"),
    ("Attention", PACKED, {"num_heads": N}, "1"),
    ("Attention", [*PACKED, KEPT], {"num_heads": N, "mask_filter_value": -500.0}, "1"),
    ("Attention", [*PACKED, KEPT.sum(axis=1).astype(np.int32)], {"num_heads": N}, "1"),
    ("Attention", [*PACKED, np.tril(np.ones((B, S, S), np.int32))], {"num_heads": N, "scale": 0.3}, "1"),
    ("Attention", [*PACKED, None, None, normal(B, N, S, S)], {"num_heads": N, "unidirectional": 1}, "1"),
    ("Attention", [X, normal(H, 2 * H + 6), normal(2 * H + 6)], {"num_heads": N, "qkv_hidden_sizes": [H, H, 6]}, "1"),
    ("MultiHeadAttention", QKV, {"num_heads": N}, "1"),
    ("MultiHeadAttention", [*QKV, normal(3 * H)], {"num_heads": N, "scale": 0.4}, "1"),
    ("MultiHeadAttention", [X, normal(B, N, 7, D), normal(B, N, 7, D)], {"num_heads": N}, "1"),
    ("MultiHeadAttention", [*QKV, None, np.array([[1] * 6 + [0], [1] * 7], np.int32)], {"num_heads": N}, "1"),
    ("MultiHeadAttention", [X, X, X, None, None, normal(1, N, S, S)], {"num_heads": N, "unidirectional": 1}, "1"),
    ("RotaryEmbedding", [X, POSITIONS, *TABLES], {"num_heads": N}, "1"),
    ("RotaryEmbedding", [X, np.array([2], np.int64), *TABLES], {}, "1"),
    ("RotaryEmbedding", [normal(B, N, S, D), POSITIONS, *TABLES], {"interleaved": 1}, "1"),
    ("RotaryEmbedding", [normal(B, S, N * 8), POSITIONS, *TABLES], {"num_heads": N, "rotary_embedding_dim": 4}, "1"),
]


#: The same of ai.onnx: operators that onnxruntime's optimisers write there, and one without a rule of its own.
PLAIN: list[tuple[str, list[Any], dict[str, Any], str]] = [
    ("SimplifiedLayerNormalization", [X, normal(H)], {"epsilon": 1e-3}, "1"),
    ("SimplifiedLayerNormalization", [X, normal(S, H)], {"axis": 1}, "11"),
    ("MeanVarianceNormalization", [normal(2, 3, 4, 5)], {}, "1"),
    ("MeanVarianceNormalization", [normal(2, 3, 4, 5) + 3], {"axes": [1, 3]}, "1"),
]
