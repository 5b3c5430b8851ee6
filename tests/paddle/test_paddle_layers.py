"""Layers and functions with every argument of Paddle's signature (2.6), by name: the same program as with our own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import amp_transpiler as amp
from amp_transpiler import nn
from amp_transpiler.nn import functional as F
from tests.helpers.building import building

DATA = {
    "image": ([None, 4, 8, 6], "float32"),
    "line": ([None, 4, 9], "float32"),
    "cube": ([None, 2, 4, 5, 6], "float32"),
    "rows": ([None, 6], "float32"),
    "other": ([None, 6], "float32"),
    "ids": ([None, 5], "int64"),
    "label": ([None, 1], "int64"),
    "square": ([6, 6], "float32"),
}
COMMON = {"param_attr": None, "bias_attr": None, "act": None, "name": None}
CONV = {"stride": 1, "padding": 0, "dilation": 1, "groups": None, "use_cudnn": True, **COMMON}
POOL = {"stride": 2, "padding": 0, "ceil_mode": False, "name": None}
#: Ours, and Paddle's keywords with its own default values; "@image" is an input.
LAYERS: dict[str, tuple[Callable[[dict[str, Any]], Any], str, dict[str, Any]]] = {
    "conv2d": (
        lambda v: nn.conv2d(v["image"], 3, 3),
        "nn.conv2d",
        {"input": "@image", "num_filters": 3, "filter_size": 3, **CONV, "data_format": "NCHW"},
    ),
    "conv3d": (
        lambda v: nn.conv3d(v["cube"], 3, 2),
        "nn.conv3d",
        {"input": "@cube", "num_filters": 3, "filter_size": 2, **CONV, "data_format": "NCDHW"},
    ),
    "conv2d_transpose": (
        lambda v: nn.conv2d_transpose(v["image"], 3, filter_size=3),
        "nn.conv2d_transpose",
        {"input": "@image", "num_filters": 3, "output_size": None, "filter_size": 3, **CONV, "data_format": "NCHW"},
    ),
    "conv3d_transpose": (
        lambda v: nn.conv3d_transpose(v["cube"], 3, filter_size=3),
        "nn.conv3d_transpose",
        {"input": "@cube", "num_filters": 3, "output_size": None, "filter_size": 3, **CONV, "data_format": "NCDHW"},
    ),
    "batch_norm": (
        lambda v: nn.batch_norm(v["image"]),
        "nn.batch_norm",
        {
            "input": "@image",
            "is_test": False,
            "momentum": 0.9,
            "epsilon": 1e-5,
            **COMMON,
            "data_layout": "NCHW",
            "in_place": False,
            "moving_mean_name": None,
            "moving_variance_name": None,
            "do_model_average_for_mean_and_var": True,
            "use_global_stats": False,
        },
    ),
    "instance_norm": (
        lambda v: nn.instance_norm(v["image"]),
        "nn.instance_norm",
        {"input": "@image", "epsilon": 1e-5, "param_attr": None, "bias_attr": None, "name": None},
    ),
    "group_norm": (
        lambda v: nn.group_norm(v["image"], 2),
        "nn.group_norm",
        {"input": "@image", "groups": 2, "epsilon": 1e-5, **COMMON, "data_layout": "NCHW"},
    ),
    "layer_norm": (
        lambda v: nn.layer_norm(v["image"], begin_norm_axis=1),
        "nn.layer_norm",
        {"input": "@image", "scale": True, "shift": True, "begin_norm_axis": 1, "epsilon": 1e-5, **COMMON},
    ),
    "fc": (
        lambda v: nn.fc(v["image"], 5),
        "nn.fc",
        {
            "x": "@image",
            "size": 5,
            "num_flatten_dims": 1,
            "weight_attr": None,
            "bias_attr": None,
            "activation": None,
            "name": None,
        },
    ),
    "fluid fc": (
        lambda v: nn.fc(v["rows"], 5, act="tanh"),
        "nn.fc",
        {"input": "@rows", "size": 5, "num_flatten_dims": -1, **COMMON, "act": "tanh"},
    ),
    "embedding": (
        lambda v: nn.embedding(v["ids"], [9, 3]),
        "nn.embedding",
        {
            "input": "@ids",
            "size": [9, 3],
            "is_sparse": True,
            "is_distributed": False,
            "padding_idx": None,
            "param_attr": None,
            "dtype": "float32",
        },
    ),
    "prelu": (
        lambda v: nn.prelu(v["image"], "channel"),
        "nn.prelu",
        {"x": "@image", "mode": "channel", "param_attr": None, "data_format": "NCHW", "name": None},
    ),
    "pool2d": (
        lambda v: F.avg_pool2d(v["image"], 2, 1),
        "nn.pool2d",
        {
            "input": "@image",
            "pool_size": 2,
            "pool_type": "avg",
            "pool_stride": 1,
            "pool_padding": 0,
            "global_pooling": False,
            "use_cudnn": True,
            "ceil_mode": False,
            "name": None,
            "exclusive": True,
            "data_format": "NCHW",
        },
    ),
    "dropout": (
        lambda v: F.dropout(v["rows"], 0.3),
        "nn.functional.dropout",
        {"x": "@rows", "p": 0.3, "axis": None, "training": True, "mode": "upscale_in_train", "name": None},
    ),
    "fluid dropout": (
        lambda v: F.dropout(v["rows"], 0.3, mode="downscale_in_infer"),
        "nn.dropout",
        {
            "x": "@rows",
            "dropout_prob": 0.3,
            "is_test": False,
            "seed": None,
            "name": None,
            "dropout_implementation": "downscale_in_infer",
        },
    ),
    "max_pool2d": (
        lambda v: F.max_pool2d(v["image"], 2),
        "nn.functional.max_pool2d",
        {"x": "@image", "kernel_size": 2, **POOL, "return_mask": False, "data_format": "NCHW"},
    ),
    "avg_pool2d": (
        lambda v: F.avg_pool2d(v["image"], 2),
        "nn.functional.avg_pool2d",
        {"x": "@image", "kernel_size": 2, **POOL, "exclusive": True, "divisor_override": None, "data_format": "NCHW"},
    ),
    "max_pool1d": (
        lambda v: F.max_pool1d(v["line"], 2),
        "nn.functional.max_pool1d",
        {"x": "@line", "kernel_size": 2, **POOL, "return_mask": False},
    ),
    "max_pool3d": (
        lambda v: F.max_pool3d(v["cube"], 2),
        "nn.functional.max_pool3d",
        {"x": "@cube", "kernel_size": 2, **POOL, "return_mask": False, "data_format": "NCDHW"},
    ),
    "adaptive_avg_pool2d": (
        lambda v: F.adaptive_avg_pool2d(v["image"], 2),
        "nn.functional.adaptive_avg_pool2d",
        {"x": "@image", "output_size": 2, "data_format": "NCHW", "name": None},
    ),
    "adaptive_max_pool2d": (
        lambda v: F.adaptive_max_pool2d(v["image"], 2),
        "nn.functional.adaptive_max_pool2d",
        {"x": "@image", "output_size": 2, "return_mask": False, "name": None},
    ),
    "cross_entropy": (
        lambda v: F.cross_entropy(v["rows"], v["label"]),
        "nn.functional.cross_entropy",
        {
            "input": "@rows",
            "label": "@label",
            "weight": None,
            "ignore_index": -100,
            "reduction": "mean",
            "soft_label": False,
            "axis": -1,
            "use_softmax": True,
            "label_smoothing": 0.0,
            "name": None,
        },
    ),
    "softmax_with_cross_entropy": (
        lambda v: F.softmax_with_cross_entropy(v["rows"], v["label"]),
        "nn.functional.softmax_with_cross_entropy",
        {
            "logits": "@rows",
            "label": "@label",
            "soft_label": False,
            "ignore_index": -100,
            "numeric_stable_mode": True,
            "return_softmax": False,
            "axis": -1,
        },
    ),
    "interpolate": (
        lambda v: F.interpolate(v["image"], scale_factor=2),
        "nn.functional.interpolate",
        {
            "x": "@image",
            "size": None,
            "scale_factor": 2,
            "mode": "nearest",
            "align_corners": False,
            "align_mode": 0,
            "data_format": "NCHW",
            "name": None,
        },
    ),
    "softmax": (
        lambda v: F.softmax(v["rows"]),
        "nn.functional.softmax",
        {"x": "@rows", "axis": -1, "dtype": None, "name": None},
    ),
    "fluid softmax": (
        lambda v: F.softmax(v["rows"]),
        "nn.functional.softmax",
        {"input": "@rows", "use_cudnn": True, "name": None, "axis": -1},
    ),
    "log_softmax": (
        lambda v: F.log_softmax(v["rows"]),
        "nn.functional.log_softmax",
        {"x": "@rows", "axis": -1, "dtype": None, "name": None},
    ),
    "softplus": (
        lambda v: F.softplus(v["rows"]),
        "nn.functional.softplus",
        {"x": "@rows", "beta": 1, "threshold": 20, "name": None},
    ),
    "normalize": (
        lambda v: F.normalize(v["rows"]),
        "nn.functional.normalize",
        {"x": "@rows", "p": 2, "axis": 1, "epsilon": 1e-12, "name": None},
    ),
    "conv2d function": (
        lambda v: F.conv2d(v["image"], nn.create_parameter([2, 4, 3, 3], name="w")),
        "nn.functional.conv2d",
        {
            "x": "@image",
            "weight": "@w",
            "bias": None,
            "stride": 1,
            "padding": 0,
            "dilation": 1,
            "groups": 1,
            "data_format": "NCHW",
            "name": None,
        },
    ),
    "embedding function": (
        lambda v: F.embedding(v["ids"], nn.create_parameter([9, 3], name="w")),
        "nn.functional.embedding",
        {"x": "@ids", "weight": "@w", "padding_idx": None, "sparse": False, "name": None},
    ),
    "one_hot": (
        lambda v: F.one_hot(v["ids"], 9),
        "nn.functional.one_hot",
        {"x": "@ids", "num_classes": 9, "name": None},
    ),
    "pad": (
        lambda v: F.pad(v["image"], [1, 1, 2, 2]),
        "nn.functional.pad",
        {"x": "@image", "pad": [1, 1, 2, 2], "mode": "constant", "value": 0.0, "data_format": "NCHW", "name": None},
    ),
    "mean": (lambda v: F.mean(v["rows"], 1), "mean", {"x": "@rows", "axis": 1, "keepdim": False, "name": None}),
    "sum": (
        lambda v: F.sum(v["rows"], 1),
        "sum",
        {"x": "@rows", "axis": 1, "dtype": None, "keepdim": False, "name": None},
    ),
    "fluid reduce_sum": (
        lambda v: F.sum(v["rows"], 1),
        "sum",
        {"input": "@rows", "dim": 1, "keep_dim": False, "name": None},
    ),
    "matmul": (
        lambda v: F.matmul(v["rows"], v["other"], transpose_y=True),
        "matmul",
        {"x": "@rows", "y": "@other", "transpose_x": False, "transpose_y": True, "name": None},
    ),
    "concat": (
        lambda v: F.concat([v["rows"], v["other"]], 1),
        "concat",
        {"x": ["@rows", "@other"], "axis": 1, "name": None},
    ),
    "reshape": (lambda v: F.reshape(v["rows"], [-1, 3]), "reshape", {"x": "@rows", "shape": [-1, 3], "name": None}),
    "topk": (
        lambda v: F.topk(v["rows"], 2)[0],
        "topk",
        {"x": "@rows", "k": 2, "axis": None, "largest": True, "sorted": True, "name": None},
    ),
    "cumsum": (lambda v: F.cumsum(v["rows"], 1), "cumsum", {"x": "@rows", "axis": 1, "dtype": None, "name": None}),
    "argmax": (
        lambda v: F.argmax(v["rows"], 1),
        "argmax",
        {"x": "@rows", "axis": 1, "keepdim": False, "dtype": "int64", "name": None},
    ),
    "scale": (
        lambda v: F.scale(v["rows"], 2.0, 1.0),
        "scale",
        {"x": "@rows", "scale": 2.0, "bias": 1.0, "bias_after_scale": True, "act": None, "name": None},
    ),
    "accuracy": (
        lambda v: F.accuracy(v["rows"], v["label"], 2),
        "accuracy",
        {"input": "@rows", "label": "@label", "k": 2, "correct": None, "total": None},
    ),
    "elementwise": (
        lambda v: F.add(v["rows"], v["other"]),
        "nn.functional.elementwise_add",
        {"x": "@rows", "y": "@other", "axis": -1, "act": None, "name": None},
    ),
}


def described(build: Callable[[dict[str, Any]], Any]) -> list[tuple[Any, ...]]:
    """The operators of a program, with their attributes, and the parameters that it has."""
    with building() as (main, _):
        build({name: nn.data(name, shape, dtype) for name, (shape, dtype) in DATA.items()})
    return [
        (
            op.type,
            dict(op.attrs),
            [getattr(v, "shape", None) for v in op.inputs],
            [getattr(v, "dtype", None) for v in op.outputs],
        )
        for op in main.operators
    ] + [(v.name, v.shape) for v in main.parameters]


@pytest.mark.parametrize("name", LAYERS)
def test_every_keyword_of_paddle_is_taken(name: str) -> None:
    ours, path, keywords = LAYERS[name]

    def theirs(variables: dict[str, Any]) -> None:
        if "@w" in keywords.values():
            variables["w"] = nn.create_parameter([2, 4, 3, 3] if "conv" in name else [9, 3], name="w")

        def value(given: Any) -> Any:
            if isinstance(given, list):
                return [value(item) for item in given]
            return variables[given[1:]] if isinstance(given, str) and given.startswith("@") else given

        called: Any = amp
        for part in path.split("."):
            called = getattr(called, part)
        called(**{key: value(given) for key, given in keywords.items()})

    assert described(theirs) == described(ours)
