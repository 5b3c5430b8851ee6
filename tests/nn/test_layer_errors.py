"""What layers refuse, and that a refused layer leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler import nn
from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.nn import functional as F
from tests.helpers.building import building

LINE, IMAGE, LAST, CUBE = (2, 4, 9), (2, 4, 8, 6), (2, 8, 6, 4), (2, 4, 4, 5, 6)


def image() -> amp.Variable:
    return nn.data("image", [None, 4, 8, 6])


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "padding": (lambda: nn.conv2d(image(), 2, 3, padding="half"), r'conv2d: padding=\'half\'; .* "SAME" or "VALID"'),
    "pairs": (lambda: nn.conv2d(image(), 2, 3, padding=[[0, 0], [1, 1], [1, 1], [1, 1]]), r"\[0, 0\] for batch and"),
    "same dilated": (
        lambda: nn.conv2d(image(), 2, 3, padding="SAME", dilation=2),
        r'padding="SAME" goes with dilation 1',
    ),
    "layout": (lambda: nn.conv2d(image(), 2, 3, data_format="CHWN"), r"data_format is 'CHWN'; expected one of NCHW"),
    "rank": (lambda: nn.conv1d(image(), 2, 3), r"conv1d: x 'image' .* must have 3 dimensions, not 4"),
    "kernel": (
        lambda: nn.conv3d(nn.data("x", [1, 1, 4, 4, 4]), 2, (1, 2)),
        r"filter_size must be one integer or three",
    ),
    "no size": (lambda: nn.conv2d_transpose(image(), 2), r"one of filter_size and output_size must be given"),
    "far size": (
        lambda: nn.conv2d_transpose(image(), 2, output_size=30, filter_size=3, stride=2),
        r"output_size=30 is out of reach: it can be \[17, 13\]",
    ),
    "no filter": (lambda: nn.conv2d_transpose(image(), 2, output_size=3), r"no filter makes output_size=3"),
    "weight": (lambda: F.conv2d(image(), nn.create_parameter([2, 3, 3, 3])), r"weight .* must have 4 in dimension 1"),
    "groups": (lambda: nn.group_norm(image(), 3), r"group_norm: groups=3 must divide the 4 channels"),
    "epsilon": (lambda: nn.instance_norm(image(), epsilon=-1), r"epsilon must not be negative"),
    "open length": (lambda: nn.fc(nn.data("x", [None, None, 4]), 2), r"dimension 1 of x .*; num_flatten_dims=-1 keeps"),
    "prelu": (lambda: nn.prelu(image(), "each"), r"prelu: mode is 'each'; expected one of all"),
    "padding row": (
        lambda: nn.embedding(nn.data("i", [2], "int64"), [3, 4], padding_idx=3),
        r"padding_idx=3 is outside",
    ),
    "rate": (lambda: amp.ParamAttr(name="w", learning_rate=-0.1), r"ParamAttr: learning_rate is a factor"),
    "shared by name": (
        lambda: nn.lstm(nn.data("x", [None, 5, 4]), 4, param_attr=amp.ParamAttr(name="w")),
        r"lstm: param_attr names one parameter, and the layer has 2",
    ),
    "shared bias": (
        lambda: nn.gru(nn.data("x", [None, 5, 4]), 4, num_layers=2, bias_attr="b"),
        r"gru: bias_attr names",
    ),
    "act": (lambda: nn.conv2d(image(), 2, 3, act="leaky_relu"), r"act='leaky_relu' does not say its constants"),
    "pool size": (lambda: nn.pool2d(image()), r"must be at least 1, not -1"),
    "attr name": (lambda: amp.ParamAttr(name=""), r"ParamAttr: '' cannot be a name"),
    "seed": (lambda: F.dropout(image(), seed=3), r"dropout: seed=3 .* amp.seed"),
    "mask axis": (lambda: F.dropout(image(), axis=1), r"dropout: axis=1 .* every element has a mask of its own"),
    "indices": (lambda: F.max_pool2d(image(), 2, return_mask=True), r"max_pool2d: return_mask=True"),
    "distributed": (
        lambda: nn.embedding(nn.data("i", [2], "int64"), [3, 4], is_distributed=True),
        "is_distributed=True",
    ),
    "lod": (lambda: nn.data("x", [2], lod_level=1), "data: lod_level=1 .* sequence_length"),
    "clip": (lambda: F.clip(image(), 1, 0), r"clip: min 1 is above max 0"),
    "no bound": (lambda: F.clip(image()), r"one of min and max must be given"),
    "topk": (lambda: F.topk(image(), 7), r"k=7 is more than dimension 3"),
    "pad": (lambda: F.pad(image(), [1, 1, 1]), r"pad has 3 numbers; .* takes 8, or 4"),
    "pad mode": (lambda: F.pad(image(), 1, mode="edge"), r"mode is 'edge'; expected one of constant, reflect"),
    "stack": (lambda: F.stack([image()], 5), r"axis 5 is outside the 5 dimensions"),
    "mode": (
        lambda: F.interpolate(image(), 4, mode="linear"),
        r"mode of an image of 2 axes is 'linear'; expected one of nearest",
    ),
    "two sizes": (lambda: F.interpolate(image(), 4, 2.0), r"one of size and scale_factor"),
    "shuffle": (lambda: F.pixel_shuffle(image(), 3), r"4 channels .* no multiple of 3"),
    "smoothing": (
        lambda: F.cross_entropy(image(), nn.data("y", [None, 4, 8], "int64"), label_smoothing=1.0),
        r"label_smoothing must be in \[0, 1\)",
    ),
    "soft": (lambda: F.cross_entropy(image(), nn.data("y", [None, 4, 8, 5]), soft_label=True), r"must have 6 classes"),
    "dot": (lambda: F.dot(image(), nn.data("other", [1])), r"dot: .* 1 or 2 dimensions, not 4"),
    "gelu": (lambda: F.gelu(image(), "exact"), r"gelu: approximate is 'exact'; expected one of none, tanh"),
    "hardtanh": (lambda: F.hardtanh(image(), 2, -2), r"hardtanh: min 2 is above max -2"),
    "NaN": (lambda: F.clip(image(), max=float("nan")), r"clip: max is no number"),
    "one pad": (lambda: F.pad(nn.data("v", [3]), 1), r"one number pads the axes of an image, and 'v' .* is none"),
    "line pad": (lambda: F.pad(nn.data("v", [3]), [1]), r"pad has 1 numbers; 'v' \(float32 \[3\]\) takes 2$"),
    "beyond": (lambda: F.unsqueeze(image(), 10**30), r"axis is 10+; expected|axis is 10+, more than int64 holds"),
    "no integers": (lambda: F.add(nn.data("j", [3], "int64"), 10**30), r"is no int64, the element type of 'j'"),
    "strings": (lambda: F.add(image(), ["a"]), r"add: \['a'\] is no float32"),
    "infinite": (lambda: F.arange(0, float("inf")), r"arange: end is inf; expected a finite number"),
    "a variable as type": (lambda: F.cast(image(), nn.data("y", [3])), r"unknown element type"),
    "norm": (lambda: F.norm(image(), p=0.5), r"norm: p is 0.5; expected 1 or more"),
}
WRONG_TYPES: dict[str, tuple[Callable[[], Any], str]] = {
    "weight": (
        lambda: F.cross_entropy(nn.data("x", [2, 3]), nn.data("y", [2], "int64"), nn.create_parameter([3])),
        r"cross_entropy: reduction is a Variable; pass class weights by name",
    ),
    "flag": (lambda: F.max_pool2d(image(), 2, ceil_mode="yes"), r"ceil_mode is 'yes'; expected True or False"),
    "attr": (lambda: nn.create_parameter([2], attr="w"), r"attr must be an amp.ParamAttr"),
    "penalty": (lambda: amp.ParamAttr(regularizer=1e-4), r"ParamAttr: regularizer must be an amp.regularizer.L2Decay"),
    "flatten by place": (lambda: nn.fc(image(), 5, 2), r"fc: act must be the name of an activation, not 2; .* by name"),
    "training": (lambda: F.dropout(image(), 0.1, 0), r"dropout: training is 0; expected True or False"),
    "slope": (lambda: F.leaky_relu(image(), "0.1"), r"leaky_relu: negative_slope must be a number"),
    "momentum": (lambda: nn.batch_norm(image(), momentum=True), r"batch_norm: momentum must be a number, not True"),
    "list without dimensions": (lambda: F.reshape(image(), np.array(3)), r"shape must be a list of integers"),
    "transposed": (
        lambda: F.matmul((x := image()), x, False, "False"),
        r"transpose_y is 'False'; expected True or False",
    ),
    "overwrite": (
        lambda: F.scatter((x := image()), nn.data("i", [2], "int64"), x, "no"),
        r"overwrite is 'no'; expected True or False",
    ),
    "sizes": (lambda: F.layer_norm(image(), [None]), r"layer_norm: normalized_shape must be an integer, not None"),
    "axis": (lambda: F.roll(image(), 1, "a"), r"roll: axis must be an integer, not 'a'"),
    "equation": (lambda: F.einsum(image()), r"einsum: the equation comes first"),
}


@pytest.mark.parametrize("name", [*BAD, *(f"type: {name}" for name in WRONG_TYPES)])
def test_bad_argument(name: str) -> None:
    wrong = name.startswith("type: ")
    build, message = WRONG_TYPES[name[6:]] if wrong else BAD[name]
    with building(), pytest.raises(ArgumentTypeError if wrong else ArgumentError, match=message):
        build()


def test_a_refused_layer_leaves_nothing_behind() -> None:
    with building() as (main, startup):
        x = nn.data("x", [None, 4, 8, 6])
        before = list(main.variables)
        for call in (
            lambda: nn.conv2d(x, 3, 9),
            lambda: nn.conv2d(x, 3, 3, padding="half"),
            lambda: nn.group_norm(x, 3),
            lambda: nn.conv2d_transpose(x, 2, output_size=30, filter_size=3),
            lambda: nn.prelu(x, "each"),
            lambda: nn.batch_norm(x, momentum=2),
            lambda: nn.conv2d(x, 3, 3, data_format="NCL"),
            lambda: F.argmax(x, dtype="nonsense"),
            lambda: F.std(x, 9),
            lambda: F.cosine_similarity(x, x, 7),
        ):
            with pytest.raises(ArgumentError):
                call()
        assert list(main.variables) == before and not main.operators and not list(startup.variables)
